"""Auto-resume of TrainJobs and JobSets with their controllers, on both API servers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.operator.conftest import Place
from tests.operator.pytorchjobs import BOTH, add_node, say_ready
from tests.operator.resume.faults import UNHEALTHY, annotations, node
from tests.operator.resume.jobset_standin import (
    Controllers,
    install,
    is_suspended,
    is_true,
    job_set,
    owned,
    train_job,
)
from tests.watching import running
from unbroken.kube.events import EventRecorder
from unbroken.operator.resume.controller import run_auto_resume
from unbroken.operator.resume.jobs import ResumeOptions
from unbroken.spec.job_kinds import JOB_SET, TRAIN_JOB, TRAIN_RUNTIME
from unbroken.spec.keys import (
    AUTO_RESUME,
    FENCE,
    MAX_RETRIES,
    QUEUE,
    RESUME_COUNT,
    RESUME_EXHAUSTED,
    RESUME_FAULT,
    RESUME_SUSPENDED,
)

Object = dict[str, Any]
Open = Callable[[], Any]
OUT_OF_SERVICE = {"key": "node.kubernetes.io/out-of-service", "value": "x", "effect": "NoExecute"}


@asynccontextmanager
async def resumers(place: Place) -> AsyncIterator[None]:
    """The program, for TrainJobs and JobSets of this namespace."""
    recorder = EventRecorder(place.client, "test")
    kinds = [
        run_auto_resume(place.client, None, recorder, kind, ResumeOptions(place.namespace))
        for kind in (TRAIN_JOB, JOB_SET)
    ]
    async with running(recorder.run(), *kinds):
        yield


async def prepared(place: Place, **options: Any) -> Controllers:
    """The kinds, four nodes, and controllers that do not run yet."""
    await install(place.client)
    names = [node(place, index) for index in range(4)]
    for name in names:
        await add_node(place, name)
    return Controllers(place, names, **options)


def run_on(count: int) -> Callable[[Object], bool]:
    """Return a predicate of a list of pods: so many run and no other is there."""

    def holds(listed: Object) -> bool:
        pods = listed["items"]
        phases = [pod["status"].get("phase") for pod in pods]
        is_staying = all("deletionTimestamp" not in pod["metadata"] for pod in pods)
        return phases == ["Running"] * count and is_staying

    return holds


def uids(listed: Object) -> set[str]:
    """Return the uids of listed objects."""
    return {one["metadata"]["uid"] for one in listed["items"]}


def is_resumed(found: Object) -> bool:
    """True if a job was restarted, and its suspension is over."""
    return RESUME_COUNT in annotations(found) and not is_suspended(found)


async def events(place: Place, reason: str) -> list[Object]:
    """Return the events of a reason, once there is one."""

    def found(listed: Object) -> list[Object]:
        return [one for one in listed["items"] if one["reason"] == reason]

    return found(await place.until("events", found))


async def failures(place: Place) -> int:
    """Return the failed pods that Jobs have counted."""
    listed = await place.get("jobs")
    assert listed is not None
    return sum((one.get("status") or {}).get("failed", 0) for one in listed["items"])


async def test_all_pods_of_a_trainjob_are_replaced_and_none_counts_as_failed(place: Open) -> None:
    async with place() as here:
        controllers = await prepared(here, backoff_limit=0)
        async with running(controllers.run()), resumers(here):
            job = await here.post("trainjobs", train_job(annotations=BOTH))
            before = uids(await here.until("pods", run_on(2)))
            controllers.alive.append(controllers.alive.pop(0))
            await here.merge(f"nodes/{node(here, 0)}", UNHEALTHY)
            found = await here.until("trainjobs/lm", is_resumed)
            assert annotations(found)[RESUME_COUNT] == "1"
            assert RESUME_SUSPENDED not in annotations(found)
            after = await here.until("pods", run_on(2))
            assert not before & uids(after)
            assert node(here, 0) not in {pod["spec"]["nodeName"] for pod in after["items"]}
        # No new pod existed at the same time as an old one.
        assert not [uid for uid, there in controllers.made if uid not in before and before & there]
        assert await failures(here) == 0
        (said,) = await events(here, "TrainJobRestarting")
        assert said["involvedObject"]["uid"] == job["metadata"]["uid"]
        assert f"node {node(here, 0)} is unhealthy" in said["message"]
        below = await here.get("jobsets/lm")
        assert below is not None
        assert RESUME_COUNT not in annotations(below), "the JobSet was restarted once more"


async def test_a_train_job_that_restarts_by_itself_is_not_resumed(place: Open) -> None:
    """A TrainJob beside it, which loses its node at the same time, is."""
    async with place() as here:
        controllers = await prepared(here, backoff_limit=9)
        async with running(controllers.run()), resumers(here):
            ours = train_job(annotations=BOTH, name="ours")
            ours["spec"]["runtimeRef"]["name"] = TRAIN_RUNTIME
            for job in (ours, train_job(annotations=BOTH)):
                await here.post("trainjobs", job)
            await here.until("pods", run_on(4))
            for index in range(4):
                await here.merge(f"nodes/{node(here, index)}", UNHEALTHY)
            await here.until("trainjobs/lm", lambda one: RESUME_COUNT in annotations(one))
            found = await here.until("trainjobs/ours", bool)
            assert RESUME_COUNT not in annotations(found)
            assert not is_suspended(found)


async def test_a_suspended_job_waits_for_the_fence_of_a_silent_node(place: Open) -> None:
    async with place() as here:
        controllers = await prepared(here)
        silent = node(here, 1)
        async with running(controllers.run()):
            await here.post("trainjobs", train_job(annotations=BOTH))
            before = uids(await here.until("pods", run_on(2)))
            async with resumers(here):
                controllers.alive.remove(silent)
                await say_ready(here, silent, "Unknown")
                asked = await here.until(f"nodes/{silent}", lambda one: FENCE in annotations(one))
                assert "TrainJob lm" in annotations(asked)[FENCE]
                # One pod has ended, the other might still train.
                await here.until("pods", lambda listed: len(listed["items"]) == 1)
            held = await here.get("trainjobs/lm")
            assert held is not None
            assert is_suspended(held)
            # The program was killed; another one starts after the fence.
            await here.merge(f"nodes/{silent}", {"spec": {"taints": [OUT_OF_SERVICE]}})
            async with resumers(here):
                found = await here.until("trainjobs/lm", is_resumed)
                after = await here.until("pods", run_on(2))
        assert annotations(found)[RESUME_COUNT] == "1"
        assert not before & uids(after)
        assert not [uid for uid, there in controllers.made if uid not in before and before & there]
        assert await failures(here) == 0


async def test_a_suspension_that_the_controllers_find_late_ends_as_well(place: Open) -> None:
    async with place() as here:
        controllers = await prepared(here)
        async with resumers(here):
            async with running(controllers.run()):
                await here.post("jobsets", job_set(2, 0, annotations=BOTH))
                before = uids(await here.until("pods", run_on(2)))
            # They are all down when the node goes.
            controllers.alive.remove(node(here, 1))
            await here.delete(f"nodes/{node(here, 1)}")
            found = await here.until("jobsets/lm", is_suspended)
            assert "is gone" in annotations(found)[RESUME_FAULT]
            assert uids(await here.until("pods", run_on(2))) == before, "pods were deleted by us"
            async with running(controllers.run()):
                await here.until("jobsets/lm", is_resumed)
                after = await here.until("pods", run_on(2))
        assert not before & uids(after)
        assert await failures(here) == 0
        (said,) = await events(here, "JobSetRestarting")
        assert "restart 1 of at most 1" in said["message"]


async def test_a_pod_that_its_job_has_replaced_alone_restarts_the_others_too(place: Open) -> None:
    async with place() as here:
        controllers = await prepared(here, backoff_limit=6)
        async with running(controllers.run()), resumers(here):
            await here.post("trainjobs", train_job(annotations=BOTH))
            listed = await here.until("pods", run_on(2))
            before, victim = uids(listed), listed["items"][0]["metadata"]["name"]
            evicted = {"status": {"phase": "Failed", "reason": "Evicted"}}
            await here.merge(f"pods/{victim}/status", evicted)
            found = await here.until("trainjobs/lm", is_resumed)
            assert f"pod {victim} failed (Evicted)" in annotations(found)[RESUME_FAULT]
            running_now = await here.until(
                "pods",
                lambda listed: (
                    sum(pod["status"].get("phase") == "Running" for pod in listed["items"]) == 2
                ),
            )
            ran = {
                one["metadata"]["uid"]
                for one in running_now["items"]
                if one["status"]["phase"] == "Running"
            }
            assert not before & ran
        assert await failures(here) == 1, "the evicted pod, which its Job has counted"
        assert annotations(found)[RESUME_COUNT] == "1"


async def test_a_job_that_has_failed_before_its_restart_is_said_to_be_too_late(place: Open) -> None:
    async with place() as here:
        controllers = await prepared(here, backoff_limit=0)
        async with running(controllers.run()), resumers(here):
            await here.post("trainjobs", train_job(annotations=BOTH))
            listed = await here.until("pods", run_on(2))
            victim = listed["items"][0]["metadata"]["name"]
            evicted = {"status": {"phase": "Failed", "reason": "Evicted"}}
            await here.merge(f"pods/{victim}/status", evicted)
            await here.until("trainjobs/lm", lambda one: is_true(one, "Failed"))
            (said,) = await events(here, "AutoResumeTooLate")
            assert "backoffLimit" in said["message"]
            assert victim in said["message"]
            found = await here.until(
                "trainjobs/lm", lambda one: RESUME_EXHAUSTED in annotations(one)
            )
        assert RESUME_COUNT not in annotations(found) or annotations(found)[RESUME_COUNT] == "0"
        assert not is_suspended(found)


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"annotations": BOTH, "labels": {QUEUE: "team-a"}}, "Kueue"),
        ({"annotations": {AUTO_RESUME: "true"}}, MAX_RETRIES),
    ],
    ids=["a queue", "half of the annotations"],
)
async def test_a_jobset_that_cannot_be_resumed_says_why(
    place: Open, metadata: Object, said: str
) -> None:
    async with place() as here:
        controllers = await prepared(here)
        async with running(controllers.run()), resumers(here):
            await here.post("jobsets", job_set(2, 0, **metadata))
            await here.until("pods", run_on(2))
            (told,) = await events(here, "AutoResumeInvalid")
            assert said in told["message"]


async def test_a_jobset_of_a_trainjob_is_told_whose_annotations_count(place: Open) -> None:
    async with place() as here:
        await prepared(here)
        async with resumers(here):
            above = await here.post("trainjobs", train_job())
            await here.post(
                "jobsets", job_set(2, 0, annotations=BOTH, ownerReferences=owned(above))
            )
            (told,) = await events(here, "AutoResumeInvalid")
            assert "only the annotations of that TrainJob count" in told["message"]
