"""Driver of one job's machine: feeds it with events and carries out its orders.

Orders to agents are sent at once. Requests to the API server run concurrently, each order once at a
time: the machine repeats it while it matters.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import aiohttp
from lightkube.resources.core_v1 import Pod

from unbroken.agent_http.client import Always, LinkResources, Permit, Turns
from unbroken.agent_http.identity import Proofs
from unbroken.core.job.events import (
    AgentReported,
    AskAgent,
    CreatePod,
    DeleteIncident,
    DeleteJob,
    DeletePod,
    EvidenceReceived,
    FenceNode,
    FenceProven,
    IncidentSeen,
    JobEvent,
    JobMachine,
    JobSeen,
    LedgerWritten,
    NodeGone,
    NodeName,
    NodeSeen,
    NodeView,
    PodGone,
    PodHeld,
    PodName,
    PodPhase,
    PodRefused,
    PodSeen,
    PodUid,
    PodView,
    ProveFence,
    RecordEvent,
    StartWorkers,
    StopWorkers,
    WriteIncident,
    WriteLedger,
    WriteStatus,
)
from unbroken.core.job.kueue import Admission
from unbroken.core.job.obstacles import NOT_PROVEN
from unbroken.core.keys import job_key, job_secret_name
from unbroken.core.tick import Tick
from unbroken.errors import SpecError, UnbrokenError
from unbroken.kube.client import KubeClient
from unbroken.kube.clock import pause
from unbroken.kube.errors import ApiRefusal, Conflict
from unbroken.kube.events import EventRecorder
from unbroken.log_lines import Log
from unbroken.observe.job_metrics import JobName
from unbroken.observe.program_metrics import JobHealth
from unbroken.operator.fences import Fences
from unbroken.operator.kueue.objects import place_pod
from unbroken.runtime.drive import Inbox
from unbroken.spec.job.incident import Incident
from unbroken.spec.job.types import Condition, JobSpec, JobStatus, Switch
from unbroken.spec.keys import ConditionType
from unbroken.wire.agent import AgentReport

from .links import AgentLinks, AgentMemory, StockAgents, StockHolders
from .pods import AgentToInject, JobIdentity, build_pod
from .views import AgentPlace, ParsedJobs, agent_place, newest_warning, pod_view
from .writer import JobRequests, JobWriter

log = Log(__name__)

FINAL = frozenset({400, 422})
"""Status codes of an object that no retry can make acceptable."""
ORDERS_OF_JOB_MAX = 16
"""Orders of one job that are under way at a time: a job of thousands of pods leaves most of the
operator's slots to others."""
TOGETHER_MAX = 200
"""Reports that are taken at once: a few milliseconds of work."""
EVENTS_AFTER_SECONDS = 3.0
"""Seconds after which the events of a pod that has a node, and does not run, are read."""
EVENTS_SECONDS = 15.0
"""Seconds from one reading of a pod's events to the next."""
SECRET_SECONDS = 30.0
"""Seconds that the Secret of a job's key is assumed to exist after it was made."""
GUARDED = frozenset({ConditionType.RUNNING.value, ConditionType.FAULTED.value})
"""Conditions of a job whose pods may not be evicted."""
REPLACED = "AgentKeyUnknown"
"""Reason of the event about pods whose key this operator does not know."""
UNPROVEN_AGENT = "AgentServedWithoutProof"
"""Reason of the event about agents that offer no proof and are served."""
UNPROVEN_TEXT = (
    "the agents offer no proof of the job's key, as HyperPod's own agent does, and are served "
    "without one: everybody who can reach their ports can command them"
)

Order = CreatePod | DeletePod | FenceNode | ProveFence | DeleteJob
Told = WriteStatus | RecordEvent | WriteIncident | WriteLedger | DeleteIncident
Commanded = StartWorkers | StopWorkers | AskAgent


@dataclass(frozen=True, slots=True)
class JobResources:
    """Resources that all jobs of one operator share."""

    client: KubeClient
    recorder: EventRecorder
    session: aiohttp.ClientSession
    clock: Callable[[], float]
    """Seconds since the epoch that never go back."""
    master: bytes = field(repr=False)
    """The operator's master key, from which the key of each job is derived."""
    slots: asyncio.Semaphore
    """Orders to the API server that are under way at a time, of all jobs together."""
    permit: Permit = field(default_factory=Always)
    """Asked before a job's events are evaluated, and before each command to an agent."""
    turns: Turns = field(default_factory=Turns)
    """Turns for connecting to agents, of all jobs together."""
    stock_agents: StockHolders = field(default_factory=StockHolders)
    """The pod that each of HyperPod's own agents serves, of all jobs."""
    parsed: ParsedJobs = field(default_factory=ParsedJobs)
    """The existing jobs, parsed."""
    is_proof_required: bool = False
    """Refuse agents that offer no proof of their job's key, as HyperPod's own does."""
    dead_seconds: float = 0.0
    """Seconds of silence after which the machine of a node is known to be off; 0: it never is."""
    agent: AgentToInject | None = None
    """The agent for jobs that request an injected one; None: such jobs are refused."""
    incident_ended: Callable[[JobIdentity, Incident], None] = lambda job, incident: None
    """Called with each incident that began while this operator ran its job, once or more."""


class JobRunner:
    """Runs one job. Start `run` in a task of its own, and pass events to `receive`."""

    def __init__(self, shared: JobResources, job: JobIdentity, machine: JobMachine) -> None:
        self.job = job
        self.title = f"{job.namespace}/{job.name}"
        self._shared = shared
        self._machine = machine
        self._requests = JobRequests(shared.client, job)
        self._writer = JobWriter(self._requests, shared.recorder, job)
        self._fences = Fences(shared.client, shared.recorder, shared.dead_seconds)
        self._inbox: Inbox[JobEvent] = Inbox(machine.deadline, shared.clock)
        self._received = self._taken = 0
        """Number of events so far, and of those that the machine has taken."""
        self._tasks = asyncio.TaskGroup()
        self._under_way: set[Hashable] = set()
        self._slots = asyncio.Semaphore(ORDERS_OF_JOB_MAX)
        self._places: dict[PodUid, AgentPlace] = {}
        self._gone: set[PodUid] = set()
        self._unusable: set[NodeName] = set()
        self._topology_keys: set[str] = set()
        """Keys of the topology labels that any node has had."""
        self._seen: JobSeen | None = None
        self._found: set[int] = set()
        """Numbers of the incidents that were read from the API, where users may edit them."""
        self._conditions: tuple[Condition, ...] = ()
        self._key: bytes | None = None
        self._secret: str | None = None
        """Name of the Secret with the key; both None: the job has no key."""
        if job.has_key:
            self._key = job_key(shared.master, job.uid)
            self._secret = job_secret_name(shared.master, job.name, job.uid)
        self._is_guarded: bool | None = None
        """True if a disruption budget is to be there; None: not known yet."""
        """True if the job's pods may not be evicted."""
        self._making = asyncio.Lock()
        self._made_at: float | None = None
        """Time at which the Secret was last made, or found to exist."""
        self._mounting: dict[PodUid, float] = {}
        """Pods on a node that do not run yet, with the time at which their events are to be read.

        The kubelet may wait for a volume, which only an event reports.
        """
        self._is_mounting = asyncio.Event()
        """Set while `_mounting` has a pod: a job whose pods all run never wakes up."""
        self._links: AgentLinks | None = None
        self._memory = AgentMemory(lambda: self._seen.spec if self._seen else None)

    # --- input

    def receive(self, event: JobEvent) -> None:
        """Take an event."""
        if isinstance(event, JobSeen):
            # The ledger is written by this operator only: the version found at the start counts,
            # and an echo is no news.
            event = replace(event, ledger=self._seen.ledger) if self._seen else event
            if event == self._seen:
                return
            self._seen = event
            self._guard(self._machine.status)
        if isinstance(event, IncidentSeen):
            self._found.add(event.incident.number)
        self._received += 1
        self._inbox.put_nowait(event)

    def pod_changed(self, pod: Pod, *, is_gone: bool = False) -> None:
        """Take a pod of the job in its present or last state."""
        view = pod_view(pod)
        if view is None or view.uid in self._gone:
            return
        if is_gone:
            self._pod_gone(view.name, view.uid)
        else:
            self._places[view.uid] = agent_place(pod)
            self.receive(PodSeen(view))

    def _pod_gone(self, name: PodName, uid: PodUid) -> None:
        # A watch may lag behind a deletion that is already known.
        if uid not in self._gone:
            self._gone.add(uid)
            self.receive(PodGone(name, uid))

    def health(self) -> JobHealth:
        """Return the operator's service of the job."""
        heard, wanted = (0, 0) if self._links is None else self._links.counts()
        name = JobName(self.job.namespace, self.job.name)
        return JobHealth(name, heard, wanted, self._inbox.qsize())

    def reports(self) -> dict[PodUid, AgentReport]:
        """Return the newest report of each agent that is connected."""
        return {} if self._links is None else self._links.reports()

    @property
    def is_done(self) -> bool:
        """True if the machine has taken all events, and none of its orders is under way."""
        return self._received == self._taken and not self._under_way

    def complain(self, reason: str, message: str) -> None:
        """Record a warning on the job."""
        self._writer.event(RecordEvent(reason, message, is_warning=True))

    # --- life

    async def run(self) -> None:
        """Live until cancelled."""
        async with self._tasks:
            self._tasks.create_task(self._writer.run())
            self._tasks.create_task(self._read_events())
            if self._key is not None:
                self._tasks.create_task(self._keep_secret())
            shared, permit = self._shared, self._shared.permit
            proofs = Proofs(is_required=shared.is_proof_required)
            resources = LinkResources(
                session=shared.session,
                permit=permit,
                turns=shared.turns,
                room=self._memory.room,
                heavy=self._memory.heavy,
                on_stranger=partial(self.complain, NOT_PROVEN),
                on_unproven=partial(self.complain, UNPROVEN_AGENT, UNPROVEN_TEXT),
            )
            stock = StockAgents(shared.stock_agents, self.job)
            links = AgentLinks(
                self._key, proofs, self.receive, self._tasks, self._memory, resources, stock
            )
            self._links = links
            async for event in self._inbox:
                events = self._with_others(event)
                if not permit.is_given():
                    await permit.given()
                    if isinstance(events[0], Tick):
                        continue  # Events of the meantime come first.
                await self._step(events, links)

    async def _make_secret(self) -> None:
        """Create the Secret with the job's key, unless that was done a moment ago."""
        if self._secret is None or self._key is None:
            return
        async with self._making:
            now = self._shared.clock()
            if self._made_at is None or now >= self._made_at + SECRET_SECONDS:
                await self._requests.create_secret(self._secret, self._key)
                self._made_at = now

    async def _keep_secret(self) -> None:
        """Make the Secret again if it is deleted while a kubelet waits for it."""
        while True:
            await self._is_mounting.wait()
            await pause(SECRET_SECONDS)
            try:
                if self._mounting:
                    await self._make_secret()
            except UnbrokenError as error:
                log.warning("secret not made", job=self.title, error=error)

    async def _read_events(self) -> None:
        """Read events of nodes about pods that they have not started: one pod at a time."""
        while True:
            while not self._mounting:  # The last pod may run before this task does.
                await self._is_mounting.wait()
            uid = min(self._mounting, key=self._mounting.__getitem__)
            early = self._mounting[uid] - self._shared.clock()
            if early > 0:
                await pause(early)
                continue
            self._mounting[uid] = self._shared.clock() + EVENTS_SECONDS
            await self._read_events_of(uid)
            await pause(EVENTS_AFTER_SECONDS)

    async def _read_events_of(self, uid: PodUid) -> None:
        try:
            result = newest_warning(await self._requests.warnings(uid))
        except UnbrokenError as error:
            log.warning("events of a pod not read", job=self.title, error=error)
        else:
            if result is not None:
                self.receive(PodHeld(uid, *result))

    def _mounts(self, uid: PodUid) -> None:
        """Watch a pod that has a node, until it runs."""
        self._mounting.setdefault(uid, self._shared.clock() + EVENTS_AFTER_SECONDS)
        self._is_mounting.set()

    def _mounted(self, uid: PodUid) -> None:
        """Stop watching a pod that runs, or is gone."""
        self._mounting.pop(uid, None)
        if not self._mounting:
            self._is_mounting.clear()

    def _with_others(self, first: JobEvent) -> list[JobEvent]:
        """Return the event with those behind it: reports, and the event after these."""
        events = [first]
        while isinstance(events[-1], AgentReported) and len(events) < TOGETHER_MAX:
            if self._inbox.empty():
                break
            events.append(self._inbox.get_nowait())
        return events

    async def _step(self, events: Sequence[JobEvent], links: AgentLinks) -> None:
        match events[-1]:
            case PodSeen(view):
                self._pod_seen(view, links)
            case PodGone(_, uid):
                self._mounted(uid)
                links.drop(uid)
            case NodeSeen(node):
                self._judge(node)
            case NodeGone(name):
                self._unusable.discard(name)
            case _:
                pass
        effects = self._machine.steps(events, self._shared.clock())
        self._note_taken(events)
        commands = [e for e in effects if isinstance(e, Commanded)]
        for command in commands:
            self._command(command, links)
        if commands:
            # They are sent before anything is written, and before the next report is evaluated.
            await pause(0)
        has_written = False
        begun = list[Order]()
        for effect in effects:
            has_written |= isinstance(effect, WriteStatus)
            if isinstance(effect, Order):
                begun += self._order(effect, is_after_write=has_written)
            elif not isinstance(effect, Commanded):
                self._record(effect)
        self._log_orders(begun)

    def _pod_seen(self, pod: PodView, links: AgentLinks) -> None:
        is_mounting = pod.phase is PodPhase.PENDING and pod.node is not None
        if is_mounting:
            self._mounts(pod.uid)
        else:
            self._mounted(pod.uid)
        place = self._places[pod.uid]
        if place.secret == self._secret:
            if self._seen is not None:
                links.found(self._seen.ledger)
            links.follow(pod, place)
        elif not pod.is_deleting and pod.phase not in (PodPhase.SUCCEEDED, PodPhase.FAILED):
            # No operator can command its agent, and an agent out of reach must not stay.
            why = "its agent has another key than this operator: an older version, or another"
            self.complain(REPLACED, f"pod {pod.name} is replaced: {why} operator key, made it")
            order = DeletePod(pod.name, pod.uid, REPLACED)
            self._log_orders(self._order(order, is_after_write=False))

    def _note_taken(self, events: Sequence[JobEvent]) -> None:
        for event in events:
            self._taken += not isinstance(event, Tick)
            if isinstance(event, AgentReported | EvidenceReceived):
                self._memory.taken()

    def _judge(self, node: NodeView) -> None:
        self._topology_keys.update(node.topology_keys)
        if node.is_usable:
            self._unusable.discard(node.name)
        else:
            self._unusable.add(node.name)

    # --- effects

    def _command(self, order: Commanded, links: AgentLinks) -> None:
        message = order.request if isinstance(order, AskAgent) else order.command
        is_sent = links.send(order.pod, message)
        log.debug(
            "command sent" if is_sent else "command not sent",
            job=self.title,
            pod=order.pod,
            command=message,
        )

    def _record(self, effect: Told) -> None:
        match effect:
            case WriteStatus(status):
                self._log_status(status)
                self._guard(status)
                self._writer.status(status)
            case RecordEvent(reason, message):
                log.info("event recorded", job=self.title, event=reason, message=message)
                self._writer.event(effect)
            case WriteIncident(incident):
                self._writer.incident(incident)
                if incident.number not in self._found:
                    self._shared.incident_ended(self.job, incident)
            case WriteLedger(ledger, is_awaited):
                written = partial(self.receive, LedgerWritten(ledger))
                self._writer.ledger(ledger, written if is_awaited else None)
            case DeleteIncident(number):
                self._writer.forget(number)

    def _guard(self, status: JobStatus) -> None:
        """Let no pod be evicted while the job trains or recovers; a move is made instead.

        A new operator leaves jobs alone that do not train: their budgets were deleted.
        """
        true_types = {
            condition.type for condition in status.conditions if condition.status == "True"
        }
        is_on = self._seen is not None and self._seen.options.planned_moves is Switch.ON
        is_live = not true_types.isdisjoint(GUARDED)
        is_guarded = is_on and is_live
        if is_guarded != (self._is_guarded if is_live else bool(self._is_guarded)):
            self._writer.guard(is_guarded)
        self._is_guarded = is_guarded

    def _order(self, effect: Order, *, is_after_write: bool) -> list[Order]:
        """Carry out an order to the API server, once the status before it is stored.

        Return the order; nothing if the same is in progress.
        """
        key: Hashable
        match effect:
            case CreatePod(name):
                key, work = ("create", name), self._create(effect)
            case DeletePod(_, uid, _, force):
                key, work = ("delete", uid, force), self._delete(effect)
            case FenceNode(node):
                key, work = ("fence", node), self._fence(effect)
            case ProveFence(_, pod):
                key, work = ("prove", pod), self._prove(effect)
            case DeleteJob():
                key, work = "delete", self._requests.delete_job()
        return [effect] if self._begin(key, work, is_after_write) else []

    def _log_orders(self, begun: Sequence[Order]) -> None:
        """Log the orders of one decision: one line for all pods of a reason, which may be many."""
        created: dict[tuple[NodeName, ...], list[str]] = {}
        deleted: dict[tuple[str, bool], list[str]] = {}
        for order in begun:
            match order:
                case CreatePod(name, _, _, avoid):
                    created.setdefault(avoid, []).append(name)
                case DeletePod(name, _, reason, force):
                    deleted.setdefault((reason, force), []).append(name)
                case ProveFence(node, pod):
                    log.info("prove fence", job=self.title, node=node, pod=pod)
                case DeleteJob(reason):
                    log.info("delete job", job=self.title, reason=reason)
                case FenceNode():
                    pass  # The node's own controller logs it.
        for nodes, pods in created.items():
            log.info("create pods", job=self.title, count=len(pods), pod=pods, avoid=nodes or None)
        for (reason, force), pods in deleted.items():
            log.info(
                "delete pods",
                job=self.title,
                count=len(pods),
                pod=pods,
                force=force,
                reason=reason,
            )

    def _begin(self, key: Hashable, work: Coroutine[Any, Any, None], is_after_write: bool) -> bool:
        """Carry out an order concurrently with others, unless the same is in progress."""
        if key in self._under_way:
            work.close()
            return False
        self._under_way.add(key)
        self._tasks.create_task(self._finish(key, work, is_after_write))
        return True

    async def _finish(
        self, key: Hashable, work: Coroutine[Any, Any, None], is_after_write: bool
    ) -> None:
        try:
            if is_after_write:
                await self._writer.status_stored()
            async with self._slots, self._shared.slots:
                await work
        except UnbrokenError as error:
            # The machine orders it again while it matters.
            log.warning("order failed", job=self.title, order=key, error=error)
        finally:
            work.close()  # it has not begun, if this task was ended while it waited
            self._under_way.discard(key)

    async def _delete(self, order: DeletePod) -> None:
        if not await self._requests.delete_pod(order):
            self._pod_gone(order.name, order.uid)

    async def _fence(self, order: FenceNode) -> None:
        if await self._fences.ask(order.node, order.pod, order.reason, self._writer.about):
            self.receive(FenceProven(order.pod))

    async def _prove(self, order: ProveFence) -> None:
        if await self._requests.is_fenced(order.node):
            self.receive(FenceProven(order.pod))

    async def _create(self, order: CreatePod) -> None:
        try:
            await self._make_secret()
            agent = self._shared.agent
            body = build_pod(
                self.job,
                self._spec(),
                order,
                self._secret,
                self._unusable,
                agent,
                self._topology_keys,
            )
            gate = self._seen.gate if self._seen else None
            if isinstance(gate, Admission):
                body = place_pod(body, gate, order.replica_spec, order.index)
            made = await self._requests.create_pod(body)
        except SpecError as error:
            self.receive(PodRefused(order.name, str(error), True))
        except ApiRefusal as error:
            if isinstance(error, Conflict) and await self._is_there(order):
                return
            log.warning("pod refused", job=self.title, pod=order.name, error=error)
            self.receive(PodRefused(order.name, str(error), error.code in FINAL))
        else:
            self._first_seen(made)

    async def _is_there(self, order: CreatePod) -> bool:
        """True if the pod of this name is the job's, so that nothing is left to do."""
        pod = await self._requests.pod(order.name)
        owners = (pod.metadata.ownerReferences if pod and pod.metadata else None) or ()
        if pod is None or not any(owner.uid == self.job.uid for owner in owners):
            return False
        self._first_seen(pod)
        return True

    def _first_seen(self, pod: Pod) -> None:
        # The watch may have reported more of it by now: only an unknown pod is news.
        uid = pod.metadata.uid if pod.metadata else None
        if uid and PodUid(uid) not in self._places:
            self.pod_changed(pod)

    def _spec(self) -> JobSpec:
        assert self._seen is not None
        return self._seen.spec

    def _log_status(self, status: JobStatus) -> None:
        """Log one line for each condition that has changed."""
        before = {
            (condition.type, condition.status, condition.reason) for condition in self._conditions
        }
        self._conditions = status.conditions
        for condition in status.conditions:
            if (condition.type, condition.status, condition.reason) not in before:
                log.info(
                    "condition changed",
                    job=self.title,
                    attempt=status.restart_count,
                    condition=condition.type,
                    status=condition.status,
                    reason=condition.reason,
                    message=condition.message,
                )
