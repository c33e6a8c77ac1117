"""All parts are broken at random, repeatedly; then nothing, and the job must complete.

UNBROKEN_STORMS=20:30 runs other seeds than the default one.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.clusters import Cluster
from tests.e2e.control import Operator, frozen
from tests.e2e.jobs import Job, job

pytestmark = [pytest.mark.slow, pytest.mark.heavy, pytest.mark.timeout(300)]
BLOWS = 12
FIRST, LAST = map(int, os.environ.get("UNBROKEN_STORMS", "0:1").split(":"))


class Storm:
    """Breaks a part of a job, or resumes the parts that it has frozen."""

    def __init__(self, one: Job, cluster: Cluster, operator: Operator, seed: int) -> None:
        self.hits = 0
        """Number of blows for which the job may be restarted."""
        self._one = one
        self._cluster = cluster
        self._operator = operator
        self._random = random.Random(seed)
        self._frozen: list[int] = []

    def blow(self) -> None:
        """Do one of the actions of a storm."""
        ways = [self.kill_worker, self.kill_agent, self.freeze, self.thaw, self.delete_pod]
        more = [self.kill_operator, self.stop_api]
        self._random.choices([*ways, *more], [5, 2, 2, 2, 1, 1, 1])[0]()

    def kill_worker(self) -> None:
        """Send SIGKILL to one or two workers."""
        workers = list(self._one.workers().values())
        chosen = self._random.sample(workers, self._random.randint(1, 2))
        self.hits += sum([self._one.signal(event.pid, signal.SIGKILL) for event in chosen])

    def kill_agent(self) -> None:
        """Send SIGKILL to an agent."""
        worker = self._random.choice(list(self._one.workers().values()))
        self.hits += self._one.signal(worker.more["agent"], signal.SIGKILL)

    def freeze(self) -> None:
        """Send SIGSTOP to an agent or a worker."""
        worker = self._random.choice(list(self._one.workers().values()))
        pid = self._random.choice([worker.pid, worker.more["agent"]])
        if self._one.signal(pid, signal.SIGSTOP):
            self._frozen.append(pid)
            self.hits += 1

    def thaw(self) -> None:
        """Resume all frozen processes."""
        while self._frozen:
            self._one.signal(self._frozen.pop(), signal.SIGCONT)

    def delete_pod(self) -> None:
        """Delete a pod through the API."""
        names = sorted(self._one.pods())
        if names:
            self.hits += 1
            self._one.api.delete(f"pods/{self._random.choice(names)}")

    def kill_operator(self) -> None:
        """Send SIGKILL, and start another operator a little later."""
        self._operator.kill()
        self._one.events.more(self._random.randint(0, 60), 0.5)
        self._operator.start()
        self.hits += 1

    def stop_api(self) -> None:
        """Stop the API server and the nodes with SIGSTOP while a worker is killed."""
        with frozen(self._cluster.up_pid):
            self.kill_worker()
            self.pause()

    def pause(self) -> None:
        """Let the job train for a while, or not at all."""
        self._one.events.more(self._random.choice([0, 1, 4, 20, 100]), self._random.random())


@pytest.fixture(scope="module")
def sea(tmp_path_factory: pytest.TempPathFactory, kubectl_path: str) -> Iterator[Cluster]:
    """Start a cluster without an operator."""
    found = Cluster(tmp_path_factory.mktemp("sea") / "state", kubectl_path)
    found.unbroken("up", "--detach", "--nodes", "3", "--no-operator")
    yield found
    found.take_away()


@pytest.mark.parametrize("seed", range(FIRST, LAST))
def test_a_job_outlives_any_storm(sea: Cluster, tmp_path: Path, seed: int) -> None:
    operator = Operator(sea, tmp_path / "operator.log")
    operator.start()
    try:
        with job(sea, tmp_path, spares=seed % 2, policy={"jobMaxRetryCount": 1000}) as one:
            one.steps(0)
            storm = Storm(one, sea, operator, seed)
            for _ in range(BLOWS):
                storm.blow()
                storm.pause()
            storm.thaw()
            one.settle()
            restarts = one.finish()["status"]["restartCount"]
            incidents = one.incidents(None)
        assert [i["number"] for i in incidents] == list(range(1, len(incidents) + 1))
        assert len(incidents) <= restarts <= storm.hits
        attempts = [i["attempt"] for i in incidents]
        assert attempts == sorted(set(attempts)), "one incident for each attempt that broke"
        assert all(i["outcome"] in ("recovered", "failed again") for i in incidents)
        operator.assert_well()
    finally:
        operator.kill()
