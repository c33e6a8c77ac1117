"""The controller of Clusters: it makes and deletes their machines.

It gets orders from `core/clusters`, stores the state, then carries them out.

Pure functions show clusters, machines, nodes and checks of the API as `core/clusters/rules` sees
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import quote

import msgspec
from lightkube.resources.core_v1 import Node

from unbroken.core.clusters.draft import (
    CheckView,
    ClusterDecision,
    ClusterEffect,
    ClusterNode,
    Configure,
    CreateCheck,
    CreateMachine,
    DeleteMachine,
    MachineView,
    ReleaseCluster,
    ReplaceNode,
    Retarget,
    World,
)
from unbroken.core.clusters.groups import node_config, retargeted
from unbroken.core.clusters.rules import decide_cluster
from unbroken.core.clusters.state import ClusterPhase, ClusterState, read_state, write_state
from unbroken.kube.cache import changed, key_of
from unbroken.kube.client import KubeClient, Object
from unbroken.kube.clock import wall
from unbroken.kube.conditions import is_ready
from unbroken.kube.informer import Informers, all_synced
from unbroken.kube.workqueue import WorkQueue
from unbroken.log_lines import Log
from unbroken.operator.kinds import ClusterObject, MachineObject, NodeCheckObject
from unbroken.spec import keys
from unbroken.spec.job.incident import GROUP, VERSION
from unbroken.spec.keys import CHECK_HOLD, DEEP_CHECK, REPAIR
from unbroken.spec.nodes.kinds import CLUSTER, MACHINE, NODE_CHECK, NodeCheckSpec
from unbroken.spec.nodes.values import Action, health_of
from unbroken.spec.schema.fields import write_record
from unbroken.spec.times import time_seconds

ObjectView = Mapping[str, Any]


def world_of(
    cluster: ObjectView,
    machines: Iterable[ObjectView],
    node_of: Callable[[str], Node | None],
    checks: Iterable[ObjectView],
) -> tuple[World, ClusterState]:
    """Return a cluster with its machines; `node_of` finds the node of a name."""
    spec, _ = CLUSTER.spec_of(cluster)
    status, _ = CLUSTER.status_of(cluster)
    seen = [machine_view(machine) for machine in machines]
    nodes = {machine.name: node_view(machine.name, node_of(machine.name)) for machine in seen}
    result = [check_view(check) for check in checks]
    world = World(
        name=cluster["metadata"]["name"],
        spec=spec,
        phase=phase_of(status.phase),
        message=status.message,
        is_deleting=bool(cluster["metadata"].get("deletionTimestamp")),
        machines=seen,
        nodes=nodes,
        checks=[check for check in result if any(name in nodes for name in check.nodes)],
    )
    return world, read_state(status.state)


def phase_of(text: str) -> ClusterPhase:
    """Return the phase; Creating if it is none."""
    try:
        return ClusterPhase(text)
    except ValueError:
        return ClusterPhase.CREATING


def machine_view(machine: ObjectView) -> MachineView:
    """Return the view of a Machine object."""
    spec, _ = MACHINE.spec_of(machine)
    status, _ = MACHINE.status_of(machine)
    metadata = machine["metadata"]
    return MachineView(
        metadata["name"],
        spec.logical_id,
        spec.instance_group,
        status.phase,
        status.message,
        bool(metadata.get("deletionTimestamp")),
        time_seconds(metadata["creationTimestamp"]) if metadata.get("creationTimestamp") else 0.0,
        node_config(spec),
    )


def node_view(name: str, node: Node | None) -> ClusterNode:
    """Return the view of a Node, which may not exist yet."""
    metadata = node.metadata if node is not None else None
    if node is None or metadata is None:
        return ClusterNode(name)
    labels, annotations = metadata.labels or {}, metadata.annotations or {}
    return ClusterNode(
        name,
        is_ready(node),
        health_of(labels),
        labels.get(DEEP_CHECK, ""),
        CHECK_HOLD in annotations,
        annotations.get(REPAIR, ""),
    )


def check_view(check: ObjectView) -> CheckView:
    """Return the view of a NodeCheck object."""
    spec, _ = NODE_CHECK.spec_of(check)
    status, _ = NODE_CHECK.status_of(check)
    name = check["metadata"]["name"]
    return CheckView(name, spec.nodes, spec.kinds, status.phase, status.faulty, status.message)


log = Log(__name__)


class Clusters:
    """The controller over shared informers."""

    def __init__(self, client: KubeClient, informers: Informers) -> None:
        self._client = client
        self._clusters = informers.of(ClusterObject)
        self._machines = informers.of(MachineObject)
        self._nodes = informers.of(Node)
        self._checks = informers.of(NodeCheckObject)
        self._queue: WorkQueue[str] = WorkQueue("clusters", self._reconcile)

    async def run(self) -> None:
        """Manage all clusters until cancelled."""
        await all_synced(self._clusters, self._machines, self._nodes, self._checks)
        self._watch()
        await self._queue.run()

    def _watch(self) -> None:
        """Queue every cluster, and again whenever a part of it changes."""
        self._clusters.subscribe(lambda old, new: self._queue.add(key_of(changed(old, new)).name))
        self._machines.subscribe(self._on_machine)
        self._nodes.subscribe(lambda old, new: self._on_node(key_of(changed(old, new)).name))
        self._checks.subscribe(self._on_check)

    def _on_machine(self, old: MachineObject | None, new: MachineObject | None) -> None:
        cluster = MACHINE.spec_of(changed(old, new))[0].cluster
        if cluster:
            self._queue.add(cluster)

    def _on_node(self, name: str) -> None:
        machine = self._machines.get(name)
        if machine is not None:
            self._on_machine(None, machine)

    def _on_check(self, old: NodeCheckObject | None, new: NodeCheckObject | None) -> None:
        for name in NODE_CHECK.spec_of(changed(old, new))[0].nodes:
            self._on_node(name)

    async def _reconcile(self, name: str) -> float | None:
        cluster = self._clusters.get(name)
        if cluster is None:
            return None
        machines = [
            machine
            for machine in self._machines.items()
            if MACHINE.spec_of(machine)[0].cluster == name
        ]
        world, state = world_of(cluster, machines, self._nodes.get, self._checks.items())
        now = wall()
        made = decide_cluster(world, state, now)
        if _is_news(world, state, made):
            await self._write(cluster, made, now)
        for effect in made.effects:
            await self._do(name, effect)
        return None if made.again_at is None else max(0.0, made.again_at - now)

    async def _write(self, cluster: ClusterObject, made: ClusterDecision, now: float) -> None:
        if cluster.get("status", {}).get("phase") != made.phase.value:
            log.info(
                "phase changed", cluster=key_of(cluster), phase=made.phase, message=made.message
            )
        before, _ = CLUSTER.status_of(cluster)
        status = replace(
            before,
            phase=made.phase.value,
            message=made.message,
            created_at=before.created_at or now,
            updated_at=now,
            state=write_state(made.state),
        )
        # Objects of a list have no kind of their own.
        own = {"apiVersion": f"{GROUP}/{VERSION}", "kind": CLUSTER.kind}
        body = {**cluster, **own, "status": write_record(status)}
        path = f"{CLUSTER.path}/{quote(key_of(cluster).name)}/status"
        await self._client.raw("PUT", path, body=body)

    async def _do(self, cluster: str, effect: ClusterEffect) -> None:
        match effect:
            case CreateMachine(name, spec):
                labels = {
                    keys.CLUSTER_LABEL: cluster,
                    keys.CLUSTER_NAME: spec.labels[keys.CLUSTER_NAME],
                    keys.INSTANCE_GROUP: spec.instance_group,
                }
                body = MACHINE.new(name, spec, {"labels": labels})
                await self._client.create_if_absent(MACHINE.path, body)
            case DeleteMachine(name):
                await self._client.delete_if_present(f"{MACHINE.path}/{name}")
            case CreateCheck(name, nodes, kinds, reason):
                wanted = NodeCheckSpec(nodes, kinds, reason)
                body = NODE_CHECK.new(name, wanted, {"labels": {keys.CLUSTER_LABEL: cluster}})
                await self._client.create_if_absent(NODE_CHECK.path, body)
            case Configure():
                await self._configure(effect)
            case ReplaceNode(name):
                annotations = {keys.REPAIR: Action.REPLACE.value}
                body = {"metadata": {"annotations": annotations}}
                await self._client.merge_if_present(f"api/v1/nodes/{quote(name)}", body)
            case Retarget():
                await self._retarget(cluster, effect)
            case ReleaseCluster():
                await self._release(cluster)

    async def _configure(self, effect: Configure) -> None:
        labels = {**dict.fromkeys(effect.was.labels), **effect.wanted.labels}
        taken = {(taint.key, taint.effect) for taint in (*effect.was.taints, *effect.wanted.taints)}
        added = [write_record(taint) for taint in effect.wanted.taints]

        def taints(spec: Object) -> list[Object]:
            others = spec.get("taints") or ()
            return [
                *(other for other in others if (other["key"], other["effect"]) not in taken),
                *added,
            ]

        def change_node(node: Object) -> Object:
            return {
                "metadata": {"labels": labels},
                "spec": {"taints": taints(node["spec"]) or None},
            }

        def change_machine(machine: Object) -> Object:
            return {"spec": {"labels": labels, "taints": taints(machine["spec"])}}

        # The Machine records the values that its node was brought to: it comes last.
        await self._change(f"api/v1/nodes/{quote(effect.name)}", change_node)
        await self._change(f"{MACHINE.path}/{quote(effect.name)}", change_machine)

    async def _change(self, path: str, change: Callable[[Object], Object]) -> None:
        """Patch an object in its present state, if it exists.

        Lists are replaced as a whole, guarded by the version: never values that were added
        meanwhile.
        """
        result = await self._client.get_or_none(path, Object)
        if result is not None:
            version = result["metadata"]["resourceVersion"]
            await self._client.merge_if_present(path, change(result), version=version)

    async def _retarget(self, name: str, effect: Retarget) -> None:
        path = f"{CLUSTER.path}/{quote(name)}"
        cluster: Object = msgspec.json.decode(await self._client.raw("GET", path))
        spec, _ = CLUSTER.spec_of(cluster)
        body = {**cluster, "spec": write_record(retargeted(spec, effect.targets))}
        await self._client.raw("PUT", path, body=body)

    async def _release(self, name: str) -> None:
        def change(cluster: Object) -> Object:
            held = cluster["metadata"].get("finalizers") or ()
            return {
                "metadata": {
                    "finalizers": [item for item in held if item != keys.CLUSTER_FINALIZER] or None
                }
            }

        await self._change(f"{CLUSTER.path}/{quote(name)}", change)


def _is_news(world: World, state: ClusterState, made: ClusterDecision) -> bool:
    return (state, world.phase, world.message) != (made.state, made.phase, made.message)
