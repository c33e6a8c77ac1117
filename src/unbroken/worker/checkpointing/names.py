"""Rules for the checkpoints of a directory: which count, and which are deleted; values in, values
out.

A checkpoint is a directory `step-00000120.attempt-3`. The attempt is the directory's own count:
each time that training begins it claims the next number, and the claim lists the checkpoints that
it inherits. A checkpoint that an older attempt completes after that is in no list, so it never
counts. No lock is needed, and a worker may be stopped anywhere for any time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from unbroken.worker.typed_values import exchanged

UNFINISHED, BAD, TRASH = ".tmp", ".bad", ".trash"
_PATTERN = re.compile(r"step-(\d{8,18})\.attempt-(\d{1,9})(\.tmp|\.bad|\.trash)?", re.ASCII)


@exchanged
@dataclass(frozen=True, order=True)
class Name:
    """A checkpoint; ordered by the time at which it was made."""

    attempt: int
    step: int

    def __str__(self) -> str:
        return f"step-{self.step:08}.attempt-{self.attempt}"


def parse(text: str) -> tuple[Name, str] | None:
    """Return the name and its suffix; None: the entry does not match the format exactly."""
    match = _PATTERN.fullmatch(text)
    if match is None:
        return None
    name, suffix = Name(int(match[2]), int(match[1])), match[3] or ""
    return (name, suffix) if text == f"{name}{suffix}" else None


def complete(entries: Iterable[str], attempt: int, inherited: frozenset[str]) -> list[Name]:
    """Return the names that count for an attempt, newest first."""
    result = [parsed for entry in entries if (parsed := parse(entry)) and not parsed[1]]
    return sorted(
        (name for name, _ in result if name.attempt == attempt or str(name) in inherited),
        reverse=True,
    )


@dataclass(frozen=True)
class Retention:
    """The checkpoints to keep: the newest ones, and one in every so many steps."""

    keep: int = 2
    keep_every: int | None = None
    keep_best: int = 0
    """The number of those with the lowest metrics."""

    def spares(self, name: Name) -> bool:
        """True if its step alone is a reason to keep it."""
        return bool(self.keep_every) and name.step % (self.keep_every or 1) == 0

    def best(self, metrics: Mapping[Name, float | None]) -> set[Name]:
        """Return those that their metrics are a reason to keep; of equal ones the newest."""
        known = [(value, name) for name, value in metrics.items() if value is not None]
        known = [(value, name) for value, name in known if value == value]  # no NaN
        known.sort(key=lambda one: (one[0], -one[1].attempt, -one[1].step))
        return {name for _, name in known[: self.keep_best]}


def doomed(
    entries: Iterable[str],
    counting: list[Name],
    attempt: int,
    retention: Retention,
    safe: Name,
    metrics: Mapping[Name, float | None] = MappingProxyType({}),
) -> list[str]:
    """Return the entries to delete once `counting` are complete.

    Never deleted are entries of a newer attempt, foreign entries, entries found bad, and `safe`
    with all newer ones: `safe` is the newest that every node has. Entries that `counting` leaves
    out because no attempt inherited them are deleted as well if they are of an older attempt.
    """
    kept = {name for at, name in enumerate(counting) if at < retention.keep or name >= safe}
    kept |= {name for name in counting if retention.spares(name)} | retention.best(metrics)
    newest = max(counting, default=Name(-1, -1))
    result = []
    for entry in entries:
        name, suffix = parse(entry) or (None, BAD)
        if name is None or suffix == BAD or name.attempt > attempt:
            continue
        # The checkpoint that this attempt is writing is newer than all complete ones.
        is_left = suffix == UNFINISHED and (name.attempt < attempt or name < newest)
        if is_left or suffix == TRASH or (not suffix and name not in kept):
            result.append(entry)
    return result
