"""Decides what a fault costs the job: the budget, the lowest rung, and a node that it leaves.

Nothing is changed here; `recovery` carries the decision out.

The restart budget says how many restarts a job may have. A job that sets no limit ends after
`RESTARTS_WITHOUT_PROGRESS` restarts in a row without progress. Restarts with progress in between
never end it. `core.job.watch.progress` defines progress. Limits of a manifest are kept to the
letter, and progress does not change them. `jobMaxRetryCount` bounds all restarts of the job's life,
`restartPolicy` those of an evaluation period. Periods are counted from the job's start; each begins
with a full budget. A policy that sets one of its two limits, without `jobMaxRetryCount`, takes the
default of the other.

An error may have come before: at the same step, and on which nodes? An error that returns at the
same step on another node comes from the script, and no restart helps. An error that stays with one
node may come from the node. External errors, and errors that only name lost peers, prove neither.
Several ranks with the same error in one attempt are one occurrence.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from unbroken.core.job.state import JobState
from unbroken.core.job.watch.progress import FIRST_SECONDS, Before, made
from unbroken.core.wording import all_of
from unbroken.spec import keys
from unbroken.spec.job.incident import Incident, Remedy, Symptom
from unbroken.spec.job.types import RestartPolicy, RestartStatus, RunPolicy, SameError
from unbroken.spec.keys import ConditionType
from unbroken.wire.agent import FaultKind, Violation, rule_reason

from .incidents import RESTART_REQUESTED, UNCHARGED, culprit
from .symptoms import BAD_METRIC, LOSS_SPIKE

RESTARTS_WITHOUT_PROGRESS = 3
"""Restarts in a row without progress that a job without a limit may have."""
DEFAULT_PERIOD_SECONDS = 3600
DEFAULT_RESTARTS = 3
"""Default of `numRestartBeforeFullJobRestart` if only `maxFullJobRestarts` is set."""
DEFAULT_FULL_RESTARTS = 3
"""Default of `maxFullJobRestarts` if only `numRestartBeforeFullJobRestart` is set."""
MORE = "set jobMaxRetryCount or restartPolicy to allow more"


@dataclass(frozen=True, slots=True)
class RestartLimits:
    """The limits of one job's restarts; None: no limit."""

    period_seconds: int
    restarts: int | None
    """Restarts in a period before a full job restart."""
    full_restarts: int | None
    total: int | None
    without_progress: int | None = None
    """Restarts in a row without progress; set only if no other limit is."""


@dataclass(frozen=True, slots=True)
class Charge:
    """The cost of a restart: the budget's state after it, the lowest rung, and the reason for that
    rung."""

    status: RestartStatus
    remedy: Remedy
    reason: str


def restart_limits(policy: RunPolicy) -> RestartLimits:
    """Return the limits of a job, with defaults for those that are not set."""
    total = policy.job_max_retry_count
    of = policy.restart_policy or RestartPolicy(DEFAULT_PERIOD_SECONDS)
    restarts, full = of.num_restart_before_full_job_restart, of.max_full_job_restarts
    period = max(1, of.eval_period_seconds)
    if total is not None:
        return RestartLimits(period, restarts, full, total)
    if restarts is None and full is None:
        return RestartLimits(period, None, None, None, RESTARTS_WITHOUT_PROGRESS)
    restarts = DEFAULT_RESTARTS if restarts is None else restarts
    return RestartLimits(period, restarts, DEFAULT_FULL_RESTARTS if full is None else full, None)


def charge(
    limits: RestartLimits, status: RestartStatus, charged: int, age_seconds: float, progress: str
) -> Charge:
    """Charge one restart.

    `charged` restarts were charged over the job's life, which has lasted `age_seconds`. `progress`
    describes the job's progress since the last restart; empty: none.
    """
    if limits.without_progress is not None:
        return _charge_without_progress(limits.without_progress, status, progress)
    period = int(max(0.0, age_seconds) // limits.period_seconds)
    if status.current_eval_period != period:
        status = RestartStatus(period)
    used, full = status.restart_count, status.full_job_restart_count
    if limits.total is not None and charged >= limits.total:
        text = f"jobMaxRetryCount: {_used(limits.total)}"
        return Charge(status, Remedy.FAIL, text)
    if limits.restarts is None or used < limits.restarts:
        of = "" if limits.restarts is None else f" of {limits.restarts}"
        text = f"restart {used + 1}{of} in evaluation period {period}"
        return Charge(replace(status, restart_count=used + 1), Remedy.PROCESS, text)
    seconds = limits.period_seconds
    spent = f"restartPolicy: {_used(used)} in evaluation period {period} ({seconds} s)"
    if limits.full_restarts is None or full < limits.full_restarts:
        text = f"{spent}: full job restart {full + 1}"
        return Charge(RestartStatus(period, full + 1, 0), Remedy.JOB, text)
    text = f"{spent}, and {all_of(full, 'full job restart')}" if full else spent
    return Charge(status, Remedy.FAIL, f"{text}; {MORE}")


def waive(
    limits: RestartLimits, status: RestartStatus, progress: str, *, is_asked: bool
) -> RestartStatus:
    """Return the budget after a restart that is not charged.

    Two events reset the count of restarts without progress. A person who requests a restart
    (`is_asked`) may have changed something. Progress counts however the attempt ended.
    """
    is_fresh = limits.without_progress is not None and (is_asked or progress)
    return RestartStatus() if is_fresh else status


def _charge_without_progress(most: int, status: RestartStatus, progress: str) -> Charge:
    """Charge a restart of a job that sets no limit: only one without progress counts."""
    if progress:
        return Charge(RestartStatus(), Remedy.PROCESS, f"progress since the last start: {progress}")
    used = status.restart_count
    if used >= most:
        text = f"{all_of(most, 'restart')} without progress are used; {MORE}"
        return Charge(status, Remedy.FAIL, text)
    text = f"restart {used + 1} of {most} without progress"
    return Charge(RestartStatus(0, 0, used + 1), Remedy.PROCESS, text)


def _used(restarts: int) -> str:
    if not restarts:
        return "no restart is allowed"
    return f"{all_of(restarts, 'restart')} {'is' if restarts == 1 else 'are'} used"


SAME_ERROR = "SameErrorSameStep"
"""Reason of a job that failed because its error repeats at the same step."""
OCCURRENCES = 3
"""Occurrences that prove an error of the script even without another node or a step."""
NODES_NAMED = 4
_OWN = "the error comes from the script"
_RAISED = (
    FaultKind.EXCEPTION.value,
    FaultKind.CUDA_ERROR.value,
    FaultKind.DISK_FULL.value,
    FaultKind.OUT_OF_MEMORY.value,
)
_BAD_VALUE = (BAD_METRIC, LOSS_SPIKE)
# Faults of storage, name service and network appear everywhere at once, and pass.
_PASSING = re.compile(
    r"(?i)time(?:d )?out|connection|temporar|unavailable|too many requests|throttl|name or service"
    r"|network|unreachable|\b50[0234]\b|input/output error|stale file handle|no space left"
)


@dataclass(frozen=True, slots=True)
class RepeatedError:
    """An error that has come before."""

    text: str
    """The reason of a remedy, in words."""
    is_users: bool = False
    """True if the error is the user's: no restart would help."""
    suspect: str = ""
    """The only node on which the error was seen, if another one can be tried; empty: none."""


def find_repeat(
    found: Sequence[Symptom],
    step: int | None,
    before: Iterable[Incident],
    now: float,
    elsewhere: Iterable[str] = (),
) -> RepeatedError | None:
    """Search earlier incidents for the first cause of these signs, at the job's `step`.

    `elsewhere`: nodes that could be used instead.
    """
    first = culprit(found)
    key = _key(first)
    if not key:
        return None
    step = first.step if first.step is not None else step
    if step is None and first.fault not in _RAISED:
        return None
    times, nodes = 1, _nodes(found, key)
    for incident in _matching(key, step, before, now):
        times += 1
        nodes |= _nodes((incident.culprit, *incident.signals), key)
    at = "soon after the start" if step is None else f"at step {step}"
    if times < 2:
        return None
    if not _is_proof(first):
        return RepeatedError(f"{first.fault} {at} for the {_ordinal(times)} time")
    places = ", ".join(sorted(nodes)[:NODES_NAMED]) or "an unknown node"
    said = f"the same error {at} for the {_ordinal(times)} time"
    # Without a step, similar errors may come from two ranks that each missed a different peer.
    is_proven = step is not None and len(nodes) > 1
    if is_proven or times >= OCCURRENCES or _is_value(first):
        where = f"on nodes {places}" if len(nodes) > 1 else f"on {places}"
        hint = f"to restart anyway, set the annotation {keys.SAME_ERROR}: restart"
        return RepeatedError(f"{said}, {where}: {_OWN} ({hint})", is_users=True)
    suspect = next(iter(nodes)) if len(nodes) == 1 else ""
    if suspect and set(elsewhere) - nodes:
        return RepeatedError(f"{said}, only on {suspect}: another node is tried", suspect=suspect)
    return RepeatedError(f"{said}, on {places}")


def is_users(reason: str) -> bool:
    """True if a remedy has this reason because no restart would help."""
    return _OWN in reason


def _matching(
    key: str, step: int | None, before: Iterable[Incident], now: float
) -> Iterable[Incident]:
    """Return incidents of the same error, the newest first, back to the last progress."""
    later = now
    for incident in sorted(before, key=lambda one: -one.number):
        first = incident.culprit
        if first.fault in UNCHARGED:
            return  # somebody has asked for a restart, and may have changed something
        own = first.step if first.step is not None else incident.step
        if step is None and later - (incident.started_at or incident.detected_at) > FIRST_SECONDS:
            return
        if _key(first) == key and own == step:
            yield incident
        elif step is not None and max(own or 0, incident.step or 0) > step:
            return
        later = incident.detected_at


def _key(symptom: Symptom) -> str:
    """Return a key that is equal for equal errors; empty: the error cannot be identified."""
    if symptom.fault in _RAISED and symptom.fingerprint:
        return symptom.fingerprint
    if symptom.fault in (FaultKind.OUT_OF_MEMORY.value, *_BAD_VALUE):
        return symptom.fault
    if symptom.violation == Violation.FAULT.value:
        return rule_reason(symptom.violation, symptom.rule)
    return ""


def _is_value(symptom: Symptom) -> bool:
    """True if the error concerns a value that all ranks share, so that it says nothing about the
    node."""
    return symptom.fault in (*_BAD_VALUE, FaultKind.LOG_RULE.value)


def _is_proof(symptom: Symptom) -> bool:
    if symptom.fault == FaultKind.OUT_OF_MEMORY.value and not symptom.fingerprint:
        return False
    return _is_value(symptom) or not _PASSING.search(symptom.text)


def _nodes(found: Iterable[Symptom], key: str) -> set[str]:
    return {symptom.node for symptom in found if symptom.node and _key(symptom) == key}


def _ordinal(times: int) -> str:
    return {2: "second", 3: "third"}.get(times, f"{times}th")


@dataclass(frozen=True, slots=True)
class Decision:
    """The cost of one fault."""

    charge: Charge
    suspect: str = ""
    """Node that the job leaves, because the same error came only there; empty: none."""
    suspicion: str = ""
    """Why it leaves that node."""


def decide(state: JobState, found: Sequence[Symptom], was: Before, now: float) -> Decision:
    """Decide about a fault with these signs; `was` is the job's progress before it."""
    charge, again = _charge(state, found, was, now), repeated_error(state, found, was["step"], now)
    if again is None or charge.remedy is Remedy.FAIL:
        return Decision(charge)
    if again.is_users and state.options.same_error is SameError.STOP:
        budget = state.status.restart_status or RestartStatus()
        return Decision(Charge(budget, Remedy.FAIL, again.text))
    suspect = again.suspect if charge.remedy is Remedy.PROCESS else ""
    return Decision(replace(charge, reason=f"{again.text}; {charge.reason}"), suspect, again.text)


def repeated_error(
    state: JobState, found: Sequence[Symptom], step: int | None, now: float
) -> RepeatedError | None:
    """Return the repetition of the error in this life of the job; None: it has not come before."""
    plan = state.plan
    unusable = {*state.roster.unusable_nodes(), *plan.avoid, *plan.given_up}
    usable = state.roster.nodes.keys() - unusable
    return find_repeat(found, step, state.closed_incidents(), now, usable)


def _charge(state: JobState, found: Sequence[Symptom], was: Before, now: float) -> Charge:
    assert state.spec is not None
    limits = restart_limits(state.spec.run_policy)
    budget = state.status.restart_status or RestartStatus()
    progress = _progress(state, found, was, now)
    if all(symptom.fault in UNCHARGED for symptom in found):
        is_asked = any(symptom.fault == RESTART_REQUESTED for symptom in found)
        left = waive(limits, budget, progress, is_asked=is_asked)
        return Charge(left, Remedy.PROCESS, "not charged to the budget")
    start = now if state.status.start_time is None else state.status.start_time
    charged = state.attempt - state.incidents.uncharged - state.ledger.uncharged
    return charge(limits, budget, charged, now - start, progress)


def _progress(state: JobState, found: Sequence[Symptom], was: Before, now: float) -> str:
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
