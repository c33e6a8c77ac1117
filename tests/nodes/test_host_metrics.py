"""Metrics of a system whose files a test has made, and of this machine."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from tests.nodes.test_gpu_metrics import value
from tests.nodes.test_nodes_host import made
from unbroken.nodes.hanging import CALL_SECONDS, HangingCalls
from unbroken.nodes.host_metrics import DEVICES_MAX, FAMILIES, HostMetrics

STAT = """\
cpu  10 0 0 0 0 0 0 0 0 0
cpu0 100 20 300 4000 50 6 7 8 9 10
cpux 1 2 3
intr 77 1 2 3
ctxt 5
btime 1700000000
processes 12
procs_running 2
procs_blocked junk
"""
NET = """\
Inter-|   Receive  |  Transmit
 face |bytes packets errs drop fifo frame compressed multicast|bytes packets
  eth0: 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16
vethab12: 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16
garbage
"""
DISKS = """\
 259 0 nvme0n1 1 2 3 4 5 6 7 8 9 10 11 0 0 0 0
 259 1 nvme0n1p1 1 2 3 4 5 6 7 8 9 10 11
   7 0 loop0 1 2 3 4 5 6 7 8 9 10 11
   8 0 sda 1 2
"""
MEMORY = "MemTotal: 16 kB\nHugePages_Total:   3\nActive(anon): 2 kB\nOdd: -1 kB\n"
PORT = "sys/class/infiniband/mlx5_0/ports/1"
EFA = "sys/class/infiniband/rdmap0s6/ports/1/hw_counters"


def samples(root: Path) -> dict[str, float]:
    """Read the system once; return each series, as text, with its value."""
    registry = CollectorRegistry()
    metrics = HostMetrics(registry, root, "node-7")
    asyncio.run(metrics.refresh())
    return series(registry)


def series(registry: CollectorRegistry) -> dict[str, float]:
    """Return each series that is there now, as text, with its value."""
    lines = generate_latest(registry).decode().splitlines()
    rows = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name: float(value) for name, _, value in rows}


def test_each_file_has_the_names_and_units_of_node_exporter(tmp_path: Path) -> None:
    root = made(
        tmp_path,
        {
            "proc/stat": STAT,
            "proc/1/net/dev": NET,
            "proc/diskstats": DISKS,
            "proc/loadavg": "1.5 2 x 1/2 3\n",
            "proc/meminfo": MEMORY,
            "proc/vmstat": "oom_kill 4\nnr_free_pages 1\n",
            "proc/pressure/io": "some avg10=0.00 total=2000000\nfull avg10=0.00 total=1000000\n",
            "proc/sys/fs/file-nr": "32\t0\t100\n",
            "sys/class/net/eth0/operstate": "up\n",
            "sys/class/net/eth0/speed": "100000\n",
            "sys/class/net/eth1/speed": "-1\n",
            f"{PORT}/state": "4: ACTIVE\n",
            f"{PORT}/rate": "400 Gb/sec (4X NDR)\n",
            f"{PORT}/counters/port_rcv_data": "10\n",
            f"{PORT}/counters/link_downed": "N/A (no PMA)\n",
            f"{EFA}/rdma_read_bytes": "12\n",
        },
    )
    device = root / "sys/class/infiniband/rdmap0s6/device"
    device.mkdir()
    (device / "driver").symlink_to("../../../bus/pci/drivers/efa")
    found = samples(root)
    for name, expected in {
        'node_cpu_seconds_total{cpu="0",mode="idle"}': 4000 / os.sysconf("SC_CLK_TCK"),
        'node_cpu_guest_seconds_total{cpu="0",mode="nice"}': 10 / os.sysconf("SC_CLK_TCK"),
        "node_intr_total": 77,
        "node_boot_time_seconds": 1700000000,
        "node_load5": 2,
        "node_memory_MemTotal_bytes": 16384,
        "node_memory_HugePages_Total": 3,
        "node_memory_Active_anon_bytes": 2048,
        "node_vmstat_oom_kill": 4,
        "node_pressure_io_stalled_seconds_total": 1,
        "node_filefd_maximum": 100,
        'node_disk_read_bytes_total{device="nvme0n1"}': 3 * 512,
        'node_disk_write_time_seconds_total{device="nvme0n1"}': 0.008,
        'node_network_receive_drop_total{device="eth0"}': 4,
        'node_network_transmit_carrier_total{device="eth0"}': 15,
        'node_network_up{device="eth0"}': 1,
        'node_network_speed_bytes{device="eth0"}': 12.5e9,
        'node_infiniband_state_id{device="mlx5_0",port="1"}': 4,
        'node_infiniband_rate_bytes_per_second{device="mlx5_0",port="1"}': 50e9,
        'node_infiniband_port_data_received_bytes_total{device="mlx5_0",port="1"}': 40,
        'node_amazonefa_rdma_read_bytes{device="rdmap0s6",port="1"}': 12,
    }.items():
        assert found[name] == expected, name
    text = " ".join(found)
    for absent in ("veth", "nvme0n1p1", "loop0", "sda", "load15", "Odd", "procs_blocked", "eth1"):
        assert absent not in text
    assert 'node_infiniband_info{board_id="",device="rdmap0s6"' not in text
    assert "link_downed" not in text


def test_this_machine_has_what_dashboards_ask_for() -> None:
    found = samples(Path("/"))
    for name in (
        *("node_cpu_seconds_total", "node_memory_MemAvailable_bytes", "node_load1"),
        *("node_filesystem_avail_bytes", "node_network_receive_bytes_total", "node_uname_info"),
    ):
        assert any(series.partition("{")[0] == name for series in found), name
    assert found["node_memory_MemTotal_bytes"] == os.sysconf("SC_PAGE_SIZE") * os.sysconf(
        "SC_PHYS_PAGES"
    )
    assert any('nodename="node-7"' in series for series in found)


def test_an_empty_machine_has_none_and_says_that_it_was_read(tmp_path: Path) -> None:
    found = samples(tmp_path)
    assert found['node_scrape_collector_success{collector="proc and sys"}'] == 1
    assert {series.partition("{")[0] for series in found} == {
        *("node_scrape_collector_success", "node_time_seconds", "node_uname_info")
    }


def test_a_flood_of_devices_is_bounded(tmp_path: Path) -> None:
    names = [f"eth{number}" for number in range(500)]
    files = {"proc/1/net/dev": "\n\n" + "".join(f"{name}: 1 2\n" for name in names)}
    files |= {f"sys/class/net/{name}/mtu": "1500\n" for name in names}
    files |= {f"sys/class/infiniband/{name}/ports/1/state": "4: x\n" for name in names}
    rows = [f"{n} 1 0:{n} / /m{n} rw - nfs4 s:/{n} rw\n" for n in range(500)]
    files["proc/1/mountinfo"] = "".join(rows)
    found = samples(made(tmp_path, files))
    counts: dict[str, int] = {}
    for series in found:
        name = series.partition("{")[0]
        counts[name] = counts.get(name, 0) + 1
    assert counts["node_network_receive_bytes_total"] == DEVICES_MAX
    assert max(counts.values()) == DEVICES_MAX


MOUNTS = """\
22 1 8:1 / / rw - ext4 /dev/sda1 rw
23 22 0:40 / /dead rw - nfs4 server:/x rw
24 22 0:41 / /var/lib/kubelet/pods/1/secret rw - tmpfs tmpfs rw
25 22 0:42 / /dev/shm rw - tmpfs tmpfs rw
26 22 0:43 / /proc rw - proc proc rw
27 22 0:44 / /var/lib/docker/overlay2/1 rw - overlay overlay rw
28 22 0:40 /y /also rw - nfs4 server:/x rw
29 22 0:45 / /fsx ro - lustre 10.0.0.1@tcp:/fs ro
30 22 0:46 / /var/lib/kubelet/pods/1/volumes/kubernetes.io~csi/pv/mount rw - lustre 10.0.0.2:/a rw
31 22 9:1 / /var/lib/kubelet/plugins/kubernetes.io/csi/pv/globalmount rw - ext4 /dev/nvme3n1 rw
32 22 9:2 / /var/lib/kubelet rw - xfs /dev/nvme4n1 rw
"""


def read(registry: CollectorRegistry, name: str, mount: str) -> float | None:
    """Return the value of a file system; None: it has none."""
    return value(registry, f"node_filesystem_{name}", mountpoint=mount)


def test_a_file_system_that_hangs_costs_its_own_values_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = made(tmp_path, {"proc/1/mountinfo": MOUNTS})
    for name in ("dead", "dev/shm", "fsx"):
        (root / name).mkdir(parents=True)
    hangs, released = threading.Event(), threading.Event()
    real, asked = os.statvfs, list[str]()

    def statvfs(path: Path) -> os.statvfs_result:
        asked.append(path.name)
        if path.name == "dead":
            hangs.set()
            released.wait()
        return real(path)

    monkeypatch.setattr(os, "statvfs", statvfs)
    metrics = HostMetrics(registry := CollectorRegistry(), root, "node-7")

    async def check() -> None:
        first = asyncio.create_task(metrics.refresh())
        await asyncio.to_thread(hangs.wait)
        loop = asyncio.get_running_loop()
        clock = loop.time
        monkeypatch.setattr(loop, "time", lambda: clock() + CALL_SECONDS)
        await first
        for _ in range(2):
            await metrics.refresh()
            assert read(registry, "device_error", "/dead") == 1
            assert read(registry, "size_bytes", "/dead") is None
            assert read(registry, "readonly", "/fsx") == 1
            assert read(registry, "avail_bytes", "/dev/shm") is not None

    try:
        asyncio.run(check())
    finally:
        released.set()
    assert asked.count("dead") == 1
    for absent in ("/also", "/proc", "/var/lib/docker/overlay2/1"):
        assert read(registry, "device_error", absent) is None
    of_kubelet = [row for row in series(registry) if "/var/lib/kubelet" in row]
    assert of_kubelet
    assert all('mountpoint="/var/lib/kubelet"' in row for row in of_kubelet)


def test_scrapes_at_the_same_time_have_the_same_series(tmp_path: Path) -> None:
    root = made(tmp_path, {"proc/1/mountinfo": MOUNTS, "proc/stat": STAT, "proc/meminfo": MEMORY})
    metrics = HostMetrics(registry := CollectorRegistry(), root, "node-7")

    async def scraped() -> dict[str, float]:
        await metrics.refresh()
        return series(registry)

    async def both() -> list[dict[str, float]]:
        return await asyncio.gather(scraped(), scraped())

    first, second = asyncio.run(both())
    assert first.keys() == second.keys()
    for found in (first, second):
        assert found['node_scrape_collector_success{collector="proc and sys"}'] == 1
        assert found["node_memory_MemTotal_bytes"] == 16384
        assert any(one.startswith("node_filesystem_avail_bytes") for one in found)


def test_a_caller_that_is_cancelled_leaves_the_answer_to_the_others() -> None:
    begun, released, made_by = threading.Event(), threading.Event(), list[str]()
    calls = HangingCalls()

    def work(name: str) -> str:
        made_by.append(name)
        begun.set()
        released.wait()
        return name

    async def check() -> None:
        first, second = (
            asyncio.create_task(calls.call("x", lambda name=name: work(name)))  # type: ignore[misc]
            for name in ("first", "second")
        )
        await asyncio.to_thread(begun.wait)
        first.cancel()
        await asyncio.wait({first})
        released.set()
        assert await second == "first"
        assert await calls.call("x", lambda: work("third")) == "third"

    asyncio.run(check())
    assert made_by == ["first", "third"]


def test_every_family_has_a_meaning_and_counters_end_in_total() -> None:
    for name, family in FAMILIES.items():
        assert family.text.endswith(".")
        assert (family.kind == "counter") == name.endswith("_total"), name
