"""unbroken in the scoreboard: one local cluster with the real operator, a job for each trial."""

from __future__ import annotations

import base64
import json
import re
import shutil
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar

import yaml
from recovery_launch import UP, Unavailable, bring_up
from scoreboard_launch import RESTARTS_MAX, SCRIPT, Launcher, Trial
from scoreboard_logs import Word
from scoreboard_trials import AGENTS, RANKS_PER_AGENT

from unbroken.core.job.recovery.symptoms import BY_DETECTOR
from unbroken.spec.job.codec import incident_from
from unbroken.spec.keys import DETECTORS

NODES = 6
JOBS = "/apis/sagemaker.amazonaws.com/v1/namespaces/default/hyperpodpytorchjobs"
INCIDENTS = "/apis/unbroken.dev/v1/namespaces/default/incidents"
CORE = "/api/v1/namespaces/default"
SETTLE_SECONDS, LOOK_SECONDS = 15.0, 0.5
TRIES = 5
"""Attempts to read: a server that paused with its machine drops connections."""
COLLECTIVE_SECONDS = 1800.0
_RANK = re.compile(r"\brank (\d+)")
_POD = re.compile(r"-(\d+)$")
_REASONS = frozenset(BY_DETECTOR.values())
"""Reasons of the events of detectors that only warn."""


class Server:
    """Requests to the API server of the local cluster."""

    def __init__(self, kubeconfig: Path) -> None:
        config = yaml.safe_load(kubeconfig.read_text())
        cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
        self._url, self._token = cluster["server"], user["token"]
        authority = base64.b64decode(cluster.get("certificate-authority-data", "")).decode()
        self._context = ssl.create_default_context(cadata=authority) if authority else None

    def __call__(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, headers, method=method)
        for _ in range(TRIES - 1 if method == "GET" else 0):
            try:
                return self._answer(request)
            except urllib.error.HTTPError:
                raise
            except (ConnectionError, urllib.error.URLError):
                time.sleep(LOOK_SECONDS)
        return self._answer(request)

    def _answer(self, request: urllib.request.Request) -> dict[str, Any]:
        with urllib.request.urlopen(request, context=self._context, timeout=30) as answer:
            found: dict[str, Any] = json.loads(answer.read())
            return found


@dataclass
class ClusterJob:
    """A job of the cluster."""

    server: Server
    name: str
    _next_look: float = 0.0
    _ending: str = ""

    def standing(self) -> tuple[str, str]:
        """Return the newest condition that is true, and its message."""
        job = self.server("GET", f"{JOBS}/{self.name}")
        listed = (job.get("status") or {}).get("conditions") or []
        true = [one for one in listed if one["status"] == "True"]
        return (true[-1]["type"], true[-1]["message"]) if true else ("", "")

    def ended(self) -> str:
        """Return why the job can never continue; empty while it may."""
        if not self._ending and time.monotonic() > self._next_look:
            self._next_look = time.monotonic() + LOOK_SECONDS
            kind, message = self.standing()
            self._ending = f"failed: {message[:300]}" if kind == "Failed" else ""
        return self._ending

    def settle(self) -> None:
        """Wait until all records of the job's faults are written."""
        until = time.monotonic() + SETTLE_SECONDS
        while time.monotonic() < until and self.standing()[0] not in ("Completed", "Failed"):
            time.sleep(LOOK_SECONDS)

    def words(self, ranks: dict[int, int]) -> list[Word]:
        """Return the incidents, and the warnings of detectors that do not act."""
        if not self._ending:
            self.settle()
        listed = self.server("GET", INCIDENTS)["items"]
        jobs = [one for one in listed if one["metadata"]["name"].rpartition("-")[0] == self.name]
        found = []
        for one in (incident_from(content)[0] for content in jobs):
            sure = f" ({one.confidence}: {one.blame})" if one.confidence else ""
            text = f"{one.culprit.fault}: {one.culprit.text}{sure}"
            pod = _POD.search(one.culprit.pod or "")
            first = int(pod[1]) * RANKS_PER_AGENT if pod else 0
            mine = tuple(range(first, first + RANKS_PER_AGENT))
            mine = mine if pod and one.culprit.rank is None else ()
            found.append(Word(one.detected_at, one.culprit.rank, text, ranks=mine))
        return sorted([*found, *self._warnings()], key=lambda word: word.at)

    def _warnings(self) -> list[Word]:
        listed = self.server("GET", f"{CORE}/events")["items"]
        found = []
        for one in listed:
            about = one["involvedObject"]
            if about["name"] != self.name or one["reason"] not in _REASONS:
                continue
            said = one.get("eventTime") or one["firstTimestamp"]
            rank = _RANK.search(one["message"])
            text = f"{one['reason']}: {one['message']}"
            at = datetime.fromisoformat(said).timestamp()
            found.append(Word(at, int(rank[1]) if rank else None, text, acts=False))
        return found

    def stop(self) -> None:
        """Delete the job, and wait until its pods are gone."""
        with suppress(urllib.error.HTTPError):
            self.server("DELETE", f"{JOBS}/{self.name}")
        until = time.monotonic() + SETTLE_SECONDS
        pods = f"{CORE}/pods?labelSelector=HPJob%3D{self.name}"
        while time.monotonic() < until and self.server("GET", pods)["items"]:
            time.sleep(LOOK_SECONDS)


class Unbroken(Launcher):
    """unbroken with its defaults, and a script that calls `unbroken.worker`."""

    name = "unbroken"
    settings = "defaults; the script calls unbroken.worker"
    uses: ClassVar[tuple[str, ...]] = ("progress",)
    annotations: ClassVar[dict[str, str]] = {}
    _shared: ClassVar[dict[Path, Server]] = {}
    _jobs: ClassVar[int] = 0

    def prepare(self, base: Path) -> None:
        """Start the cluster, unless another launcher of unbroken has started it."""
        self._cluster = base / "cluster"
        if self._cluster not in self._shared:
            if why_not := bring_up(self._cluster, NODES):
                raise Unavailable(f"unbroken up: {why_not}")
            self._shared[self._cluster] = Server(self._cluster / "kubeconfig")
        self._server = self._shared[self._cluster]

    def start(self, trial: Trial) -> ClusterJob:
        """Apply a job."""
        name = f"trial-{trial.directory.name}"
        self._server("POST", JOBS, self.manifest(name, trial))
        return ClusterJob(self._server, name)

    def manifest(self, name: str, trial: Trial) -> dict[str, Any]:
        """Return the job: two pods on two nodes."""
        command = f"exec hyperpodrun --nnodes=$NNODES --nproc-per-node=$NPROC_PER_NODE {SCRIPT}"
        env = trial.environment(self.uses, COLLECTIVE_SECONDS)
        if trial.memory_groups:
            env["MEMORY_GROUPS"] = " ".join(map(str, trial.memory_groups))
            # Kubernetes makes $ of $$.
            words = 'set -- $MEMORY_GROUPS; [ "${UNBROKEN_POD##*-}" = 1 ] && shift; '
            command = f"{words}echo $$$$ > $1/cgroup.procs && {command}"
        container = {
            "name": "train",
            "image": "none",
            "command": ["/bin/sh", "-c", command],
            "env": [{"name": key, "value": value} for key, value in env.items()],
        }
        terms = [
            {
                "labelSelector": {"matchLabels": {"HPJob": name}},
                "topologyKey": "kubernetes.io/hostname",
            }
        ]
        apart = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
        pods = {"terminationGracePeriodSeconds": 2, "containers": [container], "affinity": apart}
        replica = {"name": "pods", "replicas": AGENTS, "template": {"spec": pods}}
        return {
            "apiVersion": "sagemaker.amazonaws.com/v1",
            "kind": "HyperPodPyTorchJob",
            "metadata": {"name": name, "annotations": self.annotations},
            "spec": {
                "nprocPerNode": str(RANKS_PER_AGENT),
                "replicaSpecs": [replica],
                "runPolicy": {"jobMaxRetryCount": RESTARTS_MAX},
            },
        }

    def close(self) -> None:
        """Remove the cluster, but keep its log."""
        if self._shared.pop(self._cluster, None) is None:
            return
        with suppress(FileNotFoundError):
            shutil.copy(self._cluster / "up.log", self._cluster.parent)
        words = [*UP, "down", "--dir", str(self._cluster), "--purge"]
        subprocess.run(words, capture_output=True, check=False)


class UnbrokenOutput(Unbroken):
    """unbroken with a script that only prints."""

    name = "unbroken-output"
    settings = "defaults; the script only prints a line each second"
    mode = "output"
    uses: ClassVar[tuple[str, ...]] = ()


class UnbrokenSilence(Unbroken):
    """unbroken with a script that neither reports nor prints."""

    name = "unbroken-silence"
    settings = "defaults; the script tells and prints nothing"
    mode = "silence"
    uses: ClassVar[tuple[str, ...]] = ()


class UnbrokenAct(Unbroken):
    """unbroken with every detector in mode `act`."""

    name = "unbroken-act"
    settings = f"annotation {DETECTORS}: '*=act'; the script calls unbroken.worker"
    annotations: ClassVar[dict[str, str]] = {DETECTORS: "*=act"}
