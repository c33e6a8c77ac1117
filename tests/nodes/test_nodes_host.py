"""Looks at a system whose files a test has made."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from unbroken.core.nodes.signals import Blocked
from unbroken.nodes import host

MOUNTS = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw,errors=remount-ro
23 22 8:1 /data /var/lib/pods/x ro,relatime - ext4 /dev/sda1 rw
24 22 259:0 / /local\\040disk rw - xfs /dev/nvme0n1 ro,attr2
25 22 0:5 / /proc rw - proc proc rw
26 22 0:40 / /mnt rw - nfs4 server:/x rw
27 22 8:9 / /gone rw - ext4 /dev/sdb1 rw
garbage
"""


def made(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_file_systems_are_looked_at_once_and_local_ones_only(tmp_path: Path) -> None:
    root = made(tmp_path, {"proc/1/mountinfo": MOUNTS, "proc/uptime": "61.5 1\n"})
    (root / "local disk").mkdir()
    found = host.look(root, ())
    assert found.uptime_seconds == 61.5
    assert found.read_only == {
        "/dev/sda1 at /": False,
        "/dev/nvme0n1 at /local disk": True,
        "/dev/sdb1 at /gone": False,
    }
    assert found.free.keys() == {"/", "/local disk"}
    assert all(0 <= share <= 1 for share in found.free.values())


def test_counters_of_ports_and_of_hardware_are_read(tmp_path: Path) -> None:
    port = "sys/class/infiniband/rdmap0s6/ports/1"
    root = made(
        tmp_path,
        {
            f"{port}/hw_counters/rx_drops": "12\n",
            f"{port}/hw_counters/lifespan": "10\n",
            f"{port}/counters/link_downed": "0\n",
            f"{port}/counters/symbol_error": "N/A (no PMA)\n",
            "sys/class/net/eth0/device": "",
            "sys/class/net/eth0/statistics/rx_errors": "5\n",
            "sys/class/net/cni0/statistics/rx_errors": "9\n",
        },
    )
    assert host.look(root, ("rx_drops", "link_downed", "symbol_error", "rx_errors")).counters == {
        ("rdmap0s6 port 1", "rx_drops"): 12,
        ("rdmap0s6 port 1", "link_downed"): 0,
        ("eth0", "rx_errors"): 5,
    }


def test_what_is_not_there_is_left_out(tmp_path: Path) -> None:
    found = host.look(tmp_path, ("rx_errors",))
    assert (found.uptime_seconds, found.free, found.read_only) == (None, {}, {})
    assert found.counters == {}
    assert host.boot_id(tmp_path) == ""


VFORK = """\
import ctypes, sys
libc = ctypes.PyDLL(None)
libc.prctl(15, b"python-worker")
if libc.vfork() == 0:
    print(flush=True)
    libc.pause()
"""
"""The parent of a vfork waits in state D until the child is gone (vfork(2))."""


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[int]:
    """The pid of a worker that cannot be interrupted, below an agent."""
    agent = tmp_path / "unbrokenrun"
    agent.write_text(
        f"#!{sys.executable}\nimport subprocess, sys\n"
        f"one = subprocess.Popen([sys.executable, '-c', {VFORK!r}], stdout=subprocess.PIPE)\n"
        "one.stdout.readline()\nprint(one.pid, flush=True)\none.wait()\n"
    )
    agent.chmod(0o755)
    with subprocess.Popen([agent], stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.slow
def test_a_worker_that_cannot_be_interrupted_is_seen_and_others_are_not(worker: int) -> None:
    [found] = [one for one in host.look(Path("/"), ()).blocked if one.pid == worker]
    assert (found.name, found.switches > 0, found.start > 0) == ("python-worker", True, True)
    [again] = [one for one in host.look(Path("/"), ()).blocked if one.pid == worker]
    assert again == found


def test_what_waits_is_told_with_its_pod_and_agents_alone_count(tmp_path: Path) -> None:
    def stat(pid: int, name: str, state: str, parent: int) -> str:
        return f"{pid} ({name}) {state} {parent} " + "0 " * 17 + "77 0\n"

    files = {
        "proc/10/stat": stat(10, "unbrokenrun", "S", 1),
        "proc/11/stat": stat(11, "a (b) c", "D", 10),
        "proc/11/status": "Name:\ta\nvoluntary_ctxt_switches:\t12\n",
        "proc/11/wchan": "rpc_wait_bit_killable",
        "proc/11/cgroup": "4:memory:/kubepods.slice/kubepods-pod"
        "0a1b2c3d_0000_4000_8000_123456789abc.slice/cri-containerd-1.scope\n",
        "proc/12/stat": stat(12, "hyperpodrun", "D", 1),
        "proc/13/stat": stat(13, "dd", "D", 1),
        "proc/14/stat": "14 (cut",
    }
    found = host.look(made(tmp_path, files), ()).blocked
    assert sorted(found, key=lambda one: one.pid) == [
        Blocked(
            *(11, 77, "a (b) c", 12, "rpc_wait_bit_killable"),
            pod="0a1b2c3d-0000-4000-8000-123456789abc",
        ),
        Blocked(12, 77, "hyperpodrun", 0),
    ]


def test_this_machine_has_an_uptime_and_a_boot() -> None:
    found = host.look(Path("/"), ())
    assert found.uptime_seconds is not None
    assert found.uptime_seconds > 0
    assert host.boot_id(Path("/"))
