"""Two clusters on one machine never share an address."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from unbroken.errors import WorldError
from unbroken.local import networks
from unbroken.local.networks import NODES_MAX, node_address


@pytest.fixture(autouse=True)
def own_claims(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Claims of this test alone."""
    monkeypatch.setattr(networks, "CLAIMS", tmp_path)


def made(path: Path) -> Path:
    """A cluster's directory."""
    path.mkdir()
    return path


def test_a_directory_keeps_its_number_and_no_other_gets_it(tmp_path: Path) -> None:
    one, two = made(tmp_path / "one"), made(tmp_path / "two")
    first = networks.claim(one)
    assert networks.claim(two) != first
    assert networks.claim(one) == first


def test_temporary_folders_of_the_shell_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = []
    for name in ("one", "two"):
        monkeypatch.setenv("TMPDIR", str(made(tmp_path / f"{name}-tmp")))
        monkeypatch.setattr("tempfile.tempdir", None)
        numbers.append(networks.claim(made(tmp_path / name)))
    assert numbers[0] != numbers[1]


def test_a_folder_of_claims_that_somebody_has_put_there_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "networks"
    folder.write_text("")
    with pytest.raises(WorldError, match=str(folder)):
        networks.claim(made(tmp_path / "one"))


def test_the_number_of_a_directory_that_is_gone_is_given_again(tmp_path: Path) -> None:
    one = made(tmp_path / "one")
    first = networks.claim(one)
    one.rmdir()
    assert networks.claim(made(tmp_path / "two")) == first


@pytest.mark.parametrize("last", ["0.1", "0.3", "255.254"])
def test_a_number_of_addresses_at_which_somebody_listens_is_passed_over(
    tmp_path: Path, last: str
) -> None:
    first = networks.claim(made(tmp_path / "one"))
    (tmp_path / "one").rmdir()
    address = node_address(first * NODES_MAX).removesuffix("0.1") + last
    with socket.create_server((address, 0)):
        assert networks.claim(made(tmp_path / "two")) != first
