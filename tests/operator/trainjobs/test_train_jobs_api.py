"""TrainJobs of the runtime `unbroken-torch` with the controllers of Trainer and JobSet, on both API
servers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.operator.conftest import Place
from tests.operator.pytorchjobs import add_node
from tests.operator.resume.jobset_standin import install, is_suspended, is_true
from tests.operator.trainjobs.trainer_standin import (
    RUNTIMES,
    RuntimeControllers,
    apply_runtime,
    exit_code,
)
from tests.train_jobs import RUNTIME, patch
from tests.train_jobs import train_job as new_train_job
from tests.watching import running
from unbroken.kube.events import EventRecorder
from unbroken.kube.informer import Informer
from unbroken.operator import definitions
from unbroken.operator.kinds import JobObject
from unbroken.operator.trainjobs import run_train_jobs
from unbroken.spec.job_kinds import TRAIN_RUNTIME
from unbroken.spec.keys import RESULT, RESULT_LABEL

Object = dict[str, Any]
Open = Callable[[], Any]
JOB = "hyperpodpytorchjobs/lm"
DONE = {"type": "Completed", "status": "True", "reason": "R", "message": "all ranks have ended"}
BROKE = {"type": "Failed", "status": "True", "reason": "R", "message": "rank 1: exit code 3"}


def train_job(**spec: Any) -> Object:
    """Return a TrainJob that the API can create."""
    made = new_train_job(**spec)
    del made["metadata"]["uid"], made["metadata"]["namespace"]
    return made


@asynccontextmanager
async def operators(place: Place) -> AsyncIterator[None]:
    """The part of the operator that runs TrainJobs, for this namespace; nothing runs its jobs."""
    recorder = EventRecorder(place.client, "test")
    jobs = Informer(place.client, JobObject, namespace=place.namespace)
    work = run_train_jobs(place.client, recorder, jobs, place.namespace)
    async with running(recorder.run(), jobs.run(), work):
        yield


@asynccontextmanager
async def trainer(place: Place, folder: Path) -> AsyncIterator[RuntimeControllers]:
    """The definitions, the runtime, two nodes and the controllers of others."""
    await definitions.install(place.client)
    await install(place.client)
    await apply_runtime(place.client)
    names = [f"{place.namespace}-n{index}" for index in range(2)]
    for name in names:
        await add_node(place, name)
    controllers = RuntimeControllers(place, names, folder)
    async with running(controllers.run()):
        yield controllers


async def end(place: Place, condition: Object) -> None:
    """End the HyperPodPyTorchJob as its operator does."""
    told = {**condition, "lastTransitionTime": "2026-01-01T00:00:00Z"}
    await place.merge(f"{JOB}/status", {"status": {"conditions": [told]}})


def result_pods(listed: Object) -> list[Object]:
    """Return the pods that wait for a result, or have it, and are not being deleted."""
    return [
        pod
        for pod in listed["items"]
        if RESULT_LABEL in pod["metadata"]["labels"] and "deletionTimestamp" not in pod["metadata"]
    ]


def one_runs(listed: Object) -> bool:
    """Return whether one result pod runs."""
    return [pod["status"].get("phase") for pod in result_pods(listed)] == ["Running"]


async def test_a_train_job_is_complete_when_its_job_is(place: Open, tmp_path: Path) -> None:
    async with place() as here, trainer(here, tmp_path), operators(here):
        train = await here.post("trainjobs", train_job())
        job = await here.until(JOB, bool)
        assert job["spec"]["replicaSpecs"][0]["replicas"] == 2
        (owner,) = job["metadata"]["ownerReferences"]
        assert owner["uid"] == train["metadata"]["uid"]
        listed = await here.until("pods", one_runs)
        assert result_pods(listed) == listed["items"], "a Job made pods that train"
        created = await here.event("TrainJobCreated")
        assert created["involvedObject"]["uid"] == train["metadata"]["uid"]
        assert not is_true(await here.until("trainjobs/lm", bool), "Complete")

        await end(here, DONE)
        found = await here.until("trainjobs/lm", lambda one: is_true(one, "Complete"))
        assert not is_true(found, "Failed")
        jobs = await here.get("jobs")
        assert jobs is not None
        assert [one["metadata"]["name"] for one in jobs["items"]] == ["lm-result-0"]


async def test_a_train_job_fails_with_the_reason_of_its_job(place: Open, tmp_path: Path) -> None:
    async with place() as here, trainer(here, tmp_path), operators(here):
        await here.post("trainjobs", train_job())
        await here.until("pods", one_runs)
        await here.until(JOB, bool)
        await end(here, BROKE)
        await here.until("trainjobs/lm", lambda one: is_true(one, "Failed"))
        listed = await here.get("pods")
        assert listed is not None
        (pod,) = result_pods(listed)
        assert pod["metadata"]["annotations"][RESULT] == "Failed: rank 1: exit code 3"


async def test_a_result_reaches_the_pod_that_replaces_a_lost_one(
    place: Open, tmp_path: Path
) -> None:
    async with place() as here, trainer(here, tmp_path):
        async with operators(here):
            await here.post("trainjobs", train_job())
            (lost,) = result_pods(await here.until("pods", one_runs))
            await here.until(JOB, bool)
        # Nobody writes the result before the pod is gone.
        await end(here, DONE)
        await here.delete(f"pods/{lost['metadata']['name']}")
        await here.absent(f"pods/{lost['metadata']['name']}")
        assert not is_true(await here.until("trainjobs/lm", bool), "Failed")
        async with operators(here):
            await here.until("trainjobs/lm", lambda one: is_true(one, "Complete"))


async def test_a_job_is_suspended_and_resumed_with_its_train_job(
    place: Open, tmp_path: Path
) -> None:
    def is_held(job: Object) -> bool:
        return bool(job["spec"]["runPolicy"]["suspend"])

    async with place() as here, trainer(here, tmp_path), operators(here):
        await here.post("trainjobs", train_job(suspend=True))
        await here.until(JOB, is_held)
        patches = [patch({"nodeSelector": {"pool": "b"}})]
        await here.merge("trainjobs/lm", {"spec": {"suspend": False, "runtimePatches": patches}})
        job = await here.until(JOB, lambda one: not is_held(one))
        template = job["spec"]["replicaSpecs"][0]["template"]
        assert template["spec"]["nodeSelector"] == {"pool": "b"}
        await here.until("pods", one_runs)
        await here.merge("trainjobs/lm", {"spec": {"suspend": True}})
        await here.until(JOB, is_held)
        await here.until("jobsets/lm", is_suspended)
        await here.until("pods", lambda listed: not listed["items"])


async def test_a_train_job_that_cannot_be_followed_fails_and_names_the_field(
    place: Open, tmp_path: Path
) -> None:
    async with place() as here, trainer(here, tmp_path), operators(here):
        await here.post("trainjobs", train_job(initializer={"dataset": {"storageUri": "hf://a/b"}}))
        await here.post("trainjobs", {**train_job(name="good")})
        await here.until("trainjobs/lm", lambda one: is_true(one, "Failed"))
        refused = await here.event("TrainJobRefused")
        assert "spec.initializer" in refused["message"]
        assert await here.get(JOB) is None
        await here.until("hyperpodpytorchjobs/good", bool)


async def test_train_jobs_of_wrong_types_affect_only_themselves(place: Open) -> None:
    """These definitions have no schema of the spec: the operator sees what it may hold."""
    reference = {"name": TRAIN_RUNTIME}
    deep, deeper = nested(30), nested(100)
    wrong = [
        {"runtimeRef": reference, "trainer": [1, {}]},
        {"runtimeRef": reference, "trainer": {"numNodes": -1, "command": "x", "env": "y"}},
        {"runtimeRef": reference, "suspend": "yes", "runtimePatches": {"a": 1}},
        {"runtimeRef": reference, "runtimePatches": [patch(deep), 1, None]},
        {"runtimeRef": reference, "trainer": {"image": "x" * 500_000}},
        {"runtimeRef": [reference]},
        # The informer refuses it, with an event of its own.
        {"runtimeRef": reference, "runtimePatches": [patch(deeper)]},
    ]
    async with place() as here:
        await definitions.install(here.client)
        await install(here.client)
        await apply_runtime(here.client)
        for number, spec in enumerate(wrong):
            made = train_job(name=f"bad-{number}")
            await here.post("trainjobs", {**made, "spec": spec})
        async with operators(here):
            await here.post("trainjobs", train_job())
            await here.until(JOB, bool)
            told = await here.until("events", lambda one: refused(one) >= set(range(5)))
            assert refused(told) == set(range(5))
            listed = await here.until("hyperpodpytorchjobs", bool)
            assert [one["metadata"]["name"] for one in listed["items"]] == ["lm"]


def nested(levels: int) -> Object:
    """Return an object of many levels."""
    found: Object = {}
    for _ in range(levels):
        found = {"a": found}
    return found


def refused(listed: Object) -> set[int]:
    """Return the numbers of the TrainJobs `bad-N` that were refused, from listed events."""
    names = {
        one["involvedObject"]["name"]
        for one in listed["items"]
        if one["reason"] == "TrainJobRefused"
    }
    return {int(name.removeprefix("bad-")) for name in names}


async def test_a_job_of_the_same_name_is_left_alone_until_it_is_deleted(
    place: Open, tmp_path: Path
) -> None:
    async with place() as here, trainer(here, tmp_path), operators(here):
        container = {"name": "main", "image": "any", "command": ["hyperpodrun", "train.py"]}
        replica = {"name": "pods", "replicas": 1, "template": {"spec": {"containers": [container]}}}
        head = {"apiVersion": "sagemaker.amazonaws.com/v1", "kind": "HyperPodPyTorchJob"}
        own = {**head, "metadata": {"name": "lm"}, "spec": {"replicaSpecs": [replica]}}
        await here.post("hyperpodpytorchjobs", own)
        await here.post("trainjobs", train_job())
        await here.event("TrainJobNameTaken")
        found = await here.until(JOB, bool)
        assert found["spec"]["replicaSpecs"][0]["name"] == "pods"
        await here.delete(JOB)
        await here.until(JOB, lambda one: one["spec"]["replicaSpecs"][0]["name"] == "node")


async def test_a_train_job_waits_for_its_runtime(place: Open, tmp_path: Path) -> None:
    async with place() as here, trainer(here, tmp_path), operators(here):
        await here.client.raw("DELETE", f"{RUNTIMES}/{TRAIN_RUNTIME}")
        await here.post("trainjobs", train_job())
        await here.event("TrainJobWaits")
        assert await here.get(JOB) is None
        await apply_runtime(here.client, RUNTIME)
        await here.until(JOB, bool)


async def test_the_pods_of_a_train_job_past_its_deadline_are_stopped(
    place: Open, tmp_path: Path
) -> None:
    async with place() as here, trainer(here, tmp_path), operators(here):
        await here.post("trainjobs", train_job())
        await here.until(JOB, bool)
        late = {"type": "Failed", "status": "True", "reason": "DeadlineExceeded", "message": "late"}
        late["lastTransitionTime"] = "2026-01-01T00:00:00Z"
        await here.merge("trainjobs/lm/status", {"status": {"conditions": [late]}})
        await here.until(JOB, lambda one: one["spec"]["runPolicy"]["suspend"])
        await here.event("TrainJobStopped")


@pytest.mark.parametrize(
    ("result", "code"), [("Completed", 0), ("Failed: 'x' $HOME `id` \\n", 1), ("Failed", 1)]
)
def test_the_program_of_a_result_pod_ends_with_the_result(
    tmp_path: Path, result: str, code: int
) -> None:
    (job, _) = RUNTIME["spec"]["template"]["spec"]["replicatedJobs"]
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    assert exit_code(container, tmp_path, result) == code
