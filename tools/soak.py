#!/usr/bin/env python3
"""Run a tier of tests again and again, in random order, beside processes that only compute.

    soak.py --tier unit --rounds 20 --load 4 [-n PROCESSES]

A tier is stable if all rounds pass.  Each round prints one line, and the failed tests with the
command that repeats its order.  The output of a failed round is kept in build/soak.  Exit code 1
if a round failed; Ctrl-C prints what was found so far and exits with 130.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOGS = Path("build/soak")


@contextmanager
def load(count: int) -> Iterator[None]:
    """Keep `count` processes computing while the block runs."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def command(tier: str, seed: int, processes: int) -> list[str]:
    """Return the command of one round."""
    return [
        *(sys.executable, "-m", "pytest", "--tier", tier, "-n", str(processes)),
        *("--dist", "loadfile", "--no-loadscope-reorder", "--max-worker-restart", "0"),
        *("--random-order", f"--random-order-seed={seed}", "-rfE"),
    ]


def run_round(number: int, tier: str, processes: int) -> bool:
    """Run one round, print its line, and return True if it passed."""
    words = command(tier, number, processes)
    log = LOGS / f"{tier}-{number}.log"
    began = time.monotonic()  # noqa: TID251
    with log.open("w") as output:
        code = subprocess.run(
            words, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, check=False
        ).returncode
    seconds = time.monotonic() - began  # noqa: TID251
    lines = log.read_text(errors="replace").splitlines()
    print(f"round {number}: {lines[-1] if lines else 'no output'} ({seconds:.0f} s)", flush=True)
    if code == 0:
        log.unlink()
        return True
    for line in lines:
        if line.startswith(("FAILED ", "ERROR ")):
            print(f"  {line[:300]}")
    print(f"  exit code {code}; output: {log}; this order again: {' '.join(words[1:])}", flush=True)
    return False


def main() -> int:
    """Run the rounds."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tier", default="unit", help="tier of tests (tests/tiers.py)")
    parser.add_argument("--rounds", type=int, default=20, help="how often; default: 20")
    parser.add_argument("--load", type=int, default=4, help="computing processes; default: 4")
    parser.add_argument("-n", "--processes", type=int, default=3, help="test processes; default: 3")
    given = parser.parse_args()
    if given.rounds < 1 or given.load < 0 or given.processes < 1:
        parser.error("--rounds and -n must be at least 1, --load at least 0")
    LOGS.mkdir(parents=True, exist_ok=True)
    passed = run = 0
    try:
        with load(given.load):
            for number in range(1, given.rounds + 1):
                passed += run_round(number, given.tier, given.processes)
                run = number
    except KeyboardInterrupt:
        print(f"{passed} of {run} rounds of the tier {given.tier} passed; interrupted")
        return 130
    beside = f"beside {given.load} busy processes" if given.load else "alone"
    print(f"{passed} of {run} rounds of the tier {given.tier} passed, {beside}")
    return 0 if passed == run else 1


if __name__ == "__main__":
    sys.exit(main())
