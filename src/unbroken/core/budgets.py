"""How many restarts a job may have, and what the next one is.

`jobMaxRetryCount` bounds all restarts of the job's life, `restartPolicy` those of an evaluation
period; periods are counted from the job's start and a new one begins with a full budget.  Where
`jobMaxRetryCount` is not set, limits of the policy that are not set take defaults: a script that
fails at once must not be started for ever, a job that lost four nodes in a month must not end.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from unbroken.spec.incident import Remedy
from unbroken.spec.job import RestartPolicy, RestartStatus, RunPolicy

from .wording import all_of

DEFAULT_PERIOD_SECONDS = 3600
DEFAULT_RESTARTS = 3
DEFAULT_FULL_RESTARTS = 3
"""Where `numRestartBeforeFullJobRestart` is set and `maxFullJobRestarts` is not."""
MORE = "set jobMaxRetryCount or restartPolicy to allow more"


@dataclass(frozen=True, slots=True)
class Limits:
    """None: no limit."""

    period_seconds: int
    restarts: int | None
    """Restarts in a period before a full job restart."""
    full_restarts: int | None
    total: int | None


@dataclass(frozen=True, slots=True)
class Charge:
    """What a restart costs: the budget's state after it, the least rung, and why that rung."""

    status: RestartStatus
    remedy: Remedy
    reason: str


def limits(policy: RunPolicy) -> Limits:
    """The limits of a job, with the defaults of those that are not set."""
    total = policy.job_max_retry_count
    of = policy.restart_policy or RestartPolicy(DEFAULT_PERIOD_SECONDS)
    restarts, full = of.num_restart_before_full_job_restart, of.max_full_job_restarts
    if total is None:
        if full is None:
            full = 0 if restarts is None else DEFAULT_FULL_RESTARTS
        if restarts is None:
            restarts = DEFAULT_RESTARTS
    return Limits(max(1, of.eval_period_seconds), restarts, full, total)


def charge(limits: Limits, status: RestartStatus, charged: int, age_seconds: float) -> Charge:
    """Charge one restart; `charged` were charged over the job's life, which has lasted so long."""
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


def _used(restarts: int) -> str:
    if not restarts:
        return "no restart is allowed"
    return f"{all_of(restarts, 'restart')} {'is' if restarts == 1 else 'are'} used"
