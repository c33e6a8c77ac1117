"""A look at all ranks before a suspected hang is taken for a fault.

Every agent is asked what its ranks do; once all have answered, or the time for it is over, the
suspicion becomes a fault with its culprit, or is dismissed.  Whatever else ends the attempt
meanwhile takes the suspicion along and waits for nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from unbroken.spec.detectors import Detector, Mode
from unbroken.spec.incident import Signal
from unbroken.wire.agent import AgentReport, FaultKind
from unbroken.wire.observation import Alarm, CollectCommand, Evidence, RankEvidence

from . import signals
from .doings import telling_frames
from .events import CollectEvidence, PodUid
from .gang import Stage
from .incidents import RESTART_REQUESTED
from .origins import Place
from .recovery import Details, Recovery
from .roster import Member, is_stock
from .stacks import CERTAIN, LIKELY, Blame, blame
from .stalls import NOBODY_SECONDS, SPIN_SECONDS, Stall, Stalls
from .state import JobState, Phase

EXAMINE_SECONDS = 4.0
"""For the agents to look at their ranks."""
GRACE_SECONDS = 0.5
"""For their answers to come."""
SPIN_LOOKS = 3
"""Looks in a row at which a rank has to compute in one place: an evaluation may be seen twice in
the same functions by chance."""
SPIN_PAUSE_SECONDS = 10.0
"""Between these."""
DISMISSED = "StallDismissed"
HANG_REASONS = ("LogHang_", "LogSlow_")
_STOPPED = ("T", "t", "")
_STUCK = ("D", "")


@dataclass(slots=True)
class _Case:
    """What is suspected, and what is known of it."""

    request: int
    attempt: int
    found_at: float
    by: float
    awaited: set[PodUid]
    suspected: dict[tuple[Detector, Place], float]
    """Alarms of ranks that stood when it was asked, by when they began: a look says nothing of
    one that came later."""
    evidence: dict[PodUid, Evidence] = field(default_factory=dict)
    rules: list[Signal] = field(default_factory=list)
    """Log rules that the job breaks: they are faults, whatever the evidence says."""


class Examination:
    """Suspicions of one job; at most one look at a time."""

    def __init__(self, state: JobState, recovery: Recovery, stalls: Stalls) -> None:
        self._state = state
        self._recovery = recovery
        self._stalls = stalls
        self._case: _Case | None = None
        self._requests = 0
        self._look_at: float | None = None
        """When a silence that was dismissed is looked at again."""
        self._is_told = False
        """The dismissal of this silence was."""
        self._spins = 0
        """Looks in a row at which a rank computed in one place."""
        self._cleared: dict[tuple[Detector, Place], float] = {}
        """Alarms of ranks that a look did not confirm, by when they began."""

    def deadline(self) -> float | None:
        """When time alone will change something here."""
        if self._state.phase is not Phase.TRAINING:
            return None
        if self._case is not None:
            return self._case.by
        return self._look_at if self._is_silence_due(float("inf")) else None

    def suspect(self, found: Sequence[Signal], now: float) -> None:
        """Take log rules that say that the job hangs."""
        if not found:
            return
        if not self._is_running():
            self._recovery.fault(found, now)
            return
        case = self._case or self._begin(now)
        known = {(one.pod, one.rank, one.text) for one in case.rules}
        case.rules += [one for one in found if (one.pod, one.rank, one.text) not in known]

    def take(self, uid: PodUid, evidence: Evidence) -> None:
        """Take an agent's answer; one to another question is none."""
        case = self._case
        is_ours = case is not None and evidence.request == case.request
        if case is not None and is_ours and evidence.attempt == case.attempt:
            case.evidence.setdefault(uid, evidence)
            case.awaited.discard(uid)

    def go_on(self, now: float) -> None:
        """Begin a look where there is a reason; end one that is complete, or overdue."""
        if not self._is_running():
            self._forget()
            return
        stall = self._stalls.stall
        if stall is None:
            self._look_at, self._is_told, self._spins = None, False, 0
        if self._case is None and (self._is_silence_due(now) or self._suspects()):
            self._begin(now)
        case = self._case
        if case is None:
            return
        members = self._state.roster.members
        gone = [uid for uid in case.awaited if uid not in members or members[uid].lost_why]
        case.awaited.difference_update(gone)
        if not case.awaited or now >= case.by:
            self._conclude(case, now)
            if self._is_running() and self._suspects():
                self._begin(now)

    def interrupted(self, found: Sequence[Signal], now: float) -> tuple[list[Signal], Details]:
        """What goes into the incident that another fault opens, with the evidence there is."""
        case, self._case = self._case, None
        if all(one.fault == RESTART_REQUESTED for one in found):
            return [], {}
        waiting = self._stalls.overtaken(now)
        if case is None:
            return waiting, {}
        what = self._blame(case, now)
        suspected = self._findings(case, what, now)
        if not what.ranks:
            # That nobody gets on is what others see of a fault, and no cause beside one.
            suspected = [s if s.rank is not None else replace(s, at=now) for s in suspected]
        return [*suspected, *waiting], self._details(case, what, now)

    def _is_running(self) -> bool:
        state = self._state
        return state.phase is Phase.TRAINING and state.gang.stage is not Stage.HALTED

    def _is_silence_due(self, now: float) -> bool:
        stall = self._stalls.stall
        may_act = stall is not None and self._stalls.mode(self._stalls.silence()) is Mode.ACT
        return may_act and (self._look_at is None or now >= self._look_at)

    def _suspects(self) -> list[tuple[Detector, Place, Alarm]]:
        """Alarms of ranks that may act, but those that a look did not confirm."""
        return [
            (detector, place, alarm)
            for detector, place, alarm in self._stalls.suspects()
            if self._cleared.get((detector, place)) != alarm.since
        ]

    def _begin(self, now: float) -> _Case:
        """Ask everybody."""
        state = self._state
        # An earlier operator may have asked too; its questions are others.
        self._requests = max(self._requests + 1, int(now * 1000))
        asked = [uid for uid in state.gang.ranks if self._can_answer(uid)]
        command = CollectCommand(self._requests, state.attempt, EXAMINE_SECONDS)
        state.commands += [CollectEvidence(uid, command) for uid in sorted(asked)]
        by = now + EXAMINE_SECONDS + GRACE_SECONDS
        suspected = {(one, place): alarm.since for one, place, alarm in self._suspects()}
        self._case = _Case(self._requests, state.attempt, now, by, set(asked), suspected)
        return self._case

    def _can_answer(self, uid: PodUid) -> bool:
        member = self._state.roster.members.get(uid)
        if member is None or member.report is None or member.lost_why:
            return False
        return uid not in self._state.gang.completed and not is_stock(member.report)

    def _conclude(self, case: _Case, now: float) -> None:
        """Say what the look has shown."""
        self._case = None
        what = self._blame(case, now)
        self._spins = self._spins + 1 if what.is_spinning and not what.is_working else 0
        found = self._findings(case, what, now)
        if found:
            self._recovery.fault(found, now, self._details(case, what, now))
            return
        stall = self._stalls.stall
        if stall is not None:
            self._dismiss(stall, what, now)

    def _dismiss(self, stall: Stall, what: Blame, now: float) -> None:
        self._look_at = stall.since + 2.0 * (now - stall.since)
        patience = self._patience(stall, what)
        if not what.is_working and patience:
            is_unsure = 0 < self._spins < SPIN_LOOKS
            due = now + SPIN_PAUSE_SECONDS if is_unsure else max(patience, now + 1.0)
            self._look_at = min(self._look_at, due)
        if not self._is_told:
            self._is_told = True
            state = "but at work" if what.is_working else "and is given more time"
            self._state.tell(
                DISMISSED, f"silent for {now - stall.since:.0f} s, {state}: {what.why}"
            )

    def _patience(self, stall: Stall, what: Blame) -> float:
        """Until when it may still come to an end by itself; 0: who is to blame is seen."""
        if what.is_spinning:
            return self._stalls.patience(stall, SPIN_SECONDS)
        return 0.0 if what.ranks else self._stalls.patience(stall, NOBODY_SECONDS)

    def _findings(self, case: _Case, what: Blame, now: float) -> list[Signal]:
        """The faults that are left after the look."""
        looks = _looks(case)
        found = self._confirmed(case, looks, now)
        found += [self._of_rule(one, what, looks) for one in case.rules]
        stall = self._stalls.stall
        if stall is not None and not found and self._is_hang(stall, what, now):
            found = self._of_silence(stall, what, looks, now)
        return found

    def _confirmed(self, case: _Case, looks: dict[int, RankEvidence], now: float) -> list[Signal]:
        """Ranks that are stopped or stuck, unless the look has shown otherwise."""
        found = []
        for detector, place, alarm in self._suspects():
            seen = looks.get(place[1])
            states = _STOPPED if detector is Detector.STOPPED else _STUCK
            if seen is not None and seen.state not in states:
                if case.suspected.get((detector, place)) == alarm.since:
                    self._cleared[detector, place] = alarm.since
                continue
            signal = self._stalls.signal(detector, place, alarm, now)
            found.append(replace(signal, evidence=_seen(seen)))
        return found[: signals.FAULTS_MAX]

    def _is_hang(self, stall: Stall, what: Blame, now: float) -> bool:
        """Whether a silence is one; it is only looked at where it may act."""
        if self._stalls.mode(self._stalls.silence()) is not Mode.ACT or what.is_working:
            return False
        if now < self._patience(stall, what):
            return False
        if not what.is_spinning:
            return True
        is_sure = self._spins >= SPIN_LOOKS
        return is_sure and self._stalls.mode(Detector.SPINNING) is Mode.ACT

    def _of_silence(
        self, stall: Stall, what: Blame, looks: dict[int, RankEvidence], now: float
    ) -> list[Signal]:
        fault = signals.SPINNING if what.is_spinning else signals.STALLED
        seconds = f"no rank got on for {now - stall.since:.0f} s"
        text = f"{what.why}; {seconds}"[: signals.TEXT_CHARACTERS]
        signal = Signal(min(stall.since, now), fault, text)
        blamed = what.ranks[: signals.FAULTS_MAX]
        return [self._placed(signal, rank, looks.get(rank)) for rank in blamed] or [signal]

    def _of_rule(self, rule: Signal, what: Blame, looks: dict[int, RankEvidence]) -> Signal:
        """The rule says that there is a hang; who hangs is better seen than read."""
        if what.confidence not in (CERTAIN, LIKELY) or not what.ranks:
            return rule
        rank = what.ranks[0]
        told = replace(rule, text=f"{rule.text}; {what.why}"[: signals.TEXT_CHARACTERS])
        placed = self._placed(told, rank, looks.get(rank))
        return placed if placed.evidence else replace(placed, evidence=rule.evidence)

    def _placed(self, signal: Signal, rank: int, seen: RankEvidence | None) -> Signal:
        member, step = self._holder(rank)
        return replace(
            signal,
            rank=rank,
            pod=member.view.name if member else "",
            node=(member.view.node if member else None) or "",
            evidence=_seen(seen),
            step=step if seen is None or seen.step is None else seen.step,
        )

    def _holder(self, rank: int) -> tuple[Member | None, int | None]:
        """The pod in which the rank runs, and the rank's newest step."""
        state = self._state
        nproc = self._nproc()
        pod = state.ranks.pod_of.get(rank // nproc)
        if pod is None:
            return None, None
        told = state.watched.get(pod, ())
        return state.roster.members.get(pod), next((w.step for w in told if w.rank == rank), None)

    def _nproc(self) -> int:
        """Ranks of a node, the same on all of them."""
        reports = (m.report for m in self._state.roster.members.values())
        return max((r.nproc or 1 for r in reports if r is not None), default=1)

    def _blame(self, case: _Case, now: float) -> Blame:
        ranks = list(_looks(case).values())
        return blame(ranks, now, self._state.nnodes * self._nproc())

    def _details(self, case: _Case, what: Blame, now: float) -> Details:
        if not case.evidence:
            return Details(detected_at=case.found_at)
        return Details(
            detected_at=case.found_at,
            examined_at=now,
            confidence=what.confidence,
            blame=what.why,
            groups=what.groups,
        )

    def _forget(self) -> None:
        self._case, self._look_at, self._is_told, self._spins = None, None, False, 0
        self._cleared.clear()


def is_hang(report: AgentReport) -> bool:
    """Whether all that an agent complains of are log rules that hang or are slow."""
    return bool(report.faults) and all(
        fault.kind is FaultKind.LOG_RULE and fault.message.startswith(HANG_REASONS)
        for fault in report.faults
    )


def _looks(case: _Case) -> dict[int, RankEvidence]:
    """What was seen, by rank."""
    return {one.rank: one for told in case.evidence.values() for one in told.ranks}


def _seen(seen: RankEvidence | None) -> tuple[str, ...]:
    """Where the thread is that explains the rank, and what was written last."""
    if seen is None:
        return ()
    frames = telling_frames(seen)
    said = (f"{signals.LAST_OUTPUT}: {seen.last_line}",) if seen.last_line else ()
    kept = (*frames[: signals.LINES_MAX - len(said)], *said)
    return tuple(line[: signals.TEXT_CHARACTERS] for line in kept)
