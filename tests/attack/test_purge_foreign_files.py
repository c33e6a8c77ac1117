"""`unbroken down --purge --dir D` deleted all of D if it only held a `kubeconfig`."""

from __future__ import annotations

import os
import socket
from dataclasses import fields
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from unbroken.cli.main import app
from unbroken.errors import WorldError
from unbroken.local import folders, networks
from unbroken.local.state import ClusterOptions, Paths


@pytest.fixture(autouse=True)
def own_claims(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use claims of this test alone."""
    monkeypatch.setattr(networks, "CLAIMS", tmp_path)


def cluster(directory: Path) -> Paths:
    """Make a folder as `up` leaves it."""
    folders.private(directory)
    for name in folders.MADE:
        path = directory / name
        if name in ("nodes", "logs", "volumes"):
            (path / "deep/er").mkdir(parents=True)
            (path / "deep/er/file").write_text("x")
        else:
            path.write_bytes(b"")
    (directory / folders.DATABASE).write_bytes(b"SQLite format 3\0more")
    (directory / "cluster.json").write_bytes(msgspec.json.encode(ClusterOptions()))
    return Paths(directory)


def precious(directory: Path) -> Path:
    """Write a person's file into a folder of its own."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "precious.py").write_text("weeks of work")
    return directory / "precious.py"


def down(directory: Path) -> str:
    """Run the command; return its output."""
    return CliRunner().invoke(app, ["down", "--purge", "--dir", str(directory)]).output


def test_a_folder_of_a_cluster_is_removed_whole_with_its_claim(tmp_path: Path) -> None:
    paths = cluster(tmp_path / "d")
    number = networks.claim(paths.directory)
    assert f"deleted {paths.directory}" in down(paths.directory)
    assert not paths.directory.exists()
    assert not (tmp_path / "networks" / str(number)).exists()


def test_every_file_of_a_cluster_is_known_to_the_purge(tmp_path: Path) -> None:
    paths = Paths(tmp_path)
    names = {getattr(paths, one.name).name for one in fields(paths) if one.name != "directory"}
    assert names - set(folders.MADE) == set()


@pytest.mark.parametrize(
    "files",
    [
        {"kubeconfig": b""},
        {"kubeconfig": b"", "objects.db": b"SQLite format 3\0"},
        {"cluster.json": b"{}", "objects.db": b"my own"},
        {"cluster.json": b"{}", "nodes": None},
        {"cluster.json": b"[]", "objects.db": b"SQLite format 3\0"},
        {"cluster.json": b'{"nodes": "x"}', "objects.db": b"SQLite format 3\0"},
    ],
)
def test_a_folder_that_up_did_not_make_is_left(
    files: dict[str, bytes | None], tmp_path: Path
) -> None:
    kept = precious(tmp_path / "d/src")
    for name, data in files.items():
        if data is None:
            precious(tmp_path / "d" / name)
        else:
            (tmp_path / "d" / name).write_bytes(data)
    before = sorted(tmp_path.joinpath("d").rglob("*"))
    with pytest.raises(WorldError, match="did not make it"):
        folders.purge(Paths(tmp_path / "d"))
    result = CliRunner().invoke(app, ["down", "--purge", "--dir", str(tmp_path / "d")])
    assert result.exit_code != 0
    assert sorted(tmp_path.joinpath("d").rglob("*")) == before
    assert kept.exists()


def test_other_things_in_the_folder_stay_and_are_named(tmp_path: Path) -> None:
    paths = cluster(tmp_path / "d")
    kept = precious(paths.directory / "src")
    told = down(paths.directory)
    assert "left there: src" in told
    assert kept.exists()
    assert os.listdir(paths.directory) == ["src"]


def test_symbolic_links_are_removed_and_never_followed(tmp_path: Path) -> None:
    kept = precious(tmp_path / "mine")
    paths = cluster(tmp_path / "d")
    (paths.directory / "logs/deep/er/link").symlink_to(kept.parent)
    (paths.directory / "nodes/file").symlink_to(kept)
    (paths.directory / "token").unlink()
    (paths.directory / "token").symlink_to(kept)
    os.rename(paths.directory / "volumes", tmp_path / "away")
    (paths.directory / "volumes").symlink_to(kept.parent)
    assert folders.purge(paths) == []
    assert kept.read_text() == "weeks of work"


def test_a_link_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    paths = cluster(tmp_path / "d")
    (tmp_path / "link").symlink_to(paths.directory)
    with pytest.raises(WorldError, match=f"--dir {paths.directory}"):
        folders.purge(Paths(tmp_path / "link"))
    assert paths.options.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder to another user")
def test_another_users_folder_is_refused(tmp_path: Path) -> None:
    paths = cluster(tmp_path / "d")
    os.chown(paths.directory, 65534, 65534)
    with pytest.raises(WorldError, match="belongs to user 65534"):
        folders.purge(paths)
    with pytest.raises(WorldError, match="belongs to user 65534"):
        folders.private(paths.directory)
    assert paths.options.exists()


def test_a_running_cluster_is_not_deleted_under_its_feet(tmp_path: Path) -> None:
    import fcntl

    paths, other = cluster(tmp_path / "d"), cluster(tmp_path / "e")
    with paths.lock.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(WorldError, match="a cluster runs from"):
            folders.purge(paths)
    assert paths.options.exists()
    assert folders.purge(other) == []
    assert folders.purge(paths) == []


def test_an_interrupted_purge_can_be_repeated(tmp_path: Path) -> None:
    paths = cluster(tmp_path / "d")
    for name in folders.MADE[:-2]:
        folder = os.open(paths.directory, os.O_RDONLY)
        folders._remove(name, folder)
        os.close(folder)
    assert folders.purge(paths) == []
    assert not paths.directory.exists()


def test_a_cluster_whose_options_were_removed_starts_over(tmp_path: Path) -> None:
    paths = cluster(tmp_path / "d")
    paths.options.unlink()
    assert folders.private(paths.directory) == ""
    (paths.directory / folders.DATABASE).write_text("mine")
    with pytest.raises(WorldError, match="is no folder of a cluster"):
        folders.private(paths.directory)


def test_sockets_and_pipes_are_removed_too(tmp_path: Path) -> None:
    paths = cluster(tmp_path / "d")
    os.mkfifo(paths.directory / "logs/pipe")
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(paths.directory / "nodes/s"))
    assert folders.purge(paths) == []
