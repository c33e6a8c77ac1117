"""Worker of a world of one with its state in memory and on disk; in attempt 0 it resumes late.

Its weight encodes attempt and step. After step 3 of attempt 0 it waits at DIRECTORY/wake, tries to
save an old step, and writes the result to DIRECTORY/told.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from restartable import report
from torch import nn

from unbroken import worker
from unbroken.worker.checkpointing.checkpoints import Checkpoints, Superseded

LATE_STEP = 99
DIRECTORY = Path(sys.argv[1])
ATTEMPT = int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def save_late(snapshot: worker.Snapshot, disk: Checkpoints, model: nn.Module) -> None:
    """Save an old step after the wake; report to the test while the next attempt runs."""
    (DIRECTORY / "wake").read_bytes()
    is_kept = snapshot.save(LATE_STEP)
    snapshot.flush()
    try:
        disk.save(LATE_STEP, model=model)
        disk.wait()
        outcome = f"failed: {disk.failed}"
    except Superseded as error:
        outcome = type(error).__name__
    (DIRECTORY / "told").write_text(json.dumps({"kept": is_kept, "disk": outcome}))


def main() -> None:
    """Make steps until DIRECTORY/finish exists."""
    names = ("GROUP_RANK", "LOCAL_RANK", "WORLD_SIZE", "UNBROKEN_POD")
    environment = {name: os.environ.get(name) for name in names}
    report("start", agent=os.getppid(), environment=environment)
    model = nn.Linear(1, 1)
    disk = worker.checkpoints(DIRECTORY / "saved", every=1)
    snapshot = worker.Snapshot(model=model, checkpoints=disk)
    found = snapshot.restore()
    if found:
        report("restored", step=found.step, source=found.source, weight=model.weight.item())
    step = found.step if found else 0
    while not (DIRECTORY / "finish").exists():
        step += 1
        nn.init.constant_(model.weight, 1000 * ATTEMPT + step)
        snapshot.save(step)
        disk.save(step, model=model)
        disk.wait()
        worker.progress(step)
        report("step", step=step)
        if (ATTEMPT, step) == (0, 3):
            report("held")
            save_late(snapshot, disk, model)
    report("end")


if __name__ == "__main__":
    main()
