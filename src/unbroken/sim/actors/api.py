"""The API server's objects, and when their watchers get the changes.

Each kind has a log of changes, as etcd has. A watcher is at a position of the log: it lags, its
stream breaks, and after a break, as at its start, it lists the objects. A list is never stale: the
client of this project requests the newest version.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from unbroken.sim.schedule import Schedule

Value = TypeVar("Value")


@dataclass(eq=False)
class Table(Generic[Value]):
    """Objects of one kind by name, and the log of their changes: (name, new value or None)."""

    objects: dict[str, Value] = field(default_factory=dict)
    log: list[tuple[str, Value | None]] = field(default_factory=list)
    watchers: list[Watch[Value]] = field(default_factory=list)

    def put(self, name: str, value: Value) -> None:
        """Create or replace; what is the same already is no change."""
        if self.objects.get(name) != value:
            self.objects[name] = value
            self._changed(name, value)

    def remove(self, name: str) -> None:
        """Delete, if it is there."""
        if self.objects.pop(name, None) is not None:
            self._changed(name, None)

    def _changed(self, name: str, value: Value | None) -> None:
        self.log.append((name, value))
        for watcher in self.watchers:
            watcher.wake()


@dataclass(frozen=True, slots=True)
class Lag:
    """Delay of a watcher."""

    usual_seconds: float = 0.02
    worst_seconds: float = 0.02


class Watch(Generic[Value]):
    """One client's informer on one kind: `changed(name, old, new)` for every difference.

    A change between two lists is reported as one, and an object that came and went is never
    reported.
    """

    def __init__(
        self,
        schedule: Schedule,
        table: Table[Value],
        lag: Lag,
        changed: Callable[[str, Value | None, Value | None], None],
    ) -> None:
        self._schedule = schedule
        self._table = table
        self._lag = lag
        self._changed = changed
        self._position: int | None = None
        self._is_delivering = False
        self._is_stopped = False
        self.known: dict[str, Value] = {}

    def list(self) -> None:
        """Read all objects, and watch from there."""
        if self._is_stopped:
            return
        if self._position is None:
            self._table.watchers.append(self)
        self._position = len(self._table.log)
        objects = dict(self._table.objects)
        for name in [name for name in self.known if name not in objects]:
            self._tell(name, None)
        for name, value in objects.items():
            if self.known.get(name) != value:
                self._tell(name, value)
        self.wake()

    def cut(self, seconds: float) -> None:
        """The stream breaks without a word; after so long the client lists again."""
        if self._position is None:
            return  # not even listed yet
        self._is_delivering, self._position = True, -1  # nothing comes until then
        self._schedule.after(seconds, self._relist)

    def heal(self) -> None:
        """End a cut soon, however long it was to last."""
        if self._position == -1:
            self._schedule.after(1.0, self._relist)

    def stop(self) -> None:
        """The client is no more."""
        self._is_stopped = True
        if self in self._table.watchers:
            self._table.watchers.remove(self)

    def wake(self) -> None:
        """There may be news in the log."""
        if self._is_delivering or self._position is None or self._position < 0:
            return
        if self._position < len(self._table.log):
            self._is_delivering = True
            self._schedule.after(self._delay(), self._deliver, self._position)

    def _delay(self) -> float:
        if self._schedule.chance(0.1):
            return self._schedule.between(0.0, self._lag.worst_seconds)
        return self._lag.usual_seconds

    def _relist(self) -> None:
        self._is_delivering = False
        self.list()

    def _deliver(self, position: int) -> None:
        if self._is_stopped or position != self._position or not self._is_delivering:
            return
        self._is_delivering = False
        name, value = self._table.log[position]
        self._position = position + 1
        self._tell(name, value)
        self.wake()

    def _tell(self, name: str, value: Value | None) -> None:
        old = self.known.get(name)
        if value is None:
            self.known.pop(name, None)
        else:
            self.known[name] = value
        if not self._is_stopped and old != value:
            self._changed(name, old, value)
