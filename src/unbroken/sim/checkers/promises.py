"""How soon a user is promised that a fault is noticed.

A promise is for a fault that comes alone, in a network that works. Other worlds only have to be
safe at each moment, and to come to their end once they are healed.
"""

from __future__ import annotations

from functools import partial

from unbroken.sim.actors.training import Training
from unbroken.sim.draw import FEW_LOST
from unbroken.sim.scenario import Scenario
from unbroken.sim.schedule import EPOCH, Schedule

from .checkers import Checkers
from .truth import Fault, Truth

NOTICED = {
    "agent_crash": 25.0,
    "agent_freeze": 25.0,
    "agent_unheard": 25.0,
    "doomed": 25.0,
    "early_exit": 150.0,
    "hang": 150.0,
    "link_cut": 25.0,
    "node_cut": 25.0,
    "node_pause": 25.0,
    "node_power": 25.0,
    "not_started": 25.0,
    "pod_fail": 25.0,
    "port_taken": 25.0,
    "stall": 110.0,
    "stop": 40.0,
    "worker_crash": 25.0,
}
"""Seconds after which the attempt that a fault has hurt is stopped."""
BY_PEERS = ("early_exit", "hang")
"""Faults that only the peers notice, perhaps by their watchdogs, whose time comes on top."""
BY_ALARM = ("stall", "stop")
"""Faults that agents report to each operator again, so that the loss of operators hides none."""
OPERATOR_SECONDS = 100.0
"""Seconds that the loss of operators may cost."""
LOSSY_TIMES = 3.0
"""Factor of the time in a network that loses a few messages."""
EVIDENT_SECONDS = 5.0
"""Seconds that a fault must last to be noticed, if it passes by itself or is healed."""


class Promises:
    """The promises to the user of one job."""

    def __init__(
        self,
        schedule: Schedule,
        truth: Truth,
        checkers: Checkers,
        training: Training,
        scenario: Scenario,
    ) -> None:
        self._schedule = schedule
        self._truth = truth
        self._checkers = checkers
        self._training = training
        self._scenario = scenario

    def expect(self, fault: Fault) -> None:
        """Demand that the attempt whose workers were hurt is stopped in time."""
        seconds = NOTICED.get(fault.kind)
        if seconds is None or not self._is_alone(fault):
            return
        if fault.kind in BY_PEERS:
            seconds += self._scenario.habits.watchdog_seconds * 1.1
        if self._scenario.quality.loss:
            seconds *= LOSSY_TIMES
        hurt = {w.attempt for w in self._training.live.values() if w.pod in fault.uids}
        for attempt in hurt - self._truth.ended.keys():
            if not self._training.is_work_done:
                self._schedule.after(seconds, self._judge, attempt, fault)

    def _judge(self, attempt: int, fault: Fault, *, is_late: bool = False) -> None:
        is_over = self._checkers.is_over or self._truth.is_deleted
        if is_over or attempt in self._truth.ended or not self._is_alone(fault):
            return
        if not (self._truth.is_undisturbed or is_late):
            judge = partial(self._judge, attempt, fault, is_late=True)
            self._schedule.after(OPERATOR_SECONDS, judge)
            return
        self._checkers.require(False, f"nobody noticed what hurt attempt {attempt}", fault)

    def _is_alone(self, fault: Fault) -> bool:
        """Return whether nothing else has happened, and the fault lasts."""
        quality, truth = self._scenario.quality, self._truth
        healed_at = EPOCH + self._scenario.heal_after
        lasts = min(fault.until or healed_at, healed_at) - fault.at
        losses = truth.strikes.count("operator_crash") if fault.kind in BY_ALARM else 0
        others = len(truth.strikes) - losses + any(one.kind == "doomed" for one in truth.faults)
        return (
            others <= 1
            and (truth.is_undisturbed or losses > 0)
            and lasts >= EVIDENT_SECONDS
            and quality.loss <= FEW_LOST
            and not quality.late
        )
