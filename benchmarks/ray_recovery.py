"""Losses under Ray Train on the local cluster: seconds until training reports a step again.

A RayCluster of real Ray: a head and two workers, each on its own node, and two spare nodes. Two
ranks (ray_steps.py) make a step each 0.2 s, with a checkpoint each 10 steps in a shared folder.
`auto-resume`: with the two annotations. `ray-train-alone`: it is off, so that KubeRay creates
pods again, `FailureConfig(max_failures=-1)` starts workers again, and nothing else acts.

Seconds are from the loss (before kubectl is started) to the first step of the next start. Needs
kubectl, and an environment with Ray: `--ray-env` (as of `make ray-env`).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from base64 import b64decode
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from arguments import count, output_file, words

sys.path.insert(0, str(Path(__file__).parents[1]))

from recovery_records import percentile
from recovery_trials import say

from tests.e2e.clusters import Cluster
from unbroken.spec.keys import AUTO_RESUME, MAX_RETRIES, RESUME_RAY

SCRIPT = Path(__file__).with_name("ray_steps.py")
RAY_ENV = Path(__file__).parents[1] / ".ray-env"
OURS, ALONE = "auto-resume", "ray-train-alone"
LOSSES = ("worker-pod", "worker-node", "head-pod", "head-node")
NODES = 5
SETTLE_SECONDS = 240.0
"""Seconds for a RayCluster to be ready and training to make steps, before a loss."""
CALM_STEPS = 12
"""Steps of the present start before the next loss."""
CALM_SECONDS = 5.0
"""Longest time since the newest step of training that runs."""
LOOK_SECONDS = 0.05
GRACE_SECONDS = 2
IN_VAIN_MAX = 2
"""A loss that a mode has not recovered from so often, and never did, is tried no more."""
Object = dict[str, Any]


class NotSettled(Exception):
    """Training did not run before a loss."""


@dataclass(slots=True)
class Trial:
    """One loss."""

    mode: str
    loss: str
    seconds: float | None = None
    """Seconds until the first step after it; None: no step within the bound."""
    lost_steps: int | None = None
    load: float = 0.0
    """Load of this machine over the last minute, at the end."""


def manifest(mode: str) -> Object:
    """The RayCluster."""
    both = {AUTO_RESUME: "true", MAX_RETRIES: "1000"}
    annotations = both if mode == OURS else {AUTO_RESUME: "false"}
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": {"name": "ray", "annotations": annotations},
        "spec": {
            "headGroupSpec": group("0", "2Gi"),
            "workerGroupSpecs": [
                group("1", "2Gi", groupName="w", replicas=2, minReplicas=2, maxReplicas=2)
            ],
        },
    }


def group(cpus: str, memory: str, **more: Any) -> Object:
    """A group of Ray pods, each on a node of its own."""
    term = {
        "labelSelector": {"matchLabels": {"ray.io/is-ray-node": "yes"}},
        "topologyKey": "kubernetes.io/hostname",
    }
    sizes = {"cpu": "500m", "memory": memory}
    container = {"name": "ray", "image": "rayproject/ray:2.60.0"}
    spec = {
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}},
        "containers": [{**container, "resources": {"requests": sizes, "limits": sizes}}],
    }
    return {"rayStartParams": {"num-cpus": cpus}, "template": {"spec": spec}, **more}


class Run:
    """The local cluster of one mode, with its RayCluster and the training on it."""

    def __init__(self, cluster: Cluster, mode: str, ray: Path, folder: Path) -> None:
        self.cluster = cluster
        self.mode = mode
        self._ray = ray
        self._folder = folder
        self._off: set[str] = set()

    def start(self) -> None:
        """Make the RayCluster, and submit the training."""
        self.cluster.apply(manifest(self.mode))
        self.cluster.wait("raycluster/ray", "jsonpath={.status.state}=ready", seconds=180)
        (head,) = self.pods("head")
        address = f"http://{head['status']['podIP']}:8265"
        words = ["job", "submit", "--no-wait", "--address", address, "--"]
        token = b64decode(self.cluster.get("secret", "ray-ray-token")["data"]["auth_token"])
        access = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token.decode()}
        environment = {**os.environ, **access, "RAY_USAGE_STATS_ENABLED": "0"}
        done = subprocess.run(
            [str(self._ray / "bin/ray"), *words, "python3", str(SCRIPT), str(self._folder)],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise NotSettled(f"the job was not submitted: {done.stdout}{done.stderr}")

    def anew(self) -> None:
        """Replace a RayCluster whose training does not run any more."""
        self.power_on()
        self.cluster.kubectl("delete", "raycluster", "ray", "--timeout=120s", seconds=150)
        for kind in ("head", "worker"):
            gone = ("wait", "pod", "-l", f"ray.io/node-type={kind}", "--for=delete")
            self.cluster.kubectl(*gone, "--timeout=120s", check=False, seconds=150)
        self.start()

    def pods(self, kind: str) -> list[Object]:
        """The pods of this type that are not being deleted."""
        listed = self.cluster.get("pods", "-l", f"ray.io/node-type={kind}")["items"]
        return [one for one in listed if "deletionTimestamp" not in one["metadata"]]

    def steps(self) -> list[Object]:
        """The steps of all starts, in the order of their lines; a torn last line is left out."""
        file = self._folder / "steps.jsonl"
        text = file.read_text() if file.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def power_on(self) -> None:
        """Switch on all nodes that a loss switched off."""
        for node in sorted(self._off):
            self.cluster.kubectl("annotate", "node", node, "unbroken.dev/power-")
            self.cluster.wait(f"node/{node}", "condition=Ready", seconds=60)
        self._off.clear()

    def settle(self) -> None:
        """Return once all runs; NotSettled if it does not."""
        self.power_on()
        deadline = time.monotonic() + SETTLE_SECONDS
        while not (self._is_calm() and self._is_ready()):
            if time.monotonic() > deadline:
                raise NotSettled(f"training does not run after {SETTLE_SECONDS:.0f} s")
            time.sleep(1.0)

    def _is_calm(self) -> bool:
        found = self.steps()
        newest = [one for one in found if one["start"] == found[-1]["start"]]
        return len(newest) >= CALM_STEPS and time.time() - newest[-1]["at"] < CALM_SECONDS

    def _is_ready(self) -> bool:
        if (len(self.pods("head")), len(self.pods("worker"))) != (1, 2):
            return False
        found = self.cluster.get("raycluster", "ray")
        if found["status"].get("readyWorkerReplicas") != 2:
            return False
        if self.mode != OURS:
            return True
        state = json.loads(found["metadata"]["annotations"].get(RESUME_RAY, "{}"))
        head = (state.get("head") or {}).get("uid")
        is_known = bool(state.get("jobs")) and not state.get("isLost")
        return is_known and head == self.pods("head")[0]["metadata"]["uid"]

    def lose(self, loss: str, number: int) -> None:
        """Cause a loss, and return at once."""
        kind, _, what = loss.partition("-")
        pods = self.pods(kind)
        pod = pods[number % len(pods)]
        if what == "pod":
            name = pod["metadata"]["name"]
            self.cluster.kubectl("delete", "pod", name, "--wait=false", "--grace-period=1")
        else:
            node = pod["spec"]["nodeName"]
            self._off.add(node)
            self.cluster.kubectl("annotate", "node", node, "unbroken.dev/power=off")


def try_loss(run: Run, loss: str, number: int, bound: float) -> Trial:
    """Cause a loss once, and wait for the next start's first step."""
    run.settle()
    trial, known = Trial(run.mode, loss), {one["start"] for one in run.steps()}
    at = time.time()
    run.lose(loss, number)
    fresh: Object | None = None
    while fresh is None and time.time() < at + bound:
        time.sleep(LOOK_SECONDS)
        fresh = next((one for one in run.steps() if one["start"] not in known), None)
    if fresh is not None:
        trial.seconds = fresh["at"] - at
        before = [one["step"] for one in run.steps() if one["start"] in known]
        trial.lost_steps = max(before) + 1 - fresh["step"]
    trial.load = os.getloadavg()[0]
    return trial


def is_hopeless(trials: Sequence[Trial], mode: str, loss: str) -> bool:
    """True if a mode has never recovered from a loss that it had often enough."""
    tried = [one for one in trials if (one.mode, one.loss) == (mode, loss)]
    return len(tried) >= IN_VAIN_MAX and all(one.seconds is None for one in tried)


@contextmanager
def running(mode: str, ray: Path) -> Iterator[Run]:
    """A local cluster with training on it, for the time of the block."""
    base = Path(tempfile.mkdtemp(prefix=f"unbroken-{mode}-"))
    cluster = Cluster(base / "cluster", shutil.which("kubectl") or "kubectl")
    (base / "shared").mkdir()
    say(f"{mode}: in {base}")
    sizes = ("--cpu-per-node", "2", "--memory-per-node", "4Gi")
    image = f"rayproject/ray={ray}"
    try:
        cluster.unbroken("up", "--detach", "--nodes", str(NODES), *sizes, "--image-env", image)
        run = Run(cluster, mode, ray, base / "shared")
        run.start()
        yield run
    finally:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is ended in any case
        cluster.unbroken("down", "--purge", check=False)
        shutil.rmtree(base, ignore_errors=True)
        signal.signal(signal.SIGINT, before)


def measure(options: argparse.Namespace, note: Callable[[Trial], None]) -> None:
    """Try each loss so often in each mode; `note` gets each trial as soon as it is done."""
    trials: list[Trial] = []
    for mode in options.modes:
        with running(mode, options.ray_env) as run:
            for number in range(options.runs):
                for loss in options.losses:
                    if is_hopeless(trials, mode, loss):
                        continue
                    trial = try_loss(run, loss, number, options.bound_seconds)
                    trials.append(trial)
                    note(trial)
                    if trial.seconds is None:
                        run.anew()


def figures(trials: Sequence[Trial]) -> list[Object]:
    """The figures of each mode and loss that was tried, in the order of the first trials."""
    cells: dict[tuple[str, str], list[Trial]] = {}
    for one in trials:
        cells.setdefault((one.mode, one.loss), []).append(one)
    return [_cell(mode, loss, some) for (mode, loss), some in cells.items()]


def _cell(mode: str, loss: str, trials: Sequence[Trial]) -> Object:
    good = [one for one in trials if one.seconds is not None]
    seconds = [one.seconds for one in good if one.seconds is not None]
    steps = [float(one.lost_steps) for one in good if one.lost_steps is not None]
    return {
        "mode": mode,
        "loss": loss,
        "trials": len(trials),
        "recovered": len(good),
        "p50": percentile(seconds, 0.5) if seconds else None,
        "min": min(seconds, default=None),
        "max": max(seconds, default=None),
        "lostSteps": percentile(steps, 0.5) if steps else None,
        "lostStepsMax": max(steps, default=None),
        "load": [min(one.load for one in trials), max(one.load for one in trials)],
    }


def table(cells: Sequence[Object]) -> str:
    """Rows of Markdown."""
    heads = ("mode", "loss", "recovered", "p50", "min", "max", "lost steps, p50, max", "load")
    rows = [heads, ("---",) * len(heads)]
    for cell in cells:
        times = ["" if cell[key] is None else f"{cell[key]:.1f}" for key in ("p50", "min", "max")]
        is_known = cell["lostSteps"] is not None
        steps = f"{cell['lostSteps']:g}, {cell['lostStepsMax']:g}" if is_known else ""
        load = "{:.1f} to {:.1f}".format(*cell["load"])
        recovered = f"{cell['recovered']}/{cell['trials']}"
        rows.append((cell["mode"], cell["loss"], recovered, *times, steps, load))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    parser.add_argument("--runs", type=count, default=8, help="of each loss (default 8)")
    parser.add_argument("--losses", type=words(LOSSES), default=list(LOSSES), help="(default all)")
    parser.add_argument("--modes", type=words((OURS, ALONE)), default=[OURS, ALONE])
    parser.add_argument("--bound-seconds", type=float, default=120.0, help="(default 120)")
    parser.add_argument("--ray-env", type=Path, default=RAY_ENV, help="environment with Ray")
    parser.add_argument(
        "--json", type=output_file, help="write the trials and figures to this file"
    )
    options = parser.parse_args()
    options.ray_env = options.ray_env.absolute()
    if not (options.ray_env / "bin/ray").exists():
        parser.error(f"Ray is not installed in {options.ray_env}: run `make ray-env`")
    return options


def main() -> int:
    """Measure, and print the table; 1 if training did not run before a loss."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    options = parse()
    cores, trials, status = len(os.sched_getaffinity(0)), list[Trial](), 0
    where = f"{cores} cores, Linux {platform.release()}, Python {platform.python_version()}"

    def note(trial: Trial) -> None:
        trials.append(trial)
        seen = "no step" if trial.seconds is None else f"{trial.seconds:.1f} s"
        say(f"{trial.mode}: {trial.loss}: {seen}, lost {trial.lost_steps}, load {trial.load:.1f}")
        if options.json:
            whole = {"machine": where, "figures": figures(trials)}
            whole["trials"] = [asdict(one) for one in trials]
            options.json.write_text(json.dumps(whole, indent=1))

    try:
        measure(options, note)
    except (NotSettled, AssertionError) as error:
        say(f"failed: {error}")
        status = 1
    print(f"{where}\n\n{table(figures(trials))}")
    return status


if __name__ == "__main__":
    raise SystemExit(main())
