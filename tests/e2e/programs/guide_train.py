"""Script that stands for those in the guides' manifests, without torch: it logs and ends.

It takes any arguments. It ends once a file `finish` is next to it; rank 0 of the first attempt
fails if there is a file `fail`.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
RANK, ATTEMPT = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


say(f"Experiment configuration: {sys.argv[1:]}")
for step in itertools.count():
    say(f"[Epoch 0 Batch {step} 'training_loss_step': 2.5, 'samples/sec': 99.5")
    say(f"Batch {step} Loss: 2.5")
    if (HERE / "finish").exists():
        break
    if (HERE / "fail").exists() and (RANK, ATTEMPT) == ("0", "0"):
        raise ValueError("bad batch")
    time.sleep(0.2)
