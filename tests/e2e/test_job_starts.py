"""Jobs whose pods or workers never start: they report why, and fail by their budget."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.apiclient import Api
from tests.e2e.clusters import Cluster
from tests.e2e.control import api_of
from tests.e2e.jobs import INCIDENTS, JOBS, message, standing

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
ENDS_EARLY = Path(__file__).parent / "programs/ends_early.py"
IS_REAL = os.environ.get("UNBROKEN_E2E") == "real"
UNLABELLED = "" if IS_REAL else ". No node has the label disk=none"
SELECTOR = "Pod's node affinity" if IS_REAL else "Pod's node affinity/selector"
"""Words of the scheduler; the real one is of Kubernetes 1.20."""
Object = dict[str, Any]


class Wanted:
    """A job that was made of a container."""

    def __init__(self, api: Api, name: str) -> None:
        self.api, self.name = api, name

    def until_standing(self, *types: str) -> Object:
        """Wait until one of these is the true condition of the job; return the job."""
        return self.api.until(JOBS, self.name, lambda job: standing(job) in types)

    def until_said(self, words: str) -> str:
        """Wait until the message of its condition has these words; return the message."""
        return message(self.api.until(JOBS, self.name, lambda job: words in _message(job)))

    def incident(self, number: int) -> Object:
        """Wait until an incident has ended; return its spec. Incidents follow the status."""
        name = f"{self.name}-{number}"
        there = self.api.get(INCIDENTS).made
        if all(one["metadata"]["name"] != name for one in there["items"]):
            version = there["metadata"]["resourceVersion"]
            with self.api.watch(INCIDENTS, resourceVersion=version) as watch:
                while watch.event()["object"]["metadata"]["name"] != name:
                    pass
        found = self.api.until(INCIDENTS, name, lambda one: bool(one["spec"].get("outcome")))
        spec: Object = found["spec"]
        return spec

    def events(self, reason: str) -> list[str]:
        """Return the messages of the events on the job that have this reason."""
        listed = self.api.get("events").made["items"]
        mine = [one for one in listed if one["involvedObject"].get("name") == self.name]
        return [one["message"] for one in mine if one["reason"] == reason]

    def until_events(self, reason: str, count: int = 1) -> list[str]:
        """Wait for so many events on the job; return the messages of all that are there then.

        Events follow the status.
        """
        version = self.api.get("events").made["metadata"]["resourceVersion"]
        told = self.events(reason)
        if len(told) < count:
            with self.api.watch("events", resourceVersion=version) as watch:
                while len(told) < count:
                    watch.event()
                    told = self.events(reason)
        return told


def _message(job: Object) -> str:
    return message(job) if standing(job) else ""


@contextmanager
def wanted(
    cluster: Cluster,
    container: Object,
    pod: Object | None = None,
    restarts: int = 2,
    annotations: Object | None = None,
) -> Iterator[Wanted]:
    """Create a job of two pods with this container; delete it at the end."""
    api, name = api_of(cluster), f"job-{uuid.uuid4().hex[:6]}"
    whole = {"name": "pytorch", "image": "none", **container}
    template = {"spec": {"terminationGracePeriodSeconds": 1, "containers": [whole], **(pod or {})}}
    try:
        body = {
            "apiVersion": "sagemaker.amazonaws.com/v1",
            "kind": "HyperPodPyTorchJob",
            "metadata": {"name": name, "annotations": annotations or {}},
            "spec": {
                "nprocPerNode": "2",
                "replicaSpecs": [{"name": "pods", "replicas": 2, "template": template}],
                "runPolicy": {"jobMaxRetryCount": restarts, "cleanPodPolicy": "All"},
            },
        }
        api.post(JOBS, body).done()
        yield Wanted(api, name)
    finally:
        api.delete(f"{JOBS}/{name}")
        api.close()


def ends_at_once(cluster: Cluster) -> None:
    """Run a job whose container ends at once, until the job has failed."""
    refused = "app: error: unrecognized arguments: --bad"
    container = {"command": ["sh", "-c", f"echo starting; echo '{refused}' >&2; exit 2"]}
    with wanted(cluster, container, restarts=1) as job:
        waits = job.until_said("; it waits: pod ")
        assert "container pytorch " in waits
        assert refused in waits
        described = cluster.unbroken("describe", job.name).stdout
        explained = cluster.unbroken("explain", job.name).stdout
        failed = job.until_standing("Failed", "Completed")
        last = job.incident(2)
        (event,) = job.until_events("CrashLoopBackOff")
        assert refused in event
    assert f"  | {refused}" in described
    assert refused in explained
    assert message(failed).startswith("RetriesExhausted: pod ")
    assert "container pytorch has ended 3 times, last with exit code 2" in message(failed)
    assert message(failed).endswith(f"\nstarting\n{refused}")
    assert (last["remedy"], last["culprit"]["evidence"]) == ("fail", ["starting", refused])


@pytest.fixture(scope="module", autouse=True)
def ended(cluster: Cluster) -> Iterator[Future[None]]:
    """Run `ends_at_once` from the first test on: the node waits long before each restart."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(ends_at_once, cluster)


@pytest.mark.parametrize(
    ("ends", "fault", "said"),
    [
        ("import", "PythonException", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("3", "ExitCode", "the configuration is missing"),
        ("0", "EarlyExit", "the script must wait for its rank"),
    ],
)
def test_workers_that_end_before_their_rank_use_up_the_budget(
    cluster: Cluster, ends: str, fault: str, said: str
) -> None:
    command = ["hyperpodrun", "--nproc-per-node=2", "--nnodes=2", "--inprocess-restart"]
    container = {"command": [*command, str(ENDS_EARLY)], "env": [{"name": "ENDS", "value": ends}]}
    with wanted(cluster, container) as job:
        failed = job.until_standing("Failed", "Completed")
        assert message(failed).startswith("RetriesExhausted: pod ")
        assert "jobMaxRetryCount: all 2 restarts are used" in message(failed)
        assert said in message(failed)
        assert failed["status"]["restartCount"] == 2
        incidents = [job.incident(number) for number in (1, 2, 3)]
        assert [one["remedy"] for one in incidents] == ["process", "process", "fail"]
        assert {one["culprit"]["fault"] for one in incidents} == {fault}
        assert all("rank" not in one["culprit"] for one in incidents)
        assert len(job.until_events("Faulted", 3)) == 3
        told = cluster.unbroken("explain", job.name).stdout
    assert said.split(":")[0] in told


@pytest.mark.parametrize(
    ("container", "pod", "said"),
    [
        (
            {"env": [{"name": "A", "valueFrom": {"configMapKeyRef": {"name": "no", "key": "k"}}}]},
            {},
            'CreateContainerConfigError: container pytorch: configmap "no" not found; create',
        ),
        (
            {"volumeMounts": [{"name": "v", "mountPath": "/v"}]},
            {"volumes": [{"name": "v", "secret": {"secretName": "no"}}]},
            'FailedMount: MountVolume.SetUp failed for volume "v" : secret "no" not found; create',
        ),
        pytest.param(
            {},
            {"serviceAccountName": "ghost"},
            'serviceaccount "ghost" not found; the pod is created as soon as the API server',
            marks=pytest.mark.skipif(
                IS_REAL,
                reason="the real API server is started without admission of service accounts",
            ),
        ),
        ({}, {"nodeSelector": {"disk": "none"}}, f"didn't match {SELECTOR}{UNLABELLED}; make"),
        ({"resources": {"requests": {"cpu": "900"}}}, {}, "2 Insufficient cpu; make room"),
    ],
)
def test_what_may_yet_come_right_is_waited_for_with_words(
    cluster: Cluster, container: Object, pod: Object, said: str
) -> None:
    with wanted(cluster, {"command": ["sleep", "600"], **container}, pod, restarts=0) as job:
        assert said in job.until_said("it waits: ")
        waits = cluster.unbroken("explain", job.name).stdout
        assert "nothing has broken" not in waits
        assert "waits for pod " in waits
        reason = waits.partition("waits for ")[2].split(": ")[1]
        (event,) = job.until_events(reason)
    assert said in event


def test_a_container_that_ends_at_once_fails_the_job_with_its_words(ended: Future[None]) -> None:
    ended.result()
