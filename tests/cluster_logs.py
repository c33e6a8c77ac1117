"""Checks that a cluster's program has logged no error by the end of a test."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

ENTRY = re.compile(r"^(?=\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} [A-Z]+ )", re.MULTILINE)
BAD = re.compile(
    r"\A\S+ \S+ (?:ERROR|CRITICAL) "
    r"|^(?:(?:  \+ Exception Group )?Traceback |Exception ignored in|\S+ RuntimeWarning: )",
    re.MULTILINE,
)


def errors(text: str, allowed: Iterable[str] = ()) -> list[str]:
    """Return the error entries of a log, except those in which an allowed expression is found."""
    bad = [entry.strip() for entry in ENTRY.split(text) if BAD.search(entry)]
    return [entry for entry in bad if not any(re.search(one, entry) for one in allowed)]


def assert_no_errors(log: Path, allowed: Iterable[str] = ()) -> None:
    """Raise AssertionError with the errors of a log; a missing log has none."""
    found = errors(log.read_text(errors="replace"), allowed) if log.exists() else []
    assert not found, f"{len(found)} error(s) in {log}:\n" + "\n".join(found[:5])
