"""The status conditions, as a function of the job's state.

The last condition is true, and its type is the job's state. `kubectl get` prints the type of the
last condition whatever its status; HyperPod's client prints the last one that is true.

Created stays true, because that client takes the job's age from it; a resumed job has it last
again. Of the other conditions at most one is true.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from unbroken.spec.job.types import Condition
from unbroken.spec.keys import ConditionType

MESSAGE_CHARACTERS = 4000
"""Most characters of a condition's message; the API refuses more than 32768."""


ENDS = (ConditionType.COMPLETED, ConditionType.FAILED)


def current_condition(conditions: Sequence[Condition]) -> ConditionType | None:
    """Return the job's state by its conditions; None: it has none yet."""
    known = {value.value for value in ConditionType}
    true = [c for c in conditions if c.status == "True" and c.type in known]
    return ConditionType(true[-1].type) if true else None


def with_ready_count(
    conditions: Sequence[Condition], ready: int, wanted: int
) -> tuple[Condition, ...]:
    """Return the conditions with the number of ready pods in PodsRunning, where kubectl's table
    shows it."""
    text = f"{ready}/{wanted}"
    return tuple(
        replace(one, message=text) if one.type == ConditionType.PODS_RUNNING.value else one
        for one in conditions
    )


def advance(
    conditions: Sequence[Condition], to: ConditionType, reason: str, message: str, now: float
) -> tuple[Condition, ...]:
    """Return the conditions of a job whose state is now `to`."""
    message = message[:MESSAGE_CHARACTERS]
    previous = next((c for c in conditions if c.type == to.value), None)
    kept = []
    for old in conditions:
        if old.type == to.value:
            continue
        if old.type != ConditionType.CREATED.value and old.status == "True":
            kept.append(replace(old, status="False", last_transition_time=now))
        else:
            kept.append(old)
    since = now
    if previous is not None and previous.status == "True":
        since = previous.last_transition_time
    return (*kept, Condition(to.value, "True", reason, message, since))
