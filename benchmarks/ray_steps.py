"""Steps of two workers under Ray Train, without a model: what ray_recovery.py submits.

    python3 ray_steps.py FOLDER

Each `EVERY`-th step ends with `ray.train.report` and a checkpoint, at which the workers wait for
each other.  Rank 0 writes a line for each step to FOLDER/steps.jsonl.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import ray.train
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

STEP_SECONDS = 0.2
EVERY = 10
"""Steps from a checkpoint to the next.  Ray Train takes reports once in 2 s (Ray 2.60)."""


def loop(config: dict[str, Any]) -> None:
    """Make steps from the newest checkpoint on."""
    rank = ray.train.get_context().get_world_rank()
    step, start = first_step(), f"{time.time_ns()}-{os.getpid()}"
    with (Path(config["folder"]) / "steps.jsonl").open("a", buffering=1) as steps:
        while True:
            time.sleep(STEP_SECONDS)
            if step % EVERY == 0:
                report(step, rank)
            if rank == 0:
                line = {"at": time.time(), "step": step, "start": start}
                steps.write(json.dumps(line) + "\n")
            step += 1


def report(step: int, rank: int) -> None:
    """Report a step, with a checkpoint of rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "step").write_text(str(step))
        found = ray.train.Checkpoint.from_directory(folder) if rank == 0 else None
        ray.train.report({"step": step}, checkpoint=found)


def first_step() -> int:
    """The step after the newest checkpoint; 0 without one."""
    found = ray.train.get_checkpoint()
    if found is None:
        return 0
    with found.as_directory() as folder:
        return int((Path(folder) / "step").read_text()) + 1


def main() -> None:
    """Train until the process is ended."""
    folder = sys.argv[1]
    trainer = DataParallelTrainer(
        loop,
        train_loop_config={"folder": folder},
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(
            name="steps",
            storage_path=folder,
            failure_config=ray.train.FailureConfig(max_failures=-1),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
        ),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
