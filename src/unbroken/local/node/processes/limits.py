"""Limits of containers in control groups (version 2), if this host lets the user make them.

The base is the first directory upwards from the own group in which groups with a memory controller
can be made. Systemd's user sessions, containers with their own hierarchy and root have one. Nothing
else is changed. Without such a directory, the node reports that limits are not enforced.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from decimal import ROUND_CEILING, Decimal
from pathlib import Path

from unbroken.errors import WorldError
from unbroken.kube.quantity import parse_quantity
from unbroken.local.node.pods.events import Object

CONTROLLERS = ("memory", "cpu", "pids")
CPU_PERIOD_MICROSECONDS = 100_000
"""Kubelet's --cpu-cfs-quota-period."""
MIN_SHARES, MAX_SHARES = 2, 262144


def hierarchy(mountinfo: str) -> str | None:
    """Return the mount point of the version 2 hierarchy."""
    for line in mountinfo.splitlines():
        fields = line.split()
        if fields[fields.index("-") + 1] == "cgroup2":
            return fields[4]
    return None


def own_group(proc_cgroup: str) -> str:
    """Path of our own group inside the version 2 hierarchy."""
    for line in proc_cgroup.splitlines():
        number, _, path = line.split(":", 2)
        if number == "0":
            return path
    return "/"


def settings(resources: Object) -> dict[str, str]:
    """Files of a container's group and what is written into them."""
    limits, requests = resources.get("limits") or {}, resources.get("requests") or {}
    result = {}
    if "memory" in limits:
        result["memory.max"] = str(_whole(parse_quantity(limits["memory"])))
        result["memory.swap.max"] = "0"
        # All of the container goes, as with kubelet's singleProcessOOMKill=false.
        result["memory.oom.group"] = "1"
    if "cpu" in limits:
        quota = _whole(parse_quantity(limits["cpu"]) * CPU_PERIOD_MICROSECONDS)
        result["cpu.max"] = f"{max(quota, 1000)} {CPU_PERIOD_MICROSECONDS}"
    cpu = requests.get("cpu", limits.get("cpu"))
    if cpu is not None:
        result["cpu.weight"] = str(weight(parse_quantity(cpu)))
    return result


def weight(cpus: Decimal) -> int:
    """cpu.weight of a request, by way of shares (kubelet, cm/helpers_linux.go)."""
    shares = min(max(_whole(cpus * 1024), MIN_SHARES), MAX_SHARES)
    return 1 + ((shares - 2) * 9999) // 262142


def _whole(amount: Decimal) -> int:
    return int(amount.to_integral_value(ROUND_CEILING))


class Limits:
    """Groups of this node's containers; `find` must come first."""

    def __init__(self, node: str) -> None:
        self._name = f"unbroken-{node}-{os.getuid()}"
        self._base: Path | None = None
        self.problem = ""
        """Why limits are not enforced; empty when they are."""

    def find(self) -> None:
        """Look for a place in which groups can be made."""
        mounted = hierarchy(Path("/proc/self/mountinfo").read_text(encoding="utf-8"))
        if mounted is None:
            self.problem = "this host has no cgroup v2 hierarchy"
            return
        root = Path(mounted)
        start = root / own_group(Path("/proc/self/cgroup").read_text("utf-8")).lstrip("/")
        for directory in (start, *start.parents):
            if not directory.is_relative_to(root):
                break
            base = directory / self._name
            if _is_usable(base):
                self._base = base
                return
        self.problem = "no cgroup v2 with a memory controller can be made here"

    def create(self, container_id: str, resources: Object) -> list[str]:
        """A group for a container; its paths for the supervisor, none where not enforced."""
        wanted = settings(resources)
        if self._base is None:
            return []
        group = self._base / container_id
        try:
            group.mkdir(exist_ok=True)
            for name, value in wanted.items():
                if (group / name).exists():
                    (group / name).write_text(value, encoding="ascii")
        except OSError as error:
            raise WorldError(f"cannot limit the container: {error}") from error
        return [str(group)]

    def remove(self, container_id: str) -> None:
        """Remove the group of a container that has ended."""
        if self._base is not None:
            # A command that was run inside may take a moment longer to die; it goes next time.
            with contextlib.suppress(OSError):
                (self._base / container_id).rmdir()

    def tidy(self, known: Collection[str]) -> None:
        """Remove groups of containers that are not among these."""
        if self._base is None:
            return
        for group in self._base.iterdir():
            if group.is_dir() and group.name not in known:
                self.remove(group.name)


def _is_usable(base: Path) -> bool:
    """Make the base and hand controllers down to it; False where that is not allowed."""
    try:
        _enable(base.parent)
        base.mkdir(exist_ok=True)
        _enable(base)
        probe = base / "probe"
        probe.mkdir(exist_ok=True)
        has_memory = (probe / "memory.max").exists()
        probe.rmdir()
        if not has_memory:
            base.rmdir()
    except OSError:
        return False
    return has_memory


def _enable(group: Path) -> None:
    enabled = (group / "cgroup.subtree_control").read_text("ascii").split()
    offered = (group / "cgroup.controllers").read_text("ascii").split()
    for controller in CONTROLLERS:
        if controller in offered and controller not in enabled:
            (group / "cgroup.subtree_control").write_text(f"+{controller}", "ascii")
