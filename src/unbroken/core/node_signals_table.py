"""The table of faults made runnable: which entry a line of the kernel or a finding is of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from unbroken.errors import SpecError
from unbroken.spec.fault_table import (
    FaultClass,
    FaultEntry,
    FaultTable,
    GpuSign,
    HostSign,
    Severity,
)
from unbroken.spec.node_keys import Action
from unbroken.spec.patterns import Pattern
from unbroken.spec.problems import ManifestError, Report

from .kernel_log import Xid, read_sxid, read_xid
from .log_patterns import PatternSet
from .node_signals import CounterFinding, GpuFinding, HostFinding, HostWatch

UNKNOWN_XID = "the table knows no such XID"


@dataclass(frozen=True, slots=True)
class Sign:
    """A sign of a fault, with its entry of the table."""

    reason: str
    """Name of the entry, or `Xid` and the number of one that is unknown."""
    entry: FaultEntry
    part: str
    """Of the node: a GPU's PCI address, a device, a mount point; empty: the whole."""
    text: str
    xid: int | None = None


class SignTable:
    """The table, compiled.  Raises ManifestError for patterns that are none."""

    def __init__(self, table: FaultTable) -> None:
        self.table = table
        self._xids: dict[tuple[int, Severity | None, int | None], str] = {}
        self._sxids: dict[Severity, str] = {}
        self._gpu: dict[tuple[GpuSign, int | None], str] = {}
        self._host: dict[HostSign, str] = {}
        self._counters: dict[str, str] = {}
        patterns, report = [], Report()
        self._pattern_names: list[str] = []
        for name, entry in table.entries.items():
            self._index(name, entry)
            for index, source in enumerate(entry.kernel):
                pattern = _anywhere(source, f"fault.{name}.kernel[{index}]", report)
                if pattern is not None:
                    patterns.append(pattern)
                    self._pattern_names.append(name)
        if report.problems:
            raise ManifestError("table of faults", report.problems)
        self._patterns = PatternSet(patterns)

    def _index(self, name: str, entry: FaultEntry) -> None:
        recovery: tuple[int | None, ...] = entry.recovery or (None,)
        for number in entry.xid:
            self._xids.update({(number, entry.severity, action): name for action in recovery})
        if entry.sxid is not None:
            self._sxids[entry.sxid] = name
        if entry.nvml is not None:
            self._gpu.update({(entry.nvml, action): name for action in recovery})
        if entry.host is not None:
            self._host[entry.host] = name
        self._counters.update(dict.fromkeys(entry.counter, name))

    def limit_of(self, sign: HostSign) -> float | None:
        """From where on what the system shows is a sign; None: it is turned off."""
        name = self._host.get(sign)
        return None if name is None else self.table.entries[name].limit

    @property
    def counter_limits(self) -> dict[str, float]:
        """What counters may grow a second."""
        return {key: self.table.entries[name].limit for key, name in self._counters.items()}

    def host_watch(self) -> HostWatch:
        """What looks at the system with the limits of this table."""
        space, blocked = (self.limit_of(one) for one in (HostSign.DISK_SPACE, HostSign.BLOCKED))
        return HostWatch(space, self.counter_limits, blocked)

    def of_line(self, text: str) -> list[Sign]:
        """Signs in a message of the kernel."""
        xid = read_xid(text)
        if xid is not None:
            found = self.of_xid(xid, text)
            return [found]
        sxid = read_sxid(text)
        if sxid is not None:
            return list(self._sign(self._sxids.get(sxid.severity), sxid.device, text))
        names = dict.fromkeys(
            self._pattern_names[index] for index in self._patterns.match(text.encode())
        )
        return [sign for name in names for sign in self._sign(name, "", text)]

    def of_xid(self, xid: Xid, text: str) -> Sign:
        """The entry of an XID; one that is unknown is an event only."""
        choices = [(severity, xid.recovery) for severity in (xid.severity, None)]
        choices += [(severity, None) for severity in (xid.severity, None)]
        for severity, recovery in choices:
            name = self._xids.get((xid.number, severity, recovery))
            if name is not None:
                return Sign(name, self.table.entries[name], xid.pci, text, xid.number)
        entry = FaultEntry(UNKNOWN_XID, FaultClass.GPU, Action.NONE, UNKNOWN_XID)
        return Sign(f"Xid{xid.number}", entry, xid.pci, text, xid.number)

    def of_finding(self, found: GpuFinding | HostFinding | CounterFinding) -> list[Sign]:
        """The entry of what was read of GPUs, system or devices; none: it is turned off."""
        match found:
            case GpuFinding():
                name = self._gpu.get((found.sign, found.recovery))
                name = name or self._gpu.get((found.sign, None))
            case HostFinding():
                name = self._host.get(found.sign)
            case CounterFinding():
                name = self._counters.get(found.counter)
        return list(self._sign(name, found.part, found.text))

    def _sign(self, name: str | None, part: str, text: str) -> Iterator[Sign]:
        if name is not None:
            yield Sign(name, self.table.entries[name], part, text)


def _anywhere(source: str, path: str, report: Report) -> Pattern | None:
    """A pattern that matches anywhere in the line; those of a line match from its start."""
    try:
        Pattern(source)  # alone first, so that `)|(` is no way round the group
        return Pattern(f"(?s:.*?)(?:{source})")
    except SpecError as error:
        report.invalid(path, source, str(error))
        return None
