"""`unbroken check` names the node that is at fault, and no other, on clusters of real processes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.cli_calls import Cli, read_until
from tests.watching import PATIENCE_SECONDS, wait_until
from unbroken.kube.client import MERGE, connect
from unbroken.local import state

pytestmark = pytest.mark.slow

Object = dict[str, Any]
HEALTH = "sagemaker.amazonaws.com/node-health-status"
DEEP = "sagemaker.amazonaws.com/deep-health-check-status"
PODS = "api/v1/namespaces/unbroken-checks/pods"
CHECKS = "apis/unbroken.dev/v1/nodechecks"


@pytest.fixture(scope="module")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cli]:
    """Start two nodes without repairs, so that the results of a check stay on them."""
    folder = tmp_path_factory.mktemp("check")
    found = Cli(folder / "cluster", folder)
    found.call("up", "--detach", "--nodes", "2", "--node-recovery", "None")
    yield found
    found.take_away()


def api(cli: Cli, method: str, path: str, body: Object | None = None) -> Object:
    """Send one request; a PATCH is a merge."""

    async def ask() -> bytes:
        async with connect(cli.directory / "kubeconfig") as client:
            headers = MERGE if method == "PATCH" else None
            return await client.raw(method, path, body=body, headers=headers)

    found: Object = msgspec.json.decode(asyncio.run(ask()))
    return found


@contextmanager
def planted(cli: Cli, node: str, fault: str) -> Iterator[None]:
    """Put a fault on a node for the tests to find."""
    path, key = f"api/v1/nodes/{node}", "unbroken.dev/check-plant"
    api(cli, "PATCH", path, {"metadata": {"annotations": {key: fault}}})
    yield
    api(cli, "PATCH", path, {"metadata": {"annotations": {key: None}}})


def said(cli: Cli, node: str) -> tuple[str | None, str | None, bool]:
    """Return health, deep check, and whether the node takes pods."""
    found = api(cli, "GET", f"api/v1/nodes/{node}")
    labels = found["metadata"]["labels"]
    is_open = all(one["key"] != HEALTH for one in found["spec"].get("taints") or ())
    return labels.get(HEALTH), labels.get(DEEP), is_open


def pods_of(cli: Cli) -> list[Object]:
    """Return the pods of running checks."""
    items = api(cli, "GET", PODS)["items"]
    return [one for one in items if (one.get("status") or {}).get("phase") == "Running"]


def process_of(pod: str) -> int | None:
    """Return the process of a testing pod, by the name that it has for its host."""
    wanted = f"HOSTNAME={pod}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            has_name = wanted in (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if has_name and b"unbroken.nodes.checks" in words:
            return int(folder.name)
    return None


def test_nodes_that_are_well(cli: Cli) -> None:
    before = said(cli, "node-0")
    found = cli.json("check")
    assert (found["phase"], found["nodes"]) == ("Passed", ["node-0", "node-1"])
    assert {one["node"] for one in found["results"]} == {"node-0", "node-1"}
    assert found["done"] == found["total"] == 2
    assert "faulty" not in found
    # Nothing is written on nodes by tests of seconds.
    assert said(cli, "node-0") == before


def test_the_node_at_fault_is_named_and_marked_and_no_other(cli: Cli) -> None:
    with planted(cli, "node-1", "memory-flip:0x1234"):
        done = cli.call("check", "--kind", "InstanceStress", "--seconds", "0.1", code=1)
    rows = [line.split() for line in done.stdout.splitlines()]
    assert [row[:3] for row in rows if "fail" in row[2:3]] == [["node-1", "memory-pattern", "fail"]]
    assert "offset 0x1234" in done.stdout
    assert "Failed: at fault: node-1" in done.stderr
    assert said(cli, "node-0") == ("Schedulable", "Passed", True)
    assert said(cli, "node-1") == ("UnschedulablePendingReplacement", "Failed", False)
    events = api(cli, "GET", "api/v1/events")["items"]
    texts = [one["message"] for one in events if one["reason"] == "DeepHealthCheckFailed"]
    assert len(texts) == 1
    assert "memory-pattern: memory gave back other bytes" in texts[0]
    wait_until(lambda: not api(cli, "GET", PODS)["items"])
    logs = cli.directory / "logs"
    lines = (logs / "node-1" / "sagemaker-deep-health-check.log").read_text().splitlines()
    assert any("\tinfo\tcpu-arithmetic success" in line for line in lines)
    (fault,) = (msgspec.json.decode(line) for line in lines if line.startswith("{"))
    assert (fault["level"], fault["FaultyInstance"]) == ("error", "node-1")
    assert "Encountered FaultyInstance. Replace the Instance." in fault["msg"]
    assert len(list((logs / "DeepHealthCheckResults").iterdir())) == 1


def test_a_check_whose_pod_is_killed_blames_nobody(make_cli: Callable[..., Cli]) -> None:
    """Check that neither a killed pod nor the end of the checker blames a node.

    The next checker continues with the same pod.
    """
    cli = make_cli(1)
    with planted(cli, "node-0", "hang:cpu-arithmetic"):
        process = cli.start("check", "node-0", "--kind", "InstanceStress")
        read_until(process, lambda line: "node-0: InstanceStress" in line)
        (pod,) = wait_until(lambda: pods_of(cli))
        assert said(cli, "node-0") == ("Unschedulable", "InProgress", False)
        process.send_signal(signal.SIGINT)
        assert (
            "the check continues; see it with: kubectl"
            in process.communicate(timeout=PATIENCE_SECONDS)[0]
        )
        running = state.running(state.Paths(cli.directory))
        assert running is not None
        os.kill(running.pid, signal.SIGKILL)
        # On a busy machine it lives on for a moment, and `up` would find a cluster that runs.
        wait_until(lambda: state.running(state.Paths(cli.directory)) is None)
        cli.call("up", "--detach")
        (again,) = wait_until(lambda: pods_of(cli))
        assert again["metadata"]["uid"] == pod["metadata"]["uid"]
        os.kill(wait_until(lambda: process_of(pod["metadata"]["name"])), signal.SIGKILL)

        def ended() -> Object | None:
            (check,) = api(cli, "GET", CHECKS)["items"]
            status: Object = check["status"]
            return status if "endedAt" in status else None

        status = wait_until(ended)
    assert (status["phase"], status.get("faulty")) == ("Unknown", None)
    assert [one["outcome"] for one in status["results"]] == ["unknown"]
    assert "its pod ended with 137" in status["results"][0]["message"]
    assert said(cli, "node-0") == ("Schedulable", None, True)


def test_a_check_that_is_deleted_gives_its_node_back(cli: Cli) -> None:
    with planted(cli, "node-0", "hang:cpu-arithmetic"):
        before = said(cli, "node-0")
        check = cli.json("check", "node-0", "--kind", "instancestress", "--no-wait")
        (pod,) = wait_until(lambda: pods_of(cli))
        assert said(cli, "node-0")[:2] == ("Unschedulable", "InProgress")
        api(cli, "DELETE", f"{CHECKS}/{check['name']}")
        wait_until(lambda: said(cli, "node-0") == before)
        wait_until(lambda: pod["metadata"]["name"] not in str(api(cli, "GET", PODS)["items"]))


def test_a_node_that_trains_is_waited_for_or_tested_beside_it(cli: Cli) -> None:
    body = {
        "metadata": {"name": "training", "labels": {"HPJob": "lm"}},
        "spec": {
            "nodeName": "node-0",
            "terminationGracePeriodSeconds": 0,
            "containers": [{"name": "main", "image": "any", "command": ["sleep", "1000"]}],
        },
    }
    api(cli, "POST", "api/v1/namespaces/default/pods", body)
    try:
        assert cli.json("check", "node-0", "--force")["phase"] == "Passed"
        process = cli.start("check", "node-0")
        waits = "waiting for node-0: pod default/training runs there"
        read_until(process, lambda line: waits in line)
    finally:
        api(cli, "DELETE", "api/v1/namespaces/default/pods/training")
    assert "Passed: 1 node(s) without a fault" in process.communicate(timeout=PATIENCE_SECONDS)[0]
    assert process.returncode == 0


def test_mistakes_are_told_in_words(cli: Cli) -> None:
    for arguments, text in (
        (["node-7"], 'no node "node-7"; nodes: node-0, node-1'),
        (["--kind", "Deep"], "--kind Deep: must be one of Basic, InstanceStress"),
        (["--deep", "--kind", "Basic"], "give either --deep or --kind"),
    ):
        assert text in cli.call("check", *arguments, code=1).stderr


@pytest.mark.heavy
@pytest.mark.timeout(400)
def test_a_slow_link_and_silent_corruption_are_named_among_three_nodes(
    make_cli: Callable[..., Cli],
) -> None:
    pytest.importorskip("torch")
    cli = make_cli()
    cli.call("up", "--detach", "--nodes", "3", "--node-recovery", "None")
    with planted(cli, "node-1", "wrong-weights:30"):
        kind = ("--kind", "MultiNodeTrainingValidation")
        found = cli.json("check", *kind, "--seconds", "0.1", code=1)
    assert found["faulty"] == ["node-1"]
    (fault,) = (one for one in found["results"] if one["outcome"] == "fail")
    assert (fault["node"], fault["test"]) == ("node-1", "training-compared")
    assert ", expected loss 0x" in fault["message"]
    with planted(cli, "node-2", "slow-link:20"):
        arguments = ("--kind", "InstanceConnectivity", "--seconds", "0.5")
        found = cli.json("check", "node-0", "node-1", "node-2", *arguments, code=1)
    assert found["faulty"] == ["node-2"]
    (fault,) = (one for one in found["results"] if one["outcome"] == "fail")
    assert (fault["node"], fault["test"]) == ("node-2", "connectivity")
    assert fault["measured"] < fault["expected"]
    assert "with node-0: " in fault["message"]
    assert "with node-1: " in fault["message"]
