"""The table of faults: the symptoms of faults of a node, and the action for each.

It is data, as TOML: one `[fault.NAME]` for each. A user's file changes entries of the shipped one
by name, field by field, adds some, or turns one off. The program that uses the patterns compiles
them.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any

from msgspec import Meta

from unbroken.spec.keys import GPU_UNHEALTHY, HARDWARE_UNHEALTHY
from unbroken.spec.problems import ManifestError, Report, below, shown
from unbroken.spec.schema.fields import read_record

from .values import Action

VERSION = 1
"""Version of the file's form."""
NAME = re.compile(r"[A-Za-z0-9]([-_.A-Za-z0-9]{0,61}[A-Za-z0-9])?")
"""A name is the value of a label."""
CONDITION = re.compile(r"[A-Za-z][A-Za-z0-9]{0,62}")
SYMPTOMS = ("xid", "sxid", "kernel", "nvml", "host", "counter")
XID_MAX = 65535
WARNING = 4
"""KERN_WARNING.  Reports about programs, such as a segmentation fault, are less severe."""
Xid = Annotated[int, Meta(ge=1, le=XID_MAX)]


class FaultClass(Enum):
    """The part at fault."""

    APPLICATION = "application"
    GPU = "gpu"
    NVLINK = "nvlink"
    DRIVER = "driver"
    NEURON = "neuron"
    MEMORY = "memory"
    PROCESSOR = "processor"
    STORAGE = "storage"
    NETWORK = "network"
    KERNEL = "kernel"
    CLOCK = "clock"


ACCELERATOR = frozenset(
    {FaultClass.APPLICATION, FaultClass.GPU, FaultClass.NVLINK, FaultClass.DRIVER}
)


class GpuSign(Enum):
    """Signs that NVML can show."""

    LOST = "lost"
    """NVML_ERROR_GPU_IS_LOST."""
    RESET_REQUIRED = "reset-required"
    """NVML_ERROR_RESET_REQUIRED."""
    MISSING = "missing"
    """Fewer GPUs than the node should have."""
    ECC_UNCORRECTED = "ecc-uncorrected"
    """More uncorrected errors of memory than at the last look."""
    SRAM_THRESHOLD = "sram-threshold"
    REMAP_PENDING = "remap-pending"
    REMAP_FAILED = "remap-failed"
    NVLINK_ERRORS = "nvlink-errors"
    NVLINK_DOWN = "nvlink-down"
    """A link that was up is down."""
    THERMAL_SLOWDOWN = "thermal-slowdown"
    POWER_BRAKE = "power-brake"
    RECOVERY = "recovery-action"
    """The driver names a recovery action; `recovery` lists those that count."""


class HostSign(Enum):
    """Signs that the system can show."""

    DISK_SPACE = "disk-space"
    """The free share of a file system is below `limit`."""
    READ_ONLY = "read-only-mount"
    """A file system that was writable is read-only."""
    CLOCK = "clock-unsynchronized"
    """A synchronised clock is not any more."""
    BLOCKED = "blocked-process"
    """An agent or a worker cannot be interrupted for `limit` seconds."""


class DriverSeverity(Enum):
    """Severity in the driver's line."""

    FATAL = "fatal"
    NON_FATAL = "non-fatal"


@dataclass(frozen=True, slots=True)
class Repeats:
    """Another action if the fault comes often to one part."""

    times: Annotated[int, Meta(ge=2, le=100)]
    within_seconds: Annotated[float, Meta(ge=1)]
    action: Action


@dataclass(frozen=True, slots=True)
class Beside:
    """Another action if one of these XIDs comes to the same GPU within seconds."""

    action: Action
    xid: tuple[Xid, ...] = ()
    """XIDs; empty: any other."""


@dataclass(frozen=True, slots=True)
class FaultEntry:
    """One line of the table."""

    title: str
    kind: FaultClass = field(metadata={"key": "class"})
    action: Action
    source: str
    """Origin of the action."""
    xid: tuple[Xid, ...] = ()
    severity: DriverSeverity | None = None
    """Severity of the XID: None: any."""
    recovery: tuple[int, ...] = ()
    """Recovery actions (NVML's numbers) that XID 154 or the driver names."""
    sxid: DriverSeverity | None = None
    kernel: tuple[str, ...] = ()
    """Regular expressions for lines of the kernel's log.

    One that does not begin with `^` is found anywhere in the line, also in text of a user.
    """
    level: Annotated[int, Meta(ge=0, le=7)] = WARNING
    """Least severe level of a kernel record that counts, from 0 (emergency) to 7 (debug)."""
    unless_listed: bool = False
    """The XID requires no action while NVML lists its GPU as answering."""
    nvml: GpuSign | None = None
    host: HostSign | None = None
    counter: tuple[str, ...] = ()
    """Files of the network and Neuron devices in /sys."""
    limit: Annotated[float, Meta(ge=0)] = 0.0
    """Limit of a counter, per second; of `disk-space`, the free share; of a process, seconds."""
    condition: str = ""
    """Condition of the node; empty: according to the class."""
    after_repair: Action = Action.REPLACE
    """Action if the fault returns after this table's action: at least the repairer's next rung."""
    repeats: Repeats | None = None
    beside: tuple[Beside, ...] = ()
    disabled: bool = False

    def condition_type(self) -> str:
        """Type of the node's condition."""
        of_class = GPU_UNHEALTHY if self.kind in ACCELERATOR else HARDWARE_UNHEALTHY
        return self.condition or of_class


@dataclass(frozen=True, slots=True)
class FaultTable:
    """Entries by name, without those that are turned off."""

    entries: Mapping[str, FaultEntry]
    origins: Mapping[str, str]
    """Name -> title of the text that defines it last."""


def load_fault_table(texts: Sequence[tuple[str, str]]) -> FaultTable:
    """Return the table of (title, TOML text), later ones over earlier ones.

    Raises ManifestError with every problem of the first text that has one.
    """
    merged: dict[str, Mapping[str, Any]] = {}
    origins: dict[str, str] = {}
    entries: dict[str, FaultEntry] = {}
    for title, text in texts:
        report = Report()
        faults = _faults(text, report)
        for name, given in faults.items():
            if not isinstance(given, Mapping):
                report.invalid(f"fault.{name}", given, "must be a table")
                continue
            merged[name] = {**merged.get(name, {}), **given}
            origins[name] = title
            entries[name] = _entry(name, merged[name], report)
        _check_unique(entries, report)
        if report.problems:
            raise ManifestError(f"table of faults {title}", report.problems)
    kept = {name: entry for name, entry in entries.items() if not entry.disabled}
    return FaultTable(kept, {name: origins[name] for name in kept})


def _faults(text: str, report: Report) -> Mapping[str, Any]:
    try:
        document = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        report.invalid("", text[:20], f"is not TOML: {error}")
        return {}
    for key in document:
        if key not in ("version", "fault"):
            report.unknown("", key, ("version", "fault"))
    version = document.get("version")
    if version is None:
        report.required("version", f"write version = {VERSION}")
    elif version is not True and version != VERSION:
        report.unsupported("version", version, [str(VERSION)])
    faults = document.get("fault", {})
    if not isinstance(faults, Mapping):
        report.invalid("fault", faults, "must be tables [fault.NAME]")
        return {}
    return faults


def _entry(name: str, given: Mapping[str, Any], report: Report) -> FaultEntry:
    path = f"fault.{name}"
    if not NAME.fullmatch(name):
        why = "must be the value of a label: letters, digits, '-', '_' and '.', at most 63"
        report.invalid(path, name, why)
    entry = read_record(FaultEntry, given, path, report)
    symptoms = [key for key in SYMPTOMS if getattr(entry, key)]
    if not symptoms and not any(report.has_below(below(path, key)) for key in SYMPTOMS):
        report.required(path, f"a symptom is needed, one of {', '.join(SYMPTOMS)}")
    elif len(symptoms) > 1:
        report.forbidden(below(path, symptoms[1]), f"there is {symptoms[0]} already; split them")
    if entry.condition and not CONDITION.fullmatch(entry.condition):
        report.invalid(below(path, "condition"), entry.condition, "must be letters and digits")
    of_xid = {
        "beside": entry.beside,
        "severity": entry.severity,
        "unlessListed": entry.unless_listed,
    }
    for key in [key for key, value in of_xid.items() if value and not entry.xid][:1]:
        report.forbidden(below(path, key), "it belongs to an xid")
    if entry.recovery and not (entry.nvml is GpuSign.RECOVERY or 154 in entry.xid):
        why = "it belongs to xid = [154] or nvml = recovery-action"
        report.forbidden(below(path, "recovery"), why)
    if entry.host is HostSign.DISK_SPACE and not 0 < entry.limit < 1:
        report.invalid(below(path, "limit"), entry.limit, "must be a share between 0 and 1")
    return entry


def _check_unique(entries: Mapping[str, FaultEntry], report: Report) -> None:
    """Check that no two entries have one symptom: chance would decide between them."""
    seen: dict[tuple[object, ...], str] = {}
    for name, entry in entries.items():
        if entry.disabled:
            continue
        for key in _keys(entry):
            other = seen.setdefault(key, name)
            if other != name:
                kind, what = key[:2]
                why = f"{other} has it already; disable one of them"
                report.invalid(f"fault.{name}.{kind}", what, why)


def _keys(entry: FaultEntry) -> list[tuple[object, ...]]:
    recovery: tuple[int | None, ...] = entry.recovery or (None,)
    keys: list[tuple[object, ...]] = [
        ("xid", number, entry.severity, action) for number in entry.xid for action in recovery
    ]
    if entry.sxid:
        keys.append(("sxid", entry.sxid.value))
    if entry.nvml:
        keys += [("nvml", entry.nvml.value, action) for action in recovery]
    if entry.host:
        keys.append(("host", entry.host.value))
    return keys + [("counter", name) for name in entry.counter]


def symptom_text(entry: FaultEntry) -> str:
    """Return the symptom in a line."""
    recovery = f", recovery action {', '.join(map(str, entry.recovery))}" if entry.recovery else ""
    severity = f", {entry.severity.value}" if entry.severity else ""
    if entry.xid:
        return f"XID {', '.join(map(str, entry.xid))}{severity}{recovery}"
    if entry.sxid:
        return f"SXid, {entry.sxid.value}"
    if entry.nvml:
        return f"NVML: {entry.nvml.value}{recovery}"
    if entry.host:
        limits = {
            HostSign.DISK_SPACE: f" below {entry.limit:.0%}",
            HostSign.BLOCKED: f" for {entry.limit:g} s",
        }
        return f"system: {entry.host.value}{limits.get(entry.host, '')}"
    if entry.counter:
        rate = f"more than {entry.limit:g}/s" if entry.limit else "any"
        return f"counters {', '.join(entry.counter)}: {rate}"
    return "kernel log: " + " or ".join(shown(pattern) for pattern in entry.kernel)
