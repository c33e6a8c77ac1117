"""The heat map: bounded, and one bad rank is visible in it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from unbroken.core.page.heat_map import CELLS_MAX, Cell, differ, heat_map, signs_of, steps_apart
from unbroken.wire.observation import Alarm, RankWatch

NOW = 1000.0


def ranks(count: int) -> list[RankWatch]:
    """Ranks that train at the same step, with a sign of life half a second ago."""
    return [
        RankWatch(rank, "train", 50, step_seconds=0.5, sign_at=NOW - 0.5, allowed_seconds=5.0)
        for rank in range(count)
    ]


@pytest.mark.parametrize(
    ("count", "per_cell", "cells"),
    [(0, 1, 0), (1, 1, 1), (4, 1, 4), (1024, 1, 1024), (1025, 2, 513), (16384, 16, 1024)],
)
def test_a_map_has_at_most_1024_cells(count: int, per_cell: int, cells: int) -> None:
    found = heat_map(ranks(count), NOW)
    assert (found.ranks, found.per_cell, len(found.cells)) == (count, per_cell, cells)
    assert sum(one.reported for one in found.cells) == count
    assert [one.first for one in found.cells] == list(range(0, count, per_cell))


@pytest.mark.parametrize("count", [4, 16384])
def test_one_bad_rank_is_as_visible_among_16384_as_among_4(count: int) -> None:
    bad = count * 3 // 4
    watches = ranks(count)
    alarm = Alarm("stopped", 900.0, 900.0, "stopped by a signal")
    watches[bad] = replace(
        watches[bad], step=40, step_seconds=0.9, sign_at=NOW - 20.0, phase="eval", alarms=(alarm,)
    )
    found = heat_map(watches, NOW)
    (odd,) = [one for one in found.cells if one.first <= bad <= one.last]
    assert (odd.step, odd.behind, odd.step_seconds) == (40, 10, 0.9)
    assert (odd.silence_seconds, odd.silence_share) == (20.0, 4.0)
    assert (odd.phase, odd.alarms) == ("eval", 1)
    others = {(one.behind, one.phase, one.alarms) for one in found.cells if one is not odd}
    assert others == {(0, "train", 0)}


@pytest.mark.parametrize(
    ("seconds", "apart"),
    [((), 1), ((None, 0.0), 1), ((2.0, 2.0), 1), ((0.5, None), 3), ((0.002, 0.002, 9.0), 501)],
)
def test_ranks_may_be_apart_by_the_steps_between_two_looks(
    seconds: tuple[float | None, ...], apart: int
) -> None:
    assert steps_apart(seconds) == apart
    watches = [RankWatch(rank, step_seconds=one) for rank, one in enumerate(seconds)]
    assert heat_map(watches, NOW).steps_apart == apart


def test_ranks_without_a_report_are_empty_cells() -> None:
    found = heat_map([RankWatch(3)], NOW)
    assert found.cells == (
        *(Cell(rank, rank) for rank in range(3)),
        Cell(3, 3, reported=1),
    )
    assert found.newest_step is None


def test_a_rank_that_no_job_has_makes_no_larger_map() -> None:
    found = heat_map([*ranks(4), RankWatch(2**31 - 1), RankWatch(-7)], NOW)
    assert len(found.cells) == CELLS_MAX
    assert found.cells[0].reported == 4


def test_a_sign_from_a_clock_that_is_ahead_is_no_silence() -> None:
    (cell,) = heat_map([RankWatch(0, sign_at=NOW + 60.0, allowed_seconds=5.0)], NOW).cells
    assert (cell.silence_seconds, cell.silence_share) == (0.0, 0.0)


def test_ranks_whose_agents_were_asked_one_after_the_other_are_equal() -> None:
    watches = [replace(one, step=50 + one.rank // 4) for one in ranks(40)]
    signs = [signs_of(one, NOW) for one in watches]
    assert sum(differ(signs)) > 0
    assert not any(differ(signs, asked_seconds=5.0))
    assert heat_map(watches, NOW, asked_seconds=5.0).steps_apart == 13


@pytest.mark.parametrize(
    "change",
    [
        {"phase": "eval"},
        {"step": 40},
        {"step": None},
        {"sign_at": NOW - 2.6},
        {"alarms": (Alarm("stopped", 900.0, 900.0, "stopped by a signal"),)},
    ],
)
def test_a_rank_differs_by_phase_step_silence_or_alarm(change: dict[str, Any]) -> None:
    watches = ranks(4)
    watches[2] = replace(watches[2], **change)
    assert differ([signs_of(one, NOW) for one in watches]) == [False, False, True, False]
    assert differ([]) == []
