"""Readers of command-line arguments that benchmarks share; argparse shows their errors."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence


def count(text: str) -> int:
    """Read a whole number of at least 1: a benchmark without a trial would print an empty table."""
    if not (text.isascii() and text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def durations(text: str) -> list[float]:
    """Read a list of seconds, such as 5,15."""
    try:
        found = [float(one) for one in text.split(",")]
    except ValueError:
        found = [math.nan]
    if not all(math.isfinite(one) and one >= 0 for one in found):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of seconds, such as 5,15")
    return found


def words(known: Sequence[str]) -> Callable[[str], list[str]]:
    """Return a reader of a list of known words."""

    def read(text: str) -> list[str]:
        found = text.split(",")
        if unknown := set(found) - set(known):
            here = f"unknown: {', '.join(sorted(unknown))} (known: {', '.join(known)})"
            raise argparse.ArgumentTypeError(here)
        return found

    return read
