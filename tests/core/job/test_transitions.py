"""The table of a job's phases: complete, enforced, and the one that the docs show."""

from __future__ import annotations

from pathlib import Path

import pytest

from unbroken.core.job.state import JobState
from unbroken.core.job.transitions import TRANSITIONS, IllegalTransitionError, Phase, diagram
from unbroken.spec.job.types import JobStatus

PAGE = Path(__file__).parents[3] / "docs/design/training-jobs.md"


def test_a_job_cannot_leave_its_end() -> None:
    state = JobState("lm", JobStatus())
    state.enter(Phase.ENDED)
    with pytest.raises(IllegalTransitionError, match="from Ended to Training"):
        state.enter(Phase.TRAINING)
    assert state.phase is Phase.ENDED


def test_each_transition_is_there_once_and_each_phase_can_be_reached() -> None:
    changes = [(one.before, one.after) for one in TRANSITIONS]
    assert len(changes) == len(set(changes))
    assert {after for _, after in changes} | {Phase.UNKNOWN} == set(Phase)


def test_the_page_shows_the_table() -> None:
    assert f"```mermaid\n{diagram()}\n```" in PAGE.read_text(), (
        "docs/design/training-jobs.md: replace the diagram by "
        "unbroken.core.job.transitions.diagram()"
    )
