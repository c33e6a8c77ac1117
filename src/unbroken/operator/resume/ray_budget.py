"""Budget of the dashboards of Ray's heads: a user's program costs the operator a bounded part.

Each dashboard has a budget, so has each namespace, and there is one for all. A dashboard that
exceeds one of them is read later. The budgets of a namespace are a third of the total or less: no
namespace takes the connections, the time or the log lines of the others.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from weakref import WeakValueDictionary

from unbroken.agent_http.rates import Bucket
from unbroken.errors import PeerError

BURST_SECONDS = 4.0
"""Seconds of its rate that a dashboard may spend at once."""
MEBIBYTE = 1024 * 1024.0


class Use(Enum):
    """Use of a connection to a dashboard."""

    LOG = "log"
    QUESTION = "question"


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a budget; rates are sustained ones."""

    logs: int
    """Logs that are read at the same time."""
    questions: int
    """Dashboards that are asked at the same time."""
    bytes_a_second: float
    messages_a_second: float
    """Messages of logs.  Ray 2.60 puts up to 10 lines into each."""
    work: float
    """Part of this process's time for decoding and for log rules."""
    lines_a_minute: int
    """Lines of the operator's log."""


DASHBOARD = Limits(20, 1, 4 * MEBIBYTE, 1000.0, 0.1, 2)
NAMESPACE = Limits(100, 8, 8 * MEBIBYTE, 2000.0, 0.15, 6)
TOTAL = Limits(400, 32, 24 * MEBIBYTE, 6000.0, 0.45, 30)
"""400 of the 1,024 descriptors that a process may have by default."""


class Budget:
    """The budget of one dashboard, of a namespace, or of all.  Times are of one monotonic clock."""

    def __init__(self, owner: str, limits: Limits, now: float, above: Budget | None = None) -> None:
        def bucket(rate: float) -> Bucket:
            return Bucket(rate, rate * BURST_SECONDS, now)

        self._owner, self._above = owner, above
        self._most = {Use.LOG: limits.logs, Use.QUESTION: limits.questions}
        self._held = dict.fromkeys(Use, 0)
        self._bytes, self._work = bucket(limits.bytes_a_second), bucket(limits.work)
        self._messages = bucket(limits.messages_a_second)
        self._lines_most, self._lines, self._minute_at = limits.lines_a_minute, 0, now

    def _levels(self) -> Iterator[Budget]:
        level: Budget | None = self
        while level is not None:
            yield level
            level = level._above

    def spend(self, size: int, work: float, now: float, messages: int = 1) -> float:
        """Charge a message of `size` bytes that took `work` seconds; return the seconds until the
        next one may be read."""
        return max(
            delay
            for level in self._levels()
            for delay in (
                level._messages.wait(messages, now),
                level._bytes.wait(size, now),
                level._work.wait(work, now),
            )
        )

    def may_log(self, now: float) -> bool:
        """Charge a line of the operator's log; False: the line must not be written."""
        for level in self._levels():
            if now >= level._minute_at + 60.0:
                level._minute_at, level._lines = now, 0
        if any(level._lines >= level._lines_most for level in self._levels()):
            return False
        for level in self._levels():
            level._lines += 1
        return True

    @contextmanager
    def connection(self, use: Use) -> Iterator[None]:
        """Count a connection during the block.  Raises PeerError if there are too many."""
        for level in self._levels():
            if level._held[use] >= level._most[use]:
                most = f"{level._most[use]} connections for each {use.value}"
                raise PeerError(f"{level._owner} has {most}, the most that are opened")
        for level in self._levels():
            level._held[use] += 1
        try:
            yield
        finally:
            for level in self._levels():
                level._held[use] -= 1


class Budgets:
    """The budgets of all dashboards, each kept while it is used."""

    def __init__(self, now: float) -> None:
        self._total = Budget("the operator", TOTAL, now)
        self._namespaces: WeakValueDictionary[str, Budget] = WeakValueDictionary()
        self._dashboards: WeakValueDictionary[Hashable, Budget] = WeakValueDictionary()

    def of(self, namespace: str, subject: Hashable, now: float) -> Budget:
        """Return the budget of the dashboard of a subject in a namespace."""
        found = self._dashboards.get(subject)
        if found is None:
            above = self._namespaces.get(namespace)
            if above is None:
                above = Budget(f"namespace {namespace}", NAMESPACE, now, self._total)
                self._namespaces[namespace] = above
            found = self._dashboards[subject] = Budget("its head", DASHBOARD, now, above)
        return found
