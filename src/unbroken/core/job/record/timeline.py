"""A job's time account: start-up, productive steps, and the cost of each fault.

Every second of a job's active time is counted once. `Goodput` is a partition of it, whatever the
clocks and the records say.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from unbroken.spec.job.codec import (
    is_cost_unknown,
    lost_since,
    lost_until,
    seconds_known_lost,
    seconds_lost,
)
from unbroken.spec.job.incident import Incident
from unbroken.spec.job.ledger import Ledger
from unbroken.spec.job.types import JobStatus
from unbroken.spec.keys import ConditionType

from .conditions import current_condition

TWICE = "StepsMadeTwice"
"""Cause under which the time of repeated steps is counted."""

lost_seconds = seconds_lost


@dataclass(frozen=True, slots=True)
class Goodput:
    """A job's time in seconds; `startup`, `productive` and `lost` add up to `total`."""

    total: float
    """Seconds of active time, without suspensions."""
    startup: float
    """Seconds before the first progress of each life."""
    productive: float
    lost: Mapping[str, float] = field(default_factory=dict)
    """Seconds lost by class of fault, and under TWICE; the costliest first."""
    suspended: float = 0.0
    """Seconds of suspension; not part of the total."""
    steps: int = 0
    """Steps lost in all incidents with a known number of lost steps."""
    share: float | None = None
    """Productive time divided by total; None: no progress is known, so the share is not either."""
    unknown: int = 0
    """Incidents that count as lost until the first output only, since nothing has shown when
    training resumed."""


def lost_steps(incident: Incident) -> int | None:
    """Return the steps that have to be repeated; None: not known, or not yet."""
    if incident.step is None or incident.resumed_step is None:
        return incident.steps_lost
    return max(incident.step - incident.resumed_step + 1, 0)


def redo_seconds(incident: Incident) -> float:
    """Return the seconds that repeating the lost steps takes, at the pace before the fault."""
    return _sane((lost_steps(incident) or 0) * _sane(incident.step_seconds or 0.0))


def stages(incident: Incident) -> Iterator[tuple[str, float, float]]:
    """Return (stage, from, to) for the stages of an incident, in order; seconds since the epoch."""
    before = incident.culprit.at
    for stage, at in (
        ("detect", incident.detected_at),
        ("examine", incident.examined_at),
        ("stop", incident.stopped_at),
        ("ready", incident.ready_at),
        ("start", incident.started_at),
        ("progress", incident.progress_at),
    ):
        if at is not None:
            # Times come from clocks of several nodes, and a worker may write output before the last
            # one runs.
            yield stage, min(before, at), at
            before = at
        elif stage != "examine":
            return


def settle(ledger: Ledger, incident: Incident, *, is_charged: bool) -> Ledger:
    """Return the ledger with the cost of an incident that is no longer kept."""
    lost = defaultdict(float, ledger.seconds)
    lost[incident.culprit.fault] += seconds_known_lost(incident) or 0.0
    lost[TWICE] += redo_seconds(incident)
    return replace(
        ledger,
        incidents=ledger.incidents + 1,
        steps=ledger.steps + (lost_steps(incident) or 0),
        uncharged=ledger.uncharged + (not is_charged),
        seconds={name: value for name, value in lost.items() if value},
    )


def end_life(ledger: Ledger, start: float | None, now: float) -> Ledger:
    """Return the ledger of a suspended job: the life since `start` is over."""
    if start is None:
        return replace(ledger, progress_at=None)
    active = _sane(now - start)
    until = now if ledger.progress_at is None else ledger.progress_at
    return replace(
        ledger,
        active_seconds=ledger.active_seconds + active,
        startup_seconds=ledger.startup_seconds + min(_sane(until - start), active),
        progress_at=None,
    )


def goodput(
    status: JobStatus,
    incidents: Iterable[Incident],
    ledger: Ledger,
    now: float,
    created: float | None = None,
) -> Goodput:
    """Return the account of a job's time. `created`: when its object was made, None: unknown."""
    found, life = list(incidents), _life(status, now)
    past = _sane(ledger.active_seconds)
    progress_at = _first_progress(ledger, found, life)
    left = _Budget(past + life[1] - life[0])
    lost: dict[str, float] = defaultdict(float)
    spans = _disjoint(found, life)
    for cause, start, end in (*_disjoint(found, (-math.inf, life[0])), *spans):
        lost[cause] += left.take(end - start)
    for cause, seconds in ledger.seconds.items():
        lost[cause] += left.take(seconds)
    startup = left.take(_startup(spans, life[0], progress_at or life[1]))
    startup += left.take(min(_sane(ledger.startup_seconds), past))
    lost[TWICE] += left.take(sum(map(redo_seconds, found)))
    has_progress = progress_at is not None or ledger.startup_seconds < past
    return Goodput(
        total=left.total,
        startup=startup,
        productive=left.rest,
        lost=dict(sorted(((k, v) for k, v in lost.items() if v > 0), key=lambda one: -one[1])),
        suspended=_suspended(status, ledger, left.total, life, now, created),
        steps=ledger.steps + sum(lost_steps(one) or 0 for one in found),
        share=left.rest / left.total if has_progress and left.total > 0 else None,
        unknown=sum(map(is_cost_unknown, found)),
    )


class _Budget:
    """Seconds to be distributed; never more are given out than there are."""

    def __init__(self, total: float) -> None:
        self.total = self.rest = total

    def take(self, wanted: float) -> float:
        """Return up to this many seconds, as far as any are left."""
        given = min(_sane(wanted), self.rest)
        self.rest -= given
        return given


def _sane(seconds: float) -> float:
    """Return a plausible number of seconds. Clocks may go back and records may be garbled: no time
    is negative or infinite."""
    return seconds if math.isfinite(seconds) and seconds > 0 else 0.0


def _life(status: JobStatus, now: float) -> tuple[float, float]:
    """Return the start and end of the present life's active time; a suspended job's is in the
    ledger."""
    start = status.start_time
    if start is None or current_condition(status.conditions) is ConditionType.SUSPENDED:
        return now, now
    end = now if status.completion_time is None else status.completion_time
    return start, max(start, end)


def _first_progress(
    ledger: Ledger, incidents: Sequence[Incident], life: tuple[float, float]
) -> float | None:
    # Without steps, the last sign of life may be a line of the start-up.
    told = [ledger.progress_at, *(one.progress_before for one in incidents if one.step is not None)]
    told += [one.progress_at for one in incidents]
    return min((at for at in told if at is not None and life[0] <= at <= life[1]), default=None)


def _disjoint(
    incidents: Sequence[Incident], within: tuple[float, float]
) -> list[tuple[str, float, float]]:
    """Return (cause, from, to) of the time lost in a span; where faults overlap, the first
    counts."""
    found, at = [], within[0]
    for one in sorted(incidents, key=lost_since):
        start = max(lost_since(one), at)
        end = lost_until(one)
        end = within[1] if end is None else min(end, within[1])
        if end > start:
            found.append((one.culprit.fault, start, end))
            at = end
    return found


def _startup(spans: Iterable[tuple[str, float, float]], start: float, until: float) -> float:
    """Return the seconds from the start to the first progress, without those that faults have
    cost."""
    broken = sum(max(min(end, until) - begin, 0.0) for _, begin, end in spans)
    return _sane(until - start - broken)


def _suspended(
    status: JobStatus,
    ledger: Ledger,
    total: float,
    life: tuple[float, float],
    now: float,
    created: float | None,
) -> float:
    """Return the seconds that a job was suspended: its age less its active time."""
    is_suspended = current_condition(status.conditions) is ConditionType.SUSPENDED
    if created is None or not (is_suspended or ledger.active_seconds):
        return 0.0
    return _sane((now if is_suspended else life[1]) - created - total)
