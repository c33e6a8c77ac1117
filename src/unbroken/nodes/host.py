"""One look at the system: disks, mounts, clock, counters of network devices, agents.

Everything is below `root`, where a container has the node's file system; what cannot be read is
left out, for a missing tool is unknown.

Processes of jobs in an uninterruptible wait in the kernel are found by name below `root`/proc:
agents (`unbrokenrun`, HyperPod's `hyperpodrun`) and all processes below them. Only files that the
kernel answers by itself are read: `cmdline` and `environ` wait for a lock that such a process may
hold.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from unbroken.core.nodes.kernel_log import pci_address
from unbroken.core.nodes.signals import Blocked, HostSample


def read(path: Path) -> str:
    """All of it; empty: it cannot be read."""
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""


AGENTS = ("unbrokenrun", "hyperpodrun")
UNINTERRUPTIBLE = "D"
_POD = re.compile(r"pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12})")
"""Pod UID in a control group's path, with the drivers cgroupfs and systemd (kubelet)."""


@dataclass(frozen=True, slots=True)
class _Process:
    """Fields of /proc/PID/stat (proc(5))."""

    pid: int
    name: str
    state: str
    parent: int
    start: int
    """Clock ticks after the boot: with the pid it is of this process alone."""


def blocked(root: Path) -> Iterator[Blocked]:
    """Agents and workers that cannot be interrupted now."""
    result = {process.pid: process for process in _processes(root / "proc")}
    below: dict[int, list[int]] = {}
    for process in result.values():
        below.setdefault(process.parent, []).append(process.pid)
    tree = [pid for pid, process in result.items() if process.name in AGENTS]
    seen = set(tree)
    for pid in tree:
        new = [child for child in below.get(pid, ()) if child not in seen]
        seen.update(new)
        tree += new
    for pid in tree:
        if result[pid].state == UNINTERRUPTIBLE:
            yield _blocked(root / f"proc/{pid}", result[pid])


def _processes(proc: Path) -> Iterator[_Process]:
    for path in proc.glob("[0-9]*/stat"):
        head, _, tail = read(path).rpartition(")")
        pid, _, name = head.partition(" (")
        fields = tail.split()
        if pid.isdecimal() and len(fields) > 19:
            yield _Process(int(pid), name, fields[0], int(fields[1]), int(fields[19]))


def _blocked(place: Path, process: _Process) -> Blocked:
    status = dict(line.split(":", 1) for line in read(place / "status").splitlines() if ":" in line)
    switches = status.get("voluntary_ctxt_switches", "").strip()
    where = read(place / "wchan").strip()
    pod = _POD.search(read(place / "cgroup"))
    return Blocked(
        process.pid,
        process.start,
        process.name,
        int(switches) if switches.isdecimal() else 0,
        "" if where == "0" else where,
        pod[1].replace("_", "-") if pod else "",
    )


LOCAL = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs"})
"""File systems of disks: asking one of a network could take for ever."""
NEURON = "sys/module/neuron"
"""Directory that is there while the Neuron driver is loaded."""
STA_UNSYNC = 0x40
"""sys/timex.h"""


class _Timex(ctypes.Structure):
    """The start of struct timex (sys/timex.h), with room for the rest."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("frequency", ctypes.c_long),
        ("maximum_error", ctypes.c_long),
        ("estimated_error", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_byte * 256),
    )


_OCTAL = re.compile(r"\\([0-7]{3})")
_libc = ctypes.CDLL(None, use_errno=True)


def look(root: Path, counters: Collection[str]) -> HostSample:
    """The system as it is now; `counters` are the files that are asked for."""
    mounts = list(_mounts(root))
    return HostSample(
        uptime_seconds=uptime_seconds(root),
        free=dict(_free(root, mounts)),
        read_only={f"{device} at {mount}": is_read_only for device, mount, is_read_only in mounts},
        is_clock_good=_is_clock_good(),
        counters=dict(_counters(root, counters)),
        blocked=tuple(blocked(root)),
        pci=_pci_devices(root),
        prints_for_users=(root / NEURON).exists(),
    )


def _pci_devices(root: Path) -> frozenset[str]:
    """Addresses of the PCI devices; empty: they cannot be read."""
    try:
        return frozenset(map(pci_address, os.listdir(root / "sys/bus/pci/devices")))
    except OSError:
        return frozenset()


def uptime_seconds(root: Path) -> float | None:
    """Since the boot; None: it cannot be read."""
    text = read(root / "proc/uptime")
    try:
        return float(text.split()[0])
    except (ValueError, IndexError):
        return None


def boot_id(root: Path) -> str:
    """Boot ID of the kernel; empty: it cannot be read."""
    return read(root / "proc/sys/kernel/random/boot_id").strip()


def file_systems(root: Path) -> Iterator[tuple[str, str, str, bool]]:
    """Yield device, mount point, type, and whether it is read-only, of each file system once.

    By /proc/PID/mountinfo, whose last field is of the file system and not of the mount: containers
    mount much read-only that can be written elsewhere (proc(5)).
    """
    seen = set()
    for line in read(root / "proc/1/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        place, kind = left.split(), right.split()
        if len(place) < 5 or len(kind) < 3 or place[2] in seen:
            continue
        seen.add(place[2])
        mount = _OCTAL.sub(lambda match: chr(int(match[1], 8)), place[4])
        yield kind[1], mount, kind[0], "ro" in kind[2].split(",")


def _mounts(root: Path) -> Iterator[tuple[str, str, bool]]:
    """Yield (device, mount point, whether it is read-only) of each local file system."""
    for device, mount, kind, is_read_only in file_systems(root):
        if kind in LOCAL:
            yield device, mount, is_read_only


def _free(root: Path, mounts: list[tuple[str, str, bool]]) -> Iterator[tuple[str, float]]:
    for _, mount, _ in mounts:
        try:
            result = os.statvfs(root / mount.lstrip("/"))
        except OSError:
            continue
        if result.f_blocks:
            yield mount, result.f_bavail / result.f_blocks


def _is_clock_good() -> bool | None:
    """True if adjtimex(2) reports a good clock; modes 0 change nothing and need no right."""
    state = _Timex()
    if _libc.adjtimex(ctypes.byref(state)) < 0:
        return None
    return not state.status & STA_UNSYNC


def _counters(root: Path, wanted: Collection[str]) -> Iterator[tuple[tuple[str, str], int]]:
    sys_class = root / "sys/class"
    folders = [
        *sys_class.glob("infiniband/*/ports/*/counters"),
        *sys_class.glob("infiniband/*/ports/*/hw_counters"),
        *sys_class.glob("neuron_device/*/stats/hardware"),
        # Only of hardware: bridges and pods' own devices count the same traffic again.
        *(path.parent / "statistics" for path in sys_class.glob("net/*/device")),
    ]
    for folder in folders:
        names = folder.parts
        is_port = names[-3] == "ports"
        device = f"{names[-4]} port {names[-2]}" if is_port else names[-2]
        if names[-1] == "hardware":
            device = names[-3]
        for name in wanted:
            text = read(folder / name).strip()
            if text.isascii() and text.isdigit():
                yield (device, name), int(text)
