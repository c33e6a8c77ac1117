"""The restart budget of a job: how many restarts it may have, and the cost of the next one.

A job that sets no limit ends after `RESTARTS_WITHOUT_PROGRESS` restarts in a row without progress.
Restarts with progress in between never end it. `core.job.watch.progress` defines progress.

Limits of a manifest are kept to the letter, and progress does not change them. `jobMaxRetryCount`
bounds all restarts of the job's life, `restartPolicy` those of an evaluation period. Periods are
counted from the job's start; each begins with a full budget. A policy that sets one of its two
limits, without `jobMaxRetryCount`, takes the default of the other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from unbroken.core.wording import all_of
from unbroken.spec.job.incident import Remedy
from unbroken.spec.job.types import RestartPolicy, RestartStatus, RunPolicy

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


def limits(policy: RunPolicy) -> RestartLimits:
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
