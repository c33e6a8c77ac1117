"""The heat map of a job's ranks: at most CELLS_MAX cells, however many ranks there are.

A cell stands for neighbouring ranks and shows the worst of them in each respect, so that one late
rank among 16,384 is as visible as one among four.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median, median_high
from typing import NamedTuple

from unbroken.core.patience import LOOK_SECONDS
from unbroken.wire.observation import RankWatch

CELLS_MAX = 1024
"""Cells of a map: 32 rows of 32, which fit on a phone."""
LATE_SHARE = 0.5
"""Silence of a rank, as a share of the allowed one, above which it differs from the others."""
STEPS_APART = 1
"""Steps between equal ranks whose agents look at the same moment."""


@dataclass(frozen=True, slots=True)
class Cell:
    """Neighbouring ranks.  None: no rank of the cell reports the value."""

    first: int
    """Lowest rank."""
    last: int
    """Highest rank; it may have no report."""
    reported: int = 0
    """Ranks with a report."""
    step: int | None = None
    """Lowest step."""
    behind: int | None = None
    """Steps between the newest step of the job and the lowest of the cell."""
    step_seconds: float | None = None
    """Longest seconds of a step."""
    silence_seconds: float | None = None
    """Longest silence."""
    silence_share: float | None = None
    """Largest silence as a share of the one that is usual for its rank."""
    phase: str = ""
    """Phase that the fewest ranks of the job are in."""
    alarms: int = 0


@dataclass(frozen=True, slots=True)
class HeatMap:
    """All cells in order of rank."""

    ranks: int
    """Highest rank with a report, plus one."""
    per_cell: int
    cells: tuple[Cell, ...]
    newest_step: int | None = None
    steps_apart: int = STEPS_APART
    """Steps between ranks that count as equal."""


def steps_apart(step_seconds: Iterable[float | None], asked_seconds: float = 0.0) -> int:
    """Return the steps between ranks that count as equal, from their seconds per step.

    Agents look at different moments, and ranks go on meanwhile. `asked_seconds`: time in which the
    agents were asked one after the other.
    """
    known = [one for one in step_seconds if one is not None and one > 0]
    return STEPS_APART + (int((LOOK_SECONDS + asked_seconds) / median(known)) if known else 0)


class RankSigns(NamedTuple):
    """Values of a rank that are compared with the others. None: not known."""

    phase: str
    step: int | None
    step_seconds: float | None
    silence: float | None
    """Seconds since the last sign of life."""
    allowed: float | None
    """Seconds of silence that are usual."""
    has_alarm: bool


def signs_of(watch: RankWatch, now: float) -> RankSigns:
    """Return what is compared of a rank."""
    silence = None if watch.sign_at is None else max(now - watch.sign_at, 0.0)
    return RankSigns(
        watch.phase,
        watch.step,
        watch.step_seconds,
        silence,
        watch.allowed_seconds,
        has_alarm=bool(watch.alarms),
    )


def differ(ranks: Sequence[RankSigns], asked_seconds: float = 0.0) -> list[bool]:
    """Say of each rank if it has an alarm or another phase or step than most, or is long silent.

    `asked_seconds`: as for `steps_apart`.
    """
    if not ranks:
        return []
    usual = Counter(one.phase for one in ranks).most_common(1)[0][0]
    steps = [one.step for one in ranks if one.step is not None]
    # The middle rank's step, if most ranks report steps.
    middle = median_high(steps) if 2 * len(steps) > len(ranks) else None
    apart = steps_apart((one.step_seconds for one in ranks), asked_seconds)

    def is_different(one: RankSigns) -> bool:
        if one.has_alarm or one.phase != usual or (one.step is None) != (middle is None):
            return True
        if one.step is not None and middle is not None and abs(one.step - middle) > apart:
            return True
        return bool(
            one.silence is not None
            and one.allowed is not None
            and one.silence > LATE_SHARE * one.allowed
        )

    return [is_different(one) for one in ranks]


def heat_map(watches: Iterable[RankWatch], now: float, asked_seconds: float = 0.0) -> HeatMap:
    """Return the map of the ranks as their agents watch them.

    `asked_seconds`: as for `steps_apart`.
    """
    by_rank = {one.rank: one for one in watches if one.rank >= 0}
    count = max(by_rank, default=-1) + 1
    per_cell = -(-count // CELLS_MAX) or 1
    found: dict[int, list[RankWatch]] = {}
    for rank, one in by_rank.items():
        found.setdefault(rank // per_cell, []).append(one)
    phases = Counter(one.phase for one in by_rank.values())
    newest = max((one.step for one in by_rank.values() if one.step is not None), default=None)
    cells = []
    for index in range(-(-count // per_cell)):
        first, last = index * per_cell, min((index + 1) * per_cell, count) - 1
        cells.append(_cell(Cell(first, last), found.get(index, ()), phases, newest, now))
    apart = steps_apart((one.step_seconds for one in by_rank.values()), asked_seconds)
    return HeatMap(count, per_cell, tuple(cells), newest, apart)


def _cell(
    empty: Cell,
    ranks: Sequence[RankWatch],
    phases: Counter[str],
    newest: int | None,
    now: float,
) -> Cell:
    if not ranks:
        return empty
    step = min((one.step for one in ranks if one.step is not None), default=None)
    silences = [(max(now - one.sign_at, 0.0), one) for one in ranks if one.sign_at is not None]
    shares = (quiet / one.allowed_seconds for quiet, one in silences if one.allowed_seconds)
    return Cell(
        empty.first,
        empty.last,
        reported=len(ranks),
        step=step,
        behind=None if step is None or newest is None else newest - step,
        step_seconds=max(
            (one.step_seconds for one in ranks if one.step_seconds is not None), default=None
        ),
        silence_seconds=max((quiet for quiet, _ in silences), default=None),
        silence_share=max(shares, default=None),
        phase=min((one.phase for one in ranks), key=lambda phase: (phases[phase], phase)),
        alarms=sum(len(one.alarms) for one in ranks),
    )
