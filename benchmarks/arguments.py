"""Readers of command-line arguments that benchmarks share; argparse shows their errors."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path


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


def output_file(text: str) -> Path:
    """Read the path of a file to write, before hours are spent on what it is to hold."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is no file of a folder that exists")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written")
    return path


def words(known: Sequence[str]) -> Callable[[str], list[str]]:
    """Return a reader of a list of known words."""

    def read(text: str) -> list[str]:
        found = text.split(",")
        if unknown := set(found) - set(known):
            here = f"unknown: {', '.join(sorted(unknown))} (known: {', '.join(known)})"
            raise argparse.ArgumentTypeError(here)
        return found

    return read
