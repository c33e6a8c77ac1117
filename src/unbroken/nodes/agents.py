"""Processes of jobs on this node in an uninterruptible wait in the kernel.

They are found by name below `root`/proc: agents (`unbrokenrun`, HyperPod's `hyperpodrun`) and all
processes below them. Only files that the kernel answers by itself are read: `cmdline` and `environ`
wait for a lock that such a process may hold.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from unbroken.core.nodes.signals import Blocked

from .texts import read

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
