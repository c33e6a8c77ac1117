"""The transcripts of the README and of the guide are what the commands print today."""

from __future__ import annotations

import re
from datetime import datetime
from pathlib import Path

import pytest

from unbroken.cli.job.story import story
from unbroken.core.job.recovery import decision
from unbroken.core.job.recovery.words import incident_line
from unbroken.spec.job.incident import Incident, Remedy, StackGroup, Symptom
from unbroken.spec.job.types import RestartStatus, RunPolicy

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
GUIDE = (ROOT / "docs/guide/incidents.md").read_text()


def at(time: str) -> float:
    """Seconds since the epoch of a local time."""
    return datetime.fromisoformat(time).timestamp()


def why(step: int) -> str:
    """The reason of the first restart of a job that sets no limit."""
    limits, progress = decision.restart_limits(RunPolicy()), f"step {step}"
    charge = decision.charge(limits, RestartStatus(), 0, 60.0, progress)
    return f"all pods are healthy; {charge.reason}"


def incident(
    culprit: Symptom, day: str, times: list[str], steps: tuple[int, int, float], samples: int
) -> Incident:
    """Before, detected, examined, stopped, started and first step of an incident."""
    before, detected, examined, stopped, started, progress = (
        at(f"{day} {one}") if one else None for one in times
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


KILLED = incident(
    Symptom(
        *(at("2026-11-24 03:00:43.237"), "Signal", "killed by SIGKILL"),
        *("train-pods-1", "node-1", 3),
    ),
    "2026-11-24",
    ["03:00:43.117", "03:00:43.237", "", "03:00:43.363", "03:00:43.387", "03:00:44.323"],
    (164, 150, 1.694 / 15),
    960,
)
FROZEN = incident(
    Symptom(
        *(at("2026-11-22 16:45:59.342"), "Stopped", "stopped by a signal"),
        *("train-lm-pods-1", "node-1", 3),
    ),
    "2026-11-22",
    [
        *("16:45:58.063", "16:45:59.342", "16:46:03.062"),
        *("16:46:03.466", "16:46:03.541", "16:46:05.420"),
    ],
    (137, 125, 5.671 / 13),
    832,
)


def shapes(lines: list[str]) -> list[str]:
    """Lines without their figures, which rounding may change, and without names of pods."""
    plain = (re.sub(r" \(train(-lm)?-pods-\d last\)", "", line) for line in lines)
    return [re.sub(r"[-+]?\d+\.\d+", "N", line).rstrip() for line in plain]


def transcript(page: str, head: str) -> list[str]:
    """The incident in a page, from its first line to its outcome."""
    lines = [line.removeprefix("    ") for line in page.splitlines()]
    start = next(n for n, line in enumerate(lines) if line.startswith(head))
    end = next(n for n in range(start, len(lines)) if lines[n].startswith("  outcome"))
    return lines[start : end + 1]


@pytest.mark.parametrize(
    ("page", "told"), [(README, KILLED), (GUIDE, FROZEN)], ids=["killed", "frozen"]
)
def test_an_incident_of_the_pages_is_shown_as_the_command_shows_it(
    page: str, told: Incident
) -> None:
    shown = transcript(page, f"incident 1 (attempt 0): {told.culprit.fault}, 2026-")
    titles = ("differs", "others", "|")
    rest = [line for line in shown if not line.strip().startswith(titles)]
    rest = [line.replace(", certain", "") for line in rest]
    assert shapes(rest) == shapes(list(story(told)))


def test_the_ranks_of_a_hang_are_grouped_as_the_command_groups_them() -> None:
    shown = transcript(GUIDE, "incident 1 (attempt 0): Stopped, 2026-")
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
