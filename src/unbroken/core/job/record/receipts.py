"""Receipts of what every rank restored after a fault, for the incident, and the samples that
training then repeats or skips.

Agents report the receipts of their ranks one after another. The first step may come before the last
receipt, and the incident may be closed by then. The incident is written again when all receipts
have arrived. If some are missing, it is written `WAIT_SECONDS` after the last arrival. It is also
written when all ranks have reported their data position.

With each step, a rank reports how many samples its data has given since training began. As long as
data and steps stay together, that number follows the step. Afterwards its offset shows the samples
that were skipped (more than the step) or repeated (fewer). Samples of repeated steps are repeated
too, unless the data position was not restored for them. Numbers are exact if the batches of a rank
have one size, and approximate if they vary.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

from unbroken.core.diagnosis.stacks import ranges
from unbroken.core.job.deadlines import earliest
from unbroken.core.job.events import PodUid
from unbroken.core.job.gang import StartOrder
from unbroken.core.job.recovery.incidents import RESTORED_MAX
from unbroken.core.job.state import JobState
from unbroken.core.job.transitions import Phase
from unbroken.core.wording import counted
from unbroken.spec.job.incident import Incident, Restored
from unbroken.wire.agent import AgentReport, Receipt
from unbroken.wire.observation import RankWatch
from unbroken.wire.worker import SAMPLES

from .timeline import lost_steps

SAMPLES_MAX = 2**53
"""Largest sample count: exact in a double, and valid in JSON."""


class SamplePosition(NamedTuple):
    """Position in the data of one rank, after a step."""

    step: int
    samples: float


@dataclass(frozen=True, slots=True)
class Track:
    """One rank in one attempt: its first and its last reported position."""

    first: SamplePosition
    last: SamplePosition

    @property
    def batch(self) -> float | None:
        """Return the samples per step; None: only one position was seen."""
        steps = self.last.step - self.first.step
        return (self.last.samples - self.first.samples) / steps if steps else None


Tracks = dict[int, Track]
"""Tracks by global rank."""


@dataclass(frozen=True, slots=True)
class Accounted:
    """Samples of all ranks together."""

    repeated: int
    skipped: int
    is_exact: bool

    def __str__(self) -> str:
        if not self.repeated and not self.skipped:
            return "no sample repeated or skipped"
        about = "" if self.is_exact else "about "
        told = [
            f"{about}{counted(count, 'sample')} {what}"
            for count, what in ((self.repeated, "repeated"), (self.skipped, "skipped"))
            if count
        ]
        return " and ".join(told)


def observe(tracks: Tracks, watch: Iterable[RankWatch]) -> None:
    """Add the sample positions of a report to the tracks."""
    for one in watch:
        samples = one.metrics.get(SAMPLES)
        if one.step is None or samples is None or not 0 <= samples <= SAMPLES_MAX:
            continue
        here = SamplePosition(one.step, samples)
        known = tracks.get(one.rank)
        is_on = known is not None and known.last.step <= here.step
        tracks[one.rank] = Track(known.first if known and is_on else here, here)


def account(
    before: Mapping[int, Track], after: Mapping[int, Track], steps: int | None
) -> Accounted | None:
    """Return the samples repeated and skipped, summed over ranks. `steps`: repeated steps, None:
    not known.

    None: not known, as ranks have not reported (yet), or are different ranks than before.
    """
    if steps is None or not before or before.keys() != after.keys():
        return None
    repeated, skipped, is_exact = 0.0, 0.0, True
    for rank, old in before.items():
        new = after[rank]
        batch = new.batch if old.batch is None else old.batch
        if batch is None:
            return None
        ahead = new.first.samples - old.last.samples - (new.first.step - old.last.step) * batch
        if not batch.is_integer():
            is_exact = False
            # Batch sizes of some steps may vary this much without any change of the data position.
            ahead = 0.0 if abs(ahead) < batch else ahead
        repeated += max(steps * batch - ahead, 0.0)
        skipped += max(ahead, 0.0)
    if not math.isfinite(repeated + skipped):
        return None
    return Accounted(_bounded(repeated), _bounded(skipped), is_exact)


def _bounded(samples: float) -> int:
    return min(round(samples), SAMPLES_MAX)


WAIT_SECONDS = 2.0
SOURCES_TOLD = 3
TEXT_CHARACTERS = 100
REPLICAS_DISAGREE = "ReplicasDisagree"


@dataclass(frozen=True, slots=True)
class ReceiptSummary:
    """The part of an incident that sums up the receipts."""

    restored: tuple[Restored, ...]
    steps_lost: int | None
    replicas_agree: bool | None
    resumed: str
    samples_repeated: int | None = None
    samples_skipped: int | None = None


def resumption(
    receipts: Iterable[Receipt], step: int | None, samples: Accounted | None = None
) -> ReceiptSummary:
    """Return the sum of some receipts; `step`: the newest before the fault, None: not known."""
    found = sorted(receipts, key=lambda one: (one.name, one.rank))
    steps = [one.step for one in found]
    lost = None if step is None or not steps else max(step - min(steps), 0)
    agree, differ = _compared(found)
    said = _in_words(found, lost)
    if samples is not None:
        said = "; ".join(filter(None, [said, str(samples)]))
    if differ:
        said += f"; the replicas disagree: {differ}"
    repeated, skipped = (samples.repeated, samples.skipped) if samples else (None, None)
    return ReceiptSummary(_groups(found), lost, agree, said, repeated, skipped)


def _in_words(found: Sequence[Receipt], lost: int | None) -> str:
    if not found:
        return ""
    steps = sorted({one.step for one in found})
    which = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    sources: dict[str, list[int]] = {}
    for one in found:
        sources.setdefault(one.source[:TEXT_CHARACTERS], []).append(one.rank)
    most = sorted(sources.items(), key=lambda item: -len(set(item[1])))
    told = [f"{source} ({_size(ranks)})" for source, ranks in most[:SOURCES_TOLD]]
    if rest := [rank for _, ranks in most[SOURCES_TOLD:] for rank in ranks]:
        told.append(f"elsewhere ({_size(rest)})")
    text = f"resumed after {which} from {_listed(told)}"
    return text if lost is None else f"{text}; {counted(lost, 'step') if lost else 'no step'} lost"


def _listed(told: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(told[:-1]), told[-1]]))


def _size(ranks: Iterable[int]) -> str:
    different = set(ranks)
    return f"rank {min(different)}" if len(different) == 1 else counted(len(different), "rank")


def _compared(found: Iterable[Receipt]) -> tuple[bool | None, str]:
    """Return whether ranks that call each other replicas have the same bytes, and which ranks
    differ, in words."""
    sets: dict[tuple[str, str], list[Receipt]] = {}
    for one in found:
        if one.replicas and one.checksum:
            sets.setdefault((one.name, one.replicas), []).append(one)
    compared = [ones for ones in sets.values() if len(ones) > 1]
    differ = [text for ones in compared if (text := _difference(ones))]
    more = f", and so do {counted(len(differ) - 1, 'more set')}" if len(differ) > 1 else ""
    return (not differ if compared else None), f"{differ[0]}{more}" if differ else ""


def _difference(ones: Sequence[Receipt]) -> str:
    sums = Counter(one.checksum for one in ones)
    if len(sums) == 1:
        return ""
    usual, count = sums.most_common(1)[0]
    others = [one.rank for one in ones if one.checksum != usual]
    if count == 1:
        return f"ranks {ranges(one.rank for one in ones)} all differ"
    verb = "rank {} differs" if len(others) == 1 else "ranks {} differ"
    same = ranges(one.rank for one in ones if one.checksum == usual)
    return f"{verb.format(ranges(others))} from {same}"


def _groups(found: Sequence[Receipt]) -> tuple[Restored, ...]:
    """Return ranks with equal receipts, in few groups: sums, then places, are left out where they
    differ."""
    groups = list(_grouped(found))
    if len(groups) > RESTORED_MAX:
        found = [replace(one, checksum="") for one in found]
        groups = list(_grouped(found))
    if len(groups) > RESTORED_MAX:
        found = [replace(one, source=one.source.partition(" ")[0]) for one in found]
        groups = list(_grouped(found))
    return tuple(groups[:RESTORED_MAX])


def _grouped(found: Sequence[Receipt]) -> Iterator[Restored]:
    groups: dict[tuple[object, ...], list[Receipt]] = {}
    for one in found:
        key = (one.name, one.step, one.source, one.checksum, one.saved_attempt)
        groups.setdefault(key, []).append(one)
    for ones in groups.values():
        first, last = ones[0], max(ones, key=lambda one: one.seconds)
        yield Restored(
            ranks=ranges(one.rank for one in ones),
            count=len(ones),
            step=first.step,
            source=first.source[:TEXT_CHARACTERS],
            seconds=round(last.seconds, 6),
            slowest=last.rank,
            checksum=first.checksum[:TEXT_CHARACTERS],
            name=first.name[:TEXT_CHARACTERS],
            saved_attempt=first.saved_attempt,
        )


class Receipts:
    """Receipts of the attempt that runs, or ran last, and the incident that they belong to."""

    def __init__(self, state: JobState) -> None:
        self._state = state
        self._order: StartOrder | None = None
        self._reported: dict[PodUid, tuple[Receipt, ...]] = {}
        self._awaited: set[PodUid] = set()
        self._tracks: Tracks = {}
        self._silent: set[PodUid] = set()
        """Pods with a rank that has reported no step yet: it may count samples too."""
        self._before: tuple[int, Tracks] = -1, {}
        """The attempt before, with its tracks, if it reported samples and all its ranks reported
        steps."""
        self._samples: Accounted | None = None
        self._lost: int | None = None
        """The number of repeated steps that the sample count was made with."""
        self._is_unsettled = False
        """True if the sample count may still change."""
        self._due: float | None = None

    def adopt(self, now: float) -> None:
        """Take what the agents of a running attempt that was adopted have reported so far."""
        state = self._state
        for uid in state.gang.ranks if state.phase is Phase.TRAINING else ():
            report = state.roster.members[uid].report
            if report is not None:
                self.note_steps(uid, report, now)

    def note_steps(self, uid: PodUid, report: AgentReport, now: float) -> None:
        """Take the report of an agent of the running attempt."""
        order = self._state.gang.order
        if order is None:
            return  # nothing was started
        if self._order is not order:
            self._begin(order)
        count = len(self._tracks)
        if report.watch and all(one.step is not None for one in report.watch):
            self._silent.discard(uid)
        observe(self._tracks, report.watch)
        is_complete = not self._silent and len(self._tracks) == len(self._before[1])
        self._is_unsettled |= is_complete if self._samples is None else len(self._tracks) != count
        found = tuple(one for one in report.receipts if one.attempt == order.attempt)
        if not found or self._reported.get(uid) == found:
            return
        self._reported[uid] = found
        if len({one.rank for one in found}) >= (report.nproc or 0):
            self._awaited.discard(uid)
        self._due = earliest(self._due, now + WAIT_SECONDS if self._awaited else now)

    def _begin(self, order: StartOrder) -> None:
        if self._order is not None and self._tracks:
            self._before = self._order.attempt, {} if self._silent else self._tracks
        self._order, self._due = order, None
        self._reported.clear()
        self._tracks, self._samples, self._lost, self._is_unsettled = {}, None, None, False
        self._awaited = set(self._state.gang.ranks)
        self._silent = set(self._state.gang.ranks)

    def deadline(self) -> float | None:
        """Return when the receipt is due."""
        return self._due

    def advance(self, now: float) -> None:
        """Write what is due to the incident; once the attempt is over, all that it has reported is
        due."""
        is_over = self._state.phase is not Phase.TRAINING
        if self._is_unsettled or self._is_outdated():
            self._is_unsettled, known = False, self._samples
            self._samples, self._lost = self._accounted(), self._lost_steps()
            self._due = self._due if self._samples == known else now
        if self._due is None or self._order is None or (now < self._due and not is_over):
            return
        self._due = None
        incident = self._incident(self._order.attempt)
        if incident is None:
            return
        found = [one for receipts in self._reported.values() for one in receipts]
        sums = resumption(found, incident.step, self._samples)
        changes = {one.name: getattr(sums, one.name) for one in fields(sums)}
        self._state.amend_incident(incident.number, **changes)
        if self._is_outdated():
            self._due = now
        if sums.replicas_agree is False and incident.replicas_agree is not False:
            text = f"attempt {self._order.attempt} {sums.resumed}"
            self._state.record_event(REPLICAS_DISAGREE, text, is_warning=True)

    def _accounted(self) -> Accounted | None:
        attempt, tracks = self._before
        if self._silent:
            return None
        incident = None if self._order is None else self._incident(self._order.attempt)
        if incident is None or incident.attempt != attempt:
            return None
        return account(tracks, self._tracks, lost_steps(incident))

    def _lost_steps(self) -> int | None:
        incident = None if self._order is None else self._incident(self._order.attempt)
        return None if incident is None else lost_steps(incident)

    def _is_outdated(self) -> bool:
        """True if the known number of repeated steps has changed since samples were counted."""
        return bool(self._tracks) and self._lost_steps() != self._lost

    def _incident(self, attempt: int) -> Incident | None:
        """Return the incident that led to the attempt: the last one before it, in this life of the
        job."""
        incidents, start = self._state.incidents, self._state.status.start_time or 0.0
        past = [one for one in incidents.kept if one.detected_at >= start and one.attempt < attempt]
        return max(past, key=lambda one: one.number, default=None)
