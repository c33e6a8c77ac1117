"""The long pauses of healthy runs: each really works, moves on, and ends; none prints a line.

In an evaluation all ranks work; in the others rank 0 works alone and the others wait at a barrier.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

BATCH_SECONDS = 0.5
CHUNK_BYTES = 1 << 20
COMPILER = """
import sys, time
end = time.monotonic() + float(sys.argv[1])
while time.monotonic() < end:
    sum(map(hash, map(str, range(50000))))
    time.sleep(0.2)
"""
"""A program that computes for so many seconds, about a fifth of a core."""


def evaluate(rank: int, seconds: float, directory: Path) -> None:
    """Go over batches: the time of each is a GPU's, then a metric is computed."""
    del rank, directory
    until = time.monotonic() + seconds
    count = 0
    while time.monotonic() < until:
        _forward()
        count += sum(_metric())


def save(rank: int, seconds: float, directory: Path) -> None:
    """Write a large checkpoint to slow storage, a MiB each half second, from rank 0."""
    if rank != 0:
        return
    until = time.monotonic() + seconds
    with (directory / "large-checkpoint").open("wb") as file:
        while time.monotonic() < until:
            file.write(bytes(CHUNK_BYTES))
            file.flush()
            os.fsync(file.fileno())
            time.sleep(BATCH_SECONDS)


def compile_model(rank: int, seconds: float, directory: Path) -> None:
    """Wait for a compiler that rank 0 has started and that computes all the time."""
    del directory
    if rank == 0:
        subprocess.run([sys.executable, "-S", "-c", COMPILER, str(seconds)], check=True)


def prepare_data(rank: int, seconds: float, directory: Path) -> None:
    """Count the words of files again and again, on rank 0."""
    del directory
    if rank != 0:
        return
    until = time.monotonic() + seconds
    words: dict[str, int] = {}
    for path in sorted(Path(__file__).parent.glob("*.py")) * 10_000:
        if time.monotonic() > until:
            return
        for word in path.read_text().split():
            words[word] = words.get(word, 0) + 1
        time.sleep(BATCH_SECONDS / 5)


def _forward() -> None:
    time.sleep(BATCH_SECONDS)


def _metric() -> list[int]:
    return [number % 7 for number in range(20_000)]


PAUSES: Mapping[str, Callable[[int, float, Path], None]] = {
    "evaluation": evaluate,
    "checkpoint": save,
    "compile": compile_model,
    "data set": prepare_data,
}
