"""The checker: runs NodeChecks with pods, and writes the findings on the nodes.

All of its state is in the API: the check's status has the results so far, its pods show what runs.
A new checker continues where the last one stopped; a repeated step changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from lightkube.resources.core_v1 import Node, Pod

from unbroken.core.nodes.checks.inside import speeds_inside
from unbroken.core.nodes.checks.limits import Fleet, speeds_shown
from unbroken.core.nodes.checks.plan_steps import Step, next_steps, steps_done, total_steps
from unbroken.core.nodes.checks.verdict import Conclusion, compact, conclude, faults_of
from unbroken.kube.cache import changed, key_of
from unbroken.kube.client import KubeClient, Object
from unbroken.kube.clock import wall
from unbroken.kube.events import EventRecorder
from unbroken.kube.informers import Informers, all_synced
from unbroken.kube.workqueue import WorkQueue
from unbroken.log_lines import Log
from unbroken.operator.kinds import ClusterObject, NodeCheckObject
from unbroken.spec.job_kinds import ENDED_PHASES
from unbroken.spec.keys import CLUSTER_NAME, DEVICE_BANDWIDTH, LINK_BANDWIDTH
from unbroken.spec.nodes.check import (
    KEPT_SECONDS,
    CheckKind,
    CheckPhase,
    CheckResult,
    NodeCheckSpec,
    NodeCheckStatus,
)
from unbroken.spec.nodes.kinds import CLUSTER, NODE_CHECK

from . import checks_log as check_log
from . import checks_nodes as holds
from . import checks_pods as check_pods
from .checks_fleet import better, fleet_of, instance_type
from .checks_pods import CheckerOptions, unmade
from .checks_requests import CheckRequests

log = Log(__name__)

POLL_SECONDS = 1.0
"""Seconds between two looks at the pods of a check that is under way."""
LOST_SECONDS = 60.0
"""Seconds after which a node that is not ready has lost its tests; less is a late heartbeat."""
WORKERS = 4
ENDED = (CheckPhase.PASSED, CheckPhase.FAILED, CheckPhase.UNKNOWN)
EVENT_FAULTS_MAX = 3


@dataclass(slots=True)
class Run:
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
        if new is not None and (name := holds.held_by(new)) and self._checks.get(name) is None:
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
        run = Run(check, spec, status, list(status.results), _by_step(pods), [], self._fleet(spec))
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

    async def _advance(self, run: Run) -> float | None:
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

    async def _hold(self, run: Run) -> None:
        for node in self._known(run.spec.nodes):
            patch = holds.take(node, run.name)
            if patch is not None:
                await self._requests.patch_node(node, patch)

    async def _collect(self, run: Run, step: Step) -> bool:
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

    def _give_up_late(self, run: Run) -> None:
        """Give up waiting after the check's time."""
        limit = run.spec.timeout_seconds
        if wall() < (run.status.started_at or 0.0) + limit:
            return
        text = f"the check did not end in {limit} s"
        while steps := [*(pod for pod in run.pods if not run.has(pod)), *self._next(run, ())]:
            for step in steps:
                if not run.has(step):
                    run.results += _unmade(step, text)

    def _next(self, run: Run, running: Iterable[Step]) -> list[Step]:
        return next_steps(run.spec, run.results, list(running), run.fleet)

    async def _begin(self, run: Run) -> bool:
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

    async def _why_not(self, run: Run, step: Step) -> str:
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

    async def _start_second(self, run: Run, step: Step, first: Pod) -> None:
        address = first.status and first.status.podIP
        node = self._nodes.get(step.nodes[1])
        if address and node is not None and not _has_ended(first):
            host = f"[{address}]" if ":" in address else address
            body = check_pods.build_pod(run.check, step, node, self._options, host)
            await self._requests.start(body)

    async def _progress(self, run: Run) -> None:
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

    async def _conclude(self, run: Run) -> None:
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

    async def _remember(self, run: Run, conclusion: Conclusion) -> None:
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
            if holds.held_by(node) == check:
                name = key_of(node).name
                patch = holds.give_back(node, phases.get(name, CheckPhase.UNKNOWN))
                if patch is not None:
                    await self._requests.patch_node(node, patch)

    def _record_start(self, run: Run, what: str) -> None:
        reason = f"{_subject(run)}{what}"
        kinds = ", ".join(kind.value for kind in run.spec.kinds)
        for node in self._known(run.spec.nodes):
            text = f"{run.name}: {kinds}. {run.spec.reason}".rstrip(". ")
            self._recorder.record(node, "Normal", reason, text)

    def _record_end(self, run: Run, conclusion: Conclusion) -> None:
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

    def _log(self, run: Run, results: Sequence[CheckResult]) -> None:
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

    def _log_groups(self, run: Run) -> dict[str, str]:
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


def _subject(run: Run) -> str:
    return "DeepHealthCheck" if run.is_deep else "HealthCheck"


def _fault_text(check_result: CheckResult) -> str:
    amount = (
        ""
        if check_result.measured is None
        else f" {check_result.measured:g} {check_result.unit}".rstrip()
    )
    least = "" if check_result.expected is None else f", expected {check_result.expected:g}"
    return f"{check_result.test}{amount}{least}: {check_result.message}"
