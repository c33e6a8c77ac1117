"""Train 40 steps with a run of a tracker: `train.py FOLDER mlflow|wandb PODS_LOST`.

Rank 1 dies in the first attempt, and rank 0 in the second, both with SIGKILL. With `PODS_LOST`=1
the third attempt waits for the loss of a pod. State is saved each 5 steps, so that steps are
repeated.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from importlib import import_module
from pathlib import Path

from unbroken import worker
from unbroken.worker.tracking.run import Run

STEPS, SAVE_STEPS, STEP_SECONDS = 40, 5, 0.1
DEATHS = {0: (1, 12), 1: (0, 23)}
"""Rank and step by attempt."""
WAITS_AT = {2: 32}
folder, tracker = Path(sys.argv[1]), import_module(sys.argv[2])
waits_at = WAITS_AT if sys.argv[3] == "1" else {}


def wait_until_open(run: Run, here: worker.Context) -> None:
    """Wait on all ranks until rank 0 has its run: a process that is killed before has written
    nothing."""
    is_open = folder / f"open-{here.attempt}"
    while not is_open.exists():
        time.sleep(STEP_SECONDS)
        if run.id is not None:
            is_open.touch()


@worker.restartable
def train() -> None:
    here, state = worker.context(), folder / "state"
    with worker.track(tracker, project="trackers", params={"lr": 0.1}) as run:
        wait_until_open(run, here)
        for step in range(int(state.read_text()) if state.exists() else 0, STEPS):
            time.sleep(STEP_SECONDS)
            if DEATHS.get(here.attempt) == (here.rank, step):
                os.kill(os.getpid(), signal.SIGKILL)
            while waits_at.get(here.attempt) == step:
                (folder / "waits").touch()
                time.sleep(STEP_SECONDS)
            worker.progress(step, loss=1 / (step + 1))
            run.log(step, loss=1 / (step + 1))
            if here.rank == 0 and (step + 1) % SAVE_STEPS == 0:
                state.with_suffix(".new").write_text(str(step + 1))
                state.with_suffix(".new").rename(state)


train()
