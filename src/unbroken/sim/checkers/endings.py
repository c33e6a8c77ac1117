"""Checks of a job that has ended, once all is quiet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from unbroken.core.job.recovery.decision import restart_limits
from unbroken.core.job.recovery.incidents import OPERATOR_RESTARTED
from unbroken.spec.job.incident import Incident, Remedy
from unbroken.spec.job.types import Condition, JobSpec, JobStatus, RestartStatus
from unbroken.wire.agent import FaultKind

from .checkers import TERMINAL, Checkers, condition
from .truth import USER_RESTART, Truth

INCIDENTS_KEPT = 50
"""Incidents of a job that are kept."""
OWN = ("doomed", "worker_crash")
"""Faults of the script, or that look so."""


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of one job."""

    checkers: Checkers
    truth: Truth
    spec: JobSpec
    status: JobStatus
    reached: Mapping[int, int]
    """Steps that were made by the end of each attempt."""

    def judge(self, kept: Iterable[Incident]) -> str:
        """Check the records of the job; return the name of its end."""
        require, status = self.checkers.require, self.status
        ends = [c for c in status.conditions if c.type in TERMINAL and c.status == "True"]
        require(len(ends) == 1, "a job ends in one way", status)
        require(not condition(status, "Running"), "an ended job runs", status)
        require(status.completion_time is not None, "an ended job has a time of its end", status)
        newest, count = self.checkers.newest, status.restart_count
        is_failed = ends[0].type == "Failed"
        never_started = is_failed and count > newest
        is_unknown = self.truth.is_stock and not self.truth.is_undisturbed
        is_unknown = is_unknown or (is_failed and self.checkers.is_unknown(count + 1))
        counted = count == max(newest, 0) or never_started or is_unknown
        require(counted, "restartCount is not the newest attempt", status, newest)
        if is_failed:
            require(self._may_fail(ends[0]), "Failed is not true", status)
        incidents = list(kept)
        self._judge_budget(is_failed, incidents)
        self._judge_incidents(incidents)
        return ends[0].type

    def _may_fail(self, end: Condition) -> bool:
        """Return whether the truth confirms the reason."""
        policy, status = self.spec.run_policy, self.status
        lasted = (status.completion_time or 0.0) - (status.start_time or 0.0)
        match end.reason:
            case "SameErrorSameStep":
                is_told = self.truth.is_clear
                return sum(not is_told or f.kind in OWN for f in self.truth.faults) >= 2
            case "PodRefused":
                return self.truth.is_forbidden
            case "DeadlineExceeded":
                return lasted >= (policy.active_deadline_seconds or 1e9)
            case "StartupDeadlineExceeded":
                return lasted >= (policy.startup_deadline_seconds or 1e9)
            case "FaultDeadlineExceeded":
                return lasted >= (policy.fault_deadline_seconds or 1e9)
            case _:
                return self._is_budget_used()

    def _is_budget_used(self) -> bool:
        """Return whether no restart is left, and there was one fault more."""
        used, status = restart_limits(self.spec.run_policy), self.status
        is_begun = status.restart_count <= self.checkers.newest
        if not self.truth.end(status.restart_count, is_begun=is_begun):
            return False
        if used.total is not None and status.restart_count >= used.total:
            return True
        period = status.restart_status or RestartStatus()
        if used.without_progress is not None:
            return period.restart_count >= used.without_progress and not self._has_progressed(
                used.without_progress + 1
            )
        return (
            used.restarts is not None
            and used.full_restarts is not None
            and period.restart_count >= used.restarts
            and period.full_job_restart_count >= used.full_restarts
        )

    def _has_progressed(self, attempts: int) -> bool:
        """Return whether one of the newest attempts made new steps that the operator knew of.

        Watchdogs report steps when they have learned a rhythm or see an alarm, and not before.
        """
        return any(new > 0 for new in self._new_steps(self.checkers.hearing.steps)[-attempts:])

    def _new_steps(self, told: Mapping[int, int]) -> list[int]:
        """Return the reported steps of each attempt beyond all that were made before it."""
        result, most = [], 0
        for attempt in range(self.status.restart_count + 1):
            result.append(max(told.get(attempt, 0) - most, 0))
            most = max(self.reached.get(attempt, 0), most)
        return result

    def _judge_budget(self, is_failed: bool, incidents: Iterable[Incident]) -> None:
        """No restart beyond the limits; an operator that was killed may have forgotten some."""
        if not self.truth.is_undisturbed:
            return
        used, charged = restart_limits(self.spec.run_policy), self.truth.charged() - is_failed
        if used.without_progress is not None and not any(
            fault.kind == USER_RESTART for fault in self.truth.faults
        ):
            row = self._restarts_without_progress(incidents)
            # The state that an attempt restored shows the progress of the one before.
            self.checkers.require(row <= used.without_progress + 2, "too many restarts", row)
        if used.total is not None:
            self.checkers.require(charged <= used.total, "too many restarts", charged, used)
        is_one_period = used.period_seconds >= 3600
        if is_one_period and used.restarts is not None and used.full_restarts is not None:
            most = used.restarts * (used.full_restarts + 1) + used.full_restarts
            self.checkers.require(charged <= most, "too many restarts", charged, used)

    def _restarts_without_progress(self, incidents: Iterable[Incident]) -> int:
        """Return the longest row of attempts without new steps and without news of steps.

        The last report of an attempt may be lost. Then a later report shows what that attempt made,
        or what a rank restored of it.
        """
        told, newest_told, marks = dict(self.checkers.hearing.steps), -1, ""
        for incident in incidents:
            restored = [one.step for one in incident.restored]
            after = incident.attempt + 1
            told[after] = max([told.get(after, -1), *restored])
        for attempt, new in enumerate(self._new_steps(self.reached)):
            is_news = told.get(attempt, -1) > newest_told
            newest_told = max(newest_told, told.get(attempt, -1))
            marks += "x" if new or is_news else "."
        return max(map(len, marks.split("x")))

    def _judge_incidents(self, incidents: list[Incident]) -> None:
        require = self.checkers.require
        for incident in incidents:
            require(incident.ended_at is not None, "an incident stays open", incident)
            require(bool(incident.outcome), "an incident has no outcome", incident)
            require(self._is_culprit_real(incident), "the culprit did nothing", incident)
        if self.truth.is_undisturbed:
            numbers = sorted(incident.number for incident in incidents)
            # If there are too many, the ledger contains the oldest.
            retired = max(numbers, default=0) - len(numbers)
            is_whole = not retired or len(numbers) == INCIDENTS_KEPT
            require(is_whole and retired >= 0, "a number is missing", numbers)
            restarts = [i for i in incidents if i.remedy is not Remedy.FAIL]
            is_told = len(restarts) + retired == self.status.restart_count
            require(is_told, "every restart has one incident", *restarts)

    def _is_culprit_real(self, incident: Incident) -> bool:
        """Return whether something was done to the culprit; late messages may point at its
        peers."""
        culprit, truth = incident.culprit, self.truth
        if culprit.fault == OPERATOR_RESTARTED:
            return not truth.is_undisturbed
        is_told_late = incident.remedy is Remedy.JOB and culprit.fault == FaultKind.PEER_LOST.value
        happened = [fault for fault in truth.faults if fault.at <= incident.detected_at + 60.0]
        # A pod that is released with all others is no longer asked for its fault.
        if is_told_late or not truth.is_clear or any(fault.is_anyones for fault in happened):
            return bool(happened) or not truth.is_undisturbed
        return any(
            culprit.pod in fault.pods or (fault.node is not None and culprit.node == fault.node)
            for fault in happened
        )
