"""The scheduler at work against API servers: binding, refusals, preemption, gates."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.core_v1 import Event, Namespace, Node, Pod
from lightkube.resources.scheduling_v1 import PriorityClass

from tests.apiservers import Cluster
from tests.watching import Watcher, running
from unbroken.kube.client import KubeClient, connect
from unbroken.kube.informer import Informers
from unbroken.local.scheduler import run_scheduler

Object = dict[str, Any]
NAME = "test-scheduler"
"""Name of a scheduler of its own, so that no other one of the cluster takes the pods."""


class World:
    """A namespace, with its pods and events."""

    def __init__(self, client: KubeClient, namespace: str, informers: Informers) -> None:
        self.client = client
        self.namespace = namespace
        self.changes: Watcher[str] = Watcher()
        self.pods = informers.of(Pod)
        self.events = informers.of(Event)
        self.pods.subscribe(lambda old, new: self.changes("pod"))
        self.events.subscribe(lambda old, new: self.changes("event"))

    async def node(self, name: str, cpu: str) -> str:
        """Register a node that only this namespace's pods select; return its full name."""
        name = f"{self.namespace}-{name}"
        await self.client.create(
            Node(metadata=ObjectMeta(name=name, labels={"of": self.namespace}))
        )
        status = {
            "allocatable": {"cpu": cpu, "memory": "1Gi", "pods": "10"},
            "capacity": {"cpu": cpu, "memory": "1Gi", "pods": "10"},
            "conditions": [{"type": "Ready", "status": "True"}],
        }
        await self.client.patch(Node.Status, name, {"status": status})
        # A controller of the server may taint a new node until it has seen it ready.
        await self.client.patch(Node, name, {"spec": {"taints": None}})
        return name

    async def pod(self, name: str, cpu: str, **spec: Any) -> None:
        """Create a pod for the scheduler under test."""
        content: Object = {
            "metadata": {"name": name, "namespace": self.namespace},
            "spec": {
                "schedulerName": NAME,
                "nodeSelector": {"of": self.namespace},
                "terminationGracePeriodSeconds": 0,
                "containers": [
                    {"name": "c", "image": "i", "resources": {"requests": {"cpu": cpu}}}
                ],
                **spec,
            },
        }
        await self.client.create(msgspec.convert(content, Pod))

    async def until(self, name: str, holds: Callable[[Pod], bool]) -> None:
        """Wait until the pod fits."""

        def seen(_: list[str]) -> bool:
            found = self.pods.get(name, self.namespace)
            return found is not None and holds(found)

        await self.changes.until(seen)

    async def gone(self, name: str) -> None:
        """Wait until the pod is gone."""
        await self.changes.until(lambda _: self.pods.get(name, self.namespace) is None)

    async def event(self, reason: str, message: str) -> None:
        """Wait for such an event in the namespace."""
        await self.changes.until(
            lambda _: any(
                (one.reason, one.message) == (reason, message)
                for one in self.events.items()
                if one.metadata.namespace == self.namespace
            )
        )


@asynccontextmanager
async def world(cluster: Cluster) -> AsyncIterator[World]:
    """Run the scheduler; yield a new namespace for it."""
    async with connect(cluster.kubeconfig) as client:
        made = await client.create(Namespace(metadata=ObjectMeta(generateName="scheduler-")))
        assert made.metadata is not None
        assert made.metadata.name is not None
        # Left by other tests, they would be counted in every refusal.
        await client.deletecollection(Node)
        informers = Informers(client)
        found = World(client, made.metadata.name, informers)
        async with running(informers.run(), run_scheduler(client, informers, name=NAME)):
            try:
                yield found
            finally:
                for name in [
                    str(one.metadata and one.metadata.name) for one in informers.of(Node).items()
                ]:
                    if name.startswith(f"{found.namespace}-"):
                        await client.delete(Node, name)
                await client.deletecollection(Pod, namespace=found.namespace, grace_period=0)


def on(name: str) -> Callable[[Pod], bool]:
    """Return a check that the pod is bound to the node."""
    return lambda pod: bool(pod.spec and pod.spec.nodeName == name)


def told(reason: str, message: str) -> Callable[[Pod], bool]:
    """Return a check that the pod's condition has this reason for its wait."""
    return lambda pod: any(
        (one.type, one.status, one.reason, one.message)
        == ("PodScheduled", "False", reason, message)
        for one in (pod.status and pod.status.conditions) or ()
    )


async def test_pod_is_bound_and_the_next_waits_for_room(cluster: Cluster) -> None:
    """Bind the second pod once the first is gone; report the state of both."""
    async with world(cluster) as it:
        await it.pod("early", "1")
        await it.until(
            "early",
            told(
                "Unschedulable",
                "no nodes available to schedule pods",
            ),
        )
        n1 = await it.node("n1", "1")
        await it.until("early", on(n1))
        await it.event("Scheduled", f"Successfully assigned {it.namespace}/early to {n1}")
        await it.pod("late", "600m")
        sentence = (
            "0/1 nodes are available: 1 Insufficient cpu. preemption: "
            "0/1 nodes are available: 1 No preemption victims found for incoming pod."
        )
        await it.until("late", told("Unschedulable", sentence))
        await it.event("FailedScheduling", sentence)
        await it.client.delete(Pod, "early", namespace=it.namespace, grace_period=0)
        await it.until("late", on(n1))


async def test_many_pods_never_take_more_than_there_is(cluster: Cluster) -> None:
    """Count bindings in progress already."""
    async with world(cluster) as it:
        nodes = [await it.node(name, "2") for name in ("n1", "n2", "n3")]
        async with asyncio.TaskGroup() as tasks:
            for number in range(8):
                tasks.create_task(it.pod(f"p{number}", "1"))
        pods: list[Pod] = []

        def settled(_: list[str]) -> bool:
            pods[:] = [
                one
                for one in it.pods.items()
                if one.metadata and one.metadata.namespace == it.namespace
            ]
            bound = [one for one in pods if one.spec and one.spec.nodeName]
            waiting = [
                one for one in pods if one not in bound and one.status and one.status.conditions
            ]
            return len(bound) == 6 and len(waiting) == 2

        await it.changes.until(settled)
        used = sorted(one.spec.nodeName for one in pods if one.spec and one.spec.nodeName)
        assert used == sorted(nodes * 2)


async def test_important_pod_takes_the_place_of_a_lesser_one(cluster: Cluster) -> None:
    """Delete the victim, and report the reason to both pods."""
    async with world(cluster) as it:
        priority = f"high-{it.namespace}"
        await it.client.create(PriorityClass(metadata=ObjectMeta(name=priority), value=1000))
        n1 = await it.node("n1", "1")
        await it.pod("low", "1")
        await it.until("low", on(n1))
        await it.pod("high", "1", priorityClassName=priority)
        await it.gone("low")
        await it.until("high", on(n1))
        high = it.pods.get("high", it.namespace)
        assert high is not None
        assert high.metadata is not None
        await it.event("Preempted", f"Preempted by pod {high.metadata.uid} on node {n1}")
