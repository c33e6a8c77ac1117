"""Decides what a fault costs the job: the budget, the lowest rung, and a node that it leaves.

Nothing is changed here; `recovery` carries the decision out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from unbroken.core.job.state import JobState
from unbroken.core.job.watch.progress import Before, made
from unbroken.spec.job.incident import Remedy, Signal
from unbroken.spec.job.types import RestartStatus, SameError
from unbroken.spec.keys import ConditionType

from . import budgets, repeats
from .incidents import RESTART_REQUESTED, UNCHARGED


@dataclass(frozen=True, slots=True)
class Decision:
    """The cost of one fault."""

    charge: budgets.Charge
    suspect: str = ""
    """Node that the job leaves, because the same error came only there; empty: none."""
    suspicion: str = ""
    """Why it leaves that node."""


def decide(state: JobState, found: Sequence[Signal], was: Before, now: float) -> Decision:
    """Decide about a fault with these signs; `was` is the job's progress before it."""
    charge, again = _charge(state, found, was, now), repeated_error(state, found, was["step"], now)
    if again is None or charge.remedy is Remedy.FAIL:
        return Decision(charge)
    if again.is_users and state.options.same_error is SameError.STOP:
        budget = state.status.restart_status or RestartStatus()
        return Decision(budgets.Charge(budget, Remedy.FAIL, again.text))
    suspect = again.suspect if charge.remedy is Remedy.PROCESS else ""
    return Decision(replace(charge, reason=f"{again.text}; {charge.reason}"), suspect, again.text)


def repeated_error(
    state: JobState, found: Sequence[Signal], step: int | None, now: float
) -> repeats.RepeatedError | None:
    """Return the repetition of the error in this life of the job; None: it has not come before."""
    plan = state.plan
    unusable = {*state.roster.unusable_nodes(), *plan.avoid, *plan.given_up}
    usable = state.roster.nodes.keys() - unusable
    return repeats.find_repeat(found, step, state.closed_incidents(), now, usable)


def _charge(state: JobState, found: Sequence[Signal], was: Before, now: float) -> budgets.Charge:
    assert state.spec is not None
    limits = budgets.limits(state.spec.run_policy)
    budget = state.status.restart_status or RestartStatus()
    progress = _progress(state, found, was, now)
    if all(signal.fault in UNCHARGED for signal in found):
        is_asked = any(signal.fault == RESTART_REQUESTED for signal in found)
        left = budgets.waive(limits, budget, progress, is_asked=is_asked)
        return budgets.Charge(left, Remedy.PROCESS, "not charged to the budget")
    start = now if state.status.start_time is None else state.status.start_time
    charged = state.attempt - state.incidents.uncharged - state.ledger.uncharged
    return budgets.charge(limits, budget, charged, now - start, progress)


def _progress(state: JobState, found: Sequence[Signal], was: Before, now: float) -> str:
    """Return a description of the broken attempt's progress; empty: none.

    Steps from before a requested restart do not count: the script may be a different one.
    """
    earlier = state.closed_incidents()
    asked = [n for n, one in enumerate(earlier) if one.culprit.fault == RESTART_REQUESTED]
    running = (c for c in state.status.conditions if c.type == ConditionType.RUNNING.value)
    since = next((c.last_transition_time for c in running if c.status == "True"), now)
    # The start-up is no progress, if it is known when training began or resumed.
    began = earlier[-1].progress_at if earlier else state.ledger.progress_at
    # A hang shows no sign of life, and is no progress however long it takes.
    ran = (was["progress_before"] or now) - max(since, began or since)
    return made(was["step"], found, earlier[asked[-1] + 1 if asked else 0 :], ran)
