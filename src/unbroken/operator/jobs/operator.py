"""All jobs of a cluster: one runner each, which gets events of its own pods and of every node."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from lightkube.resources.core_v1 import Node, Pod

from unbroken.core.job.events import (
    IncidentSeen,
    JobSeen,
    NodeGone,
    NodeName,
    NodeSeen,
    NodeView,
    PodUid,
    Synced,
)
from unbroken.core.job.kueue import Gate
from unbroken.core.job.machine import Job
from unbroken.core.job.record.conditions import advance
from unbroken.core.logs.rule_config import rule_warnings
from unbroken.kube.backoff import Backoff, persist
from unbroken.kube.cache import Key, changed, key_of
from unbroken.kube.client import KubeClient
from unbroken.kube.clock import entropy, pause
from unbroken.kube.errors import ApiRefusal
from unbroken.kube.informer import Informer, Informers, all_synced
from unbroken.kube.refusals import RefusedObject
from unbroken.log_lines import Log
from unbroken.observe.program_metrics import JobHealth
from unbroken.operator.job_pods import is_owned, job_of
from unbroken.operator.kinds import IncidentObject, JobObject
from unbroken.operator.kueue.queues import Queues
from unbroken.spec.job.codec import incident_from, job_status_from
from unbroken.spec.job.ledger import read_ledger
from unbroken.spec.job.parse import Parsed
from unbroken.spec.job.types import JobStatus
from unbroken.spec.job_kinds import HYPERPOD_JOB
from unbroken.spec.keys import JOB_LABEL, LEDGER, ConditionType
from unbroken.spec.problems import Problem
from unbroken.wire.agent import AgentReport

from .pods import JobIdentity, job_identity
from .runner import JobResources, JobRunner
from .views import node_view
from .writer import JobRequests

log = Log(__name__)

INVALID = "InvalidSpec"
"""Reason of the condition of a job that cannot be understood."""
PROBLEMS_TOLD, REFUSAL_CHARACTERS = 40, 3900
"""Bounds of the text of a refusal, in problems and in characters: a job may have thousands of
problems."""
CRASHES = Backoff(first=1.0, limit=60.0)


@dataclass(frozen=True, slots=True)
class OperatorInformers:
    """Copies of all objects that the operator watches."""

    jobs: Informer[JobObject]
    pods: Informer[Pod]
    nodes: Informer[Node]
    incidents: Informer[IncidentObject]

    @classmethod
    def shared(cls, informers: Informers) -> OperatorInformers:
        """Return informers that the programs of one process share, and that the caller runs."""
        of = informers.of
        return cls(of(JobObject), of(Pod), of(Node), of(IncidentObject))

    @classmethod
    def own(cls, client: KubeClient, namespace: str | None) -> OperatorInformers:
        """Return new ones, of the jobs' pods only; `namespace` None: all."""
        return cls(
            Informer(client, JobObject, namespace=namespace),
            Informer(client, Pod, namespace=namespace, labels=JOB_LABEL),
            Informer(client, Node),
            Informer(client, IncidentObject, namespace=namespace),
        )

    def all(self) -> Iterator[Informer[Any]]:
        """Return each of them."""
        yield from (self.jobs, self.pods, self.nodes, self.incidents)

    async def synced(self) -> None:
        """Return once all of them are complete."""
        await all_synced(*self.all())


class JobRunners:
    """Keeps a runner for each job; `run` does everything."""

    def __init__(
        self,
        shared: JobResources,
        watches: OperatorInformers,
        *,
        namespace: str | None = None,
        has_queues: bool = True,
    ) -> None:
        """`namespace` None: all.  `has_queues`: jobs wait in Kueue's queues where there is one."""
        self._shared = shared
        self._watches = watches
        self._has_queues = has_queues
        self._queues = Queues(
            shared,
            watches.jobs,
            watches.pods,
            self._on_gate,
            self._is_idle,
            namespace,
        )
        self._machines: dict[Key, Job] = {}
        self._runners: dict[Key, JobRunner] = {}
        self._tasks: dict[Key, asyncio.Task[None]] = {}
        self._group = asyncio.TaskGroup()
        self._nodes: dict[NodeName, NodeView] = {}
        self._refused: dict[Key, tuple[Problem, ...]] = {}

    async def run(self) -> None:
        """Run the jobs until cancelled, which leaves their pods as they are."""
        watches = self._watches
        await watches.synced()
        async with self._group:
            self._group.create_task(self._queues.run(is_on=self._has_queues))
            watches.nodes.subscribe(self._on_node)
            watches.pods.subscribe(self._on_pod)
            watches.jobs.on_refusal(self._on_unreadable)
            watches.jobs.subscribe_in_turn(self._on_job)
            log.info("operator runs", jobs=len(self._tasks), nodes=len(self._nodes))
            # A group without members would end.
            await asyncio.Event().wait()

    def health(self) -> Iterator[JobHealth]:
        """Return the operator's service of each job."""
        return (runner.health() for runner in self._runners.values())

    def reports(self, job: Key) -> dict[PodUid, AgentReport] | None:
        """Return the newest report of each connected agent of a job; None: there is no such job."""
        runner = self._runners.get(job)
        return None if runner is None else runner.reports()

    # --- events of the API

    def _on_node(self, old: Node | None, new: Node | None) -> None:
        if new is None:
            assert old is not None
            name = NodeName(key_of(old).name)
            self._nodes.pop(name, None)
            for runner in self._runners.values():
                runner.receive(NodeGone(name))
            return
        view = node_view(new)
        if self._nodes.get(view.name) == view:
            return
        self._nodes[view.name] = view
        for runner in self._runners.values():
            runner.receive(NodeSeen(view))

    def _on_pod(self, old: Pod | None, new: Pod | None) -> None:
        pod = changed(old, new)
        if new is None and pod.metadata is not None:
            self._shared.stock_agents.release(PodUid(pod.metadata.uid or ""))
        key = job_of(pod, HYPERPOD_JOB)
        runner = self._runners.get(key) if key is not None else None
        if runner is not None and is_owned(pod, runner.job.uid):
            runner.pod_changed(pod, is_gone=new is None)

    def _on_job(self, old: JobObject | None, new: JobObject | None) -> None:
        key = key_of(changed(old, new))
        if new is None:
            self._shared.parsed.forget(changed(old, new))
            self._refused.pop(key, None)
            self._end(key)
            return
        runner = self._runners.get(key)
        if runner is not None and runner.job.uid != new["metadata"]["uid"]:
            self._end(key)
            runner = None
        before = None
        if old is not None and _generation(old) != _generation(new):
            before = self._shared.parsed.of(old)
        parsed = self._shared.parsed.of(new)
        if parsed.problems:
            self._refuse(key, new, parsed, runner)
            return
        self._refused.pop(key, None)
        if not self._queues.knows(new):
            return
        if runner is not None:
            runner.receive(_seen(new, parsed, self._queues.gate(new)))
            if before is not None:
                known = _warnings(before)
                _warn(runner, [warning for warning in _warnings(parsed) if warning not in known])
        elif key not in self._tasks:
            self._tasks[key] = self._group.create_task(self._keep(key), name=str(key))

    def _on_unreadable(self, refusal: RefusedObject) -> None:
        """Fail a job that cannot be decoded, with the reason; one that runs continues as it was."""
        key, text = refusal.head.key, f"the job cannot be read: {refusal.reason}"
        problems = (Problem(refusal.head.uid, text),)
        if refusal.is_gone:
            self._refused.pop(key, None)
            return
        if self._refused.get(key) == problems:
            return  # the event of this operator's own write
        self._refused[key] = problems
        runner = self._runners.get(key)
        if runner is not None:
            runner.complain(INVALID, f"the change is not taken: {text}")
        elif key.name and key.namespace and key not in self._tasks:
            identity = JobIdentity(key.namespace, key.name, refusal.head.uid, {})
            self._group.create_task(self._write_refusal(identity, JobStatus(), text))

    def _on_gate(self, key: Key) -> None:
        job = self._watches.jobs.get(key.name, key.namespace)
        if job is None:
            return
        try:
            self._on_job(job, job)
        except Exception:
            log.exception("decision of the queue not applied", job=key)

    def _is_idle(self, key: Key) -> bool:
        """True if no part of a job that may not run is left, or is about to exist."""
        runner, machine = self._runners.get(key), self._machines.get(key)
        if runner is None or machine is None:
            return key not in self._tasks
        return machine.is_idle and runner.is_done

    def _end(self, key: Key) -> None:
        self._runners.pop(key, None)
        task = self._tasks.pop(key, None)
        if task is not None:
            log.info("job is gone", job=key)
            task.cancel()

    # --- jobs

    async def _keep(self, key: Key) -> None:
        """Run a job; if its machine fails, run it again from the state in the API and the
        agents."""
        random, failures = entropy(), 0
        while True:
            job = self._watches.jobs.get(key.name, key.namespace)
            if job is None:
                return
            runner, began = None, self._shared.clock()
            try:
                runner = self._make(key, job)
                await runner.run()
            except Exception:
                is_old = self._shared.clock() - began > CRASHES.limit
                failures = 1 if is_old else failures + 1
                log.exception("machine of a job failed", job=key, failures=failures)
            finally:
                if runner is None or self._runners.get(key) is runner:
                    self._runners.pop(key, None)
                    self._machines.pop(key, None)
            await pause(CRASHES.delay(failures, random))

    def _make(self, key: Key, job: JobObject) -> JobRunner:
        """Make a runner that has all existing objects."""
        parsed = self._shared.parsed.of(job)
        status, problems = job_status_from(job.get("status"))
        for problem in problems:
            log.warning("problem in the status of a job", job=key, problem=problem)
        if any(condition.reason == INVALID for condition in status.conditions):
            # The spec is valid by now, so the job has yet to begin.
            status = JobStatus(other=status.other)
        machine = self._machines[key] = Job(key.name, status)
        runner = self._runners[key] = JobRunner(self._shared, job_identity(job), machine)
        annotations = job["metadata"].get("annotations") or {}
        ledger = read_ledger(str(annotations.get(LEDGER) or ""))
        runner.receive(replace(_seen(job, parsed, self._queues.gate(job)), ledger=ledger))
        for view in self._nodes.values():
            runner.receive(NodeSeen(view))
        for pod in self._watches.pods.items():
            if job_of(pod, HYPERPOD_JOB) == key and is_owned(pod, runner.job.uid):
                runner.pod_changed(pod)
        for item in self._watches.incidents.items():
            if is_owned(item, runner.job.uid):
                incident, _ = incident_from(item)
                runner.receive(IncidentSeen(incident))
        runner.receive(Synced())
        if not status.conditions:
            # For a job that has begun, this or an earlier operator has recorded it.
            _warn(runner, [*_warnings(parsed), *self._queues.warnings(job)])
        return runner

    def _refuse(self, key: Key, job: JobObject, parsed: Parsed, runner: JobRunner | None) -> None:
        """Report the problems once: in the status, or as an event if the job is running."""
        if self._refused.get(key) == parsed.problems:
            return
        self._refused[key] = parsed.problems
        text = "; ".join(str(problem) for problem in parsed.problems[:PROBLEMS_TOLD])
        left = len(parsed.problems) - PROBLEMS_TOLD
        text = text[:REFUSAL_CHARACTERS] + (f"; and {left} more" if left > 0 else "")
        if self._shared.client.objects.may_log(key.namespace):
            log.warning("job refused", job=key, error=text)
        if runner is not None:
            runner.complain(INVALID, f"the change is not taken: {text}")
            return
        status, _ = job_status_from(job.get("status"))
        self._group.create_task(self._write_refusal(job_identity(job), status, text))

    async def _write_refusal(self, job: JobIdentity, status: JobStatus, text: str) -> None:
        now, key = self._shared.clock(), Key(job.namespace, job.name)
        created = advance(status.conditions, ConditionType.CREATED, "Created", "", now)
        failed = advance(created, ConditionType.FAILED, INVALID, text, now)
        if [(c.type, c.message) for c in failed] == [
            (c.type, c.message) for c in status.conditions
        ]:
            return
        wanted = JobStatus(conditions=failed, other=status.other)
        requests = JobRequests(self._shared.client, job)
        try:
            await persist("write a refusal", lambda: requests.write_status(wanted), job=key)
        except ApiRefusal as error:
            log.warning("refusal not written", job=key, error=error)
        except Exception:
            # This task is the program's own: it must not end because of one job's status.
            log.exception("refusal not written", job=key)


def _generation(job: JobObject) -> int | None:
    result: int | None = job["metadata"].get("generation")
    return result


def _warnings(parsed: Parsed) -> tuple[str, ...]:
    return () if parsed.problems else (*parsed.warnings, *rule_warnings(parsed.spec))


def _warn(runner: JobRunner, warnings: Iterable[str]) -> None:
    for warning in warnings:
        runner.complain("SpecWarning", warning)


def _seen(job: JobObject, parsed: Parsed, gate: Gate) -> JobSeen:
    is_deleting = bool(job["metadata"].get("deletionTimestamp"))
    return JobSeen(parsed.spec, parsed.options, is_deleting, gate=gate)
