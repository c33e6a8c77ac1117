"""Agents and pods of a job are killed, frozen, deleted; the job is suspended and resumed."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.e2e.clusters import Cluster
from tests.e2e.job_events import Event, await_end, parent, places
from tests.e2e.jobs import Job, job
from tests.job_keys import key_in, secret_of
from unbroken.agent_http.client import AgentLink
from unbroken.agent_http.identity import AgentIdentity
from unbroken.wire.agent import PORT, AgentReport

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
TELLS = Path(__file__).parent / "programs/gang_that_tells.py"


class Still(NamedTuple):
    """A job whose pod `lost` is stopped with SIGSTOP; `end` is the rest of its test."""

    job: Job
    end: ExitStack
    starts: dict[int, Event]
    before: dict[str, str]
    lost: str


@pytest.fixture(scope="module", autouse=True)
def still(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Still]:
    """Start the job with the first test, since the pod is given 20 s to come back."""
    with ExitStack() as end:
        directory = tmp_path_factory.mktemp("still")
        # Under a lease, the keeper would end the stopped processes.
        fenced = {"unbroken.dev/fence-by": "provider"}
        one = end.enter_context(job(cluster, directory, spares=1, annotations=fenced))
        starts = one.steps(0)
        for pid in (starts[0].more["agent"], starts[0].pid, starts[1].pid):
            assert one.signal(pid, signal.SIGSTOP)
        yield Still(one, end, starts, uids(one), places(starts)[0])


def agents(starts: dict[int, Event]) -> dict[int, int]:
    """Rank -> process of its agent."""
    return {rank: event.more["agent"] for rank, event in starts.items()}


def uids(one: Job) -> dict[str, str]:
    """Uid of each pod."""
    return {name: pod["metadata"]["uid"] for name, pod in one.pods().items()}


@pytest.mark.parametrize("victim", [pytest.param("agent", marks=pytest.mark.smoke), "keeper"])
def test_a_killed_agent_comes_back_in_its_pod(
    cluster: Cluster, tmp_path: Path, victim: str
) -> None:
    with job(cluster, tmp_path) as one:
        starts, before = one.steps(0), uids(one)
        agent = starts[2].more["agent"]
        assert one.signal(agent if victim == "agent" else parent(agent), signal.SIGKILL)
        for rank in (2, 3):
            await_end(starts[rank].pid)
        after = one.steps(1)
        assert places(after) == places(starts)
        assert uids(one) == before
        assert agents(after)[0] == agents(starts)[0]
        assert agents(after)[2] != agent
        assert one.finish()["status"]["restartCount"] == 1
        (incident,) = one.incidents(1)
    culprit = incident["culprit"]
    assert (culprit["fault"], culprit["pod"]) == ("AgentLost", places(starts)[2])
    assert incident["remedy"] == "process"


def test_all_agents_killed_at_once_cost_one_restart(cluster: Cluster, tmp_path: Path) -> None:
    with job(cluster, tmp_path) as one:
        starts, before = one.steps(0), uids(one)
        for agent in {event.more["agent"] for event in starts.values()}:
            assert one.signal(agent, signal.SIGKILL)
        assert places(one.steps(1)) == places(starts)
        assert uids(one) == before
        assert one.finish()["status"]["restartCount"] == 1
        (incident,) = one.incidents(1)
    assert incident["culprit"]["fault"] == "AgentLost"


@pytest.mark.parametrize("indices", [[0], pytest.param([1], marks=pytest.mark.smoke), [0, 1]])
def test_deleted_pods_are_replaced_and_the_others_stay(
    cluster: Cluster, tmp_path: Path, indices: list[int]
) -> None:
    with job(cluster, tmp_path) as one:
        starts, before = one.steps(0), uids(one)
        lost = [places(starts)[2 * index] for index in indices]
        for name in lost:
            one.api.delete(f"pods/{name}").done()
        after = one.steps(1)
        assert places(after) == places(starts), "a replacement takes the name and the rank"
        for name, uid in uids(one).items():
            assert (uid == before[name]) == (name not in lost)
        for rank in one.ranks:
            is_same = agents(after)[rank] == agents(starts)[rank]
            assert is_same == (places(starts)[rank] not in lost)
        assert one.finish()["status"]["restartCount"] == 1
        (incident,) = one.incidents(1)
    assert incident["culprit"]["pod"] in lost
    assert incident["culprit"]["fault"] == "PodDeleted"
    assert incident["remedy"] == "pod"


def test_nothing_starts_beside_a_frozen_agent_until_it_is_back(
    cluster: Cluster, tmp_path: Path
) -> None:
    """The agent is lost as long as it takes to be missed, which is all that the length decides."""
    with job(cluster, tmp_path) as one:
        starts, before = one.steps(0), uids(one)
        agent = starts[2].more["agent"]
        assert one.signal(agent, signal.SIGSTOP)
        try:
            one.until_standing("Faulted")
            for rank in (0, 1):
                await_end(starts[rank].pid)
            assert one.starts(1) == {}
        finally:
            assert one.signal(agent, signal.SIGCONT)
        after = one.steps(1)
        assert agents(after) == agents(starts)
        assert uids(one) == before
        assert one.finish()["status"]["restartCount"] == 1
        (incident,) = one.incidents(1)
    assert incident["culprit"]["pod"] == places(starts)[2]
    assert incident["culprit"]["fault"] == "AgentLost"
    assert incident["remedy"] == "process"


@pytest.mark.smoke
def test_a_suspended_job_has_no_pods_and_goes_on_when_resumed(
    cluster: Cluster, tmp_path: Path
) -> None:
    with job(cluster, tmp_path) as one:
        one.kill(one.steps(0)[1])
        starts = one.steps(1)
        one.patch({"spec": {"runPolicy": {"suspend": True}}})
        suspended = one.until_standing("Suspended")
        assert suspended["status"]["restartCount"] == 1
        for event in starts.values():
            await_end(event.pid)
        for name in one.pods():
            one.api.until("pods", name, lambda _: False)
        one.patch({"spec": {"runPolicy": {"suspend": False}}})
        after = one.steps(1)
        assert not set(agents(after).values()) & set(agents(starts).values())
        ended = one.finish()
        assert ended["status"]["restartCount"] == 1, "suspending is no restart"
        one.incidents(1)


async def until_warm(one: Job, pod: str) -> None:
    """Listen to the agent of a pod until it has imported something."""
    warm = asyncio.Event()

    def hear(report: AgentReport) -> None:
        if report.imports:
            warm.set()

    found = one.pods()[pod]
    key = key_in(one.api.get(f"secrets/{secret_of(found)}").made)
    identity = AgentIdentity(key, found["metadata"]["uid"])
    link = AgentLink(found["status"]["podIP"], PORT, identity, hear, lambda why: None)
    listening = asyncio.create_task(link.run())
    await warm.wait()
    listening.cancel()


async def test_the_ranks_of_a_deleted_pod_start_warm_on_a_spare(
    cluster: Cluster, tmp_path: Path
) -> None:
    with job(cluster, tmp_path, program=TELLS, spares=1) as one:
        first = one.steps(0)
        spare = (set(one.pods()) - set(places(first).values())).pop()
        await until_warm(one, spare)
        one.api.delete(f"pods/{places(first)[3]}").done()
        second = one.steps(1)
        assert places(second) == {**places(first), 2: spare, 3: spare}
        assert {worker["start"] for worker in one.report(second[3])["workers"]} == {"warm"}
        one.finish()
        (incident,) = one.incidents(1)
    assert incident["remedy"] == "pod"


def test_a_pod_that_stands_still_is_gone_before_a_spare_takes_its_ranks(still: Still) -> None:
    """Wait for the end of the pod: only that proves the end of its workers, which live."""
    one, end, starts, before, lost = still
    with end:
        spare = (set(before) - set(places(starts).values())).pop()
        after = one.steps(1)
        assert places(after) == {**places(starts), 0: spare, 1: spare}
        assert uids(one)[lost] != before[lost], "another one is the spare now"
        for rank in (0, 1):
            await_end(starts[rank].pid)
        assert one.finish()["status"]["restartCount"] == 1
        (incident,) = one.incidents(1)
    assert (incident["culprit"]["fault"], incident["culprit"]["pod"]) == ("AgentLost", lost)
    assert incident["remedy"] == "pod"
