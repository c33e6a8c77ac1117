"""The controller of PyTorchJobs against both API servers; the test acts as the nodes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from tests.operator.conftest import Place, conditions
from tests.operator.pytorchjobs import pytorchjob
from tests.watching import running
from unbroken.kube.informer import Informers
from unbroken.local.kubeflow import run_pytorchjobs

Object = dict[str, Any]
Open = Callable[[], Any]


@asynccontextmanager
async def controller(place: Place) -> AsyncIterator[None]:
    """Run the controller for every namespace."""
    informers = Informers(place.client)
    async with running(informers.run(), run_pytorchjobs(place.client, informers)):
        await place.until("pytorchjobs", lambda _: True)
        yield


async def say_phase(place: Place, name: str, phase: str) -> None:
    """Set the phase of a pod, as a node does."""
    await place.client.merge(place.path(f"pods/{name}/status"), {"status": {"phase": phase}})


def count(number: int) -> Callable[[Object], bool]:
    """Return a check that a list has `number` items."""
    return lambda listed: len(listed["items"]) == number


def names(listed: Object) -> list[str]:
    """Return the names in a list."""
    return sorted(one["metadata"]["name"] for one in listed["items"])


async def test_a_job_is_run_to_its_end(place: Open) -> None:
    async with place() as here, controller(here):
        made = await here.post("pytorchjobs", pytorchjob())
        pods = await here.until("pods", count(2))
        assert names(pods) == ["lm-worker-0", "lm-worker-1"]
        assert names(await here.until("services", count(2))) == names(pods)
        for pod in pods["items"]:
            (owner,) = pod["metadata"]["ownerReferences"]
            assert owner["uid"] == made["metadata"]["uid"]
            await say_phase(here, pod["metadata"]["name"], "Running")
        await here.until("pytorchjobs/lm", lambda one: "Running" in conditions(one))
        for name in names(pods):
            await say_phase(here, name, "Succeeded")
        done = await here.until("pytorchjobs/lm", lambda one: "Succeeded" in conditions(one))
        assert done["status"]["completionTime"]
        assert done["status"]["replicaStatuses"]["Worker"]["succeeded"] == 2
        assert "active" not in done["status"]["replicaStatuses"]["Worker"]


async def test_a_program_that_is_started_again_doubles_nothing(place: Open) -> None:
    async with place() as here:
        async with controller(here):
            await here.post("pytorchjobs", pytorchjob())
            before = await here.until("pods", count(2))
        await here.delete("pods/lm-worker-1", gracePeriodSeconds=0)
        async with controller(here):
            await here.until("pods/lm-worker-1", lambda _: True)
            after = await here.until("pods", count(2))
        uids = [{p["metadata"]["uid"] for p in listed["items"]} for listed in (before, after)]
        assert len(uids[0] & uids[1]) == 1


async def test_the_name_of_a_strangers_pod_is_waited_for(place: Open) -> None:
    async with place() as here, controller(here):
        container = {"name": "main", "image": "any"}
        stranger = {"metadata": {"name": "lm-worker-0"}, "spec": {"containers": [container]}}
        made = await here.post("pods", stranger)
        await here.post("pytorchjobs", pytorchjob())
        await here.until("pods", count(2))
        kept = await here.get("pods/lm-worker-0")
        assert kept is not None
        assert kept["metadata"]["uid"] == made["metadata"]["uid"]
        await here.delete("pods/lm-worker-0", gracePeriodSeconds=0)
        await here.until("pods/lm-worker-0", lambda one: one["metadata"].get("ownerReferences"))
