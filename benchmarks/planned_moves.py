"""Planned moves: how long training pauses, and what it loses, when a node has a notice.

`unbroken up` with three nodes of processes; a DDP job on gloo (`train_step.py`, restartable, a
snapshot each step) has a pod on two of them.  The node of a rank gets a notice, and the trial ends
when no pod of the job is there.  The pause is from the last step that all ranks had made to the
first that all have made elsewhere, by the workers' own clocks.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from arguments import count, output_file
from recovery import machine
from recovery_launch import UP, Setting, Unavailable
from recovery_trials import say
from recovery_unbroken import InProcessSnapshots
from recovery_watch import Worker

BOUND_SECONDS = 180.0
STEPS = 5
"""Steps that each rank makes before a notice."""
KARPENTER = "karpenter.sh/disrupted"
SPOT = "aws-node-termination-handler/spot-itn"
NOTICES = {
    "cordon": ("kubectl", "cordon", "{node}"),
    "karpenter": ("kubectl", "taint", "node", "{node}", f"{KARPENTER}=:NoSchedule"),
    "spot": ("kubectl", "taint", "node", "{node}", f"{SPOT}=x:NoSchedule"),
    "kubectl-drain": ("kubectl", "drain", "{node}", "--timeout=180s"),
    "drain": ("unbroken", "nodes", "drain", "{node}"),
}
"""Command that gives each notice."""


@dataclass
class Trial:
    """One notice, and its outcome; seconds."""

    notice: str
    until_stop: float | None = None
    """Seconds from the notice to the last step on the old node; the new pod starts meanwhile."""
    pause: float | None = None
    until_left: float | None = None
    """Seconds from the notice until no pod of the job is on the node."""
    steps_lost: int | None = None
    why_wrong: str = ""


class Moved(InProcessSnapshots):
    """The job, on a cluster with one node more than it has pods."""

    mode = "planned moves"

    @property
    def nodes(self) -> int:
        """Number of nodes: one is free."""
        return self.setting.agents + 1

    def node_of(self, worker: Worker) -> str:
        """The node of a worker's pod."""
        name = Path(f"/proc/{worker.pid}/environ").read_bytes().split(b"UNBROKEN_POD=")[1]
        pod = name.split(b"\0")[0].decode()
        found = next(one for one in self.listed("pods") if one["metadata"]["name"] == pod)
        return str(found["spec"]["nodeName"])

    def give(self, notice: str, node: str) -> subprocess.Popen[bytes]:
        """Give a notice. The command ends when it has nothing more to do."""
        program, *words = (word.format(node=node) for word in NOTICES[notice])
        kubectl = self.kubectl_program()
        assert kubectl is not None
        command = [kubectl] if program == "kubectl" else [*UP]
        place = {"KUBECONFIG": str(self.cluster / "kubeconfig"), "UNBROKEN_DIR": str(self.cluster)}
        with (self.directory / "notices.log").open("ab") as log:
            return subprocess.Popen(
                [*command, *words], env={**os.environ, **place}, stdout=log, stderr=log
            )

    def take_back(self, node: str) -> None:
        """Take the notice back."""
        self.kubectl("annotate", "node", node, "unbroken.dev/drain-")
        self.kubectl("uncordon", node)
        found = json.loads(self.kubectl("get", "node", node, "-o", "json"))
        for taint in found["spec"].get("taints") or ():
            if taint["key"] in (KARPENTER, SPOT):
                self.kubectl("taint", "node", node, f"{taint['key']}-")

    def has_left(self, node: str) -> bool:
        """Return whether no pod of the job is on the node, and all pods run."""
        pods = self.listed("pods")
        return len(pods) == self.setting.agents and all(
            one["spec"].get("nodeName", node) != node and one["status"].get("phase") == "Running"
            for one in pods
        )


def started(base: Path) -> Moved:
    """Start a cluster with a job that makes steps."""
    Moved.prepare()
    job = Moved(base / "cluster", Setting(agents=2, ranks_per_agent=1, parameters=100_000))
    job.start_and_step()
    return job


def try_notice(job: Moved, notice: str, rank: int) -> Trial:
    """Give one notice to the node of a rank, and follow the job until it has left."""
    job.settle("")
    old = list(job.watch.newest.values())
    if not job.watch.wait(lambda: all(one.steps >= STEPS for one in old), BOUND_SECONDS):
        raise Unavailable("the job makes no steps")
    node, restarts = job.node_of(job.watch.newest[rank]), restart_count(job)
    trial, at = Trial(notice), time.time()
    command = job.give(notice, node)
    if not job.watch.wait(lambda: job.is_back(old, []), BOUND_SECONDS):
        trial.why_wrong = f"not every rank made a step within {BOUND_SECONDS:.0f} s"
    elif not job.until(lambda: job.has_left(node), BOUND_SECONDS):
        trial.why_wrong = f"a pod was on the node after {BOUND_SECONDS:.0f} s"
    else:
        trial.until_left = time.time() - at
        fresh = list(job.watch.newest.values())
        stopped = min(one.newest[-1][0] for one in old)
        trial.until_stop = stopped - at
        trial.pause = max(one.first_step_at or 0.0 for one in fresh) - stopped
        reached = max(one.newest[-1][1] for one in old)
        trial.steps_lost = max(0, reached + 1 - min(one.first_step or 0 for one in fresh))
        trial.why_wrong = told_wrong(job, restarts)
    if command.wait(BOUND_SECONDS) != 0 and not trial.why_wrong:
        trial.why_wrong = f"the command of {notice} failed"
    job.take_back(node)
    return trial


def restart_count(job: Moved) -> int:
    """Return the number of restarts of the job."""
    (found,) = job.listed("hyperpodpytorchjobs.sagemaker.amazonaws.com")
    return int(found["status"].get("restartCount", 0))


def told_wrong(job: Moved, before: int) -> str:
    """Return how the restart differs from a planned move; empty if it does not."""
    incidents = job.listed("incidents.unbroken.dev")
    newest = max(incidents, key=lambda one: one["spec"]["number"])["spec"]
    if newest["culprit"]["fault"] != "PlannedMove":
        return f"told as {newest['culprit']['fault']}"
    restarts = restart_count(job) - before
    return "" if restarts == 1 else f"{restarts} restarts"


def figures(trials: list[Trial]) -> dict[str, Any]:
    """Figures of all trials of one notice."""
    right = [one for one in trials if not one.why_wrong]
    pauses = [one.pause for one in right if one.pause is not None]
    return {
        "notice": trials[0].notice,
        "trials": len(trials),
        "right": len(right),
        "wrong": [one.why_wrong for one in trials if one.why_wrong],
        "until_stop": _median([one.until_stop for one in right]),
        "pause": _median(list(pauses)),
        "pause_max": max(pauses, default=None),
        "until_left": _median([one.until_left for one in right]),
        "steps_lost_max": max((one.steps_lost or 0 for one in right), default=None),
    }


def _median(values: list[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return median(found) if found else None


def table(cells: list[dict[str, Any]]) -> str:
    """Return the rows of a Markdown table."""
    heads = ("notice", "right", "steps lost, max", "until the stop", "pause", "max", "until left")
    rows = [heads, ("---",) * len(heads)]
    for cell in cells:
        times = ("until_stop", "pause", "pause_max", "until_left")
        shown = ["" if cell[one] is None else f"{cell[one]:.2f}" for one in times]
        right = f"{cell['right']}/{cell['trials']}"
        rows.append((cell["notice"], right, str(cell["steps_lost_max"]), *shown))
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([*lines, *(f"{c['notice']}: {why}" for c in cells for why in c["wrong"])])


def measure(notices: list[str], runs: int, base: Path) -> list[Trial]:
    """Give each notice `runs` times on one cluster; stop after the first wrong trial."""
    trials: list[Trial] = []
    job = started(base)
    try:
        for number, notice in enumerate(notices * runs):
            trial = try_notice(job, notice, number % job.setting.ranks)
            trials.append(trial)
            pause = "" if trial.pause is None else f"pause {trial.pause:.2f} s"
            say(f"{notice}: {trial.why_wrong or pause}")
            if trial.why_wrong:
                break
    finally:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is ended in any case
        job.drop()
        signal.signal(signal.SIGINT, before)
    return trials


def main() -> int:
    """Measure and print the table; return 1 if a move went wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=count, default=4, help="of each notice (default 4)")
    parser.add_argument(
        "--notices", default=",".join(NOTICES), help="comma-separated (default all)"
    )
    parser.add_argument("--json", type=output_file, help="write the figures to this file")
    options = parser.parse_args()
    notices = options.notices.split(",")
    if unknown := set(notices) - NOTICES.keys():
        parser.error(f"no such notice: {', '.join(sorted(unknown))}")
    base, where = Path(tempfile.mkdtemp(prefix="unbroken-planned-moves-")), machine()
    say(f"in {base}")
    trials = measure(notices, options.runs, base)
    found = [[one for one in trials if one.notice == notice] for notice in notices]
    cells = [figures(some) for some in found if some]
    print(f"{where}\n\n{table(cells)}")
    if options.json:
        whole = {"machine": where, "notices": cells, "trials": [asdict(one) for one in trials]}
        options.json.write_text(json.dumps(whole, indent=1))
    is_right = len(trials) == len(notices) * options.runs and not trials[-1].why_wrong
    if is_right:
        shutil.rmtree(base, ignore_errors=True)
    return 0 if is_right else 1


if __name__ == "__main__":
    raise SystemExit(main())
