"""Nodes that die, are cut off or freeze without a report: the leases on workers are enough.

There is no taint, no provider and no person. All is as in the chart, with the default lease. The
job continues or recovers, and no two attempts of it are ever alive at once. Workers record when
they lived (`jobs.assert_apart`, when the job ends). Only a worker that slept with its machine runs
on for a moment when it wakes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tests.realnodes import images, machines
from tests.realnodes.jobs import GLOO, Job, named
from tests.realnodes.plane import until
from tests.realnodes.releases import Release

NODES = 4
"""Two more than pods: where two pods miss each other, both may be replaced."""
IMAGES = True
STANDING_SECONDS = 20.0
"""Seconds to watch: more than two leases."""
WAKE_SECONDS = 1.0
"""Seconds until a resumed machine's processes have run and are killed, if it is busy."""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.heavy,
    pytest.mark.realkube,
    pytest.mark.timeout(900),
]


def leaders_node(release: Release) -> str:
    """Return the node of the leading operator."""
    return release.operators()[release.leader()]


def leaders_address(release: Release) -> str:
    """Return the leading operator's address, as its packets have it."""
    return release.addresses()[release.leader()]


def victim(release: Release, job: Job) -> str:
    """Return a node of the job without the leading operator."""
    there = leaders_node(release)
    return next(one.node for one in job.running().values() if one.node != there)


def moves(job: Job, node: str) -> None:
    """Check that all ranks run again, none of them on the node, which is named as culprit."""
    second = job.running(after=0)
    assert node not in {one.node for one in second.values()}
    assert job.incident(1)["culprit"]["node"] == node
    assert job.object()["status"]["restartCount"] == second[0].attempt


def stays(job: Job) -> None:
    """Check that all ranks of the first attempt work for longer than a lease."""
    since = time.time()
    until(lambda: time.time() - since >= STANDING_SECONDS, "a lease would have run out")
    until(lambda: job.goes_on(since + STANDING_SECONDS), "all ranks go on")
    assert job.newest() == 0


@contextmanager
def without_power(job: Job, node: str) -> Iterator[None]:
    """Switch a machine off until the block ends; its processes are lost."""
    room = job.cluster.directory
    machines.switch_off(room, node)
    try:
        yield
    finally:
        machines.switch_on(room, node, machines.number_of(room, node))
    until(lambda: not job.workers(node), "what ran there is gone")


@named("power")
def test_the_rank_of_a_dead_node_goes_to_another(release: Release, job: Job) -> None:
    node = victim(release, job)
    with without_power(job, node):
        moves(job, node)
    job.finish()


@named("together")
def test_a_node_and_the_leading_operator_on_it_are_lost_together(
    release: Release, job: Job
) -> None:
    ranks = {one.node for one in job.running().values()}
    if leaders_node(release) not in ranks:
        release.delete(release.leader())
        until(lambda: release.leader() and leaders_node(release) in ranks, "a rank's node leads")
    node = leaders_node(release)
    with without_power(job, node):
        moves(job, node)
    job.finish()


@named("cut")
def test_the_workers_of_a_node_that_is_cut_off_end_before_others_start(
    release: Release, job: Job
) -> None:
    node = victim(release, job)
    machines.cut_off(job.cluster.directory, node, is_cut=True)
    try:
        moves(job, node)
        assert not job.workers(node)
    finally:
        machines.cut_off(job.cluster.directory, node, is_cut=False)
    job.finish()


@named("unheard")
def test_a_node_that_the_operator_does_not_hear(release: Release, job: Job) -> None:
    node = victim(release, job)
    network = machines.pods_network(job.cluster.directory, node)
    with machines.dropped(network, leaders_address(release)):
        moves(job, node)
        assert not job.workers(node)
    job.finish()


@named("unreached")
def test_a_node_that_the_operator_does_not_reach(release: Release, job: Job) -> None:
    node = victim(release, job)
    network = machines.pods_network(job.cluster.directory, node)
    with machines.dropped(leaders_address(release), network):
        moves(job, node)
        assert not job.workers(node)
    job.finish()


@named("peers")
def test_a_node_that_only_its_peers_do_not_hear_is_no_fault(release: Release, job: Job) -> None:
    node = victim(release, job)
    network = machines.pods_network(job.cluster.directory, node)
    peers = [pod["status"]["podIP"] for pod in job.pods() if pod["spec"]["nodeName"] != node]
    with machines.dropped(network, *peers):
        stays(job)
        events = job.cluster.kubectl("get", "events", "--field-selector=reason=PeersNotReachable")
        assert "cannot connect to pod peers-pods-" in events.stdout
    job.finish()


def test_a_node_that_loses_packets_to_all_peers_is_left(release: Release) -> None:
    """Drop packets from a node to all others, but to the operators: if it has rank 0, its peer is
    replaced first."""
    job = Job(release.cluster, "lost-packets", script=GLOO, image=images.NAMES["training"])
    job.apply()
    node = victim(release, job)
    with release.unheard_by_peers(node):
        newest = job.running(after=0)[0].attempt
        assert newest <= 2
        culprit = job.incident(newest)["culprit"]
        assert (culprit["fault"], culprit["node"]) == ("PeersNotReachable", node)
        assert not job.workers(node)
    job.finish()


@named("kubelet")
def test_the_workers_of_a_dead_kubelet_work_on(release: Release, job: Job) -> None:
    cluster, node = job.cluster, victim(release, job)
    machines.kill_kubelet(cluster.directory, node)
    until(lambda: cluster.condition(node, "Ready") == "Unknown", f"{node} is missed")
    stays(job)
    with without_power(job, node):
        moves(job, node)
    job.finish()


@named("paused")
def test_the_workers_of_a_machine_that_wakes_late_are_killed_at_once(
    release: Release, job: Job, record_property: Callable[[str, object], None]
) -> None:
    node = victim(release, job)
    with machines.paused(job.cluster.directory, node):
        moves(job, node)
        woke_at = time.time()
    until(lambda: not job.workers(node), "what slept has ended")
    [woken] = (one for one in job.lives() if (one.attempt, one.node) == (0, node))
    late = woken.ended_at - woke_at
    record_property("a worker that woke has written for", f"{max(0.0, late):.3f} s")
    assert late < WAKE_SECONDS
    job.finish(woken=woken)


@named("alone")
def test_no_lease_runs_out_while_there_is_no_operator(release: Release, job: Job) -> None:
    release.scale(0)
    until(lambda: not release.operators(), "there is no operator")
    stays(job)
    release.scale(2)
    until(release.leader, "an operator leads")
    stays(job)
    job.finish()
