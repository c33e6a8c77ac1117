"""Figures that `benchmarks/scoreboard.py` computes from logs and outcomes."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

import pytest
from scoreboard_logs import Word, first_since, words
from scoreboard_outcome import QUIET, Outcome, row, rows, totals
from scoreboard_peers import peers
from scoreboard_tables import markdown
from scoreboard_trials import (
    BY_NAME,
    FAULTS,
    HEALTHY,
    KNOWN,
    LONG_SECONDS,
    LONG_SEED,
    MORE_PAUSES,
    MORE_SEED,
    PAUSED,
    PAUSED_LONG,
    PAUSES,
    SOON,
    WORLD,
    Plan,
    advance,
    contribution,
    long_pause,
    pause,
    plan,
    right_result,
)

API = "torch/distributed/elastic/multiprocessing/api.py:1002]"
# Lines of torchrun 2.13 and of ft_launcher 0.6.0, as they were logged.
FAILED = (
    f"E1121 11:01:36.637000 7628 {API} failed (exitcode: -9) local_rank: 0 (pid: 42)"
    " of binary: /usr/bin/python"
)
LATE = (
    "2026-11-21 11:01:33,593 [WARNING] [vm] [workload:?({}) infra:?(?)] rank_monitor_server.py:497"
    " [Cycle 0] Did not get subsequent heartbeat. Waited 5.00 seconds."
)


def local(text: str) -> float:
    """Return seconds since the epoch, of the machine's own time zone."""
    return datetime.fromisoformat(text).astimezone().timestamp()


def test_the_line_of_a_failure_names_the_rank_of_its_process() -> None:
    said = words(["rank 2: Traceback", FAILED], {42: 3}, 2026)
    assert [(word.rank, word.at) for word in said] == [(3, local("2026-11-21 11:01:36.637"))]


def test_a_process_that_nobody_knows_blames_nobody() -> None:
    assert words([FAILED], {43: 3}, 2026)[0].rank is None


def test_one_missing_heartbeat_names_its_rank_and_several_name_nobody() -> None:
    alone = words([LATE.format(0), FAILED], {42: 3}, 2026)
    assert [word.rank for word in alone] == [3, 3]
    assert alone[0].at == local("2026-11-21 11:01:33.593")
    assert first_since(alone, 0.0) == alone[0]
    both = first_since(words([LATE.format(0), LATE.format(1), FAILED], {42: 3}, 2026), 0.0)
    assert both is not None
    assert both.rank is None
    assert "heartbeat" in both.text


def test_what_was_said_before_the_fault_is_not_about_it() -> None:
    said = [Word(1.0, 0, "early"), Word(5.0, 3, "later"), Word(4.0, 2, "first")]
    found = first_since(said, 2.0)
    assert found is not None
    assert found.text == "first"
    assert first_since(said, 6.0) is None


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_plan_is_a_function_of_its_seed(fault: object) -> None:
    made = BY_NAME[fault.name]  # type: ignore[attr-defined]
    plans = [plan(made, seed) for seed in range(20)]
    assert plans == [plan(made, seed) for seed in range(20)]
    assert len({one.jitter_seconds for one in plans}) == 20
    assert all(Plan.from_json(one.to_json()) == one for one in plans)
    assert all(one.last_step == one.step + made.steps_after for one in plans)


def test_seeds_reach_every_rank_and_step_within_bounds() -> None:
    plans = [plan(BY_NAME["error"], seed) for seed in range(60)]
    assert {one.rank for one in plans} == set(range(WORLD))
    assert {one.rank for one in (plan(BY_NAME["port"], seed) for seed in range(9))} == {0}
    assert all(SOON[0] <= one.step <= SOON[1] for one in plans)


def test_a_healthy_run_pauses_and_no_other_does() -> None:
    healthy, broken = plan(BY_NAME[HEALTHY], 1), plan(BY_NAME["slow"], 1)
    names = {found[0] for step in range(1, 1500) if (found := pause(healthy, step))}
    assert names == {"eval", "checkpoint"}
    assert not any(pause(broken, step) for step in range(1, 1500))


def test_a_step_left_out_or_made_twice_gives_another_result() -> None:
    def after(*steps: int) -> float:
        state = 0.0
        for step in steps:
            state = advance(state, sum(contribution(rank, step) for rank in range(WORLD)))
        return state

    assert after(1, 2, 3, 4) == right_result(4)
    assert after(1, 2, 2, 3, 4) != right_result(4)
    assert after(1, 2, 4) != right_result(4)


RIGHT = Outcome(
    "stop", 0, "unbroken", "plain", 2, 800, True, "right", 3.0, 1.5, True, 2, "rank 2", lost_steps=4
)
WRONG = Outcome(
    "stop", 1, "unbroken", "plain", 1, 800, True, "right", 5.0, 2.5, True, 2, "rank 2", lost_steps=6
)
LOST = Outcome("stop", 2, "unbroken", "plain", 1, 800, ending="stood still for 120 s")
NOT_RUN = Outcome("stop", 3, "unbroken", "plain", 1, 800, not_run="no such thing here")


def document(outcomes: list[Outcome]) -> dict[str, object]:
    """Return the document that a run writes to its file."""
    names = ("unbroken", "unbroken-output", "torchrun")
    return {
        "machine": "2 cores",
        "command": "benchmarks/scoreboard.py --seeds 3",
        "bound_seconds": 120.0,
        "skipped": {"dlrover-run": "not installed"},
        "settings": dict.fromkeys(names, "defaults"),
        "trials": [one.to_json() for one in outcomes],
    }


def test_figures_of_a_row() -> None:
    found = row([RIGHT, WRONG, LOST, NOT_RUN])
    assert (found.trials, found.survived, found.detected) == (3, 2, 2)
    assert (found.blamed, found.correct) == (2, 1)
    assert found.precision == pytest.approx(1 / 2)
    assert found.recall == pytest.approx(1 / 3)
    assert (found.detect_p50, found.detect_max, found.stall_p50) == (2.0, 2.5, 4.0)
    assert found.not_run == ["no such thing here"]


def test_what_was_not_run_is_in_no_figure() -> None:
    found = row([NOT_RUN])
    assert (found.trials, found.detect_p50, found.precision, found.recall) == (0, None, None, None)


def test_a_healthy_run_is_touched_by_a_word_or_a_restart() -> None:
    quiet = Outcome(HEALTHY, 0, "unbroken", "plain", -1, 0, True, "right")
    loud = Outcome(HEALTHY, 1, "unbroken", "plain", -1, 0, True, "right", said="silent")
    again = Outcome(HEALTHY, 2, "unbroken", "plain", -1, 0, True, "right", restarts=1)
    assert row([quiet, loud, again]).touched == 2


def test_totals_leave_the_healthy_runs_out() -> None:
    healthy = Outcome(HEALTHY, 0, "unbroken", "plain", -1, 0, True, "right")
    whole = totals(rows([RIGHT, WRONG, LOST, healthy]))["unbroken", "plain", QUIET]
    assert (whole.trials, whole.correct, whole.blamed) == (3, 1, 2)


@pytest.mark.parametrize("mode", KNOWN)
def test_a_hang_falls_once_what_the_script_shows_is_known(mode: str) -> None:
    hang, crash = plan(BY_NAME["gil"], 3, mode), plan(BY_NAME["error"], 3, mode)
    assert KNOWN[mode][0] <= hang.step <= KNOWN[mode][1]
    assert SOON[0] <= crash.step <= SOON[1]
    assert Plan.from_json(hang.to_json()).mode == mode


def test_the_long_pauses_of_eight_seeds_are_of_each_kind_told_and_untold() -> None:
    found = [long_pause(plan(BY_NAME[PAUSED], seed)) for seed in range(8)]
    assert {(kind, is_told) for kind, _, is_told in found} == {
        (kind, is_told) for kind in PAUSES for is_told in (True, False)
    }
    found = [long_pause(plan(BY_NAME[PAUSED], MORE_SEED + seed)) for seed in range(8)]
    assert {(kind, is_told) for kind, _, is_told in found} == {
        (kind, is_told) for kind in MORE_PAUSES for is_told in (True, False)
    }
    found = [long_pause(plan(BY_NAME[PAUSED], LONG_SEED + seed)) for seed in range(16)]
    assert len({(kind, is_told) for kind, _, is_told in found}) == 16
    assert min(seconds for _, seconds, _ in found) >= LONG_SECONDS[0]


def test_runs_with_a_long_pause_are_rows_of_their_own() -> None:
    assert plan(BY_NAME[PAUSED_LONG], 3) == plan(BY_NAME[PAUSED], LONG_SEED + 3)
    made = [
        Outcome(fault, seed, "unbroken", "plain", -1, 0, True, "right")
        for fault, seed in ((PAUSED, 7), (PAUSED, LONG_SEED), (PAUSED_LONG, 1))
    ]
    assert [(one.fault, one.trials) for one in rows(made)] == [(PAUSED, 1), (PAUSED_LONG, 2)]


def test_nobody_is_right_for_a_link_and_the_pod_for_its_parent_process() -> None:
    def correct(fault: str, rank: int | None, pod: tuple[int, ...] = (), after: float = 1.0) -> int:
        made = Outcome(fault, 0, "unbroken", "plain", 2, 300, detected_seconds=after)
        return row([replace(made, blamed=rank, blamed_pod=pod)]).correct

    assert [correct("link", None), correct("link", 2), correct("link", 1)] == [1, 1, 0]
    assert [correct("parent", None, (2, 3)), correct("parent", None, (0, 1))] == [1, 0]
    assert [correct("gil", None), correct("gil", None, (2, 3))] == [0, 0]


def test_rows_that_were_not_run_again_are_taken_from_an_earlier_page() -> None:
    earlier = """# What is detected

    .venv/bin/python benchmarks/scoreboard.py --launchers unbroken --seeds 20    # 304 trials
    .venv/bin/python benchmarks/scoreboard.py --launchers torchrun --seeds 1    # 9 trials

## Nothing is wrong: evaluations, slow checkpoints, uneven steps

| launcher | program | load | came to its end | false alarms |
|---|---|---|---|---|
| unbroken | plain | 0 | 20/20 | 0/20 |
| torchrun | plain | 0 | 1/1 | 0/1 |

## SIGSTOP of one rank (`stop`)

| launcher | program | load | survived | found |
|---|---|---|---|---|
| unbroken | plain | 0 | 20/20 | 20/20 |
| ft_launcher | plain | 8 | 2/2 | 2/2 |

## How each was set

- `unbroken`: defaults.
- `ft_launcher`: heartbeats.
- A job that makes no step is given up.
"""
    found = peers(earlier)
    assert found.rows == {
        "healthy": [
            "| unbroken | plain | - | 20/20 | 0/20 |",
            "| torchrun | plain | - | 1/1 | 0/1 |",
        ],
        "stop": [
            "| unbroken | plain | - | 20/20 | 20/20 |",
            "| ft_launcher | plain | busy | 2/2 | 2/2 |",
        ],
    }
    assert found.notes == ["- `unbroken`: defaults.", "- `ft_launcher`: heartbeats."]
    assert len(found.commands) == 2
    page = markdown([document([RIGHT])], found)
    assert "| ft_launcher | plain | busy | 2/2 | 2/2 |" in page
    assert "| unbroken | plain | - | 20/20 | 0/20 |" in page
    assert "| unbroken | plain | - | 20/20 | 20/20 |" not in page, "it was run again"
