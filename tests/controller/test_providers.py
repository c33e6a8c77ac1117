"""Providers that act through objects of the API: once for each order, and gone means gone."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from apiservers import Cluster
from controller.plain import Object, PlainRequests
from unbroken.core.nodes.repair.events import Answer, RepairOrder
from unbroken.kube.client import KubeClient, connect
from unbroken.kube.clock import pause
from unbroken.operator import definitions
from unbroken.operator.nodes.providers import (
    ClusterApiProvider,
    KarpenterProvider,
    MachinesProvider,
    NoProvider,
    Provider,
)
from unbroken.operator.nodes.providers.cluster_api import REMEDIATE
from unbroken.spec.keys import HEALTH, REPAIR_ORDER
from unbroken.spec.nodes.kinds import MACHINE
from unbroken.spec.nodes.machine import MachineSpec, MachineTaint
from unbroken.spec.nodes.values import Action

CRDS = "apis/apiextensions.k8s.io/v1/customresourcedefinitions"
NUMBERS = itertools.count(1)
CLAIMS = "apis/karpenter.sh/v1/nodeclaims"
MACHINES = "apis/cluster.x-k8s.io/v1beta1/namespaces/default/machines"
FINALIZER = "example.com/instance"


class Api(PlainRequests):
    """Plain requests, and a node of the test's own."""

    def __init__(self, client: KubeClient) -> None:
        super().__init__(client)
        self.node = f"repaired-{next(NUMBERS)}"

    async def clean_up(self) -> None:
        """Leave nothing to the tests that share the server."""
        nodes = [f"api/v1/nodes/{self.node}"]
        for collection in (CLAIMS, MACHINES, MACHINE.path):
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

    async def define(self, group: str, kind: str, version: str, scope: str) -> None:
        """The part of somebody else's kind that we use."""
        plural = f"{kind.lower()}s"
        open_object = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
        body = {
            "apiVersion": "apiextensions.k8s.io/v1",
            "kind": "CustomResourceDefinition",
            "metadata": {
                "name": f"{plural}.{group}",
                # The group is Kubernetes' own, which wants an approval named.
                "annotations": {"api-approved.kubernetes.io": "unapproved, for tests"},
            },
            "spec": {
                "group": group,
                "scope": scope,
                "names": {"plural": plural, "singular": kind.lower(), "kind": kind},
                "versions": [
                    {
                        "name": version,
                        "served": True,
                        "storage": True,
                        "schema": {"openAPIV3Schema": open_object},
                    }
                ],
            },
        }
        if await self.get(f"{CRDS}/{plural}.{group}") is None:
            await self.call("POST", CRDS, body=body)
        while await self.get(f"apis/{group}/{version}/{plural}") is None:
            await pause(0.05)


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


async def make(api: Api, path: str, kind: str, status: Object) -> str:
    """The object behind the node, with a finalizer; its path."""
    group_version = path.removeprefix("apis/").split("/namespaces")[0].rpartition("/")[0]
    if "namespaces" in path:
        group_version = path.removeprefix("apis/").split("/namespaces")[0]
    body = {
        "apiVersion": group_version,
        "kind": kind,
        "metadata": {"name": f"behind-{api.node}", "finalizers": [FINALIZER]},
        "spec": {},
        "status": status,
    }
    await api.call("POST", path, body=body)
    return f"{path}/behind-{api.node}"


async def opened_behind(api: Api, what: str) -> tuple[Provider, str]:
    """A provider, and the path of the object behind the node."""
    if what == "karpenter":
        await api.define("karpenter.sh", "NodeClaim", "v1", "Cluster")
        behind = await make(api, CLAIMS, "NodeClaim", {"nodeName": api.node})
        return KarpenterProvider(api.client), behind
    await api.define("cluster.x-k8s.io", "Machine", "v1beta1", "Namespaced")
    behind = await make(api, MACHINES, "Machine", {"nodeRef": {"name": api.node}})
    return ClusterApiProvider(api.client), behind


@pytest.mark.parametrize("what", ["karpenter", "cluster-api"])
async def test_node_counts_as_gone_when_its_finalizer_has_gone(opened: Any, what: str) -> None:
    async with opened() as api:
        provider, behind = await opened_behind(api, what)
        assert provider.name == what
        wanted = order(api, Action.REPLACE)
        assert (await provider.order(wanted)).answer is Answer.WORKING
        found = await api.get(behind)
        assert found is not None
        assert found["metadata"]["deletionTimestamp"]
        # Its Node goes first, as Cluster API and Karpenter delete it; that is no proof.
        await api.call("DELETE", f"api/v1/nodes/{api.node}")
        assert (await provider.standing(wanted)).answer is Answer.WORKING
        await api.merge(behind, {"metadata": {"finalizers": None}})
        assert (await provider.standing(wanted)).answer is Answer.GONE
        # Another process knows no more, and comes to the same.
        assert (await type(provider)(api.client).order(wanted)).answer is Answer.GONE  # type: ignore[call-arg]


@pytest.mark.parametrize("what", ["karpenter", "cluster-api"])
async def test_order_about_a_boot_that_is_over_deletes_nothing(opened: Any, what: str) -> None:
    async with opened() as api:
        provider, behind = await opened_behind(api, what)
        await api.boot("boot-2")
        answer = await provider.order(order(api, Action.REPLACE))
        assert answer.answer is Answer.FAILED
        assert "has booted since" in answer.text
        found = await api.get(behind)
        assert found is not None
        assert "deletionTimestamp" not in found["metadata"]


@pytest.mark.parametrize("what", ["karpenter", "cluster-api"])
async def test_node_that_nothing_is_behind_is_left_to_a_person(opened: Any, what: str) -> None:
    async with opened() as api:
        provider, behind = await opened_behind(api, what)
        stranger = Api(api.client)
        await stranger.make_node()
        answer = await provider.order(order(stranger, Action.REPLACE))
        assert answer.answer is Answer.UNSUPPORTED
        assert stranger.node in answer.text
        found = await api.get(behind)
        assert found is not None
        assert "deletionTimestamp" not in found["metadata"]


async def test_reboot_asks_cluster_api_for_remediation_once(opened: Any) -> None:
    async with opened() as api:
        provider, behind = await opened_behind(api, "cluster-api")
        wanted = order(api, Action.REBOOT)
        assert (await provider.order(wanted)).answer is Answer.WORKING
        found = await api.get(behind)
        assert found is not None
        assert REMEDIATE in found["metadata"]["annotations"]
        # It has been seen to, and the annotation taken; the same order does not ask again.
        await api.merge(behind, {"metadata": {"annotations": {REMEDIATE: None}}})
        assert (await provider.order(wanted)).answer is Answer.WORKING
        found = await api.get(behind)
        assert found is not None
        assert REMEDIATE not in found["metadata"]["annotations"]
        await api.boot("boot-2")
        assert (await provider.standing(wanted)).answer is Answer.DONE


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
        assert (await provider.standing(wanted)).answer is Answer.DONE
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
        answer = await provider.standing(order(api, Action.REBOOT))
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
        done = await provider.standing(wanted)
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
