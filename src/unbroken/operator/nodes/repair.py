"""The repairer's driver: passes the API's events to `core.nodes.repair`, and carries out its
orders.

Effects of one node are carried out in order, each until it has succeeded: the record is written
before its order is sent. Providers are called concurrently, because they may take minutes.

Pure functions show nodes, pods, checks and incidents of the API as the repairer sees them.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import assert_never
from urllib.parse import quote

from lightkube.models.core_v1 import NodeCondition, ObjectReference
from lightkube.resources.core_v1 import Node, Pod

from unbroken.core.nodes import blame
from unbroken.core.nodes.repair.events import (
    AskProvider,
    Blamed,
    CheckGone,
    CheckSeen,
    ClusterSeen,
    DropRecord,
    MakeCheck,
    NodeFault,
    OrderRepair,
    PatchNode,
    PodsSeen,
    ProviderAnswered,
    RecordGone,
    RecordRepairEvent,
    RecordSeen,
    RepairEffect,
    RepairEvent,
    RepairNode,
    RepairNodeGone,
    RepairNodeSeen,
    RepairOrder,
    RepairSettings,
    RepairSynced,
    WriteRecord,
    queue_of,
)
from unbroken.core.nodes.repair.machine import Repairer
from unbroken.core.nodes.repair.records import FAULT_ANNOTATIONS
from unbroken.core.tick import Tick
from unbroken.errors import SpecError, WorldError
from unbroken.kube.cache import changed, key_of
from unbroken.kube.client import KubeClient, Object
from unbroken.kube.clock import steady_clock
from unbroken.kube.errors import NotFound
from unbroken.kube.events import EventRecorder
from unbroken.kube.informer import Informers
from unbroken.kube.workqueue import WorkQueue
from unbroken.log_lines import Log
from unbroken.operator.jobs.pods import JobIdentity
from unbroken.operator.jobs.views import FAULTS, node_view
from unbroken.operator.kinds import ClusterObject, NodeCheckObject, NodeRecordObject
from unbroken.runtime.drive import Alarm
from unbroken.spec import keys
from unbroken.spec.job.incident import Incident
from unbroken.spec.job_kinds import is_pod_of_a_job
from unbroken.spec.keys import HEALTH, OUT_OF_SERVICE
from unbroken.spec.nodes.kinds import CLUSTER, NODE_CHECK, NODE_RECORD, NodeRecordSpec, RepairRecord
from unbroken.spec.nodes.notices import FAULT_LABELS
from unbroken.spec.nodes.values import (
    TAINT_EFFECT,
    TAINT_VALUE,
    DeepCheck,
    Health,
    NodeProvider,
    NodeRecovery,
    health_of,
)
from unbroken.spec.schema.fields import fields_of, write_record

from .providers import parse_command, provider_name, provider_of

CONDITIONS = FAULTS | {keys.GPU_UNHEALTHY, keys.HARDWARE_UNHEALTHY}
UNINITIALIZED = "node.cloudprovider.kubernetes.io/uninitialized"
"""Taint of a new node until the cloud's controller has set its provider ID."""
MESSAGE_MAX = 300
OUR_FENCE = {"key": keys.OUT_OF_SERVICE, "value": "machine-replaced", "effect": "NoExecute"}
"""The taint of a node whose machine a provider has replaced; others use other values."""
APPEAL = ("clearedAt", "clearedBy")
"""Fields of a NodeRecord that only a person writes."""


def repair_node(node: Node) -> RepairNode:
    """Return the view of a node for the repairer."""
    metadata, view = node.metadata, node_view(node)
    assert metadata is not None
    labels, annotations = metadata.labels or {}, metadata.annotations or {}
    taints = (node.spec and node.spec.taints) or ()
    conditions = {
        node_condition.type: node_condition
        for node_condition in (node.status and node.status.conditions) or ()
    }
    ready, info = conditions.get("Ready"), node.status.nodeInfo if node.status else None
    return RepairNode(
        name=view.name,
        is_ready=view.is_ready,
        ready_at=_seconds(ready.lastTransitionTime if ready else metadata.creationTimestamp),
        is_silent=ready is not None and ready.status == "Unknown",
        is_awaited=bool(annotations.get(keys.FENCE)) and not view.is_fenced,
        is_fence_asked=keys.FENCE in annotations,
        is_fenced=any(is_our_fence(taint.to_dict()) for taint in taints),
        boot_id=(info.bootID if info else "") or "",
        uid=metadata.uid or "",
        machine=(node.spec and node.spec.providerID) or "",
        has_joined=not any(taint.key == UNINITIALIZED for taint in taints),
        cluster=labels.get(keys.CLUSTER_NAME, ""),
        rack=_rack(view.topology),
        health=_health(health_of(labels)),
        unknown_health="" if _health(health_of(labels)) else labels.get(keys.HEALTH, ""),
        has_taint=any(taint.key == keys.HEALTH for taint in taints),
        faults=_faults(conditions),
        fault_reason=labels.get(keys.FAULT_REASONS, "") or labels.get(keys.FAULT_REASONS_ALSO, ""),
        marks=frozenset(
            {key for key in (*FAULT_LABELS, keys.DEEP_CHECK) if key in labels}
            | {key for key in FAULT_ANNOTATIONS if key in annotations}
        ),
        order=annotations.get(keys.REPAIR, ""),
        advice=annotations.get(keys.ADVICE, ""),
        verified=annotations.get(keys.VERIFIED, ""),
        has_failed_check=labels.get(keys.DEEP_CHECK) == DeepCheck.FAILED.value,
        is_in_deep_check=labels.get(keys.DEEP_CHECK) == DeepCheck.IN_PROGRESS.value,
    )


def is_our_fence(taint: Mapping[str, object]) -> bool:
    """True if a taint is the out-of-service taint as the repairer sets it."""
    return taint.get("key") == keys.OUT_OF_SERVICE and taint.get("value") == OUR_FENCE["value"]


def _rack(topology: tuple[str, ...]) -> str:
    """Return the rack with its zone; else the switch nearest to the node; a zone is no rack."""
    zone, _, _, switch, rack = topology
    return f"{zone}/{rack}" if rack else switch


def _health(text: str) -> Health | None:
    try:
        return Health(text) if text else None
    except ValueError:
        return None


def _faults(conditions: Mapping[str, NodeCondition]) -> tuple[NodeFault, ...]:
    """Return the conditions that are True while the node is at fault, newest first."""
    node_faults = [
        NodeFault(
            name,
            condition.reason or name,
            _seconds(condition.lastTransitionTime),
            (condition.message or "")[:MESSAGE_MAX],
        )
        for name, condition in conditions.items()
        if name in CONDITIONS and condition.status == "True"
    ]
    return tuple(sorted(node_faults, key=lambda node_fault: (-node_fault.at, node_fault.type)))


def _seconds(at: datetime | None) -> float:
    return at.timestamp() if at is not None else 0.0


def is_of_a_job(pod: Pod) -> bool:
    """True if the pod belongs to a job and has not ended."""
    labels = (pod.metadata and pod.metadata.labels) or {}
    phase = pod.status.phase if pod.status else None
    return is_pod_of_a_job(labels, phase)


def check_seen(name: str, content: object) -> CheckSeen:
    """Return the view of a NodeCheck for the repairer."""
    status, _ = NODE_CHECK.status_of(content)
    return CheckSeen(name, status.phase, status.message, status.faulty)


def record_patch(record: NodeRecordSpec) -> Object:
    """Return a merge patch that keeps a person's part of a record, and nothing stale of ours."""
    written = write_record(record)
    ours = [field.key for field in fields_of(NodeRecordSpec) if field.key not in APPEAL]
    patch: Object = {key: written.get(key) for key in ours}
    if patch["repair"] is not None:
        # A merge goes into objects, where a value that is now empty would stay.
        patch["repair"] = {
            **dict.fromkeys(field.key for field in fields_of(RepairRecord)),
            **patch["repair"],
        }
    return {"spec": patch}


log = Log(__name__)

COMPONENT = "unbroken-node-repair"
"""Reporter of the events of nodes."""
WORKERS = 4
CALLS_MAX = 32
"""Calls of providers at a time; one takes minutes at most."""
TICK_RETRY_SECONDS = 5.0
NAMED_BY_NODES = (NodeProvider.AWS, NodeProvider.COMMAND)
"""Providers that find a machine by the provider ID of its node; others have their own objects."""
MACHINE_ASK_SECONDS = 1.0
"""Seconds between two looks at a Machine: they boot in moments, and are read from the API
server."""


@dataclass(frozen=True, slots=True)
class RepairOptions:
    """Options of the repairer."""

    provider: str = NodeProvider.NONE
    command: tuple[str, ...] = ()
    """Words of the provider `command`."""
    settings: RepairSettings = field(default_factory=RepairSettings)


def options_of(
    recovery: str, provider: str, command: str, share: float, is_dry_run: bool
) -> RepairOptions:
    """Return the options that a person wrote. Raises SpecError for invalid ones."""
    name = provider_name(provider)
    if recovery not in (one.value for one in NodeRecovery):
        raise SpecError(f"--node-recovery {recovery}: write Automatic or None")
    if name is NodeProvider.COMMAND and not command:
        raise SpecError("--node-provider command needs --node-command COMMAND")
    settings = RepairSettings(recovery=NodeRecovery(recovery), share=share, is_dry_run=is_dry_run)
    if name in NAMED_BY_NODES:
        settings = replace(settings, notes_machines=True)
    if name is NodeProvider.MACHINES:
        settings = replace(settings, ask_seconds=MACHINE_ASK_SECONDS)
    return RepairOptions(name, parse_command(command) if command else (), settings)


class NodeRepair:
    """One repairer with its surroundings."""

    def __init__(
        self,
        client: KubeClient,
        informers: Informers,
        recorder: EventRecorder,
        options: RepairOptions,
    ) -> None:
        self._client = client
        self._informers = informers
        self._recorder = recorder
        self._provider = provider_of(client, options.provider, options.command)
        settings = replace(
            options.settings, provider=self._provider.name, supports=self._provider.supports
        )
        self._repairer = Repairer(settings)
        self._clock: Callable[[], float] = steady_clock()
        self._pods: dict[str, dict[str, str]] = defaultdict(dict)
        """Pods of jobs by node: names by uid."""
        self._places: dict[str, str] = {}
        """Nodes of these pods, by uid."""
        self._effects: dict[str, deque[RepairEffect]] = defaultdict(deque)
        self._orders: dict[str, tuple[RepairOrder, bool]] = {}
        """The question for the provider by node, and whether it is the first time."""
        self._alarm = Alarm(self._clock, self._tick)
        self._is_over = False
        self._writes: WorkQueue[str] = WorkQueue("node-repair", self._carry_out, workers=WORKERS)
        self._asks: WorkQueue[str] = WorkQueue("node-provider", self._ask, workers=CALLS_MAX)

    async def run(self) -> None:
        """Repair until cancelled."""
        informers = self._informers
        informers.of(Node).subscribe(self._on_node)
        informers.of(Pod).subscribe(self._on_pod)
        informers.of(NodeRecordObject).subscribe(self._on_record)
        informers.of(NodeCheckObject).subscribe(self._on_check)
        informers.of(ClusterObject).subscribe(self._on_cluster)
        try:
            await informers.synced()
            log.info("node repair is ready", provider=self._provider.name)
            self._take(RepairSynced())
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._writes.run())
                tasks.create_task(self._asks.run())
        finally:
            self._is_over = True  # shared informers outlive this
            self._alarm.set(None)

    def _tick(self) -> None:
        try:
            self._take(Tick())
        except Exception:
            # A node's object must not end the repair of other nodes.
            log.exception("tick of node repair failed")
            self._alarm.set(self._clock() + TICK_RETRY_SECONDS)

    # Events of the API.

    def _take(self, event: RepairEvent) -> None:
        if self._is_over:
            return
        for effect in self._repairer.step(event, self._clock()):
            name = queue_of(effect)
            self._effects[name].append(effect)
            self._writes.add(name)
        self._alarm.set(self._repairer.deadline())

    def _on_node(self, old: Node | None, new: Node | None) -> None:
        if new is None:
            assert old is not None
            self._take(RepairNodeGone(key_of(old).name))
            return
        seen = repair_node(new)
        if old is None or repair_node(old) != seen:
            self._take(RepairNodeSeen(seen))

    def _on_pod(self, old: Pod | None, new: Pod | None) -> None:
        pod = changed(old, new)
        uid = (pod.metadata.uid if pod.metadata else None) or ""
        is_here = new is not None and is_of_a_job(new)
        node = (pod.spec.nodeName if pod.spec else None) or "" if is_here else ""
        was = self._places.get(uid, "")
        if node == was:
            return
        self._places.pop(uid, None)
        self._pods[was].pop(uid, None)
        if node:
            self._places[uid] = node
            self._pods[node][uid] = key_of(pod).name
        for name in filter(None, (was, node)):
            self._take(PodsSeen(name, tuple(sorted(self._pods[name].values()))))

    def _on_record(self, old: NodeRecordObject | None, new: NodeRecordObject | None) -> None:
        name = key_of(changed(old, new)).name
        if new is None:
            self._take(RecordGone(name))
            return
        record, problems = NODE_RECORD.spec_of(new)
        for problem in problems:
            log.warning("problem in a NodeRecord", node=name, problem=problem)
        self._take(RecordSeen(name, record))

    def _on_check(self, old: NodeCheckObject | None, new: NodeCheckObject | None) -> None:
        name = key_of(changed(old, new)).name
        self._take(CheckGone(name) if new is None else check_seen(name, new))

    def _on_cluster(self, old: ClusterObject | None, new: ClusterObject | None) -> None:
        item = new if new is not None else old
        spec, _ = CLUSTER.spec_of(item)
        self._take(ClusterSeen(spec.name, None if new is None else spec.node_recovery))

    def incident_ended(self, job: JobIdentity, incident: Incident) -> None:
        """Add an incident of a job of this operator to the blame of its culprit's node.

        The Incident objects of the API are not used: anyone who may write in a namespace may make
        and edit them. NodeRecords, which only the repairer writes, keep a node's blame.
        """
        entry = blame.of_incident(incident, f"{job.namespace}/{job.name}-{incident.number}")
        if entry is not None:
            self._take(Blamed(incident.culprit.node, entry))

    # Effects.

    async def _carry_out(self, name: str) -> None:
        """Carry out all effects of a node; a failed one is tried again, before the others."""
        waiting = self._effects[name]
        while waiting:
            await self._do(waiting[0])
            waiting.popleft()
        del self._effects[name]

    async def _do(self, effect: RepairEffect) -> None:
        match effect:
            case WriteRecord():
                await self._write(effect)
            case DropRecord(name):
                await self._client.delete_if_present(f"{NODE_RECORD.path}/{quote(name)}")
            case PatchNode():
                await self._patch(effect)
            case RecordRepairEvent(name, reason, text, is_warning):
                # `kubectl describe node` looks for events by this uid, as kubelets write them.
                about = ObjectReference(kind="Node", name=name, uid=name)
                kind = "Warning" if is_warning else "Normal"
                self._recorder.record(about, kind, reason, text)
                log.info("event recorded", node=name, event=reason, message=text)
            case OrderRepair(order) | AskProvider(order):
                self._orders[order.node] = (order, isinstance(effect, OrderRepair))
                self._asks.add(order.node)
            case MakeCheck(_, name, spec):
                await self._client.create_if_absent(NODE_CHECK.path, NODE_CHECK.new(name, spec))
            case _:
                assert_never(effect)

    async def _write(self, effect: WriteRecord) -> None:
        repair = effect.record.repair
        if repair is not None:
            log.info(
                "repair changed",
                node=effect.node,
                action=repair.action,
                state=repair.state,
                failures=repair.tries,
                message=repair.message,
            )
        path = f"{NODE_RECORD.path}/{quote(effect.node)}"
        try:
            await self._client.merge(path, record_patch(effect.record))
        except NotFound as error:
            record = replace(effect.record, cleared_at=None, cleared_by="")
            body = NODE_RECORD.new(effect.node, record)
            if not await self._client.create_if_absent(NODE_RECORD.path, body):
                raise WorldError(f"{path} was just made by another", 0.0) from error

    async def _patch(self, effect: PatchNode) -> None:
        """Change a node, if it exists."""
        path = f"api/v1/nodes/{quote(effect.node)}"
        result = await self._client.get_or_none(path, Object)
        if result is not None:
            await self._client.merge_if_present(path, node_patch(result, effect))

    async def _ask(self, name: str) -> None:
        """Ask the provider; a failed call gives no answer, and is made again."""
        order, is_first = self._orders[name]
        ask = self._provider.order if is_first else self._provider.status
        self._take(ProviderAnswered(order, await ask(order)))


def node_patch(found: Object, effect: PatchNode) -> Object:
    """Return a merge patch of a node; with its taints, which are one list, its version too."""
    metadata: Object = {"labels": dict(effect.labels), "annotations": dict(effect.annotations)}
    if effect.taint is None and effect.is_out_of_service is None:
        return {"metadata": metadata}
    taints: list[Object] = (found.get("spec") or {}).get("taints") or []
    if effect.taint is not None:
        taints = [item for item in taints if item.get("key") != HEALTH]
    if effect.is_out_of_service is not None:
        taints = [item for item in taints if not is_our_fence(item)]
    if effect.taint:
        taints.append({"key": HEALTH, "value": TAINT_VALUE, "effect": TAINT_EFFECT})
    if effect.is_out_of_service and not any(item.get("key") == OUT_OF_SERVICE for item in taints):
        taints.append(dict(OUR_FENCE))
    metadata["resourceVersion"] = found["metadata"]["resourceVersion"]
    return {"metadata": metadata, "spec": {"taints": taints or None}}
