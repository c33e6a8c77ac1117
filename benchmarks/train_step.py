"""What every launcher of `recovery.py` runs: a small DDP model on gloo, a checkpoint each step.

Each rank reports to the pipe `records` when its process began and after every step, and waits at
the start of a step while the harness holds the lock on `gate`: while one launcher is measured, the
jobs of the others stand still.
"""

from __future__ import annotations

import time

BEGAN_AT = time.time()

import fcntl  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
from pathlib import Path  # noqa: E402

WIDTH, BATCH = 128, 64


class Reporter:
    """Writes records of this process; a record is far below PIPE_BUF, so none are mixed up."""

    def __init__(self, directory: Path) -> None:
        self.pipe = os.open(directory / "records", os.O_WRONLY)
        self.rank = int(os.environ["RANK"])

    def __call__(self, event: str, at: float, **more: float) -> None:
        record = {"event": event, "rank": self.rank, "pid": os.getpid(), "at": at, **more}
        os.write(self.pipe, json.dumps(record).encode() + b"\n")


def process_started_at() -> float:
    """When this process was made, by the kernel; to a hundredth of a second."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    boot_at = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    return boot_at + ticks / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Train until killed."""
    directory = Path(os.environ["UNBROKEN_BENCH_DIR"])
    report = Reporter(directory)
    report("began", BEGAN_AT, process_at=process_started_at())
    import torch
    from torch import distributed, nn
    from torch.nn.parallel import DistributedDataParallel

    report("imported", time.time())
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    report("joined", time.time())
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    saved, step = directory / "checkpoint.pt", 0
    if saved.exists():
        found = torch.load(saved, weights_only=True)
        model.load_state_dict(found["model"])
        step = found["step"]
    parallel = DistributedDataParallel(model)
    gate = os.open(directory / "gate", os.O_RDONLY)
    while True:
        fcntl.flock(gate, fcntl.LOCK_SH)
        fcntl.flock(gate, fcntl.LOCK_UN)
        optimizer.zero_grad()
        batch = torch.randn(BATCH, WIDTH)
        nn.functional.mse_loss(parallel(batch), batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        step += 1
        if report.rank == 0:
            part = saved.with_suffix(".part")
            torch.save({"model": model.state_dict(), "step": step}, part)
            part.rename(saved)
        report("step", time.time(), step=step, cpu_seconds=time.process_time())


if __name__ == "__main__":
    main()
