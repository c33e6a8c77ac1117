"""Counts what the tests of a machine find on one that is well: every fault is a false alarm.

    python tools/healthy_checks.py --runs 200

Each run is a process of its own, as in a pod.  Ends with 1 if anything failed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

KINDS = ("Basic", "InstanceStress")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seconds", default="0.2", help="of each test under load")
    parser.add_argument("--kind", action="append", help="default: Basic and InstanceStress")
    given = parser.parse_args()
    counts: Counter[tuple[str, str]] = Counter()
    false_alarms = 0
    for run in range(given.runs):
        results = one_run(given.kind or KINDS, given.seconds)
        counts.update((one["test"], one["outcome"]) for one in results)
        wrong = [one for one in results if one["outcome"] == "fail"]
        false_alarms += bool(wrong)
        for one in wrong:
            print(
                f"run {run}: {one['test']}: {one.get('message')} {one.get('measured')}", flush=True
            )
    for (test, outcome), count in sorted(counts.items()):
        print(f"{test:<20} {outcome:<8} {count}")
    print(f"{false_alarms} of {given.runs} runs found a fault on a machine that is well")
    return bool(false_alarms)


def one_run(kinds: list[str] | tuple[str, ...], seconds: str) -> list[dict[str, object]]:
    """The results of one run."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "unbroken.nodes.checks", *kinds, "--json"]
        command += ["--seconds", seconds, "--directory", str(Path(folder))]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [json.loads(line) for line in said.splitlines()]


if __name__ == "__main__":
    sys.exit(main())
