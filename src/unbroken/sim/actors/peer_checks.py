"""The checks by an agent of whether its parent can be connected to (`unbroken.agent.peers`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unbroken.sim.schedule import Schedule

if TYPE_CHECKING:
    from .agents import Agent

CHECK_SECONDS, DOUBT_SECONDS = 2.0, 1.0
"""Seconds between two checks; the second value after a failed one."""


class PeerCheck:
    """The checks of one agent in one attempt."""

    def __init__(self, schedule: Schedule, agent: Agent, parent: str) -> None:
        self._schedule = schedule
        self._agent = agent
        self._parent = parent
        self._failed = 0
        self._schedule.probes["peers_checked"] += 1
        self.unreached = ""
        """The parent's address, after two connections to it in a row have failed."""

    def run(self) -> None:
        """Check now, and again for as long as the attempt lasts."""
        agent = self._agent
        if agent.check is not self or not agent.is_alive:
            return
        if not agent.is_frozen:
            self._failed = 0 if agent.reaches(self._parent) else self._failed + 1
            away = self._parent if self._failed > 1 else ""
            if away != self.unreached:
                self.unreached = away
                agent.publish()
        self._schedule.after(DOUBT_SECONDS if self._failed else CHECK_SECONDS, self.run)
