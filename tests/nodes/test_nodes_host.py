"""Looks at a system whose files a test has made."""

from __future__ import annotations

from pathlib import Path

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


def test_this_machine_has_an_uptime_and_a_boot() -> None:
    found = host.look(Path("/"), ())
    assert found.uptime_seconds is not None
    assert found.uptime_seconds > 0
    assert host.boot_id(Path("/"))
