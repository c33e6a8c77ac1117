"""The transcripts of the README are what the commands print today."""

from __future__ import annotations

import re
from datetime import datetime
from pathlib import Path

import pytest

from unbroken.cli.job.story import story
from unbroken.cli.job.views import incident_line
from unbroken.core.job.recovery import budgets
from unbroken.spec.job.incident import Incident, Remedy, Signal, StackGroup
from unbroken.spec.job.types import RestartStatus, RunPolicy

README = (Path(__file__).parents[2] / "README.md").read_text()


def at(clock: str) -> float:
    """Seconds since the epoch of a time on the day of the transcripts."""
    return datetime.fromisoformat(f"2026-11-22 {clock}").timestamp()


def why(step: int) -> str:
    """The reason of the first restart of a job that sets no limit."""
    limits, progress = budgets.limits(RunPolicy()), f"step {step}"
    charge = budgets.charge(limits, RestartStatus(), 0, 60.0, progress)
    return f"every pod is well; {charge.reason}"


def incident(
    culprit: Signal, times: list[str], steps: tuple[int, int, float], samples: int
) -> Incident:
    """Before, detected, examined, stopped, started and first step of an incident."""
    before, detected, examined, stopped, started, progress = (
        at(one) if one else None for one in times
    )
    assert detected is not None
    return Incident(
        *(1, 0, culprit, (culprit,), Remedy.PROCESS, why(steps[0]), detected),
        stopped_at=stopped,
        ready_at=stopped,
        examined_at=examined,
        started_at=started,
        progress_at=progress,
        ended_at=progress,
        outcome="recovered",
        progress_before=before,
        step=steps[0],
        resumed_step=steps[1],
        step_seconds=steps[2],
        samples_repeated=samples,
        resumed=f"{samples} samples repeated",
    )


RANK = ("train-lm-pods-1", "node-1", 3)
KILLED = incident(
    Signal(at("16:42:03.825"), "Signal", "killed by SIGKILL", *RANK),
    ["16:42:03.526", "16:42:03.825", "", "16:42:03.991", "16:42:04.102", "16:42:05.021"],
    (118, 100, 5.302 / 19),
    1216,
)
FROZEN = incident(
    Signal(at("16:45:59.342"), "Stopped", "stopped by a signal", *RANK),
    [
        *("16:45:58.063", "16:45:59.342", "16:46:03.062"),
        *("16:46:03.466", "16:46:03.541", "16:46:05.420"),
    ],
    (137, 125, 5.671 / 13),
    832,
)


def shapes(lines: list[str]) -> list[str]:
    """Lines without their figures, which rounding may change, and without names of pods."""
    plain = (re.sub(r" \(train-lm-pods-\d last\)", "", line) for line in lines)
    return [re.sub(r"[-+]?\d+\.\d+", "N", line).rstrip() for line in plain]


def transcript(head: str) -> list[str]:
    """The incident in the README, from its first line to its outcome."""
    lines = [line.removeprefix("    ") for line in README.splitlines()]
    start = next(n for n, line in enumerate(lines) if line.startswith(head))
    end = next(n for n in range(start, len(lines)) if lines[n].startswith("  outcome"))
    return lines[start : end + 1]


@pytest.mark.parametrize("told", [KILLED, FROZEN], ids=["killed", "frozen"])
def test_an_incident_of_the_readme_is_shown_as_the_command_shows_it(told: Incident) -> None:
    shown = transcript(f"incident 1 (attempt 0): {told.culprit.fault}, 2026-")
    titles = ("differs", "others", "|")
    rest = [line for line in shown if not line.strip().startswith(titles)]
    rest = [line.replace(", certain", "") for line in rest]
    assert shapes(rest) == shapes(list(story(told)))


def test_the_ranks_of_a_hang_are_grouped_as_the_command_groups_them() -> None:
    shown = transcript("incident 1 (attempt 0): Stopped, 2026-")
    groups = (
        StackGroup("3", 1, "stopped by a signal", (), is_outlier=True),
        StackGroup("0-2", 3, "wait in the backward pass"),
    )
    told = Incident(1, 0, FROZEN.culprit, (FROZEN.culprit,), Remedy.PROCESS, "", 0.0, groups=groups)
    for line in story(told):
        if line.strip().startswith(("differs", "others")):
            assert line in shown


def test_the_line_of_the_run_is_as_the_command_writes_it() -> None:
    assert f"unbroken: incident 1: {incident_line(KILLED).removeprefix('incident 1: ')}\n" in README
