"""Stages of nodes and pods, with the times at which the API reported them."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from dataclasses import dataclass
from typing import Any, Self

from tests.e2e.clusters import Cluster
from tests.realnodes.jobs import Job
from unbroken.spec.keys import HEALTH

Object = dict[str, Any]


@dataclass(frozen=True)
class Sight:
    """One version of an object, and when it was seen."""

    at: float
    kind: str
    """`ADDED`, `MODIFIED` or `DELETED`."""
    object: Object


class Watch:
    """Watches a path of the API by kubectl, from its start until its block ends."""

    def __init__(self, cluster: Cluster, path: str) -> None:
        self._command = [cluster.kubectl_path, "get", "--raw", f"{path}?watch=true"]
        self._environment = cluster.environment
        self._seen: list[Sight] = []

    def __enter__(self) -> Self:
        read, write = os.pipe()
        self._process = subprocess.Popen(self._command, stdout=write, env=self._environment)
        os.close(write)
        self._thread = threading.Thread(target=self._follow, args=(read,))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._thread.join()

    def _follow(self, descriptor: int) -> None:
        with open(descriptor, encoding="utf-8") as lines:
            for line in lines:
                if line.endswith("\n"):
                    event = json.loads(line)
                    self._seen.append(Sight(time.time(), event["type"], event["object"]))

    def of(self, name: str) -> list[Sight]:
        """Return the versions of one object that were seen."""
        return [one for one in list(self._seen) if one.object["metadata"].get("name") == name]


class Stages:
    """The stages of a fault, from the line in the kernel's log to the replacement of the node."""

    def __init__(self, cluster: Cluster, job: Job) -> None:
        self._job = job
        self._nodes = Watch(cluster, "/api/v1/nodes")
        self._records = Watch(cluster, "/apis/unbroken.dev/v1/noderecords")
        self.said_at = 0.0
        """Time at which the line was written."""

    def __enter__(self) -> Self:
        self._nodes.__enter__()
        self._records.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._nodes.__exit__()
        self._records.__exit__()

    def _repairs(self, node: str) -> list[tuple[float, Object]]:
        found = []
        for sight in self._records.of(node):
            spec = sight.object.get("spec") or {}
            newest = spec.get("repair") or next(reversed(spec.get("history") or []), None)
            if newest is not None:
                found.append((sight.at, newest))
        return found

    def repair(self, node: str) -> Object:
        """Return the newest repair of a node; empty: there is none yet."""
        return next((repair for _, repair in reversed(self._repairs(node))), {})

    def was_marked(self, node: str, health: str, condition: str) -> bool:
        """Return whether a node has had label, taint and condition at once."""
        return any(
            (one.object["metadata"].get("labels") or {}).get(HEALTH) == health
            and any(taint["key"] == HEALTH for taint in one.object["spec"].get("taints") or ())
            and _is_true(one.object, condition)
            for one in self._nodes.of(node)
        )

    def times(self, node: str, condition: str) -> dict[str, float]:
        """Return the seconds from the line in the log to each stage that was reached."""
        lives = self._job.lives()
        newest = max(one.attempt for one in lives)
        reached = {"condition on the node": _first(self._nodes.of(node), condition)}
        reached["workers stopped"] = max(one.ended_at for one in lives if one.attempt == newest - 1)
        reached["workers run again"] = max(one.began_at for one in lives if one.attempt == newest)
        for state in ("Draining", "Acting", "Checking", "Done"):
            seen = (at for at, one in self._repairs(node) if one["state"] == state)
            if (at := next(seen, None)) is not None:
                reached[f"repair {state}"] = at
        return {stage: at - self.said_at for stage, at in reached.items()}


def _first(sights: list[Sight], condition: str) -> float:
    return next(one.at for one in sights if _is_true(one.object, condition))


def _is_true(node: Object, condition: str) -> bool:
    return any(
        one["type"] == condition and one["status"] == "True"
        for one in node["status"].get("conditions") or ()
    )
