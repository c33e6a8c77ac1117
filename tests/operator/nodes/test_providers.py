"""Providers that act through objects of the API: once for each order, and gone means gone."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from tests.apiservers import Cluster
from tests.operator.nodes.provider_grounds import BOOT, CAPI_MACHINES, ClusterApiGround
from tests.operator.plain import PlainRequests
from unbroken.core.nodes.repair.events import Answer, RepairOrder
from unbroken.kube.client import KubeClient, connect
from unbroken.operator import definitions
from unbroken.operator.nodes.providers import (
    ClusterApiProvider,
    MachinesProvider,
    NoProvider,
)
from unbroken.spec.keys import HEALTH, REPAIR_ORDER
from unbroken.spec.nodes.kinds import MACHINE, MachineSpec, MachineTaint
from unbroken.spec.nodes.values import Action

NUMBERS = itertools.count(1)
FINALIZER = "example.com/instance"


class Api(PlainRequests):
    """Plain requests, and a node of the test's own."""

    def __init__(self, client: KubeClient) -> None:
        super().__init__(client)
        self.node = f"repaired-{next(NUMBERS)}"

    async def clean_up(self) -> None:
        """Leave nothing to the tests that share the server."""
        nodes = [f"api/v1/nodes/{self.node}"]
        for collection in (CAPI_MACHINES, MACHINE.path):
            for one in (await self.get(collection) or {}).get("items") or ():
                path = f"{collection}/{one['metadata']['name']}"
                await self.merge(path, {"metadata": {"finalizers": None}})
                nodes.append(path)
        for path in nodes:
            if await self.get(path) is not None:
                await self.client.raw("DELETE", path)

    async def make_node(self, boot_id: str = "boot-1") -> None:
        """A Node as its kubelet shows it."""
        await self.call("POST", "api/v1/nodes", body={"metadata": {"name": self.node}})
        await self.boot(boot_id)

    async def boot(self, boot_id: str) -> None:
        """The node has booted."""
        keys = ("machineID", "systemUUID", "kernelVersion", "osImage", "containerRuntimeVersion")
        more = ("kubeletVersion", "kubeProxyVersion", "operatingSystem", "architecture")
        info = {**dict.fromkeys((*keys, *more), ""), "bootID": boot_id}
        await self.merge(f"api/v1/nodes/{self.node}/status", {"status": {"nodeInfo": info}})


@pytest.fixture
def opened(cluster: Cluster) -> Any:
    """Opens the API with a node of its own."""

    @asynccontextmanager
    async def api() -> AsyncIterator[Api]:
        async with connect(cluster.kubeconfig) as client:
            found = Api(client)
            await found.make_node()
            try:
                yield found
            finally:
                await found.clean_up()

    return api


def order(api: Api, action: Action, identity: str = "o-1", boot_id: str = "boot-1") -> RepairOrder:
    """An order about the node."""
    return RepairOrder(api.node, action, boot_id, f"{api.node}-{identity}")


async def test_machine_that_none_would_follow_is_not_deleted(opened: Any) -> None:
    async with opened() as api:
        ground = ClusterApiGround(api.client)
        node = await ground.add(is_owned=False)
        wanted = RepairOrder(node, Action.REPLACE, BOOT, "o-1")
        answer = await ground.provider().order(wanted)
        assert answer.answer is Answer.UNSUPPORTED
        assert f"machine-{node} belongs to no MachineSet" in answer.text
        assert await ground.asked(node, Action.REPLACE) == 0
        # It can be rebooted all the same.
        wanted = RepairOrder(node, Action.REBOOT, BOOT, "o-2")
        assert (await ground.provider().order(wanted)).answer is Answer.WORKING


async def test_cluster_without_the_kind_is_said_so(opened: Any, cluster: Cluster) -> None:
    async with opened() as api:
        if await api.get("apis/cluster.x-k8s.io") is None:
            answer = await ClusterApiProvider(api.client).order(order(api, Action.REPLACE))
            assert answer.answer is Answer.UNSUPPORTED
            assert "serves no Machine" in answer.text
        answer = await NoProvider().order(order(api, Action.REBOOT))
        assert answer.answer is Answer.UNSUPPORTED


async def machine(api: Api, spec: MachineSpec) -> str:
    """Our own Machine behind the node; its path."""
    await definitions.install(api.client)
    body = MACHINE.new(api.node, spec, {"finalizers": [FINALIZER], "labels": {"a": "b"}})
    await api.call("POST", MACHINE.path, body=body)
    return f"{MACHINE.path}/{api.node}"


@pytest.mark.parametrize(
    ("action", "key"), [(Action.REBOOT, "boots"), (Action.RESET_GPU, "resets")]
)
async def test_machine_is_rebooted_once_for_an_order(opened: Any, action: Action, key: str) -> None:
    async with opened() as api:
        path = await machine(api, MachineSpec())
        provider = MachinesProvider(api.client)
        wanted = order(api, action)
        for _ in range(3):
            assert (await provider.order(wanted)).answer is Answer.WORKING
        assert (await MachinesProvider(api.client).order(wanted)).answer is Answer.WORKING
        found = await api.get(path)
        assert found is not None
        assert found["spec"][key] == 1
        await api.merge(f"{path}/status", {"status": {key: 1, "phase": "Running"}})
        assert (await provider.status(wanted)).answer is Answer.DONE
        assert (await provider.order(order(api, action, "o-2"))).answer is Answer.WORKING
        found = await api.get(path)
        assert found is not None
        assert found["spec"][key] == 2


async def test_machine_that_fails_says_why(opened: Any) -> None:
    async with opened() as api:
        path = await machine(api, MachineSpec())
        provider = MachinesProvider(api.client)
        await provider.order(order(api, Action.REBOOT))
        status = {"phase": "Failed", "message": "its script ended with 3"}
        await api.merge(f"{path}/status", {"status": status})
        answer = await provider.status(order(api, Action.REBOOT))
        assert (answer.answer, answer.text) == (Answer.FAILED, "its script ended with 3")


async def test_machine_is_replaced_by_one_for_the_same_place(opened: Any) -> None:
    async with opened() as api:
        path = await machine(api, MachineSpec(instance_type="ml.t3.medium", boots=3))
        provider = MachinesProvider(api.client)
        wanted = order(api, Action.REPLACE)
        for _ in range(2):
            assert (await provider.order(wanted)).answer is Answer.WORKING
        assert (await MachinesProvider(api.client).order(wanted)).answer is Answer.WORKING
        old = await api.get(path)
        assert old is not None
        assert old["metadata"]["deletionTimestamp"]
        assert old["metadata"]["annotations"][REPAIR_ORDER] == wanted.id
        listed = (await api.call("GET", MACHINE.path))["items"]
        new = [one for one in listed if one["metadata"]["name"].startswith(f"{api.node}-")]
        assert len(new) == 1
        assert new[0]["spec"]["instanceType"] == "ml.t3.medium"
        assert new[0]["spec"]["logicalId"] == api.node
        assert not new[0]["spec"].get("boots")
        assert new[0]["metadata"]["labels"] == {"a": "b"}
        await api.merge(path, {"metadata": {"finalizers": None}})
        done = await provider.status(wanted)
        assert (done.answer, done.replacement) == (Answer.DONE, new[0]["metadata"]["name"])


async def test_machine_that_is_to_be_tested_first_joins_with_the_taint(opened: Any) -> None:
    async with opened() as api:
        given = (MachineTaint("team", "NoExecute", "a"), MachineTaint(HEALTH, "NoSchedule", "x"))
        await machine(api, MachineSpec(labels={"team": "a"}, taints=given))
        provider = MachinesProvider(api.client)
        answer = await provider.order(replace(order(api, Action.REPLACE), is_tested=True))
        assert answer.answer is Answer.WORKING
        new = await api.call("GET", f"{MACHINE.path}/{answer.replacement}")
        spec, problems = MACHINE.spec_of(new)
        assert not problems
        assert spec.labels == {"team": "a", HEALTH: "Unschedulable"}
        assert spec.taints == (given[0], MachineTaint(HEALTH, "NoSchedule", "Unschedulable"))


async def test_machine_of_a_cluster_gets_a_name_as_sagemaker_gives_it(opened: Any) -> None:
    async with opened() as api:
        await machine(api, MachineSpec(cluster="c", logical_id="i-1"))
        await MachinesProvider(api.client).order(order(api, Action.REPLACE))
        names = [one["metadata"]["name"] for one in (await api.call("GET", MACHINE.path))["items"]]
        made = [name for name in names if name.startswith("hyperpod-i-")]
        assert len(made[-1]) == len("hyperpod-i-") + 17


async def test_node_without_a_machine_is_left_to_a_person(opened: Any) -> None:
    async with opened() as api:
        await definitions.install(api.client)
        provider = MachinesProvider(api.client)
        for action in (Action.REBOOT, Action.REPLACE):
            answer = await provider.order(order(api, action))
            assert answer.answer is Answer.UNSUPPORTED
            assert "no Machine is behind" in answer.text
