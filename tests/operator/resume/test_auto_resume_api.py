"""Auto-resume against both API servers; the test acts as the nodes and as the pods' creator."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from tests.operator.conftest import Place
from tests.operator.pytorchjobs import (
    BOTH,
    DEFINITIONS,
    add_node,
    add_pod,
    install,
    pytorchjob,
    say_ready,
)
from tests.operator.resume.faults import UNHEALTHY, annotations, is_leaving, kubelet_ends, node
from tests.watching import running
from unbroken.kube.events import EventRecorder
from unbroken.kube.informer import Informers
from unbroken.operator.fences import AWAITED
from unbroken.operator.resume.controller import run_auto_resume
from unbroken.operator.resume.jobs import ResumeOptions
from unbroken.spec.job_kinds import PYTORCHJOB, JobKind
from unbroken.spec.keys import (
    AUTO_RESUME,
    FENCES,
    RESUME_COUNT,
    RESUME_EXHAUSTED,
    RESUME_FAULT,
    RESUME_PODS,
)

Object = dict[str, Any]
Open = Callable[[], Any]
FENCE = "unbroken.dev/fence"
OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"

FIT_JOB = JobKind("fit.example", "v1", "FitJob", "fitjobs", "fit.example/job")
"""A kind that is known only from the registry."""
FIT_SCHEMA = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
FIT_VERSION = {
    **{"name": "v1", "served": True, "storage": True},
    "schema": {"openAPIV3Schema": FIT_SCHEMA},
}
FIT_DEFINITION = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": FIT_JOB.resource},
    "spec": {
        "group": FIT_JOB.group,
        "names": {"kind": FIT_JOB.name, "plural": FIT_JOB.plural, "singular": "fitjob"},
        "scope": "Namespaced",
        "versions": [FIT_VERSION],
    },
}


@asynccontextmanager
async def resumer(
    place: Place, kind: JobKind = PYTORCHJOB, dead_seconds: float = 0.0
) -> AsyncIterator[None]:
    """Run auto-resume for this namespace's jobs of a kind."""
    recorder = EventRecorder(place.client, "test")
    options = ResumeOptions(place.namespace, dead_seconds=dead_seconds)
    work = run_auto_resume(place.client, None, recorder, kind, options)
    async with running(recorder.run(), work):
        yield


async def job_of_two(place: Place) -> Object:
    """Create a job with a pod on each of two nodes."""
    await install(place.client)
    await place.until("pytorchjobs", lambda _: True)
    job: Object = await place.post("pytorchjobs", pytorchjob())
    for index in range(2):
        await add_node(place, node(place, index))
        await add_pod(place, job, index, node(place, index))
    return job


async def test_an_unhealthy_node_restarts_all_pods_once(place: Open) -> None:
    async with place() as here:
        job = await job_of_two(here)
        async with resumer(here):
            await here.merge(f"nodes/{node(here, 1)}", UNHEALTHY)
            found = await here.until("pytorchjobs/lm", lambda one: RESUME_COUNT in annotations(one))
            assert annotations(found)[RESUME_COUNT] == "1"
            assert "UnschedulablePendingReboot" in annotations(found)[RESUME_FAULT]
            for index in range(2):
                await here.until(f"pods/lm-worker-{index}", is_leaving)
            said = await here.event("PyTorchJobRestarting")
            assert said["involvedObject"]["uid"] == job["metadata"]["uid"]
            assert f"node {node(here, 1)} is unhealthy" in said["message"]
            assert "restart 1 of at most 1" in said["message"]
            for index in range(2):
                await kubelet_ends(here, f"lm-worker-{index}")

            # It takes pods all the same, and nothing is gained by moving them again.
            await add_pod(here, job, 1, node(here, 1))
            await here.event("AutoResumeWaiting")

            # The next fault finds no retry left.
            made = await add_pod(here, job, 0, node(here, 0))
            await here.merge(f"nodes/{node(here, 0)}", UNHEALTHY)
            await here.until("pytorchjobs/lm", lambda one: RESUME_EXHAUSTED in annotations(one))
            assert "not restarted" in (await here.event("AutoResumeExhausted"))["message"]
            kept = await here.get("pods/lm-worker-0")
            assert kept is not None
            assert kept["metadata"]["uid"] == made["metadata"]["uid"]
            assert not is_leaving(kept)


async def test_a_pod_of_a_silent_node_is_forced_out_only_after_the_fence(place: Open) -> None:
    async with place() as here:
        await job_of_two(here)
        silent = f"nodes/{node(here, 1)}"
        async with resumer(here):
            await say_ready(here, node(here, 1), "Unknown")
            found = await here.until(silent, lambda one: FENCE in annotations(one))
            assert "lm-worker-1" in annotations(found)[FENCE]
            healthy = await here.get(f"nodes/{node(here, 0)}")
            assert healthy is not None
            assert FENCE not in annotations(healthy)
            await here.until("pods/lm-worker-1", is_leaving)
            await kubelet_ends(here, "lm-worker-0")
        # The program was killed here; it is started again after the fence.
        assert await here.get("pods/lm-worker-1") is not None
        taint = {"key": OUT_OF_SERVICE, "value": "nodeshutdown", "effect": "NoExecute"}
        await here.merge(silent, {"spec": {"taints": [taint]}})
        async with resumer(here):
            await here.absent("pods/lm-worker-1")
        last = await here.get("pytorchjobs/lm")
        assert last is not None
        assert annotations(last)[RESUME_COUNT] == "1"
        assert len(annotations(last)[RESUME_PODS].split()) == 2


async def test_a_silent_node_of_a_cluster_that_fences_elsewhere_counts_as_dead(
    place: Open,
) -> None:
    async with place() as here:
        await job_of_two(here)
        async with resumer(here, dead_seconds=60.0):
            await say_ready(here, node(here, 1), "Unknown")
            await here.absent("pods/lm-worker-1")
            kept = await here.get("pods/lm-worker-0")
            assert kept is not None, "its node is ready: its kubelet ends it"
            assert FENCE not in annotations(await here.get(f"nodes/{node(here, 1)}"))


async def test_a_fence_that_nobody_gives_is_told_on_the_job_with_what_frees_it(
    place: Open,
) -> None:
    async with place() as here:
        job = await job_of_two(here)
        asked = {FENCE: "pod of another", FENCES: "2026-01-31T12:00:00Z u7"}
        await here.merge(f"nodes/{node(here, 1)}", {"metadata": {"annotations": asked}})
        async with resumer(here):
            await say_ready(here, node(here, 1), "Unknown")
            said = await here.event(AWAITED)
            assert said["involvedObject"]["uid"] == job["metadata"]["uid"]
            assert "pod lm-worker-1 of PyTorchJob lm" in said["message"]
            assert f"kubectl taint node {node(here, 1)} {OUT_OF_SERVICE}" in said["message"]


async def test_a_node_that_is_gone_needs_no_fence(place: Open) -> None:
    async with place() as here:
        await job_of_two(here)
        async with resumer(here):
            await here.delete(f"nodes/{node(here, 1)}")
            await here.absent("pods/lm-worker-1")
            said = await here.event("PyTorchJobRestarting")
            assert f"node {node(here, 1)} is gone" in said["message"]


async def test_one_annotation_alone_is_said_to_be_wrong(place: Open) -> None:
    async with place() as here:
        await install(here.client)
        async with resumer(here):
            metadata = {"name": "lm", "annotations": {AUTO_RESUME: "true"}}
            await here.until("pytorchjobs", lambda _: True)
            await here.post("pytorchjobs", pytorchjob(metadata=metadata))
            said = await here.event("AutoResumeInvalid")
            assert "job-max-retry-count" in said["message"]


async def test_a_kind_that_is_installed_later_is_noticed(place: Open) -> None:
    async with place() as here:
        await install(here.client)
        await here.client.raw("DELETE", f"{DEFINITIONS}/pytorchjobs.kubeflow.org")
        await here.absent("pytorchjobs")
        informers = Informers(here.client)
        recorder = EventRecorder(here.client, "test")
        work = run_auto_resume(here.client, informers, recorder, PYTORCHJOB, ResumeOptions())
        async with running(informers.run(), recorder.run(), work):
            await job_of_two(here)
            await here.merge(f"nodes/{node(here, 0)}", UNHEALTHY)
            await here.until("pytorchjobs/lm", lambda one: RESUME_COUNT in annotations(one))


async def test_a_kind_is_resumed_by_what_the_registry_says_of_it(place: Open) -> None:
    async def job(here: Place, name: str, **spec: Any) -> None:
        """Create a job with a pod on the first node."""
        about = {"apiVersion": f"{FIT_JOB.group}/{FIT_JOB.version}", "kind": FIT_JOB.name}
        metadata = {"name": name, "annotations": BOTH}
        made = await here.post("fitjobs", {**about, "metadata": metadata, "spec": spec})
        owner = {**about, "name": name, "uid": made["metadata"]["uid"]}
        metadata = {"name": name, "labels": {FIT_JOB.pod_label: name}, "ownerReferences": [owner]}
        containers = [{"name": "fit", "image": "any"}]
        spec = {"nodeName": node(here, 0), "containers": containers}
        await here.post("pods", {"metadata": metadata, "spec": spec})

    async with place() as here:
        await here.client.raw("POST", DEFINITIONS, body=FIT_DEFINITION)
        await here.until("fitjobs", lambda _: True)
        await add_node(here, node(here, 0))
        await job(here, "held", suspend=True)
        await job(here, "lm")
        async with resumer(here, FIT_JOB):
            await here.merge(f"nodes/{node(here, 0)}", UNHEALTHY)
            said = await here.event("FitJobRestarting")
            assert said["message"].startswith("FitJob lm is restarting")
            await here.until("pods/lm", is_leaving)
        for name, count in (("lm", "1"), ("held", None)):
            found = await here.get(f"fitjobs/{name}")
            assert found is not None
            assert annotations(found).get(RESUME_COUNT) == count
        await here.client.raw("DELETE", f"{DEFINITIONS}/{FIT_JOB.resource}")
