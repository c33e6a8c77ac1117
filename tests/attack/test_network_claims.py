"""Any local user stopped another's `up` for good by making `/tmp/unbroken-networks-UID`."""

from __future__ import annotations

import os
import pwd
import stat
from pathlib import Path

import pytest

from unbroken.errors import WorldError
from unbroken.local import networks
from unbroken.local.networks import CLUSTERS_MAX


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home folder of this user."""
    folder = tmp_path / "home"
    folder.mkdir()
    entry = pwd.getpwuid(os.geteuid())
    fields = [*entry[:5], str(folder), entry[6]]
    monkeypatch.setattr(pwd, "getpwuid", lambda _: pwd.struct_passwd(fields))
    return folder


def made(path: Path) -> Path:
    """A cluster's folder."""
    path.mkdir()
    return path


def test_claims_are_in_the_users_own_state_folder(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = []
    for name in ("one", "two"):
        # Whatever the shell says, all claims are in one place.
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(made(tmp_path / f"run-{name}")))
        monkeypatch.setenv("HOME", str(tmp_path / name))
        monkeypatch.setenv("TMPDIR", str(tmp_path / name))
        numbers.append(networks.claim(made(tmp_path / name)))
    assert numbers[0] != numbers[1]
    folder = home / ".local/state/unbroken/networks"
    assert {path.name for path in folder.iterdir()} == {*map(str, numbers), "lock"}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_without_a_home_the_runtime_folder_is_taken(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.rmdir()
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    with pytest.raises(WorldError, match="set it to a folder"):
        networks.claim(made(tmp_path / "one"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(made(tmp_path / "run")))
    networks.claim(tmp_path / "one")
    assert (tmp_path / "run/unbroken/networks/lock").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder to another user")
def test_a_folder_of_claims_of_another_user_is_refused(home: Path, tmp_path: Path) -> None:
    folder = home / ".local/state/unbroken/networks"
    folder.mkdir(parents=True)
    os.chown(folder, 65534, 65534)
    with pytest.raises(WorldError, match="belongs to another user"):
        networks.claim(made(tmp_path / "one"))


def test_a_link_in_place_of_claims_or_lock_is_not_followed(home: Path, tmp_path: Path) -> None:
    folder = home / ".local/state/unbroken/networks"
    folder.parent.mkdir(parents=True)
    folder.symlink_to(made(tmp_path / "elsewhere"))
    with pytest.raises(WorldError, match="no folder"):
        networks.claim(made(tmp_path / "one"))
    folder.unlink()
    folder.mkdir()
    precious = tmp_path / "precious"
    precious.write_text("mine")
    for number in range(CLUSTERS_MAX):  # Clusters of other tests may serve on some of them.
        (folder / str(number)).symlink_to(precious)
    (folder / "draft").write_text("torn")
    claimed = folder / str(networks.claim(tmp_path / "one"))
    assert not claimed.is_symlink()
    assert claimed.read_text() == str(tmp_path / "one")
    assert precious.read_text() == "mine"


def test_numbers_of_stopped_clusters_are_given_away_when_none_is_left(
    home: Path, tmp_path: Path
) -> None:
    folder = home / ".local/state/unbroken/networks"
    folder.mkdir(parents=True)
    stopped = made(tmp_path / "stopped")
    for number in range(CLUSTERS_MAX):
        (folder / str(number)).write_text(str(stopped))
    number = networks.claim(made(tmp_path / "one"))
    assert (folder / str(number)).read_text() == str(tmp_path / "one")


def test_a_deleted_cluster_gives_its_number_back(home: Path, tmp_path: Path) -> None:
    one = made(tmp_path / "one")
    first = networks.claim(one)
    networks.release(one)
    assert networks.claim(made(tmp_path / "two")) == first
