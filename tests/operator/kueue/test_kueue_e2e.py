"""A job of real processes that Kueue admits, preempts and admits again; the test is Kueue."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.clusters import Cluster
from tests.operator.conftest import Place
from tests.operator.kueue.kueue_standin import admit, evict, flavor, install, said, workload
from tests.operator.trained_jobs import Job, is_alive, named_job
from unbroken.kube.client import connect

pytestmark = [pytest.mark.slow, pytest.mark.heavy]

Object = dict[str, Any]
QUEUE = "kueue.x-k8s.io/queue-name"
FLAVOR = "any"


class QueuedCluster(Cluster):
    """A cluster whose jobs wait in a queue."""

    def apply(self, *objects: Object) -> None:
        """Apply them with the queue's label."""
        for one in objects:
            one["metadata"]["labels"] = {QUEUE: "team-a"}
        super().apply(*objects)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    """A job of a cluster that knows Kueue's kinds."""
    with named_job(tmp_path, QueuedCluster) as found:
        yield found


def as_kueue(job: Job, does: Callable[[Place], Awaitable[Any]]) -> Any:
    """Do something as Kueue would."""

    async def done() -> Any:
        async with connect(job.cluster.directory / "kubeconfig") as client:
            return await does(Place(client, "default"))

    return asyncio.run(done())


def has(type: str, status: str) -> Callable[[Place], Awaitable[Object]]:
    """The Workload, once a condition is so."""
    return lambda place: workload(place, lambda found: said(found, type)[0] == status)


async def prepare(place: Place) -> None:
    """Kueue's kinds, and a flavor."""
    await install(place.client, "v1beta2")
    await flavor(place, FLAVOR)


def test_a_preempted_job_stops_gives_its_quota_back_and_runs_again(job: Job) -> None:
    as_kueue(job, prepare)
    job.apply(replicas=2, nproc=1)
    job.wait("Suspended")
    as_kueue(job, lambda place: admit(place, FLAVOR))
    first = job.started(0, size=2)
    job.wait("Running")
    as_kueue(job, has("PodsReady", "True"))

    as_kueue(job, lambda place: evict(place, "Preempted", "to make room"))
    given = as_kueue(job, has("QuotaReserved", "False"))
    # A job that gets the quota now finds the machines free.
    assert not any(is_alive(worker.pid) for worker in first.values())
    assert said(given, "Requeued") == ("True", "Preempted")
    assert job.cluster.get("incidents")["items"] == []

    (job.folder / "diary").unlink()
    as_kueue(job, lambda place: admit(place, FLAVOR))
    again = job.started(0, size=2)
    assert {worker.pid for worker in again.values()}.isdisjoint(w.pid for w in first.values())
    job.finish()
    job.wait("Completed")
    ended = as_kueue(job, has("Finished", "True"))
    assert said(ended, "Finished") == ("True", "Succeeded")
