"""Links of several jobs: one of HyperPod's own agents serves one pod."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack

import pytest

from tests.agent.test_agent_proofs import Plain
from tests.watching import running, until
from unbroken.agent_http.client import LinkResources
from unbroken.agent_http.identity import Proofs
from unbroken.core.job.events import (
    AgentReported,
    JobEvent,
    PodHeld,
    PodName,
    PodPhase,
    PodUid,
    PodView,
)
from unbroken.core.job.obstacles import AGENT_SHARED
from unbroken.operator.jobs.links import AgentLinks, AgentMemory, StockAgents, StockHolders
from unbroken.operator.jobs.pods import JobIdentity
from unbroken.operator.jobs.views import AgentPlace


class Job:
    """The links of one job, which has one pod at the address of the agent."""

    def __init__(
        self, name: str, tasks: asyncio.TaskGroup, holders: StockHolders, uid: str = ""
    ) -> None:
        self.uid = PodUid(f"uid-of-{uid or name}")
        self.events: list[JobEvent] = []
        self.unproven = 0
        self.links = AgentLinks(
            bytes(32),
            Proofs(is_required=False),
            self.events.append,
            tasks,
            AgentMemory(lambda: None),
            LinkResources(on_unproven=self._count),
            StockAgents(holders, JobIdentity("team", name, uid or name)),
        )

    def _count(self) -> None:
        self.unproven += 1

    def follow(self, port: int) -> None:
        """Link to the agent at the port."""
        pod = PodView(PodName("p"), self.uid, "w", 0, phase=PodPhase.RUNNING, address="127.0.0.1")
        self.links.follow(pod, AgentPlace(port, 0, None, is_ours=False))

    def has(self, kind: type[JobEvent]) -> Callable[[], bool]:
        """Return a function that says whether the job got such an event since it was cleared."""
        return lambda: any(isinstance(one, kind) for one in self.events)


@pytest.mark.parametrize("leaves", ["pod", "agent"])
async def test_an_agent_of_another_job_is_neither_heard_nor_commanded(leaves: str) -> None:
    agent, holders = Plain(404), StockHolders()
    async with AsyncExitStack() as stack:
        port = await stack.enter_async_context(agent.served())
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        one, two = Job("one", tasks, holders), Job("two", tasks, holders)
        stack.callback(lambda: [job.links.drop(job.uid) for job in (one, two)])
        one.follow(port)
        await until(one.has(AgentReported), bool)
        two.follow(port)
        await until(two.has(PodHeld), bool)
        text = f"the agent of a pod of job team/one answers at its port {port}"
        assert set(two.events) == {PodHeld(two.uid, AGENT_SHARED, text)}
        assert (one.unproven, two.unproven) == (1, 0)
        two.events.clear()
        if leaves == "pod":
            one.links.drop(one.uid)
        else:
            agent.initialized = "2027-01-01T00:00:00.000000+00:00"
            await until(lambda: agent.initialized in str(holders))
            one.links.drop(one.uid)
        await until(two.has(AgentReported), bool)
        assert one.uid not in str(holders)
        two.links.drop(two.uid)
        assert holders == StockHolders()


async def test_a_job_created_again_does_not_take_the_agents_of_pods_that_still_end() -> None:
    agent, holders, made = Plain(404), StockHolders(), list[Job]()

    async def run(port: int) -> None:
        async with asyncio.TaskGroup() as tasks:
            made.append(Job("lm", tasks, holders, "old"))
            made[0].follow(port)
            await asyncio.Event().wait()

    async with agent.served() as port, asyncio.TaskGroup() as tasks:
        async with running(run(port)):
            await until(lambda: made and made[0].has(AgentReported)())
        new = Job("lm", tasks, holders, "new")
        new.follow(port)
        await until(new.has(PodHeld))
        text = f"the agent of a pod of the earlier job team/lm answers at its port {port}"
        assert set(new.events) == {PodHeld(new.uid, AGENT_SHARED, text)}
        holders.release(made[0].uid)
        await until(new.has(AgentReported))
        new.links.drop(new.uid)
    assert holders == StockHolders()
