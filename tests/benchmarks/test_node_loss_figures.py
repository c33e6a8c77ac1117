"""Figures of the benchmark of lost nodes, from the records of workers and from its trials."""

from __future__ import annotations

import json
from pathlib import Path

import node_loss
import pytest
from node_loss_trials import Trial, all_ranks, figures, overlap

from tests.realnodes.jobs import Job
from tests.realnodes.plane import RealCluster


def job(directory: Path, lives: dict[str, tuple[float, ...]]) -> Job:
    """Return a job whose workers have recorded when they were alive, by `ATTEMPT.RANK`."""
    made = Job(RealCluster(directory, "kubectl"), "j")
    folder = made.cluster.shared / made.name
    folder.mkdir(parents=True)
    for name, times in lives.items():
        (folder / f"alive.{name}.1").write_text("".join(f"{1.7e9 + at}\n" for at in times))
    return made


def test_the_longest_time_for_which_two_attempts_ran(tmp_path: Path) -> None:
    lives = {"0.0": (0.0, 5.0), "0.1": (0.0, 10.5, 12.5), "1.0": (10.0, 20.0), "1.1": (11.0, 20.0)}
    found = job(tmp_path, lives)
    assert overlap(found) == pytest.approx(2.01)
    assert overlap(found, least=1) == 0.0


def test_a_worker_that_slept_counts_from_when_it_woke(tmp_path: Path) -> None:
    lives = {"0.0": (0.0, 5.0, 17.5, 17.52), "1.0": (10.0, 20.0)}
    assert overlap(job(tmp_path, lives)) == pytest.approx(0.03)


def test_an_attempt_counts_once_every_rank_has_made_a_step(tmp_path: Path) -> None:
    found = job(tmp_path, {})
    folder = found.cluster.shared / found.name

    def write(rank: int, attempt: int) -> None:
        facts = {"JOB_RESTART_COUNT": f"{attempt}", "RANK": f"{rank}"}
        first = json.dumps({**facts, "UNBROKEN_POD": "", "NODE": ""})
        (folder / f"{attempt}-{rank}-1").write_text(f"{first}\n{1.7e9 + rank}\n")

    write(0, 1)
    assert all_ranks(found, 0) == {}
    write(1, 1)
    assert all_ranks(found, 1) == {}
    assert all_ranks(found, 0).keys() == {0, 1}


def test_what_went_wrong_is_in_no_figure_and_an_overlap_is_counted() -> None:
    trials = [
        Trial("power-off", False, {"detected": 3.0, "first step": 12.0}),
        Trial("power-off", False, {"detected": 3.0, "first step": 14.0}, overlap=0.02),
        Trial("power-off", False, {"first step": 90.0}, why_wrong="no step in 120 s"),
    ]
    cell = figures(trials)
    assert (cell["p50"]["first step"], cell["worst"]["first step"]) == (13.0, 14.0)
    assert (cell["right"], cell["trials"], cell["overlaps"]) == (2, 3, 1)
    text = node_loss.table([{"launcher": "unbroken", **cell}])
    assert "| unbroken | power-off | no | 2/3 | 1 | 3.0 |  | 13.0 | 14.0 |" in text
    assert "power-off: no step in 120 s" in text
