"""The pool of machines: its requests to the API, and the machines that it starts and ends.

It is level-triggered. After any change of a machine, its Node, its pods or its processes, the
machine is examined as a whole, and `local/machines/decisions/machine` decides the next step. The
pool's lasting state is in the Machine's status (its addresses, the completed reboots) or on disk
next to its pods.

`Fence` sets the known taint that says that nothing of a node runs, and removes its pods. The
taint is `node.kubernetes.io/out-of-service`, as the repairer of a real cluster's nodes sets it.
The pods of such a node are removed, as Kubernetes' own collector does.

Options of a Machine's node come from its spec, its instance type, and the options of `up`.
"""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

import msgspec
from lightkube.resources.core_v1 import Node, Pod

from unbroken.errors import SpecError
from unbroken.kube.cache import changed, key_of
from unbroken.kube.client import KubeClient, Object
from unbroken.kube.clock import wall
from unbroken.kube.errors import Conflict
from unbroken.kube.informer import Informer, Informers, all_synced
from unbroken.kube.workqueue import WorkQueue
from unbroken.local.machines.decisions.machine import (
    RUNNING,
    Order,
    Power,
    Seen,
    Stage,
    WriteMachineStatus,
    decide,
)
from unbroken.local.machines.decisions.scripts import Member, resource_config
from unbroken.local.networks import NODES_MAX, node_address
from unbroken.local.node import NodeOptions
from unbroken.local.node.driver import host_boot_id
from unbroken.local.node.processes.process import Launcher
from unbroken.local.state import ClusterOptions, Paths
from unbroken.log_lines import Log
from unbroken.operator.instance_types import instance_types
from unbroken.operator.kinds import ClusterObject, MachineObject
from unbroken.spec.keys import (
    CLUSTER_ARN,
    COMPUTE_TYPE,
    FENCE,
    HEALTH,
    INSTANCE_GROUP,
    MACHINE_FINALIZER,
    OUT_OF_SERVICE,
    POWER,
)
from unbroken.spec.nodes.instance_types import cpus_of, instance_type, instance_type_labels
from unbroken.spec.nodes.kinds import CLUSTER, MACHINE, MachinePhase, MachineSpec, MachineStatus
from unbroken.spec.nodes.values import COMPUTE_TYPE_VALUE, Health
from unbroken.spec.schema.fields import fields_of, write_record

from .decisions.machine import Changes, Listed, changes, free_index, in_order
from .node import Companion, MachineNode, PoolResources, discard
from .scripts import ScriptPlace, kill_pods, kill_scripts

log = Log(__name__)


def power_of(node: Node | None) -> Power:
    """Return the power state that a Node requests; a missing Node requests none."""
    is_off, is_fenced, _ = asked_of(node)
    if is_fenced:
        # Proven just as well without power; such a node only does not come back.
        return Power.FENCED
    return Power.OFF if is_off else Power.ON


def asked_of(node: Node | None) -> tuple[bool, bool, bool]:
    """Return whether the power is to be off, whether a fence is wanted, whether one is proven."""
    asked = annotations_of(node)
    return asked.get(POWER) == "off", bool(asked.get(FENCE)), is_out_of_service(node)


def annotations_of(node: Node | None) -> Mapping[str, str]:
    """Annotations of a Node."""
    return (node.metadata.annotations if node is not None and node.metadata else None) or {}


def is_out_of_service(node: Node | None) -> bool:
    """True if it has the taint."""
    taints = (node.spec.taints if node is not None and node.spec else None) or ()
    return any(taint.key == OUT_OF_SERVICE for taint in taints)


def _is_kept(pod: Pod) -> bool:
    """True if a pod was deleted without grace: only a finalizer of its owner keeps its object."""
    metadata = pod.metadata
    is_leaving = metadata is not None and metadata.deletionTimestamp is not None
    return is_leaving and metadata is not None and metadata.deletionGracePeriodSeconds == 0


class Fence:
    """Writes the proof and takes it back."""

    def __init__(self, client: KubeClient, pods: Informer[Pod]) -> None:
        self._client = client
        self._pods = pods

    async def prove(self, node: Node) -> None:
        """Continue the fence of a node of which nothing runs; asked again when pods have gone.

        With the last pod goes what asked for the fence, unless the node has no power anyway.
        """
        name = key_of(node).name
        if not is_out_of_service(node):
            await self._write(node, taint=True)
            log.info("node fenced", node=name, reason=annotations_of(node).get(FENCE))
            return
        pods = list(self._unfinished(name))
        for pod in pods:
            await self._delete(pod)
        if not pods and annotations_of(node).get(POWER) != "off":
            # Both at once, and before the node starts: one with the taint runs nothing.
            await self._write(node, taint=False)

    async def lift(self, node: Node) -> None:
        """Take the taint away, and what asked for it."""
        await self._write(node, taint=False)

    def _unfinished(self, name: str) -> Iterator[Pod]:
        for pod in self._pods.items():
            if pod.spec is None or pod.spec.nodeName != name:
                continue
            has_ended = pod.status is not None and pod.status.phase in ("Succeeded", "Failed")
            if not has_ended and not _is_kept(pod):
                yield pod

    async def _delete(self, pod: Pod) -> None:
        key = key_of(pod)
        uid = pod.metadata.uid if pod.metadata else None
        path = f"api/v1/namespaces/{quote(key.namespace)}/pods/{quote(key.name)}"
        if await self._client.delete_if_present(path, uid, grace_seconds=0):
            log.info("pod of a fenced node removed", pod=key)

    async def _write(self, node: Node, *, taint: bool) -> None:
        """Set the taint, or remove it and what asked for it."""
        metadata = node.metadata
        kept: list[Object] = [
            one.to_dict()
            for one in (node.spec and node.spec.taints) or ()
            if one.key != OUT_OF_SERVICE
        ]
        if taint:
            kept.append({"key": OUT_OF_SERVICE, "value": "nodeshutdown", "effect": "NoExecute"})
        version = metadata.resourceVersion if metadata else None
        # The whole list, so with its version: others taint nodes too.
        body: Object = {"spec": {"taints": kept or None}}
        if not taint:
            body["metadata"] = {"annotations": {FENCE: None}}
        path = f"api/v1/nodes/{quote(key_of(node).name)}"
        await self._client.merge_if_present(path, body, version=version)


WORKERS = 8
WAITING = frozenset({Order.ADOPT, Order.FENCE, Order.UNFENCE, Order.SWITCH_ON, Order.END})
"""Orders whose answer is a change of an object or of the node's stage, which is seen then."""

MakeOptions = Callable[[str, MachineSpec, int, str], NodeOptions]
"""Makes the options from a machine's name, spec, index on this host and boot ID. Raises SpecError
if it cannot."""


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """Options of a pool."""

    nodes: Path
    """Each machine has a directory below it, with its name."""
    logs: Path
    """Output of lifecycle scripts."""
    first_index: int
    """First index of the addresses that this cluster's machines have on this host."""
    make: MakeOptions
    sources: Mapping[str, str] = field(default_factory=dict)
    """Addresses of lifecycle scripts and the directories that replace them."""
    companions: Sequence[Companion] = ()


@dataclass(slots=True)
class _Member:
    """A machine that the pool manages."""

    uid: str
    status: MachineStatus
    node: MachineNode


class MachinePool:
    """Keeps what runs on this host in line with the Machines."""

    def __init__(self, client: KubeClient, informers: Informers, options: PoolOptions) -> None:
        self._options = options
        self._machines = informers.of(MachineObject)
        self._clusters = informers.of(ClusterObject)
        self._nodes = informers.of(Node)
        self._pods = informers.of(Pod)
        self._requests = MachineRequests(client)
        self._fence = Fence(client, self._pods)
        self._shared = PoolResources(
            client, Launcher(options.nodes.parent / "launcher"), options.companions
        )
        self._members: dict[str, _Member] = {}
        self._indexes: dict[str, int] = {}
        """Index of each machine, counted from this cluster's first."""
        self._host_boot = host_boot_id()
        self._begun = asyncio.Event()
        self._first: tuple[str, ...] = ()
        """Machines that there were at the beginning, and directories without one."""
        self._settled: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self._tasks = asyncio.TaskGroup()
        self._checks: WorkQueue[str] = WorkQueue("machine", self._check, workers=WORKERS)

    async def run(self) -> None:
        """Run the machines until cancelled, which leaves their pods running."""
        await all_synced(self._clusters, self._machines, self._nodes, self._pods)
        try:
            async with self._tasks:
                self._begin()
                self._tasks.create_task(self._checks.run())
                self._machines.subscribe(self._on_machine)
                self._nodes.subscribe(self._on_node)
                self._pods.subscribe(self._on_pod)
        finally:
            await self._shared.launcher.close()

    async def settled(self, more: Iterable[str] = ()) -> None:
        """Return once each machine of the beginning, and each of `more`, has joined or has gone.

        One that for the time being does neither (its script runs, it has no power) is not waited
        for.
        """
        await self._begun.wait()
        for name in (*self._first, *more):
            await self._settled[name].wait()

    # --- what changes

    def _begin(self) -> None:
        """Take up what an earlier pool has left."""
        names = in_order(key_of(machine).name for machine in self._machines.items())
        for name in names:
            machine = self._machines.get(name)
            index = None if machine is None else MACHINE.status_of(machine)[0].index
            if index is not None and index not in self._indexes.values() and index < NODES_MAX:
                self._indexes[name] = index
        for name in names:
            self._reserve(name)
        # Folders without a machine: it was force-deleted while no pool ran.
        lost = [path.name for path in self._options.nodes.glob("*") if path.name not in names]
        for name in lost:
            self._checks.add(name)
        self._first = (*names, *lost)
        self._begun.set()

    def _reserve(self, name: str) -> None:
        if name not in self._indexes:
            index = free_index(self._indexes, NODES_MAX)
            if index is not None:
                self._indexes[name] = index

    def _on_machine(self, old: MachineObject | None, new: MachineObject | None) -> None:
        name = key_of(changed(old, new)).name
        if new is not None:
            self._reserve(name)
        if old is None or new is None or _matters(old) != _matters(new):
            self._checks.add(name)

    def _on_node(self, old: Node | None, new: Node | None) -> None:
        if new is None:
            return
        if asked_of(old) != asked_of(new):
            self._checks.add(key_of(new).name)

    def _on_pod(self, old: Pod | None, new: Pod | None) -> None:
        pod = new or old
        name = pod.spec.nodeName if pod is not None and pod.spec else None
        member = self._members.get(name or "")
        if name and member is not None and member.node.stage is Stage.DARK:
            self._checks.add(name)

    # --- what is done

    async def _check(self, name: str) -> None:
        machine = self._machines.get(name)
        member = self._members.get(name)
        uid = None if machine is None or machine.metadata is None else machine.metadata.uid
        if (member is not None and member.uid != uid) or (
            machine is None and self._has_files(name)
        ):
            # Force-deleted: nothing waits for the pool, but nothing may be left.
            await self._retire(name)
        if machine is None:
            # A Node that is none of ours.
            return
        member = self._members.get(name) or self._take_up(name, machine)
        while True:
            effects = decide(self._seen(name, machine, member), wall())
            for effect in effects:
                await self._carry_out(effect, name, machine, member)
            if not effects or not WAITING.isdisjoint(effects):
                break
        if _is_settled(member):
            self._settled[name].set()

    def _has_files(self, name: str) -> bool:
        return (self._options.nodes / name).is_dir()

    def _take_up(self, name: str, machine: MachineObject) -> _Member:
        assert machine.metadata is not None
        self._reserve(name)
        status, _ = MACHINE.status_of(machine)
        node = MachineNode(
            self._shared, self._options.nodes / name, self._tasks, lambda: self._checks.add(name)
        )
        member = _Member(str(machine.metadata.uid), status, node)
        self._members[name] = member
        return member

    def _seen(self, name: str, machine: MachineObject, member: _Member) -> Seen:
        assert machine.metadata is not None
        spec, problems = MACHINE.spec_of(machine)
        problem = "; ".join(str(one) for one in problems)
        index = self._indexes.get(name)
        if not problem and index is not None:
            try:
                self._options.make(name, spec, self._options.first_index + index, "")
            except SpecError as error:
                problem = str(error)
        kube_node = self._nodes.get(name)
        return Seen(
            uid=member.uid,
            spec=spec,
            status=member.status,
            host_boot=self._host_boot,
            cuts=member.node.cuts,
            is_leaving=machine.metadata.deletionTimestamp is not None,
            is_ours=MACHINE_FINALIZER in (machine.metadata.finalizers or ()),
            problem=problem,
            index=index,
            power=power_of(kube_node),
            is_out_of_service=is_out_of_service(kube_node),
            stage=member.node.stage,
            trouble=member.node.trouble,
            script=member.node.script,
        )

    async def _carry_out(
        self, effect: Order | WriteMachineStatus, name: str, machine: MachineObject, member: _Member
    ) -> None:
        kube_node = self._nodes.get(name)
        match effect:
            case WriteMachineStatus(status):
                await self._requests.write_status(name, member.uid, status)
                member.status = status
            case Order.ADOPT:
                await self._requests.adopt(name, member.uid)
            case Order.CUT:
                await member.node.cut()
            case Order.FENCE if kube_node is not None:
                await self._fence.prove(kube_node)
            case Order.UNFENCE if kube_node is not None:
                await self._fence.lift(kube_node)
            case Order.RESET:
                await member.node.reset()
            case Order.SWITCH_ON:
                self._switch_on(name, machine, member)
            case Order.END:
                await self._retire(name)
                await self._requests.let_go(name, member.uid)
            case _:
                return

    def _switch_on(self, name: str, machine: MachineObject, member: _Member) -> None:
        spec, _ = MACHINE.spec_of(machine)
        index = self._options.first_index + self._indexes[name]
        options = self._options.make(name, spec, index, member.status.boot_id)
        place = ScriptPlace(
            name=name,
            address=node_address(index),
            directory=self._options.nodes / name,
            spec=spec,
            logs=self._options.logs,
            sources=self._options.sources,
            resource_config=self._resource_config(spec.cluster),
        )
        member.node.switch_on(options, place)

    def _resource_config(self, cluster: str) -> Mapping[str, object]:
        members = []
        for name in in_order(self._indexes):
            machine = self._machines.get(name)
            spec = None if machine is None else MACHINE.spec_of(machine)[0]
            if spec is not None and spec.cluster == cluster:
                address = node_address(self._options.first_index + self._indexes[name])
                members.append(Member(name, spec.instance_group, spec.instance_type, address))
        result = self._clusters.get(cluster)
        if result is None or result.metadata is None:
            return resource_config(cluster, "", members)
        arn = (result.metadata.annotations or {}).get(CLUSTER_ARN, "")
        return resource_config(CLUSTER.spec_of(result)[0].name, arn, members)

    async def _retire(self, name: str) -> None:
        """Take a machine away for good: end what runs of it, and forget it."""
        member = self._members.get(name)
        directory = self._options.nodes / name
        if member is not None:
            if member.node.stage is not Stage.DARK:
                await member.node.cut()
        else:
            await asyncio.to_thread(kill_scripts, directory)
            await asyncio.to_thread(kill_pods, directory)
        await self._requests.delete_node(name)
        await asyncio.to_thread(discard, directory)
        log.info("node removed", node=name)
        self._members.pop(name, None)
        self._indexes.pop(name, None)
        self._settled[name].set()


def _is_settled(member: _Member) -> bool:
    """True if a start need not wait for it any longer."""
    node = member.node
    if node.stage is Stage.UNKNOWN:
        return member.status.phase is MachinePhase.FAILED
    is_held_up = bool(node.trouble) or node.script.state == RUNNING
    return is_held_up or node.stage in (Stage.DARK, Stage.ON, Stage.FAILED)


def _matters(machine: MachineObject) -> object:
    """Return the parts of a machine that matter; its status is the pool's own."""
    metadata = machine.metadata
    return (
        machine.get("spec"),
        metadata and (metadata.uid, metadata.deletionTimestamp, metadata.finalizers),
    )


HYPERPOD_LABELS = {HEALTH: Health.SCHEDULABLE.value, COMPUTE_TYPE: COMPUTE_TYPE_VALUE}
"""Labels of a healthy node of HyperPod, which manifests written for it select by."""


@dataclass(frozen=True, slots=True)
class _Capacity:
    cpu: str
    memory: str
    gpus: int
    resources: Mapping[str, str]


def maker(paths: Paths, options: ClusterOptions, kubelet_token: str) -> MakeOptions:
    """Return the function that makes a node's options; it raises SpecError for an unknown instance
    type."""
    general = _general(options)
    heartbeat_seconds = options.for_nodes()[0]

    def make(name: str, spec: MachineSpec, index: int, boot_id: str) -> NodeOptions:
        labels = dict(options.labels)
        capacity = general
        if spec.instance_type:
            result = instance_type(instance_types(), spec.instance_type)
            cpus = cpus_of(spec.instance_type, result, spec.threads_per_core)
            capacity = _Capacity(str(cpus), result.memory, result.gpus, result.resources)
        if kind := spec.instance_type or options.instance_type:
            labels |= instance_type_labels(kind)
        group = {INSTANCE_GROUP: spec.instance_group} if spec.instance_group else {}
        return NodeOptions(
            name=name,
            directory=paths.nodes / name,
            index=index,
            cpu=capacity.cpu,
            memory=capacity.memory,
            gpus=capacity.gpus,
            resources=capacity.resources,
            labels=labels,
            # Like kubelet's --node-labels: whoever changes them on the Node is not overruled.
            first_labels={**HYPERPOD_LABELS, **group, **spec.labels},
            taints=tuple(write_record(taint) for taint in spec.taints),
            boot_id=boot_id,
            kubelet_token=kubelet_token,
            heartbeat_seconds=heartbeat_seconds,
            images=options.images,
        )

    return make


def _general(options: ClusterOptions) -> _Capacity:
    """Return the capacity of a machine without a type of its own."""
    host = machine_size()
    gpus, resources = 0, {}
    if options.instance_type:
        result = instance_type(instance_types(), options.instance_type)
        host = {"cpu": str(result.cpu), "memory": result.memory}
        gpus, resources = result.gpus, result.resources
    return _Capacity(
        cpu=options.cpu or host["cpu"],
        memory=options.memory or host["memory"],
        gpus=options.gpus or gpus,
        resources={**resources, **options.resources},
    )


def machine_size() -> Mapping[str, str]:
    """CPUs and memory of this machine as quantities."""
    pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return {"cpu": str(os.cpu_count() or 1), "memory": f"{pages * page_bytes // 1024}Ki"}


class MachineRequests:
    """Requests of the pool; each raises as `unbroken.kube.client.api_errors`."""

    def __init__(self, client: KubeClient) -> None:
        self._client = client

    async def ensure(self, count: int) -> Changes:
        """Ensure that the places `node-0` to `node-<count - 1>` exist, and no more of that kind.

        The returned changes have been made, except for those that are `blocked`.
        """
        result = msgspec.json.decode(await self._client.raw("GET", MACHINE.path), type=Object)
        wanted = changes([_listed(item) for item in result["items"]], count)
        for name in wanted.create:
            # Its place is kept when a machine with another name replaces it.
            spec = MachineSpec(logical_id=name)
            body = MACHINE.new(name, spec, {"finalizers": [MACHINE_FINALIZER]})
            await self._client.raw("POST", MACHINE.path, body=body)
        for name in wanted.delete:
            log.info("machine deleted: fewer are wanted", machine=name)
            await self._client.delete_if_present(_path(name))
        return wanted

    async def adopt(self, name: str, uid: str) -> None:
        """Add the finalizer to this very machine."""
        await self._finalizers(name, uid, lambda held: [*held, MACHINE_FINALIZER])

    async def let_go(self, name: str, uid: str) -> None:
        """Take the finalizer away."""
        await self._finalizers(
            name, uid, lambda held: [one for one in held if one != MACHINE_FINALIZER]
        )

    async def _finalizers(
        self, name: str, uid: str, change: Callable[[list[str]], list[str]]
    ) -> None:
        result = await self._client.get_or_none(_path(name), Object)
        if result is None or result["metadata"]["uid"] != uid:
            return
        metadata = result["metadata"]
        body = {"metadata": {"finalizers": change(metadata.get("finalizers") or [])}}
        # The whole list, so with its version: others have finalizers too.
        version = metadata["resourceVersion"]
        await self._client.merge_if_present(_path(name), body, version=version)

    async def write_status(self, name: str, uid: str, status: MachineStatus) -> None:
        """Write the status of this very machine; do nothing if it is gone.

        Empty values are removed, never written as empty strings. A kube-apiserver 1.20 that Go 1.19
        compiled takes an empty string for null in a custom resource, and refuses it ("must be of
        type string"). Its validation (go-openapi/validate, type.go) compares a value with its
        type's zero by `reflect.DeepEqual` of two `reflect.Value`, which are the same since.
        """
        written = write_record(status)
        patch = {field.key: written.get(field.key) for field in fields_of(MachineStatus)}
        with suppress(Conflict):
            await self._client.merge_if_present(f"{_path(name)}/status", {"status": patch}, uid=uid)

    async def delete_node(self, name: str) -> None:
        """Delete the Node of a machine of which nothing runs."""
        await self._client.delete_if_present(f"api/v1/nodes/{quote(name)}")


def _path(name: str) -> str:
    return f"{MACHINE.path}/{quote(name)}"


def _listed(item: Object) -> Listed:
    metadata = item["metadata"]
    spec, _ = MACHINE.spec_of(item)
    return Listed(metadata["name"], spec, "deletionTimestamp" in metadata)
