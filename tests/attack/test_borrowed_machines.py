"""The attack: a node that is taken over names another machine of the account as its own.

A kubelet may set the provider ID of its Node where there was none, and any when it joins.  The
providers `aws` and `command` repaired whatever machine the node named at that moment: they rebooted
or replaced a machine that is no node, or another node's.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.apiservers import Cluster
from tests.operator.nodes.provider_grounds import BOOT, NUMBERS, CommandGround, fresh
from unbroken.core.nodes.repair.events import (
    Answer,
    OrderStatus,
    RecordRepairEvent,
    RecordSeen,
    RepairEffect,
    RepairNode,
    RepairNodeSeen,
    RepairOrder,
    RepairSettings,
    RepairSynced,
    WriteRecord,
)
from unbroken.core.nodes.repair.machine import Repairer
from unbroken.errors import WorldError
from unbroken.kube.client import connect
from unbroken.operator import definitions
from unbroken.operator.nodes.providers import AwsProvider
from unbroken.operator.nodes.repair import options_of
from unbroken.spec.nodes.kinds import NODE_RECORD, NodeRecordSpec
from unbroken.spec.nodes.values import Action

OWN, OTHER = "aws:///us-west-2a/i-0abc1234", "aws:///us-west-2a/i-0def5678"
SETTINGS = RepairSettings(notes_machines=True)
NODE = RepairNode("n", is_ready=True, ready_at=0.0, uid="u", machine=OWN)


def machines(effects: list[RepairEffect]) -> list[str]:
    """The machines of the records that are written."""
    return [one.record.machine for one in effects if isinstance(one, WriteRecord)]


def warnings(effects: list[RepairEffect]) -> list[str]:
    """The reasons of the events that are recorded."""
    return [one.reason for one in effects if isinstance(one, RecordRepairEvent)]


@pytest.mark.parametrize("first", ["", OWN])
def test_the_machine_of_a_node_is_the_one_that_it_joined_with(first: str) -> None:
    repairer = Repairer(SETTINGS)
    joining = replace(NODE, machine=first)
    early = replace(joining, machine="", has_joined=False)
    assert repairer.step(RepairNodeSeen(early), 1.0) == []
    assert machines(repairer.step(RepairSynced(), 1.0)) == []
    assert machines(repairer.step(RepairNodeSeen(joining), 1.0)) == [first]
    lying = repairer.step(RepairNodeSeen(replace(NODE, machine=OTHER)), 2.0)
    assert (machines(lying), warnings(lying)) == ([], ["MachineChanged"])
    # A new operator knows it from the record; a new Node of the name is another.
    later = Repairer(SETTINGS)
    later.step(RecordSeen("n", repairer.record("n")), 3.0)
    later.step(RepairNodeSeen(replace(NODE, machine=OTHER)), 3.0)
    assert warnings(later.step(RepairSynced(), 3.0)) == ["MachineChanged"]
    joined = later.step(RepairNodeSeen(replace(NODE, uid="v", machine=OTHER)), 4.0)
    assert (machines(joined), warnings(joined)) == ([OTHER], [])


@pytest.mark.parametrize(("provider", "notes"), [("aws", True), ("command", True), ("none", False)])
def test_machines_are_noted_where_a_provider_finds_them_by_their_ids(
    provider: str, notes: bool
) -> None:
    command = "true" if provider == "command" else ""
    assert options_of("Automatic", provider, command, 0.2, False).settings.notes_machines is notes


@asynccontextmanager
async def ground(cluster: Cluster, folder: Path) -> AsyncIterator[CommandGround]:
    """The nodes of the embedded API server, and a command that repairs them."""
    async with connect(cluster.kubeconfig) as client:
        await definitions.install(client)
        yield CommandGround(client, folder)


def named(zone: str) -> str:
    """The provider ID of an instance that no other test has."""
    return f"aws:///{zone}/i-{next(NUMBERS):08x}"


Ask = Callable[[RepairOrder], Awaitable[OrderStatus]]


def asks(found: CommandGround) -> list[Ask]:
    """All questions to both providers that find machines by IDs."""
    command, aws = found.provider(), AwsProvider(found.client, "/no/python")
    return [command.order, command.status, aws.order, aws.status]


def order(node: str, action: Action = Action.REBOOT) -> RepairOrder:
    """An order about the boot that the node shows."""
    return RepairOrder(node, action, BOOT, f"{node}-{action.value}")


@pytest.mark.slow
async def test_a_node_that_names_another_machine_than_before_is_not_repaired(
    clusters: Callable[[str], Cluster], tmp_path: Path
) -> None:
    async with ground(clusters("embedded"), tmp_path) as found:
        name = await found.add()
        await found.make_record(name)
        machine = named("us-west-2a")
        await found.plain.merge(f"api/v1/nodes/{name}", {"spec": {"providerID": machine}})
        for ask in asks(found):
            answer = await ask(order(name))
            assert answer.answer is Answer.UNSUPPORTED
            assert f"joined as machine '' and now says that it is '{machine}'" in answer.text
        assert await found.asked(name, Action.REBOOT) == 0


@pytest.mark.slow
async def test_a_machine_that_is_not_noted_yet_is_not_repaired(
    clusters: Callable[[str], Cluster], tmp_path: Path
) -> None:
    async with ground(clusters("embedded"), tmp_path) as found:
        name = fresh("unnoted")
        await found.make_node(name, providerID=named("us-west-2a"))
        (tmp_path / f"machine-{name}").touch()
        await found.client.create_if_absent(
            NODE_RECORD.path, NODE_RECORD.new(name, NodeRecordSpec())
        )
        for ask in asks(found):
            with pytest.raises(WorldError, match="is not noted yet"):
                await ask(order(name))
        assert await found.asked(name, Action.REBOOT) == 0


@pytest.mark.slow
@pytest.mark.parametrize("place", ["us-west-2a", "elsewhere"])
async def test_of_two_nodes_that_name_one_machine_none_is_repaired(
    clusters: Callable[[str], Cluster], tmp_path: Path, place: str
) -> None:
    async with ground(clusters("embedded"), tmp_path) as found:
        names = [fresh("twin"), fresh("twin")]
        machine = named("us-west-2a")
        instance = machine.rpartition("/")[2]
        for name, said in zip(names, (machine, f"aws:///{place}/{instance}"), strict=True):
            await found.make_node(name, providerID=said)
            await found.make_record(name)
            (tmp_path / f"machine-{name}").touch()
        for name in names:
            for ask in (found.provider().order, AwsProvider(found.client, "/no/python").order):
                answer = await ask(order(name))
                assert answer.answer is Answer.UNSUPPORTED
                assert f"both say that they are {instance}" in answer.text
            assert await found.asked(name, Action.REBOOT) == 0
