"""Imports of agents' templates: learned from their workers, or from other agents.

Answers are late, fail, or come from a process that has gone; templates die. Rule: an agent that
starts no workers warm is never ordered to import.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Protocol

from unbroken.sim.schedule import Schedule
from unbroken.wire.agent import AgentReport, AgentState, WarmCommand


class Learner(Protocol):
    """An agent."""

    id: str
    is_alive: bool

    def report(self) -> AgentReport:
        """Return the agent's state."""

    def publish(self) -> None:
        """Send the report over all links."""


class Imports:
    """All of one world."""

    def __init__(
        self, schedule: Schedule, seed: int, reachable: Callable[[], Mapping[str, Learner]]
    ) -> None:
        """`reachable`: agents by `host:port`."""
        self._schedule = schedule
        self._random = random.Random(f"imports of {seed}")
        self._reachable = reachable
        self._known: dict[str, int] = {}
        """Modules, by agent."""

    def report(self, agent_id: str, report: AgentReport) -> AgentReport:
        """With how many modules it has imported."""
        return replace(report, imports=self._known.get(agent_id, 0))

    def trained(self, agents: Iterable[Learner]) -> None:
        """Their workers have begun: they learn what these import."""
        for agent in agents:
            count = self._random.randint(5, 7)
            self._schedule.after(self._random.uniform(0.5, 8.0), self._learn, agent, count)

    def tell(self, agent: Learner, command: WarmCommand) -> None:
        """Have it ask the other agents; the answers and their times are random."""
        assert agent.report().imports is not None, "told that starts no workers warm"
        self._schedule.probes["spare_is_told"] += 1
        self._schedule.after(self._random.uniform(0.1, 5.0), self._ask, agent, command)

    def _ask(self, agent: Learner, command: WarmCommand) -> None:
        peers = self._reachable()
        counts = [self._known.get(peers[peer].id, 0) for peer in command.peers if peer in peers]
        if counts and agent.report().state is AgentState.READY and self._random.random() < 0.8:
            self._learn(agent, max(counts))

    def _learn(self, agent: Learner, count: int) -> None:
        if agent.is_alive:
            self._known[agent.id] = max(count, self._known.get(agent.id, 0))
            agent.publish()
            if self._random.random() < 0.1:
                self._schedule.after(self._random.uniform(0.0, 9.0), self._lose, agent)

    def _lose(self, agent: Learner) -> None:
        """Its template dies."""
        if agent.is_alive:
            self._known[agent.id] = 0
            agent.publish()
