"""The attack: an address of lifecycle scripts leads out of the folder that is mapped to it.

`unbroken up --lifecycle-source s3://bkt/pre=DIR` took `s3://bkt/pre/../outside` for
`DIR/../outside` and ran a script from there as the user of `up`. `pre/../../..` would have copied
the whole disk.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.attack.raw_calls import captured, send
from tests.cli_calls import Cli
from tests.watching import PATIENCE_SECONDS
from unbroken.cli.cluster.place import key_of
from unbroken.errors import SpecError, WorldError
from unbroken.local import state
from unbroken.local.machines import scripts
from unbroken.local.machines.decisions.scripts import LocalSource, local_source
from unbroken.local.machines.scripts import copy_source, script_in, source_folder

ADDRESS = "s3://bkt/pre"
ROLE = "arn:aws:iam::123456789012:role/worker"
BELOW = [
    *("..", "../outside", "x/../../outside", "../../..", "./x", ".", "x/.", "x/.."),
    *("/", "//x", "x//y", "x//", "x\0/y", "x\n", "\x1b[2J"),
]
"""Suffixes of the mapped address, all of which must be refused."""
FILES = [
    *("../evil.sh", "../../outside/evil.sh", "/etc/passwd", "x/../../evil.sh", "", "a//b", "."),
    *("evil\0.sh", "out/evil.sh", "evil-link.sh", "circle.sh", "absolute.sh", "a" * 300),
]
"""Names of scripts, all of which must be refused."""


@pytest.fixture
def mapped(tmp_path: Path) -> Path:
    """Make a mapped folder with links that lead out, next to a folder of another user."""
    root, outside = tmp_path / "srv/lc", tmp_path / "srv/outside"
    for folder in (root / "x", outside):
        folder.mkdir(parents=True)
    (outside / "evil.sh").write_text(f"#!/bin/sh\nid > {tmp_path}/proof\n")
    (root / "good.sh").write_text("#!/bin/sh\necho good\n")
    (root / "x/good.sh").symlink_to("../good.sh")
    (root / "out").symlink_to("../outside")
    (root / "evil-link.sh").symlink_to("../outside/evil.sh")
    (root / "absolute.sh").symlink_to(outside / "evil.sh")
    (root / "circle.sh").symlink_to("circle.sh")
    return root


@pytest.mark.parametrize("below", BELOW)
def test_an_address_cannot_name_a_place_above(below: str) -> None:
    with pytest.raises(SpecError, match="must be the name of a folder or file"):
        local_source(f"{ADDRESS}/{below}", {ADDRESS: "/srv/lc"})


@pytest.mark.parametrize("below", ["%2e%2e/outside", "..%2foutside", "..\\outside", "...", "..x"])
def test_other_names_are_taken_literally(mapped: Path, below: str) -> None:
    source = local_source(f"{ADDRESS}/{below}", {ADDRESS: str(mapped)})
    assert source == LocalSource(str(mapped), tuple(below.split("/")))
    with pytest.raises(SpecError, match="no such file"):
        source_folder(source, "evil.sh")


@pytest.mark.parametrize("file", FILES)
def test_a_script_is_a_file_in_the_mapped_folder(mapped: Path, file: str) -> None:
    with pytest.raises((SpecError, OSError)):
        source_folder(LocalSource(str(mapped), ()), file)


def test_a_folder_that_is_a_link_out_is_refused(mapped: Path) -> None:
    with pytest.raises(SpecError, match="outside the mapped folder"):
        source_folder(LocalSource(str(mapped), ("out",)), "evil.sh")
    # A source is what was asked for, and not its neighbours.
    with pytest.raises(SpecError, match="outside its source"):
        source_folder(LocalSource(str(mapped), ("x",)), "good.sh")
    assert source_folder(LocalSource(str(mapped), ()), "x/good.sh") == mapped


def test_links_that_lead_out_are_not_copied(mapped: Path, tmp_path: Path) -> None:
    (mapped / "y").symlink_to("x")
    os.mkfifo(mapped / "pipe")
    copy = tmp_path / "copy"
    assert sorted(copy_source(mapped, copy)) == [*("absolute.sh", "evil-link.sh", "out", "pipe")]
    assert sorted(one.name for one in copy.iterdir()) == ["circle.sh", "good.sh", "x", "y"]
    assert (copy / "y/good.sh").read_text() == (mapped / "good.sh").read_text()
    assert (copy / "y/good.sh").resolve().is_relative_to(copy)


def test_a_script_that_became_a_link_after_the_check_is_not_run(
    mapped: Path, tmp_path: Path
) -> None:
    (mapped / "good.sh").unlink()
    (mapped / "good.sh").symlink_to("../outside/evil.sh")
    copy = tmp_path / "copy"
    copy_source(mapped, copy)
    with pytest.raises(SpecError, match="leads out"):
        script_in(copy, "good.sh")


def test_a_copy_is_bounded(mapped: Path, tmp_path: Path) -> None:
    (mapped / "sparse").touch()
    os.truncate(mapped / "sparse", scripts.BYTES_MAX + 1)
    with pytest.raises(WorldError, match="more than 1024 MiB"):
        copy_source(mapped, tmp_path / "bytes")
    (mapped / "sparse").unlink()
    (mapped / "/".join("d" * scripts.DEPTH_MAX)).mkdir(parents=True)
    with pytest.raises(WorldError, match="folders deep"):
        copy_source(mapped, tmp_path / "depth")
    for number in range(scripts.FILES_MAX):
        (mapped / "x" / str(number)).touch()
    with pytest.raises(WorldError, match="more than 10000 files"):
        copy_source(mapped / "x", tmp_path / "count")


# --- the real programs


@pytest.fixture
def up(mapped: Path, tmp_path: Path) -> Iterator[Cli]:
    """Start a cluster whose scripts come from the mapped folder."""
    cli = Cli(tmp_path / "cluster", tmp_path)
    cli.call("up", "--detach", "--nodes", "0", "--lifecycle-source", f"{ADDRESS}={mapped}")
    try:
        yield cli
    finally:
        cli.take_away()


def machine(name: str, source: str, file: str) -> dict[str, Any]:
    return {
        "apiVersion": "unbroken.dev/v1",
        "kind": "Machine",
        "metadata": {"name": name},
        "spec": {"lifeCycle": {"source": source, "onCreate": file}},
    }


@pytest.mark.slow
def test_nothing_outside_runs_and_honest_machines_do(up: Cli, tmp_path: Path) -> None:
    found = state.running(state.Paths(up.directory))
    assert found is not None
    for source, file in ((f"{ADDRESS}/../outside", "evil.sh"), (ADDRESS, "../outside/evil.sh")):
        paths = {"SourceS3Uri": source, "OnCreate": file}
        group = {"InstanceGroupName": "g", "InstanceType": "ml.c5.large", "InstanceCount": 1}
        groups = [{**group, "ExecutionRole": ROLE, "LifeCycleConfig": paths}]
        members = {"ClusterName": "evil", "InstanceGroups": groups}
        seen = captured(found.cluster_api, "CreateCluster", members, key=key_of(found))
        reply = send(found.cluster_api, seen)
        assert reply.code == "ValidationException"
        assert "must be the name of a folder or file" in reply.body["message"]

    # A user who may create Machines gets no further.
    bad = [(f"{ADDRESS}/{one}", "evil.sh") for one in BELOW if "\0" not in one]
    bad += [(ADDRESS, one) for one in FILES if one and "\0" not in one]
    bad.append((f"{ADDRESS}/out", "evil.sh"))
    objects = [machine(f"bad-{number}", *one) for number, one in enumerate(bad)]
    objects.append(machine("good", ADDRESS, "good.sh"))
    path = tmp_path / "machines.json"
    path.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}))
    kubectl(up, "apply", "-f", str(path))
    wait = ("wait", f"--timeout={PATIENCE_SECONDS:.0f}s")
    names = [f"machine/bad-{number}" for number in range(len(bad))]
    kubectl(up, *wait, *names, "--for=jsonpath={.status.phase}=Failed")
    kubectl(up, *wait, "machine/good", "--for=jsonpath={.status.lifeCycle}=Succeeded")
    assert not (tmp_path / "proof").exists()
    items = json.loads(kubectl(up, "get", "machines", "-o", "json"))["items"]
    said = [one["status"]["message"] for one in items if one["metadata"]["name"] != "good"]
    assert all("OnCreate" in one for one in said)


def kubectl(up: Cli, *arguments: str) -> str:
    """Run kubectl; return its output."""
    program = shutil.which("kubectl", path=Path(sys.executable).parent) or shutil.which("kubectl")
    assert program
    done = subprocess.run(
        [program, "--kubeconfig", str(up.directory / "kubeconfig"), *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
