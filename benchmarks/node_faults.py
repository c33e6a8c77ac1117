"""Faults of nodes under a training job: the reactions, and the duration of each stage.

`unbroken up` with four nodes of processes; a real DDP job on gloo, a pod on two of them and a spare
on the third. Each fault is injected into the node of a rank. The expected reaction is that of
`unbroken faults explain`. Times are seconds since the injection.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from arguments import count, output_file
from node_faults_trials import FAULTS, QUICK, Fault, FaultyNodes, Trial, figures, try_fault
from recovery import machine
from recovery_launch import Setting, Unavailable
from recovery_trials import say

MARKS = ("told", "detected", "stopped", "running", "ordered", "back", "in service")
WITH_P95 = ("running", "in service")
PUBLISHED = (
    "published for HyperPod: 94.3, 102.6 and 148.9 s from the label on the node to the job's state "
    "Running, which is before its first step"
)


def started(base: Path, number: int) -> FaultyNodes:
    """A cluster whose job makes steps."""
    setting = Setting(agents=2, ranks_per_agent=1, parameters=100_000, has_spare=True)
    FaultyNodes.prepare()
    job = FaultyNodes(base / f"cluster-{number}", setting)
    job.start_and_step()
    return job


def measure(faults: list[Fault], runs: int, base: Path) -> list[Trial]:
    """Try each fault `runs` times; a trial with an error records it, and a new cluster follows."""
    trials: list[Trial] = []
    job: FaultyNodes | None = None
    try:
        for number, fault in enumerate(faults * runs):
            job = job or started(base, number)
            try:
                trial = try_fault(job, fault, number)
            except Unavailable as error:
                trial = Trial(fault.name, "", "", why_wrong=str(error))
            trials.append(trial)
            running = trial.marks.get("running")
            seen = f", running after {running:.2f} s" if running is not None else ""
            say(f"{fault.name}: {trial.why_wrong or trial.job + seen}")
            if trial.why_wrong:
                job.drop()
                job = None
    except KeyboardInterrupt:
        say("interrupted: what was measured so far")
    finally:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is ended in any case
        if job is not None:
            job.drop()
        signal.signal(signal.SIGINT, before)
    return trials


def table(cells: list[dict[str, Any]]) -> str:
    """Rows of Markdown: medians of each mark, of two of them the p95 too."""
    heads = ["fault", "action", "the job", "right", "lost steps, max"]
    for name in MARKS:
        heads += [name, "p95"] if name in WITH_P95 else [name]
    rows = [heads, ["---"] * len(heads)]
    for cell in cells:
        lost = cell["lost_steps_max"]
        row = [cell["fault"], cell["action"], cell["job"], f"{cell['right']}/{cell['trials']}"]
        row.append("" if lost is None else str(lost))
        for name in MARKS:
            row.append(_shown(cell["p50"].get(name)))
            if name in WITH_P95:
                row.append(_shown(cell["p95"].get(name)))
        rows.append(row)
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([*lines, *(f"{c['fault']}: {why}" for c in cells for why in c["wrong"])])


def _shown(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.2f}"


def parse() -> argparse.Namespace:
    """The command line."""
    names = [fault.name for fault in FAULTS]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=count, default=5, help="of each fault (default 5)")
    quick = f"one each of {', '.join(QUICK)}; three minutes"
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--faults", help=f"of {', '.join(names)} (default all)")
    parser.add_argument("--json", type=output_file, help="write the figures to this file")
    parser.add_argument("--keep", action="store_true", help="keep the logs of the clusters")
    options = parser.parse_args()
    if options.quick:
        options.runs = 1
    options.faults = options.faults.split(",") if options.faults else None
    options.faults = options.faults or (list(QUICK) if options.quick else names)
    unknown = set(options.faults) - set(names)
    if unknown:
        parser.error(f"no such fault: {', '.join(sorted(unknown))}")
    return options


def main() -> int:
    """Measure, print the table; 1 where anything did not follow as it should."""
    options = parse()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    base = Path(tempfile.mkdtemp(prefix="unbroken-node-faults-"))
    say(f"in {base}")
    wanted = [fault for fault in FAULTS if fault.name in options.faults]
    where, began = machine(), time.monotonic()
    try:
        trials = measure(wanted, options.runs, base)
    except Unavailable as error:
        raise SystemExit(f"nothing can be measured: {error}") from error
    if not options.keep:
        shutil.rmtree(base, ignore_errors=True)
    by_fault = [[one for one in trials if one.fault == fault.name] for fault in wanted]
    cells = [figures(mine) for mine in by_fault if mine]
    took = f"{time.monotonic() - began:.0f} s, load at the end {os.getloadavg()[0]:.1f}"
    if options.json:
        document = {"machine": where, "took": took, "faults": cells}
        document["trials"] = [asdict(one) for one in trials]
        options.json.write_text(json.dumps(document, indent=2) + "\n")
    print(f"{where}; {took}\n\n{table(cells)}\n\nseconds since the fault, medians; {PUBLISHED}")
    return 1 if any(one.why_wrong for one in trials) else 0


if __name__ == "__main__":
    raise SystemExit(main())
