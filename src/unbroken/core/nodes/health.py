"""The daemon's machine: its input is signs of faults, its output is writes about the node.

It writes only news about its node, and withdraws only what it has set itself. A label that the
repairer or a person has removed stays removed until there is a new fault. It writes one patch for
one version of the node, and a new patch if that version is gone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from unbroken.core.tick import Tick
from unbroken.spec.keys import DAEMON_MEMORY
from unbroken.spec.nodes.values import Action

from .health_object import (
    MESSAGE_MAX,
    NODE_ACTIONS,
    PAST_MAX,
    Fault,
    Memory,
    OwnNode,
    condition_patch,
    fault_patch,
    read_memory,
    severest,
)
from .kernel_log import KernelLine
from .signals import GpuSample, GpuWatch, HostSample, Sign, SignTable, believed, weakened

SETTLE_SECONDS = 5.0
"""Seconds that an XID whose meaning depends on others waits for them; they come within a second
(judgement)."""
CONFIRM_SECONDS = 45.0
"""Seconds that an XID waits for NVML to contradict it.

A look takes at most 30 s, and NVML may be in the middle of an earlier one. A driver that does not
answer in that time confirms the XID.
"""
RECALL_SECONDS = 600.0
"""Seconds before the end of the earlier daemon whose XIDs a restarted daemon still counts."""
RETELL_SECONDS, RETELL_MAX_SECONDS = 60.0, 3600.0
"""Seconds until a lasting fault is reported again, doubled each time, and the most of them."""
QUIET_SECONDS = 900.0
"""Seconds after which a fault without an action for the node counts as a new one."""
PAST_SECONDS = 7 * 86400.0
"""Seconds in which a fault that returns shows that its repair has failed (judgement: blame halves
in that time, `core/nodes/blame`)."""
KNOWN_MAX, XIDS_MAX, TIMES_MAX = 512, 64, 16


@dataclass(frozen=True, slots=True)
class OwnNodeSeen:
    """The present state of the Node object."""

    node: OwnNode


@dataclass(frozen=True, slots=True)
class OwnNodeGone:
    """There is no Node object."""


@dataclass(frozen=True, slots=True)
class LineRead:
    """A message of the kernel; `cursor` is the position after it."""

    line: KernelLine
    cursor: str


@dataclass(frozen=True, slots=True)
class GpusSampled:
    """Readings of the GPUs."""

    sample: GpuSample
    began_at: float = inf
    """Start of the look, in seconds since the epoch."""


@dataclass(frozen=True, slots=True)
class HostSampled:
    """Readings of the system."""

    sample: HostSample


@dataclass(frozen=True, slots=True)
class Written:
    """The ordered write is done; `node` is the result."""

    node: OwnNode


@dataclass(frozen=True, slots=True)
class WriteFailed:
    """The ordered write failed; a NodeSeen follows when another may be made."""


HealthEvent = (
    OwnNodeSeen | OwnNodeGone | LineRead | GpusSampled | HostSampled | Written | WriteFailed | Tick
)


@dataclass(frozen=True, slots=True)
class WriteNode:
    """Merge this into the node; the answer is Written or WriteFailed."""

    patch: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class WriteConditions:
    """Merge this, strategically, into the node's status; the answer is Written or WriteFailed."""

    patch: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RecordNodeEvent:
    """Record an event of the node."""

    type: str
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class LogFault:
    """Write a line of the health monitoring agent's log."""

    action: Action
    type: str
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class LookAtGpus:
    """Read the GPUs now; the answer is GpusSampled."""


HealthEffect = WriteNode | WriteConditions | RecordNodeEvent | LogFault | LookAtGpus


@dataclass(slots=True)
class _Series:
    """One fault that may come again and again."""

    fault: Fault
    count: int
    reported: int
    last_at: float
    next_at: float
    wait_seconds: float


@dataclass(slots=True)
class _Waiting:
    sign: Sign
    due_at: float
    cursor_before: str
    cursor: str
    asked_at: float | None = None
    """Time of the XID that NVML may contradict; None: other XIDs decide its meaning."""


class NodeHealth:
    """One node's daemon. `gpus_expected` None: take the number from the node."""

    def __init__(self, table: SignTable, gpus_expected: int | None = None) -> None:
        self._table = table
        self._gpus_expected = gpus_expected
        self._node: OwnNode | None = None
        self._memory = Memory()
        self._is_changed = False
        """The memory is not yet written to the node."""
        self._news: dict[tuple[str, str], tuple[Fault, int]] = {}
        """Faults to be reported, with the number of times that they were seen."""
        self._writing: list[tuple[Fault, int]] | None = None
        """Faults that the write under way reports; None: no write is under way."""
        self._is_node_write = False
        self._unwritten: set[tuple[str, str]] = set()
        """Faults that the node's object does not show yet."""
        self._is_failed = False
        self._series: dict[tuple[str, str], _Series] = {}
        self._waiting: list[_Waiting] = []
        self._xids: dict[str, deque[tuple[float, int]]] = {}
        """Recent XIDs of each GPU, with their times."""
        self._gpu_watch = GpuWatch()
        self._host_watch = table.host_watch()
        self._host = HostSample()
        self._asks_gpus = False
        self._uptime_seconds: float | None = None
        self._cursor = ""

    @property
    def cursor(self) -> str:
        """Position up to which an earlier daemon has read the kernel's log; empty: not known.

        Valid after the first NodeSeen.
        """
        return self._memory.cursor

    @property
    def node(self) -> OwnNode | None:
        """The node as it was last seen."""
        return self._node

    def deadline(self) -> float | None:
        """Return when a Tick is due; None: not before another event."""
        due = [waiting.due_at for waiting in self._waiting]
        due += [
            series.next_at for series in self._series.values() if series.count > series.reported
        ]
        return min(due, default=None)

    def step(self, event: HealthEvent, now: float) -> list[HealthEffect]:
        """Take an event; `now` is seconds since the epoch."""
        effects: list[HealthEffect] = []
        match event:
            case OwnNodeSeen(node):
                self._is_failed = False
                self._see(node, now)
            case OwnNodeGone():
                self._node = None
            case LineRead(line, cursor):
                self._read(line, cursor, now)
            case GpusSampled(sample, began_at):
                self._look_at_gpus(sample, now)
                self._confirm(sample, began_at, now)
            case HostSampled(sample):
                self._uptime_seconds = sample.uptime_seconds
                # A GPU that fell off the bus may be missing from the list of devices.
                self._host = replace(sample, pci=sample.pci | self._host.pci)
                for result in self._host_watch.look(sample, now):
                    self._hold(self._table.of_finding(result), now)
            case Written(node):
                effects += self._report_written()
                self._see(node, now)
            case WriteFailed():
                self._put_back()
            case Tick():
                pass
        self._settle(now)
        self._repeat(now)
        return effects + self._ask_gpus() + self._write(now)

    # --- the node

    def _see(self, node: OwnNode, now: float) -> None:
        is_known = self._node is not None and self._node.uid == node.uid
        if not is_known:
            self._meet(node, now)
        self._node = node
        memory = self._memory
        is_rebooted = bool(memory.boot_id and node.boot_id and memory.boot_id != node.boot_id)
        if is_rebooted or node.verified != memory.verified:
            self._take_back(now)
        if is_rebooted:
            self._gpu_watch = GpuWatch()
        memory.boot_id, memory.verified = node.boot_id or memory.boot_id, node.verified

    def _meet(self, node: OwnNode, now: float) -> None:
        """Take over a node that is new to this daemon, with the memory of an earlier daemon."""
        unwritten = {k: fault for k, fault in self._memory.faults.items() if k in self._unwritten}
        self._memory = read_memory(node.annotations.get(DAEMON_MEMORY, ""))
        self._memory.faults.update(unwritten)
        self._memory.conditions.update(fault.condition for fault in unwritten.values())
        self._series = {k: series for k, series in self._series.items() if k in unwritten}
        self._is_changed = False
        if DAEMON_MEMORY not in node.annotations:
            self._memory.boot_id, self._memory.verified = node.boot_id, node.verified
        self._cursor = self._cursor or self._memory.cursor
        for part, xid, at in self._memory.xids:
            if now - at <= RECALL_SECONDS:
                # Messages right behind them are read only now.
                self._xids.setdefault(part, deque(maxlen=XIDS_MAX)).append((now, xid))

    def _take_back(self, now: float) -> None:
        """Forget faults that were found before the node was verified as healthy."""
        old = {k: one for k, one in self._memory.faults.items() if k not in self._unwritten}
        for key, fault in old.items():
            del self._memory.faults[key]
            self._series.pop(key, None)
            self._memory.times.pop(key, None)
            if fault.action is not Action.REPLACE:
                self._memory.past.pop(fault.reason, None)
                self._memory.past[fault.reason] = now
        self._is_changed = self._is_changed or bool(old)
        while len(self._memory.past) > PAST_MAX:
            self._memory.past.pop(next(iter(self._memory.past)))

    # --- signs

    def _read(self, line: KernelLine, cursor: str, now: float) -> None:
        before, self._cursor = self._cursor, cursor
        for result in self._table.of_line(line):
            sign = believed(result, line, self._host, self._gpu_watch.known)
            if sign.xid is not None:
                seen = self._xids.setdefault(sign.part, deque(maxlen=XIDS_MAX))
                seen.append((now, sign.xid))
            if sign.entry.beside or sign.entry.unless_listed:
                # One at a time: XID 45 comes for each channel, by the hundred.
                if any(_is_alike(waiting.sign, sign) for waiting in self._waiting):
                    continue
                self._await(sign, before, cursor, now)
            else:
                self._find(sign, sign.entry.action, now, cursor)
        _forget(self._xids)

    def _await(self, sign: Sign, before: str, cursor: str, now: float) -> None:
        """Decide about the sign later, when other XIDs, or NVML, have given its meaning."""
        if not sign.entry.unless_listed:
            self._waiting.append(_Waiting(sign, now + SETTLE_SECONDS, before, cursor))
            return
        self._waiting.append(_Waiting(sign, now + CONFIRM_SECONDS, before, cursor, now))
        self._asks_gpus = True

    def _confirm(self, sample: GpuSample, began_at: float, now: float) -> None:
        """Decide about XIDs that came before the look: they are contradicted if NVML lists the
        GPU."""
        for waiting in list(self._waiting):
            if waiting.asked_at is None or began_at < waiting.asked_at:
                continue
            self._waiting.remove(waiting)
            sign = waiting.sign
            if sample.lists(sign.part):
                sign = weakened(sign, "NVML lists the GPU as well")
            self._find(sign, sign.entry.action, now, waiting.cursor)

    def _ask_gpus(self) -> list[HealthEffect]:
        is_asked, self._asks_gpus = self._asks_gpus, False
        return [LookAtGpus()] if is_asked else []

    def _look_at_gpus(self, sample: GpuSample, now: float) -> None:
        self._gpu_watch.expected = self._expected(len(sample.gpus))
        for gpu_finding in self._gpu_watch.look(sample, self._uptime_seconds):
            self._hold(self._table.of_finding(gpu_finding), now)

    def _expected(self, count: int) -> int | None:
        if self._gpus_expected is not None or self._node is None:
            return self._gpus_expected
        if self._node.gpus is not None:
            return self._node.gpus
        capacity = self._node.gpu_capacity
        # A device plugin that shares each GPU several times also offers a multiple.
        return count if capacity and count and capacity % count == 0 else capacity

    def _hold(self, signs: Iterable[Sign], now: float) -> None:
        """Take signs of a lasting state, each reported once while the state lasts."""
        for sign in signs:
            series = self._series.get((sign.reason, sign.part))
            if (sign.reason, sign.part) in self._memory.faults:
                continue
            if series is None or now - series.last_at > QUIET_SECONDS:
                self._find(sign, sign.entry.action, now)
            else:
                series.last_at = now

    def _settle(self, now: float) -> None:
        """Decide about XIDs that have waited for others."""
        due = [waiting for waiting in self._waiting if waiting.due_at <= now]
        self._waiting = [waiting for waiting in self._waiting if waiting.due_at > now]
        for waiting in due:
            self._find(waiting.sign, self._beside(waiting), now, waiting.cursor)

    def _beside(self, waiting: _Waiting) -> Action:
        sign = waiting.sign
        start = waiting.due_at - 2 * SETTLE_SECONDS
        seen = self._xids.get(sign.part, ())
        others = {xid for at, xid in seen if at >= start and xid != sign.xid}
        for rule in sign.entry.beside:
            if others and (not rule.xid or others & set(rule.xid)):
                return rule.action
        return sign.entry.action

    def _find(self, sign: Sign, action: Action, now: float, cursor: str = "") -> None:
        key = (sign.reason, sign.part)
        action = severest([action, self._repeated(sign, now, cursor)])
        past = self._memory.past.get(sign.reason)
        if past is not None and now - past <= PAST_SECONDS and action in NODE_ACTIONS:
            action = severest([action, sign.entry.after_repair])
        series = self._series.get(key)
        active = self._memory.faults.get(key)
        is_new = series is None or (active is None and now - series.last_at > QUIET_SECONDS)
        is_worse = action in NODE_ACTIONS and (active is None or _is_above(action, active.action))
        if not is_new and not is_worse:
            assert series is not None
            series.count, series.last_at = series.count + 1, now
            return
        kind = sign.entry.condition_type()
        fault = Fault(sign.reason, sign.part, kind, action, self._message(sign), now)
        if active is not None and not is_worse:
            # Known from an earlier daemon, which has reported it.
            self._series[key] = _Series(fault, 1, 1, now, now, RETELL_SECONDS)
            return
        count = 1 if is_new or series is None else series.count + 1
        self._series.pop(key, None)
        self._series[key] = _Series(fault, count, count, now, now + RETELL_SECONDS, RETELL_SECONDS)
        _forget(self._series)
        self._news[key] = (fault, count)
        if action in NODE_ACTIONS:
            self._unwritten.add(key)
            self._memory.faults.pop(key, None)  # the newest last
            self._memory.faults[key] = fault
            self._memory.conditions.add(kind)
            _forget(self._memory.faults, 64)

    def _message(self, sign: Sign) -> str:
        where = f"{sign.part}: " if sign.part else ""
        gpu = self._gpu_watch.known.get(sign.part)
        if sign.xid is not None and gpu is not None:
            where += f"GPU {gpu.index}: "  # the kernel knows its address only
        return f"{where}{sign.entry.title}: {sign.text}"[:MESSAGE_MAX]

    def _repeated(self, sign: Sign, now: float, cursor: str) -> Action:
        """Return how often the fault came; a line read again after a restart counts once."""
        repeats = sign.entry.repeats
        if repeats is None:
            return Action.NONE
        times = self._memory.times.setdefault((sign.reason, sign.part), [])
        if not cursor or all(known != cursor for _, known in times):
            times.append((now, cursor))
        times[:] = [time for time in times if now - time[0] <= repeats.within_seconds]
        del times[: -repeats.times]
        _forget(self._memory.times, TIMES_MAX)
        return repeats.action if len(times) >= repeats.times else Action.NONE

    def _repeat(self, now: float) -> None:
        for key, series in self._series.items():
            if series.count > series.reported and series.next_at <= now:
                series.reported = series.count
                series.wait_seconds = min(2 * series.wait_seconds, RETELL_MAX_SECONDS)
                series.next_at = now + series.wait_seconds
                self._news[key] = (replace(series.fault, at=series.last_at), series.count)

    # --- writes

    def _write(self, now: float) -> list[HealthEffect]:
        node = self._node
        if node is None or self._writing is not None or self._is_failed:
            return []
        memory = self._memory
        memory.cursor = self._waiting[0].cursor_before if self._waiting else self._cursor
        memory.xids = [
            (part, xid, at)
            for part, seen in self._xids.items()
            for at, xid in seen
            if now - at <= SETTLE_SECONDS
        ]
        # Conditions first: readers of a label look for the fault behind it.
        patch = condition_patch(node, memory, now)
        if patch is not None:
            self._writing, self._is_node_write = [], False
            return [WriteConditions(patch)]
        if not self._news and not self._is_changed:
            return []
        self._writing, self._news = list(self._news.values()), {}
        self._is_changed, self._is_node_write = False, True
        return [WriteNode(fault_patch(node, memory, self._written_as_active(), now))]

    def _written_as_active(self) -> list[tuple[Fault, int]]:
        """Return the faults of a write; those withdrawn meanwhile no longer require an action."""
        assert self._writing is not None
        return [
            (fault, count)
            for fault, count in self._writing
            if fault.action not in NODE_ACTIONS or fault.key in self._memory.faults
        ]

    def _report_written(self) -> list[HealthEffect]:
        told, self._writing = self._writing or [], None
        self._unwritten -= {fault.key for fault, _ in told} - self._news.keys()
        effects: list[HealthEffect] = []
        for fault, count in told:
            again = f" ({count} times)" if count > 1 else ""
            message = f"{fault.message}{again}; action: {fault.action.value}"
            effects.append(RecordNodeEvent("Warning", fault.reason, message))
            effects.append(LogFault(fault.action, fault.condition, fault.reason, message))
        return effects

    def _put_back(self) -> None:
        failed, self._writing = self._writing or [], None
        self._is_failed = True
        self._is_changed = self._is_changed or self._is_node_write
        for fault, count in failed:
            self._news.setdefault(fault.key, (fault, count))


def _is_alike(sign: Sign, other: Sign) -> bool:
    return (sign.reason, sign.part) == (other.reason, other.part)


def _is_above(action: Action, other: Action) -> bool:
    return action is not other and severest([action, other]) is action


def _forget(known: dict[Any, Any], most: int = KNOWN_MAX) -> None:
    """Bound a table against any input of a log: the oldest entries are dropped."""
    while len(known) > most:
        known.pop(next(iter(known)))
