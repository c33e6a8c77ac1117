"""A leader that is stopped, ended or cut off, while a job runs that must not notice.

The terms of the lease are those of `unbroken operator`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from time import clock_gettime

import pytest

from tests.apiservers import CannotStartError
from tests.chaos.world import Terms, World, world
from tests.e2e.jobs import job
from tests.fault_proxy import CLOCK_BOOTTIME
from tests.operator.trained_jobs import until

pytestmark = [pytest.mark.slow, pytest.mark.heavy, pytest.mark.realkube, pytest.mark.timeout(600)]
FAIL_OVER_SECONDS = 20.0
"""Issue 7."""
PAUSE_SECONDS = 60.0
OUTAGE_SECONDS = 20.0
"""Longer than a lease is good for."""


@pytest.fixture
def whole(tmp_path: Path) -> Iterator[World]:
    """A world of the test's own."""
    try:
        with world(tmp_path, Terms()) as made:
            yield made
    except CannotStartError as error:
        pytest.skip(str(error))


def taken_after(whole: World, count: int, since: float) -> float:
    """Seconds from then to the next takeover, which is waited for."""
    until(lambda: len(whole.takeovers()) > count, "the other takes over")
    return whole.takeovers()[count].at - since


def test_a_leader_stands_still_for_a_minute(whole: World, tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    with job(whole.cluster, work) as one:
        first = one.steps(0)
        leader = whole.leader()
        stopped = clock_gettime(CLOCK_BOOTTIME)
        leader.freeze()
        took = taken_after(whole, 1, stopped)
        one.steps(0)
        # The other operator handles this fault; the paused one knows nothing of it.
        one.kill(first[3])
        second = one.steps(1)
        one.events.until(lambda events: events[-1].at > stopped + PAUSE_SECONDS)
        leader.thaw()
        one.steps(1, 50)
        until(lambda: "operator stopped" in leader.log.read_text(), "the first finds out")
        assert one.workers() == second
        ended = clock_gettime(CLOCK_BOOTTIME)
        whole.other(leader).end()
        handed = taken_after(whole, 2, ended)
        one.steps(1)
        sys.stderr.write(f"taken over after {took:.1f} s, handed over in {handed:.2f} s\n")
        assert took < FAIL_OVER_SECONDS
        assert handed < took / 2
        assert one.finish()["status"]["restartCount"] == 1
        assert [incident["outcome"] for incident in one.incidents(1)] == ["recovered"]
    whole.check()


@pytest.mark.parametrize("part", ["etcd", "api"])
def test_the_store_or_the_server_is_lost_for_a_while(
    whole: World, tmp_path: Path, part: str
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    lost = whole.etcd if part == "etcd" else whole.api
    with job(whole.cluster, work) as one:
        first = one.steps(0)
        lost.kill()
        went = clock_gettime(CLOCK_BOOTTIME)
        one.events.until(lambda events: events[-1].at > went + OUTAGE_SECONDS)
        assert one.steps(0, 20) == first, "training goes on as if nothing had happened"
        one.kill(first[2])
        lost.start()
        whole.await_api()
        one.api.close()
        assert one.settle() == 1
        assert one.finish()["status"]["restartCount"] == 1
        assert [incident["outcome"] for incident in one.incidents(1)] == ["recovered"]
    whole.check()
