"""`hyp list` and `hyp describe`, for jobs in every state that our operator writes.

One key that the client does not know, in one job, makes `hyp list` fail for the whole namespace.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.apiclient import Api
from tests.apiservers import embedded_cluster
from tests.clients.hyp_program import Hyp, NotInstalledError, installed
from tests.samples import define
from unbroken.core.job.record.conditions import advance
from unbroken.spec.job.codec import job_status_to
from unbroken.spec.job.types import Condition, FaultyPods, JobStatus, RestartStatus
from unbroken.spec.keys import ConditionType
from unbroken.spec.schema.crd import job_definition

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

JOBS = "sagemaker.amazonaws.com/v1:hyperpodpytorchjobs"
T0 = 1795244800.0
LIVES = {
    "fresh": (),
    "created": (ConditionType.CREATED,),
    "starting": (ConditionType.CREATED, ConditionType.PODS_RUNNING),
    "running": (ConditionType.CREATED, ConditionType.PODS_RUNNING, ConditionType.RUNNING),
    "faulted": (
        ConditionType.CREATED,
        ConditionType.PODS_RUNNING,
        ConditionType.RUNNING,
        ConditionType.FAULTED,
    ),
    "recovered": (
        *(ConditionType.CREATED, ConditionType.PODS_RUNNING, ConditionType.RUNNING),
        *(ConditionType.FAULTED, ConditionType.RUNNING),
    ),
    "suspended": (ConditionType.CREATED, ConditionType.PODS_RUNNING, ConditionType.SUSPENDED),
    "resumed": (
        ConditionType.CREATED,
        ConditionType.RUNNING,
        ConditionType.SUSPENDED,
        ConditionType.CREATED,
    ),
    "completed": (
        ConditionType.CREATED,
        ConditionType.PODS_RUNNING,
        ConditionType.RUNNING,
        ConditionType.COMPLETED,
    ),
    "failed": (ConditionType.CREATED, ConditionType.FAULTED, ConditionType.FAILED),
}
"""Conditions that each job has had, in order."""
REFERENCE = {"apiVersion": "v1", "kind": "Pod", "name": "p", "namespace": "default", "uid": "u"}
POD_SET = {"count": 2, "name": "main", "template": {"spec": {"containers": []}}}
OTHERS = {
    "managerPods": REFERENCE,
    "podManagerStatuses": [REFERENCE],
    "podSetInfos": [{"annotations": {"a": "b"}, "nodeSelector": {"c": "d"}}],
    "podSets": [POD_SET],
    "elasticScalingStatus": {"targetReplicas": {"pods": 2}, "podsScaled": True},
    "elasticWorkloadRef": {"name": "w"},
}


def conditions(standings: tuple[ConditionType, ...]) -> tuple[Condition, ...]:
    """Return the conditions that the operator has written by the last of them."""
    found: tuple[Condition, ...] = ()
    for number, standing in enumerate(standings):
        found = advance(found, standing, standing.value, "as it is", T0 + 60 * number)
    return found


def full_status() -> JobStatus:
    """Return a status with nothing left out."""
    return JobStatus(
        start_time=T0,
        completion_time=T0 + 3600.0,
        conditions=conditions(LIVES["completed"]),
        restart_count=7,
        restart_status=RestartStatus(2, 1, 3),
        master_addr="127.0.0.1",
        master_port="29400",
        job_pods=(REFERENCE,),
        latest_faulty=FaultyPods("PLR", ("node-1",), ("job-pods-0",), ("0", "1")),
        other=OTHERS,
    )


@pytest.fixture
def hyp(tmp_path: Path) -> Iterator[Hyp]:
    """Provide the client on a local API server with one job of each life.

    Our codec writes the jobs.
    """
    try:
        program = installed()
    except NotInstalledError as error:
        pytest.skip(str(error))
    statuses = {name: JobStatus(conditions=conditions(life)) for name, life in LIVES.items()}
    # A server of its own: the client lists every job of the namespace.
    with embedded_cluster(tmp_path / "server") as cluster, closing(Api(cluster)) as api:
        define(api, job_definition())
        for name, status in {**statuses, "full": full_status()}.items():
            write_job(api.within("default"), name, status)
        yield Hyp(program, cluster.kubeconfig, tmp_path)


def write_job(api: Api, name: str, status: JobStatus) -> None:
    """Write a job as the operator leaves it."""
    container = {"name": "train", "image": "any", "command": ["hyperpodrun", "train.py"]}
    replica = {"name": "pods", "replicas": 2, "template": {"spec": {"containers": [container]}}}
    job = {
        "apiVersion": "sagemaker.amazonaws.com/v1",
        "kind": "HyperPodPyTorchJob",
        "metadata": {"name": name},
        "spec": {"nprocPerNode": "2", "replicaSpecs": [replica]},
    }
    api.post(JOBS, job).done()
    written = job_status_to(status)
    api.patch("merge", f"{JOBS}/{name}/status", {"status": written}).done()
    assert api.get(f"{JOBS}/{name}").made.get("status", {}) == written


def test_every_state_is_listed_and_described(hyp: Hyp) -> None:
    shown = {
        name: standings[-1].value if standings else "Unknown" for name, standings in LIVES.items()
    }
    assert hyp.states() == {**shown, "full": "Completed"}
    described = hyp("describe", "--job-name", "full")
    for text in ("Created", "PodsRunning", "Completed", "as it is"):
        assert text in described
