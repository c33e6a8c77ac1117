"""Worker of the hang tests: `gang` that reports steps, saves checkpoints, and hangs on request.

Files in DIRECTORY select the behaviour. With `stuck` rank 2 waits for a batch that never comes, in
the first attempt. With `saving` rank 0 writes a checkpoint, until `saved` is there too.
"""

from __future__ import annotations

import os
import queue
import sys
from typing import NoReturn

import gang

from unbroken import worker

SAVE_STEPS = 20
CHECKPOINT = gang.DIRECTORY / "checkpoint"
STUCK, SAVING, SAVED = (gang.DIRECTORY / name for name in ("stuck", "saving", "saved"))


class Loader:
    """Loader whose next batch never comes."""

    def next_batch(self) -> NoReturn:
        """Wait for ever."""
        sys.stdout.write("asks for a batch\n")
        sys.stdout.flush()
        queue.Queue[None]().get()
        raise AssertionError


def save_slowly() -> None:
    """Write a large file again and again."""
    with (gang.DIRECTORY / "large").open("wb", buffering=0) as file:
        while not SAVED.exists():
            file.seek(0)
            file.write(os.urandom(1 << 20))
            os.fsync(file.fileno())


def save(step: int) -> None:
    """Whole or not at all."""
    draft = CHECKPOINT.with_suffix(".draft")
    draft.write_text(str(step))
    draft.replace(CHECKPOINT)
    worker.checkpoint(step)


def main() -> None:
    """Train from the checkpoint until DIRECTORY/finish exists."""
    step = int(CHECKPOINT.read_text()) if CHECKPOINT.exists() else 0
    names = ("GROUP_RANK", "LOCAL_RANK", "WORLD_SIZE", "UNBROKEN_POD")
    environment = {name: os.environ.get(name) for name in names}
    others, agent = gang.lock(), os.getppid()
    gang.report("start", others=others, agent=agent, environment=environment, step=step + 1)
    peers = gang.listen() if gang.RANK == 0 else gang.connect()
    is_last = False
    while not is_last:
        step += 1
        gang.follow_plan(step)
        if gang.RANK == 2 and gang.ATTEMPT == 0 and STUCK.exists():
            Loader().next_batch()
        if gang.RANK == 0 and SAVING.exists() and not SAVED.exists():
            save_slowly()
        is_last = gang.step_together(peers)
        worker.progress(step, loss=1 / step)
        gang.report("step", step=step)
        if gang.RANK == 0 and step % SAVE_STEPS == 0:
            save(step)


if __name__ == "__main__":
    gang.run(main)
