"""Seconds that training waits for a checkpoint, and bytes a second, beside torch's own writer.

`python benchmarks/checkpoints.py [--quick] [--rounds 5] [--json FILE]`. In each round every way
saves the same tensors once, in an order that changes. `waits` is the time for which the call holds
up training, `done` the time until the checkpoint is complete. The first save of each way is left
out: it takes its memory. The S3 server is moto's, in a process of this machine, in memory.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from arguments import count, output_file
from torch import distributed
from torch.distributed import checkpoint as dcp

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.worker.s3_stores import PYTHONPATH, running_s3

sys.path.insert(0, PYTHONPATH)

from unbroken import worker

TENSORS = 64
SIZES = {"100 MB": 100_000_000, "1 GB": 1_000_000_000}
COPY, DCP, DIRECTORY, S3 = (
    "a copy in memory",
    "`dcp.async_save`, directory",
    "`worker.checkpoints`, directory",
    "`worker.checkpoints`, S3",
)
Times = tuple[float, float]
Save = Callable[[int], Times]
"""Saves a step; returns the seconds that the call took, and until the checkpoint was complete."""


def timed(begin: Callable[[], Callable[[], Any]]) -> Times:
    """Return the seconds of a call, and those until what it returns has returned."""
    began = time.perf_counter()
    wait = begin()
    waits = time.perf_counter() - began
    wait()
    return waits, time.perf_counter() - began


def copies(model: torch.nn.Module) -> Save:
    """Copy the tensors in memory, as nothing less than a save can."""
    tensors = list(model.state_dict().values())
    there = [torch.empty_like(one) for one in tensors]

    def copy() -> Callable[[], None]:
        for here, other in zip(tensors, there, strict=True):
            other.copy_(here)
        return lambda: None

    return lambda _step: timed(copy)


def torchs_own(model: torch.nn.Module, folder: Path) -> Save:
    """Save by torch's FileSystemWriter; only the newest stays."""

    def save(step: int) -> Times:
        place = folder / str(step)
        found = timed(
            lambda: (
                dcp.async_save(
                    model.state_dict(), storage_writer=dcp.FileSystemWriter(place)
                ).result
            )
        )
        shutil.rmtree(folder / str(step - 1), ignore_errors=True)
        return found

    return save


def ours(model: torch.nn.Module, place: str) -> Save:
    """Save by `worker.checkpoints`."""
    saved = worker.checkpoints(place, keep=1)
    saved.restore(model=model)

    def begin(step: int) -> Callable[[], None]:
        if not saved.save(step, model=model):
            raise SystemExit(f"{place}: step {step} was not saved")
        return saved.wait

    def save(step: int) -> Times:
        found = timed(lambda: begin(step))
        if saved.failed:
            raise SystemExit(f"{place}: step {step} was not saved, see above")
        return found

    return save


def measure(size: int, rounds: int, folder: Path) -> dict[str, list[Times]]:
    """Return the times of all saves by their way."""
    parts = [torch.nn.Parameter(torch.randn(size // TENSORS // 4)) for _ in range(TENSORS)]
    model = torch.nn.ParameterList(parts)
    for name in ("torch", "ours"):
        (folder / name).mkdir()
    ways = {
        COPY: copies(model),
        DCP: torchs_own(model, folder / "torch"),
        DIRECTORY: ours(model, str(folder / "ours")),
        S3: ours(model, f"s3://bucket/{size}"),
    }
    found: dict[str, list[Times]] = {name: [] for name in ways}
    for step in range(rounds + 1):
        names = list(ways)
        for name in names[step % len(names) :] + names[: step % len(names)]:
            times = ways[name](step)
            if step:
                found[name].append(times)
            print(f"  step {step} {name:32} {times[0]:8.3f} {times[1]:8.3f}", flush=True)
    return found


def table(size: int, found: dict[str, list[Times]]) -> list[str]:
    """Return the rows of the table."""
    rows = []
    for name, times in found.items():
        waits, done = (statistics.median(column) for column in zip(*times, strict=True))
        less, longer = (ratio(times, found[DCP], column) for column in (0, 1))
        copy, speed = ratio(times, found[COPY], 0), size / done / 1e6
        row = f"{waits:.3f} | {less:.2f} | {copy:.2f} | {done:.2f} | {longer:.2f} | {speed:.0f}"
        rows.append(f"| {name} | {row} |")
    return rows


def ratio(these: list[Times], those: list[Times], column: int) -> float:
    """Return the median of the ratios of each round."""
    pairs = zip(these, those, strict=True)
    return statistics.median(one[column] / other[column] for one, other in pairs)


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="100 MB only")
    parser.add_argument("--rounds", type=count, default=5)
    parser.add_argument("--json", type=output_file)
    options = parser.parse_args()
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    told: dict[str, Any] = {"torch": torch.__version__, "load_before": os.getloadavg()}
    with tempfile.TemporaryDirectory(prefix="checkpoints-") as place, running_s3() as server:
        os.environ.update(server.variables)
        group = {"init_method": f"file://{place}/store", "rank": 0, "world_size": 1}
        distributed.init_process_group("gloo", **group)
        for name, size in list(SIZES.items())[: 1 if options.quick else None]:
            folder = Path(place) / name
            folder.mkdir()
            found = measure(size, options.rounds, folder)
            told[name] = {way.replace("`", ""): times for way, times in found.items()}
            print(f"| {name} | waits, s | / torch's | / a copy's | done, s | / torch's | MB/s |")
            print("|---|---|---|---|---|---|---|", *table(size, found), sep="\n", flush=True)
            shutil.rmtree(folder)
            told["load_after"] = os.getloadavg()
            if options.json:
                options.json.write_text(json.dumps(told, indent=1) + "\n")
        distributed.destroy_process_group()
    print("load before and after:", told["load_before"], told["load_after"])


if __name__ == "__main__":
    main()
