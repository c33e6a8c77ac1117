"""Alarms of the agents' watchdogs, and whether all ranks of the job have stopped.

Counts are kept, so that a report costs the same in a job of any size.  Nothing is ordered here: an
alarm that may act is a suspicion (`core.job.watch.examination`), or a fault where looking would
show nothing.

`AlarmOrigin` is the origin of an alarm of several ranks: training in step spreads the alarm to all
of them within moments, and the first report that arrives says nothing of that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import median_low

from unbroken.core.diagnosis.stacks import name_ranks
from unbroken.core.job.deadlines import earliest as first_of
from unbroken.core.job.events import PodUid
from unbroken.core.job.gang import GangStage
from unbroken.core.job.recovery import symptoms
from unbroken.core.job.recovery.incidents import UNCHARGED
from unbroken.core.job.state import JobState
from unbroken.core.patience import LOOK_SECONDS
from unbroken.core.wording import counted
from unbroken.spec.job.detectors import Detector, Mode
from unbroken.spec.job.incident import Symptom
from unbroken.spec.job.ledger import DetectorRecord
from unbroken.wire.agent import AgentReport, AgentState
from unbroken.wire.observation import Alarm, RankWatch

RankPlace = tuple[PodUid, int]
"""A rank in its pod."""
SLOWER = 1.25
"""Than the others, by the step."""


@dataclass(frozen=True, slots=True)
class AlarmOrigin:
    """Origin of an alarm."""

    alarm: Alarm
    places: tuple[RankPlace, ...]
    """None: no rank differs from the others."""
    who: str
    """Rank or process that it is about."""
    text: str


def first_ranks(
    alarms: Mapping[RankPlace, Alarm], watch: Mapping[RankPlace, RankWatch]
) -> AlarmOrigin:
    """Return the ranks on which it was first, by the step if all report one."""
    steps = {place: alarm.step for place, alarm in alarms.items() if alarm.step is not None}
    if len(steps) == len(alarms):
        low: float = min(steps.values())
        first = [place for place in alarms if steps[place] == low]
        at = f"step {low}"
    else:
        low = min(alarm.since for alarm in alarms.values())
        usual = max((rank.step_seconds or 0.0 for rank in watch.values()), default=0.0)
        # Alarms without a step cannot be ordered more exactly than an agent looks.
        same = max(LOOK_SECONDS, usual)
        first = [place for place, alarm in alarms.items() if alarm.since - low <= same]
        at = "the same time"
    alarm = alarms[min(first, key=lambda place: alarms[place].since)]
    later = alarms.keys() - set(first)
    if later:
        on = "" if len(steps) < len(alarms) else f"from {at}, "
        text = f"{alarm.why}; {on}later on {_named(later)}"
        return AlarmOrigin(alarm, tuple(sorted(first)), _named(first), text)
    if len(first) == 1:
        return AlarmOrigin(alarm, tuple(first), _named(first), alarm.why)
    return AlarmOrigin(alarm, (), _named(first), f"{alarm.why}; on all of them at {at}")


def slowest_ranks(
    alarms: Mapping[RankPlace, Alarm], watch: Mapping[RankPlace, RankWatch]
) -> AlarmOrigin:
    """The ranks whose steps take longer than those of the others; in step there are none, since
    all wait for the slow one."""
    place = min(alarms, key=lambda each: alarms[each].since)
    alarm = alarms[place]
    if len(watch) == 1:
        return AlarmOrigin(alarm, (place,), _named([place]), alarm.why)
    paces = {each: rank.step_seconds for each, rank in watch.items() if rank.step_seconds}
    usual = median_low(paces.values()) if paces else 0.0
    slow = sorted(each for each in alarms if paces.get(each, 0.0) >= SLOWER * usual > 0.0)
    if slow and len(slow) * 2 <= len(paces):
        text = f"{alarms[slow[0]].why}, others {usual:.3g} s"
        return AlarmOrigin(alarms[slow[0]], tuple(slow), _named(slow), text)
    return AlarmOrigin(alarm, (), "all ranks", f"{alarm.why}; no rank differs from the others")


def _named(places: Collection[RankPlace]) -> str:
    return named(rank for _, rank in places)


def named(ranks: Iterable[int]) -> str:
    """`rank 3`, `ranks 0-2,5`."""
    return name_ranks(sorted(ranks))


EVENTS_MAX = 5
"""Most events of a detector in one attempt; more of the same says nothing new."""
_ALL = (Detector.SILENT, Detector.SPINNING)
"""They count only when they are the whole job's."""
COMPARED = (Detector.NAN, Detector.SPIKE, Detector.SLOW)
"""Ranks that train in step have them within moments of each other, wherever they began."""
COMPARE_SECONDS = 2.0
"""Seconds for the alarms of the other ranks to come."""
UNPLACED = "it ended before a rank was found to differ"
EXAMINED = (Detector.STOPPED, Detector.STUCK)
"""Detectors of one rank that a look can confirm."""
_NAMES = {one.value: one for one in Detector}


@dataclass(frozen=True, slots=True)
class Stall:
    """Every rank that has a rhythm is silent."""

    since: float
    """The last sign of life of any of them."""
    allowed: float
    """The longest silence that is usual for one."""
    found_at: float
    ranks: int


@dataclass(frozen=True, slots=True)
class _ReportCounts:
    """Alarms and progress in the report of one agent."""

    watch: tuple[RankWatch, ...] = ()
    rhythmic: int = 0
    silent: int = 0


class Stalls:
    """The alarms of one job, in the attempt that runs."""

    def __init__(self, state: JobState) -> None:
        self._state = state
        self._attempt = -1
        self._report_counts: dict[PodUid, _ReportCounts] = {}
        self._rhythmic = self._silent = 0
        self._alarms_now: dict[Detector, dict[RankPlace, Alarm]] = {one: {} for one in Detector}
        self._episodes: set[Detector] = set()
        self._events: Counter[Detector] = Counter()
        self._alarmed: dict[Detector, dict[RankPlace, Alarm]] = {one: {} for one in COMPARED}
        """First alarms of the episode, those that were cleared too."""
        self._due: dict[Detector, float] = {}
        """Time at which the origin of an episode is judged."""
        self._faults: list[Symptom] = []
        self.unplaced: AlarmOrigin | None = None
        """Slowness that all ranks have alike, until a survey has shown who causes it."""
        self.stall: Stall | None = None
        self.late: dict[RankPlace, RankWatch] = {}
        """Ranks that show nothing for longer than they usually do: worth a look."""

    def note_ranks(self, uid: PodUid, report: AgentReport, now: float) -> None:
        """An agent of the attempt that runs says how its ranks are."""
        self._begin(now)
        # What has come to its end is no longer silent, whatever was said of it last.
        watch = () if report.state is AgentState.COMPLETED else report.watch
        before = self._report_counts.get(uid, _ReportCounts())
        if before.watch is watch:
            return
        after = _report_counts(watch)
        self._report_counts[uid] = after
        for rank in before.watch:
            self.late.pop((uid, rank.rank), None)
        self.late |= {(uid, one.rank): one for one in watch if one.late_since is not None}
        self._rhythmic += after.rhythmic - before.rhythmic
        self._silent += after.silent - before.silent
        if any(rank.alarms for rank in before.watch) or any(rank.alarms for rank in watch):
            self._count(uid, before.watch, watch, now)
        if self.stall is not None and _moved_at(before.watch, watch) > self.stall.since:
            # A report may come too late to show the time between two silences.
            self._end_stall()
        self._judge(now)

    def faults(self, now: float) -> list[Symptom]:
        """New faults that need no look."""
        if self._state.gang.stage is not GangStage.HALTED:
            self._begin(now)
        for detector in [one for one, at in self._due.items() if now >= at]:
            self._decide(detector, now)
        found, self._faults = self._faults, []
        return found

    def deadline(self) -> float | None:
        """Return when time alone will change something here."""
        return first_of(*self._due.values())

    def overtaken(self, now: float) -> list[Symptom]:
        """Faults that would have been found in a moment, when another has ended the attempt."""
        for detector in list(self._due):
            self._decide(detector, now)
        found, self._faults = self._faults, []
        return found

    def close(self) -> None:
        """End the book of an attempt that is over: what stood was right if a fault has ended it."""
        state = self._state
        if self._attempt < 0 or state.gang.stage is not GangStage.HALTED:
            return
        for detector in list(self._due):
            self._decide(detector, float("inf"))
        self.place_slowness((), UNPLACED, float("inf"))
        attempt, fault = state.broken
        if attempt == self._attempt and fault not in UNCHARGED:
            for detector in [one for one in Detector if one in self._episodes]:
                self._close(detector, is_right=True)
        self._forget()

    def watch(self, rank: int) -> RankWatch | None:
        """Return the view that the agent has of a rank; None: it has reported none."""
        views = (one for told in self._report_counts.values() for one in told.watch)
        return next((one for one in views if one.rank == rank), None)

    def confirm(self) -> None:
        """A look has shown that the job hangs, before all ranks were silent for long."""
        self._episodes.add(self.silence())

    def mode(self, detector: Detector) -> Mode:
        """Return the mode of a detector in this job."""
        return self._state.options.detectors[detector]

    def silence(self) -> Detector:
        """The detector that speaks for a stall."""
        return Detector.SPINNING if self._alarms_now[Detector.SPINNING] else Detector.SILENT

    def suspects(self) -> Iterator[tuple[Detector, RankPlace, Alarm]]:
        """Alarms of single ranks that may act once a look has confirmed them."""
        for detector in EXAMINED:
            if self.mode(detector) is Mode.ACT:
                for place, alarm in self._alarms_now[detector].items():
                    yield detector, place, alarm

    def symptom(self, detector: Detector, place: RankPlace, alarm: Alarm, now: float) -> Symptom:
        """A rank's alarm as a sign of a fault."""
        uid, rank = place
        member = self._state.roster.members.get(uid)
        step = next((w.step for w in self._report_counts[uid].watch if w.rank == rank), None)
        return Symptom(
            min(alarm.since, now),
            symptoms.BY_DETECTOR[detector],
            alarm.why[: symptoms.TEXT_CHARACTERS],
            pod=member.view.name if member else "",
            node=(member.view.node if member else None) or "",
            rank=rank,
            step=step if alarm.step is None else alarm.step,
        )

    def _begin(self, now: float) -> None:
        """Collect the agents' reports again when another attempt runs."""
        order = self._state.gang.order
        if order is None or order.attempt == self._attempt:
            return
        self._forget()
        self._attempt = order.attempt
        for member, report in self._state.gang.reports():
            self._state.watched[member.uid] = report.watch
            self.note_ranks(member.uid, report, now)

    def _count(
        self, uid: PodUid, before: tuple[RankWatch, ...], after: tuple[RankWatch, ...], now: float
    ) -> None:
        """Note which alarms of a node stand now."""
        gone = {(one, rank.rank) for rank in before for one, _ in _alarms(rank)}
        for rank in after:
            for detector, alarm in _alarms(rank):
                gone.discard((detector, rank.rank))
                place = (uid, rank.rank)
                if place not in self._alarms_now[detector]:
                    self._alarms_now[detector][place] = alarm
                    self._raised(detector, place, alarm, now)
                self._alarms_now[detector][place] = alarm
        for detector, number in gone:
            self._alarms_now[detector].pop((uid, number), None)

    def _raised(self, detector: Detector, place: RankPlace, alarm: Alarm, now: float) -> None:
        if detector in COMPARED:
            self._alarmed[detector].setdefault(place, alarm)
        elif detector not in (*_ALL, *EXAMINED) and self.mode(detector) is Mode.ACT:
            self._faults.append(self.symptom(detector, place, alarm, now))

    def _judge(self, now: float) -> None:
        """Begin and end the episodes."""
        is_silent = 0 < self._silent == self._rhythmic
        if is_silent and self.stall is None:
            self.stall = self._find_stall(now)
            self._open(self.silence(), self._stall_text(self.stall))
        elif is_silent and self.stall and self._is_spin_new():
            self._episodes.discard(Detector.SILENT)
            self._open(Detector.SPINNING, self._stall_text(self.stall))
        elif self.stall is not None and not is_silent:
            self._end_stall()
        for detector, raised in self._alarms_now.items():
            if detector in _ALL:
                continue
            if raised and detector in COMPARED:
                self._compare(detector, now)
            elif raised and detector not in self._episodes:
                place, alarm = next(iter(raised.items()))
                self._open(detector, f"rank {place[1]}: {alarm.why}")
            elif not raised:
                self._close(detector, is_right=False)

    def _end_stall(self) -> None:
        """Note that ranks have got on."""
        self.stall = None
        for detector in _ALL:
            self._close(detector, is_right=False)

    def _compare(self, detector: Detector, now: float) -> None:
        """Wait for the others, at most until all have reported."""
        if detector not in self._episodes:
            self._episodes.add(detector)
            self._due[detector] = now + COMPARE_SECONDS
        is_whole = self._report_counts.keys() >= self._state.gang.ranks.keys()
        if detector in self._due and is_whole:
            ranks = sum(len(told.watch) for told in self._report_counts.values())
            if len(self._alarmed[detector]) == ranks:
                self._decide(detector, now)

    def _decide(self, detector: Detector, now: float) -> None:
        """Say where it began; a restart helps nobody where all ranks are as slow."""
        del self._due[detector]
        is_slow = detector is Detector.SLOW
        watch = {(uid, w.rank): w for uid, told in self._report_counts.items() for w in told.watch}
        origin = (slowest_ranks if is_slow else first_ranks)(self._alarmed[detector], watch)
        is_off = self.mode(detector) is Mode.OFF
        if is_slow and not origin.places and self._alarms_now[detector] and not is_off:
            self.unplaced = origin
        else:
            self._faults += self._symptoms_of(detector, origin, now)

    def place_slowness(self, ranks: Collection[int], why: str, now: float) -> list[Symptom]:
        """Say which ranks make all of them slow, none if nobody differs; return the faults."""
        origin, self.unplaced = self.unplaced, None
        if origin is None:
            return []
        places = tuple(
            (uid, one.rank)
            for uid, told in self._report_counts.items()
            for one in told.watch
            if one.rank in ranks
        )
        who = named(ranks) if places else origin.who
        told = replace(origin, places=places, who=who, text=f"{origin.alarm.why}; {why}")
        return self._symptoms_of(Detector.SLOW, told, now)

    def _symptoms_of(self, detector: Detector, origin: AlarmOrigin, now: float) -> list[Symptom]:
        """The fault, if it may act; else a warning."""
        mode, stands = self.mode(detector), bool(self._alarms_now[detector])
        if mode is Mode.ACT and stands and (origin.places or detector is not Detector.SLOW):
            return [self._origin_symptom(detector, origin, now)]
        if mode is Mode.WARN or (mode is Mode.ACT and stands):
            self._warn(detector, f"{origin.who}: {origin.text}")
        return []

    def _origin_symptom(self, detector: Detector, origin: AlarmOrigin, now: float) -> Symptom:
        alarm = replace(origin.alarm, why=origin.text)
        if len(origin.places) == 1:
            return self.symptom(detector, origin.places[0], alarm, now)
        pods = {uid for uid, _ in origin.places}
        if len(pods) == 1:
            return replace(self.symptom(detector, origin.places[0], alarm, now), rank=None)
        text = f"{origin.who}: {origin.text}"[: symptoms.TEXT_CHARACTERS]
        return Symptom(min(alarm.since, now), symptoms.BY_DETECTOR[detector], text, step=alarm.step)

    def _is_spin_new(self) -> bool:
        return Detector.SILENT in self._episodes and self.silence() is Detector.SPINNING

    def _find_stall(self, now: float) -> Stall:
        # Once in an episode: every rank is looked at.
        silent = [w for told in self._report_counts.values() for w in told.watch if _is_silent(w)]
        since = max(map(_silent_since, silent))
        allowed = max(w.allowed_seconds or 0.0 for w in silent)
        return Stall(min(since, now), allowed, now, len(silent))

    def _stall_text(self, stall: Stall) -> str:
        ranks = counted(stall.ranks, "rank")
        usual = f", {stall.allowed:.0f} s are usual at most" if stall.allowed else ""
        return f"no sign of life from {ranks} for {stall.found_at - stall.since:.0f} s{usual}"

    def _open(self, detector: Detector, text: str) -> None:
        self._episodes.add(detector)
        if self.mode(detector) is Mode.WARN:
            self._warn(detector, text)

    def _warn(self, detector: Detector, text: str) -> None:
        self._events[detector] += 1
        if self._events[detector] <= EVENTS_MAX:
            self._state.record_event(symptoms.BY_DETECTOR[detector], text, is_warning=True)

    def _close(self, detector: Detector, *, is_right: bool) -> None:
        if detector not in self._episodes:
            return
        if detector in self._due:
            self._decide(detector, float("inf"))
        if detector is Detector.SLOW:
            self.place_slowness((), UNPLACED, float("inf"))
        if detector in COMPARED:
            self._alarmed[detector].clear()
        self._episodes.discard(detector)
        if self.mode(detector) is Mode.OFF:
            return
        ledger = self._state.ledger
        old = ledger.detectors.get(detector.value, DetectorRecord())
        new = replace(old, right=old.right + is_right, wrong=old.wrong + (not is_right))
        detectors = {**ledger.detectors, detector.value: new}
        self._state.set_ledger(replace(ledger, detectors=detectors))

    def _forget(self) -> None:
        self._attempt = -1
        self._report_counts.clear()
        self.late.clear()
        self._rhythmic = self._silent = 0
        for raised in self._alarms_now.values():
            raised.clear()
        self._episodes.clear()
        self._events.clear()
        self._due.clear()
        for alarmed in self._alarmed.values():
            alarmed.clear()
        self._faults.clear()
        self.unplaced = self.stall = None


def _report_counts(watch: tuple[RankWatch, ...]) -> _ReportCounts:
    silent = [_is_silent(rank) for rank in watch]
    rhythmic = [rank.allowed_seconds is not None for rank in watch]
    return _ReportCounts(watch, sum(map(max, silent, rhythmic)), sum(silent))


def _is_silent(rank: RankWatch) -> bool:
    return any(detector in _ALL for detector, _ in _alarms(rank))


def _silent_since(rank: RankWatch) -> float:
    """The last sign of life before the silence of a rank; minus infinity: it is not silent."""
    return max((a.since for d, a in _alarms(rank) if d in _ALL), default=float("-inf"))


def _moved_at(before: tuple[RankWatch, ...], after: tuple[RankWatch, ...]) -> float:
    """Return when a rank that was silent, and is again, made progress; minus infinity: never."""
    old = {rank.rank: _silent_since(rank) for rank in before if _is_silent(rank)}
    again = [(_silent_since(rank), old.get(rank.rank, float("inf"))) for rank in after]
    return max((new for new, was in again if new > was), default=float("-inf"))


def _alarms(rank: RankWatch) -> Iterator[tuple[Detector, Alarm]]:
    """Alarms of detectors that are known here."""
    for alarm in rank.alarms:
        detector = _NAMES.get(alarm.detector)
        if detector is not None:
            yield detector, alarm
