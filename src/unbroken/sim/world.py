"""One simulated world: built from its scenario, harmed, healed, and judged at its end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import takewhile

from unbroken.core.agent.events import Settings
from unbroken.core.agent.machine import Workers
from unbroken.core.job import events as core
from unbroken.core.job.adoption import ADOPT_SECONDS
from unbroken.core.job.events import JobMachine, PodUid
from unbroken.core.job.machine import Job
from unbroken.core.job.recovery import symptoms
from unbroken.core.job.watch.examination import SECONDS_MAX
from unbroken.core.patience import ACTIVE, BLIND, REPEAT_FACTOR, REPEATS_MAX, SLOW
from unbroken.sim.actors.agents import Agent, AgentResources
from unbroken.sim.actors.agents import Machine as AgentMachine
from unbroken.sim.actors.cluster import Cluster, Local, Node
from unbroken.sim.actors.imports import Imports, Learner
from unbroken.sim.actors.links import Quality, Way
from unbroken.sim.actors.operators import SILENCE_SECONDS, Control, Operator
from unbroken.sim.actors.snapshots import Home, Snapshots
from unbroken.sim.actors.stock import StockWorkers
from unbroken.sim.actors.training import Gathering, Training, Worker
from unbroken.sim.actors.watches import Rhythm, Watches
from unbroken.sim.checkers.attempt import Attempt
from unbroken.sim.checkers.checkers import TERMINAL, Checkers, Violation, condition
from unbroken.sim.checkers.endings import Ending
from unbroken.sim.checkers.truth import Fault, Truth
from unbroken.spec.job.types import CleanPodPolicy, FenceBy, JobOptions, JobStatus, Switch
from unbroken.wire.agent import PORT

from . import faults, lease_faults
from .draw import draw
from .scenario import ENDS_WAITING, Scenario, Timed
from .schedule import EPOCH, Schedule

REST_SECONDS = 3000.0
"""Seconds of rest of a healed world, until its job must have ended."""
LOST_LOOK_SECONDS = SECONDS_MAX + SLOW.pause_seconds + 1.0
"""Most seconds by which a lost question or answer delays the next look."""
SETTLE_SECONDS = 60.0
"""Seconds after the end, until everything must be in order."""
ACTIONS = faults.ACTIONS | lease_faults.ACTIONS
"""Effect of each fault, by its name."""


def real_agent(settings: Settings) -> AgentMachine:
    """The machine that our agent runs."""
    return Workers(settings)


def real_job(name: str, status: JobStatus) -> JobMachine:
    """The machine that our operator runs."""
    return Job(name, status)


@dataclass(frozen=True, slots=True)
class Parts:
    """The machines under test; a test may plant a bug in one."""

    agent: Callable[[Settings], AgentMachine] = real_agent
    job: Callable[[str, JobStatus], JobMachine] = real_job


class World:
    """Everything, and the seed that decides it.

    The seed is that of all random numbers. `scenario` None: it is drawn for the seed, too.
    """

    def __init__(
        self,
        seed: int,
        parts: Parts = Parts(),
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
        self.cluster.evicting = lambda node: faults.note(self, "evicted", node.locals.values())
        live: dict[int, Worker] = {}
        self.checkers = Checkers(self.schedule, self.truth, self.cluster, live, shape.spec)
        self.checkers.barriers.may_keep = shape.in_process is Switch.ON
        self.training = Training(self.schedule, shape.habits, self.checkers)
        self.training.live = live
        self.training.noted = self._worker_noted
        self.training.finishing = lambda: self._moment("finish", 0)
        self.checkers.moment = self._moment
        self.watches = Watches(
            self.schedule, self.training, shape.rhythm or Rhythm(), self.agent_of
        )
        self.snapshots = self._snapshots(seed)
        self.imports = Imports(self.schedule, seed, self._reachable) if shape.is_warm else None
        self.training.begun = self._begun
        self.training.meets = lambda place: lease_faults.meet(self, place)
        self.surroundings = self._surroundings(parts, quality)
        self.control = self._control(parts, live)
        self.is_healed = False
        self._cuts: dict[PodUid, float] = {}
        self._served: list[tuple[float, float]] = []
        """Times in which operators that have crashed since knew all there was."""
        self._struck: set[Timed] = set()
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

    def _surroundings(self, parts: Parts, quality: Quality) -> AgentResources:
        """Make what all simulated agents share."""
        shape = self.scenario
        return AgentResources(
            schedule=self.schedule,
            training=self.training,
            quality=quality,
            nproc=shape.nproc,
            make=lambda agent_id: self._agent_machine(parts, agent_id),
            exited=self._exited,
            noted=self._noted,
            kill_seconds=shape.kill_seconds,
            stubborn=shape.stubborn,
            skew_seconds=shape.skew_seconds,
            watches=self.watches if shape.rhythm else None,
            members=shape.members,
            snapshots=self.snapshots,
            imports=self.imports,
            leasing=lease_faults.leasing(self) if shape.lease_seconds else None,
        )

    def _control(self, parts: Parts, live: dict[int, Worker]) -> Control:
        """Make what all simulated operators share."""
        shape = self.scenario
        return Control(
            self.schedule,
            self.cluster,
            self.checkers,
            lambda status: parts.job("job", status),
            self.agent,
            self.way,
            lambda: bool(live),
            shape.lag,
            ambiguous=shape.ambiguous,
            busy_seconds=shape.busy_seconds,
        )

    def run(self) -> None:
        """Faults, then health, then the end of the job, and rest."""
        self._open()
        self.schedule.run(EPOCH + self.scenario.heal_after)
        self.heal()
        end = self.schedule.now + REST_SECONDS
        while not self.is_over:
            self._progresses(end)
            self.schedule.run(self.schedule.now + 10.0)
        self.schedule.run(self.schedule.now + SETTLE_SECONDS)
        if self.truth.is_deleted or "job" not in self.control.jobs.objects:
            self._nothing_is_left()
        else:
            self._at_rest()

    def _open(self) -> None:
        self.operator.start()
        for fault in self.scenario.faults:
            if not fault.moment:
                self.schedule.after(fault.seconds, self._happen, fault.name)

    def _moment(self, moment: str, number: int) -> None:
        """Let the faults come that were waiting for this."""
        for fault in self.scenario.faults:
            is_due = fault.moment == moment and fault.number in (0, number)
            if is_due and fault not in self._struck:
                self._struck.add(fault)
                self.schedule.after(fault.seconds, self._happen, fault.name)

    def _happen(self, name: str) -> None:
        if not self.is_healed and not self.is_over:
            faults.happen(self, name, ACTIONS[name])

    @property
    def is_over(self) -> bool:
        """True if the API shows that the job has ended, or was ordered to delete it."""
        if self.truth.is_deleted or "job" not in self.control.jobs.objects:
            return True
        status = self.control.statuses.objects.get("job", JobStatus())
        return any(condition(status, kind) for kind in TERMINAL)

    # Effects of faults.

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
        lease_faults.wake(self, node)
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

    def expect_notice(self, fault: Fault) -> None:
        """Demand that the attempt whose workers were hurt is stopped in time."""
        seconds = faults.NOTICED[fault.kind]
        if fault.kind in faults.BY_PEERS:
            seconds += self.scenario.habits.watchdog_seconds * 1.1
        hurt = {w.attempt for w in self.training.live.values() if w.pod in fault.uids}
        for attempt in hurt - self.truth.ended.keys():
            if not self.training.is_work_done:
                ran = self.checkers.attempt(attempt)
                self.schedule.after(seconds, self._noticed, attempt, fault, seconds, ran)

    def _noticed(self, attempt: int, fault: Fault, seconds: float, ran: Attempt | None) -> None:
        operator, now = self.operator, self.schedule.now
        if self.checkers.attempt(attempt) is not ran:
            # A suspension, or the loss of all processes that knew the attempt, has ended the
            # affected one; the present one has the same number.
            return
        if attempt in self.truth.ended or self.checkers.is_over or self.truth.is_deleted:
            return
        if fault.at > EPOCH + self.scenario.heal_after - SILENCE_SECONDS - 1.0:
            return  # healed before anybody could know
        if fault.until is not None and not self._could_know(fault, fault.until):
            if now < fault.until:
                self.schedule.after(seconds, self._noticed, attempt, fault, seconds, ran)
            return
        if operator.is_alive and self.checkers.is_lost(attempt):
            return  # nobody is left who knew that it ran
        since = operator.ready_at if operator.is_alive else None
        # An attempt that is resumed after a suspension has the same number.
        is_told = fault.kind in faults.BY_ALARM and not self.schedule.probes["suspend"]
        if not self.truth.is_undisturbed and not is_told:
            # An unwritten attempt of a lost or unheard agent is only noticed by the peers'
            # watchdogs, or by the operator's timeout.
            seconds = max(seconds, self.scenario.habits.watchdog_seconds * 1.1 + 100.0)
        if fault.kind == "stall":
            seconds = max(seconds, faults.NOTICED["stall"] + self._silence_given(attempt))
        if since is None or since > now - seconds:
            self.schedule.after(seconds, self._noticed, attempt, fault, seconds, ran)
        else:
            self.checkers.require(False, f"nobody noticed what hurt attempt {attempt}", fault)

    def _silence_given(self, attempt: int) -> float:
        """Return the silence that operators give a hang of the attempt beyond the usual one."""
        if attempt in self.truth.hung_at_work:
            return ACTIVE.seconds
        workers = [worker for worker in self.training.live.values() if worker.attempt == attempt]
        agents = [self.agent_of(worker) for worker in workers]
        if not any(agent is not None and not agent.is_blind for agent in agents):
            return BLIND.seconds
        lost = LOST_LOOK_SECONDS * self.schedule.probes["lost_look"]
        repeats = min(self._stalls_at(self.training.step(workers[0])), REPEATS_MAX)
        return lost + (SLOW.seconds * REPEAT_FACTOR**repeats if repeats else 0.0)

    def _stalls_at(self, step: int | None) -> int:
        """Return how many of the newest incidents in a row are hangs at this step."""
        incidents = sorted(
            self.control.incidents.objects.values(), key=lambda incident: -incident.number
        )
        names = (symptoms.STALLED, symptoms.SPINNING)
        is_same = (
            incident.culprit.fault in names and incident.step == step for incident in incidents
        )
        return sum(1 for _ in takewhile(bool, is_same))

    def _could_know(self, fault: Fault, until: float) -> bool:
        """Return whether an operator saw enough of a fault before it passed.

        If operators crashed, an unreachable agent may be back before a new operator misses it. The
        new operator waits for agents that have not reported to it, and then continues with the
        state it finds.
        """
        ready, now = self.operator.ready_at, self.schedule.now
        until = min(until, EPOCH + self.scenario.heal_after)
        served = [*self._served, *([] if ready is None else [(ready, now)])]
        first = served[0][0] if served else 0.0
        return any(
            max(fault.at + SILENCE_SECONDS, since + (ADOPT_SECONDS if since > first else 0.0))
            < min(until, end)
            for since, end in served
        )

    def resume(self) -> None:
        """The user wants the job to run again."""
        if self.cluster.is_away:
            self.schedule.after(1.0, self.resume)
        else:
            self.set_suspended(is_suspended=False)

    def heal(self) -> None:
        """No more faults; what is broken is repaired."""
        self.schedule.trace("WORLD", "is healed")
        self.is_healed = True
        self.surroundings.quality.heal()
        self.surroundings.ill = self.surroundings.stubborn = 0.0
        self.training.is_port_taken = False
        self.end_quota()
        self.control.ambiguous = 0.0
        self.operator.crash_in = None
        self.cluster.come_back()
        self.operator.heal_watches()
        self.resume()
        self._cuts.clear()
        manners, are_left = self.cluster.manners, self.scenario.are_abandoned
        if not are_left:
            self.cluster.manners = replace(manners, fence_after=manners.fence_after or 2.0)
        machines = self.cluster.machines.values()
        for node in [one for one in machines if one.has_power or not are_left]:
            view = self.cluster.nodes.objects.get(node.name)
            if view is not None and not view.is_healthy:
                self.cluster.nodes.put(node.name, replace(view, is_healthy=True))
            if node.is_fence_asked:
                self.cluster.fence(node.name)
            if not node.is_up:
                self.schedule.after(self.schedule.between(5.0, 30.0), self.repair, node)
            node.way, node.is_deaf = Way.BOTH, False
            node.is_unreached &= self.scenario.stays_unreached
            for local in node.locals.values():
                if isinstance(local.process, Agent):
                    local.process.crash_in = None
                    local.process.slow.clear()
                    self.thaw(local.process)
            self.look_at(node)

    # Connections of the parts.

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

    def _agent_machine(self, parts: Parts, agent_id: str) -> AgentMachine:
        settings = Settings(agent_id, self.scenario.nproc)
        if not self.scenario.is_stock:
            return parts.agent(settings)
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
        faults.note(self, kind, [local], is_prompt=True)

    def _worker_noted(self, kind: str, worker: Worker) -> None:
        local = self.cluster.local(worker.pod)
        faults.note(self, kind, [local] if local else [], is_prompt=True)

    def _new_operator(self) -> Operator:
        operator = Operator(self.control)
        operator.on_crash = self._operator_crashed
        return operator

    def _operator_crashed(self) -> None:
        self.truth.is_undisturbed = self.truth.is_clear = False
        if self.operator.ready_at is not None:
            self._served.append((self.operator.ready_at, self.schedule.now))
        if not self.operator.is_idle:
            self.schedule.probes["lost_write"] += 1
        status = self.control.statuses.objects.get("job", JobStatus())
        self.checkers.operator_crashed(status, self.control.incidents.objects.values())
        self.operator = self._new_operator()
        longest = 2.0 if self.is_healed else self.schedule.random.choice([0.5, 3.0, 30.0])
        self.schedule.after(self.schedule.between(0.1, longest), self.operator.start)

    # The end.

    def _progresses(self, end: float) -> None:
        if self.schedule.now > end:
            status = self.control.statuses.objects.get("job")
            pods = "\n    ".join(map(str, self.cluster.pods.objects.values()))
            raise Violation(f"a healed world does not come to its end\n    {status}\n    {pods}")

    def _at_rest(self) -> None:
        status = self.control.statuses.objects["job"]
        require, spec = self.checkers.require, self.scenario.spec
        require(not self.training.live, "workers outlive their job", *self.training.live.values())
        require(self.operator.is_idle, "something is left unwritten")
        require(status == self.checkers.ordered_status, "the status is not what was decided")
        if self.snapshots is not None and condition(status, "Completed"):
            told = self.control.incidents.objects.values()
            for wrong in self.snapshots.judge_end(told, status, status.restart_count):
                require(False, wrong)
        told = self.control.incidents.objects.values()
        ranks = self.scenario.nproc * spec.nnodes
        for wrong in self.watches.judge_end(told, status.restart_count, ranks):
            require(False, wrong)
        lease_faults.judge_unreached(self)
        ending = Ending(self.checkers, self.truth, spec, status, self.training.reached)
        name = ending.judge(self.control.incidents.objects.values())
        if spec.run_policy.clean_pod_policy is CleanPodPolicy.ALL:
            pods = self.cluster.pods.objects.values()
            require(not pods, "pods outlive their job", *pods)
        require(name == "Failed" or not self.scenario.habits.is_doomed, "a doomed job is complete")
        self.schedule.probes[name] += 1
        if self.scenario.is_stock and status.restart_count:
            self.schedule.probes["stock_restart"] += 1

    def _nothing_is_left(self) -> None:
        require, pods = self.checkers.require, self.cluster.pods.objects.values()
        if not self.truth.is_deleted:
            self.schedule.probes["expired"] += 1
            self._collect()
        self.schedule.run(self.schedule.now + SETTLE_SECONDS)
        require(not self.training.live, "workers outlive their job", *self.training.live.values())
        require(not pods, "pods outlive their job", *pods)
