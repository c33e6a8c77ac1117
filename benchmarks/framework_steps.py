"""Note the steps of a rank for `frameworks.py`, in a file that the frameworks do not know."""

from __future__ import annotations

import json
import os
import time

STEP_SECONDS = 0.1
"""Pause after each step, so that training leaves most of the machine to the launchers."""
_noted = os.open(os.environ["FRAMEWORK_STEPS"], os.O_WRONLY | os.O_APPEND)


def made(step: int) -> None:
    """Note a step of this process's rank; nothing of it is in the output that launchers see."""
    record = {"rank": int(os.environ["RANK"]), "pid": os.getpid(), "step": step, "at": time.time()}
    os.write(_noted, json.dumps(record).encode() + b"\n")
    time.sleep(STEP_SECONDS)
