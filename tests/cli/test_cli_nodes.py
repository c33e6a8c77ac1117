"""`unbroken nodes` on a real local cluster: nodes rebooted and replaced under running jobs."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from tests.cli_calls import Cli, manifest
from tests.watching import wait_until

pytestmark = pytest.mark.slow


def kubectl(cli: Cli, *words: str, stdin: str | None = None) -> str:
    """Return the output of kubectl for the cluster."""
    program = shutil.which("kubectl")
    if program is None:
        pytest.skip("no kubectl on the PATH")
    called = [program, "--kubeconfig", str(cli.directory / "kubeconfig"), *words]
    done = subprocess.run(called, input=stdin, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def node_names(cli: Cli) -> list[str]:
    """Return the names of all nodes."""
    return sorted(one["name"] for one in cli.json("nodes")["nodes"])


def described(cli: Cli, name: str) -> Any:
    """Return the description of a node."""
    return cli.json("nodes", "describe", name)


def test_nodes_are_listed_and_described(cli: Cli) -> None:
    listed = cli.call("nodes").stdout.splitlines()
    assert listed[0].split()[:4] == ["NAME", "STATUS", "HEALTH", "TYPE"]
    assert [line.split()[:3] for line in listed[1:]] == [
        ["node-0", "Ready", "Schedulable"],
        ["node-1", "Ready", "Schedulable"],
    ]
    assert "MESSAGE" in cli.call("nodes", "list", "-o", "wide").stdout
    row = cli.json("nodes", "list")["nodes"][0]
    assert (row["ready"], row["repair"], row["score"], row["quarantined"]) == (True, None, 0, None)
    story = cli.call("nodes", "describe", "node-0").stdout
    assert "node-0: Ready" in story
    assert "0.0 points in 0 entries" in story


@pytest.mark.parametrize("words", [["describe"], ["reboot"], ["replace", "--yes"], ["blame"]])
def test_node_that_is_not_there_is_said_so(cli: Cli, words: list[str]) -> None:
    done = cli.call("nodes", words[0], "nope", *words[1:], code=1)
    assert done.stderr == 'error: no node "nope"; see: unbroken nodes\n'


def test_nothing_is_destroyed_unasked(cli: Cli) -> None:
    done = cli.call("nodes", "replace", "node-0", code=1)
    assert "confirm with --yes" in done.stderr
    assert cli.call("nodes", "clear", "node-0", "--why", " ", code=1).stderr.startswith("error:")
    assert node_names(cli) == ["node-0", "node-1"]


def test_node_is_rebooted_and_its_progress_told(cli: Cli) -> None:
    before = described(cli, "node-0")["bootId"]
    done = cli.call("nodes", "reboot", "node-0", "--wait")
    assert done.stdout == "node-0: reboot Done: repaired, and its check passed\n"
    assert "node-0: is being tested\n" in done.stderr
    after = described(cli, "node-0")
    assert after["bootId"] != before
    assert after["verified"] == after["bootId"]
    assert (after["health"], after["schedulable"]) == ("Schedulable", True)
    assert [one["askedBy"] for one in after["record"]["history"]] == ["annotation"]
    assert (
        "has no blame entries" in cli.call("nodes", "clear", "node-1", "--why", "x", code=1).stderr
    )


def test_faulty_node_is_replaced_while_its_job_goes_on(make_cli: Callable[..., Cli]) -> None:
    cli = make_cli(nodes=2)
    wait = "import time, pathlib\nwhile not pathlib.Path('end').exists(): time.sleep(0.1)\n"
    script = cli.folder / cli.script("wait.py", wait)
    job = manifest("lm", "python3", str(script), replicas=1)
    job["spec"]["replicaSpecs"][0]["template"]["spec"]["containers"][0]["workingDir"] = str(
        cli.folder
    )
    kubectl(cli, "apply", "-f", "-", stdin=json.dumps(job))
    rows = wait_until(
        lambda: cli.json("nodes")["nodes"], lambda rows: any(row["jobPods"] for row in rows)
    )
    name = next(row["name"] for row in rows if row["jobPods"])
    other = next(row["name"] for row in rows if not row["jobPods"])
    wait_until(lambda: cli.json("jobs")["jobs"], lambda jobs: jobs[0]["state"] == "Running")
    log = cli.directory / "nodes" / name / "kernel.log"
    with log.open("a") as file:
        file.write("NVRM: Xid (PCI:0000:01:00): 79, pid=1, GPU has fallen off the bus.\n")
    names = wait_until(lambda: node_names(cli), lambda names: name not in names and len(names) == 2)
    new = next(one for one in names if one != other)
    assert new.startswith(f"{name}-")
    wait_until(lambda: described(cli, new), lambda row: row["schedulable"] and row["ready"])
    (cli.folder / "end").touch()
    wait_until(lambda: cli.json("jobs")["jobs"], lambda jobs: jobs[0]["state"] == "Completed")
    wait_until(
        lambda: cli.call("nodes", "describe", name, code=1).stderr,
        lambda said: f"{name} was replaced by {new}" in said,
    )
    ledger = cli.json("nodes", "blame", name)
    assert ledger["blame"][0]["kind"] == "fault"
    assert ledger["score"] >= 4
