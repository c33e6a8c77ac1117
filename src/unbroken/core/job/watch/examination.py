"""A look at all ranks before a suspected hang is taken for a fault, and at slow ones.

Every agent is asked what its ranks do; once all have answered, or the time for it is over, the
suspicion becomes a fault with its culprit, or is dismissed.  Whatever else ends the attempt
meanwhile takes the suspicion along and waits for nobody.

What looks show, and how long a silence may last for that, is in `core.job.watch.looks`.

`Stragglers` finds the straggler of a job in which all ranks became slow together. Ranks that train
in step have the same step time, whichever rank causes it. But the rank that causes it does not wait
for its peers, while they wait for it in each step. So the stacks of all ranks are sampled for a
while, and the shares of samples in which they wait are compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median_high

from unbroken.core.diagnosis.rank_activity import explaining_frames
from unbroken.core.diagnosis.stacks import CERTAIN, LIKELY, Blame, blame
from unbroken.core.job.deadlines import earliest
from unbroken.core.job.events import PodUid
from unbroken.core.job.gang import GangStage
from unbroken.core.job.recovery import symptoms
from unbroken.core.job.recovery.incidents import RESTART_REQUESTED
from unbroken.core.job.recovery.recovery import Details, Recovery
from unbroken.core.job.roster import Member
from unbroken.core.job.state import JobState
from unbroken.core.job.transitions import Phase
from unbroken.core.patience import (
    BEGINNING,
    CALM_PAUSE_SECONDS,
    CALM_PAUSE_SECONDS_MAX,
    CUT_OFF,
    NOBODY,
    REPEAT_FACTOR,
    REPEATS_MAX,
    SLOW,
    SPINNING,
)
from unbroken.core.watchdog.levels import STARTUP
from unbroken.spec.job.detectors import Detector, Mode
from unbroken.spec.job.incident import PLANNED_MOVE, Symptom
from unbroken.wire.agent import AgentReport
from unbroken.wire.observation import Alarm, Bound, Evidence, RankEvidence, RankWatch

from .looks import Looks, StillRanks, is_named, is_unread
from .progress import FIRST_SECONDS, before
from .stalls import RankPlace, Stall, Stalls, named
from .unreached import NOT_REACHABLE, Question, Unreached, ask

EXAMINE_SECONDS = 4.0
"""For the agents to look at their ranks."""
CONFIRM_SECONDS = 3.0
"""Seconds for a look at ranks that the look before has shown not to move."""
SECONDS_MAX = 16.0
"""For the agents of a busy machine, after looks that did not end in time."""
UNREACHED_AVOIDED_SECONDS = 300.0
"""Seconds for which pods keep away from a node that others did not reach (judgement): networks come
back by themselves, as a rule, and a free node may be all that is left."""
DISMISSED = "StallDismissed"
_STOPPED = ("T", "t", "")
_STUCK = ("D", "")


@dataclass(slots=True)
class _Case:
    """A suspicion, and what is known of it."""

    question: Question
    found_at: float
    suspected: dict[tuple[Detector, RankPlace], float]
    """Alarms of ranks that stood when it was asked, by when they began: a look says nothing of
    one that came later."""
    rules: list[Symptom] = field(default_factory=list)
    """Log rules that the job breaks: they are faults, whatever the evidence says."""


class Examination:
    """Suspicions of one job; at most one look at a time."""

    def __init__(self, state: JobState, recovery: Recovery, stalls: Stalls) -> None:
        self._state = state
        self._recovery = recovery
        self._stalls = stalls
        self._unreached = Unreached(state)
        self._case: _Case | None = None
        self._stall: Stall | None = None
        """The silence at the newest step."""
        self._look_at: float | None = None
        """Time at which a dismissed silence is looked at again."""
        self._is_dismissal_recorded = False
        """The dismissal of this silence was."""
        self._spins = 0
        """Looks in a row at which a rank computed in one place."""
        self._spun_at = -SPINNING.pause_seconds
        """Time of the newest of these."""
        self._seconds = EXAMINE_SECONDS
        self._late_at = 0.0
        """Time from which late ranks may be looked at."""
        self._looks = Looks()
        self._cleared: dict[tuple[Detector, RankPlace], float] = {}
        """Alarms of ranks that a look did not confirm, by when they began."""

    def deadline(self) -> float | None:
        """Return when time alone will change something here."""
        if self._state.phase is not Phase.TRAINING:
            return None
        if self._case is not None:
            return self._case.question.by
        look_at = self._look_at if self._is_silence_due(float("inf")) else None
        late_at = self._late_at if self._is_late_due(float("inf")) else None
        return earliest(look_at, late_at)

    def suspect(self, found: Sequence[Symptom], now: float) -> None:
        """Take log rules that say that the job hangs."""
        if not found:
            return
        if not self._is_running():
            self._recovery.fault(found, now)
            return
        case = self._case or self._begin(now)
        known = {(one.pod, one.rank, one.text) for one in case.rules}
        case.rules += [one for one in found if (one.pod, one.rank, one.text) not in known]

    def note_peers(self, member: Member, report: AgentReport, now: float) -> None:
        """Take what an agent of the attempt that runs says of its way to another one."""
        self._unreached.take(member, report, now)

    def answered(self, uid: PodUid, evidence: Evidence) -> None:
        """Take an agent's answer to a question of this job."""
        if self._case is not None:
            self._case.question.take(uid, evidence)

    def advance(self, now: float) -> None:
        """Begin a look where there is a reason; end one that is complete, or overdue."""
        self._unreached.begin(now)
        if not self._is_running():
            self._forget()
            return
        stall = self._stalls.stall
        self._follow(stall)
        if not self._is_late():
            self._late_at = min(self._late_at, now + CALM_PAUSE_SECONDS)
            if stall is None:
                self._looks.clear()
        is_due = self._is_silence_due(now) or self._is_late_due(now)
        if self._case is None and (is_due or self._suspects()):
            self._begin(now)
        case = self._case
        if case is None:
            return
        if case.question.is_over(self._state, now):
            self._conclude(case, now)
            if self._is_running() and self._suspects():
                self._begin(now)

    def _follow(self, stall: Stall | None) -> None:
        """Forget a silence that is over, also one that another follows in one report."""
        before, self._stall = self._stall, stall
        if stall is None or stall != before:
            self._look_at, self._is_dismissal_recorded, self._spins = None, False, 0
        if stall is not None and before is not None and stall != before:
            self._looks.clear()
            if self._case is not None and not self._case.rules:
                self._case = None

    def interrupted(self, found: Sequence[Symptom], now: float) -> tuple[list[Symptom], Details]:
        """Return the part of the incident that another fault opens, with the evidence so far."""
        case, self._case = self._case, None
        if all(one.fault in (RESTART_REQUESTED, PLANNED_MOVE) for one in found):
            return [], {}
        waiting = self._stalls.overtaken(now)
        if case is None:
            return waiting, {}
        what = self._blame(case, now)
        suspected = self._findings(case, what, now, is_over=True)
        if not what.ranks:
            # That nobody gets on is what others see of a fault, and no cause beside one.
            suspected = [s if s.rank is not None else replace(s, at=now) for s in suspected]
        return [*suspected, *waiting], self._details(case, what, now)

    def _is_running(self) -> bool:
        state = self._state
        return state.phase is Phase.TRAINING and state.gang.stage is not GangStage.HALTED

    def _is_silence_due(self, now: float) -> bool:
        stall = self._stalls.stall
        may_act = stall is not None and self._stalls.mode(self._stalls.silence()) is Mode.ACT
        return may_act and (self._look_at is None or now >= self._look_at)

    def _is_late(self) -> bool:
        """True if a look may show more: ranks are late, or pods do not reach each other."""
        return bool(self._stalls.late) or self._unreached.since is not None

    def _is_late_due(self, now: float) -> bool:
        may_act = self._stalls.mode(Detector.SILENT) is Mode.ACT
        return self._is_late() and may_act and now >= self._late_at

    def _suspects(self) -> list[tuple[Detector, RankPlace, Alarm]]:
        """Alarms of ranks that may act, but those that a look did not confirm."""
        return [
            (detector, place, alarm)
            for detector, place, alarm in self._stalls.suspects()
            if self._cleared.get((detector, place)) != alarm.since
        ]

    def _begin(self, now: float) -> _Case:
        """Ask everybody."""
        suspected = {(one, place): alarm.since for one, place, alarm in self._suspects()}
        self._case = _Case(ask(self._state, self._seconds, now), now, suspected)
        return self._case

    def _conclude(self, case: _Case, now: float) -> None:
        """Say what the look has shown."""
        self._case = None
        what = self._blame(case, now)
        seen = case.question.ranks()
        is_whole = not case.question.awaited and not any(map(is_unread, seen.values()))
        still = self._looks.add(seen, what, self._world(), is_whole=is_whole)
        self._count_spin(what, now)
        self._plan_look(still, now, is_whole=is_whole)
        lost = self._lose_unreached(now)
        if lost:
            what = replace(what, confidence=LIKELY)
            self._recovery.fault(lost, now, self._details(case, what, now))
            return
        certain = self._certain(now)
        if certain is not None:
            ranks = certain.ranks
            what = replace(what, ranks=ranks, confidence=CERTAIN) if ranks else what
        found = self._findings(case, what, now)
        if certain is not None and not found:
            self._stalls.confirm()
            since = max(one.late_since or now for one in self._stalls.late.values())
            found = self._of_silence(since, what, case.question.ranks(), now)
        if found:
            self._recovery.fault(found, now, self._details(case, what, now))
            return
        stall = self._stalls.stall
        if stall is not None:
            self._dismiss(stall, what, now)

    def _lose_unreached(self, now: float) -> list[Symptom]:
        """Let go of the pod that others do not reach, if all ranks wait; return the fault."""
        since, still = self._unreached.since, self._looks.still
        if since is None or still is None or not still.is_mutual:
            return []
        if self._stalls.mode(Detector.SILENT) is not Mode.ACT:
            return []
        is_long = still.looks >= CUT_OFF.looks and now >= since + CUT_OFF.seconds
        found = self._unreached.worst() if is_long else None
        if found is None:
            return []
        member, text = found
        self._stalls.confirm()
        if member.view.node is not None:
            self._state.plan.give_up(member.view.node, now, UNREACHED_AVOIDED_SECONDS)
        return self._recovery.lose(member, NOT_REACHABLE, text, now)

    def _count_spin(self, what: Blame, now: float) -> None:
        """Count looks with a pause between: a rank may be in one place twice by chance."""
        if not what.is_spinning or what.is_working:
            self._spins = 0
        elif not self._spins or now >= self._spun_at + SPINNING.pause_seconds - EXAMINE_SECONDS:
            self._spins, self._spun_at = self._spins + 1, now

    def _plan_look(self, still: StillRanks | None, now: float, *, is_whole: bool) -> None:
        """Say when the next look at late ranks is due, and how long it may take."""
        if is_whole:
            self._seconds = EXAMINE_SECONDS if still is None else CONFIRM_SECONDS
        else:
            self._seconds = min(2 * self._seconds, SECONDS_MAX)
        if still is not None:
            is_cut_off = still.is_mutual and self._unreached.since is not None
            pause = (CUT_OFF if is_cut_off else still.allowance).pause_seconds
        elif is_whole:
            pause = self._calm_pause(now)
        else:
            pause = min(max(CALM_PAUSE_SECONDS, self._calm_pause(now) / 4), SLOW.pause_seconds)
        self._late_at = now + pause

    def _calm_pause(self, now: float) -> float:
        """Seconds to the next look at a job that is well: the silence doubles from look to look."""
        late = self._stalls.late.values()
        since = max((one.late_since or 0.0 for one in late), default=self._unreached.since or now)
        only_looks = any(one.bound == Bound.WORK.value for one in late)
        most = CALM_PAUSE_SECONDS_MAX if only_looks else float("inf")
        return min(max(CALM_PAUSE_SECONDS, now - since), most)

    def _certain(self, now: float) -> StillRanks | None:
        """The ranks that surely keep the others waiting; None: there are none so far."""
        still, late = self._looks.still, self._stalls.late
        if still is None or not late or self._stalls.mode(Detector.SILENT) is not Mode.ACT:
            return None
        if still.is_spinning and self._stalls.mode(Detector.SPINNING) is not Mode.ACT:
            return None
        silences = [now - (one.late_since or now) for one in late.values()]
        is_long = all(
            seconds >= (one.act_seconds or 0.0)
            for one, seconds in zip(late.values(), silences, strict=True)
        )
        since = now - min(silences)
        if not is_long or not still.is_certain(min(silences), self._repeats(since)):
            return None
        away = [self._stalls.watch(rank) for rank in still.places]
        return still if all(_is_still_too_long(one, now) for one in away) else None

    def _dismiss(self, stall: Stall, what: Blame, now: float) -> None:
        self._look_at = stall.since + 2.0 * (now - stall.since)
        if not what.is_working:
            due = max(self._patience(stall, what, quiet_looks=1), now + 1.0)
            if is_named(what) and what.is_spinning and self._spins < SPINNING.looks:
                due = now + SPINNING.pause_seconds
            elif is_named(what) and not self._looks.is_enough(what):
                due = now + SLOW.pause_seconds
            elif not self._looks.is_whole(self._world()):
                # Who was not seen may be the one that the others wait for.
                due = min(due, now + max(SPINNING.pause_seconds, (now - stall.since) / 4))
            self._look_at = min(self._look_at, due)
        if not self._is_dismissal_recorded:
            self._is_dismissal_recorded = True
            is_at_work = what.is_working or self._looks.is_at_work
            state = "but working" if is_at_work else "waiting longer"
            self._state.record_event(
                DISMISSED, f"silent for {now - stall.since:.0f} s, {state}: {what.why}"
            )

    def _patience(self, stall: Stall, what: Blame, quiet_looks: int = NOBODY.looks) -> float:
        """Until when it may still come to an end by itself."""
        given = self._looks.allowance(what, self._world(), quiet_looks)
        return stall.since + given.after(stall.allowed, self._repeats(stall.since))

    def _repeats(self, since: float) -> float:
        """Return the factor of time for a silence like those that restarts have not ended.

        A pause of the script comes again after each restart. The rank that was named for it may
        have been at work, so it must not be stopped as soon again."""
        state, count = self._state, 0
        step = before(state.watched, since)["step"]
        for one in reversed(state.closed_incidents()):
            is_silence = one.culprit.fault in (symptoms.STALLED, symptoms.SPINNING)
            began = one.progress_at or one.first_output_at or since
            ran_long = step is None and since - began >= FIRST_SECONDS
            if not is_silence or one.step != step or ran_long:
                break
            count += 1
        return float(REPEAT_FACTOR ** min(count, REPEATS_MAX))

    def _findings(
        self, case: _Case, what: Blame, now: float, *, is_over: bool = False
    ) -> list[Symptom]:
        """The faults that are left after the look; `is_over`: another fault has ended the attempt,
        so that nothing is stopped for them."""
        looks = case.question.ranks()
        found = self._confirmed(case, looks, now)
        found += [self._of_rule(one, what, looks) for one in case.rules]
        stall = self._stalls.stall
        is_seen = is_over and self._looks.has_watched(looks, what)
        is_hang = stall is not None and self._is_hang(stall, what, now, is_seen=is_seen)
        if stall is not None and not found and is_hang:
            found = self._of_silence(stall.since, what, looks, now)
        return found

    def _confirmed(self, case: _Case, looks: dict[int, RankEvidence], now: float) -> list[Symptom]:
        """Ranks that are stopped or stuck, unless the look has shown otherwise."""
        found = []
        for detector, place, alarm in self._suspects():
            seen = looks.get(place[1])
            states = _STOPPED if detector is Detector.STOPPED else _STUCK
            if seen is not None and seen.state not in states:
                if case.suspected.get((detector, place)) == alarm.since:
                    self._cleared[detector, place] = alarm.since
                continue
            symptom = self._stalls.symptom(detector, place, alarm, now)
            found.append(replace(symptom, evidence=_seen(seen)))
        return found[: symptoms.FAULTS_MAX]

    def _is_hang(self, stall: Stall, what: Blame, now: float, *, is_seen: bool) -> bool:
        """True if a silence is one; it is only looked at where it may act.  `is_seen`: nothing is
        stopped for it, so that it is enough to have seen the rank."""
        if self._stalls.mode(self._stalls.silence()) is not Mode.ACT or what.is_working:
            return False
        if is_seen and is_named(what) and not what.is_spinning:
            return True
        if now < self._patience(stall, what) or not self._looks.is_enough(what):
            return False
        if not what.is_spinning:
            return True
        is_sure = self._spins >= SPINNING.looks
        return is_sure and self._stalls.mode(Detector.SPINNING) is Mode.ACT

    def _of_silence(
        self, since: float, what: Blame, looks: dict[int, RankEvidence], now: float
    ) -> list[Symptom]:
        fault = symptoms.SPINNING if what.is_spinning else symptoms.STALLED
        seconds = f"no rank made progress for {now - since:.0f} s"
        text = f"{what.why}; {seconds}"[: symptoms.TEXT_CHARACTERS]
        symptom = Symptom(min(since, now), fault, text)
        blamed = what.ranks[: symptoms.FAULTS_MAX]
        return [self._placed(symptom, rank, looks.get(rank)) for rank in blamed] or [symptom]

    def _of_rule(self, rule: Symptom, what: Blame, looks: dict[int, RankEvidence]) -> Symptom:
        """The rule says that there is a hang; who hangs is better seen than read."""
        if what.confidence not in (CERTAIN, LIKELY) or not what.ranks:
            return rule
        rank = what.ranks[0]
        told = replace(rule, text=f"{rule.text}; {what.why}"[: symptoms.TEXT_CHARACTERS])
        placed = self._placed(told, rank, looks.get(rank))
        return placed if placed.evidence else replace(placed, evidence=rule.evidence)

    def _placed(self, symptom: Symptom, rank: int, seen: RankEvidence | None) -> Symptom:
        member, step = self._holder(rank)
        return replace(
            symptom,
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
        ranks = list(case.question.ranks().values())
        return blame(ranks, now, self._world())

    def _world(self) -> int:
        return self._state.nnodes * self._nproc()

    def _details(self, case: _Case, what: Blame, now: float) -> Details:
        if not case.question.answers:
            return Details(detected_at=case.found_at)
        return Details(
            detected_at=case.found_at,
            examined_at=now,
            confidence=what.confidence,
            blame=what.why,
            groups=what.groups,
        )

    def _forget(self) -> None:
        self._case, self._look_at, self._is_dismissal_recorded, self._spins = None, None, False, 0
        self._stall = None
        self._seconds, self._late_at = EXAMINE_SECONDS, 0.0
        self._looks.clear()
        self._cleared.clear()


def _is_still_too_long(watch: RankWatch | None, now: float) -> bool:
    """True if a rank that does not move has done so for too long by its own limits.

    A rank that reports nothing has none. In a start-up and in a new phase silence is usual: rank 0
    evaluates, saves or prepares data there while the others wait."""
    if watch is None or watch.late_since is not None:
        return True
    if watch.bound != Bound.START.value:
        return watch.bound == Bound.WORK.value
    is_silent = watch.step is None and watch.phase in ("", STARTUP)
    return is_silent or now - (watch.sign_at or now) >= BEGINNING.seconds


def _seen(seen: RankEvidence | None) -> tuple[str, ...]:
    """Return the position of the thread that explains the rank, and its last output."""
    if seen is None:
        return ()
    frames = explaining_frames(seen)
    said = (f"{symptoms.LAST_OUTPUT}: {seen.last_line}",) if seen.last_line else ()
    kept = (*frames[: symptoms.LINES_MAX - len(said)], *said)
    return tuple(line[: symptoms.TEXT_CHARACTERS] for line in kept)


SURVEY_SECONDS = 20.0
SAMPLES_PER_SECOND = 3
SAMPLES_MIN = 24
"""Samples of each rank: with fewer, chance alone makes ranks differ."""
WAITING_SHARE_MIN = 0.25
"""Share of samples in which the other ranks wait, at least: a rank that takes half as long again
keeps them waiting for a third of each step."""
RATIO_MIN = 4.0
"""The others wait so many times as often as a straggler.  If four equal ranks each wait in a
third of their samples, one of them looks so once in 10,000 surveys of 60 samples."""


class Stragglers:
    """Surveys of one job, of which at most one is made at a time."""

    def __init__(self, state: JobState, stalls: Stalls) -> None:
        self._state = state
        self._stalls = stalls
        self._question: Question | None = None

    def deadline(self) -> float | None:
        """Return when time alone will change something here."""
        return self._question.by if self._question is not None else None

    @property
    def question(self) -> Question | None:
        """The survey that is being made."""
        return self._question

    def advance(self, now: float) -> list[Symptom]:
        """Begin a survey where ranks are slow and none is named; return the faults it shows."""
        state = self._state
        is_running = state.phase is Phase.TRAINING and state.gang.stage is not GangStage.HALTED
        if not is_running or self._stalls.unplaced is None:
            self._question = None
            return []
        if self._question is None:
            self._question = ask(state, SURVEY_SECONDS, now, SAMPLES_PER_SECOND)
        if not self._question.is_over(state, now):
            return []
        ranks, self._question = self._question.ranks(), None
        ranks_of_node = max((len(told) for told in state.watched.values()), default=1)
        found = stragglers(ranks, state.nnodes * ranks_of_node)
        return self._stalls.place_slowness(found, _compared(ranks, found), now)


def stragglers(ranks: Mapping[int, RankEvidence], world: int) -> tuple[int, ...]:
    """Return the ranks that nearly never wait, while the others often do; none if they cannot be
    determined.

    A rank of which nothing is known may be the one, so that all of `world` must be sampled."""
    if len(ranks) < world or any(one.samples < SAMPLES_MIN for one in ranks.values()):
        return ()
    shares = {rank: one.waiting / one.samples for rank, one in ranks.items()}
    usual = median_high(shares.values())
    if usual < WAITING_SHARE_MIN:
        return ()
    found = tuple(sorted(rank for rank, share in shares.items() if share * RATIO_MIN <= usual))
    return found if len(found) * 2 <= len(shares) else ()


def _compared(ranks: Mapping[int, RankEvidence], found: tuple[int, ...]) -> str:
    if not found:
        return "no rank differs from the others"
    own = max(ranks[rank].waiting / ranks[rank].samples for rank in found)
    usual = median_high(one.waiting / one.samples for one in ranks.values())
    return (
        f"the other ranks wait for {named(found)}: in {usual:.0%} of {SURVEY_SECONDS:.0f} s, "
        f"it in {own:.0%}"
    )
