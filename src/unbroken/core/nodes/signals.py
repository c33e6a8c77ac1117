"""Readings of a node's parts, and the signs of faults in them.

A value that could not be read is None, and is ignored: a missing tool is unknown, never a fault.

`SignTable` is the table of faults, compiled: it finds the entry of a kernel line or a finding.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import inf

from unbroken.core.logs.pattern_trees import Unreadable, is_anchored, read_pattern
from unbroken.core.logs.patterns import PatternSet
from unbroken.errors import SpecError
from unbroken.spec.nodes.fault_table import (
    DriverSeverity,
    FaultClass,
    FaultEntry,
    FaultTable,
    GpuSign,
    HostSign,
)
from unbroken.spec.nodes.values import Action
from unbroken.spec.patterns import Pattern
from unbroken.spec.problems import ManifestError, Report

from .kernel_log import KERNEL, KernelLine, Xid, pci_address, quotes_a_name, read_sxid, read_xid

GRACE_SECONDS = 120.0
"""Seconds after a boot in which GPUs may still be missing (HyperPod's agent sleeps about 2
minutes)."""
IS_LOST, NEEDS_RESET = 15, 16
"""NVML_ERROR_GPU_IS_LOST and NVML_ERROR_RESET_REQUIRED (nvml.h)."""
THERMAL, POWER_BRAKE = 0x40, 0x80
"""nvmlClocksEventReasonHwThermalSlowdown and ...HwPowerBrakeSlowdown (nvml.h)."""
SPACE_AGAIN = 1.2
"""Multiple of its limit that must be free before a lack of space counts as a new one."""


@dataclass(frozen=True, slots=True)
class GpuReading:
    """One GPU as NVML shows it; None: no value was returned."""

    index: int
    pci: str = ""
    error: int = 0
    """Error code of NVML for the GPU: 0 is success."""
    ecc_uncorrected: int | None = None
    """Volatile: since the driver was loaded."""
    is_sram_over: bool | None = None
    is_remap_pending: bool | None = None
    is_remap_failed: bool | None = None
    nvlink_errors: int | None = None
    """Errors of all links, since the driver was loaded."""
    links_up: tuple[int, ...] | None = None
    slowdown: int | None = None
    """Reasons why the clocks are low, one bit each."""
    recovery: int | None = None
    """The driver's recovery action (nvmlDeviceGpuRecoveryAction)."""

    @property
    def is_answering(self) -> bool:
        """True if the GPU has returned any value, without an error."""
        told = (self.ecc_uncorrected, self.is_remap_pending, self.slowdown, self.recovery)
        return self.error == 0 and any(one is not None for one in (*told, self.links_up))


@dataclass(frozen=True, slots=True)
class GpuValues:
    """Values of one GPU for metrics; none is a sign of a fault."""

    index: int
    pci: str
    uuid: str
    model: str
    values: Mapping[str, float]
    """Name of DCGM's field -> value, without those that the GPU or its driver does not offer."""


@dataclass(frozen=True, slots=True)
class GpuSample:
    """All GPUs at one time."""

    gpus: tuple[GpuReading, ...] = ()
    problem: str = ""
    """Why the GPUs could not be read; empty: they were."""
    shown: tuple[GpuValues, ...] = ()
    has_driver: bool = True
    """False: the node has no driver of GPUs, which `problem` says too."""

    def lists(self, part: str) -> bool:
        """Return True if the GPU of the address `part` is present and answers."""
        return any(gpu.is_answering and pci_address(gpu.pci) == part for gpu in self.gpus)


@dataclass(frozen=True, slots=True)
class Blocked:
    """An agent or a worker that waits in the kernel and cannot be interrupted."""

    pid: int
    start: int
    """Start of the process, in clock ticks after the boot: it identifies the process together with
    the pid."""
    name: str
    switches: int
    """Number of times that it has begun to wait: if the number grows, the process makes
    progress."""
    where: str = ""
    """Function of the kernel; empty: not known."""
    pod: str = ""
    """UID of its pod; empty: not known."""


@dataclass(frozen=True, slots=True)
class HostSample:
    """The system at one time; values that could not be read are left out."""

    uptime_seconds: float | None = None
    free: Mapping[str, float] = field(default_factory=dict)
    """Mount point -> share of its file system that is free."""
    read_only: Mapping[str, bool] = field(default_factory=dict)
    """Mount point of a disk -> whether it can only be read."""
    is_clock_good: bool | None = None
    counters: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """(device and port, file) -> its value."""
    blocked: tuple[Blocked, ...] = ()
    pci: frozenset[str] = frozenset()
    """Addresses of the PCI devices, as `pci_address` writes them; empty: unknown."""
    prints_for_users: bool = False
    """Programs can have a driver write their text to the kernel's log.

    The Neuron driver's ioctl NEURON_IOCTL_PRINTK does so for any user that may open /dev/neuron0.
    """


@dataclass(frozen=True, slots=True)
class GpuFinding:
    """A sign of a GPU."""

    sign: GpuSign
    part: str
    text: str
    recovery: int | None = None


@dataclass(frozen=True, slots=True)
class HostFinding:
    """A sign of the system; `rate` is of a counter, a second."""

    sign: HostSign
    part: str
    text: str


@dataclass(frozen=True, slots=True)
class CounterFinding:
    """A counter that was over its limit."""

    counter: str
    part: str
    text: str


@dataclass(slots=True)
class GpuWatch:
    """The state of the GPUs known from earlier looks."""

    expected: int | None = None
    """Expected number of GPUs; None: not known."""
    known: dict[str, GpuReading] = field(default_factory=dict)
    missing_before: bool = False

    def look(self, sample: GpuSample, uptime_seconds: float | None) -> Iterator[GpuFinding]:
        """Return the signs of a sample, compared with the one before."""
        if sample.problem:
            self.missing_before = False
            return
        is_settled = uptime_seconds is not None and uptime_seconds >= GRACE_SECONDS
        yield from self._missing(len(sample.gpus), is_settled)
        for gpu in sample.gpus:
            key = pci_address(gpu.pci) if gpu.pci else str(gpu.index)
            name = f"GPU {gpu.index}" + (f" ({key})" if gpu.pci else "")
            for sign, text, recovery in _gpu_signs(gpu, self.known.get(key)):
                yield GpuFinding(sign, key, f"{name}: {text}", recovery)
            if gpu.error == 0:
                self.known[key] = gpu

    def _missing(self, count: int, is_settled: bool) -> Iterator[GpuFinding]:
        """Yield GPUs missing twice in a row: a GPU that is being reset is away for a moment."""
        is_missing = is_settled and self.expected is not None and count < self.expected
        if is_missing and self.missing_before:
            text = f"{count} of {self.expected} GPUs are there"
            yield GpuFinding(GpuSign.MISSING, "", text)
        self.missing_before = is_missing


def _gpu_signs(
    gpu: GpuReading, before: GpuReading | None
) -> Iterator[tuple[GpuSign, str, int | None]]:
    if gpu.error == IS_LOST:
        yield GpuSign.LOST, "NVML says that it is lost", None
    elif gpu.error == NEEDS_RESET:
        yield GpuSign.RESET_REQUIRED, "NVML says that it needs a reset", None
    if gpu.error:
        return
    if gpu.is_sram_over:
        yield GpuSign.SRAM_THRESHOLD, "uncorrectable SRAM errors are over the threshold", None
    if gpu.is_remap_pending:
        yield GpuSign.REMAP_PENDING, "remapped rows wait for a reset", None
    if gpu.is_remap_failed:
        yield GpuSign.REMAP_FAILED, "remapping of rows has failed", None
    if gpu.recovery:
        text = f"the driver asks for recovery action {gpu.recovery}"
        yield GpuSign.RECOVERY, text, gpu.recovery
    if before is not None:
        yield from _changes(gpu, before)


def _changes(gpu: GpuReading, before: GpuReading) -> Iterator[tuple[GpuSign, str, int | None]]:
    """Yield new signs; a counter that fell starts again."""
    more = _more(gpu.ecc_uncorrected, before.ecc_uncorrected)
    if more:
        yield GpuSign.ECC_UNCORRECTED, f"{more} more uncorrected errors of memory", None
    more = _more(gpu.nvlink_errors, before.nvlink_errors)
    if more:
        yield GpuSign.NVLINK_ERRORS, f"{more} more NVLink errors", None
    if gpu.links_up is not None and before.links_up is not None:
        down = sorted(set(before.links_up) - set(gpu.links_up))
        if down:
            yield GpuSign.NVLINK_DOWN, f"NVLink {', '.join(map(str, down))} went down", None
    if gpu.slowdown is not None and before.slowdown is not None:
        new = gpu.slowdown & ~before.slowdown
        if new & THERMAL:
            yield GpuSign.THERMAL_SLOWDOWN, "slowed down by its heat", None
        if new & POWER_BRAKE:
            yield GpuSign.POWER_BRAKE, "slowed down by its power supply", None


def _more(now: int | None, before: int | None) -> int:
    return 0 if now is None or before is None else max(0, now - before)


@dataclass(slots=True)
class HostWatch:
    """The state of the system known from earlier looks."""

    space_limit: float | None
    """Share of a file system that must be free; None: not looked at."""
    counter_limits: Mapping[str, float]
    """File of a counter -> its allowed growth per second; 0: none."""
    blocked_limit: float | None = None
    """Seconds for which a process may wait in the kernel; None: not looked at."""
    before: HostSample | None = None
    before_at: float = 0.0
    full: set[str] = field(default_factory=set)
    blocked: dict[Blocked, float] = field(default_factory=dict)
    """Time since when; infinite: it has been reported."""

    def look(self, sample: HostSample, now: float) -> Iterator[HostFinding | CounterFinding]:
        """Return the signs of a sample, compared with the one before."""
        before, since = self.before, now - self.before_at
        self.before, self.before_at = sample, now
        yield from self._space(sample)
        yield from self._blocked(sample, now)
        if before is None or since <= 0:
            return
        for mount, is_read_only in sample.read_only.items():
            if is_read_only and before.read_only.get(mount) is False:
                yield HostFinding(HostSign.READ_ONLY, mount, f"{mount} can only be read now")
        if sample.is_clock_good is False and before.is_clock_good:
            yield HostFinding(HostSign.CLOCK, "", "the clock is no longer synchronised")
        yield from self._counters(sample, before, since)

    def _space(self, sample: HostSample) -> Iterator[HostFinding]:
        for mount, free in sample.free.items():
            if self.space_limit is None or free >= self.space_limit:
                if self.space_limit is None or free >= self.space_limit * SPACE_AGAIN:
                    self.full.discard(mount)
            elif mount not in self.full:
                self.full.add(mount)
                text = f"{free:.1%} of the file system at {mount} is free"
                yield HostFinding(HostSign.DISK_SPACE, mount, text)

    def _blocked(self, sample: HostSample, now: float) -> Iterator[HostFinding]:
        self.blocked = {blocked: self.blocked.get(blocked, now) for blocked in sample.blocked}
        for blocked, since in self.blocked.items():
            if self.blocked_limit is not None and now - since >= self.blocked_limit:
                self.blocked[blocked] = inf
                where = f" ({blocked.where})" if blocked.where else ""
                who = f"{blocked.name} {blocked.pid}"
                text = f"{who} cannot be interrupted: it waits in the kernel{where}"
                part = f"pod {blocked.pod}" if blocked.pod else f"process {blocked.pid}"
                yield HostFinding(HostSign.BLOCKED, part, f"{text} for {now - since:.0f} s")

    def _counters(
        self, sample: HostSample, before: HostSample, since: float
    ) -> Iterator[CounterFinding]:
        for (device, name), value in sample.counters.items():
            limit, old = self.counter_limits.get(name), before.counters.get((device, name))
            if limit is None or old is None or value <= old:
                continue
            rate = (value - old) / since
            if rate > limit:
                text = f"{device}: {name} grew by {value - old} in {since:.0f} s"
                yield CounterFinding(name, device, text)


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
        self._xids: dict[tuple[int, DriverSeverity | None, int | None], str] = {}
        self._sxids: dict[DriverSeverity, str] = {}
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
