"""Rules that hold over the whole world at every moment, judged by the truth; each names its breach.

See docs/design/training-jobs.md for the rules.  `Violation` is an assertion about our own code.

Among them are the rules for workers that keep their process over attempts, and the one for reports
that operators received: no decision can depend on a message that never arrived.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from itertools import chain

from unbroken.core.job import events as core
from unbroken.core.job.events import PodPhase, PodUid
from unbroken.core.job.recovery.incidents import RESTART_REQUESTED
from unbroken.core.job.recovery.symptoms import PROCESS_STOPPED, SPINNING, STALLED
from unbroken.core.job.watch.examination import DISMISSED
from unbroken.sim.actors.cluster import ENDED, Cluster
from unbroken.sim.actors.snapshots import Snapshots
from unbroken.sim.actors.training import SUCCESS, Worker
from unbroken.sim.actors.watches import STANDS, WAITS
from unbroken.sim.schedule import Schedule
from unbroken.spec.job.incident import Incident, Remedy
from unbroken.spec.job.types import JobSpec, JobStatus
from unbroken.wire.agent import (
    IN_PROCESS_RESTART,
    AgentReport,
    AgentState,
    StartCommand,
    StopCommand,
)
from unbroken.wire.observation import CollectCommand, Evidence, RankEvidence

from .attempt import Attempt
from .truth import Truth


class Barriers:
    """Watches processes, and the stops that let them live."""

    def __init__(self, schedule: Schedule, require: Callable[..., None]) -> None:
        self._schedule = schedule
        self._require = require
        self.may_keep = True
        """The job's user allows it."""
        self._processes: dict[int, Worker] = {}
        """Processes by pid, each in its newest attempt."""
        self._progressed: set[tuple[int, int]] = set()
        """Epochs and attempts that have had something to show."""
        self._last: tuple[int, int] | None = None
        """Epoch and attempt of the newest stop that let processes live."""
        self._ended: dict[PodUid, int] = {}
        """The newest attempt of which no process was to be kept."""

    def progressed(self, epoch: int, attempt: int) -> None:
        """The attempt has something to show."""
        self._progressed.add((epoch, attempt))

    def worker_started(self, worker: Worker) -> None:
        """Check that a process from before continues from the barrier, where it was, and may."""
        before = self._processes.get(worker.pid)
        self._processes[worker.pid] = worker
        if before is None:
            return
        require = self._require
        require(before.is_at_barrier, "a worker goes on that was not at the barrier", worker)
        require(before.attempt < worker.attempt, "a worker goes on in the same attempt", worker)
        require(before.rank == worker.rank, "a process changes its rank", before, worker)
        must_end = before.attempt <= self._ended.get(worker.pod, -1) < worker.attempt
        require(not must_end, "a worker lives on that was to end", before, worker)

    def stop_ordered(self, pod: PodUid, command: StopCommand, epoch: int) -> None:
        """Check that no process is kept twice without progress in between."""
        attempt, probes = command.attempt or 0, self._schedule.probes
        if command.restart_mode != IN_PROCESS_RESTART:
            if self._last == (epoch, attempt):
                probes["harder"] += 1
            self._ended[pod] = max(attempt, self._ended.get(pod, -1))
            return
        self._require(self.may_keep, "processes live on against the user's will", command)
        last, self._last = self._last, (epoch, attempt)
        if last is not None and last[0] == epoch and last[1] < attempt:
            between = {(epoch, number) for number in range(last[1] + 1, attempt + 1)}
            is_right = not between.isdisjoint(self._progressed)
            self._require(is_right, "processes live on again without progress", command)
            probes["kept_again"] += 1

    def operator_crashed(self) -> None:
        """Forget decisions that were not written."""
        self._last = None
        self._ended.clear()


class ReceivedReports:
    """The reports that reached the operators of one job."""

    def __init__(self) -> None:
        self.steps: dict[int, int] = {}
        """The newest step reported of each attempt before its end; -1: none was."""
        self.newest = -1
        """The newest attempt that an agent has named to the present operator."""
        self._pods: set[PodUid] = set()
        """Pods whose agents have reached the present operator."""
        self._found: set[PodUid] = set()
        """Pods that ran when the present operator came."""
        self._since: float | None = None
        """Time at which the present operator knew all objects of the API."""

    def take(self, events: Iterable[core.JobEvent], ended: Container[int], now: float) -> None:
        """Note what one step of the operator takes; `ended` are the attempts that are over."""
        for event in events:
            match event:
                case core.Synced():
                    self._since = now
                case core.PodSeen(view):
                    if self._since is None and view.phase is core.PodPhase.RUNNING:
                        self._found.add(view.uid)
                case _:
                    pass
            if not isinstance(event, core.AgentReported):
                continue
            self._pods.add(event.pod)
            report = event.report
            named = (report.newest_attempt, report.attempt)
            self.newest = max([self.newest, *(one for one in named if one is not None)])
            if report.state is AgentState.FAULTED:
                return  # what comes with it comes after the end
            told = [rank.step for rank in report.watch if rank.step is not None]
            if report.attempt is not None and report.attempt not in ended:
                newest = self.steps.get(report.attempt, -1)
                self.steps[report.attempt] = max([newest, *told])

    def misses(self, pods: Iterable[PodUid], seconds: float, now: float) -> bool:
        """Return whether the operator has waited this long for one of the pods, without a
        report."""
        is_over = self._since is not None and now >= self._since + seconds
        return is_over and not self._pods.issuperset(pods)

    @property
    def is_complete(self) -> bool:
        """True if the agents of all pods that the operator found running have reached it."""
        return self._found <= self._pods

    def forget(self, written: int) -> None:
        """Let the operator die; of attempts from `written` on it had written nothing down."""
        self.newest = -1
        self._pods.clear()
        self._found.clear()
        self._since = None
        self.steps = {attempt: step for attempt, step in self.steps.items() if attempt < written}


EFFECTS_PER_POD_MAX = 40
"""Effects in any ten seconds; more is a storm."""
UNHEARD_SECONDS = 10.0
"""Seconds that an operator which takes over waits for agents, before it starts a new attempt."""
STALE_SECONDS = 60.0
"""Seconds that an operator's view of the API may lag behind."""
NODE_TRIED = "another node is tried"
TERMINAL = ("Completed", "Failed")


class Violation(AssertionError):
    """A rule was broken."""


def condition(status: JobStatus, kind: str) -> bool:
    """Return whether the condition is True."""
    return any(c.type == kind and c.status == "True" for c in status.conditions)


class Checkers:
    """Watches processes, orders and writes."""

    def __init__(
        self,
        schedule: Schedule,
        truth: Truth,
        cluster: Cluster,
        live: Mapping[int, Worker],
        spec: JobSpec,
    ) -> None:
        self._schedule = schedule
        self._truth = truth
        self._cluster = cluster
        self._live = live
        self._policy = spec.run_policy
        self._planned = sum(replica.replicas + replica.spares for replica in spec.replica_specs)
        self._attempts: dict[tuple[int, int], Attempt] = {}
        self._masters: dict[tuple[str, int], tuple[int, int]] = {}
        self._effects: dict[int, int] = defaultdict(int)
        self._holders: dict[int, tuple[PodUid, int]] = {}
        """Last pod of each node rank, and how many pods had been made by then."""
        self.generation = 0
        """Number of operators that have crashed."""
        self._found_count = 0
        """`restartCount` as the present operator found it."""
        self._has_found_start = False
        """True if it found written that this attempt was started."""
        self._ordered_in: dict[int, int] = {}
        """The operator's generation that first ordered the attempt."""
        self.moment: Callable[[str, int], None] = lambda name, number: None
        """Called when an attempt is ordered to start, and when it is given up."""
        self.newest = -1
        """Newest attempt that was ordered to start."""
        self.is_over = False
        """The job was reported as ended."""
        self.ordered_status = JobStatus()
        self.incidents: dict[int, Incident] = {}
        self._full_restarts: set[int] = set()
        """Incidents whose remedy is, or was at first, to replace every pod."""
        self._suspects: dict[int, str] = {}
        """Nodes that incidents laid a repeated error to, by the number of the incident."""
        self._request = 0
        self._is_asked = False
        """A look at the ranks is under way."""
        self.barriers = Barriers(schedule, self.require)
        self.hearing = ReceivedReports()
        self.snapshots: Snapshots | None = None
        self._seen: dict[int, RankEvidence] = {}
        """Evidence that the operator got in answer to its newest question."""

    def require(self, holds: bool, rule: str, *facts: object) -> None:
        """Raise unless it holds."""
        if not holds:
            raise Violation(rule + "".join(f"\n    {fact}" for fact in facts))

    # The truth about processes.

    def worker_started(self, worker: Worker) -> None:
        """Attempts never overlap, no rank lives twice, and all of an attempt agree."""
        self.barriers.worker_started(worker)
        self._truth.have_worked.add(worker.pod)
        require = self.require
        for other in self._live.values():
            is_over = other.is_lease_over or self._may_linger(other) or self._may_linger(worker)
            if other is not worker and not is_over:
                is_one = other.attempt == worker.attempt or other.is_at_barrier
                require(is_one, "two attempts live", other, worker)
                # One may wait, for nothing, in a pod that is let go.
                is_left = other.is_at_barrier and other.pod != worker.pod
                require(other.rank != worker.rank or is_left, "a rank lives twice", other, worker)
        attempt = self._attempt_of(worker)
        require(attempt.master == worker.master, "an attempt has two addresses", worker)
        require(attempt.world_size == worker.world_size, "an attempt has two sizes", worker)
        require(0 <= worker.rank < worker.world_size, "a rank is out of range", worker)
        before = attempt.born.get(worker.rank)
        is_first = before is None or before.agent != worker.agent
        require(is_first, "an agent starts a rank twice in an attempt", before, worker)
        attempt.born[worker.rank] = worker
        holder = attempt.pods.setdefault(worker.node_rank, worker.pod)
        if holder != worker.pod and attempt.generation != self.generation:
            # No process knows the former holder: it must be gone, and only then.
            is_free = self._cluster.local(holder) is None or self._truth.has_leases
            require(is_free, "a rank is taken", worker, holder)
            attempt.pods[worker.node_rank] = holder = worker.pod
        require(holder == worker.pod, "two pods have one rank", worker, holder)
        self._note_holder(worker)
        if len(attempt.born) == attempt.world_size:
            pods = set(attempt.pods.values())
            require(len(pods) == len(attempt.pods), "a pod has two ranks", attempt)

    def _may_linger(self, worker: Worker) -> bool:
        """Return whether its machine is paused, or woke so recently that the worker is not ended
        yet."""
        local = self._cluster.local(worker.pod) if self._truth.has_leases else None
        return local is not None and self._schedule.now < local.node.excused_until

    def attempt(self, number: int) -> Attempt | None:
        """The newest attempt of this number, since the job was last suspended; None: not begun."""
        return self._attempts.get((self._truth.epochs, number))

    def _attempt_of(self, worker: Worker) -> Attempt:
        """The attempt that a worker belongs to; of its first worker a new one."""
        require, epoch = self.require, self._truth.epochs
        key = self._masters.get(worker.master, (epoch, worker.attempt))
        if key[1] != worker.attempt:
            key = (epoch, worker.attempt)
        attempt = self._attempts.get(key)
        if attempt is not None and self._is_forgotten(attempt, worker):
            # Its number and its address are used again.
            del self._attempts[key], self._masters[attempt.master]
            attempt, key = None, (epoch, worker.attempt)
        if attempt is not None:
            return attempt
        generation = self._ordered_in.get(worker.attempt, -1)
        attempt = self._attempts[key] = Attempt(worker.master, worker.world_size, generation)
        used = self._masters.get(worker.master, key)
        is_free = used == key or not self._is_known(used)
        require(is_free, "two attempts share an address", used, key, worker)
        self._masters[worker.master] = key
        is_newest = not any(self._is_known(other) for other in self._attempts if other > key)
        # A pause may have come between the order and the start.
        require(is_newest or self._may_linger(worker), "an older attempt starts", worker)
        require(worker.attempt <= self.newest, "nobody ordered this attempt", worker)
        return attempt

    def _is_forgotten(self, attempt: Attempt, worker: Worker) -> bool:
        """Return whether no process that knew the attempt can be asked: then its number may be used
        again. Its agents have died, or their pods are deleted, and out of reach."""
        if attempt.generation == self.generation:
            return False
        if self._truth.is_stock:
            return all(old.exit is not None for old in attempt.born.values())
        living = {getattr(process, "id", "") for process in self._cluster.processes()}
        return not any(old.agent in living for old in attempt.born.values())

    def _is_known(self, key: tuple[int, int]) -> bool:
        """Return whether the present operator can know of the attempt.

        Stock agents report none. If its operator died before it wrote the attempt, and nothing of
        it is alive, the number is lost: the job continues from the written status.
        """
        attempt = self._attempts[key]
        is_lost = attempt.generation != self.generation and key[1] > self._found_count
        has_ended = all(worker.exit is not None for worker in attempt.born.values())
        return not (self._truth.is_stock and is_lost and has_ended)

    def _is_nameless(self) -> bool:
        """Return whether stock agents run the newest attempt, ordered by an earlier operator.

        They report no number, and end it whatever the number of a stop.
        """
        return self._truth.is_stock and self._ordered_in.get(self.newest) != self.generation

    def _note_holder(self, worker: Worker) -> None:
        before = self._holders.get(worker.node_rank)
        if before is not None and before[0] != worker.pod:
            is_older = int(worker.pod[4:]) <= before[1]
            self._schedule.probes["spare_takes_over" if is_older else "new_pod_takes_over"] += 1
        self._holders[worker.node_rank] = (worker.pod, self._cluster.pods_made)

    def worker_ended(self, worker: Worker) -> None:
        """Any end is possible; what it means is judged where something is concluded from it."""

    def progressed(self, worker: Worker) -> None:
        """Note progress: a later keep is no repetition."""
        self.barriers.progressed(self._truth.epochs, worker.attempt)

    # Orders of the operator.

    def ordered(self, effect: core.JobEffect) -> None:
        """Before it is carried out."""
        window = int(self._schedule.now // 10)
        self._effects[window] += 1
        self.require(
            self._effects[window] <= EFFECTS_PER_POD_MAX * (self._planned + 2),
            "too many orders in ten seconds",
            effect,
        )
        match effect:
            case core.StartWorkers(pod, command):
                self._start_ordered(pod, command.rank, command.attempt)
                self._copies_ordered(pod, command)
            case core.StopWorkers(pod, command):
                self.barriers.stop_ordered(pod, command, self._truth.epochs)
                attempt = self.newest if command.attempt is None else command.attempt
                if self._is_nameless():
                    attempt = max(attempt, self.newest)
                if attempt >= self.newest >= 0:
                    self._ends(attempt, effect)
            case core.WriteStatus(status):
                self._status_ordered(status)
            case core.WriteIncident(incident):
                self._incident_ordered(incident)
            case core.DeletePod():
                self._delete_ordered(effect)
            case core.CreatePod():
                self.require(not self.is_over, "a pod is created after the end", effect)
            case _:
                self._stop_or_look(effect)

    def _stop_or_look(self, effect: core.JobEffect) -> None:
        match effect:
            case core.AskAgent(_, CollectCommand(request)):
                if request != self._request:
                    self._request, self._is_asked = request, True
                    self._seen.clear()
            case core.RecordEvent(reason) if reason == DISMISSED:
                self._is_asked = False
                self._schedule.probes["dismissed"] += 1
            case _:
                pass

    def _start_ordered(self, pod: PodUid, rank: int, attempt: int) -> None:
        truth = self._truth
        self.require(not self.is_over, "workers are started after the end", attempt)
        self._rank_ordered(pod, rank)
        if truth.is_stock and not self._live:
            # If an operator dies before it wrote which attempt stock agents run, and all of it is
            # stopped, the number is unknown.
            self.newest = min(self.newest, attempt)
        elif attempt <= self.newest and self.is_lost(attempt):
            self._use_again(attempt)
        self.require(attempt >= self.newest, "an older attempt is ordered", attempt)
        is_resumed = truth.is_by_user(attempt) and not truth.wants_suspension
        if attempt > self.newest:
            for older in range(max(0, self.newest), attempt):
                self._ends(older, f"start of {attempt}")
            self.newest = attempt
            self._ordered_in[attempt] = self.generation
        elif is_resumed:
            del truth.ended[attempt]
            # Suspended and resumed in one step, which no status shows.
            truth.epochs += (truth.epochs, attempt) in self._attempts
            # Its earlier progress does not count for the restarts that follow.
            self.hearing.steps.pop(attempt, None)
        else:
            return
        truth.is_suspended = truth.wants_suspension
        self.moment("start", attempt)

    def is_lost(self, attempt: int) -> bool:
        """Return whether every operator that knew this attempt, or a later one, died before it was
        written, and no agent that knew can be asked."""
        is_told = attempt == self._found_count and self._has_found_start
        is_written = attempt < self._found_count or is_told
        is_known = is_written or self._is_ours(attempt)
        if is_known or self._truth.is_stock:
            return False
        heard = [process.report().newest_attempt for process in self._cluster.processes()]
        return all(newest is None or newest < attempt for newest in heard)

    def is_unknown(self, attempt: int) -> bool:
        """Return whether the present operator has no knowledge of this attempt or a later one."""
        known = max(self._found_count, self.hearing.newest)
        return not self._is_ours(attempt) and known < attempt

    def _is_ours(self, attempt: int) -> bool:
        """Return whether the present operator ordered this attempt or a later one."""
        numbers = range(attempt, self.newest + 1)
        return any(self._ordered_in.get(number) == self.generation for number in numbers)

    def _use_again(self, attempt: int) -> None:
        """Take this attempt for a new one, and forget those of its number and of later ones."""
        truth = self._truth
        for number in range(attempt, self.newest + 1):
            truth.ended.pop(number, None)
            self.hearing.steps.pop(number, None)
        truth.epochs += 1
        self.newest = attempt - 1

    def _copies_ordered(self, pod: PodUid, command: StartCommand) -> None:
        """Buddies and holders are right."""
        if self.snapshots is not None:
            for wrong in self.snapshots.ordered(self._truth.epochs, self.generation, pod, command):
                self.require(False, wrong, command)

    def _rank_ordered(self, pod: PodUid, rank: int) -> None:
        """A pod keeps its rank, unless neither its agent nor the operator can know it."""
        had, generation = self._truth.rank_of.get(pod, (rank, -1))
        if had != rank:
            local = self._cluster.local(pod)
            agent = local.process if local else None
            # Two agents may report one rank: one of a pod that was to go, one of its replacement.
            # If the deciding operator dies unheard, the order is unknown.
            newest = next(
                other for other, (told, _) in reversed(self._truth.rank_of.items()) if told == had
            )
            report = agent.report() if agent is not None and newest == pod else None
            is_known = generation == self.generation or (
                report is not None
                and report.rank == had
                and not self._cluster.has_rival(pod, report)
            )
            self.require(not is_known, "a pod changes its rank", pod, had, rank)
        self._truth.rank_of.pop(pod, None)
        self._truth.rank_of[pod] = (rank, self.generation)

    def _ends(self, attempt: int, why: object) -> None:
        """An attempt is given up; there must be a reason, and each reason counts once."""
        if self.is_over:
            return
        if attempt not in self._truth.ended:
            self.moment("stop", attempt)
        truth = self._truth
        is_unknown = self._is_half_started(attempt) or self._is_unheard(attempt)
        # The operator may hear of a suspension after it was taken back.
        is_unknown |= self._schedule.now - truth.suspended_at < STALE_SECONDS
        if truth.is_forbidden or self._is_out_of_time() or is_unknown:
            truth.ended.setdefault(attempt, None)
        is_known = truth.end(attempt, is_begun=attempt <= self.newest)
        self.require(is_known, f"attempt {attempt} is given up without a fault", why)

    def _is_half_started(self, number: int) -> bool:
        """Return whether the operator died in this start, so that ranks may be unknown."""
        if number > self.newest and self.generation and not self.hearing.is_complete:
            return True  # It had written that it would order it.
        attempt = self._attempts.get((self._truth.epochs, number))
        is_whole = attempt is not None and len(attempt.born) == attempt.world_size
        return not is_whole and self._ordered_in.get(number, self.generation) != self.generation

    def _is_unheard(self, number: int) -> bool:
        """Return whether a new operator waited in vain for a report of some rank.

        If links lose messages, that happens without a fault, and looks like a lost agent.
        """
        attempt = self._attempts.get((self._truth.epochs, number))
        if attempt is None or self._truth.is_clear or attempt.generation == self.generation:
            return False
        return self.hearing.misses(attempt.pods.values(), UNHEARD_SECONDS, self._schedule.now)

    def _is_out_of_time(self) -> bool:
        """Return whether a limit of time that the user has set has passed."""
        now, policy = self._schedule.now + 0.001, self._policy
        start = self.ordered_status.start_time or now
        waits = [i.detected_at for i in self.incidents.values() if i.ended_at is None] or [now]
        return (
            now - start >= (policy.active_deadline_seconds or 1e9)
            or now - start >= (policy.startup_deadline_seconds or 1e9)
            or now - max(waits) >= (policy.fault_deadline_seconds or 1e9)
        )

    def _status_ordered(self, status: JobStatus) -> None:
        before = self.ordered_status
        if status.restart_count > before.restart_count:
            for attempt in range(before.restart_count, status.restart_count):
                self._ends(attempt, "restartCount is raised")
        if condition(status, "Completed"):
            # Only the operator that started a stock agent knows which attempt it runs.
            number = self.newest if self._truth.is_stock else status.restart_count
            self.require(self._has_succeeded(number), "Completed is not true", status)
        if condition(status, "Suspended") and not condition(before, "Suspended"):
            self._truth.epochs += 1
            self._schedule.probes["suspended"] += 1
        for kind in TERMINAL:
            still = condition(status, kind) or not condition(before, kind)
            self.require(still, f"{kind} is taken back", status)
        self.is_over = any(condition(status, kind) for kind in TERMINAL)
        self.ordered_status = status

    def _has_succeeded(self, number: int) -> bool:
        attempt = self._attempts.get((self._truth.epochs, number))
        return (
            attempt is not None
            and len(attempt.born) == attempt.world_size
            and all(worker.exit == SUCCESS for worker in attempt.born.values())
        )

    def _fence_asked(self, name: core.NodeName) -> None:
        """Check that only an unhealthy node, or one that was so recently, is to be fenced.

        Orders from an outage of the API are carried out after it.
        """
        node, view = self._cluster.machines[name], self._cluster.nodes.objects.get(name)
        since = node.is_repaired_at
        latest = max(since or 0.0, self._cluster.answers_since)
        is_long_well = self._schedule.now - latest > STALE_SECONDS
        is_well = node.is_up and view is not None and view.is_ready and is_long_well
        self.require(not is_well, "a healthy node is fenced", name)

    def _delete_ordered(self, effect: core.DeletePod) -> None:
        if not effect.force:
            return  # judged when it is done
        self._schedule.probes["forced_deletion"] += 1
        pod = self._cluster.pods.objects.get(effect.name)
        if pod is None or pod.uid != effect.uid or pod.node is None or pod.phase in ENDED:
            return
        node = self._cluster.nodes.objects.get(pod.node)
        is_proven = node is None or node.is_fenced or pod.has_ended or self._truth.has_leases
        self.require(is_proven, "a pod is force-deleted without proof of its death", pod)
        lives = [
            worker
            for worker in self._live.values()
            if worker.pod == effect.uid
            and not worker.is_lease_over
            and not worker.is_at_barrier
            and not self._may_linger(worker)
        ]
        self.require(not lives, "a pod is force-deleted while it lives", pod, *lives)

    def _deleted(self, effect: core.DeletePod) -> None:
        """A pod is deleted because it, or the job, has ended, or because it was not well."""
        truth, cluster = self._truth, self._cluster
        pod = cluster.pods.objects.get(effect.name)
        if pod is None or pod.uid != effect.uid or pod.is_deleting or pod.node is None:
            return
        newest = self.incidents[max(self.incidents)] if self.incidents else None
        is_wanted = (
            self.is_over
            or truth.is_suspended
            or truth.is_deleted
            or condition(self.ordered_status, "Suspended")
            # Deletions are decided with the remedy, and some are carried out after it was changed.
            or (newest is not None and newest.number in self._full_restarts)
            # An error that repeats on a node is attributed to the node, once: the first cause may
            # become known only after the deletion was ordered.
            or pod.node in self._suspects.values()
        )
        was_hurt = any(effect.uid in fault.uids or fault.node == pod.node for fault in truth.faults)
        _, generation = truth.rank_of.get(effect.uid, (0, -1))
        # An operator may die with an order that no agent has heard.
        is_needed = generation == self.generation or effect.uid in truth.have_worked
        is_right = is_wanted or was_hurt or not is_needed
        self.require(is_right, "a pod is deleted that was well", effect, pod)

    def _incident_ordered(self, incident: Incident) -> None:
        before = self.incidents.get(incident.number)
        require = self.require
        if before is not None and before.ended_at is not None:
            require(incident.ended_at is not None, "a closed incident is opened", incident)
        require(incident.culprit in incident.signals, "the culprit is no signal", incident)
        times = [
            at
            for at in (
                incident.detected_at,
                incident.stopped_at,
                incident.ready_at,
                # Some worker may write before the last agent is known to run: progress is apart.
                incident.started_at,
                incident.ended_at,
            )
            if at is not None
        ]
        in_order = times[:-1] if incident.ended_at is not None else times
        require(in_order == sorted(in_order), "stages are out of order", incident)
        if incident.progress_at is not None and incident.ready_at is not None:
            require(incident.progress_at >= incident.ready_at, "progress came early", incident)
        if before is None:
            self._blame_ordered(incident)
        if before is None or before.remedy is not incident.remedy:
            self._schedule.probes[f"remedy_{incident.remedy.value}"] += 1
        if incident.remedy is Remedy.JOB:
            self._full_restarts.add(incident.number)
        if NODE_TRIED in incident.reason:
            self._suspects.setdefault(incident.number, incident.culprit.node)
        if len(incident.signals) >= 3:
            self._schedule.probes["many_signals"] += 1
        self.incidents[incident.number] = incident

    def heard(self, events: Sequence[core.JobEvent]) -> None:
        """The operator takes these in one step."""
        self.hearing.take(events, self._truth.ended, self._schedule.now)

    def shown(self, evidence: Evidence) -> None:
        """The operator is given evidence."""
        if evidence.request == self._request:
            # A doubled question is answered twice, and the first answer counts.
            self._seen = {rank.rank: rank for rank in evidence.ranks} | self._seen

    def crashed(self, report: AgentReport, effects: Sequence[core.JobEffect]) -> None:
        """Workers have failed, and the operator knows: nothing may come before the stop."""
        if report.attempt != self.newest or self.newest in self._truth.ended or self.is_over:
            return
        is_stopped = any(isinstance(effect, core.StopWorkers) for effect in effects)
        self.require(is_stopped, "a crash is waited with", report)

    def _blame_ordered(self, incident: Incident) -> None:
        """Check that a hang is attributed to the stalled rank, as far as the operator saw it."""
        truth, culprit, probes = self._truth, incident.culprit, self._schedule.probes
        if self._is_asked and incident.examined_at is None:
            probes["crash_in_a_look"] += 1
        self._is_asked = False
        if culprit.fault not in (PROCESS_STOPPED, STALLED, SPINNING):
            return
        guilty = truth.stalled.get(incident.attempt, set())
        if culprit.rank is not None:
            probes["blamed"] += 1
            self.require(culprit.rank in guilty, "the wrong rank is blamed", incident)
        working = truth.at_work.get(incident.attempt, set())
        if not guilty:
            probes["false_stall"] += 1
            shown = working & {rank for rank, seen in self._seen.items() if not seen.is_same}
            self.require(not shown, "a job is stopped that was seen at work", incident)
        elif self._stands_out(guilty) and incident.examined_at:
            self.require(culprit.rank is not None, "nobody is blamed for a hang", incident)

    def _stands_out(self, guilty: set[int]) -> bool:
        """Return whether the operator saw a stalled rank, and one that waits for it."""
        frames = {rank: seen.threads[0].frames for rank, seen in self._seen.items()}
        stands = [rank for rank in guilty & frames.keys() if frames[rank] == STANDS]
        return bool(stands) and WAITS in frames.values()

    def operator_crashed(self, status: JobStatus, incidents: Iterable[Incident]) -> None:
        """Forget decisions that were not written; the arguments are the API's state."""
        self.incidents = {incident.number: incident for incident in incidents}
        self._full_restarts &= self.incidents.keys()
        self._suspects = {n: node for n, node in self._suspects.items() if n in self.incidents}
        signals = chain.from_iterable(one.signals for one in self.incidents.values())
        self._truth.forget_requests({s.at for s in signals if s.fault == RESTART_REQUESTED})
        self.generation += 1
        self.barriers.operator_crashed()
        self.hearing.forget(status.restart_count)
        if self._is_asked:
            self._schedule.probes["operator_crash_in_a_look"] += 1
        self._is_asked = False
        self.ordered_status, self._found_count = status, status.restart_count
        # PodsRunning does not show it: pods are counted before they train.
        self._has_found_start = condition(status, "Running") or any(
            incident.attempt + 1 == status.restart_count and incident.started_at is not None
            for incident in self.incidents.values()
        )
        self.is_over = any(condition(status, kind) for kind in TERMINAL)

    # Objects of the API.

    def written(self, effect: core.JobEffect) -> None:
        """A write reaches the API."""
        if isinstance(effect, core.DeletePod):
            self._deleted(effect)
        elif isinstance(effect, core.FenceNode):
            self._fence_asked(effect.node)
        if isinstance(effect, core.CreatePod) and effect.name not in self._cluster.pods.objects:
            nodes = self._cluster.nodes.objects
            wanted = [
                pod
                for pod in self._cluster.pods.objects.values()
                if not pod.is_deleting
                and pod.phase in (PodPhase.PENDING, PodPhase.RUNNING)
                and (pod.node is None or (pod.node in nodes and nodes[pod.node].is_ready))
            ]
            few = len(wanted) < self._planned
            self.require(few, "more pods than planned", effect, *wanted)
