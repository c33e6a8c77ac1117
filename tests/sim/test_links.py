"""Links of simulated worlds: late messages never replace newer ones, and polls take turns."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from unbroken.core.agent.link_order import LinkOrder
from unbroken.core.job.events import PodUid
from unbroken.sim.actors.links import Link, Quality
from unbroken.sim.schedule import Schedule
from unbroken.wire.agent import AgentReport, AgentState, Command, Request, StopCommand


@dataclass
class Speaker:
    """An agent that counts its reports."""

    quality: Quality
    is_alive: bool = True
    links: list[Link] = field(default_factory=list)
    order: LinkOrder = field(default_factory=LinkOrder)
    said: int = 0
    obeyed: list[Command] = field(default_factory=list)

    def report(self) -> AgentReport:
        return AgentReport("a", AgentState.RUNNING, attempt=self.said)

    def command(self, command: Command) -> None:
        self.obeyed.append(command)

    def ask(self, request: Request, answer: object) -> None:
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


def test_orders_to_a_polled_agent_wait_for_its_answer_and_the_newest_one_goes() -> None:
    schedule, heard = Schedule(1), list[int]()
    agent = Speaker(Quality(usual_seconds=0.2, is_polled=True))

    def told(_: PodUid, report: AgentReport) -> None:
        assert not agent.obeyed, "an answer that was given before the order comes before it"
        heard.append(report.attempt or 0)

    link = Link(schedule, PodUid("p"), agent, told)
    link.up()
    link.down(StopCommand(1))
    link.down(StopCommand(2))
    schedule.run(schedule.now + 0.3)
    assert heard == [0]
    agent.said = 1
    link.up()
    schedule.run(schedule.now + 0.11)
    assert agent.obeyed == [StopCommand(2)]
    assert heard == [0], "nothing is asked while an order is under way"


@pytest.mark.parametrize(("is_polled", "obeyed"), [(False, []), (True, [StopCommand(1)])])
def test_an_agent_refuses_what_comes_over_an_older_link(
    is_polled: bool, obeyed: list[Command]
) -> None:
    schedule = Schedule(1)
    agent = Speaker(Quality(is_polled=is_polled))
    older = Link(schedule, PodUid("p"), agent, lambda *_: None)
    older.down(StopCommand(1))
    Link(schedule, PodUid("p"), agent, lambda *_: None)
    schedule.run(schedule.now + 1.0)
    assert agent.obeyed == obeyed
