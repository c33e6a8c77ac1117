"""Nodes of a job lose their power: its ranks resume on other nodes, with and without spares."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.e2e.clusters import Cluster
from tests.e2e.control import power
from tests.e2e.job_events import await_end, places
from tests.e2e.jobs import Job, job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
NODES = 3


def node_of(one: Job) -> dict[str, str]:
    """Return the node of each pod."""
    return {name: pod["spec"]["nodeName"] for name, pod in one.pods().items()}


@pytest.mark.parametrize("rank", [0, pytest.param(2, marks=pytest.mark.smoke)])
def test_the_ranks_of_a_dead_node_go_on_elsewhere(
    nodes: Cluster, tmp_path: Path, rank: int
) -> None:
    with job(nodes, tmp_path) as one:
        starts, where = one.steps(0), node_of(one)
        lost = places(starts)[rank]
        power(nodes, where[lost], "off")
        after = one.steps(1)
        for number in one.ranks:
            is_lost = places(starts)[number] == lost
            assert (after[number].more["agent"] == starts[number].more["agent"]) == (not is_lost)
            if is_lost:
                await_end(starts[number].pid)
                assert node_of(one)[places(after)[number]] != where[lost]
            else:
                assert places(after)[number] == places(starts)[number]
        assert one.finish()["status"]["restartCount"] == 1
        (incident,) = one.incidents(1)
    assert incident["culprit"]["node"] == where[lost]
    assert incident["culprit"]["pod"] == lost
    assert {sign["fault"] for sign in incident["signals"]} <= {"AgentLost", "NodeLost", "PeerLost"}
    assert incident["remedy"] == "pod"


def test_a_spare_takes_over_and_once_used_up_a_new_pod_does(nodes: Cluster, tmp_path: Path) -> None:
    with job(nodes, tmp_path, spares=1) as one:
        starts, where = one.steps(0), node_of(one)
        assert len(where) == NODES
        assert len(set(where.values())) == NODES, "pods are spread over the nodes"
        spare = (set(where) - set(places(starts).values())).pop()
        first = places(starts)[0]
        power(nodes, where[first], "off")
        middle = one.steps(1)
        assert places(middle) == {0: spare, 1: spare, 2: places(starts)[2], 3: places(starts)[2]}
        power(nodes, where[spare], "off")
        after = one.steps(2)
        assert places(after)[2] == places(starts)[2]
        assert after[2].more["agent"] == starts[2].more["agent"]
        assert node_of(one)[places(after)[0]] == where[places(starts)[2]], "the only node left"
        assert one.finish()["status"]["restartCount"] == 2
        incidents = one.incidents(2)
    assert [incident["culprit"]["pod"] for incident in incidents] == [first, spare]
    assert [incident["remedy"] for incident in incidents] == ["pod", "pod"]


def test_a_node_that_dies_while_the_job_restarts_delays_it_only(
    nodes: Cluster, tmp_path: Path
) -> None:
    with job(nodes, tmp_path) as one:
        starts, where = one.steps(0), node_of(one)
        lost = places(starts)[2]
        assert one.signal(starts[2].more["agent"], signal.SIGSTOP)
        one.kill(starts[0])
        one.until_standing("Faulted")
        power(nodes, where[lost], "off")
        after = one.steps(1)
        assert after[0].more["agent"] == starts[0].more["agent"]
        assert node_of(one)[places(after)[2]] != where[lost]
        assert one.finish()["status"]["restartCount"] == 1
        (incident,) = one.incidents(1)
    assert (incident["culprit"]["fault"], incident["culprit"]["rank"]) == ("Signal", 0)
    assert incident["remedy"] == "pod", "the rung rose while the restart was under way"
