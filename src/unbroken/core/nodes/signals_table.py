"""The table of faults, compiled: it finds the entry of a kernel line or a finding."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from unbroken.core.logs.pattern_trees import Unreadable, is_anchored, read_pattern
from unbroken.core.logs.patterns import PatternSet
from unbroken.errors import SpecError
from unbroken.spec.nodes.fault_table import (
    FaultClass,
    FaultEntry,
    FaultTable,
    GpuSign,
    HostSign,
    Severity,
)
from unbroken.spec.nodes.values import Action
from unbroken.spec.patterns import Pattern
from unbroken.spec.problems import ManifestError, Report

from .kernel_log import KERNEL, KernelLine, Xid, quotes_a_name, read_sxid, read_xid
from .signals import CounterFinding, GpuFinding, HostFinding, HostSample, HostWatch

UNKNOWN_XID = "the table knows no such XID"
ERROR = 3
"""KERN_ERR: at this level the Neuron driver prints what a program gives it (aws-neuron-driver,
neuron_cdev.c, ncdev_printk)."""


@dataclass(frozen=True, slots=True)
class Sign:
    """A sign of a fault, with its entry of the table."""

    reason: str
    """Name of the entry, or `Xid` and the number of an unknown one."""
    entry: FaultEntry
    part: str
    """Part of the node: a GPU's PCI address, a device, a mount point; empty: the whole."""
    text: str
    xid: int | None = None
    address: str = ""
    """Address of the PCI device that the driver's line names; empty: it names none."""


class SignTable:
    """The table, compiled. Raises ManifestError for invalid patterns."""

    def __init__(self, table: FaultTable) -> None:
        self.table = table
        self.warnings = tuple(_loose_patterns(table))
        """Patterns that a user's text could match, one sentence for each."""
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
        """Return the limit above which a reading is a sign; None: it is turned off."""
        name = self._host.get(sign)
        return None if name is None else self.table.entries[name].limit

    @property
    def counter_limits(self) -> dict[str, float]:
        """Return the allowed growth of counters per second."""
        return {key: self.table.entries[name].limit for key, name in self._counters.items()}

    def host_watch(self) -> HostWatch:
        """Return the system's watch with the limits of this table."""
        space, blocked = (self.limit_of(one) for one in (HostSign.DISK_SPACE, HostSign.BLOCKED))
        return HostWatch(space, self.counter_limits, blocked)

    def of_line(self, line: KernelLine) -> list[Sign]:
        """Return the signs in a message of the kernel; a program's message has none."""
        if line.facility not in (None, KERNEL) or quotes_a_name(line.text):
            return []
        level = -1 if line.level is None else line.level
        return [sign for sign in self._of_text(line.text) if level <= sign.entry.level]

    def _of_text(self, text: str) -> Iterator[Sign]:
        xid, sxid = read_xid(text), read_sxid(text)
        if xid is not None:
            yield self.of_xid(xid, text)
        elif sxid is not None:
            for sign in self._sign(self._sxids.get(sxid.severity), sxid.device, text):
                yield replace(sign, address=sxid.pci)
        else:
            result = self._patterns.match(text.encode())
            for name in dict.fromkeys(self._pattern_names[index] for index in result):
                yield from self._sign(name, "", text)

    def of_xid(self, xid: Xid, text: str) -> Sign:
        """Return the entry of an XID; an unknown one is an event only."""
        choices = [(severity, xid.recovery) for severity in (xid.severity, None)]
        choices += [(severity, None) for severity in (xid.severity, None)]
        name, entry = f"Xid{xid.number}", None
        for severity, recovery in choices:
            known = self._xids.get((xid.number, severity, recovery))
            if known is not None and entry is None:
                name, entry = known, self.table.entries[known]
        entry = entry or FaultEntry(UNKNOWN_XID, FaultClass.GPU, Action.NONE, UNKNOWN_XID)
        return Sign(name, entry, xid.pci, text, xid.number, xid.pci)

    def of_finding(self, found: GpuFinding | HostFinding | CounterFinding) -> list[Sign]:
        """Return the entry of a reading of GPUs, system or devices; none: it is turned off."""
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


def weakened(sign: Sign, why: str) -> Sign:
    """Return the sign as an event only, which requires no action, however often it comes."""
    entry = replace(sign.entry, action=Action.NONE, repeats=None, beside=(), unless_listed=False)
    return replace(sign, entry=entry, text=f"not counted, {why}: {sign.text}")


def believed(sign: Sign, line: KernelLine, host: HostSample, gpus: Collection[str]) -> Sign:
    """Return the sign of a kernel record, weakened if the node shows that the record may be forged.

    `gpus` are the addresses that NVML has returned. A plain line of a file stays as it is: only the
    file's owner can have written it, and simulated GPUs are in no list of devices.
    """
    if line.is_plain:
        return sign
    if host.prints_for_users and line.level == ERROR:
        return weakened(sign, "programs can write such a record on this node")
    if sign.address and host.pci and sign.address not in host.pci and sign.address not in gpus:
        return weakened(sign, f"there is no PCI device {sign.address}")
    return sign


def _loose_patterns(table: FaultTable) -> Iterator[str]:
    for name, entry in table.entries.items():
        for index, source in enumerate(entry.kernel):
            try:
                is_tight = is_anchored(read_pattern(source))
            except Unreadable:
                is_tight = False
            if not is_tight:
                yield (
                    f"fault.{name}.kernel[{index}]: {source!r} does not begin with ^, so a process "
                    "or file name that the kernel quotes can match it; begin it with ^ and the "
                    "driver's own words"
                )


def _anywhere(source: str, path: str, report: Report) -> Pattern | None:
    """Compile a pattern so that it is found anywhere in the line, unless it begins with `^`."""
    try:
        Pattern(source)  # alone first, so that `)|(` cannot break out of the group
        return Pattern(f"(?s:.*?)(?:{source})")
    except SpecError as error:
        report.invalid(path, source, str(error))
        return None
