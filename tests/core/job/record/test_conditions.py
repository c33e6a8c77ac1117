"""The conditions of a job's status."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from unbroken.core.job.record.conditions import MESSAGE_CHARACTERS, advance, current_condition
from unbroken.spec.job.types import Condition
from unbroken.spec.keys import ConditionType

FIRST = advance((), ConditionType.CREATED, "Created", "m", 1)


def shown(conditions: tuple[Condition, ...]) -> list[str]:
    """Types, a false one in brackets."""
    return [c.type if c.status == "True" else f"({c.type})" for c in conditions]


def test_each_supersedes_the_one_before_but_created_stays() -> None:
    conditions = advance(FIRST, ConditionType.RUNNING, "r", "m", 2)
    conditions = advance(conditions, ConditionType.FAULTED, "r", "m", 3)
    assert shown(conditions) == ["Created", "(Running)", "Faulted"]
    conditions = advance(conditions, ConditionType.RUNNING, "r", "m", 4)
    assert shown(conditions) == ["Created", "(Faulted)", "Running"]
    assert [c.last_transition_time for c in conditions] == [1, 4, 4]


def test_time_is_that_of_the_transition_not_of_the_message() -> None:
    conditions = advance(FIRST, ConditionType.FAULTED, "a", "one", 2)
    conditions = advance(conditions, ConditionType.FAULTED, "b", "two", 3)
    assert (conditions[-1].reason, conditions[-1].last_transition_time) == ("b", 2)


def test_resumed_job_is_created_again_with_its_first_age() -> None:
    conditions = advance(FIRST, ConditionType.SUSPENDED, "s", "m", 5)
    conditions = advance(conditions, ConditionType.CREATED, "Created", "resumed", 6)
    assert shown(conditions) == ["(Suspended)", "Created"]
    assert (conditions[-1].message, conditions[-1].last_transition_time) == ("resumed", 1)
    conditions = advance(conditions, ConditionType.PODS_RUNNING, "r", "m", 7)
    assert shown(conditions) == ["(Suspended)", "Created", "PodsRunning"]


def test_standing_is_the_last_true_one_that_is_known() -> None:
    assert current_condition(()) is None
    others = (Condition("Created", "True"), Condition("Running", "False"), Condition("X", "True"))
    assert current_condition(others) is ConditionType.CREATED


def test_long_message_is_cut() -> None:
    assert (
        len(advance((), ConditionType.FAILED, "r", "x" * 99999, 1)[0].message) == MESSAGE_CHARACTERS
    )


@given(st.lists(st.sampled_from(ConditionType), min_size=1, max_size=12))
def test_what_was_entered_last_is_the_standing(path: list[ConditionType]) -> None:
    conditions = FIRST
    for at, to in enumerate(path):
        conditions = advance(conditions, to, "r", "m", at)
        # This is what `kubectl get` and HyperPod's client print.
        assert (conditions[-1].type, conditions[-1].status) == (to.value, "True")
        assert current_condition(conditions) is to
        (created,) = (c for c in conditions if c.type == "Created")
        assert (created.status, created.last_transition_time) == ("True", 1)
        true = {c.type for c in conditions if c.status == "True"}
        assert true == {"Created", to.value}
    assert len({c.type for c in conditions}) == len(conditions)
