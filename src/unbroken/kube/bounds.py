"""Bounds of the objects of a kind without a fixed shape, and of the work that changes of objects
cost.

The operator reads no object beyond the bounds, and its webhook admits none. JSON that is nested too
deeply for a recursive decoder is cut without recursion.

Who may write objects in one namespace may change them without end, and each change of a large
object, or of one whose patterns are to be compiled, takes up to 60 ms. So each namespace has a
budget for such changes, and there is one for all. The changes of a namespace over its budget wait;
those of other namespaces do not, and of an object only the newest is taken. Objects of the cluster
itself have no budget.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Hashable

from unbroken.budget import Budget, Flow, Limits

from .clock import monotonic, processor

OBJECT_BYTES_MAX = 1 << 20
"""Bytes of an object of a kind without a fixed shape: etcd takes 1.5 MiB, and decoded it takes
about ten times that."""

COMMAS_MAX = 64 * 1024
"""Commas of such an object: they bound the values, whose decoding takes about 30 ms then."""

DEPTH_MAX = 64
"""Levels of an object of a kind without a fixed shape.

A pod template has about 15; kube-apiserver takes 10,000, and Python's own functions (copy,
comparison, encoding) fail from about 300 on.
"""
_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)|[\[{]|[\]}]', re.DOTALL)


def cut(text: bytes, depth: int) -> tuple[bytes, list[bytes]]:
    """Return the text with each object or list below `depth` levels replaced by its number, and
    these.

    It takes time linear in the text. The result for text that is not JSON is not JSON either.
    """
    kept: list[bytes] = []
    pieces: list[bytes] = []
    level = start = copied = 0
    for token in _TOKEN.finditer(text):
        char = text[token.start()]
        if char in b"[{":
            level += 1
            if level == depth + 1:
                start = token.start()
        elif char in b"]}":
            if level == depth + 1:
                kept += [text[copied:start], b"%d" % len(pieces)]
                pieces.append(text[start : token.end()])
                copied = token.end()
            level -= 1
    return b"".join([*kept, text[copied:]]), pieces


def excess(content: bytes) -> str:
    """Return the bound that an object exceeds; empty: none."""
    if len(content) > OBJECT_BYTES_MAX:
        return f"has more than {OBJECT_BYTES_MAX} bytes"
    if content.count(b",") > COMMAS_MAX:
        return f"has more than {COMMAS_MAX} commas"
    if is_too_deep(content):
        return f"is nested more than {DEPTH_MAX} levels deep"
    return ""


def is_too_deep(text: bytes) -> bool:
    """True for an object of more than DEPTH_MAX levels."""
    if text.count(b"{") + text.count(b"[") <= DEPTH_MAX:
        return False
    return bool(cut(text, DEPTH_MAX)[1])


FREE_SECONDS = 0.001
"""Work of a change that is not charged.  A change of an honest pod takes 0.3 ms, and a large job
has tens of thousands of them at its start."""
MOST_SECONDS = 0.1
"""Most work that a change is charged: more than that is due to Python's garbage collection."""
NAMESPACE = Limits(work=Flow(0.1, 1.0), lines_a_minute=6)
TOTAL = Limits(work=Flow(0.3, 3.0), lines_a_minute=30)
"""Limits of all namespaces together: a namespace takes a third."""


class ObjectBudgets:
    """The budgets of all namespaces whose objects one program follows."""

    def __init__(
        self, clock: Callable[[], float] = monotonic, work: Callable[[], float] = processor
    ) -> None:
        """`clock` and `work`: seconds that have passed, and that this thread has used."""
        self.work = work
        self._clock = clock
        self._total = Budget("all objects", TOTAL, clock())
        self._of: dict[str, Budget] = {}

    def _budget(self, namespace: str, now: float) -> Budget:
        budget = self._of.get(namespace)
        if budget is None:
            budget = self._of[namespace] = Budget(namespace, NAMESPACE, now, self._total)
        return budget

    def charge(self, namespace: str, work: float) -> float:
        """Charge a change of an object; return the seconds until the next one may be taken."""
        if not namespace or work <= FREE_SECONDS:
            return 0.0
        now = self._clock()
        return self._budget(namespace, now).spend(0, min(work, MOST_SECONDS) - FREE_SECONDS, now)

    def may_log(self, namespace: str) -> bool:
        """Charge a line of the log about an object; False: the line must not be written."""
        now = self._clock()
        return not namespace or self._budget(namespace, now).may_log(now)


class Postponed:
    """Changes of the objects of one kind that wait, in the order in which the objects came."""

    def __init__(self, budgets: ObjectBudgets) -> None:
        self._budgets = budgets
        self._waiting: dict[str, dict[Hashable, Callable[[], None]]] = {}
        """Changes by namespace and object.  A namespace that is here is over its budget."""
        self._due: dict[str, float] = {}
        """When the next change of each of these is taken, by the loop's clock."""
        self._timer: asyncio.TimerHandle | None = None

    def __bool__(self) -> bool:
        """True while a namespace is over its budget."""
        return bool(self._waiting)

    def take(self, namespace: str, object_key: Hashable, change: Callable[[], None]) -> float:
        """Take a change now, or later instead of an earlier one of its object; return its work."""
        if (waiting := self._waiting.get(namespace)) is not None:
            waiting[object_key] = change
            return 0.0
        began = self._budgets.work()
        change()
        work = self._budgets.work() - began
        if delay := self._budgets.charge(namespace, work):
            self._waiting[namespace] = {}
            self._later(namespace, delay)
        return work

    def clear(self) -> None:
        """Forget what waits: the whole list of objects was read again."""
        self._due.clear()
        self._arm()
        self._waiting.clear()

    def _later(self, namespace: str, delay: float) -> None:
        self._due[namespace] = asyncio.get_running_loop().time() + delay
        self._arm()

    def _arm(self) -> None:
        """Set the one timer: a turn of the loop takes one change, of whatever namespace."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._due:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(min(self._due.values()), self._next)

    def _next(self) -> None:
        """Take the oldest change of the namespace that is due first."""
        namespace = min(self._due, key=self._due.__getitem__)
        del self._due[namespace]
        waiting = self._waiting.pop(namespace)
        try:
            if waiting:
                key = next(iter(waiting))
                self.take(namespace, key, waiting.pop(key))
        finally:
            if waiting:
                self._waiting[namespace] = waiting
                if namespace not in self._due:
                    self._later(namespace, 0.0)
            self._arm()
