"""Budget of the dashboards of Ray's heads: a user's program costs the operator a bounded part.

Each dashboard has a budget, so has each namespace, and there is one for all. The budgets of a
namespace are a third of the total or less: no namespace takes the connections, the time or the log
lines of the others.
"""

from __future__ import annotations

from collections.abc import Hashable
from enum import Enum
from weakref import WeakValueDictionary

from unbroken.budget import Budget, Flow, Limits

BURST_SECONDS = 4.0
"""Seconds of its rate that a dashboard may spend at once."""
MEBIBYTE = 1024 * 1024.0


class Use(Enum):
    """Use of a connection to a dashboard."""

    LOG = "log"
    QUESTION = "question"


def _limits(
    logs: int, questions: int, megabytes: float, messages: float, work: float, lines: int
) -> Limits:
    """Return limits: logs that are read, and dashboards that are asked, at the same time; MiB,
    messages of logs (Ray 2.60 puts up to 10 lines into each) and work a second; lines a minute."""

    def flow(rate: float) -> Flow:
        return Flow(rate, rate * BURST_SECONDS)

    uses: dict[Enum, int] = {Use.LOG: logs, Use.QUESTION: questions}
    return Limits(flow(messages), flow(megabytes * MEBIBYTE), flow(work), uses, lines)


DASHBOARD = _limits(20, 1, 4.0, 1000.0, 0.1, 2)
NAMESPACE = _limits(100, 8, 8.0, 2000.0, 0.15, 6)
TOTAL = _limits(400, 32, 24.0, 6000.0, 0.45, 30)
"""400 of the 1,024 descriptors that a process may have by default."""


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
