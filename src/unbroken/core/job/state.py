"""The state that the parts of a job's machine share: the job's phase, and the orders to give.

Effects leave in one order: commands to agents, pods and nodes, the status, events, incidents. Pods
of an ended job are deleted after the status is written: until then they are the only record of how
it ended.
"""

from __future__ import annotations

from dataclasses import replace

from unbroken.core.job.record.conditions import advance, current_condition, with_ready_count
from unbroken.core.job.record.redaction import clean
from unbroken.core.job.record.timeline import settle
from unbroken.core.job.recovery.incidents import UNCHARGED, Incidents
from unbroken.core.job.watch.progress import Watched
from unbroken.core.snapshots.buddies import Buddies
from unbroken.spec.job.incident import Incident
from unbroken.spec.job.ledger import Ledger
from unbroken.spec.job.types import (
    FaultyPods,
    JobOptions,
    JobSpec,
    JobStatus,
    ReplicaSpec,
    RestartStatus,
    Switch,
)
from unbroken.spec.keys import ConditionType
from unbroken.wire.agent import PROCESS_RESTART

from .deadlines import Timers
from .events import (
    CreatePod,
    DeleteIncident,
    JobEffect,
    PodName,
    PodUid,
    RecordEvent,
    WriteLedger,
    WriteStatus,
)
from .gang import Gang
from .kueue import Admission, Gate, Hold
from .obstacles import Obstacle, with_wait
from .pods import PodPlan
from .recovery import ladder
from .roster import Ranks, Roster
from .transitions import Phase, check

EVENT_CHARACTERS = 1000
"""Characters of an event's message; the API takes 1024."""


class JobState:
    """The parts of one job, and its status as it will be written."""

    _stored_ledger: Ledger | None
    """The ledger that the API server has; None: one with another start is on its way there."""

    def __init__(self, name: str, status: JobStatus) -> None:
        self.name = name
        self.status = status
        self.spec: JobSpec | None = None
        self.options = JobOptions()
        self.gate: Gate = None
        self.shape: tuple[ReplicaSpec, ...] = ()
        """Replica specs in force: those of the spec at the last full start."""
        self._phase = Phase.UNKNOWN
        self.attempt = status.restart_count
        """The attempt that runs; in PREPARING, the one that is to start."""
        self.newest_seen = -1
        """Newest attempt that any agent of a living pod knows."""
        self.commands: list[JobEffect] = []
        self.objects: list[JobEffect] = []
        """Orders about pods and nodes in this step, all of `plan`; `commands` go to agents."""
        self.roster = Roster()
        self.gang = Gang(self.roster, self.commands)
        self.ranks = Ranks()
        self.buddies = Buddies()
        self.plan = PodPlan(name, self.roster, self.objects)
        self.incidents = Incidents()
        self.watched: Watched = {}
        """Reports of the ranks of the attempt that runs, or ran last, about themselves."""
        self.broken: tuple[int, str] = (-1, "")
        """The newest attempt that a fault has ended, and the fault's class."""
        self.lost: Timers[PodUid] = Timers()
        """Time since when agents are unreachable, the longest first."""
        self.trouble: dict[PodName, Obstacle] = {}
        """Obstacles of pods that do not start, by name."""
        self.condition = current_condition(status.conditions)
        self.has_run = any(c.type == ConditionType.RUNNING.value for c in status.conditions)
        self.questions = 0
        """Number of the newest question to the agents (`core.job.watch.unreached`)."""
        self.has_changed = False
        """True if an event may allow a waiting job to continue."""
        self.last: list[JobEffect] = []
        self._events: list[JobEffect] = []
        self._incident_writes: list[JobEffect] = []
        self._written = status
        self.ledger = self._written_ledger = self._stored_ledger = Ledger()

    @property
    def phase(self) -> Phase:
        """Phase of the job."""
        return self._phase

    def enter(self, phase: Phase) -> None:
        """Change the phase. Raises IllegalTransitionError where `transitions` does not allow it."""
        check(self._phase, phase)
        self._phase = phase

    @property
    def nnodes(self) -> int:
        """Number of node ranks."""
        return self.ranks.nnodes

    @property
    def hold(self) -> Hold | None:
        """Return why the job may not run; None: it may."""
        if self.spec is not None and self.spec.run_policy.suspend:
            return Hold("JobSuspended", "the job is suspended")
        return self.gate if isinstance(self.gate, Hold) else None

    @property
    def may_add_pods(self) -> bool:
        """True unless a queue has granted the job its pods, and no more."""
        return not isinstance(self.gate, Admission)

    @property
    def is_incident_unwritten(self) -> bool:
        """True if an earlier operator charged a fault, and could not write its incident: it writes
        the status first."""
        return self.condition is ConditionType.FAULTED and self.incidents.open is None

    def set_status(self, **changes: object) -> None:
        """Change the status; it is written at the end of the step."""
        self.status = replace(self.status, **changes)  # type: ignore[arg-type]

    def set_condition(self, to: ConditionType, reason: str, message: str, now: float) -> None:
        """Set the job's condition to `to`."""
        self.condition, message = to, clean(message)
        before = with_wait(self.status.conditions, "", "")
        self.set_status(conditions=advance(before, to, reason, message, now))

    def count_ready(self) -> None:
        """Set the number in PodsRunning: ready or training pods, of those that are to train."""
        match self.phase:
            case Phase.PREPARING:
                ready = min(len(self.gang.ready), self.nnodes)
            case Phase.TRAINING:
                ready = self.nnodes
            case Phase.SUSPENDED | Phase.ENDED:
                ready = 0
            case _:
                return
        wanted = self.nnodes or (self.spec.nnodes if self.spec else 0)
        conditions = with_ready_count(self.status.conditions, ready, wanted)
        if conditions != self.status.conditions:
            self.set_status(conditions=conditions)

    def record_event(self, reason: str, message: str, *, is_warning: bool = False) -> None:
        """Record an event on the job."""
        message = clean(message)[:EVENT_CHARACTERS]
        self._events.append(RecordEvent(reason, message, is_warning))

    def find_ledger(self, ledger: Ledger) -> None:
        """Take over the ledger that an earlier operator has written."""
        self.ledger = self._written_ledger = self._stored_ledger = ledger

    def set_ledger(self, ledger: Ledger) -> None:
        """Change the ledger; it is written at the end of the step."""
        self.ledger = ledger

    def ledger_written(self, ledger: Ledger) -> None:
        """The API server has stored the ledger."""
        self._stored_ledger = ledger
        self.has_changed = True

    def is_start_stored(self) -> bool:
        """True if the API server has lease and nodes of the attempt that is to start."""
        stored = self._stored_ledger
        return stored is not None and stored.start == self.ledger.start

    def create_no_more(self) -> None:
        """Withdraw the pods ordered in this step: the job has ended in the same step."""
        self.objects[:] = [order for order in self.objects if not isinstance(order, CreatePod)]

    def restart_mode(self) -> str:
        """Return the mode of the restart under way: whether processes may be kept."""
        incident = self.incidents.open
        if incident is None or self.options.in_process is Switch.OFF:
            return PROCESS_RESTART
        before = [one for one in self.closed_incidents() if one.attempt < incident.attempt]
        return ladder.restart_mode(incident, before[-1] if before else None)

    def closed_incidents(self) -> list[Incident]:
        """Return the closed incidents of this life of the job, in order of number."""
        start = self.status.start_time or 0.0
        closed = self.incidents.closed
        return [closed[n] for n in sorted(closed) if closed[n].detected_at >= start]

    def close_incident(self, outcome: str, now: float) -> None:
        """End the open incident, if there is one."""
        self._incident_writes += self.incidents.close(outcome, now)

    def amend_incident(self, number: int, **changes: object) -> None:
        """Change an incident, open or closed."""
        self._incident_writes += self.incidents.amend(number, **changes)

    def retire_incidents(self) -> None:
        """Move the cost of surplus incidents into the ledger, and delete them."""
        for incident in self.incidents.retire():
            is_charged = incident.culprit.fault not in UNCHARGED
            self.set_ledger(settle(self.ledger, incident, is_charged=is_charged))
            self.last.append(DeleteIncident(incident.number))

    def set_budget(self, budget: RestartStatus, faulty: FaultyPods) -> None:
        """Note the charge, and its incident."""
        self.set_status(restart_status=budget, latest_faulty=faulty, restart_count=self.attempt)

    def flush(self) -> list[JobEffect]:
        """Return everything ordered in this step, in the agreed order."""
        is_over = self.phase is Phase.ENDED
        effects = self.commands + ([] if is_over else self.objects)
        if self.status != self._written:
            self.count_ready()
            self._written = self.status
            effects.append(WriteStatus(self.status))
        effects += self._events + self._incident_writes + self.incidents.writes()
        if self.ledger != self._written_ledger:
            if self.ledger.start != self._written_ledger.start:
                self._stored_ledger = None
            self._written_ledger = self.ledger
            effects.append(WriteLedger(self.ledger, is_awaited=not self.is_start_stored()))
        effects += (self.objects if is_over else []) + self.last
        for ordered in (self.commands, self.objects, self._events, self._incident_writes):
            ordered.clear()
        self.last.clear()
        return effects
