"""Seconds that training waits for a checkpoint, and bytes a second, beside torch's own writer.

`python benchmarks/checkpoints.py [--quick] [--rounds 5] [--json FILE]`. In each round every way
saves the same tensors once, in an order that changes, each right after a plain copy in memory by
one thread. `waits` is the time for which the call holds up training, `done` the time until the
checkpoint is complete. The first save of each way is left out: it takes its memory. The S3 server
is moto's, a process of this machine.
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
S3_BYTES_MAX = 100_000_000
"""With 1 GB moto took 4 GB of memory, 192 s, and failed when its client asked again."""
DCP, DIRECTORY, S3 = (
    "`dcp.async_save`, directory",
    "`worker.checkpoints`, directory",
    "`worker.checkpoints`, S3",
)
HEAD = " copy, s | waits, s | / copy | / torch's | done, s | / torch's | MB/s |"
Save = Callable[[int], tuple[float, float]]
"""Saves a step; returns the seconds that the call took, and until the checkpoint was complete."""
Times = tuple[float, float, float]
"""Seconds of a copy right before a save, of its call, and until its checkpoint was complete."""


def timed(begin: Callable[[], Callable[[], Any]]) -> tuple[float, float]:
    """Return the seconds of a call, and those until what it returns has returned."""
    began = time.perf_counter()
    wait = begin()
    waits = time.perf_counter() - began
    wait()
    return waits, time.perf_counter() - began


def copied(model: torch.nn.Module, there: list[torch.Tensor]) -> float:
    """Return the seconds of a copy in memory, the least that training can wait for a save."""
    began = time.perf_counter()
    for here, other in zip(model.parameters(), there, strict=True):
        other.data.copy_(here.data)
    return time.perf_counter() - began


def torchs_own(model: torch.nn.Module, folder: Path) -> Save:
    """Save by torch's FileSystemWriter; only the newest stays."""

    def save(step: int) -> tuple[float, float]:
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

    def save(step: int) -> tuple[float, float]:
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
        DCP: torchs_own(model, folder / "torch"),
        DIRECTORY: ours(model, str(folder / "ours")),
    }
    if size <= S3_BYTES_MAX:
        ways[S3] = ours(model, "s3://bucket/run")
    found: dict[str, list[Times]] = {name: [] for name in ways}
    there = [torch.empty_like(part) for part in parts]
    copied(model, there)
    for step in range(rounds + 1):
        names = list(ways)
        for name in names[step % len(names) :] + names[: step % len(names)]:
            times = (copied(model, there), *ways[name](step))
            if step:
                found[name].append(times)
            shown = "  ".join(f"{length:8.3f}" for length in times)
            print(f"  step {step} {name:32} {shown}", flush=True)
    return found


def table(size: int, found: dict[str, list[Times]]) -> list[str]:
    """Return the rows of the table."""
    rows = []
    for name, times in found.items():
        copy, waits, done = (statistics.median(column) for column in zip(*times, strict=True))
        copies = statistics.median(one[1] / one[0] for one in times)
        pairs = list(zip(times, found[DCP], strict=True))
        less, longer = (statistics.median(a[at] / b[at] for a, b in pairs) for at in (1, 2))
        row = f"{copy:.3f} | {waits:.3f} | {copies:.2f} | {less:.2f} | {done:.2f} | {longer:.2f}"
        rows.append(f"| {name} | {row} | {size / done / 1e6:.0f} |")
    return rows


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="100 MB only")
    parser.add_argument("--rounds", type=count, default=5)
    parser.add_argument("--json", type=output_file)
    options = parser.parse_args()
    # Two threads that copy wait for each other wherever other programs run, for times that vary.
    torch.set_num_threads(1)
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
            print(f"| {name} |{HEAD}")
            print("|---|---|---|---|---|---|---|---|", *table(size, found), sep="\n", flush=True)
            shutil.rmtree(folder)
            told["load_after"] = os.getloadavg()
            if options.json:
                options.json.write_text(json.dumps(told, indent=1) + "\n")
        distributed.destroy_process_group()
    print("load before and after:", told["load_before"], told["load_after"])


if __name__ == "__main__":
    main()
