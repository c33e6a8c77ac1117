"""What people get wrong: one clear message each, and no cluster is started for it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli_calls import Cli, manifest
from unbroken.cli.main import app

KUBECONFIG = """
apiVersion: v1
kind: Config
current-context: far
contexts: [{name: far, context: {cluster: far, user: far, namespace: team}}]
clusters: [{name: far, cluster: {server: "http://127.0.0.1:1"}}]
users: [{name: far, user: {}}]
"""
BAD = manifest("bad", "true", replicas=0, jobMaxRetryCount=-1)
TWO = "\n---\n".join(map(json.dumps, (manifest("a", "true"), manifest("b", "true"))))


@pytest.fixture
def here(tmp_path: Path) -> Cli:
    """A directory without a cluster."""
    found = Cli(tmp_path / "none", tmp_path)
    found.script("train.py", "")
    (tmp_path / "job.json").write_text(json.dumps(manifest("job", "true")))
    (tmp_path / "bad.json").write_text(json.dumps(BAD))
    (tmp_path / "two.yaml").write_text(TWO)
    (tmp_path / "broken.yaml").write_text("a: [")
    (tmp_path / "list.yaml").write_text("- 1")
    return found


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run"], "Missing argument"),
        (["run", "--bogus", "train.py"], "No such option: --bogus"),
        (["run", "nosuch.py"], "no such script: nosuch.py (in "),
        (["run", "--no-python", "nosuchprogram"], "no such program: nosuchprogram"),
        (["run", "--nnodes", "0", "train.py"], "--nnodes"),
        (["run", "--nnodes", "1:4", "train.py"], "--nnodes"),
        (["run", "--nproc-per-node", "some", "train.py"], "spec.nprocPerNode"),
        (["run", "--shutdown-signal", "SIGHUP", "train.py"], "shutdown-signal"),
        (["run", "nosuch.yaml"], "cannot read nosuch.yaml"),
        (["run", "broken.yaml"], "broken.yaml is not YAML"),
        (["run", "list.yaml"], "every document must be an object with a kind"),
        (["run", "two.yaml"], "two.yaml holds 2 objects of kind HyperPodPyTorchJob"),
        (["run", "--nnodes", "2", "job.json"], "sizes and arguments are in the manifest"),
        (["run", "job.json", "--lr"], "sizes and arguments are in the manifest"),
        (["run", "bad.json"], "spec.runPolicy.jobMaxRetryCount"),
        (["run", "--name", "No Name", "train.py"], "metadata.name"),
        (["run", "--context", "far", "train.py"], "--dir and --context name two clusters"),
        (["jobs"], "no cluster runs from "),
        (["explain"], "Missing argument 'JOB'"),
        (["stacks"], "Missing argument 'JOB'"),
        (["stacks", "job", "--seconds", "0"], "--seconds"),
        (["explain", "job", "--incident", "0"], "--incident"),
        (["logs", "job", "--rank", "-1"], "--rank"),
        (["chaos", "kill-worker", "job"], "start one with: unbroken up"),
    ],
)
def test_wrong_arguments_get_one_clear_message(here: Cli, arguments: list[str], said: str) -> None:
    done = here.call(*arguments, code=None)
    assert done.returncode in (1, 2)
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not here.directory.exists()


def test_all_problems_of_a_manifest_are_told_at_once(here: Cli) -> None:
    problems = here.call("run", "bad.json", code=1).stderr
    assert "spec.runPolicy.jobMaxRetryCount: Invalid value: -1" in problems
    assert "spec.replicaSpecs" in problems


def test_other_clusters_are_spared_drills_and_scripts(here: Cli) -> None:
    (here.folder / "kubeconfig").write_text(KUBECONFIG)
    environment = {**here.environment, "KUBECONFIG": str(here.folder / "kubeconfig")}
    del environment["UNBROKEN_DIR"]
    for drill in ("kill-worker", "freeze-worker", "kill-agent", "kill-node"):
        done = here.call("chaos", drill, "job", code=1, environment=environment)
        assert "this drill is for an embedded cluster" in done.stderr
        assert "unbroken chaos kill-pod JOB --pod POD" in done.stderr
    done = here.call("run", "train.py", code=1, environment=environment)
    assert "a script runs on this machine, and this cluster is elsewhere" in done.stderr
    # What any cluster can do is tried on this one, which does not answer.
    for command in (["jobs"], ["chaos", "kill-pod", "job", "--pod", "x"], ["run", "job.json"]):
        done = here.call(*command, code=1, environment=environment)
        assert "127.0.0.1:1" in done.stderr


def test_a_context_that_is_not_there_is_named(here: Cli) -> None:
    (here.folder / "kubeconfig").write_text(KUBECONFIG)
    environment = {**here.environment, "KUBECONFIG": str(here.folder / "kubeconfig")}
    del environment["UNBROKEN_DIR"]
    done = here.call("jobs", "--context", "near", code=1, environment=environment)
    assert "Context 'near' not found" in done.stderr


def loaded(*arguments: str) -> set[str]:
    """Modules that a command has imported by its end."""
    code = f"""
import atexit, sys
from unbroken.cli import main
atexit.register(lambda: print(*sys.modules, file=sys.stderr))
main.app({list(arguments)!r})"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stderr.split())


def test_help_loads_neither_client_nor_cluster() -> None:
    modules = loaded("--help")
    assert {"unbroken.cli.chaos", "unbroken.cli.describe"} <= modules
    heavy = {"lightkube", "aiohttp", "yaml", "unbroken.embedded.up", "unbroken.controller"}
    assert not heavy & modules


def test_a_command_loads_no_other() -> None:
    modules = loaded("down", "--help")
    assert "unbroken.cli.down" in modules
    assert not {"unbroken.cli.chaos", "unbroken.cli.describe", "unbroken.cli.run"} & modules


def test_every_job_command_offers_json_and_a_cluster() -> None:
    every = ["run", "jobs", "describe", "logs", "explain", "stacks", "restart", "suspend", "resume"]
    every.append("delete")
    drills = ["kill-worker", "freeze-worker", "kill-agent", "kill-pod", "kill-node"]
    for command in (*([one] for one in every), *(["chaos", one] for one in drills)):
        done = CliRunner().invoke(app, [*command, "--help"])
        for option in ("--output", "--dir", "--context", "--namespace"):
            assert option in done.stdout, f"{command} has no {option}"
