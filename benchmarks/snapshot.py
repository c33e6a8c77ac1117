"""Cost of a snapshot of 1 GB, compared with copying, torch.save and DCP's asynchronous save.

`python benchmarks/snapshot.py [--quick] [--rounds 5] [--json FILE]`; medians of seconds.  The agent
is a thread of this process behind the real socket.  `blocked` is the time for which a call holds up
training, `done` the time until the saved state can be restored.  Steps without and with a save take
turns, so that noise affects both alike.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from arguments import count, output_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import snapshot_buddy

from tests.worker.snapshot_agents import channel
from unbroken.agent.snapshots.slots import SnapshotSlots
from unbroken.worker.checkpointing.checkpoints import checkpoints
from unbroken.worker.snapshot.snapshot import Snapshot

TENSORS = 64
STEP_SECONDS, FIRST_STEP_SECONDS = 0.3, 2.0


def seconds(call: Callable[[], Any]) -> float:
    """Return the duration of one call in seconds."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def measure_snapshots(tensors: list[torch.Tensor], rounds: int) -> dict[str, list[float]]:
    """Measure saving and restoring with an agent."""
    found: dict[str, list[float]] = {"first save, blocked": [], "second save, blocked": []}
    saved, done = [], []
    memory = SnapshotSlots()
    with channel(memory) as line:
        parts: dict[str, Any] = {f"part{number}": one for number, one in enumerate(tensors)}
        snapshot = Snapshot(**parts, channel=line)
        for step in range(rounds + 2):
            began = time.perf_counter()
            if not snapshot.save(step):
                raise SystemExit("a snapshot was refused: too little memory")
            blocked = time.perf_counter() - began
            snapshot.flush()
            if step < 2:
                found[("first save, blocked", "second save, blocked")[step]].append(blocked)
                train(FIRST_STEP_SECONDS)
            else:
                saved.append(blocked)
                done.append(time.perf_counter() - began)
        steps = {"step": [], "step and save": []}
        for step in range(rounds + 2, 2 * rounds + 2):
            steps["step"].append(seconds(lambda: train(STEP_SECONDS)))
            steps["step and save"].append(
                seconds(lambda number=step: train(STEP_SECONDS) or snapshot.save(number))
            )
        snapshot.flush()
        restored = [seconds(snapshot.restore) for _ in range(rounds)]
        snapshot.close()
    memory.close()
    return found | {"save, blocked": saved, "save, done": done} | steps | {"restore": restored}


def train(length: float) -> None:
    """Compute for about `length` seconds; the work is the same each time."""
    global _multiplications
    if not _multiplications:
        torch.mm(_matrix, _matrix)
        _multiplications = max(1, round(1 / seconds(lambda: torch.mm(_matrix, _matrix))))
    for _ in range(round(length * _multiplications)):
        torch.mm(_matrix, _matrix)


_matrix = torch.randn(512, 512)
_multiplications = 0
"""Multiplications a second of this machine."""


class Tensors:
    """State of a model: tensors by name."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors = tensors

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the tensors by name."""
        return {str(number): one for number, one in enumerate(self._tensors)}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Copy tensors into these, in place."""
        for number, one in enumerate(self._tensors):
            one.copy_(state[str(number)])


def measure_checkpoints(
    tensors: list[torch.Tensor], rounds: int, folder: Path
) -> dict[str, list[float]]:
    """Measure `worker.checkpoints` on the same disk, with every file read back."""
    model = Tensors(tensors)
    (folder / "ours").mkdir()
    saved = checkpoints(folder / "ours", keep=2)
    saved.restore(model=model)
    blocked, done = [], []
    for step in range(rounds):
        began = time.perf_counter()
        saved.save(step, model=model)
        blocked.append(time.perf_counter() - began)
        saved.wait()
        done.append(time.perf_counter() - began)
    restored = [
        seconds(lambda: checkpoints(folder / "ours", keep=2).restore(model=model))
        for _ in range(rounds)
    ]
    return {
        "checkpoints, blocked": blocked,
        "checkpoints, done": done,
        "checkpoints, restore": restored,
    }


def measure_files(tensors: list[torch.Tensor], rounds: int, folder: Path) -> dict[str, list[float]]:
    """Measure torch.save and DCP on the disk of the temporary folder."""
    dcp: Any = import_module("torch.distributed.checkpoint")

    state: dict[str, Any] = {str(number): one for number, one in enumerate(tensors)}
    path, found = folder / "state.pt", {}

    def save() -> None:
        torch.save(state, path)
        with path.open("rb") as file:
            os.fsync(file.fileno())

    found["torch.save and fsync"] = [seconds(save) for _ in range(rounds)]
    found["torch.load"] = [seconds(lambda: torch.load(path)) for _ in range(rounds)]
    blocked, done = [], []
    for number in range(rounds):
        began = time.perf_counter()
        future = dcp.async_save(state, checkpoint_id=str(folder / f"dcp{number % 2}"))
        blocked.append(time.perf_counter() - began)
        future.result()
        done.append(time.perf_counter() - began)
    return found | {"DCP async_save, blocked": blocked, "DCP async_save, done": done}


def measure(size: int, rounds: int) -> Iterator[dict[str, list[float]]]:
    """Measure everything; yield figures by name as soon as they are known."""
    count = size // TENSORS // 4
    tensors = [torch.randn(count) for _ in range(TENSORS)]
    other = [torch.empty_like(one) for one in tensors]

    def copy() -> None:
        for here, there in zip(tensors, other, strict=True):
            there.copy_(here)

    def checksum() -> None:
        for one in tensors:
            zlib.crc32(memoryview(one.numpy().data).cast("B"))

    copy()
    yield {
        "memcpy of the tensors": [seconds(copy) for _ in range(rounds)],
        "CRC-32 of the tensors": [seconds(checksum) for _ in range(rounds)],
    }
    other.clear()
    yield measure_snapshots(tensors, rounds)
    with tempfile.TemporaryDirectory() as folder:
        yield measure_files(tensors, rounds, Path(folder))
        yield measure_checkpoints(tensors, rounds, Path(folder))
    tensors.clear()
    yield snapshot_buddy.measure(TENSORS, count, min(rounds, 3))


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="64 MB instead of 1 GB")
    parser.add_argument("--rounds", type=count, default=5)
    parser.add_argument("--json", type=output_file)
    options = parser.parse_args()
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    size = 64_000_000 if options.quick else 1_000_000_000
    found: dict[str, list[float]] = {}
    for part in measure(size, options.rounds):
        found |= part
        for name, values in part.items():
            middle = statistics.median(values)
            span = f"({min(values):.3f}-{max(values):.3f})"
            rate = "" if name.startswith("step") else f"{size / middle / 1e9:.2f} GB/s"
            print(f"{name:26} {middle:8.3f} s  {rate:>10}  {span}", flush=True)
    if options.json:
        medians = {name: statistics.median(values) for name, values in found.items()}
        told = {
            "bytes": size,
            "median_seconds": medians,
            "seconds": found,
            "torch": torch.__version__,
        }
        options.json.write_text(json.dumps(told))


if __name__ == "__main__":
    main()
