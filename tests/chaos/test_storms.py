"""Kills and freezes all parts of the control plane at random, while a job fails and recovers.

`make chaos SEED=n` runs one storm; UNBROKEN_CHAOS=20:30 runs these.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.apiservers import CannotStartError
from tests.chaos.world import Part, Terms, World, world
from tests.e2e.job_events import Event
from tests.e2e.jobs import Job, job

pytestmark = [pytest.mark.slow, pytest.mark.heavy, pytest.mark.realkube, pytest.mark.timeout(600)]
FIRST, LAST = map(int, os.environ.get("UNBROKEN_CHAOS", "0:2").split(":"))
BLOWS = 14


class Storm:
    """Breaks a part of the control plane or of the job, or releases what it has broken."""

    def __init__(self, whole: World, one: Job, seed: int) -> None:
        self.hits = 0
        """Number of blows for which the job may be restarted."""
        self.done: list[str] = []
        self._whole = whole
        self._one = one
        self._random = random.Random(seed)

    def blow(self) -> None:
        """Do one of the actions of a storm."""
        ways = {
            self.kill_part: 4,
            self.freeze_part: 4,
            self.let_go: 4,
            self.kill_worker: 3,
            self.kill_agent: 1,
        }
        self._random.choices(list(ways), list(ways.values()))[0]()

    def _part(self) -> Part:
        whole = self._whole
        return self._random.choice([whole.etcd, whole.api, *whole.operators, whole.leader()])

    def kill_part(self) -> None:
        """Send SIGKILL to a part of the control plane."""
        part = self._part()
        self.done.append(f"kill {part.name}")
        part.kill()

    def freeze_part(self) -> None:
        """Send SIGSTOP to a part of the control plane."""
        part = self._part()
        self.done.append(f"freeze {part.name}")
        part.freeze()

    def let_go(self) -> None:
        """Resume or restart one part; those first that the others need."""
        whole = self._whole
        down = [p for p in (whole.etcd, whole.api) if p.is_frozen or not p.is_up]
        down = down or [p for p in whole.operators if p.is_frozen or not p.is_up]
        if not down:
            return
        part = self._random.choice(down)
        self.done.append(f"start {part.name}")
        part.thaw()
        part.start()

    def _worker(self) -> Event:
        return self._random.choice(list(self._one.workers().values()))

    def kill_worker(self) -> None:
        """Send SIGKILL to a worker."""
        victim = self._worker()
        self.done.append(f"kill worker {victim.rank}")
        self.hits += self._one.signal(victim.pid, signal.SIGKILL)

    def kill_agent(self) -> None:
        """Send SIGKILL to an agent."""
        victim = self._worker()
        self.done.append(f"kill agent of {victim.rank}")
        self.hits += self._one.signal(victim.more["agent"], signal.SIGKILL)

    def pause(self) -> None:
        """Wait for a random time, in which the job may train."""
        seconds = self._random.choice([0.0, 0.3, 1.0, 4.0, 8.0])
        self.done.append(f"{seconds:g} s")
        self._one.events.more(10_000, seconds)


@pytest.fixture(scope="module")
def whole(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    """Run a world for all storms of one kind of operators."""
    try:
        with world(tmp_path_factory.mktemp("world"), Terms(4, 0.5, request.param)) as made:
            yield made
    except CannotStartError as error:
        pytest.skip(str(error))


KINDS = ("waits", "acts")
"""Behaviour of a leader while the API server is away, for even seeds and odd ones."""


@pytest.mark.parametrize(
    ("whole", "seed"),
    sorted((KINDS[seed % 2], seed) for seed in range(FIRST, LAST)),
    indirect=["whole"],
)
def test_a_job_outlives_any_storm_of_its_control_plane(
    whole: World, tmp_path: Path, seed: int
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    storm: Storm | None = None
    try:
        with job(whole.cluster, work, policy={"jobMaxRetryCount": 1000}) as one:
            one.steps(0)
            storm = Storm(whole, one, seed)
            for _ in range(BLOWS):
                storm.blow()
                storm.pause()
            whole.heal()
            one.api.close()
            one.settle()
            restarts = one.finish()["status"]["restartCount"]
            incidents = one.incidents(None)
            attempts = {event.attempt for event in one.events.all}
        assert [i["number"] for i in incidents] == list(range(1, len(incidents) + 1))
        assert len(incidents) <= restarts <= storm.hits, "what nobody did is charged to nobody"
        assert attempts <= set(range(restarts + 1)), "no stop without a cause"
        assert all(i["outcome"] in ("recovered", "failed again") for i in incidents)
        whole.check()
    except BaseException:
        told = ", ".join(storm.done) if storm else "nothing yet"
        sys.stderr.write(f"seed {seed}: {told}\nrepeat it with: make chaos SEED={seed}\n")
        whole.heal()
        raise
