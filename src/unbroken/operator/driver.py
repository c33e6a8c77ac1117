"""The operator program: clocks, keys, sockets, and the election of one among several."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field, replace

from prometheus_client import CollectorRegistry

from unbroken.agent_http.sessions import agent_session
from unbroken.kube.client import KubeClient
from unbroken.kube.clock import steady_clock, wall
from unbroken.kube.events import EventRecorder
from unbroken.kube.informer import Informers
from unbroken.kube.observed import observing
from unbroken.log_lines import Log
from unbroken.observe.resumed_metrics import ResumedMetrics
from unbroken.observe.traces import Send, sending
from unbroken.operator.jobs.operator import JobRunners, OperatorInformers
from unbroken.operator.jobs.runner import JobResources
from unbroken.operator.nodes.checks import Checker
from unbroken.operator.nodes.checks_pods import CheckerOptions
from unbroken.operator.nodes.repair import NodeRepair, RepairOptions
from unbroken.operator.resume.controller import run_auto_resume
from unbroken.operator.resume.ray_controller import run_ray_resume
from unbroken.spec.auto_resume import DEFAULT_RETRIES
from unbroken.spec.job_kinds import JobKind

from . import definitions
from .clusters import Clusters
from .election import Election, LeaderTerms, Mandate, identity
from .jobs.pods import AgentToInject
from .kinds import NodeRecordObject
from .nodes import repair as node_repair
from .notifications import Notifier, NotifyOptions
from .parts import PARTS, PartName
from .reports import ReportsOptions, ReportSource, serving_reports
from .resume.jobs import ResumeOptions
from .resume.ray_dashboard import Tokens, no_token
from .telemetry import IncidentTraces, MetricsPlace, OperatorMetrics, watch_jobs, watch_nodes
from .trainjobs import run_train_jobs

log = Log(__name__)

COMPONENT = "hyperpod-pytorch-job-controller"
"""Reporter of the events of jobs (as upstream's)."""
ORDERS_MAX = 64
"""Orders of all jobs that are under way at a time; `runner.ORDERS_OF_JOB_MAX` bounds one job's."""


@dataclass(frozen=True, slots=True)
class OperatorOptions:
    """Options of an operator."""

    namespace: str | None = None
    """Manage the jobs of this namespace only; None: all."""
    terms: LeaderTerms = field(default_factory=LeaderTerms)
    checks: CheckerOptions = field(default_factory=CheckerOptions)
    repair: RepairOptions = field(default_factory=RepairOptions)
    metrics: MetricsPlace | None = None
    """Address of the metrics; None: not served, or served by the caller."""
    is_proof_required: bool = False
    """The same as `JobResources.is_proof_required`."""
    agent: AgentToInject | None = None
    """The same as `JobResources.agent`."""
    resume_retries: int = DEFAULT_RETRIES
    """Restarts of a job of another kind without annotations; 0: it is not resumed."""
    dead_seconds: float = 0.0
    """Seconds of silence after which the machine of a node is known to be off; 0: it never is."""
    without: frozenset[PartName] = frozenset()
    """Parts that another program does."""
    notify: NotifyOptions | None = None
    """Webhook of notifications; None: there is none."""
    reports: ReportsOptions | None = None
    """Server of the reports of agents for the live page; None: there is none."""
    ray_tokens: Tokens = field(default=no_token, repr=False)
    """Tokens that Ray's dashboards ask for."""
    key: bytes = field(kw_only=True, repr=False)
    """The master key (`core/keys`), the same for all operators of a cluster."""

    def has(self, part: PartName) -> bool:
        """True if this operator does a part."""
        is_possible = self.namespace is None or not PARTS[part].is_clusterwide
        return is_possible and part not in self.without

    def resumed(self) -> Iterator[JobKind]:
        """Yield the kinds of jobs whose pods all train in step that this operator resumes."""
        for name, part in PARTS.items():
            if name is not PartName.RAY and self.has(name):
                yield from part.resumes


async def run_operator(
    client: KubeClient,
    informers: Informers | None,
    options: OperatorOptions,
    metrics: OperatorMetrics | None = None,
    reports: ReportSource | None = None,
) -> None:
    """Install the definitions and run the operator until cancelled, whenever it leads.

    `informers`: shared ones, which the caller runs; None: of its own. `metrics`: those of the
    caller, who observes what runs; None: of its own. `reports`: gives the caller the reports of
    agents; None: they are only served.
    """
    if metrics is None:
        with observing() as result:
            await run_operator(client, informers, options, OperatorMetrics(result), reports)
        return
    has_definitions = options.has(PartName.DEFINITIONS)
    await (definitions.install if has_definitions else definitions.served)(client)
    election, source = Election(client, options.terms, identity()), reports or ReportSource()

    async def lead(mandate: Mandate) -> None:
        with metrics.leading() as registry:
            telemetry = _Telemetry(metrics, registry, send, source)
            await _lead(client, informers, options, telemetry, mandate)

    async with AsyncExitStack() as stack:
        await stack.enter_async_context(metrics.serving(options.metrics))
        send = await stack.enter_async_context(sending(os.environ))
        if options.reports is not None:
            server = serving_reports(client, source, options.reports)
            log.info("reports are served", address=await stack.enter_async_context(server))
        await election.lead(lead)


@dataclass(frozen=True, slots=True)
class _Telemetry:
    """Outlets for metrics, traces and reports of agents during one term of leadership."""

    metrics: OperatorMetrics
    registry: CollectorRegistry
    send: Send | None
    """Sends traces; None: traces are off."""
    reports: ReportSource
    """Gives the reports of agents to the live page."""

    @contextmanager
    def leading(self, operator: JobRunners, mandate: Mandate) -> Iterator[None]:
        """Show the jobs of this operator for the time of the block."""
        self.metrics.count(operator)
        with self.reports.leading(operator, mandate):
            yield


async def _lead(
    client: KubeClient,
    informers: Informers | None,
    options: OperatorOptions,
    telemetry: _Telemetry,
    mandate: Mandate,
) -> None:
    namespace, repair = options.namespace, None
    client = client.guarded(mandate.is_given)
    async with asyncio.TaskGroup() as tasks:
        if informers is None:
            watches = OperatorInformers.own(client, namespace)
            for informer in watches.all():
                tasks.create_task(informer.run())
        else:
            watches = OperatorInformers.shared(informers)
        watch_jobs(watches, telemetry.registry, wall())
        if telemetry.send is not None:
            tasks.create_task(IncidentTraces(watches.incidents, telemetry.send).run())
        recorder = EventRecorder(client, COMPONENT)
        tasks.create_task(recorder.run())
        resumed = ResumedMetrics(telemetry.registry, wall())
        for work in _resuming(client, informers, recorder, options, resumed):
            tasks.create_task(work)
        if options.has(PartName.TRAINER):
            tasks.create_task(run_train_jobs(client, recorder, watches.jobs, namespace))
        if options.has(PartName.NODES):
            if informers is None:
                informers = Informers(client)
                tasks.create_task(informers.run())
            watch_nodes(informers, telemetry.registry, wall())
            tasks.create_task(Checker(client, informers, recorder, options.checks).run())
            repairs = EventRecorder(client, node_repair.COMPONENT)
            tasks.create_task(repairs.run())
            repair = NodeRepair(client, informers, repairs, options.repair)
            tasks.create_task(repair.run())
            tasks.create_task(Clusters(client, informers).run())
        if options.notify is not None:
            records = informers.of(NodeRecordObject) if informers and repair else None
            notifier = Notifier(client, watches.incidents, records, options.notify)
            tasks.create_task(notifier.run(mandate.is_given))
        async with agent_session() as session:
            around = JobResources(
                client=client,
                recorder=recorder,
                session=session,
                clock=steady_clock(),
                master=options.key,
                slots=asyncio.Semaphore(ORDERS_MAX),
                permit=mandate,
                is_proof_required=options.is_proof_required,
                dead_seconds=options.dead_seconds,
                agent=options.agent,
            )
            if repair is not None:
                around = replace(around, incident_ended=repair.incident_ended)
            has_queues = options.has(PartName.QUEUES)
            operator = JobRunners(around, watches, namespace=namespace, has_queues=has_queues)
            with telemetry.leading(operator, mandate):
                await operator.run()


def _resuming(
    client: KubeClient,
    informers: Informers | None,
    recorder: EventRecorder,
    options: OperatorOptions,
    metrics: ResumedMetrics,
) -> Iterator[Coroutine[None, None, None]]:
    """Yield the programs that resume jobs of other kinds."""
    resume = ResumeOptions(options.namespace, options.resume_retries, options.dead_seconds)
    on_request = replace(resume, retries=0)
    for kind in options.resumed():
        wanted = resume if kind.is_resumed_by_default else on_request
        yield run_auto_resume(client, informers, recorder, kind, wanted, metrics)
    if options.has(PartName.RAY):
        yield run_ray_resume(client, informers, recorder, resume, metrics, options.ray_tokens)
