"""The workflows and forms for GitHub, as far as they can be tried without GitHub."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.apiservers import ROOT

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
PINNED = re.compile(r"[\w.-]+/[\w.-]+@v\d+\.\d+\.\d+")


def read(path: Any) -> dict[Any, Any]:
    """A workflow; YAML reads its key `on` as true."""
    found: dict[Any, Any] = yaml.safe_load(path.read_text())
    return found


def steps() -> Iterator[dict[str, Any]]:
    """Yield every step of every workflow."""
    for path in WORKFLOWS:
        for job in read(path)["jobs"].values():
            yield from job["steps"]


def test_actions_are_pinned_by_a_full_version() -> None:
    used = [one["uses"] for one in steps() if "uses" in one]
    assert len(used) > 10
    assert [one for one in used if not PINNED.fullmatch(one)] == []


def test_workflows_call_only_what_is_there() -> None:
    rules = re.findall(r"^([a-z][a-z -]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    targets = set(" ".join(rules).split())
    commands = "\n".join(one["run"] for one in steps() if "run" in one)
    called = set(re.findall(r"\bmake ([a-z-]+)", commands))
    assert {"test", "docs"} <= called <= targets
    for name in re.findall(r"\btools/[\w.-]+", commands):
        found = ROOT / name
        assert found.is_file(), name
        assert found.suffix in (".py", ".lock") or found.stat().st_mode & stat.S_IXUSR, name
    for path in re.findall(r"\bdeploy/[\w./-]+", commands):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: str(path.stem))
def test_a_workflow_has_few_rights_and_an_end(path: Any) -> None:
    found = read(path)
    assert found["permissions"] == {"contents": "read"}
    assert "pull_request_target" not in found[True]
    for name, job in found["jobs"].items():
        assert job["runs-on"] == "ubuntu-24.04", name
        for step in job["steps"]:
            # An expression in a script is text that others choose; it goes through `env`.
            assert "${{" not in step.get("run", ""), name
    needs = {one for job in found["jobs"].values() for one in [job.get("needs")] if one}
    assert needs <= found["jobs"].keys()


def test_a_release_needs_no_stored_password() -> None:
    release = read(ROOT / ".github/workflows/release.yml")
    assert release[True]["push"] == {"tags": ["v[0-9]+.[0-9]+.[0-9]+"]}
    assert release["jobs"]["pypi"]["permissions"] == {"id-token": "write"}
    secrets = set(re.findall(r"secrets\.(\w+)", str(release)))
    assert secrets == {"GITHUB_TOKEN"}
    targets = {one["target"] for one in release["jobs"]["images"]["strategy"]["matrix"]["include"]}
    stages = set(re.findall(r" AS (\w+)", (ROOT / "deploy/Containerfile").read_text()))
    assert targets == {"operator", "training"}
    assert targets <= stages


def test_the_published_chart_names_the_published_image(tmp_path: Path) -> None:
    jobs = read(ROOT / ".github/workflows/release.yml")["jobs"]
    (named,) = (one["run"] for one in jobs["images"]["steps"] if one.get("id") == "image")
    (pack,) = (one["run"] for one in jobs["chart"]["steps"] if "helm package" in one.get("run", ""))
    shutil.copytree(ROOT / "deploy/helm", tmp_path / "deploy/helm")
    (tmp_path / "helm").write_text('#!/bin/sh\n[ "$1" != registry ] || cat\n')
    (tmp_path / "helm").chmod(0o755)
    given = {"REGISTRY": "ghcr.example", "OWNER": "Team", "TAG": "v0.1.0", "NAME": "unbroken"}
    given |= {"ACTOR": "someone", "TOKEN": "none"}
    environment = {**given, "PATH": f"{tmp_path}:{os.environ['PATH']}", "GITHUB_OUTPUT": "output"}
    for script in (named, pack):
        command = ["bash", "-euo", "pipefail", "-c", script]
        subprocess.run(command, cwd=tmp_path, env=environment, check=True)
    values = yaml.safe_load((tmp_path / "deploy/helm/unbroken/values.yaml").read_text())
    about = yaml.safe_load((tmp_path / "deploy/helm/unbroken/Chart.yaml").read_text())
    image = f"{values['image']['repository']}:{about['appVersion']}"
    assert (tmp_path / "output").read_text() == f"name={image}\n"
    assert image == "ghcr.example/team/unbroken:0.1.0"
