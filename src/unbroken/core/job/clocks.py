"""Clocks of agents that are wrong: their times are translated to the operator's clock.

An agent's clock is set when its process starts, and does not follow later corrections of its node's
clock. Were its times taken as they are, a node that is 3 minutes behind would seem to be silent for
3 minutes, and the first of two errors on different nodes could not be told.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from unbroken.wire.agent import AgentReport, WorkerReport
from unbroken.wire.observation import RankWatch

SKEW_SECONDS = 10.0
"""Difference from which on a clock counts as wrong. Reports tell of a step up to two seconds after
it, and a busy operator takes them later."""
GAP_SECONDS = 5.0
"""Seconds between two reports, at most, for the second to show the time of a step."""


@dataclass(slots=True)
class AgentClock:
    """The clock of one agent process, as its reports of new steps show it."""

    agent_id: str = ""
    _ahead: float = math.inf
    """Least time from a step, by the agent's clock, to its report, by the operator's."""
    _step_at: float | None = None
    _heard_at: float = -math.inf

    @property
    def correction(self) -> float:
        """Whole seconds to add to the agent's times; 0: its clock is right, or nothing is known."""
        is_wrong = math.isfinite(self._ahead) and abs(self._ahead) > SKEW_SECONDS
        return round(self._ahead) if is_wrong else 0.0

    def hear(self, report: AgentReport, now: float) -> None:
        """Compare the clocks by a step that was made since the report before."""
        if report.agent_id != self.agent_id:
            self.agent_id, self._ahead, self._step_at = report.agent_id, math.inf, None
        times = [one.step_at for one in report.watch if one.step_at is not None]
        newest = max(times, default=None)
        if newest is not None and newest != self._step_at:
            if self._step_at is not None and now <= self._heard_at + GAP_SECONDS:
                self._ahead = min(self._ahead, now - newest)
            self._step_at = newest
        self._heard_at = now


def translated(report: AgentReport, correction: float) -> AgentReport:
    """Return the report with its times by the operator's clock."""
    if not correction:
        return report
    return replace(
        report,
        workers=tuple(_worker(one, correction) for one in report.workers),
        faults=tuple(replace(one, at=one.at + correction) for one in report.faults),
        watch=tuple(_watch(one, correction) for one in report.watch),
        log_rules=tuple(
            replace(one, last_match_at=_moved(one.last_match_at, correction))
            for one in report.log_rules
        ),
    )


def _worker(worker: WorkerReport, correction: float) -> WorkerReport:
    return replace(
        worker,
        started_at=worker.started_at + correction,
        ended_at=_moved(worker.ended_at, correction),
        first_output_at=_moved(worker.first_output_at, correction),
        recurring_line_at=_moved(worker.recurring_line_at, correction),
    )


def _watch(watch: RankWatch, correction: float) -> RankWatch:
    return replace(
        watch,
        first_step_at=_moved(watch.first_step_at, correction),
        step_at=_moved(watch.step_at, correction),
        sign_at=_moved(watch.sign_at, correction),
        late_since=_moved(watch.late_since, correction),
        alarms=tuple(
            replace(one, since=one.since + correction, at=one.at + correction)
            for one in watch.alarms
        ),
    )


def _moved(at: float | None, correction: float) -> float | None:
    return None if at is None else at + correction
