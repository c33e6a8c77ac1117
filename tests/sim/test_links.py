"""Links of simulated worlds: what comes late is not the last that is heard."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from unbroken.core.events import PodUid
from unbroken.testing.links import Link, Quality
from unbroken.testing.schedule import Schedule
from unbroken.wire.agent import AgentReport, AgentState, Command, WarmCommand
from unbroken.wire.observation import CollectCommand


@dataclass
class Speaker:
    """An agent that counts its reports."""

    quality: Quality
    is_alive: bool = True
    links: list[Link] = field(default_factory=list)
    said: int = 0

    def report(self) -> AgentReport:
        return AgentReport("a", AgentState.RUNNING, attempt=self.said)

    def command(self, command: Command) -> None:
        raise NotImplementedError

    def collect(self, command: CollectCommand, answer: object) -> None:
        raise NotImplementedError

    def warm(self, command: WarmCommand) -> None:
        raise NotImplementedError


@pytest.mark.parametrize("seed", range(20))
def test_a_heartbeat_follows_the_last_message_that_is_late(seed: int) -> None:
    schedule, heard = Schedule(seed), list[int]()
    agent = Speaker(Quality(late=0.5, double=0.2, late_seconds=15.0, is_beating=True))
    link = Link(schedule, PodUid("p"), agent, lambda _, one: heard.append(one.attempt or 0))
    for second in range(20):
        agent.said = second
        link.up()
        schedule.run(schedule.now + 1.0)
    agent.quality.heal()
    schedule.run(schedule.now + 60.0)
    assert heard[-1] == 19
