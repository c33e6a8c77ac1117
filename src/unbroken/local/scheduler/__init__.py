"""Chooses a node for each pod.  `run_scheduler` is the program, `place` the decision."""

from __future__ import annotations

from .driver import run_scheduler
from .place import Decision, place

__all__ = ["Decision", "place", "run_scheduler"]
