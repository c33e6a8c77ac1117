"""The wheel and the source distribution: metadata, bounds of dependencies, the same bytes."""

from __future__ import annotations

import io
import os
import re
import tarfile
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.apiservers import ROOT
from tests.tools import tool
from unbroken import __version__


@pytest.fixture
def project() -> dict[str, Any]:
    """Return the table `project` of pyproject.toml."""
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return found


def archive(path: Path, order: list[str], mtime: int, uid: int, mode: int) -> None:
    """Write a compressed tar of small files, as one machine or another would write it."""
    with tarfile.open(path, "w:gz") as made:
        for name in order:
            entry = tarfile.TarInfo(name)
            entry.size, entry.mtime, entry.uid, entry.uname = 3, mtime, uid, f"user{uid}"
            entry.mode = mode
            made.addfile(entry, io.BytesIO(b"abc"))


def test_a_source_distribution_depends_on_its_contents_only(tmp_path: Path) -> None:
    first, second = tmp_path / "a.tar.gz", tmp_path / "b.tar.gz"
    archive(first, ["u/x", "u/y"], 1_700_000_000, 0, 0o644)
    archive(second, ["u/y", "u/x"], 1_800_000_000, 1000, 0o664)
    assert first.read_bytes() != second.read_bytes()
    for one in (first, second):
        tool("dist").settle(one, 1_750_000_000)
    assert first.read_bytes() == second.read_bytes()
    with tarfile.open(first) as found:
        assert [one.name for one in found] == ["u/x", "u/y"]
        held = found.extractfile("u/y")
        assert held is not None
        assert held.read() == b"abc"
    archive(second, ["u/y", "u/x"], 1_800_000_000, 1000, 0o755)
    tool("dist").settle(second, 1_750_000_000)
    assert first.read_bytes() != second.read_bytes(), "a program stays one"


def test_the_sbom_is_of_the_packages_that_the_image_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    sbom = tool("sbom")
    image = (ROOT / "deploy/Containerfile").read_text()
    assert f"uninstall --yes {' '.join(sbom.NOT_IN_THE_IMAGE)}\n" in image
    assert f"ARG LOCK={sbom.LOCK.name}\n" in image
    lock = (ROOT / "tools/sbom-requirements.lock").read_text()
    assert re.search(r"^cyclonedx-bom==\d", lock, re.MULTILINE)
    assert "file:" not in lock


def test_every_dependency_names_its_lowest_version(project: dict[str, Any]) -> None:
    found = tool("matrix").lowest(project)
    assert f"aiohttp=={_bound(project, 'aiohttp')}" in found
    assert len(found) == len(project["dependencies"]) + len(
        project["optional-dependencies"]["otel"]
    )
    with pytest.raises(ValueError, match="NAME>=VERSION"):
        tool("matrix").lowest({**project, "dependencies": ["aiohttp"]})


def _bound(project: dict[str, Any], name: str) -> str:
    (found,) = (one for one in project["dependencies"] if one.startswith(f"{name}>="))
    return str(found).partition(">=")[2]


def test_the_locks_hold_no_version_below_a_bound(project: dict[str, Any]) -> None:
    text = (ROOT / "requirements.lock").read_text()
    for one in tool("matrix").lowest(project):
        name, _, lowest = one.partition("==")
        locked = re.search(rf"^{re.escape(name.lower())}==(\S+)", text, re.MULTILINE)
        assert locked is not None, name
        assert _numbers(locked[1]) >= _numbers(lowest), one


def _numbers(version: str) -> list[int]:
    return [int(one) for one in version.split(".") if one.isdigit()]


def test_the_version_stands_in_one_place(project: dict[str, Any]) -> None:
    assert "version" not in project
    assert project["dynamic"] == ["version"]
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+)?", __version__)
    images = r"unbroken(?:-training)?:([0-9][\w.]*)"
    for page in ("README.md", "examples/first_job.yaml", "deploy/helm/unbroken/README.md"):
        named = set(re.findall(images, (ROOT / page).read_text()))
        assert named == {__version__}, page
    (label,) = re.findall(
        r'org\.opencontainers\.image\.version="(.+?)"',
        (ROOT / "deploy/Containerfile").read_text(),
    )
    assert label == __version__
    assert f"\n## {__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_pythons_that_are_claimed_are_those_of_the_matrix(project: dict[str, Any]) -> None:
    claimed = re.findall(r"Python :: 3\.(\d+)", "\n".join(project["classifiers"]))
    assert [int(one) for one in claimed] == [*tool("matrix").MINORS]
    assert project["requires-python"] == f">=3.{tool('matrix').MINORS[0]}"


def test_a_clean_environment_has_nothing_of_a_virtual_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VIRTUAL_ENV", "PYTHONPATH", "KUBECONFIG", "UNBROKEN_DIR", "PET_NNODES"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("PATH", os.environ["PATH"])
    found = tool("matrix").clean()
    assert not {"VIRTUAL_ENV", "PYTHONPATH", "KUBECONFIG", "UNBROKEN_DIR"} & found.keys()
    assert "PATH" in found


def test_the_short_matrix_is_this_python_by_pip() -> None:
    plan = tool("matrix").plan
    assert [one for one, _ in plan(True, [])] == ["pip"]
    found = list(plan(False, ["/a", "/b"]))
    assert found.count(("lowest", "/a")) == 1
    assert ("lowest", "/b") not in found
    assert {one for one, python in found if python == "/b"} == {"pip", "pipx", "uvx"}
