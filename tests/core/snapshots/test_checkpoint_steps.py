"""Checkpoint discovery of a node."""

from __future__ import annotations

from typing import Any

from unbroken.core.snapshots.checkpoint_steps import STEPS_MAX, CheckpointSteps


def chosen(step: int) -> dict[str, Any]:
    return {"model": {"progressData": f"/c/{step}", "progressCount": step}}


def begun(progress: dict[str, Any] | None = None, **expected: int | None) -> CheckpointSteps:
    steps = CheckpointSteps()
    steps.choose(progress or {})
    steps.begin("model", expected or {"model": 2})
    return steps


def tell(steps: CheckpointSteps, step: int, *local_ranks: int, kind: str = "model") -> None:
    for local_rank in local_ranks:
        steps.report("model", kind, step, f"/c/{step}", local_rank)


def test_a_step_is_complete_when_all_have_told_of_every_type() -> None:
    steps = begun(model=2, data=1)
    tell(steps, 10, 0, 1)
    assert (steps.progress(), steps.path("model")) == ({}, None)
    tell(steps, 10, 1, kind="data")
    assert (steps.progress(), steps.path("model")) == (chosen(10), "/c/10")


def test_what_nobody_will_tell_of_is_never_complete() -> None:
    steps = begun(model=1, data=None)
    tell(steps, 10, 0)
    tell(steps, 10, 0, kind="other")
    assert steps.progress() == {}


def test_the_newest_complete_step_stands_whatever_comes_late() -> None:
    steps = begun()
    tell(steps, 10, 0)
    tell(steps, 20, 0, 1)
    tell(steps, 10, 1)
    assert steps.progress() == chosen(20)


def test_the_operators_choice_wins_at_a_start_also_where_nobody_introduces_itself_anew() -> None:
    steps = begun()
    tell(steps, 10, 0, 1)
    tell(steps, 20, 0, 1)
    tell(steps, 30, 0)
    steps.choose(chosen(10))
    assert steps.progress() == chosen(10)
    tell(steps, 30, 1)
    assert steps.progress() == chosen(10), "rank 0's part is of an attempt that is over"
    tell(steps, 20, 0, 1)
    assert steps.progress() == chosen(20)


def test_without_a_choice_a_new_client_begins_with_none() -> None:
    steps = begun()
    tell(steps, 10, 0, 1)
    steps.choose({})
    assert steps.progress() == chosen(10), "nobody has asked yet"
    steps.begin("model", {"model": 2})
    assert steps.progress() == {}


def test_the_second_client_of_a_start_takes_nothing_back() -> None:
    steps = begun()
    tell(steps, 10, 0, 1)
    tell(steps, 20, 0)
    steps.begin("model", {"model": 2})
    tell(steps, 20, 1)
    assert steps.progress() == chosen(20)


def test_nonsense_is_no_choice_and_memory_is_bounded() -> None:
    steps = begun({"model": {"progressCount": "x"}}, model=2)
    for step in range(3 * STEPS_MAX):
        tell(steps, step, 0)
    tell(steps, 0, 1)
    assert steps.progress() == {}
    tell(steps, 3 * STEPS_MAX - 1, 1)
    assert steps.progress() == chosen(3 * STEPS_MAX - 1)
    for number in range(1000):
        steps.begin(f"p{number}", {"model": 1})
    steps.report("p999", "model", 1, "/c/1", 0)
    assert steps.path("p999") is None
