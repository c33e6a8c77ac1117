"""The machines of this host: a node of processes for each Machine object, and none without.

It is level-triggered. After any change of a machine, its Node, its pods or its processes, the
machine is examined as a whole, and `local/machines/decisions/machine` decides the next step. The
pool's lasting state is in the Machine's status (its addresses, the completed reboots) or on disk
next to its pods.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lightkube.resources.core_v1 import Node, Pod

from unbroken.errors import SpecError
from unbroken.kube.cache import changed, key_of
from unbroken.kube.client import KubeClient
from unbroken.kube.clock import wall
from unbroken.kube.informers import Informers, all_synced
from unbroken.kube.workqueue import WorkQueue
from unbroken.local.machines.decisions.machine import (
    RUNNING,
    Order,
    Seen,
    Stage,
    WriteMachineStatus,
    decide,
)
from unbroken.local.machines.decisions.places import free_index, in_order
from unbroken.local.machines.decisions.scripts import Member, resource_config
from unbroken.local.node import NodeOptions
from unbroken.local.node.addresses import NODES_MAX, node_address
from unbroken.local.node.driver import host_boot_id
from unbroken.local.node.processes.process import Launcher
from unbroken.log_lines import Log
from unbroken.operator.kinds import ClusterObject, MachineObject
from unbroken.spec.keys import CLUSTER_ARN, MACHINE_FINALIZER
from unbroken.spec.nodes.kinds import CLUSTER, MACHINE
from unbroken.spec.nodes.machine import MachinePhase, MachineSpec, MachineStatus

from .fence import Fence, asked_of, is_out_of_service, power_of
from .node import Companion, MachineNode, PoolResources, discard
from .objects import MachineRequests
from .power import kill_pods
from .scripts import ScriptPlace, kill_scripts

log = Log(__name__)

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
