"""The user's command as a provider: real scripts, and the processes that they leave behind."""

from __future__ import annotations

import asyncio
import json
import os
import select
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from tests.apiservers import Cluster
from unbroken.core.nodes.repair.events import Answer, OrderStatus, RepairOrder
from unbroken.errors import SpecError
from unbroken.kube.client import KubeClient, connect
from unbroken.operator import definitions
from unbroken.operator.nodes.providers import CommandProvider
from unbroken.operator.nodes.providers.command import PLAIN, parse_command
from unbroken.spec.nodes.kinds import NODE_RECORD, NodeRecordSpec
from unbroken.spec.nodes.values import Action

ORDER = RepairOrder("node-of-no-cluster", Action.REBOOT, "boot-1", "o-1")
Call = Callable[..., OrderStatus]


@pytest.fixture
def call(clusters: Callable[[str], Cluster], tmp_path: Path) -> Call:
    """Run a shell script as the command, in a folder of the test's own."""
    cluster = clusters("embedded")

    def run(
        script: str, *words: str, limit: float = 30.0, order: RepairOrder = ORDER
    ) -> OrderStatus:
        file = tmp_path / "repair.sh"
        file.write_text(f"#!/bin/sh\ncd {tmp_path}\n{script}\n")
        file.chmod(0o755)

        async def act(client: KubeClient) -> OrderStatus:
            return await CommandProvider(client, (str(file), *words), limit).status(order)

        return with_client(cluster, act)

    return run


def with_client(
    cluster: Cluster, act: Callable[[KubeClient], Coroutine[Any, Any, OrderStatus]]
) -> OrderStatus:
    """Call a function with a connection."""

    async def run() -> OrderStatus:
        async with connect(cluster.kubeconfig) as client:
            return await act(client)

    return asyncio.run(run())


def lives_on(pid: int) -> bool:
    """Return whether a process still exists after a while.

    The kernel closes the files of a killed process, for which the provider waits, some moments
    before the process counts as ended.
    """
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        ended, _, _ = select.select([handle], [], [], 30.0)
    finally:
        os.close(handle)
    return not ended


def test_command_is_told_what_to_do_in_words_and_environment(call: Call, tmp_path: Path) -> None:
    said = 'echo "$NODE $ACTION $BOOT_ID $ORDER_ID|$PROVIDER_ID|$*" > said'
    found = call(said, "--host={node}", "{action}")
    assert found == OrderStatus(Answer.DONE)
    told = (tmp_path / "said").read_text().strip()
    assert told == "node-of-no-cluster reboot boot-1 o-1||--host=node-of-no-cluster reboot"


def test_replacement_may_be_named(call: Call) -> None:
    found = call("echo working; echo replacement=node-9")
    assert found == OrderStatus(Answer.DONE, replacement="node-9")


def test_75_is_asked_again(call: Call) -> None:
    script = "n=$(cat n 2>/dev/null || echo 0); n=$((n+1)); echo $n > n; echo try $n; "
    script += '[ "$n" -ge 3 ] || exit 75'
    assert [call(script).answer for _ in range(3)] == [Answer.WORKING, Answer.WORKING, Answer.DONE]


@pytest.mark.parametrize(
    ("script", "text"),
    [
        ("echo first >&2; echo 'no route to BMC' >&2; exit 3", "no route to BMC"),
        ("exit 4", "ended with exit code 4"),
        ("kill -9 $$", "ended with exit code -9"),
    ],
)
def test_failure_is_told_with_the_last_line_of_the_errors(
    call: Call, script: str, text: str
) -> None:
    found = call(script)
    assert found.answer is Answer.FAILED
    assert text in found.text


def test_command_that_cannot_be_started_says_so(clusters: Callable[[str], Cluster]) -> None:
    async def act(client: KubeClient) -> OrderStatus:
        return await CommandProvider(client, ("/no/such/command",)).status(ORDER)

    found = with_client(clusters("embedded"), act)
    assert found.answer is Answer.FAILED
    assert found.text == "/no/such/command cannot be started: No such file or directory"


def test_command_that_hangs_is_killed_with_all_it_started(call: Call, tmp_path: Path) -> None:
    script = "setsid sh -c 'echo $$ > child; exec sleep 1000' & echo $$ > self; sleep 1000"
    found = call(script, limit=2.0)
    assert found.answer is Answer.FAILED
    assert "has not ended within 2 s and was killed" in found.text
    for name in ("self", "child"):
        assert not lives_on(int((tmp_path / name).read_text())), name


def test_what_a_command_leaves_behind_ends_with_it(call: Call, tmp_path: Path) -> None:
    # It holds the command's output open, too.
    script = "setsid sh -c 'echo $$ > child; exec sleep 1000' & "
    script += "while [ ! -s child ]; do :; done; exit 0"
    found = call(script)
    assert found.answer is Answer.DONE
    assert not lives_on(int((tmp_path / "child").read_text()))


def test_what_becomes_another_program_all_the_time_ends_with_it(call: Call, tmp_path: Path) -> None:
    # While it does, /proc shows no environment of it.
    (tmp_path / "again").write_text("exec sh again")
    script = "setsid sh -c 'echo $$ > child; exec sh again' & "
    script += "while [ ! -s child ]; do :; done; exit 0"
    for _ in range(30):
        assert call(script).answer is Answer.DONE
        assert not lives_on(int((tmp_path / "child").read_text()))
        (tmp_path / "child").unlink()


def test_output_without_end_is_not_kept(call: Call) -> None:
    found = call("head -c 30000000 /dev/zero | tr '\\0' x; echo; echo replacement=node-9")
    assert found == OrderStatus(Answer.DONE, replacement="node-9")


CODE = (
    *("1; touch owned", "$(touch owned)", "`touch owned`", "1\ntouch owned", "a && touch owned"),
    *("-rf", "--host=other", "a b", "'", "\0", "\ud800", "\xe4", "~root", "x" * 2000),
    *("aws:///a/../../etc", "a..b"),
)


@pytest.mark.parametrize("said", CODE)
def test_what_a_kubelet_says_is_no_code_and_no_option(
    clusters: Callable[[str], Cluster], tmp_path: Path, said: str
) -> None:
    """The attack: a node's boot is `$(...)`, and the command is `sh -c 'reboot {boot_id}'`."""
    words = ("sh", "-c", f"cd {tmp_path}; touch called; echo {{boot_id}}")
    order = RepairOrder("n", Action.REBOOT, said, "o-1")
    found = with_client(clusters("embedded"), lambda it: CommandProvider(it, words).status(order))
    assert found.answer is Answer.FAILED
    assert "boot_id of node n is" in found.text
    assert len(found.text) < 300
    assert list(tmp_path.iterdir()) == []


def test_the_provider_id_of_a_node_is_no_code(
    clusters: Callable[[str], Cluster], tmp_path: Path
) -> None:
    words = ("sh", "-c", f"cd {tmp_path}; touch called; echo {{provider_id}}")
    order = RepairOrder("false-node", Action.REBOOT, "boot-1", "o-1")

    async def act(client: KubeClient) -> OrderStatus:
        spec = {"providerID": "aws:///a/$(touch owned)"}
        body = {"metadata": {"name": order.node}, "spec": spec}
        made = json.loads(await client.raw("POST", "api/v1/nodes", body=body))
        record = NodeRecordSpec(node_uid=made["metadata"]["uid"], machine=spec["providerID"])
        await definitions.install(client)
        await client.create_if_absent(NODE_RECORD.path, NODE_RECORD.new(order.node, record))
        return await CommandProvider(client, words).status(order)

    found = with_client(clusters("embedded"), act)
    assert found.answer is Answer.FAILED
    assert "provider_id of node false-node is" in found.text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "said",
    ["aws:///us-west-2a/i-0123456789abcdef0", "gce://project/us-central1-a/gke-pool-1",
     "aws:///usw2-az1/sagemaker/cluster/hyperpod-abc-i-0123", "kind://docker/kind/kind-worker",
     "azure:///subscriptions/a-b/resourceGroups/rg/providers/Microsoft.Compute/x_1", "a_b", ""],
)  # fmt: skip
def test_ids_of_providers_are_passed_on(said: str) -> None:
    assert PLAIN.fullmatch(said)


@pytest.mark.parametrize("text", ["", "run {", "run {nodes}", "run {0}", "run 'x"])
def test_command_that_cannot_be_called_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match="--node-command"):
        parse_command(text)


def test_words_are_those_of_a_shell() -> None:
    assert parse_command("run --now 'a b' {node}") == ("run", "--now", "a b", "{node}")
