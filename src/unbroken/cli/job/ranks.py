"""The table of a job's ranks; of a large job, only ranks that differ.  Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from unbroken.core.patience import START
from unbroken.spec.times import time_seconds, time_text
from unbroken.wire.observation import Bound, RankWatch

from .views import span

ALL_SHOWN = 16
"""A job of up to so many ranks is shown whole; of a larger job, only ranks that differ."""
DIFFERENT_SHOWN = 24
LATE_SHARE = 0.5
"""Share of its allowed silence after which a rank counts as different."""
STEPS_APART = 1
"""Steps between ranks that count as equal: ranks report at slightly different times."""
TITLES = ("RANK", "POD", "PHASE", "STEP", "STEP TIME", "LAST SIGN", "ALLOWED", "ALARMS")

SIGNS = {
    Bound.STEPS: "a step",
    Bound.PHASE: "a step in this phase",
    Bound.OUTPUT: "a line",
    Bound.WORK: "work",
    Bound.START: "a sign",
}

Rank = Mapping[str, Any]


def watch_value(watch: RankWatch) -> dict[str, Any]:
    """A rank as JSON: times as RFC 3339, NaN and infinities as text."""

    def when(at: float | None) -> str | None:
        return None if at is None else time_text(at, has_microseconds=True)

    return {
        "rank": watch.rank,
        "phase": watch.phase,
        "step": watch.step,
        "stepTime": when(watch.step_at),
        "stepSeconds": watch.step_seconds,
        "lastSign": when(watch.sign_at),
        "allowedSeconds": watch.allowed_seconds,
        "bound": watch.bound,
        "lookSeconds": watch.look_seconds,
        "actSeconds": watch.act_seconds,
        "lateSince": when(watch.late_since),
        "checkpointStep": watch.checkpoint_step,
        "metrics": {k: v if math.isfinite(v) else str(v) for k, v in watch.metrics.items()},
        "alarms": [
            {"detector": one.detector, "since": when(one.since), "why": one.why}
            for one in watch.alarms
        ],
    }


def rank_rows(ranks: Sequence[Rank], now: float) -> Iterator[list[object]]:
    """Rows of the table; `ranks` are of `watch_value`, each with its `pod`."""
    shown = ranks if len(ranks) <= ALL_SHOWN else _different(ranks, now)[:DIFFERENT_SHOWN]
    for one in shown:
        silence = _silence(one, now)
        yield [
            one["rank"],
            one["pod"],
            one["phase"] or "-",
            "-" if one["step"] is None else one["step"],
            "-" if one["stepSeconds"] is None else span(one["stepSeconds"]),
            "-" if silence is None else f"{_short(silence)} ago",
            "learning" if one["allowedSeconds"] is None else _short(one["allowedSeconds"]),
            ", ".join(f"{alarm['detector']}: {alarm['why']}" for alarm in one["alarms"]) or "-",
        ]


def bound_lines(ranks: Sequence[Rank]) -> Iterator[str]:
    """A line for each kind of bound: its ranks, and how soon their hang is detected."""
    from unbroken.core.diagnosis.stacks import name_ranks

    for bound, sign in SIGNS.items():
        found = [one for one in ranks if one["bound"] == bound.value]
        if not found:
            continue
        who = name_ranks([one["rank"] for one in found])
        looks = [one["lookSeconds"] for one in found if one["lookSeconds"] is not None]
        if not looks:
            limit = span(START.idle.seconds)
            yield f"{who}: starting or learning, alarm after {limit} without any sign of life"
            continue
        acts = max(one["actSeconds"] or 0.0 for one in found)
        yield (
            f"{who}: by {bound.value}, all ranks are looked at after {_short(max(looks))} without "
            f"{sign}, restart from {_short(acts)} on if two looks show who keeps the others waiting"
        )


def others_line(ranks: Sequence[Rank], now: float) -> str:
    """A line about the ranks without a row; empty if there are none."""
    if len(ranks) <= ALL_SHOWN:
        return ""
    different = _different(ranks, now)
    rest = [one for one in ranks if one not in different]
    hidden = len(different) - DIFFERENT_SHOWN
    more = [f"{hidden} more that differ"] if hidden > 0 else []
    if not rest:
        return "; ".join(more)
    phases = Counter(one["phase"] or "-" for one in rest)
    parts = [f"{'the other ' if different else 'all '}{len(rest)} ranks: {', '.join(phases)}"]
    parts += _range("step", "", (one["step"] for one in rest))
    parts += _range("last sign", " ago", (_silence(one, now) for one in rest))
    parts += _range("allowed", "", (one["allowedSeconds"] for one in rest)) or ["learning"]
    return "; ".join([", ".join(parts), *more])


def _different(ranks: Sequence[Rank], now: float) -> list[Rank]:
    """Ranks with an alarm, with another phase or step than most, or long silent."""
    phase = Counter(one["phase"] for one in ranks).most_common(1)[0][0]
    step = Counter(one["step"] for one in ranks).most_common(1)[0][0]

    def is_different(one: Rank) -> bool:
        silence, allowed = _silence(one, now), one["allowedSeconds"]
        is_late = silence is not None and allowed is not None and silence > LATE_SHARE * allowed
        is_apart = (one["step"] is None) != (step is None)
        is_apart |= None not in (one["step"], step) and abs(one["step"] - step) > STEPS_APART
        return bool(one["alarms"]) or one["phase"] != phase or is_apart or is_late

    return sorted(filter(is_different, ranks), key=lambda one: (not one["alarms"], one["rank"]))


def _silence(one: Rank, now: float) -> float | None:
    return None if one["lastSign"] is None else max(now - time_seconds(one["lastSign"]), 0.0)


def _short(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else span(seconds)


def _range(name: str, end: str, given: Iterable[float | None]) -> list[str]:
    """The range of values as `last sign 0.1 s to 2.0 s ago`; empty without values."""
    values = [one for one in given if one is not None]
    if not values:
        return []
    least, most = (
        str(value) if isinstance(value, int) else _short(value)
        for value in (min(values), max(values))
    )
    return [f"{name} {least}{end}" if least == most else f"{name} {least} to {most}{end}"]
