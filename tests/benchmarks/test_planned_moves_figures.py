"""The figures of planned moves that the benchmark prints."""

from __future__ import annotations

from planned_moves import Trial, figures, table


def test_wrong_trials_are_counted_and_give_no_times() -> None:
    trials = [
        Trial("cordon", until_stop=3.0, pause=0.5, until_left=4.0, steps_lost=0),
        Trial("cordon", until_stop=5.0, pause=1.5, until_left=6.0, steps_lost=1),
        Trial("cordon", pause=99.0, why_wrong="2 restarts"),
    ]
    found = figures(trials)
    assert (found["right"], found["trials"], found["wrong"]) == (2, 3, ["2 restarts"])
    assert (found["pause"], found["pause_max"], found["steps_lost_max"]) == (1.0, 1.5, 1)
    assert table([found]).splitlines()[2:] == [
        "| cordon | 2/3 | 1 | 4.00 | 1.00 | 1.50 | 5.00 |",
        "cordon: 2 restarts",
    ]


def test_without_a_right_trial_there_are_no_figures() -> None:
    found = figures([Trial("drain", why_wrong="told as NodeLost")])
    assert (found["pause"], found["until_left"], found["steps_lost_max"]) == (None, None, None)
