"""The table of faults that is shipped, with what a file of the user's changes of it."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from pathlib import Path

from unbroken.core.nodes.signals import SignTable
from unbroken.errors import SpecError
from unbroken.spec.nodes.fault_table import load_fault_table

SHIPPED = "shipped"
"""Title of the table in the package."""


def read_table(path: Path | None) -> SignTable:
    """The shipped table, with the file of `path` over it.

    Raises SpecError with every problem of the file.
    """
    return _shipped() if path is None else _read(path)


@cache
def _shipped() -> SignTable:
    """Read once: nothing of it changes, and a local cluster has many daemons."""
    return _read(None)


def _read(path: Path | None) -> SignTable:
    shipped = files("unbroken.nodes").joinpath("data/faults.toml").read_text("utf-8")
    texts = [(SHIPPED, shipped)]
    if path is not None:
        try:
            texts.append((str(path), path.read_text("utf-8")))
        except (OSError, UnicodeDecodeError) as error:
            raise SpecError(f"cannot read the table of faults {path}: {error}") from error
    return SignTable(load_fault_table(texts))
