"""What a snapshot of 1 GB costs, beside copying, torch.save and DCP's asynchronous save.

`python benchmarks/snapshot.py [--quick] [--rounds 5] [--json FILE]`; medians of seconds.  The agent
is a thread of this process behind the real socket; `blocked` is how long a call holds up training,
`done` how long until what it saves can be restored.
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
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "worker"))

from snapshot_agents import channel

from unbroken.agent.snapshots import Snapshots
from unbroken.worker.snapshot import Snapshot

TENSORS = 64


def seconds(call: Callable[[], Any]) -> float:
    """Of one call."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def measure_snapshots(tensors: list[torch.Tensor], rounds: int) -> dict[str, list[float]]:
    """Saving and restoring with an agent."""
    found: dict[str, list[float]] = {"first two saves, blocked": []}
    saved, done = [], []
    memory = Snapshots()
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
                found["first two saves, blocked"].append(blocked)
            else:
                saved.append(blocked)
                done.append(time.perf_counter() - began)
        restored = [seconds(snapshot.restore) for _ in range(rounds)]
        snapshot.close()
    memory.close()
    return found | {"save, blocked": saved, "save, done": done, "restore": restored}


def measure_files(tensors: list[torch.Tensor], rounds: int, folder: Path) -> dict[str, list[float]]:
    """The same on disk, which is whatever the temporary folder is on."""
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


def measure(size: int, rounds: int) -> dict[str, list[float]]:
    """Everything, by name."""
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
    found = {
        "memcpy of the tensors": [seconds(copy) for _ in range(rounds)],
        "CRC-32 of the tensors": [seconds(checksum) for _ in range(rounds)],
    }
    other.clear()
    found |= measure_snapshots(tensors, rounds)
    with tempfile.TemporaryDirectory() as folder:
        found |= measure_files(tensors, rounds, Path(folder))
    return found


def main() -> None:
    """Measure and tell."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="64 MB instead of 1 GB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    size = 64_000_000 if options.quick else 1_000_000_000
    found = measure(size, options.rounds)
    medians = {name: statistics.median(values) for name, values in found.items()}
    for name, middle in medians.items():
        values = found[name]
        rate = size / middle / 1e9
        print(f"{name:26} {middle:8.3f} s  {rate:6.2f} GB/s  ({min(values):.3f}-{max(values):.3f})")
    if options.json:
        told = {
            "bytes": size,
            "median_seconds": medians,
            "seconds": found,
            "torch": torch.__version__,
        }
        options.json.write_text(json.dumps(told))


if __name__ == "__main__":
    main()
