"""Cost of `unbroken.worker` for a training process: nanoseconds of a call, and of its import.

`python benchmarks/worker.py [--json FILE]`; medians, with the best and the worst of all rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import timeit
from collections.abc import Callable

from arguments import output_file

from unbroken import worker
from unbroken.wire.worker import VARIABLE, empty

CALLS, ROUNDS, IMPORTS = 20_000, 25, 15
IMPORT = """
import time
{before}
began = time.perf_counter()
import unbroken.worker
print(time.perf_counter() - began)
"""
AS_IN_TRAINING = "import dataclasses, logging, mmap, threading, typing, zlib"
"""Imports that a training process has made anyway."""


def nanoseconds(call: Callable[[], None]) -> list[float]:
    """Return the nanoseconds of one call, in each round."""
    call()
    seconds = timeit.repeat(call, number=CALLS, repeat=ROUNDS)
    return [one / CALLS * 1e9 for one in seconds]


def one_metric() -> None:
    worker.progress(17, loss=2.5)


def three_metrics() -> None:
    worker.progress(17, loss=2.5, norm=0.7, rate=1e-3)


def eight_metrics() -> None:
    worker.progress(17, a=1.0, b=2.0, c=3.0, d=4.0, loss=5.0, norm=6.0, rate=7.0, speed=8.0)


def no_metrics() -> None:
    worker.progress(17)


def visit() -> None:
    with worker.phase("eval"):
        pass


def imports(before: str) -> list[float]:
    """Return the milliseconds of the import in new processes."""
    command = [sys.executable, "-c", IMPORT.format(before=before)]
    return [float(subprocess.check_output(command)) * 1e3 for _ in range(IMPORTS)]


def measure() -> dict[str, list[float]]:
    """Measure everything, by name."""
    os.environ.pop(VARIABLE, None)
    found = {"outside, 1 metric (ns)": nanoseconds(one_metric)}
    page = os.memfd_create("page")
    os.write(page, empty())
    os.environ[VARIABLE] = str(page)
    # Reset the writer, as if this process began here.
    worker._writer = worker._UNCLAIMED
    for call in (no_metrics, one_metric, three_metrics, eight_metrics, visit):
        found[f"{call.__name__.replace('_', ' ')} (ns)"] = nanoseconds(call)
    found["import (ms)"] = imports("")
    found["import beside torch's (ms)"] = imports(AS_IN_TRAINING)
    return found


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=output_file)
    options = parser.parse_args()
    found = measure()
    for name, values in found.items():
        middle = statistics.median(values)
        print(f"{name:28} {middle:8.1f}   ({min(values):.1f} - {max(values):.1f})")
    if options.json:
        options.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
