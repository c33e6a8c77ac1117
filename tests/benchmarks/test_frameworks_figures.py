"""The figures of kills under frameworks that the benchmark prints, and the notes it reads."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from frameworks import FIRST, SECOND, TORCHRUN, Trial, figures, note_told, parse, plan, table
from frameworks_launch import FRAMEWORKS, Framework, Job, Setting, children, family

WARM, COLD = ("warm", "warm"), ("cold", "cold")
TRIALS = [
    Trial("lightning", 5.0, TORCHRUN, 0, seconds=8.0, load=2.0),
    Trial("lightning", 5.0, FIRST, 0, seconds=4.0, told=4.2, starts=COLD, load=3.0),
    Trial("lightning", 5.0, SECOND, 0, 0.5, 0.45, starts=WARM, helpers_mib=100.0, load=1.0),
    Trial("lightning", 5.0, SECOND, 1, 0.7, None, starts=WARM, helpers_mib=120.0, load=1.0),
    Trial("lightning", 5.0, TORCHRUN, 1, seconds=14.0, load=2.0),
    Trial("lightning", 5.0, FIRST, 1, why_not="no step within 180 s", load=2.0),
]


def test_a_pair_is_torchrun_and_ours_of_one_round() -> None:
    torchrun, first, second = figures(TRIALS)
    assert (torchrun["p50_seconds"], torchrun["times_faster"]) == (11.0, 1.0)
    assert (first["recovered"], first["kills"], first["times_faster"]) == (1, 2, 2.0)
    assert (second["p50_seconds"], second["times_faster"]) == (pytest.approx(0.6), 18.0)
    assert (second["warm"], second["helpers_mib"]) == (2, 110.0)


def test_explain_is_compared_with_the_measured_cost_of_the_same_kill() -> None:
    _, first, second = figures(TRIALS)
    assert first["told_apart_max"] == pytest.approx(0.05)
    assert second["told_apart_max"] == pytest.approx(-0.1)


def test_a_trial_notes_where_the_cost_of_explain_begins_and_ends() -> None:
    trial = Trial("accelerate", 5.0, SECOND, 0)
    note_told(trial, {"seconds": 0.5, "progressAt": "1970-01-01T00:01:40.600000Z"}, 100.0)
    assert (trial.told, trial.told_until) == (0.5, pytest.approx(0.6))
    assert trial.told_from == pytest.approx(0.1)
    note_told(trial, {"seconds": None, "progressAt": None}, 100.0)
    assert trial.told is None


def test_the_table_names_each_kill_that_was_not_measured() -> None:
    shown = table(figures(TRIALS)).splitlines()
    assert shown[3].startswith("| lightning | 5 | first | 1/2 | 4.00 | 4.00, 4.00 | 2.0x | 4.20 |")
    assert shown[-1] == "lightning, 5 s, first: no step within 180 s"


def test_the_modes_of_a_pair_follow_on_each_other_in_another_order_each_round() -> None:
    given = [f"--env={sys.prefix}", "--frameworks=accelerate", "--rounds=2", "--delays=5,15"]
    found = [(one.round, one.delay, one.mode) for one in plan(parse(given))]
    assert found[:3] == [(0, 5.0, TORCHRUN), (0, 5.0, FIRST), (0, 5.0, SECOND)]
    assert found[6:9] == [(1, 5.0, FIRST), (1, 5.0, SECOND), (1, 5.0, TORCHRUN)]
    assert len(found) == 12


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--frameworks=jax"], "unknown: jax (known: hf-trainer, accelerate, lightning)"),
        (["--shape=1x1"], "1x1 is no shape of two ranks or more, such as 2x2"),
        (["--delays=soon"], "'soon' is no list of seconds, such as 5,15"),
        (["--env=/nowhere"], "/nowhere is no environment: it has no bin/python"),
    ],
)
def test_a_wrong_option_is_named(
    given: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse([f"--env={sys.prefix}", *given])
    assert message in capsys.readouterr().err


def test_an_environment_that_lacks_a_package_is_told_with_the_command_that_installs_it() -> None:
    one = Framework("new", ("json", "no_such_framework"), Path("train.py"))
    assert one.missing(Path(sys.executable)) == ["no_such_framework"]
    assert one.install == "torch==2.13.0 json no_such_framework"


def test_a_rank_has_stepped_again_only_in_a_process_that_is_new(tmp_path: Path) -> None:
    setting = Setting(1, 2, Path(sys.executable), tmp_path)
    job = Job(FRAMEWORKS[0], setting, tmp_path / "job")
    notes = [(0, 10, 1), (1, 11, 1), (0, 10, 2), (0, 20, 1)]
    records = [{"rank": r, "pid": p, "step": s, "at": float(p + s)} for r, p, s in notes]
    torn = '{"rank": 1, "pid": 21'
    job.steps_file.write_text("".join(json.dumps(one) + "\n" for one in records) + torn)
    assert {one["pid"] for one in (job.first_steps() or {}).values()} == {10, 11}
    assert job.first_steps(frozenset({10, 11})) is None, "rank 1 is not back"
    assert job.workers() == {0: 20, 1: 11}


def test_helpers_are_all_below_an_agent_but_its_workers() -> None:
    below = {1: [2, 3], 2: [4], 3: [5]}
    assert set(family(below, {1}, {3})) == {1, 2, 4}
    assert os.getpid() in children()[os.getppid()]
