"""Origin of an alarm of several ranks: training in step spreads the alarm to all of them
within moments, and the first report that arrives says nothing of that."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from statistics import median_low

from unbroken.core.diagnosis.stacks import name_ranks
from unbroken.core.job.events import PodUid
from unbroken.wire.observation import Alarm, RankWatch

RankPlace = tuple[PodUid, int]
"""A rank in its pod."""
SAME_SECONDS = 1.0
"""Alarms without a step cannot be ordered more exactly: this is the time between two looks of an
agent."""
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
        same = max(SAME_SECONDS, usual)
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
