"""Memory volumes of pods were open to all local users, and a folder of a cluster that existed
before kept its permissions.  Killed agents left empty folders in /tmp."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from unbroken.agent.socket import directory as socket_directory
from unbroken.errors import WorldError
from unbroken.local import folders
from unbroken.local.node.pods.volumes import (
    Directory,
    VolumeProblem,
    discard,
    memory_directory,
    provide,
)

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="acts as another user")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("before", [None, 0o755])
def test_a_memory_volume_can_be_entered_by_its_user_alone(
    before: int | None, tmp_path: Path
) -> None:
    uid = str(uuid.uuid4())
    old = os.umask(0)
    try:
        if before is not None:
            memory_directory(uid).mkdir(mode=before)
        path = provide("cache", Directory(is_in_memory=True), tmp_path, uid)
        assert mode(path.parent) == 0o700
        assert mode(path) == 0o777, "any user of the pod's containers writes there"
        if os.geteuid() == 0:
            found = subprocess.run(["ls", path], user=65534, capture_output=True, check=False)
            assert found.returncode != 0
    finally:
        os.umask(old)
        discard(tmp_path / "pod", uid)
    assert not memory_directory(uid).exists()


@AS_ROOT
def test_a_memory_volume_that_another_user_made_is_refused(tmp_path: Path) -> None:
    uid = str(uuid.uuid4())
    memory_directory(uid).mkdir()
    os.chown(memory_directory(uid), 65534, 65534)
    try:
        with pytest.raises(VolumeProblem, match="belongs to user 65534"):
            provide("cache", Directory(is_in_memory=True), tmp_path, uid)
    finally:
        memory_directory(uid).rmdir()


def test_a_link_in_place_of_a_memory_volume_is_refused(tmp_path: Path) -> None:
    uid = str(uuid.uuid4())
    (tmp_path / "mine").mkdir(mode=0o755)
    memory_directory(uid).symlink_to(tmp_path / "mine")
    try:
        with pytest.raises(VolumeProblem, match="have it removed"):
            provide("cache", Directory(is_in_memory=True), tmp_path, uid)
        assert list((tmp_path / "mine").iterdir()) == []
    finally:
        memory_directory(uid).unlink()


def test_an_open_folder_of_a_cluster_is_closed_and_that_is_said(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d").chmod(0o755)
    assert "had mode 755" in folders.private(tmp_path / "d")
    assert mode(tmp_path / "d") == 0o700
    assert folders.private(tmp_path / "d") == ""
    (tmp_path / "d/cluster.json").write_text("{}")
    (tmp_path / "d/objects.db").write_bytes(b"SQLite format 3\0")
    (tmp_path / "d").chmod(0o770)
    assert "had mode 770" in folders.private(tmp_path / "d")


def test_a_folder_with_other_things_is_neither_closed_nor_mixed_with_a_cluster(
    tmp_path: Path,
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    home.chmod(0o755)
    (home / "file").write_text("")
    with pytest.raises(WorldError, match="chmod 700"):
        folders.private(home)
    assert mode(home) == 0o755
    home.chmod(0o700)
    assert folders.private(home) == ""
    (home / "logs").mkdir()
    with pytest.raises(WorldError, match="holds logs"):
        folders.private(home)


HOLDER = """
import os, socket, sys
from unbroken.agent.socket import directory as socket_directory
lock = socket_directory.make()
listener = socket.socket(socket.AF_UNIX)
listener.bind(socket_directory.socket_path())
if sys.argv[1] == "unlocked":
    os.close(lock)
    listener.listen()
print(socket_directory.path(), flush=True)
sys.stdin.read()
"""


def started(kind: str, folder: Path, **variables: str) -> tuple[subprocess.Popen[str], Path]:
    """A process that holds a socket folder, and the folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True, env=os.environ | {"TMPDIR": str(folder)} | variables,
    )  # fmt: skip
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def ended(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


@pytest.fixture
def short() -> Path:
    """A folder whose path is short enough for a socket."""
    path = Path(f"/tmp/{uuid.uuid4().hex[:8]}")
    path.mkdir(mode=0o700)
    return path


@pytest.mark.slow
def test_folders_of_killed_agents_are_swept_and_no_others(
    short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(short))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", None)
    killed, gone = started("locked", short, XDG_RUNTIME_DIR="")
    living, kept = started("locked", short, XDG_RUNTIME_DIR="")
    older, answering = started("unlocked", short, XDG_RUNTIME_DIR="")
    others = [short / "unbroken-envtest", short / "unbroken-0123456789abcdef", short / "mine"]
    for one in others:
        one.mkdir()
    (others[1] / "precious").write_text("")
    (short / "unbroken-fedcba9876543210").symlink_to(others[2])
    ended(killed)
    assert gone.exists()
    socket_directory.sweep()
    left = sorted(one.name for one in short.iterdir())
    assert left == sorted(
        [kept.name, answering.name, "unbroken-fedcba9876543210", *(one.name for one in others)]
    )
    assert (others[1] / "precious").exists()
    ended(living)
    ended(older)
    socket_directory.sweep()
    assert not kept.exists()
    assert not answering.exists()


@pytest.mark.slow
def test_sockets_are_in_the_runtime_folder_where_it_is_private(short: Path) -> None:
    runtime = short / "run"
    runtime.mkdir(mode=0o700)
    process, place = started("locked", short, XDG_RUNTIME_DIR=str(runtime))
    assert place.parent == runtime
    assert mode(place) == 0o700
    ended(process)
    runtime.chmod(0o777)
    process, place = started("locked", short, XDG_RUNTIME_DIR=str(runtime))
    assert place.parent == short
    ended(process)


def test_a_long_folder_still_gives_an_address_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/tmp/" + "x" * 90)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/" + "y" * 90)
    address = socket_directory.socket_path()
    assert len(address) <= socket_directory.PATH_BYTES_MAX
    with socket.socket(socket.AF_UNIX) as one, pytest.raises(FileNotFoundError):
        one.connect(address)
