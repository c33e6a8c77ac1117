"""Lines that recur in the output of workers: losses, steps, progress bars.

A script that reports no steps shows by them that it trains. A line printed once at each start shows
nothing. Two lines are of one kind if they have the same words in the same order: numbers, units and
the bars of progress bars do not count. A progress bar that knows no rate yet shows nothing either:
it is drawn when training begins, before the first step.

An agent remembers over attempts which kinds recurred, so the first line of such a kind tells that
training has resumed. Without that memory a kind must have lasted for as long as the start before
it: a bar of the start-up, such as one of a model's files, is usually shorter.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

RECURS = 3
"""Lines of one kind in one attempt of one worker, from which on the kind recurs."""
KINDS_MAX = 64
"""Kinds remembered of one attempt of a worker, and over attempts; the newest ones stay."""
LINES_READ_MAX = 16
"""Lines read of what was written at once: the last ones."""
LINE_BYTES_READ = 200
"""Bytes read of a line."""
# Dashes, arrows, box drawing, blocks and other symbols: U+2000 to U+2FFF.
_SYMBOL = re.compile(rb"\xe2[\x80-\xbf][\x80-\xbf]")
# Units (s, it, ms, GB) have two letters at most, and change with the number before them.
_WORD = re.compile(rb"(?<![\w\x80-\xff])[A-Za-z_\x80-\xff]{3,}(?![\w\x80-\xff])")
_SHOWN = re.compile(rb"[0-9A-Za-z\x80-\xff]")
# tqdm with and without a total (`[00:00<?, ?it/s]`, `[00:00, ?it/s]`), and rich.
_NO_RATE = re.compile(rb"<\?, |, \?[A-Za-z]+/s|-:--:--")
_NUMBER_WORDS = frozenset((b"nan", b"NaN", b"NAN", b"inf", b"Inf", b"INF", b"Infinity"))


@dataclass(slots=True)
class _Kind:
    """Lines of one kind in one attempt; times by the agent's clock."""

    first_at: float
    last_at: float
    count: int = 0

    @property
    def seconds(self) -> float:
        return self.last_at - self.first_at


def kind_of(line: bytes) -> bytes | None:
    """Return the kind of a line; None: it shows nothing.

    It has neither letters nor digits, or is a progress bar that has only been drawn.
    """
    if _NO_RATE.search(line[:LINE_BYTES_READ]):
        return None
    text = _SYMBOL.sub(b" ", line[:LINE_BYTES_READ])
    words = [word for word in _WORD.findall(text) if word not in _NUMBER_WORDS]
    return b" ".join(words) if words or _SHOWN.search(text) else None


class WorkerLines:
    """The lines of one worker in one attempt."""

    __slots__ = ("_kinds", "_known", "_start_at", "recurring_at")

    def __init__(self, known: frozenset[bytes], start_at: float) -> None:
        self._known = known
        self._start_at = start_at
        self._kinds: dict[bytes, _Kind] = {}
        """Kinds by the time of their newest line, the oldest first."""
        self.recurring_at: float | None = None
        """Time of the first line that shows that the worker trains; None: there is none so far."""

    def take(self, lines: Sequence[bytes], now: float) -> None:
        """Take whole lines that were written now."""
        for line in lines[-LINES_READ_MAX:]:
            kind = kind_of(line)
            if kind is not None:
                self._count(kind, now)

    def _count(self, kind: bytes, now: float) -> None:
        found = self._kinds.pop(kind, None)
        if found is None:
            found = _Kind(now, now)
            if len(self._kinds) >= KINDS_MAX:
                rare = (one for one, seen in self._kinds.items() if seen.count < RECURS)
                del self._kinds[next(rare, next(iter(self._kinds)))]
        self._kinds[kind] = found
        found.count, found.last_at = found.count + 1, now
        if self.recurring_at is None and self._shows_training(kind, found):
            self.recurring_at = found.first_at

    def _shows_training(self, kind: bytes, found: _Kind) -> bool:
        if self._known:
            return kind in self._known
        return found.count >= RECURS and found.seconds >= found.first_at - self._start_at

    def recurring(self) -> tuple[list[bytes], list[bytes]]:
        """Return the kinds that recurred while the worker trained, and those of its start-up.

        A kind is of the start-up if one that began after its last line has lasted longer.
        """
        all_of = [(kind, one) for kind, one in self._kinds.items() if one.count >= RECURS]
        old = [
            kind
            for kind, one in all_of
            if any(
                other.first_at > one.last_at and other.seconds > one.seconds for _, other in all_of
            )
        ]
        return [kind for kind, _ in all_of if kind not in old], old

    def began_later(self, kind: bytes) -> bool:
        """True if the first line of the kind came when the worker trained."""
        at = self.recurring_at
        return at is not None and self._kinds[kind].first_at >= at


class RecurringLines:
    """Kinds of lines that recur in a job's training, as one agent has seen them."""

    def __init__(self) -> None:
        self._known: dict[bytes, None] = {}
        self._attempt: int | None = None
        self._start_at = 0.0
        self._workers: dict[int, WorkerLines] = {}
        """Lines of the attempt by local rank."""

    def begin(self, attempt: int, start_at: float) -> None:
        """Begin an attempt, and learn from the one before."""
        self._learn()
        self._attempt, self._start_at, self._workers = attempt, start_at, {}

    def take(
        self, attempt: int, local_rank: int, lines: Sequence[bytes], now: float
    ) -> float | None:
        """Take lines that a worker wrote now.

        Return the time of the first line that shows that it trains, once that becomes known; else
        None. Lines of another attempt are ignored: their worker has ended.
        """
        if attempt != self._attempt:
            return None
        worker = self._workers.get(local_rank)
        if worker is None:
            worker = WorkerLines(frozenset(self._known), self._start_at)
            self._workers[local_rank] = worker
        before = worker.recurring_at
        worker.take(lines, now)
        return worker.recurring_at if before is None else None

    def _learn(self) -> None:
        """Add the kinds of the attempt.

        If it is known what training prints, an attempt that never printed it teaches nothing: it
        may have ended in its start-up.
        """
        is_first = not self._known
        for worker in self._workers.values():
            recurring, old = worker.recurring()
            if not is_first:
                recurring = [kind for kind in recurring if worker.began_later(kind)]
            self._known.update(dict.fromkeys(recurring))
            for kind in old if worker.recurring_at is not None else ():
                self._known.pop(kind, None)
        for surplus in list(self._known)[:-KINDS_MAX]:
            del self._known[surplus]
