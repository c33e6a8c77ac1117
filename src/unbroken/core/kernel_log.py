"""The kernel's log: records of /dev/kmsg, and plain lines of a file that stands for it.

What a record says of a GPU or an NVSwitch is read here; the rest is matched by the table of faults
(`node_signals_table`).  Reading never raises, whatever the line holds.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from unbroken.spec.fault_table import Severity

LINE_CHARACTERS_MAX = 4096
"""Of a line that is looked at; a record of the kernel has at most 1 KiB of text
(Linux kernel/printk, PRINTKRB_RECORD_MAX)."""

# Linux Documentation/ABI/testing/dev-kmsg: `level,sequence,microseconds,flags[,...];text`, then
# lines that begin with a blank: more of the text was escaped, these are a dictionary.
_RECORD = re.compile(r"(\d{1,10}),(\d{1,20}),(\d{1,20}),[^;]{0,200};(.*)", re.DOTALL)
_ESCAPED = re.compile(r"\\x([0-9a-fA-F]{2})")
# Before the text in a file: syslog's start, priority, time since boot or of day.
_SYSLOG = re.compile(r"[^\[\]]{0,120}?\bkernel: ")
_PRIORITY = re.compile(r"<\d{1,4}>")
_STAMP = re.compile(r"\[[ \d.:A-Za-z+-]{1,40}\] ?")

_XID = re.compile(r"NVRM: Xid \(([^()]{1,120})\): (\d{1,5})\b[,:]?\s?(.*)", re.DOTALL)
_SXID = re.compile(r"(nvidia-nvswitch\d{1,4}): SXid \(([^()]{1,120})\): (\d{1,6})\b[,:]?\s?(.*)")
_PCI = re.compile(r"([0-9a-fA-F]{4,8}):([0-9a-fA-F]{2}):([0-9a-fA-F]{2})")
_SEVERITY = re.compile(r"\b(non-?)?fatal\b", re.IGNORECASE)
# Of XID 154: "GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)".
_RECOVERY = re.compile(r"recovery action changed .{0,80}\bto (0x[0-9a-fA-F]{1,4}|\d{1,4})\b")


@dataclass(frozen=True, slots=True)
class KernelLine:
    """One message of the kernel."""

    text: str
    sequence: int | None = None
    """Of the record since the boot; None: a line of a file."""
    microseconds: int | None = None
    """Since the boot."""


@dataclass(frozen=True, slots=True)
class Xid:
    """An error that NVIDIA's driver tells of a GPU."""

    number: int
    pci: str
    severity: Severity | None
    recovery: int | None
    """The recovery action that XID 154 names."""


@dataclass(frozen=True, slots=True)
class Sxid:
    """An error that NVIDIA's driver tells of an NVSwitch."""

    number: int
    device: str
    severity: Severity


def read_record(data: bytes) -> KernelLine | None:
    """A record of /dev/kmsg; None where it is none."""
    text = data.decode(errors="replace")
    found = _RECORD.match(text)
    if found is None:
        return None
    message = found[4].split("\n", 1)[0][:LINE_CHARACTERS_MAX]
    message = _ESCAPED.sub(lambda one: chr(int(one[1], 16)), message)
    return KernelLine(_tidy(message), int(found[2]), int(found[3]))


def read_line(data: bytes) -> KernelLine | None:
    """A line of a file: a record as in /dev/kmsg, or as dmesg and syslog write it; None: empty."""
    record = read_record(data)
    if record is not None:
        return record
    text = _tidy(data[: LINE_CHARACTERS_MAX * 4].decode(errors="replace"))[:LINE_CHARACTERS_MAX]
    start = _SYSLOG.match(text)
    if start is not None:
        text = text[start.end() :]
    for prefix in (_PRIORITY, _STAMP):
        found = prefix.match(text)
        if found is not None:
            text = text[found.end() :]
    return KernelLine(text) if text else None


def _tidy(text: str) -> str:
    """Without control characters, which no label, event or terminal should get."""
    return "".join(one if one.isprintable() else " " for one in text).strip()


def read_xid(text: str) -> Xid | None:
    """The XID that a message tells, at its very start: a program's name may hold anything."""
    found = _XID.match(text)
    if found is None:
        return None
    number, rest = int(found[2]), found[3]
    recovery = _RECOVERY.search(rest) if number == 154 else None
    named = int(recovery[1], 0 if "x" in recovery[1] else 10) if recovery else None
    return Xid(number, pci_address(found[1]), _severity(rest), named)


def read_sxid(text: str) -> Sxid | None:
    """The SXid that a message tells, at its very start; one that does not say is not fatal."""
    found = _SXID.match(text)
    if found is None:
        return None
    severity = _severity(found[4][:80]) or Severity.NON_FATAL
    return Sxid(int(found[3]), found[1], severity)


def _severity(text: str) -> Severity | None:
    found = _SEVERITY.search(text)
    if found is None:
        return None
    return Severity.NON_FATAL if found[1] else Severity.FATAL


def pci_address(text: str) -> str:
    """Of a GPU, as `0000:3b:00`, however the kernel or NVML writes it; else the text, cut."""
    found = _PCI.search(text)
    if found is None:
        return text[:40]
    return f"{int(found[1], 16):04x}:{found[2]}:{found[3]}".lower()
