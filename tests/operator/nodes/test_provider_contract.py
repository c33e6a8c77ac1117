"""The contract of providers of machines, tested on each: each order once, and gone means gone.

Each provider has a ground of machines (`provider_grounds`). Karpenter and Cluster API have a real
API server with their definitions. EC2 has moto's server with boto3, and HyperPod has unbroken's own
cluster API with boto3. The others are a user's script, and the pool of a running local cluster.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.apiservers import embedded_cluster
from tests.cluster_api.api_program import Running, running_api
from tests.operator.nodes.provider_grounds import (
    ClusterApiGround,
    CommandGround,
    Ec2,
    Ec2Ground,
    Ground,
    HyperPodGround,
    KarpenterGround,
    LocalGround,
    aws_environment,
    local_cluster,
    running_ec2,
)
from tests.watching import PATIENCE_SECONDS
from unbroken.core.nodes.repair.events import Answer, OrderStatus, RepairOrder
from unbroken.errors import WorldError
from unbroken.kube.client import connect
from unbroken.kube.errors import Conflict
from unbroken.operator import definitions
from unbroken.spec.nodes.values import Action

pytestmark = pytest.mark.slow
REBOOT, REPLACE = Action.REBOOT, Action.REPLACE
Ask = Callable[[RepairOrder], Awaitable[OrderStatus]]
IS_OFF = (Answer.GONE, Answer.DONE)
"""Answers to a replacement which say that no process of the machine runs any more."""


@pytest.fixture(scope="module")
def ec2(aws_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ec2]:
    """Run moto's server for the tests of this file."""
    with running_ec2(aws_python, tmp_path_factory.mktemp("ec2")) as found:
        yield found


@pytest.fixture(scope="module")
def hyperpod(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Run the cluster API over its own API server, since it removes nodes that it did not make."""
    with (
        embedded_cluster(tmp_path_factory.mktemp("hyperpod")) as cluster,
        running_api(cluster) as found,
    ):
        yield found


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Provide the kubeconfig of a local cluster for the tests of this file."""
    with local_cluster(tmp_path_factory.mktemp("local")) as found:
        yield found.directory / "kubeconfig"


REAL = pytest.mark.realkube
KINDS = [
    pytest.param(("karpenter", "real"), marks=REAL, id="karpenter-real"),
    pytest.param(("karpenter", "embedded"), id="karpenter"),
    pytest.param(("cluster-api", "real"), marks=REAL, id="cluster-api-real"),
    pytest.param(("cluster-api", "embedded"), id="cluster-api"),
    pytest.param(("command", "embedded"), id="command"),
    pytest.param(("ec2", "embedded"), id="aws-ec2"),
    pytest.param(("hyperpod", ""), id="aws-hyperpod"),
    pytest.param(("local", ""), id="machines"),
]


@pytest.fixture(params=KINDS)
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Open the ground of each provider in turn."""
    kind, server = request.param
    load = request.getfixturevalue
    given = load({"ec2": "ec2", "hyperpod": "hyperpod", "local": "local"}.get(kind, "tmp_path"))
    if kind == "hyperpod":
        kubeconfig = given.cluster.kubeconfig
        for name, value in aws_environment(given.endpoint).items():
            load("monkeypatch").setenv(name, value)
    else:
        kubeconfig = given if kind == "local" else load("clusters")(server).kubeconfig

    @asynccontextmanager
    async def open_ground() -> AsyncIterator[Ground]:
        async with connect(kubeconfig) as client:
            await definitions.install(client)
            match kind:
                case "karpenter":
                    yield KarpenterGround(client)
                case "cluster-api":
                    yield ClusterApiGround(client)
                case "command":
                    yield CommandGround(client, given)
                case "ec2":
                    yield Ec2Ground(client, given)
                case "hyperpod":
                    yield HyperPodGround(client, load("aws_python"), given)
                case _:
                    yield LocalGround(client)

    return open_ground


async def order(ground: Ground, node: str, action: Action, identity: str = "1") -> RepairOrder:
    """Return an order about the boot that the node shows."""
    return RepairOrder(
        node, action, await ground.boot_of(node), f"{node}-{action.value}-{identity}"
    )


async def asked(ask: Ask, wanted: RepairOrder) -> OrderStatus:
    """Ask a provider, again while its object changes meanwhile, as the operator's queue does.

    And again after an equal call of the same second, which has the same signature.
    """
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            try:
                return await ask(wanted)
            except Conflict:
                continue
            except WorldError as error:
                if "Send it again" not in str(error):
                    raise


async def asked_often(ground: Ground, wanted: RepairOrder) -> None:
    """Give an order three times, by two providers without shared memory."""
    first = ground.provider()
    for ask in (first.order, first.status, ground.provider().order):
        answer = await asked(ask, wanted)
        # The execution continues meanwhile.
        assert answer.answer in (Answer.WORKING, *IS_OFF), answer


async def ended(ground: Ground, wanted: RepairOrder) -> OrderStatus:
    """Return the status of an executed order from another provider without memory."""
    return await asked(ground.provider().status, wanted)


async def test_reboot_is_made_once_for_an_order_however_often_it_is_asked(opened: Any) -> None:
    async with opened() as ground:
        if REBOOT not in ground.provider().supports:
            pytest.skip(f"the provider {ground.provider().name} replaces machines only")
        node, neighbour = await ground.add(), await ground.add()
        wanted = await order(ground, node, REBOOT)
        await asked_often(ground, wanted)
        assert await ground.asked(node, REBOOT) == 1
        await ground.carry_out(node, REBOOT)
        answer = await ended(ground, wanted)
        assert answer.answer is Answer.DONE, answer
        assert await ground.asked(node, REBOOT) == 1
        # Another order is another reboot.
        await asked(ground.provider().order, await order(ground, node, REBOOT, "2"))
        assert await ground.asked(node, REBOOT) == 2
        assert await ground.asked(node, REPLACE) == 0
        assert await ground.asked(neighbour, REBOOT) == 0
        assert await ground.asked(neighbour, REPLACE) == 0


async def test_machine_is_said_to_be_off_when_it_is_and_not_before(opened: Any) -> None:
    async with opened() as ground:
        node, neighbour = await ground.add(), await ground.add()
        wanted = await order(ground, node, REPLACE)
        await asked_often(ground, wanted)
        assert await ground.asked(node, REPLACE) == 1
        await ground.drop_node(node)
        if ground.machine_runs_on:
            # A deleted Node is no proof that its machine is off, whatever program deleted it.
            answer = await ended(ground, wanted)
            assert answer.answer is Answer.WORKING, answer
        await ground.carry_out(node, REPLACE)
        for _ in range(2):
            answer = await ended(ground, wanted)
            assert answer.answer in IS_OFF, answer
        assert await ground.asked(node, REPLACE) == 1
        assert await ground.asked(neighbour, REPLACE) == 0
        assert await ground.boot_of(neighbour), "its Node is still there"


async def test_node_that_nothing_is_behind_is_named_and_nothing_else_is_touched(
    opened: Any,
) -> None:
    async with opened() as ground:
        neighbour = await ground.add()
        stranger, named = await ground.add_stranger()
        for action in ground.provider().supports - {Action.RESET_GPU}:
            answer = await asked(ground.provider().order, await order(ground, stranger, action))
            assert answer.answer in (Answer.UNSUPPORTED, Answer.FAILED), answer
            assert named in answer.text
            assert await ground.asked(neighbour, action) == 0


async def test_order_about_a_boot_that_is_over_touches_nothing(opened: Any) -> None:
    async with opened() as ground:
        if ground.why_old_orders_pass:
            pytest.skip(ground.why_old_orders_pass)
        node = await ground.add()
        old = {action: await order(ground, node, action) for action in (REBOOT, REPLACE)}
        await ground.boot(node, "another boot")
        replaced = await asked(ground.provider().order, old[REPLACE])
        assert replaced.answer is Answer.FAILED
        assert "booted since" in replaced.text
        assert await ground.asked(node, REPLACE) == 0
        if REBOOT in ground.provider().supports:
            rebooted = await asked(ground.provider().order, old[REBOOT])
            assert rebooted.answer is Answer.DONE
            assert await ground.asked(node, REBOOT) == 0


async def test_provider_of_an_operator_that_does_not_lead_asks_for_nothing(opened: Any) -> None:
    async with opened() as ground:
        node = await ground.add()
        follower = ground.provider(ground.client.guarded(lambda: False))
        for action in ground.provider().supports - {Action.RESET_GPU}:
            wanted = await order(ground, node, action)
            with pytest.raises(WorldError, match="lead"):
                await follower.order(wanted)
            assert await ground.asked(node, action) == 0


async def test_api_server_that_does_not_answer_is_an_error_with_words(
    opened: Any, tmp_path: Path
) -> None:
    async with opened() as ground:
        node = await ground.add()
        wanted = await order(ground, node, REPLACE)
        absent = tmp_path / "kubeconfig"
        absent.write_text(NOBODY)
        async with connect(absent) as client:
            with pytest.raises(WorldError) as raised:
                await ground.provider(client).order(wanted)
        assert raised.value.retry_after_seconds is not None
        assert str(raised.value)
        assert await ground.asked(node, REPLACE) == 0


NOBODY = """
apiVersion: v1
kind: Config
current-context: a
contexts: [{name: a, context: {cluster: a, user: a}}]
users: [{name: a, user: {}}]
clusters: [{name: a, cluster: {server: "http://127.0.0.1:1"}}]
"""
