"""A job's life apart from its faults: prepare, start, run, suspend, resume, end, expire."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from itertools import chain

from unbroken.core.job.record.conditions import ENDS, MESSAGE_CHARACTERS
from unbroken.core.job.record.redaction import clean
from unbroken.core.job.record.timeline import end_life
from unbroken.core.job.watch.progress import first_step
from unbroken.core.wording import all_of, counted
from unbroken.foreign_numbers import PORT_MAX, whole_number
from unbroken.spec.job import detectors
from unbroken.spec.job.incident import RECOVERED, Incident
from unbroken.spec.job.ledger import PROVEN, UNPROVEN
from unbroken.spec.job.types import (
    RANKS_KEY,
    AgentAuth,
    CleanPodPolicy,
    FenceBy,
    RunPolicy,
    Switch,
    watch_of,
)
from unbroken.spec.keys import ConditionType
from unbroken.spec.schema.fields import write_record
from unbroken.wire.agent import PROCESS_RESTART, AgentReport, AgentState

from .deadlines import Since, earliest, expiry, limit
from .events import DeleteJob, PodUid
from .gang import GangStage, StartOrder
from .kueue import HOLDS, Hold
from .recovery import ladder
from .roster import Member, is_stock
from .state import JobState
from .transitions import Phase

GATHER_SECONDS = 2.0
"""Seconds that a first start, with enough agents ready, waits for the remaining agents. Ranks
follow the topology best when all agents are known."""
STOP_SECONDS = 60.0
"""Seconds after which the pod of workers that have not ended is replaced; a job that ends waits no
longer."""
START_SECONDS = 60.0
"""Seconds from the start of an attempt to a report of it by every agent."""
PROGRESS_SECONDS = 60.0
"""Seconds that an incident stays open until training resumes, once every agent runs."""
COUNT_SECONDS = 2.0
"""Seconds of a restart after which each further ready agent is worth a write of the status."""
EXPIRY_RETRY_SECONDS = 30.0
FIRST_PORT, PORTS = 15_000, 5_000
"""Port range where an agent offers no port, or one that an attempt had. It lies below the ports
that agents offer: a new operator may not know of an attempt whose port an agent offers later."""


@dataclass(frozen=True, slots=True)
class JobEnd:
    """The end of a job, or its suspension: condition, reason, message."""

    condition: ConditionType
    reason: str
    message: str


class Life:
    """The course of one job."""

    def __init__(self, state: JobState) -> None:
        self._state = state
        self.verdict: JobEnd | None = None
        self._gather_at: float | None = None
        self._is_gathered = False
        self._since = 0.0
        """Start of the present phase of stopping or starting."""
        self._progress_by: float | None = None
        self._unresumed: int | None = None
        """Incident that was closed before training resumed, if its attempt runs."""
        self._expire_at: float | None = None
        self.unheard: dict[PodUid, int] = {}
        """Pods without a report of their agent, and the attempt that an earlier operator may have
        begun in them. They may be gone."""
        status = state.status
        self.masters = {(status.master_addr or "", as_port(status.master_port))}
        """Addresses that attempts have had; no two attempts share an address."""

    def create(self, now: float) -> None:
        """Begin a job of which nothing exists, or again after a suspension."""
        self.mark_created(now)
        self._state.newest_seen = -1
        self.unheard.clear()
        self.reshape(now)
        if self._state.nnodes:
            self.prepare(now)
        else:
            text = "replicaSpecs: no replica spec has replicas, so there is nothing to run"
            self.conclude(JobEnd(ConditionType.FAILED, "NoReplicas", text), now)

    def mark_created(self, now: float) -> None:
        """Let the job's time begin."""
        state = self._state
        state.set_status(start_time=now, restart_status=None)
        state.has_run = False
        reason = "Created" if state.condition is None else "Resumed"
        text = "the job is created" if state.condition is None else "the job is resumed"
        state.set_condition(ConditionType.CREATED, "Created", text, now)
        state.record_event(reason, text)

    def prepare(self, now: float) -> None:
        """Bring together the pods and agents of the next attempt."""
        state = self._state
        state.enter(Phase.PREPARING)
        mode = state.restart_mode()
        state.gang.halt(state.attempt - 1, now, mode=mode)
        self.mark_preparing(now)
        state.plan.create(now)

    def mark_preparing(self, now: float) -> None:
        """Begin to wait for the next start."""
        self._since, self._gather_at, self._progress_by = now, None, None
        self._is_gathered, self._unresumed = False, None
        self._state.has_changed = True

    def reshape(self, now: float) -> None:
        """Put the spec's replicas into force, with new ranks."""
        state = self._state
        assert state.spec is not None
        state.shape = state.spec.replica_specs
        state.ranks.reset(state.shape)
        state.plan.reshape(state.shape)

    def advance(self, now: float) -> None:
        """Continue with what the job has been waiting for, if it is possible now."""
        state = self._state
        if self._gather_at is not None and now >= self._gather_at:
            self._gather_at, self._is_gathered, state.has_changed = None, True, True
        if state.phase is Phase.PREPARING and state.has_changed:
            self._try_start(now)
        if state.phase is Phase.PREPARING and now >= self._since + COUNT_SECONDS:
            state.count_ready()
        if state.phase is Phase.TRAINING:
            self._watch(now)
        if state.phase is Phase.ENDING and state.newest_seen > state.gang.fence:
            self._stop_newest(now)
        if state.phase is Phase.ENDING and (
            not state.gang.unclear or now >= self._since + STOP_SECONDS
        ):
            self._finish(now)
        state.has_changed = False

    def end(self, verdict: JobEnd, now: float) -> None:
        """Stop what runs, then end the job or suspend it."""
        state = self._state
        if self.verdict is None or state.phase is not Phase.ENDING:
            self._since = now
        self.verdict = verdict
        state.enter(Phase.ENDING)
        gang = state.gang
        if gang.stage is not GangStage.HALTED:
            gang.halt(state.attempt, now, is_graceful=True)
        elif gang.mode != PROCESS_RESTART:
            # Workers that wait for the next attempt must learn that there will be none.
            gang.halt(gang.fence, now, is_graceful=True)

    def _stop_newest(self, now: float) -> None:
        """Stop attempts that this operator did not know when it began to end the job.

        No agent had reported yet, or a start order of an earlier operator arrived late.
        """
        state = self._state
        assert self.verdict is not None
        state.attempt = max(state.attempt, state.newest_seen)
        state.set_status(restart_count=state.attempt)
        state.gang.halt(state.newest_seen, now, is_graceful=True)

    def hold(self, hold: Hold, now: float) -> None:
        """Record why a suspended job waits, if the reason has changed."""
        state = self._state
        message = clean(hold.message)[:MESSAGE_CHARACTERS]
        last = state.status.conditions[-1]
        is_of_user = hold is not state.gate and last.reason not in HOLDS
        if is_of_user or (last.reason, last.message) == (hold.reason, message):
            return
        state.set_condition(ConditionType.SUSPENDED, hold.reason, hold.message, now)
        if last.reason != hold.reason:
            state.record_event(hold.reason, hold.message)

    def conclude(self, verdict: JobEnd, now: float) -> None:
        """End the job now; its agents have nothing left to stop, or can no longer be waited for."""
        state = self._state
        self.verdict = verdict
        state.enter(Phase.ENDED)
        self._close_incident(_outcome(verdict), now)
        state.set_status(completion_time=now)
        state.set_condition(verdict.condition, verdict.reason, verdict.message, now)
        is_bad = verdict.condition is ConditionType.FAILED
        state.record_event(verdict.condition.value, verdict.message, is_warning=is_bad)
        self.clean(now)

    def clean(self, now: float) -> None:
        """Delete the pods that the clean-up policy names, and any that may still run something."""
        state = self._state
        state.plan.reshape(())
        state.create_no_more()
        for member in list(state.roster.members.values()):
            self.clean_pod(member, now)

    def clean_pod(self, member: Member, now: float) -> None:
        """Delete the pod if nothing is to be left of it, now that nothing runs."""
        state = self._state
        if state.phase is Phase.SUSPENDED:
            state.plan.condemn(member, "the job is suspended", now)
        elif state.phase is Phase.ENDED and self._must_go(member):
            state.plan.condemn(member, "the job has ended", now)

    def progressed(self, report: AgentReport, now: float) -> None:
        """Note the first progress of the job's life, and after a recovery."""
        state, incident = self._state, self._awaiting_training()
        if state.ledger.progress_at is not None and incident is None:
            return
        step = first_step(report.watch)
        at = (step[1] or now) if step else earliest(*(w.recurring_line_at for w in report.workers))
        start = state.status.start_time
        if at is not None and state.ledger.progress_at is None and start is not None:
            state.set_ledger(replace(state.ledger, progress_at=min(max(at, start), now)))
        if incident is None:
            return
        # Where steps are reported, only a step is progress: lines come before the data.
        if at is None or (incident.step is not None and step is None):
            return
        at, resumed_step = _within(incident, at, now), step[0] if step else None
        state.amend_incident(incident.number, progress_at=at, resumed_step=resumed_step)
        if not incident.outcome:
            self._recovered(now)
        self._unresumed = None

    def _awaiting_training(self) -> Incident | None:
        """Return the incident after which training has not resumed so far, open or closed."""
        incidents = self._state.incidents
        if self._progress_by is not None:
            return incidents.open
        return None if self._unresumed is None else incidents.closed.get(self._unresumed)

    def deadline(self) -> float | None:
        """Return when time alone will change something here."""
        state = self._state
        match state.phase:
            case Phase.PREPARING:
                return earliest(
                    state.gang.unclear.deadline(STOP_SECONDS),
                    self._gather_at,
                    self._limit_at(),
                )
            case Phase.TRAINING:
                starting = state.gang.stage is GangStage.STARTING
                start_by = self._since + START_SECONDS if starting else None
                return earliest(start_by, self._progress_by, self._limit_at())
            case Phase.ENDING:
                return self._since + STOP_SECONDS
            case Phase.ENDED:
                return self._expiry()
            case _:
                return None

    def overdue(self, now: float) -> None:
        """End a job whose time is over; expire one that has ended."""
        state = self._state
        if state.phase is Phase.ENDED:
            due = self._expiry()
            if due is not None and now >= due:
                self._expire_at = now + EXPIRY_RETRY_SECONDS
                state.last.append(DeleteJob("ttlSecondsAfterFinished has passed"))
            return
        reached = self._limit(now)
        if reached is not None and now >= reached[0]:
            self.end(JobEnd(ConditionType.FAILED, reached[1], reached[2]), now)

    def is_start_overdue(self, now: float) -> bool:
        """True if agents have not reported an attempt that was started long ago."""
        return self._state.gang.stage is GangStage.STARTING and now >= self._since + START_SECONDS

    def train(self, now: float, master: tuple[str, int], lease: float) -> StartOrder:
        """Enter TRAINING; return the order for all agents. `lease`: of the workers, in seconds."""
        state = self._state
        assert state.spec is not None
        rules = state.spec.run_policy.log_monitoring_configuration
        state.enter(Phase.TRAINING)
        self._since = now
        state.watched.clear()
        self.masters.add(master)
        state.set_status(
            master_addr=master[0], master_port=str(master[1]), restart_count=state.attempt
        )
        state.set_ledger(replace(state.ledger, lease_seconds=lease, nnodes=state.nnodes))
        written = tuple(
            {
                **write_record(rule, is_minimal=True),
                RANKS_KEY: str(watch_of(rule.name, state.options.log_rule_ranks)),
            }
            for rule in rules
        )
        modes = detectors.written(state.options.detectors)
        copies = state.buddies.start(state.ranks.rank_of, state.roster)
        return StartOrder(state.attempt, state.nnodes, *master, written, modes, copies, lease)

    def _has_leases(self) -> bool:
        return self._state.options.fence_by is FenceBy.LEASE and self._state.nnodes > 1

    def _lease_seconds(self) -> float:
        """Return the lease for workers that are to start, in seconds; 0: none.

        All agents of the attempt must support leases: only all of them together renew it while the
        operator is absent.
        """
        state = self._state
        if not self._has_leases():
            return 0.0
        reports = [state.roster.members[uid].report for uid in state.ranks.rank_of]
        is_known = all(one is not None and one.lease_seconds is not None for one in reports)
        return state.options.lease_seconds if is_known else 0.0

    def _proven(self) -> str:
        """Return whether agents of the job have proven its key: once is enough for ever."""
        state = self._state
        if state.options.agent_auth is AgentAuth.NONE or state.ledger.agents == PROVEN:
            return state.ledger.agents
        reports = (state.roster.members[uid].report for uid in state.ranks.rank_of)
        # Only an agent on a link reports more than a stock agent, and only proof gives it a link.
        return PROVEN if any(one and not is_stock(one) for one in reports) else UNPROVEN

    def _try_start(self, now: float) -> None:
        state = self._state
        gang, ranks = state.gang, state.ranks
        if not gang.unclear and state.incidents.open and state.incidents.open.stopped_at is None:
            self._reached("stopped", gang.last_clear, now)
        if not gang.unclear and state.attempt in self.unheard.values():
            state.newest_seen = max(state.newest_seen, state.attempt)
        if state.newest_seen >= state.attempt:
            self._skip_attempts(now)
        # An agent that is not yet proven clear may also not have reported its rank yet.
        if gang.unclear or len(gang.ready) < state.nnodes or self._is_gathering(now):
            return
        if not ranks.is_full:
            roster = state.roster
            ready = [roster.members[uid] for uid in gang.ready]
            ready = [m for m in ready if not roster.is_on_fenced(m)]  # the proof comes at once
            ranks.fill((m for m in ready if not roster.notice_of(m)), roster)
            ranks.fill((m for m in ready if m.view.node not in roster.closing), roster)
        if not ranks.is_full or not ranks.rank_of.keys() <= gang.ready:
            return
        master = self._master()
        if master is None:
            return
        lease, agents = self._lease_seconds(), self._proven()
        ledger = replace(state.ledger, lease_seconds=lease, nnodes=state.nnodes, agents=agents)
        state.set_ledger(ledger)
        if not state.is_start_stored():
            # If this operator dies now, the next one may get no report of agents that have started.
            return
        self._reached("ready", gang.last_ready, now)
        self._count_kept()
        if state.incidents.open is None:
            state.set_condition(ConditionType.PODS_RUNNING, "PodsRunning", "", now)
        order = self.train(now, master, lease)
        gang.start(order, ranks.rank_of, now)

    def _skip_attempts(self, now: float) -> None:
        """Skip attempt numbers that agents know from another operator, and would therefore refuse.

        Such an attempt may have begun and made no progress: its processes end.
        """
        state = self._state
        skipped = state.ledger.uncharged + state.newest_seen + 1 - state.attempt
        state.set_ledger(replace(state.ledger, uncharged=skipped))
        state.attempt = state.newest_seen + 1
        state.set_status(restart_count=state.attempt)
        state.gang.halt(state.attempt - 1, now)

    def _is_gathering(self, now: float) -> bool:
        state = self._state
        if not state.ranks.is_unassigned or len(state.gang.ready) >= len(state.plan.slots):
            return False
        if self._gather_at is None and not self._is_gathered:
            self._gather_at = now + GATHER_SECONDS
        return not self._is_gathered

    def _master(self) -> tuple[str, int] | None:
        state = self._state
        member = state.roster.members[state.ranks.pod_of[0]]
        assert member.report is not None
        address, port = member.view.address, member.report.offered_port
        if address is None:
            return None
        first = zlib.crc32(state.name.encode())
        # Older attempts used the ports before a known one: an attempt may have had several.
        used = [(p - FIRST_PORT - first) % PORTS + 1 for host, p in self.masters if host == address]
        start = first + max([state.attempt, *used])
        offered = [] if port is None else [port]
        ports = chain(offered, (FIRST_PORT + n % PORTS for n in range(start, start + PORTS)))
        unused = (one for one in ports if (address, one) not in self.masters)
        # If all were used, the processes of the first attempts have long ended.
        return address, next(unused, FIRST_PORT + start % PORTS)

    def _watch(self, now: float) -> None:
        """Report the job as running once it is; see its end, and the end of its last recovery."""
        state = self._state
        if len(state.gang.completed) == state.nnodes:
            text = f"{all_of(state.nnodes, 'agent')} completed attempt {state.attempt}"
            self.conclude(JobEnd(ConditionType.COMPLETED, "Completed", text), now)
        elif state.gang.stage is GangStage.RUNNING and state.condition is not ConditionType.RUNNING:
            self.report_running(now)
        elif self._progress_by is not None and now >= self._progress_by:
            self._recovered(now)

    def report_running(self, now: float) -> None:
        """Every agent runs the attempt."""
        state, incident = self._state, self._state.incidents.open
        state.has_run = True
        text = f"attempt {state.attempt} runs on {counted(state.nnodes, 'node')}"
        if incident is not None:
            self._reached("started", state.gang.last_started, now)
            self._progress_by = now + (PROGRESS_SECONDS if self._has_reports() else 0.0)
            spent = round((now - incident.detected_at) * 1000)
            fault = f"{incident.culprit.fault}: {incident.culprit.text}"
            text = f"{fault}; remediated in {spent} milliseconds"
        state.set_condition(ConditionType.RUNNING, "Running", text, now)
        state.record_event("Running", text)

    def _has_reports(self) -> bool:
        """True if any agent of the attempt reports what its workers do. Stock agents do not; of
        them only the state RUNNING will ever be known."""
        members = [self._state.roster.members.get(uid) for uid in self._state.ranks.rank_of]
        reports = [member.report for member in members if member is not None]
        return any(report is not None and not is_stock(report) for report in reports)

    def _reached(self, stage: str, last: PodUid | None, now: float) -> None:
        """Note the time of a stage of the recovery, and the pod that it waited for last."""
        state, incident = self._state, self._state.incidents.open
        if incident is None:
            return
        changes: dict[str, object] = {f"{stage}_at": now}
        # With one pod, or if no pod was waited for, no pod is named.
        if last in state.ranks.rank_of and state.nnodes > 1:
            name = state.roster.members[last].view.name
            changes["slowest"] = {**incident.slowest, stage: name}
        state.incidents.change(**changes)

    def _count_kept(self) -> None:
        """Note which ranks keep their process, before the start."""
        state, incident = self._state, self._state.incidents.open
        if incident is None or state.gang.mode == PROCESS_RESTART:
            return
        reports = [state.roster.members[uid].report for uid in state.ranks.rank_of]
        found = [(len(one.kept), one.nproc or 0) for one in reports if one is not None]
        kept, ranks = map(sum, zip(*found, strict=True))
        if kept:
            reason = ladder.kept(incident.reason, kept, ranks)
            remedy = ladder.rung_of(incident.remedy).when_kept or incident.remedy
            state.incidents.change(remedy=remedy, reason=reason, kept=kept)

    def _recovered(self, now: float) -> None:
        incident, self._progress_by = self._state.incidents.open, None
        self._close_incident(RECOVERED, now)
        self._unresumed = None if incident is None else incident.number

    def _close_incident(self, outcome: str, now: float) -> None:
        """Close the open incident, with the first output of the attempt that it led to."""
        state, incident = self._state, self._state.incidents.open
        if incident is not None and incident.started_at is not None:
            members = [state.roster.members.get(uid) for uid in state.ranks.rank_of]
            reports = [member.report for member in members if member and member.report]
            found = [
                w.first_output_at for r in reports if r.attempt == state.attempt for w in r.workers
            ]
            first = earliest(*found)
            if first is not None:
                state.incidents.change(first_output_at=_within(incident, first, now))
        state.close_incident(outcome, now)

    def _finish(self, now: float) -> None:
        state, verdict = self._state, self.verdict
        assert verdict is not None
        if verdict.condition in ENDS:
            self.conclude(verdict, now)
            return
        state.enter(Phase.SUSPENDED)
        if state.condition is not ConditionType.SUSPENDED:
            state.set_ledger(end_life(state.ledger, state.status.start_time, now))
        state.close_incident(_outcome(verdict), now)
        state.plan.reshape(())
        state.ranks.reset(())
        for member in list(state.roster.members.values()):
            self.clean_pod(member, now)
        state.set_condition(ConditionType.SUSPENDED, verdict.reason, verdict.message, now)
        state.record_event(verdict.reason, verdict.message)

    def _must_go(self, member: Member) -> bool:
        state, policy = self._state, self._policy().clean_pod_policy
        keeps = member.report is not None and bool(member.report.kept)
        if policy is CleanPodPolicy.ALL or member.uid in state.gang.unclear or keeps:
            return True
        is_spare = bool(state.ranks.rank_of) and member.uid not in state.ranks.rank_of
        is_complete = member.uid in state.gang.completed or member.state is AgentState.COMPLETED
        is_moving = state.options.planned_moves is not Switch.OFF
        if is_spare and is_moving and state.roster.notice_of(member) is not None:
            return True  # A move has left it behind; a job that trains on deletes it, too.
        return policy is CleanPodPolicy.ONLY_COMPLETE and (is_spare or is_complete)

    def _policy(self) -> RunPolicy:
        assert self._state.spec is not None
        return self._state.spec.run_policy

    def _limit(self, now: float) -> tuple[float, str, str] | None:
        state = self._state
        if state.phase not in (Phase.PREPARING, Phase.TRAINING):
            return None
        start, incident = state.status.start_time, state.incidents.open
        is_faulted = incident is not None and incident.started_at is None
        since = Since(
            active=start,
            starting=None if state.has_run else start,
            faulted=incident.detected_at if incident and is_faulted else None,
        )
        found = limit(self._policy(), since)
        if found is None:
            return None
        causes = [found.message, *(one.sentence() for one in list(state.trouble.values())[:1])]
        return found.at, found.reason, "; ".join(causes)

    def _limit_at(self) -> float | None:
        found = self._limit(0.0)
        return None if found is None else found[0]

    def _expiry(self) -> float | None:
        due = expiry(self._policy(), self._state.status.completion_time)
        return due if self._expire_at is None or due is None else max(due, self._expire_at)


def as_port(text: str | None) -> int:
    """Return the master port of a status; 0: it is not a number."""
    return whole_number(text or "", 0, PORT_MAX) or 0


def _within(incident: Incident, at: float, now: float) -> float:
    """Return a time of the attempt after the incident, whatever an agent's clock says."""
    return min(max(at, incident.ready_at or incident.detected_at), now)


def _outcome(verdict: JobEnd) -> str:
    if verdict.condition is ConditionType.SUSPENDED:
        return "suspended"
    return RECOVERED if verdict.condition is ConditionType.COMPLETED else verdict.reason
