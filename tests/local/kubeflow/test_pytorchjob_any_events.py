"""The built-in controller of PyTorchJobs against anything that pods may do, seen late or twice."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.local.kubeflow.drive_pytorchjob import Script, script
from unbroken.local.kubeflow.decisions import CreatePod, DeleteJob

POLICIES = ("OnFailure", "Always", "Never", "ExitCode")


def disturb(job: Script, random: Random) -> None:
    """Something becomes of a pod, or somebody deletes it, or it has left."""
    if not job.pods:
        return
    name = random.choice(sorted(job.pods))
    if job.pods[name].phase in ("Succeeded", "Failed"):
        return
    match random.randrange(6):
        case 0:
            job.change(name, phase="Failed", exit_code=random.choice((None, 1, 137)))
        case 1:
            job.change(name, phase="Succeeded")
        case 2:
            job.change(name, is_leaving=True)
        case 3:
            job.change(name, restarts=job.pods[name].restarts + 1)
        case _:
            job.change(name, phase="Running")


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 2**32),
    st.sampled_from(POLICIES),
    st.booleans(),
    st.sampled_from(({}, {"backoffLimit": 2}, {"cleanPodPolicy": "All"})),
)
def test_what_has_ended_stays_ended_and_makes_no_pod(
    seed: int, policy: str, has_master: bool, limits: dict[str, object]
) -> None:
    random = Random(seed)
    job = script(workers=2, master=has_master, policy=policy, runPolicy=limits)
    for _ in range(40):
        was_finished, before = job.status.is_finished, job.status
        found = job.look()
        if was_finished:
            counts = job.status.replica_statuses
            assert replace(job.status, replica_statuses=before.replica_statuses) == before
            for now, then in (
                (counts.master, before.replica_statuses.master),
                (counts.worker, before.replica_statuses.worker),
            ):
                if now is not None and then is not None:
                    assert now.active <= then.active
                    assert sum((now.active, now.succeeded, now.failed)) == sum(
                        (then.active, then.succeeded, then.failed)
                    )
            assert not any(isinstance(order, CreatePod | DeleteJob) for order in found.orders)
        types = [one.type for one in job.status.conditions]
        assert len(types) == len(set(types))
        assert not (job.status.has("Succeeded") and job.status.has("Failed"))
        disturb(job, random)
        if random.random() < 0.5:
            job.left()
        job.now += 1.0


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32), st.booleans())
def test_after_the_trouble_the_job_succeeds(seed: int, has_master: bool) -> None:
    random = Random(seed)
    job = script(workers=2, master=has_master, policy="OnFailure")
    for _ in range(20):
        job.look()
        disturb(job, random)
        job.left()
    for _ in range(4):
        job.look()
        job.left()
        for name, pod in job.pods.items():
            if pod.phase in ("Pending", "Running"):
                job.change(name, phase="Running")
    for name, pod in job.pods.items():
        if pod.phase == "Running":
            job.change(name, phase="Succeeded")
    job.look()
    assert job.status.has("Succeeded")
