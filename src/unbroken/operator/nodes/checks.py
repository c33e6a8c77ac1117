"""The checker: runs NodeChecks with pods, and writes the findings on the nodes.

All of its state is in the API: the check's status has the results so far, its pods show what runs.
A new checker continues where the last one stopped; a repeated step changes nothing.

Pure functions read nodes (their types, and the measured speed of their links), and make the patches
of nodes by a deep check: labels and taint while it runs, and its findings. A node of a cluster may
join as Unschedulable and InProgress: that is a hold without a check yet, and the check that takes
it also frees the node. Any other label with more than `Schedulable` belongs to another writer (a
fault, a quarantine). It is left unchanged, except for a check's own failure.

`CheckRequests` makes the requests to the API server.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from urllib.parse import quote

import msgspec
from lightkube.resources.core_v1 import Node, Pod

from unbroken.core.nodes.checks.plan import (
    Fleet,
    Step,
    learn,
    next_steps,
    speeds_inside,
    speeds_shown,
    steps_done,
    total_steps,
)
from unbroken.core.nodes.checks.verdict import Conclusion, compact, conclude, faults_of
from unbroken.errors import WorldError
from unbroken.foreign_numbers import finite_number
from unbroken.kube.cache import changed, key_of
from unbroken.kube.client import KubeClient, Object
from unbroken.kube.clock import wall
from unbroken.kube.errors import ApiRefusal, NotFound
from unbroken.kube.events import EventRecorder
from unbroken.kube.informer import Informers, all_synced
from unbroken.kube.workqueue import WorkQueue
from unbroken.log_lines import Log
from unbroken.operator.instance_types import instance_types
from unbroken.operator.kinds import ClusterObject, NodeCheckObject
from unbroken.spec.job_kinds import ENDED_PHASES
from unbroken.spec.keys import (
    CHECK_HOLD,
    CHECK_LABEL,
    CLUSTER_NAME,
    DEEP_CHECK,
    DEVICE_BANDWIDTH,
    HEALTH,
    LINK_BANDWIDTH,
)
from unbroken.spec.nodes.kinds import (
    CLUSTER,
    KEPT_SECONDS,
    NODE_CHECK,
    CheckKind,
    CheckPhase,
    CheckResult,
    NodeCheckSpec,
    NodeCheckStatus,
)
from unbroken.spec.nodes.values import (
    TAINT_EFFECT,
    TAINT_VALUE,
    DeepCheck,
    Health,
    health_of,
    instance_type_of,
)
from unbroken.spec.schema.fields import write_record

from . import checks_log as check_log
from . import checks_pods as check_pods
from .checks_pods import NAMESPACE, CheckerOptions, gpus_of, is_local, unmade


def instance_type(node: Node) -> str:
    """Return the instance type in its labels; empty: they have none."""
    return instance_type_of((node.metadata and node.metadata.labels) or {})


def fleet_of(
    nodes: Collection[Node],
    asked: Iterable[str],
    told: Mapping[str, float],
    inside: Mapping[str, float],
) -> Fleet:
    """Return facts for a check of the nodes `asked`, from all `nodes` of the cluster.

    `told`, `inside`: configured GB/s of two nodes, and of the devices of one, by instance type.
    """
    names = set(asked)
    types = {key_of(node).name: instance_type(node) for node in nodes}
    alike = [
        node for node in nodes if types[key_of(node).name] in {types.get(n, "") for n in names}
    ]
    return Fleet(
        {name: types.get(name, "") for name in names},
        told,
        _published([node for node in nodes if key_of(node).name in names]),
        learn(_shown(alike, LINK_BANDWIDTH)),
        inside,
        learn(_shown(alike, DEVICE_BANDWIDTH)),
    )


def _published(nodes: Iterable[Node]) -> dict[str, float]:
    """Return the published GB/s of instance types, where every node has all GPUs of its type."""
    table = instance_types()
    least: dict[str, float] = {}
    for node in nodes:
        kind = table.get(instance_type(node))
        is_whole = kind is not None and not is_local(node) and gpus_of(node) == str(kind.gpus)
        least[instance_type(node)] = kind.all_reduce if kind is not None and is_whole else 0.0
    return {name: speed for name, speed in least.items() if speed}


def _shown(nodes: Iterable[Node], key: str) -> list[tuple[str, float]]:
    return [
        (instance_type(node), speed) for node in nodes if (speed := _speed(node, key)) is not None
    ]


def better(node: Node, key: str, speed: float | None) -> str | None:
    """Return the annotation to write after a check that has measured `speed`; None: it stays.

    The best is kept: a network that slows down gradually does not become the usual.
    """
    if speed is None or is_local(node) or speed <= (_speed(node, key) or 0.0):
        return None
    return f"{speed:.4f}"


def _speed(node: Node, key: str) -> float | None:
    text = ((node.metadata and node.metadata.annotations) or {}).get(key, "")
    return finite_number(text, 0.0, sys.float_info.max) or None


FREE = ("", Health.SCHEDULABLE.value)
PENDING = (Health.PENDING_REBOOT.value, Health.PENDING_REPLACEMENT.value)


def held_by(node: Node) -> str:
    """Return the check that holds a node; empty: none does."""
    return str(_hold(node).get("check", ""))


def _hold(node: Node) -> Object:
    text = ((node.metadata and node.metadata.annotations) or {}).get(CHECK_HOLD, "")
    try:
        result = msgspec.json.decode(text) if text else {}
    except (msgspec.DecodeError, RecursionError):
        return {}
    return result if isinstance(result, dict) else {}


def take_node(node: Node, check: str) -> Object | None:
    """Return a merge patch that marks a node as being checked; None: nothing is to be written."""
    if held_by(node):
        return None
    labels = _labels(node)
    health, before = health_of(labels), labels.get(DEEP_CHECK, "")
    has_joined = (health, before) == (Health.UNSCHEDULABLE.value, DeepCheck.IN_PROGRESS.value)
    is_ours = health in FREE or has_joined
    hold = {"check": check, "isOurs": is_ours, "before": before}
    new: dict[str, str | None] = {DEEP_CHECK: DeepCheck.IN_PROGRESS.value}
    patch = _patch(node, new, msgspec.json.encode(hold).decode())
    if is_ours:
        patch["metadata"]["labels"][HEALTH] = Health.UNSCHEDULABLE.value
        taint = {"key": HEALTH, "value": TAINT_VALUE, "effect": TAINT_EFFECT}
        patch["spec"] = {"taints": [*_other_taints(node), taint]}
    return patch


def give_back_node(node: Node, phase: CheckPhase) -> Object | None:
    """Return a merge patch that ends a check's hold with its findings; None: it holds nothing."""
    hold = _hold(node)
    if not hold:
        return None
    before = str(hold.get("before", ""))
    result = {
        CheckPhase.PASSED: DeepCheck.PASSED.value,
        CheckPhase.FAILED: DeepCheck.FAILED.value,
    }.get(phase, "" if before == DeepCheck.IN_PROGRESS.value else before)
    patch = _patch(node, {DEEP_CHECK: result or None}, None)
    health = health_of(_labels(node))
    if phase is CheckPhase.FAILED:
        # The taint stays, or is added: the repair removes it.
        if health not in PENDING:
            patch["metadata"]["labels"][HEALTH] = Health.PENDING_REPLACEMENT.value
        taint = {"key": HEALTH, "value": TAINT_VALUE, "effect": TAINT_EFFECT}
        patch["spec"] = {"taints": [*_other_taints(node), taint]}
    elif hold.get("isOurs") and health == Health.UNSCHEDULABLE.value:
        patch["metadata"]["labels"][HEALTH] = Health.SCHEDULABLE.value
        patch["spec"] = {"taints": _other_taints(node)}
    return patch


def _labels(node: Node) -> dict[str, str]:
    return (node.metadata and node.metadata.labels) or {}


def _patch(node: Node, labels: dict[str, str | None], hold: str | None) -> Object:
    assert node.metadata is not None
    # The version guards the list of taints, which a merge patch replaces as a whole.
    return {
        "metadata": {
            "resourceVersion": node.metadata.resourceVersion,
            "labels": labels,
            "annotations": {CHECK_HOLD: hold},
        }
    }


def _other_taints(node: Node) -> Sequence[Object]:
    taints = (node.spec and node.spec.taints) or ()
    return [taint.to_dict() for taint in taints if taint.key != HEALTH]


log = Log(__name__)

PODS = f"api/v1/namespaces/{NAMESPACE}/pods"


class _Pods(msgspec.Struct):
    items: list[Pod]


class CheckRequests:
    """Requests about one check; each raises as `unbroken.kube.client.api_errors`."""

    def __init__(self, client: KubeClient) -> None:
        self._client = client

    async def start(self, body: Object) -> None:
        """Create a pod and its namespace, if they do not exist."""
        try:
            await self._client.create_if_absent(PODS, body)
        except NotFound:
            await self._make_namespace()
            await self._client.create_if_absent(PODS, body)

    async def _make_namespace(self) -> None:
        # The tests access the host's devices, which stricter levels do not allow.
        labels = {"pod-security.kubernetes.io/enforce": "privileged"}
        body = {"metadata": {"name": NAMESPACE, "labels": labels}}
        await self._client.create_if_absent("api/v1/namespaces", body)

    async def node(self, name: str) -> Node | None:
        """Return the present node."""
        return await self._client.get_or_none(f"api/v1/nodes/{quote(name)}", Node)

    async def patch_node(self, node: Node, patch: Object) -> None:
        """Merge into a node. Raises Conflict if it has changed meanwhile."""
        await self._client.merge(f"api/v1/nodes/{quote(key_of(node).name)}", patch)

    async def write(self, check: Object, status: NodeCheckStatus) -> None:
        """Write the status of this very check, if it is not written yet."""
        if status == NODE_CHECK.status_of(check)[0]:
            return
        path = f"{NODE_CHECK.path}/{quote(check['metadata']['name'])}/status"
        uid = check["metadata"]["uid"]
        await self._client.merge(path, {"status": write_record(status)}, uid=uid)

    async def check(self, name: str) -> Object | None:
        """Return the present NodeCheck."""
        return await self._client.get_or_none(f"{NODE_CHECK.path}/{quote(name)}", Object)

    async def delete_check(self, name: str) -> None:
        """Delete a NodeCheck; its pods go with it."""
        await self._client.delete_if_present(f"{NODE_CHECK.path}/{quote(name)}")

    async def pods_of(self, check: str) -> list[Pod]:
        """Return the pods of a check."""
        return await self._pods(PODS, {"labelSelector": f"{CHECK_LABEL}={check}"})

    async def pods_on(self, node: str) -> list[Pod]:
        """Return all pods of a node."""
        return await self._pods("api/v1/pods", {"fieldSelector": f"spec.nodeName={node}"})

    async def _pods(self, path: str, selector: Mapping[str, str]) -> list[Pod]:
        result = await self._client.raw("GET", path, parameters=selector)
        return msgspec.json.decode(result, type=_Pods).items

    async def log_of(self, pod: Pod, *, is_needed: bool = False) -> str:
        """Read the log of a pod; empty if it cannot be read.

        `is_needed`: raise WorldError if its node does not answer now, but may later.
        """
        assert pod.metadata is not None
        result = b""
        try:
            result = await self._client.raw("GET", f"{PODS}/{pod.metadata.name}/log")
        except (ApiRefusal, WorldError) as error:
            if is_needed and isinstance(error, WorldError):
                raise
            # It has not started yet, or its node does not answer.
            log.debug("log of a pod not read", pod=pod.metadata.name, error=error)
        return result.decode(errors="replace")

    async def delete_pod(self, pod: Pod) -> None:
        """Delete a pod, if it exists."""
        assert pod.metadata is not None
        await self._client.delete_if_present(f"{PODS}/{pod.metadata.name}")


POLL_SECONDS = 1.0
"""Seconds between two looks at the pods of a check that is under way."""
LOST_SECONDS = 60.0
"""Seconds after which a node that is not ready has lost its tests; less is a late heartbeat."""
WORKERS = 4
ENDED = (CheckPhase.PASSED, CheckPhase.FAILED, CheckPhase.UNKNOWN)
EVENT_FAULTS_MAX = 3


@dataclass(slots=True)
class CheckRun:
    """A check in its present state."""

    check: Object
    spec: NodeCheckSpec
    status: NodeCheckStatus
    results: list[CheckResult]
    pods: dict[Step, list[Pod]]
    waits: list[str]
    """Reasons why the check waits, in words."""
    fleet: Fleet

    @property
    def name(self) -> str:
        """Return the name of the NodeCheck."""
        result: str = self.check["metadata"]["name"]
        return result

    @property
    def is_deep(self) -> bool:
        """True if it has more than the basic tests."""
        return any(kind is not CheckKind.BASIC for kind in self.spec.kinds)

    def has(self, step: Step) -> bool:
        """True if the results of a step are stored."""
        if step.is_pair:
            return any({result.node, result.peer} == set(step.nodes) for result in self.results)
        node = step.nodes[0]
        return any((result.node, result.kind) == (node, step.kind) for result in self.results)


class Checker:
    """Works on one NodeCheck after the other; `run` does everything."""

    def __init__(
        self,
        client: KubeClient,
        informers: Informers,
        recorder: EventRecorder,
        options: CheckerOptions,
    ) -> None:
        self._requests = CheckRequests(client)
        self._recorder = recorder
        self._options = options
        self._checks = informers.of(NodeCheckObject)
        self._nodes = informers.of(Node)
        self._clusters = informers.of(ClusterObject)
        self._queue = WorkQueue("node-checks", self._reconcile, workers=WORKERS)

    async def run(self) -> None:
        """Carry out requested checks until cancelled."""
        await all_synced(self._checks, self._nodes)
        self._checks.subscribe(self._on_check)
        self._nodes.subscribe(self._on_node)
        await self._queue.run()

    def _on_check(self, old: NodeCheckObject | None, new: NodeCheckObject | None) -> None:
        self._queue.add(key_of(changed(old, new)).name)

    def _on_node(self, old: Node | None, new: Node | None) -> None:
        # A check that was deleted while it ran has left its marks.
        if new is not None and (name := held_by(new)) and self._checks.get(name) is None:
            self._queue.add(name)

    async def _reconcile(self, name: str) -> float | None:
        check = await self._requests.check(name)
        if check is None or check["metadata"].get("deletionTimestamp"):
            for pod in await self._requests.pods_of(name):
                await self._requests.delete_pod(pod)
            await self._release(name, self._nodes.items(), {})
            return None
        spec, problems = NODE_CHECK.spec_of(check)
        spec = replace(spec, nodes=tuple(dict.fromkeys(spec.nodes)))
        status, _ = NODE_CHECK.status_of(check)
        pods = await self._requests.pods_of(name)
        if status.phase in ENDED:
            for pod in pods:
                await self._requests.delete_pod(pod)
            return await self._expire(name, status)
        run = CheckRun(
            check, spec, status, list(status.results), _by_step(pods), [], self._fleet(spec)
        )
        if problems or not spec.nodes:
            text = "; ".join(map(str, problems)) or "it names no node"
            await self._requests.write(check, _refusal(status, text))
            return None
        return await self._advance(run)

    async def _expire(self, name: str, status: NodeCheckStatus) -> float | None:
        left = (status.ended_at or 0.0) + KEPT_SECONDS - wall()
        if left > 0:
            return left
        await self._requests.delete_check(name)
        return None

    # --- a check under way

    async def _advance(self, run: CheckRun) -> float | None:
        if run.status.started_at is None:
            log.info("check runs", check=run.name, nodes=run.spec.nodes)
            total = total_steps(run.spec)
            run.status = replace(run.status, started_at=wall(), total=total)
            self._record_start(run, "Started")
        if run.is_deep:
            await self._hold(run)
        old = len(run.results)
        over = [step for step in run.pods if run.has(step)]
        left = [step for step in run.pods if step not in over]
        over += [step for step in left if await self._collect(run, step)]
        self._give_up_late(run)
        for step in over:
            del run.pods[step]
        is_over = not await self._begin(run) and not run.pods and not run.waits
        if is_over:
            await self._conclude(run)
        else:
            await self._progress(run)
        self._log(run, run.results[old:])
        for pod in await self._requests.pods_of(run.name) if over else ():
            if check_pods.step_of(pod) in over:
                await self._requests.delete_pod(pod)
        return None if is_over else POLL_SECONDS

    async def _hold(self, run: CheckRun) -> None:
        for node in self._known(run.spec.nodes):
            patch = take_node(node, run.name)
            if patch is not None:
                await self._requests.patch_node(node, patch)

    async def _collect(self, run: CheckRun, step: Step) -> bool:
        """Add the results of a step that has ended; return False if it has not."""
        pods = run.pods[step]
        broken = [why for node in step.nodes if (why := self._why_lost(node, LOST_SECONDS))]
        ended = [pod for pod in pods if _has_ended(pod)]
        broken += [why for pod in ended if (why := check_pods.why_ended(pod))]
        if not broken and len(ended) < len(step.nodes):
            return False
        check_results: list[CheckResult] = []
        for pod in pods:
            # Results of completed tests are worth a wait, until their node is lost.
            said = await self._requests.log_of(pod, is_needed=not broken)
            check_results += check_pods.read_results(said, check_pods.node_of(pod))
        if broken:
            check_results = check_pods.softened(check_results) if step.is_pair else check_results
            check_results += _unmade(step, broken[0])
        run.results += check_results or _unmade(step, "its pod gave no results")
        log.info(
            "step of a check ended",
            check=run.name,
            step=check_pods.step_text(step),
            count=len(check_results),
        )
        return True

    def _give_up_late(self, run: CheckRun) -> None:
        """Give up waiting after the check's time."""
        limit = run.spec.timeout_seconds
        if wall() < (run.status.started_at or 0.0) + limit:
            return
        text = f"the check did not end in {limit} s"
        while steps := [*(pod for pod in run.pods if not run.has(pod)), *self._next(run, ())]:
            for step in steps:
                if not run.has(step):
                    run.results += _unmade(step, text)

    def _next(self, run: CheckRun, running: Iterable[Step]) -> list[Step]:
        return next_steps(run.spec, run.results, list(running), run.fleet)

    async def _begin(self, run: CheckRun) -> bool:
        """Start the steps that may begin; return True if any was started, or given up."""
        has_begun = False
        for step, pods in run.pods.items():
            if step.is_pair and len(pods) == 1:
                await self._start_second(run, step, pods[0])
        for step in self._next(run, run.pods):
            why = await self._why_not(run, step)
            if not why:
                node = self._nodes.get(step.nodes[0])
                assert node is not None
                pod = check_pods.build_pod(run.check, step, node, self._options)
                await self._requests.start(pod)
            elif wall() < (run.status.started_at or 0.0) + self._patience(step):
                run.waits.append(f"{' and '.join(step.nodes)}: {why}")
                continue
            else:
                run.results += _unmade(step, why)
            has_begun = True
        return has_begun

    def _patience(self, step: Step) -> float:
        """Give up nodes that do not exist, or cannot run anything."""
        is_there = len(self._known(step.nodes)) == len(step.nodes)
        return self._options.busy_seconds if is_there and self._can_run(step) else 0.0

    def _can_run(self, step: Step) -> bool:
        known = self._known(step.nodes)
        return bool(self._options.image) or all(check_pods.is_local(node) for node in known)

    async def _why_not(self, run: CheckRun, step: Step) -> str:
        """Return why a step cannot begin now; empty: it can."""
        for name in step.nodes:
            if why := self._why_lost(name):
                return why
            if run.spec.is_forced:
                continue
            pods = await self._requests.pods_on(name)
            if why := check_pods.why_busy(name, pods, run.name):
                return why
        if not self._can_run(step):
            return "no image to test it with: start the operator with --check-image"
        return ""

    def _why_lost(self, name: str, seconds: float = 0.0) -> str:
        """Return why nothing can run on a node, and could not for some time; empty: it can."""
        node = self._nodes.get(name)
        if node is None:
            return f"there is no node {name}"
        for node_condition in (node.status and node.status.conditions) or ():
            if node_condition.type == "Ready" and node_condition.status != "True":
                since = (
                    node_condition.lastTransitionTime.timestamp()
                    if node_condition.lastTransitionTime
                    else 0.0
                )
                return f"node {name} is not ready" if wall() - since >= seconds else ""
        return ""

    async def _start_second(self, run: CheckRun, step: Step, first: Pod) -> None:
        address = first.status and first.status.podIP
        node = self._nodes.get(step.nodes[1])
        if address and node is not None and not _has_ended(first):
            host = f"[{address}]" if ":" in address else address
            body = check_pods.build_pod(run.check, step, node, self._options, host)
            await self._requests.start(body)

    async def _progress(self, run: CheckRun) -> None:
        texts = []
        for step, pods in run.pods.items():
            lines = [len((await self._requests.log_of(pod)).splitlines()) for pod in pods]
            texts.append(f"{' and '.join(step.nodes)}: {step.kind.value}, {sum(lines)} results")
        texts += [f"waiting for {wait}" for wait in run.waits]
        done = steps_done(run.results)
        status = replace(
            run.status,
            phase=CheckPhase.RUNNING,
            message="; ".join(texts) or run.status.message,
            done=done,
            total=max(run.status.total, done + len(run.pods)),
            results=compact(run.results),
        )
        await self._requests.write(run.check, status)

    async def _conclude(self, run: CheckRun) -> None:
        conclusion = conclude(run.spec, run.results, run.fleet)
        await self._remember(run, conclusion)
        # Read now: a node that is not shown as held yet would stay held for ever.
        held = [await self._requests.node(name) for name in run.spec.nodes]
        phases = {name: conclusion.verdict(name) for name in run.spec.nodes}
        await self._release(run.name, filter(None, held), phases)
        done = steps_done(run.results)
        status = replace(
            run.status,
            phase=conclusion.phase,
            message=conclusion.message,
            ended_at=wall(),
            done=done,
            total=done,
            results=compact(conclusion.results),
            faulty=conclusion.faulty,
        )
        run.results += conclusion.results[len(run.results) :]
        await self._requests.write(run.check, status)
        log.info("check ended", check=run.name, phase=conclusion.phase, message=conclusion.message)
        self._record_end(run, conclusion)

    # --- nodes

    def _fleet(self, spec: NodeCheckSpec) -> Fleet:
        if not {CheckKind.STRESS, CheckKind.CONNECTIVITY} & set(spec.kinds):
            return Fleet()
        options = self._options
        told = (options.link_bandwidth, options.node_bandwidth)
        return fleet_of(list(self._nodes.items()), spec.nodes, *told)

    def _known(self, names: Iterable[str]) -> list[Node]:
        return [node for name in names if (node := self._nodes.get(name)) is not None]

    async def _remember(self, run: CheckRun, conclusion: Conclusion) -> None:
        """Write the measured speeds on nodes that passed: later checks compare with them."""
        speeds = {
            LINK_BANDWIDTH: speeds_shown(run.results, run.fleet),
            DEVICE_BANDWIDTH: speeds_inside(run.results),
        }
        for node in self._known(run.spec.nodes):
            name = key_of(node).name
            texts = {key: better(node, key, of.get(name)) for key, of in speeds.items()}
            new = {key: text for key, text in texts.items() if text is not None}
            if new and conclusion.verdict(name) is CheckPhase.PASSED:
                await self._requests.patch_node(node, {"metadata": {"annotations": new}})

    async def _release(
        self, check: str, nodes: Iterable[Node], phases: Mapping[str, CheckPhase]
    ) -> None:
        for node in list(nodes):
            if held_by(node) == check:
                name = key_of(node).name
                patch = give_back_node(node, phases.get(name, CheckPhase.UNKNOWN))
                if patch is not None:
                    await self._requests.patch_node(node, patch)

    def _record_start(self, run: CheckRun, what: str) -> None:
        reason = f"{_subject(run)}{what}"
        kinds = ", ".join(kind.value for kind in run.spec.kinds)
        for node in self._known(run.spec.nodes):
            text = f"{run.name}: {kinds}. {run.spec.reason}".rstrip(". ")
            self._recorder.record(node, "Normal", reason, text)

    def _record_end(self, run: CheckRun, conclusion: Conclusion) -> None:
        for node in self._known(run.spec.nodes):
            name = key_of(node).name
            state = conclusion.verdict(name)
            faults = faults_of(name, conclusion.results)[:EVENT_FAULTS_MAX]
            text = "; ".join(_fault_text(fault) for fault in faults)
            text = text or conclusion.doubts.get(name) or conclusion.message
            kind = "Warning" if state is CheckPhase.FAILED else "Normal"
            self._recorder.record(
                node, kind, f"{_subject(run)}{state.value}", f"{run.name}: {text}"
            )

    def _log(self, run: CheckRun, results: Sequence[CheckResult]) -> None:
        directory = self._options.log_directory
        if directory is None or not results:
            return
        types = {key_of(node).name: instance_type(node) for node in self._known(run.spec.nodes)}
        region, now = self._options.region, wall()
        lines = [
            (result, check_log.line(result, now, region, types.get(result.node, "")))
            for result in results
        ]
        try:
            check_log.write(directory, run.name, lines, self._log_groups(run))
        except OSError as error:
            log.warning("log of a check not written", check=run.name, file=directory, error=error)

    def _log_groups(self, run: CheckRun) -> dict[str, str]:
        """Return the log group of each node's cluster."""
        groups = {}
        for node in self._known(run.spec.nodes):
            name = ((node.metadata and node.metadata.labels) or {}).get(CLUSTER_NAME, "")
            cluster = self._clusters.get(name.lower()) if name else None
            cluster_id = "" if cluster is None else CLUSTER.spec_of(cluster)[0].cluster_id
            groups[key_of(node).name] = check_log.log_group(name, cluster_id)
        return groups


def _refusal(status: NodeCheckStatus, text: str) -> NodeCheckStatus:
    return replace(status, phase=CheckPhase.UNKNOWN, message=text, ended_at=wall())


def _by_step(pods: Iterable[Pod]) -> dict[Step, list[Pod]]:
    result: dict[Step, list[Pod]] = {}
    for pod in pods:
        step = check_pods.step_of(pod)
        if step is not None:
            result.setdefault(step, []).append(pod)
    return result


def _has_ended(pod: Pod) -> bool:
    is_leaving = pod.metadata is not None and pod.metadata.deletionTimestamp is not None
    return is_leaving or bool(pod.status and pod.status.phase in ENDED_PHASES)


def _unmade(step: Step, why: str) -> list[CheckResult]:
    if not step.is_pair:
        return [unmade(step.nodes[0], step.kind, why)]
    one, other = step.nodes
    return [unmade(one, step.kind, why, other), unmade(other, step.kind, why, one)]


def _subject(run: CheckRun) -> str:
    return "DeepHealthCheck" if run.is_deep else "HealthCheck"


def _fault_text(check_result: CheckResult) -> str:
    amount = (
        ""
        if check_result.measured is None
        else f" {check_result.measured:g} {check_result.unit}".rstrip()
    )
    least = "" if check_result.expected is None else f", expected {check_result.expected:g}"
    return f"{check_result.test}{amount}{least}: {check_result.message}"
