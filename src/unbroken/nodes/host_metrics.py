"""Metrics of a node's system under node-exporter's names, for the dashboards that ask for them.

They are read from /proc and /sys at each scrape; what cannot be read is left out. EFA devices have
the names of AWS's EFA exporter. Devices of pods are left out, because their number and names change
with each pod; DEVICES_MAX bounds the others.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from unbroken.foreign_numbers import finite_number, whole_number
from unbroken.kube.clock import wall

from .hanging import HangingCalls
from .host import file_systems, read

DEVICES_MAX = 64
"""Devices of each type: disks, networks, ports, file systems."""
MEMORY_MAX = 128
"""Fields of /proc/meminfo, of which kernels have about 55."""
TICKS = os.sysconf("SC_CLK_TCK")
SECTOR = 512
"""Bytes of a sector in /proc/diskstats, whatever the disk has."""
LANES = 4
"""InfiniBand counts data in units of 4 bytes."""
READING = "proc and sys"

Value = tuple[str, tuple[str, ...], float]
"""A sample: the family's name, values of its labels, and the number."""
GAUGE, COUNTER, UNTYPED = "gauge", "counter", "unknown"


@dataclass(frozen=True, slots=True)
class Family:
    """A family of metrics."""

    text: str
    labels: tuple[str, ...] = ()
    kind: str = COUNTER


DISK = {
    "reads_completed_total": (3, 1.0, "Reads that have completed."),
    "reads_merged_total": (4, 1.0, "Reads that were merged with others."),
    "read_bytes_total": (5, SECTOR, "Bytes read."),
    "read_time_seconds_total": (6, 1e-3, "Seconds spent by all reads."),
    "writes_completed_total": (7, 1.0, "Writes that have completed."),
    "writes_merged_total": (8, 1.0, "Writes that were merged with others."),
    "written_bytes_total": (9, SECTOR, "Bytes written."),
    "write_time_seconds_total": (10, 1e-3, "Seconds spent by all writes."),
    "io_now": (11, 1.0, "Reads and writes in progress."),
    "io_time_seconds_total": (12, 1e-3, "Seconds in which the disk was busy."),
    "io_time_weighted_seconds_total": (13, 1e-3, "Seconds that reads and writes have waited."),
}
"""Name -> column of /proc/diskstats, the factor of its unit, and the meaning."""
_NO_DISK = re.compile(r"(z?ram|loop|fd|(h|s|v|xv)d[a-z]+|nvme\d+n\d+p)\d+")
"""Partitions, and disks of memory and files."""
RECEIVED = ("bytes", "packets", "errs", "drop", "fifo", "frame", "compressed", "multicast")
SENT = ("bytes", "packets", "errs", "drop", "fifo", "colls", "carrier", "compressed")
"""Columns of /proc/net/dev."""
_OF_PODS = re.compile(
    r"(veth|cali|lxc|cilium|cni|flannel|docker|br-|azv|gke[0-9a-f]{11}|eni[0-9a-f]{11}).*"
)
"""Names of network devices that container networks make."""
MODES = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
GUESTS = ("user", "nice")
STAT = {
    "ctxt": "node_context_switches_total",
    "processes": "node_forks_total",
    "intr": "node_intr_total",
    "btime": "node_boot_time_seconds",
    "procs_running": "node_procs_running",
    "procs_blocked": "node_procs_blocked",
}
VMSTAT = ("oom_kill", "pgfault", "pgmajfault", "pgpgin", "pgpgout", "pswpin", "pswpout")
"""Fields of /proc/vmstat."""
PRESSURE = {
    ("cpu", "some"): ("cpu_waiting", "for a processor"),
    ("io", "some"): ("io_waiting", "for reads and writes"),
    ("io", "full"): ("io_stalled", "for reads and writes, and none made progress"),
    ("memory", "some"): ("memory_waiting", "for memory"),
    ("memory", "full"): ("memory_stalled", "for memory, and none made progress"),
}
LINK = {
    "excessive_buffer_overrun_errors": "excessive_buffer_overrun_errors_total",
    "link_downed": "link_downed_total",
    "link_error_recovery": "link_error_recovery_total",
    "local_link_integrity_errors": "local_link_integrity_errors_total",
    "multicast_rcv_packets": "multicast_packets_received_total",
    "multicast_xmit_packets": "multicast_packets_transmitted_total",
    "port_rcv_constraint_errors": "port_constraint_errors_received_total",
    "port_xmit_constraint_errors": "port_constraint_errors_transmitted_total",
    "port_rcv_data": "port_data_received_bytes_total",
    "port_xmit_data": "port_data_transmitted_bytes_total",
    "port_rcv_discards": "port_discards_received_total",
    "port_xmit_discards": "port_discards_transmitted_total",
    "port_rcv_errors": "port_errors_received_total",
    "port_rcv_packets": "port_packets_received_total",
    "port_xmit_packets": "port_packets_transmitted_total",
    "port_xmit_wait": "port_transmit_wait_total",
    "port_rcv_remote_physical_errors": "port_receive_remote_physical_errors_total",
    "port_rcv_switch_relay_errors": "port_receive_switch_relay_errors_total",
    "symbol_error": "symbol_error_total",
    "unicast_rcv_packets": "unicast_packets_received_total",
    "unicast_xmit_packets": "unicast_packets_transmitted_total",
    "VL15_dropped": "vl15_dropped_total",
}
"""Counter of an InfiniBand port -> its name in node-exporter."""
EFA = (
    *("alloc_pd_err", "alloc_ucontext_err", "cmds_err", "completed_cmds", "create_ah_err"),
    *("create_cq_err", "create_qp_err", "impaired_remote_conn_events", "keep_alive_rcvd"),
    *("lifespan", "mmap_err", "no_completion_cmds", "rdma_read_bytes", "rdma_read_resp_bytes"),
    *("rdma_read_wr_err", "rdma_read_wrs", "rdma_write_bytes", "rdma_write_recv_bytes"),
    *("rdma_write_wr_err", "rdma_write_wrs", "recv_bytes", "recv_wrs", "reg_mr_err"),
    *("retrans_bytes", "retrans_pkts", "retrans_timeout_events", "rx_bytes", "rx_drops"),
    *("rx_pkts", "send_bytes", "send_wrs", "submitted_cmds", "tx_bytes", "tx_pkts"),
    "unresponsive_remote_events",
)
"""Counters of an EFA device; the driver's version decides which there are."""
PORT = ("device", "port")
MOUNT = ("device", "mountpoint", "fstype")
FILE_SYSTEM = {
    "size_bytes": "Size of the file system.",
    "free_bytes": "Free bytes, with those that are reserved for root.",
    "avail_bytes": "Free bytes for users other than root.",
    "files": "Files that there can be.",
    "files_free": "Files that can still be made.",
    "readonly": "1 if the file system can only be read.",
    "device_error": "1 if it cannot be asked, or did not answer in time.",
}
MACHINE = {
    "node_load1": Family("Load of the last minute.", kind=GAUGE),
    "node_load5": Family("Load of the last 5 minutes.", kind=GAUGE),
    "node_load15": Family("Load of the last 15 minutes.", kind=GAUGE),
    "node_context_switches_total": Family("Switches from one thread to another."),
    "node_forks_total": Family("Processes that were started."),
    "node_intr_total": Family("Interrupts."),
    "node_boot_time_seconds": Family("Time of the boot, in seconds since the epoch.", kind=GAUGE),
    "node_time_seconds": Family("The node's clock, in seconds since the epoch.", kind=GAUGE),
    "node_procs_running": Family("Threads that run or could run.", kind=GAUGE),
    "node_procs_blocked": Family("Threads that wait for reads and writes.", kind=GAUGE),
    "node_filefd_allocated": Family("File descriptors that are open.", kind=GAUGE),
    "node_filefd_maximum": Family("File descriptors that may be open.", kind=GAUGE),
    "node_uname_info": Family(
        "The kernel and the node's name; always 1.",
        ("sysname", "release", "version", "machine", "nodename", "domainname"),
        GAUGE,
    ),
    "node_cpu_seconds_total": Family(
        "Seconds that each processor spent in each mode.", ("cpu", "mode")
    ),
    "node_cpu_guest_seconds_total": Family(
        "Seconds that each processor spent for virtual machines.", ("cpu", "mode")
    ),
    "node_network_up": Family("1 if the network device is up.", ("device",), GAUGE),
    "node_network_speed_bytes": Family("Bytes a second of the link.", ("device",), GAUGE),
    "node_network_mtu_bytes": Family("Longest packet of the device.", ("device",), GAUGE),
    "node_network_carrier_changes_total": Family("Times that the link came or went.", ("device",)),
    "node_infiniband_info": Family(
        "The InfiniBand device; always 1.",
        ("device", "board_id", "firmware_version", "hca_type"),
        GAUGE,
    ),
    "node_infiniband_state_id": Family(
        "State of the port: 1 down, 2 init, 3 armed, 4 active.", PORT, GAUGE
    ),
    "node_infiniband_physical_state_id": Family(
        "Physical state of the port: 2 polling, 3 disabled, 5 link up, 6 recovery.", PORT, GAUGE
    ),
    "node_infiniband_rate_bytes_per_second": Family("Bytes a second of the link.", PORT, GAUGE),
    "node_amazonefa_info": Family("The EFA device; always 1.", ("device",), GAUGE),
    "node_scrape_collector_success": Family(
        "1 if /proc and /sys of the node could be read in time.", ("collector",), GAUGE
    ),
}


def _families() -> Iterator[tuple[str, Family]]:
    yield from MACHINE.items()
    for name, (_, _, text) in DISK.items():
        kind = COUNTER if name.endswith("_total") else GAUGE
        yield f"node_disk_{name}", Family(text, ("device",), kind)
    for column in RECEIVED:
        yield f"node_network_receive_{column}_total", Family(f"Received: {column}.", ("device",))
    for column in SENT:
        yield f"node_network_transmit_{column}_total", Family(f"Sent: {column}.", ("device",))
    for name in VMSTAT:
        yield f"node_vmstat_{name}", Family(f"Field {name} of /proc/vmstat.", kind=UNTYPED)
    for name, what in PRESSURE.values():
        text = f"Seconds in which threads waited {what}."
        yield f"node_pressure_{name}_seconds_total", Family(text)
    for name, text in FILE_SYSTEM.items():
        yield f"node_filesystem_{name}", Family(text, MOUNT, GAUGE)
    for file, name in LINK.items():
        yield f"node_infiniband_{name}", Family(f"Counter {file} of the port.", PORT)
    for file in EFA:
        yield f"node_amazonefa_{file}", Family(f"Counter {file} of the device.", PORT, UNTYPED)


FAMILIES: Mapping[str, Family] = dict(_families())
"""Every family but those of /proc/meminfo, which are named after its fields."""


class HostMetrics(Collector):
    """The system of the node whose files are below `root`; `refresh` reads it."""

    def __init__(self, registry: CollectorRegistry, root: Path, node: str) -> None:
        self._root = root
        self._node = node
        self._calls = HangingCalls()
        self._values: dict[str, list[tuple[tuple[str, ...], float]]] = {}
        registry.register(self)

    async def refresh(self) -> None:
        """Read the system; parts that hang are left out."""
        root, node = self._root, self._node
        found = await self._calls.call(READING, lambda: list(_system(root, node)))
        values: list[Value] = list(found or ())
        values.append(("node_scrape_collector_success", (READING,), float(found is not None)))
        mounts = await self._calls.call("mounts", lambda: list(_mounts(root)))
        for answer in await asyncio.gather(*map(self._file_system, mounts or ())):
            values += answer
        self._values = {}
        for name, labels, value in values:
            self._values.setdefault(name, []).append((labels, value))

    async def _file_system(self, mount: Mount) -> list[Value]:
        place = self._root / mount.point.lstrip("/")
        found = await self._calls.call(mount.point, lambda: os.statvfs(place))
        labels = (mount.device, mount.point, mount.kind)
        numbers: dict[str, float] = {"readonly": mount.is_read_only, "device_error": found is None}
        if found is not None:
            numbers |= {
                "size_bytes": found.f_blocks * found.f_frsize,
                "free_bytes": found.f_bfree * found.f_frsize,
                "avail_bytes": found.f_bavail * found.f_frsize,
                "files": found.f_files,
                "files_free": found.f_ffree,
            }
        return [(f"node_filesystem_{name}", labels, value) for name, value in numbers.items()]

    def describe(self) -> Iterable[Metric]:
        """Return the families whose names are known beforehand."""
        return [_family(name, family) for name, family in FAMILIES.items()]

    def collect(self) -> Iterable[Metric]:
        """Return what `refresh` has read."""
        memory = {
            name: Family(_memory_text(name), kind=GAUGE)
            for name in self._values
            if name not in FAMILIES
        }
        for name, family in {**FAMILIES, **memory}.items():
            made = _family(name, family)
            for labels, value in self._values.get(name, ()):
                shown = dict(zip(family.labels, labels, strict=True))
                made.add_sample(name, shown, value)
            yield made


def _family(name: str, family: Family) -> Metric:
    plain = name.removesuffix("_total") if family.kind == COUNTER else name
    return Metric(plain, family.text, family.kind)


def _memory_text(name: str) -> str:
    return f"Field {name.removeprefix('node_memory_').removesuffix('_bytes')} of /proc/meminfo."


def _system(root: Path, node: str) -> Iterator[Value]:
    readers: tuple[Callable[[Path], Iterator[Value]], ...] = (
        *(_stat, _memory, _load, _vmstat, _pressure, _descriptors),
        *(_disks, _traffic, _links, _ports),
    )
    for reader in readers:
        yield from reader(root)
    yield "node_time_seconds", (), wall()
    files = ("ostype", "osrelease", "version")
    kernel = [read(root / "proc/sys/kernel" / name).strip() for name in files]
    # The host's name in /proc is that of the reader's own container.
    yield "node_uname_info", (*kernel, os.uname().machine, node, "(none)"), 1.0


def _numbers(words: Iterable[str]) -> list[int]:
    """Return the whole numbers up to the first word that is none."""
    result = []
    for word in words:
        number = whole_number(word)
        if number is None:
            break
        result.append(number)
    return result


def _stat(root: Path) -> Iterator[Value]:
    for line in read(root / "proc/stat").splitlines():
        name, *words = line.split() or [""]
        numbers = _numbers(words[:10])  # `intr` goes on with thousands
        processor = whole_number(name.removeprefix("cpu"))
        if name.startswith("cpu") and processor is not None:
            for mode, ticks in zip(MODES, numbers, strict=False):
                yield "node_cpu_seconds_total", (str(processor), mode), ticks / TICKS
            for mode, ticks in zip(GUESTS, numbers[len(MODES) :], strict=False):
                yield "node_cpu_guest_seconds_total", (str(processor), mode), ticks / TICKS
        elif name in STAT and numbers:
            yield STAT[name], (), numbers[0]


def _memory(root: Path) -> Iterator[Value]:
    lines = read(root / "proc/meminfo").splitlines()
    for line in lines[:MEMORY_MAX]:
        name, _, rest = line.partition(":")
        number, *unit = rest.split() or [""]
        value = whole_number(number)
        plain = re.sub(r"\W+", "_", name, flags=re.ASCII).strip("_")
        if value is not None and plain:
            is_size = unit == ["kB"]
            yield f"node_memory_{plain}{'_bytes' * is_size}", (), value * (1024 if is_size else 1)


def _load(root: Path) -> Iterator[Value]:
    names = ("node_load1", "node_load5", "node_load15")
    for name, word in zip(names, read(root / "proc/loadavg").split(), strict=False):
        value = finite_number(word, 0.0, 1e9)
        if value is not None:
            yield name, (), value


def _vmstat(root: Path) -> Iterator[Value]:
    for line in read(root / "proc/vmstat").splitlines():
        name, _, number = line.partition(" ")
        value = whole_number(number) if name in VMSTAT else None
        if value is not None:
            yield f"node_vmstat_{name}", (), value


def _pressure(root: Path) -> Iterator[Value]:
    for (what, share), (name, _) in PRESSURE.items():
        for line in read(root / "proc/pressure" / what).splitlines():
            total = whole_number(line.rpartition("total=")[2])
            if line.startswith(f"{share} ") and total is not None:
                yield f"node_pressure_{name}_seconds_total", (), total / 1e6


def _descriptors(root: Path) -> Iterator[Value]:
    numbers = _numbers(read(root / "proc/sys/fs/file-nr").split())
    if len(numbers) == 3:
        yield "node_filefd_allocated", (), numbers[0]
        yield "node_filefd_maximum", (), numbers[2]


def _disks(root: Path) -> Iterator[Value]:
    rows = (line.split() for line in read(root / "proc/diskstats").splitlines())
    disks = (row for row in rows if len(row) > 13 and not _NO_DISK.fullmatch(row[2]))
    for row in itertools.islice(disks, DEVICES_MAX):
        for name, (column, factor, _) in DISK.items():
            value = whole_number(row[column])
            if value is not None:
                yield f"node_disk_{name}", (row[2],), value * factor


def _is_of_host(device: str) -> bool:
    return not _OF_PODS.fullmatch(device)


def _traffic(root: Path) -> Iterator[Value]:
    # Of process 1: /proc/net is that of the reader's own container.
    rows = (line.partition(":") for line in read(root / "proc/1/net/dev").splitlines()[2:])
    named = ((name.strip(), rest) for name, _, rest in rows)
    hosts = ((name, rest) for name, rest in named if _is_of_host(name))
    for device, rest in itertools.islice(hosts, DEVICES_MAX):
        numbers = _numbers(rest.split())
        for column, value in zip(RECEIVED, numbers, strict=False):
            yield f"node_network_receive_{column}_total", (device,), value
        for column, value in zip(SENT, numbers[len(RECEIVED) :], strict=False):
            yield f"node_network_transmit_{column}_total", (device,), value


def _folders(place: Path) -> list[Path]:
    try:
        return sorted(place.iterdir())
    except OSError:
        return []


def _links(root: Path) -> Iterator[Value]:
    hosts = [one for one in _folders(root / "sys/class/net") if _is_of_host(one.name)]
    for place in hosts[:DEVICES_MAX]:
        labels = (place.name,)
        state = read(place / "operstate").strip()
        if state:
            yield "node_network_up", labels, float(state == "up")
        megabits = whole_number(read(place / "speed").strip())
        if megabits is not None:
            yield "node_network_speed_bytes", labels, megabits * 125_000
        for file, name in (("mtu", "mtu_bytes"), ("carrier_changes", "carrier_changes_total")):
            value = whole_number(read(place / file).strip())
            if value is not None:
                yield f"node_network_{name}", labels, value


def _ports(root: Path) -> Iterator[Value]:
    for place in _folders(root / "sys/class/infiniband")[:DEVICES_MAX]:
        device, is_efa = place.name, _driver(place) == "efa"
        if is_efa:
            yield "node_amazonefa_info", (device,), 1.0
        else:
            files = ("board_id", "fw_ver", "hca_type")
            about = tuple(read(place / file).strip()[:100] for file in files)
            yield "node_infiniband_info", (device, *about), 1.0
        for port in _folders(place / "ports")[:DEVICES_MAX]:
            yield from (_efa_port if is_efa else _infiniband_port)(port, (device, port.name))


def _driver(place: Path) -> str:
    try:
        return (place / "device/driver").readlink().name
    except OSError:
        return ""


def _efa_port(port: Path, labels: tuple[str, str]) -> Iterator[Value]:
    for file in EFA:
        value = whole_number(read(port / "hw_counters" / file).strip())
        if value is not None:
            yield f"node_amazonefa_{file}", labels, value


def _infiniband_port(port: Path, labels: tuple[str, str]) -> Iterator[Value]:
    for file, name in (("state", "state_id"), ("phys_state", "physical_state_id")):
        state = whole_number(read(port / file).partition(":")[0].strip())
        if state is not None:
            yield f"node_infiniband_{name}", labels, state
    gigabits = finite_number(read(port / "rate").partition(" ")[0], 0.0, 1e6)
    if gigabits is not None:
        yield "node_infiniband_rate_bytes_per_second", labels, gigabits * 125_000_000
    for file, name in LINK.items():
        value = whole_number(read(port / "counters" / file).strip())
        if value is not None:
            factor = LANES if file.endswith("_data") else 1
            yield f"node_infiniband_{name}", labels, value * factor


@dataclass(frozen=True, slots=True)
class Mount:
    """A mounted file system."""

    device: str
    point: str
    kind: str
    is_read_only: bool


_NO_FILES = re.compile(
    r"autofs|binfmt_misc|bpf|cgroup2?|configfs|debugfs|devpts|devtmpfs|efivarfs|fusectl|hugetlbfs|"
    r"iso9660|mqueue|nsfs|proc|pstore|ramfs|rpc_pipefs|securityfs|selinuxfs|squashfs|sysfs|tracefs"
)
"""Types of file systems that keep no files of users, or are read-only by nature."""
_MEMORY_OF_PODS = re.compile(
    r"/(var/lib/kubelet|run/(user|containerd|k3s|docker|netns|credentials))(/.*)?"
)
_VOLUMES_OF_PODS = re.compile(r"/var/lib/kubelet/(pods|plugins)/.*")
"""Where kubelet and storage drivers mount volumes, of whatever type."""


def _mounts(root: Path) -> Iterator[Mount]:
    """Yield each file system once, without those of pods and sessions."""
    found = (
        Mount(*fields)
        for fields in file_systems(root)
        if not _NO_FILES.fullmatch(fields[2])
        and not (fields[2] == "tmpfs" and _MEMORY_OF_PODS.fullmatch(fields[1]))
        and not _VOLUMES_OF_PODS.fullmatch(fields[1])
        and (fields[2] != "overlay" or fields[1] == "/")
        and not fields[1].startswith(("/proc/", "/sys/"))
    )
    return itertools.islice(found, DEVICES_MAX)
