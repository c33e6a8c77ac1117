"""Facts about a worker from the kernel and from files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from unbroken.agent.workers import facts, lineage
from unbroken.agent.workers.environment import RankTable, merge
from unbroken.wire.agent import StartCommand


@pytest.mark.parametrize(
    ("cgroups", "file", "text"),
    [
        ("0::/pod/main\n", "pod/main/memory.events", "low 0\noom 3\noom_kill 2\n"),
        # With a cgroup namespace, or where the host's path shows inside a container.
        ("0::/\n", "memory.events", "oom_kill 2\noom_group_kill 0\n"),
        ("0::/../host/path\n", "memory.events", "oom_kill 2\n"),
        (
            "5:cpu:/a\n4:memory:/pod\n0::/\n",
            "memory/pod/memory.oom_control",
            "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
        ),
    ],
)
def test_oom_kills_are_counted_in_both_versions_of_cgroups(
    tmp_path: Path, cgroups: str, file: str, text: str
) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    assert facts.oom_kills(cgroups, tmp_path) == 2


def test_where_nothing_is_counted_there_were_none(tmp_path: Path) -> None:
    assert facts.oom_kills("0::/\n", tmp_path) == 0
    assert facts.oom_kills() >= 0


def test_a_full_file_system_is_noticed() -> None:
    assert not facts.is_shared_memory_full("/dev/shm")
    assert not facts.is_shared_memory_full("/nowhere")
    # proc has no free blocks at all, like a tmpfs that is full.
    assert facts.is_shared_memory_full("/proc")


def test_error_files_are_bounded(tmp_path: Path) -> None:
    assert facts.error_file(str(tmp_path)) == ""
    (tmp_path / "error.json").write_bytes(b"\xff" * 10**6)
    assert len(facts.error_file(str(tmp_path))) == facts.ERROR_FILE_BYTES_MAX


def command(**changes: object) -> StartCommand:
    keys = {"attempt": 0, "rank": 0, "nnodes": 2, "master_addr": "a", "master_port": 1}
    return StartCommand(**(keys | changes))  # type: ignore[arg-type]


def test_the_table_is_resized_and_deltas_are_applied() -> None:
    assert merge([], command(rank_ips=((1, "b"),))) == [None, "b"]
    assert merge(["a", "b", "c"], command(rank_ips=())) == ["a", "b"]
    assert merge(["a", None], command(nnodes=3, rank_ips=((1, "x"),))) == ["a", "x", None]


@pytest.mark.parametrize("text", ["", "[]", "{", '{"ips": 3}', '{"ips": [], "ips_timestamp": 4}'])
def test_a_broken_table_is_as_good_as_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "pod_resourceconfig.json").write_text(text)
    table = RankTable(tmp_path)
    table.load()
    assert table.version is None
    table.take(command(ip_version="v2", rank_ips=((0, "a"),)))
    assert table.version == "v2"


def test_only_a_version_with_addresses_is_written(tmp_path: Path) -> None:
    table = RankTable(tmp_path / "new" / "directory")
    table.take(command(ip_version="v2"))
    table.take(command(rank_ips=((0, "a"),)))
    assert (table.version, table.warning) == (None, "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_children_are_found_with_and_without_the_kernels_lists() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert child.pid in lineage.children()
        assert child.pid in lineage._scan()
        assert os.getpid() not in lineage.children()
        child.communicate(b"\n")


LEADERLESS = """
import ctypes, os, threading, time
def rest():
    while open("/proc/self/stat").read().rpartition(")")[2].split()[0] != "Z": time.sleep(0.01)
    os.write(1, b"left"); time.sleep(1000)
threading.Thread(target=rest).start()
ctypes.CDLL(None).syscall(60 if os.uname().machine == "x86_64" else 93, 0)
"""


@pytest.mark.slow
def test_who_dies_is_told_from_who_lives_without_its_first_thread() -> None:
    waits = [sys.executable, "-c", "import os, time; os.write(1, b'left'); time.sleep(1000)"]
    for command in (waits, [sys.executable, "-c", LEADERLESS]):
        with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            assert child.stdout.read(4) == b"left"
            assert not lineage.is_dying(child.pid)
            os.kill(child.pid, 9)
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
            assert lineage.is_dying(child.pid), "it is not reaped yet"
        assert lineage.is_dying(child.pid)


@pytest.mark.parametrize(
    "limit", ["max 100000", "", "50000 100000", "250000 100000", "9900000 1000"]
)
def test_processors_are_those_of_the_container(limit: str, tmp_path: Path) -> None:
    if limit:
        (tmp_path / "cpu.max").write_text(limit + "\n")
    most = len(os.sched_getaffinity(0))
    expected = {"50000 100000": 1, "250000 100000": min(2, most)}.get(limit, most)
    assert facts.processors(tmp_path) == expected
