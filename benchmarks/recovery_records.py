"""Figures of a recovery, computed from the times of its events, without a clock or a process."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from unbroken.spec.job.incident import Incident

OUTLIER = 3.0
"""Multiple of the median: a recovery that took longer is listed with its longest stage."""
RATIOS = {"times_faster": "p50_seconds", "times_less_beyond_step": "beyond_step_p50_seconds"}
"""Names of the ratios of `rate`, and the figure of each."""
STAGES = ("detect", "stop", "ready", "start", "first_step")


@dataclass(frozen=True, slots=True)
class Recovery:
    """One kill and its recovery. Times are seconds since the epoch; None: not seen."""

    mode: str
    rank: int
    killed_at: float
    detected_at: float | None = None
    """Time at which the launcher has collected the exit status of the worker."""
    stopped_at: float | None = None
    """Time at which no worker of the broken attempt lives."""
    ready_at: float | None = None
    """Time from which every agent may start the next attempt."""
    started_at: float | None = None
    """Time at which every process of the next attempt exists."""
    stepped_at: float | None = None
    """Time at which every rank has completed a step again."""
    why_not: str = ""
    """Reason why the job never continued."""
    fault: str = "worker"
    step_seconds: float | None = None
    """Median duration of the job's last steps before the kill."""
    lost_steps: int | None = None
    """Newest step reported before the kill, minus the step before the first one after it."""
    remedy: str = ""
    """Remedy that the launcher reports; empty: it reports none."""
    notes: tuple[str, ...] = ()
    """Conditions before the kill that were not as expected."""
    details: Mapping[str, float] = field(default_factory=dict)
    """Further durations in seconds, which only some launchers report."""

    @property
    def seconds(self) -> float | None:
        """Seconds from the kill to the first completed step of the whole job."""
        return None if self.stepped_at is None else self.stepped_at - self.killed_at

    @property
    def beyond_step(self) -> float | None:
        """Seconds beyond one usual step of the job: what the recovery itself costs."""
        if self.seconds is None or self.step_seconds is None:
            return None
        return self.seconds - self.step_seconds

    @property
    def detect_to_ready(self) -> float | None:
        """Seconds of the launcher's own work before it may start the next attempt."""
        if self.detected_at is None or self.ready_at is None:
            return None
        return self.ready_at - self.detected_at


def stage_seconds(recovery: Recovery) -> dict[str, float]:
    """Return the duration of each stage, in order."""
    ends = (
        recovery.detected_at,
        recovery.stopped_at,
        recovery.ready_at,
        recovery.started_at,
        recovery.stepped_at,
    )
    return lengths(recovery.killed_at, dict(zip(STAGES, ends, strict=True)))


def lengths(start: float, ends: Mapping[str, float | None]) -> dict[str, float]:
    """Return the duration of each part. A part without an end counts to the next.

    Parts may overlap: a worker may die before its launcher knows. Each part begins at the latest
    end of the parts before it, so that all durations add up to the whole.
    """
    found: dict[str, float] = {}
    reached = start
    for name, end in ends.items():
        if end is not None:
            found[name] = max(0.0, end - reached)
            reached = max(reached, end)
    return found


def with_incidents(recovery: Recovery, found: Sequence[Incident]) -> Recovery:
    """Return the recovery with the times of our operator's incidents.

    More than one incident means that restarts were in vain.
    """
    first, last = found[0], found[-1]
    told = {
        "reaped": recovery.detected_at,
        "operator_detected": first.detected_at,
        "operator_stopped": last.stopped_at,
        "operator_ready": last.ready_at,
        "operator_started": last.started_at,
        "operator_progress": last.progress_at,
    }
    return replace(
        recovery,
        detected_at=first.detected_at,
        stopped_at=recovery.stopped_at or last.stopped_at,
        ready_at=last.ready_at,
        remedy=last.remedy.value,
        details={
            **recovery.details,
            "incidents": len(found),
            **lengths(recovery.killed_at, told),
        },
    )


def percentile(values: Sequence[float], share: float) -> float:
    """Value at `share` (0..1) of the sorted values, linear between neighbours; NaN of none."""
    if not values:
        return math.nan
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summary(mode: str, recoveries: Sequence[Recovery]) -> dict[str, object]:
    """Return the mode's entry in the JSON: figures of the kills that it recovered from."""
    good = [one for one in recoveries if one.seconds is not None]
    spans = [one.detect_to_ready for one in good if one.detect_to_ready is not None]
    lost = [one.lost_steps for one in good if one.lost_steps is not None]
    beyond = [one.beyond_step for one in good if one.beyond_step is not None]
    steps = [one.step_seconds for one in good if one.step_seconds is not None]
    entry: dict[str, object] = {
        "mode": mode,
        **spread([one.seconds for one in good if one.seconds is not None]),
        "stages": medians([stage_seconds(one) for one in good]),
        "detect_to_ready_p50_seconds": statistics.median(spans) if spans else None,
        "beyond_step_p50_seconds": statistics.median(beyond) if beyond else None,
        "step_p50_seconds": statistics.median(steps) if steps else None,
        "lost_steps_p50": statistics.median(lost) if lost else None,
        "lost_steps_max": max(lost, default=None),
        "details": medians([one.details for one in good]),
        "remedies": dict(Counter(one.remedy for one in good if one.remedy)),
        "kills": len(recoveries),
        "recovered": len(good),
        "outliers": outliers(good),
        "trials": [trial(one) for one in recoveries],
    }
    whys = Counter(one.why_not for one in recoveries if one.why_not)
    notes = Counter(note for one in recoveries for note in one.notes)
    more = {"not_recovered": dict(whys), "notes": dict(notes)}
    return {**entry, **{name: counts for name, counts in more.items() if counts}}


def spread(seconds: Sequence[float]) -> dict[str, float | None]:
    """Return percentiles, mean and maximum of durations; None for each if there are none."""
    if not seconds:
        return dict.fromkeys(("p50_seconds", "p95_seconds", "mean_seconds", "max_seconds"))
    return {
        "p50_seconds": percentile(seconds, 0.5),
        "p95_seconds": percentile(seconds, 0.95),
        "mean_seconds": statistics.fmean(seconds),
        "max_seconds": max(seconds),
    }


def outliers(good: Sequence[Recovery]) -> list[dict[str, object]]:
    """Return recoveries that took far longer than the median, each with its slowest stage."""
    taken = [one.seconds for one in good if one.seconds is not None]
    bound = OUTLIER * percentile(taken, 0.5)
    usual = medians([stage_seconds(one) for one in good])
    found: list[dict[str, object]] = []
    for one in good:
        if one.seconds is not None and one.seconds > bound:
            more = {name: took - usual[name] for name, took in stage_seconds(one).items()}
            found.append({**trial(one), "stage": max(more, key=lambda name: more[name])})
    return found


def trial(one: Recovery) -> dict[str, object]:
    """Return the JSON of a kill."""
    return {
        "rank": one.rank,
        "killed_at": one.killed_at,
        "seconds": one.seconds,
        "beyond_step_seconds": one.beyond_step,
        "stages": stage_seconds(one),
        "lost_steps": one.lost_steps,
        "remedy": one.remedy,
        "why_not": one.why_not,
        "notes": list(one.notes),
        "details": dict(one.details),
    }


def rate(entries: Sequence[dict[str, Any]], base: str) -> None:
    """Add to each entry the ratios of its medians to those of the mode `base` of the same run."""
    for ratio, figure in RATIOS.items():
        against = next((entry[figure] for entry in entries if entry["mode"] == base), None)
        for entry in entries:
            own = entry[figure]
            entry[ratio] = against / own if against and own and own > 0 else None


def medians(lengths: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the median of each name over the entries that have it, in order of appearance."""
    names = dict.fromkeys(name for one in lengths for name in one)
    return {name: statistics.median(one[name] for one in lengths if name in one) for name in names}
