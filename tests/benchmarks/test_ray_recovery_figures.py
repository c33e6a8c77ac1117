"""The figures of losses under Ray that the benchmark prints."""

from __future__ import annotations

from ray_recovery import ALONE, OURS, Trial, figures, is_hopeless, manifest, table

from unbroken.spec.keys import AUTO_RESUME, MAX_RETRIES

TRIALS = [
    Trial(OURS, "head-pod", 20.0, 3, 1.5),
    Trial(ALONE, "head-pod", None, None, 1.0),
    Trial(OURS, "head-pod", 30.0, 7, 2.5),
    Trial(ALONE, "head-pod", None, None, 2.0),
]


def test_only_recovered_trials_have_times() -> None:
    ours, alone = figures(TRIALS)
    assert (ours["recovered"], ours["trials"], ours["p50"]) == (2, 2, 25.0)
    assert (ours["lostSteps"], ours["lostStepsMax"], ours["load"]) == (5.0, 7.0, [1.5, 2.5])
    assert (alone["recovered"], alone["p50"], alone["lostSteps"]) == (0, None, None)
    assert table([ours, alone]).splitlines()[2:] == [
        "| auto-resume | head-pod | 2/2 | 25.0 | 20.0 | 30.0 | 5, 7 | 1.5 to 2.5 |",
        "| ray-train-alone | head-pod | 0/2 |  |  |  |  | 1.0 to 2.0 |",
    ]


def test_a_loss_that_is_never_recovered_from_is_tried_twice() -> None:
    assert not is_hopeless(TRIALS[:2], ALONE, "head-pod")
    assert is_hopeless(TRIALS, ALONE, "head-pod")
    assert not is_hopeless(TRIALS, OURS, "head-pod")
    assert not is_hopeless([*TRIALS, Trial(ALONE, "head-pod", 9.0, 1)], ALONE, "head-pod")


def test_only_one_mode_has_auto_resume() -> None:
    both = {AUTO_RESUME, MAX_RETRIES}
    assert manifest(OURS)["metadata"]["annotations"].keys() == both
    assert manifest(ALONE)["metadata"]["annotations"] == {AUTO_RESUME: "false"}
    assert manifest(OURS)["spec"] == manifest(ALONE)["spec"]
