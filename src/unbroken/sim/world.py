"""One simulated world: the machines under test, all around them, and what faults do to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from unbroken.core.agent.events import Settings
from unbroken.core.agent.machine import Workers
from unbroken.core.job import events as core
from unbroken.core.job.events import PodUid
from unbroken.core.job.machine import Job
from unbroken.sim.actors.agents import AWAKE_SECONDS, Agent, AgentResources, Leasing
from unbroken.sim.actors.agents import Machine as AgentMachine
from unbroken.sim.actors.cluster import Cluster, Local, Node
from unbroken.sim.actors.imports import Imports, Learner
from unbroken.sim.actors.links import Quality, Way
from unbroken.sim.actors.operators import Control, Operator
from unbroken.sim.actors.snapshots import Home, Snapshots
from unbroken.sim.actors.stock import StockWorkers
from unbroken.sim.actors.training import Gathering, Training, Worker
from unbroken.sim.actors.watches import Rhythm, Watches
from unbroken.sim.checkers.checkers import TERMINAL, Checkers, condition
from unbroken.sim.checkers.promises import Promises
from unbroken.sim.checkers.truth import UNREACHED, Fault, Truth
from unbroken.spec.job.types import FenceBy, JobOptions, JobStatus, Switch
from unbroken.wire.agent import PORT

from .draw import draw
from .scenario import ENDS_WAITING, Scenario
from .schedule import Schedule

KEEPER_LATE_SECONDS = 0.9
"""Seconds for a keeper to look and to kill, at most.

With the 0.5 s that it leaves to its agent this is 0.1 s less than the operator's margin.
"""


class World:
    """Everything, and the seed that decides it.

    The seed is that of all random numbers. `scenario` None: it is drawn for the seed, too.
    """

    def __init__(
        self,
        seed: int,
        tell: Callable[[str], None] | None = None,
        scenario: Scenario | None = None,
    ) -> None:
        self.scenario = scenario or draw(seed)
        shape = self.scenario
        self.schedule = Schedule(seed, tell)
        quality = replace(shape.quality)  # a copy that `heal` changes
        confused = shape.habits.are_confused or shape.is_stock or shape.skew_seconds
        self.truth = Truth(
            is_stock=shape.is_stock,
            is_clear=not (quality.loss or quality.late or confused),
            has_leases=bool(shape.lease_seconds),
        )
        self.cluster = Cluster(self.schedule, shape.manners, shape.nodes, self._launch)
        self.cluster.evicting = lambda node: self.note("evicted", node.locals.values())
        live: dict[int, Worker] = {}
        self.checkers = Checkers(self.schedule, self.truth, self.cluster, live, shape.spec)
        self.checkers.barriers.may_keep = shape.in_process is Switch.ON
        self.training = Training(self.schedule, shape.habits, self.checkers)
        self.training.live = live
        self.training.noted = self._worker_noted
        self.promises = Promises(self.schedule, self.truth, self.checkers, self.training, shape)
        self.watches = Watches(
            self.schedule, self.training, shape.rhythm or Rhythm(), self._publish
        )
        self.snapshots = self._snapshots(seed)
        self.imports = Imports(self.schedule, seed, self._reachable) if shape.is_warm else None
        self.training.begun = self._begun
        self.training.meets = self.meet
        self.surroundings = self._surroundings(quality)
        self.control = self._control(live)
        self.is_healed = False
        self._cuts: dict[PodUid, float] = {}
        buddy = shape.keeping.buddy if shape.keeping else Switch.ON
        options = JobOptions(
            in_process=shape.in_process,
            buddy=buddy,
            fence_by=FenceBy.LEASE if shape.lease_seconds else FenceBy.PROVIDER,
            lease_seconds=shape.lease_seconds,
        )
        seen = core.JobSeen(shape.spec, options)
        self.control.jobs.put("job", seen)
        self.operator = self._new_operator()

    def _surroundings(self, quality: Quality) -> AgentResources:
        """Make what all simulated agents share."""
        shape = self.scenario
        return AgentResources(
            schedule=self.schedule,
            training=self.training,
            quality=quality,
            nproc=shape.nproc,
            make=self._agent_machine,
            exited=self._exited,
            noted=self._noted,
            kill_seconds=shape.kill_seconds,
            stubborn=shape.stubborn,
            skew_seconds=shape.skew_seconds,
            watches=self.watches if shape.rhythm else None,
            members=shape.members,
            snapshots=self.snapshots,
            imports=self.imports,
            leasing=self._leasing() if shape.lease_seconds else None,
        )

    def _control(self, live: dict[int, Worker]) -> Control:
        """Make what all simulated operators share."""
        shape = self.scenario
        return Control(
            self.schedule,
            self.cluster,
            self.checkers,
            lambda status: Job("job", status),
            self.agent,
            self.way,
            lambda: bool(live),
            shape.lag,
            ambiguous=shape.ambiguous,
            busy_seconds=shape.busy_seconds,
        )

    @property
    def is_over(self) -> bool:
        """True if the API shows that the job has ended, or was ordered to delete it."""
        if self.truth.is_deleted or "job" not in self.control.jobs.objects:
            return True
        status = self.control.statuses.objects.get("job", JobStatus())
        return any(condition(status, kind) for kind in TERMINAL)

    # Effects of faults.

    def note(
        self,
        kind: str,
        locals_: Iterable[Local],
        node: Node | None = None,
        *,
        is_prompt: bool = False,
        is_anyones: bool = False,
        seconds: float | None = None,
    ) -> None:
        """Let the checkers know; `seconds` are those after which it passes by itself."""
        pods = list(locals_)
        self.schedule.probes[kind] += 1
        fault = Fault(
            at=self.schedule.now,
            kind=kind,
            uids=frozenset(local.uid for local in pods),
            pods=frozenset(local.name for local in pods),
            node=node.name if node else None,
            is_prompt=is_prompt,
            is_anyones=is_anyones,
            until=None if seconds is None else self.schedule.now + seconds,
            ends_pod=kind in ("pod_fail", "ends_waiting")
            or (kind == "agent_crash" and not self.cluster.manners.restarts_containers),
        )
        self.truth.faults.append(fault)
        self.promises.expect(fault)

    def agent(self, uid: PodUid) -> Agent | None:
        """The pod's agent, if an operator can reach it."""
        local = self.cluster.local(uid)
        agent = local.process if local is not None else None
        return agent if isinstance(agent, Agent) and self.way(uid) is Way.BOTH else None

    def way(self, uid: PodUid) -> Way:
        """Return the direction in which messages pass between an operator and the pod's agent."""
        local = self.cluster.local(uid)
        if local is None or not local.node.is_up or self._cuts.get(uid, 0.0) > self.schedule.now:
            return Way.NONE
        agent = local.process
        return local.node.way if isinstance(agent, Agent) and not agent.is_frozen else Way.NONE

    def cut_link(self, uid: PodUid, seconds: float) -> None:
        """Between operators and one agent."""
        self._cuts[uid] = max(self._cuts.get(uid, 0.0), self.schedule.now + seconds)
        self.operator.look(uid)
        self.schedule.after(seconds + 1e-6, lambda: self.operator.look(uid))

    @property
    def has_cuts(self) -> bool:
        """Something cannot be reached, or could not a moment ago."""
        now, machines = self.schedule.now, self.cluster.machines.values()
        return (
            any(until > now - 5.0 for until in self._cuts.values())
            or not all(node.is_up and node.way is Way.BOTH for node in machines)
            or any(node.is_deaf or node.is_unreached for node in machines)
            or any(node.is_repaired_at and node.is_repaired_at > now - 5.0 for node in machines)
        )

    def look_at(self, node: Node) -> None:
        """Its pods have come into, or gone out of, reach."""
        for uid in list(node.locals):
            self.operator.look(uid)

    def repair(self, node: Node) -> None:
        """Let a node be as before."""
        self.wake(node)
        if not node.is_up:
            self.cluster.repair(node)
            self.look_at(node)

    def set_suspended(self, *, is_suspended: bool) -> None:
        """As a user does."""
        job = self.control.jobs.objects.get("job")
        if job is None or job.spec.run_policy.suspend == is_suspended or self.is_over:
            return
        spec = job.spec
        policy = replace(spec.run_policy, suspend=is_suspended)
        self.control.jobs.put("job", replace(job, spec=replace(spec, run_policy=policy)))
        self.truth.wants_suspension = is_suspended
        if is_suspended:
            self.truth.is_suspended = True
            self.truth.suspended_at = self.schedule.now
            self.truth.is_undisturbed = False

    def pause(self, node: Node, seconds: float) -> None:
        """Stop a machine for a while."""
        self.note("node_pause", node.locals.values(), node, seconds=seconds)
        self.cluster.pause(node)
        for agent in _agents(node):
            agent.freeze()
        for worker in self._workers(node):
            self.truth.stalled.setdefault(worker.attempt, set()).add(worker.rank)
            self.training.pause(worker)
        self.look_at(node)
        self.schedule.after(seconds, self.wake, node)

    def wake(self, node: Node) -> None:
        """Let a paused machine resume.

        A clock that counts the pause shows at once that leases have run out. With one that does
        not, workers may live on for one lease."""
        if node.paused_at is None:
            return
        shape, schedule = self.scenario, self.schedule
        since, node.paused_at = node.paused_at, None
        lingers = AWAKE_SECONDS + KEEPER_LATE_SECONDS
        if not shape.counts_pauses:
            lingers += shape.lease_seconds * (1 + 2 * shape.drift) + 1.0
        node.excused_until = schedule.now + lingers
        for agent in _agents(node):
            agent.wake(schedule.now - since, counts=shape.counts_pauses)
        if node.has_power and not node.island:
            self.cluster.repair(node)
        self.look_at(node)
        schedule.after(lingers + 0.01, self._judge_woken, node)

    def _judge_woken(self, node: Node) -> None:
        """Check that workers which the paused machine ended late have ended, if nothing holds them
        in the kernel."""
        stuck = [one.uids for one in self.truth.faults if one.kind == "stuck_worker"]
        newest = max((worker.attempt for worker in self.training.live.values()), default=0)
        late = [w for w in self._workers(node) if w.attempt < newest and not w.is_lease_over]
        late = [w for w in late if not w.is_at_barrier and not any(w.pod in pods for pods in stuck)]
        rule = "workers of a machine that stood still outlive their lease"
        self.checkers.require(not late, rule, *late)

    def _workers(self, node: Node) -> list[Worker]:
        return [worker for worker in self.training.live.values() if worker.pod in node.locals]

    def thaw(self, agent: Agent) -> None:
        """Resume a frozen agent."""
        if not agent.local.node.is_paused:
            agent.thaw()
        self.operator.look(agent.local.uid)

    def end_quota(self) -> None:
        """The API takes pods again."""
        if not self.truth.is_forbidden:
            self.control.refuses = lambda: None

    def delete_job(self) -> None:
        """As a user does: the object is marked, and the collector removes what it owns."""
        job = self.control.jobs.objects.get("job")
        if job is None or self.is_over:
            return
        self.schedule.probes["job_delete"] += 1
        self.truth.is_deleted = True
        self.control.jobs.put("job", replace(job, is_deleting=True))
        self._collect()

    def _collect(self) -> None:
        """The garbage collector: what a deleted job owns goes, whenever it was made: an operator
        whose watch is broken may make pods for it long after."""
        for pod in list(self.cluster.pods.objects.values()):
            self.cluster.delete_pod(pod.name, pod.uid, force=False)
        self.schedule.after(5.0, self._collect)

    def resume(self) -> None:
        """The user wants the job to run again."""
        if self.cluster.is_away:
            self.schedule.after(1.0, self.resume)
        else:
            self.set_suspended(is_suspended=False)

    # Connections of the parts.

    def meet(self, place: Gathering) -> bool:
        """Return whether the workers of an attempt reach each other, and note it if they do not."""
        found = [self.cluster.local(worker.pod) for worker in place.members.values()]
        pods = [local for local in found if local is not None]
        apart = [one.node for one in pods if any(not one.node.receives(two.node) for two in pods)]
        unreached = [node for node in apart if node.is_unreached]
        if unreached:
            # Pods that come later wait for them as well, and may be taken for the one cut off.
            ranked = [self.cluster.local(uid) for uid in self.truth.rank_of]
            known = [local for local in ranked if local is not None]
            self.note(UNREACHED, known, unreached[0], is_anyones=True)
        return not unreached

    def _leasing(self) -> Leasing:
        """Return what agents need to hold leases."""
        return Leasing(
            drift=self.scenario.drift,
            kill_seconds=KEEPER_LATE_SECONDS,
            peer=self._peer,
            ran_out=self._ran_out,
            has_checks=self.scenario.checks_peers,
        )

    def _ran_out(self, agent: Agent) -> None:
        """Check that only unreachable agents, or agents with bad links, end by their lease."""
        quality = self.surroundings.quality
        is_lossy = quality.loss or quality.late or self.has_cuts or agent.is_frozen
        is_needless = not is_lossy and self._is_vouched_for(agent)
        self.checkers.require(not is_needless, "a lease runs out without need", agent.local)
        self.note("lease_over", [agent.local], is_prompt=True)

    def _peer(self, address: str) -> Agent | None:
        """Return the agent that listens there, wherever its node is."""
        agents = (
            local.process
            for node in self.cluster.machines.values()
            for local in node.locals.values()
            if f"{local.address}:{PORT}" == address
        )
        found = (one for one in agents if isinstance(one, Agent) and one.is_alive)
        return next(found, None)

    def _is_vouched_for(self, agent: Agent) -> bool:
        """Return whether all ranks of the agent's attempt run it, and reach each other.

        A suspended job uses the numbers of its attempts again: the address distinguishes them.
        """
        told = agent.told
        if told is None or not agent.local.node.is_up:
            return False
        peers = {
            process.told.rank
            for node in self.cluster.machines.values()
            if node.is_up
            for local in node.locals.values()
            if isinstance(process := local.process, Agent)
            if process.told is not None and process.vouches(told.attempt)
            if process.told.master_addr == told.master_addr
            if process.told.master_port == told.master_port
        }
        return peers >= set(range(told.nnodes))

    def _publish(self, worker: Worker) -> None:
        agent = self.agent_of(worker)
        if agent is not None:
            agent.watch(worker.attempt)

    def agent_of(self, worker: Worker) -> Agent | None:
        """The agent that has started it, if that lives."""
        local = self.cluster.local(worker.pod)
        agent = local.process if local else None
        return agent if isinstance(agent, Agent) and agent.id == worker.agent else None

    def _snapshots(self, seed: int) -> Snapshots | None:
        shape = self.scenario
        if shape.keeping is None:
            return None
        snapshots = Snapshots(
            self.schedule, self.training, shape.keeping, seed, self._homes, shape.nproc
        )
        self.checkers.snapshots = snapshots
        return snapshots

    def _homes(self) -> dict[str, Home]:
        """Living agents by address, of those that can be reached at all."""
        nodes = [node for node in self.cluster.machines.values() if node.is_up]
        return {
            local.address: Home(local.uid, node.name, local.process)
            for node in nodes
            for local in node.locals.values()
            if isinstance(local.process, Agent) and local.process.is_alive
        }

    def _reachable(self) -> dict[str, Learner]:
        return {
            f"{address}:{PORT}": home.agent
            for address, home in self._homes().items()
            if isinstance(home.agent, Agent)
        }

    def _begun(self, place: Gathering) -> None:
        if self.scenario.rhythm is not None:
            self.watches.begun(place)
        if self.snapshots is not None:
            self.snapshots.begun(place)
        if self.imports is not None:
            self.imports.trained(filter(None, map(self.agent_of, place.members.values())))

    def _agent_machine(self, agent_id: str) -> AgentMachine:
        settings = Settings(agent_id, self.scenario.nproc)
        if not self.scenario.is_stock:
            return Workers(settings)
        return StockWorkers(settings, self._waiting_life if self.scenario.has_waiting else None)

    def _waiting_life(self) -> float | None:
        """Draw how long workers live that wait for their rank; None: to the start."""
        self.schedule.probes["stock_waits"] += 1
        random = self.schedule.random
        return random.uniform(0.0, 4.0) if random.random() < ENDS_WAITING else None

    def _launch(self, local: Local) -> Agent:
        agent = Agent(self.surroundings, local)
        self.schedule.after(0.0, self._booted, agent)
        return agent

    def _booted(self, agent: Agent) -> None:
        agent.boot()
        self.operator.look(agent.local.uid)

    def _exited(self, local: Local, is_success: bool) -> None:
        self.cluster.exited(local, is_success=is_success)
        self.operator.look(local.uid)

    def _noted(self, kind: str, local: Local) -> None:
        self.note(kind, [local], is_prompt=True)

    def _worker_noted(self, kind: str, worker: Worker) -> None:
        local = self.cluster.local(worker.pod)
        self.note(kind, [local] if local else [], is_prompt=True)

    def _new_operator(self) -> Operator:
        operator = Operator(self.control)
        operator.on_crash = self._operator_crashed
        return operator

    def _operator_crashed(self) -> None:
        self.truth.is_undisturbed = self.truth.is_clear = False
        if not self.operator.is_idle:
            self.schedule.probes["lost_write"] += 1
        status = self.control.statuses.objects.get("job", JobStatus())
        self.checkers.operator_crashed(status, self.control.incidents.objects.values())
        self.operator = self._new_operator()
        longest = 2.0 if self.is_healed else self.schedule.random.choice([0.5, 3.0, 30.0])
        self.schedule.after(self.schedule.between(0.1, longest), self.operator.start)


def _agents(node: Node) -> Iterator[Agent]:
    return (local.process for local in node.locals.values() if isinstance(local.process, Agent))
