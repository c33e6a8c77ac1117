"""The kernel's log: records of /dev/kmsg, and plain lines of a file that replaces it.

Anybody can bring text into the kernel's log. The kernel quotes names of processes and files, and a
privileged program may write to /dev/kmsg. So a record keeps its writer (its facility) and its
severity (its level). A driver's message is read only in the driver's exact form, from the start of
the record. Reading never raises, whatever the line holds.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from unbroken.spec.nodes.fault_table import DriverSeverity

LINE_CHARACTERS_MAX = 4096
"""Characters of a line that are read. A record of the kernel has at most 1 KiB of text (Linux
kernel/printk, PRINTKRB_RECORD_MAX)."""
KERNEL = 0
"""Facility of the kernel's own messages.  A write to /dev/kmsg never gets it (Linux
kernel/printk/printk.c, devkmsg_write)."""
LEVELS = 8

# Linux Documentation/ABI/testing/dev-kmsg: `priority,sequence,microseconds,flags[,...];text`, then
# lines that begin with a blank: a dictionary.  The priority is 8 * facility + level.  The flag `+`
# marks the rest of a line that another record began.
_RECORD = re.compile(r"(\d{1,10}),(\d{1,20}),(\d{1,20}),([^;]{0,200});(.*)", re.DOTALL)
_CONTINUED = "+"
_ESCAPED = re.compile(r"\\x([0-9a-fA-F]{2})")
# Before the text in a file: syslog's date and host, priority, time since boot or of day.
_SYSLOG = re.compile(
    r"(?:[A-Z][a-z]{2} [ \d]\d [\d:]{8}|\d{4}-\d\d-\d\dT[\d:.,]{8,19}(?:Z|[+-][\d:]{4,5})?)"
    r" [\w.-]{1,64} kernel: "
)
_PRIORITY = re.compile(r"<(\d{1,4})>")
_STAMP = re.compile(
    r"\[(?: {0,8}\d{1,12}\.\d{1,9}|[A-Z][a-z]{2} [A-Z][a-z]{2} [ \d]\d [\d:]{8} \d{4})\] ?"
)

# As NVIDIA's driver writes it; drivers before 319 leave `PCI:` out, MIG names the GPU instance.
_PLACE = r"\(((?:PCI:)?[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.[0-7])?)"
_XID = re.compile(rf"NVRM: Xid {_PLACE}(?: GPU-I:\d{{1,3}})?\): (\d{{1,5}}),\s?(.*)", re.DOTALL)
_SXID = re.compile(rf"(nvidia-nvswitch\d{{1,4}}): SXid {_PLACE}\): (\d{{1,6}}),\s?(.*)", re.DOTALL)
_PCI = re.compile(r"([0-9a-fA-F]{4,8}):([0-9a-fA-F]{2}):([0-9a-fA-F]{2})")
# The name of a program in a driver's line has at most 15 characters, which may be any.
_PROGRAM = re.compile(r"(?:pid=[^,]{1,20}, )?(?:name=.{0,15}(?:, |$))?", re.DOTALL)
_SEVERITY = re.compile(r"\b(non-?)?fatal\b", re.IGNORECASE)
# Message of XID 154: "GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)".
_RECOVERY = re.compile(
    r"GPU recovery action changed from [^,]{1,60} to (0x[0-9a-fA-F]{1,4}|\d{1,4})\b"
)

# Lines in which the kernel names one process or file, by a name that anybody may choose. If the
# name comes first, it has at most 15 characters (TASK_COMM_LEN), and `[PID]` or `(PID)` follows.
_QUOTING = re.compile(
    r".{1,15} ?(?:\[\d+\]|\(\d+\))"
    r"|.{1,15} invoked oom-killer: "
    r"|traps: |process '|warning: process |program |ptrace attach of |type=\d+ audit"
    r"|audit[:(]|oom-kill:|oom_reaper: |seccomp: |mmap: |memfd_create\(|request_module: "
    r"|CPU: \d+ (?:UID: \d+ )?PID: \d+ |\[ *\d+\]|Modules linked in|Memory cgroup stats"
    r"|in .{0,255}\[|usb \S+ (?:Product|Manufacturer|SerialNumber)|input: |hid-generic "
    r"|scsi \S+ +[A-Z][\w-]+ {2,}|overlayfs: |tmpfs: |loop\d+: ",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class KernelLine:
    """One message of the kernel."""

    text: str
    sequence: int | None = None
    """Number of the record since the boot; None: a line of a file."""
    microseconds: int | None = None
    """Microseconds since the boot."""
    facility: int | None = None
    """Writer of the message, KERNEL or a program; None: a plain line, which has no facility."""
    level: int | None = None
    """Severity, from 0 (emergency) to 7 (debug); None: a plain line, which has no level."""

    @property
    def is_plain(self) -> bool:
        """True for a line of a file without facility and level: the file's owner is responsible for
        it."""
        return self.facility is None


@dataclass(frozen=True, slots=True)
class Xid:
    """An error of a GPU that NVIDIA's driver reports."""

    number: int
    pci: str
    severity: DriverSeverity | None
    recovery: int | None
    """The recovery action that XID 154 names."""


@dataclass(frozen=True, slots=True)
class Sxid:
    """An error of an NVSwitch that NVIDIA's driver reports."""

    number: int
    device: str
    severity: DriverSeverity
    pci: str = ""


def read_record(data: bytes) -> KernelLine | None:
    """Read a record of /dev/kmsg; None: it is none, or only continues another."""
    text = data.decode(errors="replace")
    match = _RECORD.match(text)
    if match is None or _CONTINUED in match[4].split(",")[0]:
        return None
    facility, level = divmod(int(match[1]), LEVELS)
    message = match[5].split("\n", 1)[0][:LINE_CHARACTERS_MAX]
    message = _ESCAPED.sub(lambda one: chr(int(one[1], 16)), message)
    return KernelLine(_tidy(message), int(match[2]), int(match[3]), facility, level)


def read_line(data: bytes) -> KernelLine | None:
    """Read a line of a file: a record as in /dev/kmsg, or as dmesg and syslog write it.

    None: empty, or only the rest of another record.
    """
    if _RECORD.match(data.decode(errors="replace")):
        return read_record(data)
    text = _tidy(data[: LINE_CHARACTERS_MAX * 4].decode(errors="replace"))[:LINE_CHARACTERS_MAX]
    start = _SYSLOG.match(text)
    if start is not None:
        text = text[start.end() :]
    facility = level = None
    priority = _PRIORITY.match(text)
    if priority is not None:
        facility, level = divmod(int(priority[1]), LEVELS)
        text = text[priority.end() :]
    stamp = _STAMP.match(text)
    if stamp is not None:
        text = text[stamp.end() :]
    return KernelLine(text, facility=facility, level=level) if text else None


def _tidy(text: str) -> str:
    """Replace control characters, which no label, event or terminal should get."""
    return "".join(one if one.isprintable() else " " for one in text).strip()


def quotes_a_name(text: str) -> bool:
    """Return True if the kernel wrote the line about a process or a file whose name it quotes.

    Such a line is no sign of a fault: the owner of the name wrote a part of it.
    """
    return _QUOTING.match(text) is not None


def read_xid(text: str) -> Xid | None:
    """Return the XID of a message in the driver's exact form; None: it has none."""
    match = _XID.match(text)
    if match is None:
        return None
    program = _PROGRAM.match(match[3])
    number, rest = int(match[2]), match[3][program.end() if program else 0 :]
    recovery = _RECOVERY.match(rest) if number == 154 else None
    named = int(recovery[1], 0 if "x" in recovery[1] else 10) if recovery else None
    return Xid(number, pci_address(match[1]), _severity(rest), named)


def read_sxid(text: str) -> Sxid | None:
    """Return the SXid of a message in the driver's exact form; without a severity it is not
    fatal."""
    match = _SXID.match(text)
    if match is None:
        return None
    severity = _severity(match[4][:80]) or DriverSeverity.NON_FATAL
    return Sxid(int(match[3]), match[1], severity, pci_address(match[2]))


def _severity(text: str) -> DriverSeverity | None:
    match = _SEVERITY.search(text)
    if match is None:
        return None
    return DriverSeverity.NON_FATAL if match[1] else DriverSeverity.FATAL


def pci_address(text: str) -> str:
    """Return the address of a device as `0000:3b:00`, from the forms of kernel and NVML.

    A text without an address is returned as it is, cut.
    """
    match = _PCI.search(text)
    if match is None:
        return text[:40]
    return f"{int(match[1], 16):04x}:{match[2]}:{match[3]}".lower()
