"""Training script of every launcher in `recovery.py`: DDP or FSDP2 on gloo, a checkpoint every few
steps.

Each rank reports to the pipe `records` when its process, or its function, began and after every
step. While the harness keeps `gate` closed, a job makes a step only now and then. One launcher is
measured, and the jobs of the others neither compete with it nor look hung.

UNBROKEN_BENCH is a JSON object of `parameters`, `batch`, `checkpoint_steps`, `idle_seconds`,
`sharding` (`ddp`, `fsdp2` or `hsdp`), `nodes`, and the features that our own modes switch on:
`tells` steps, `restartable`, `snapshots`, `compares` (replicas, instead of the broadcast by which
DDP begins).
"""

from __future__ import annotations

import time

BEGAN_AT = time.time()

import json  # noqa: E402
import os  # noqa: E402
import select  # noqa: E402
from functools import partial  # noqa: E402
from importlib import import_module  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import TYPE_CHECKING, Any  # noqa: E402

if TYPE_CHECKING:
    from torch import nn

WIDTH, BATCH = 128, 64
"""Width of the model and samples of a batch in `log_rules_step.py`."""
DIRECTORY = Path(os.environ.get("UNBROKEN_BENCH_DIR", "."))
PULSE_SECONDS = 0.5
DEFAULTS = {
    "parameters": 1_000_000,
    "batch": 64,
    "checkpoint_steps": 10,
    "idle_seconds": 5.0,
    "sharding": "ddp",
    "nodes": 1,
}


class Reporter:
    """Writes records of this process. A record is far below PIPE_BUF, so records never mix."""

    def __init__(self, directory: Path, rank: int | None = None) -> None:
        self.pipe = os.open(directory / "records", os.O_WRONLY)
        self._gate = os.open(directory / "gate", os.O_RDONLY | os.O_NONBLOCK)
        self.given_rank = rank
        self.rank = -1
        self.life = -1

    def __call__(self, event: str, at: float, **more: float) -> None:
        life = {"rank": self.rank, "pid": os.getpid(), "life": self.life}
        os.write(self.pipe, json.dumps({"event": event, **life, "at": at, **more}).encode() + b"\n")

    def begin(self) -> None:
        """Report that the process has reached its script, or that its function is called again."""
        self.rank = int(os.environ["RANK"]) if self.given_rank is None else self.given_rank
        self.life += 1
        at = time.time() if self.life else BEGAN_AT
        self("began", at, process_at=process_started_at())

    def pace(self, idle_seconds: float) -> None:
        """Wait until the gate is open, at most `idle_seconds`.

        Python code runs now and then meanwhile, since some watchdogs require it.
        """
        until = time.monotonic() + idle_seconds
        while (left := until - time.monotonic()) > 0:
            if select.select([self._gate], [], [], min(left, PULSE_SECONDS))[0]:
                return

    def step(self, step: int, learned_at: float | None = None) -> None:
        """Report a complete step, and when it was made, before its snapshot was saved."""
        at = time.time()
        learned = at if learned_at is None else learned_at
        self("step", at, step=step, learned_at=learned, cpu_seconds=time.process_time())


def process_started_at() -> float:
    """Return when the kernel made this process, to a hundredth of a second."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    boot_at = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    return boot_at + ticks / os.sysconf("SC_CLK_TCK")


def settings() -> dict[str, Any]:
    """Return the settings of the harness."""
    return {**DEFAULTS, **json.loads(os.environ.get("UNBROKEN_BENCH", "{}"))}


def build(parameters: int) -> nn.Module:
    """Return a model of two layers with `parameters` parameters in all."""
    from torch import nn

    width = max(1, round((parameters / 2) ** 0.5))
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))


def load(model: nn.Module) -> int:
    """Load the checkpoint; return its step, or 0 if there is none."""
    import torch

    saved = DIRECTORY / "checkpoint.pt"
    if not saved.exists():
        return 0
    found = torch.load(saved, weights_only=True)
    model.load_state_dict(found["model"])
    return int(found["step"])


def save(model: nn.Module, step: int) -> None:
    """Write a checkpoint that becomes visible only when it is complete."""
    import torch

    part = DIRECTORY / "checkpoint.part"
    torch.save({"model": model.state_dict(), "step": step}, part)
    part.rename(DIRECTORY / "checkpoint.pt")


def learn(model: nn.Module, optimizer: Any, size: int) -> None:
    """Make a step with a batch of `size` samples."""
    import torch
    from torch import nn

    width = next(model.parameters()).shape[1]
    optimizer.zero_grad()
    batch = torch.randn(size, width)
    nn.functional.mse_loss(model(batch), batch).backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def train(report: Reporter, wanted: dict[str, Any], store: Any = None) -> None:
    """Train until killed; `store` is for launchers that provide their own process group store."""
    report.begin()
    import torch
    from torch import distributed

    shards = _shards(wanted["sharding"])
    report("imported", time.time())
    torch.set_num_threads(1)
    world = {} if store is None else {"rank": report.rank, "world_size": _world()}
    distributed.init_process_group("gloo", store=store, **world)
    report("joined", time.time())
    make, replicas = partial(build, wanted["parameters"]), None
    if shards is None:
        model = make()
    else:
        model, replicas = shards.made(make, wanted["sharding"], wanted["nodes"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    report("built", time.time())
    snapshot = _snapshot(model, optimizer, replicas) if wanted.get("snapshots") else None
    found = snapshot.restore() if snapshot is not None else None
    if found is not None:
        step = found.step
    else:
        step = load(model) if shards is None else shards.load(model, DIRECTORY)
    report("loaded", time.time())
    parallel = _replicated(model, wanted) if shards is None else model
    report("restored", time.time())
    while True:
        report.pace(wanted["idle_seconds"])
        learn(parallel, optimizer, wanted["batch"])
        step += 1
        learned_at = time.time()
        if snapshot is not None:
            snapshot.save(step)
        report.step(step, learned_at)
        if wanted.get("tells"):
            _tell(step)
        if step % wanted["checkpoint_steps"] == 0:
            _save(model, step, shards)


def _shards(sharding: str) -> Any:
    """Return the module for models in shards; None: the ranks are replicas."""
    return None if sharding == "ddp" else import_module("train_shards")


def _save(model: nn.Module, step: int, shards: Any) -> None:
    """Write a checkpoint: every rank its shards, or rank 0 the whole."""
    if shards is not None:
        shards.save(model, step, DIRECTORY)
    elif os.environ["RANK"] == "0":
        save(model, step)


def _world() -> int:
    return int(os.environ["WORLD_SIZE"])


def _replicated(model: nn.Module, wanted: dict[str, Any]) -> nn.Module:
    """Return the model in DDP, which broadcasts it unless the replicas were compared."""
    from torch.nn.parallel import DistributedDataParallel

    is_equal = wanted.get("compares") and _replicas_agree(model)
    return DistributedDataParallel(model, gradient_as_bucket_view=True, init_sync=not is_equal)


def _snapshot(model: Any, optimizer: Any, replicas: Any) -> Any:
    from unbroken import worker

    return worker.Snapshot(model=model, optimizer=optimizer, replicas=replicas)


def _replicas_agree(model: Any) -> bool:
    from unbroken import worker

    return worker.replicas_agree(model)


def _tell(step: int) -> None:
    from unbroken import worker

    worker.progress(step)


def main() -> None:
    """Train until killed."""
    wanted = settings()
    report = Reporter(DIRECTORY)
    run = train
    if wanted.get("restartable"):
        from unbroken import worker

        import_module("torch.distributed")
        _shards(wanted["sharding"])
        run = worker.restartable(train)
    run(report, wanted)


if __name__ == "__main__":
    main()
