"""The event of a machine whose deadline has come."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed, and everything that had arrived before was passed on."""
