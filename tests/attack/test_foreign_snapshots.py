"""Jobs of one name in two namespaces took each other's snapshots for their own.

A snapshot had only the name of its job, and agents without a key accepted it from any client.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.agent.running import KEY, program, running
from tests.agent.snapshot_clients import Copy, copies, path, slot
from tests.agent_requests import AgentRequests
from unbroken.core.job.events import CreatePod, PodName
from unbroken.operator.jobs.pods import JobIdentity, build_pod
from unbroken.spec.job.types import JobSpec, ReplicaSpec
from unbroken.wire.snapshot import digest, job_of
from unbroken.worker import context
from unbroken.worker.snapshot.snapshot import job_digest


def environment(namespace: str, uid: str) -> dict[str, str]:
    """Return the environment that the operator gives the pods of a job `lm`."""
    template = {"spec": {"containers": [{"name": "main", "image": "any"}]}}
    spec = JobSpec((ReplicaSpec("pods", template, 1),))
    order = CreatePod(PodName("lm-pods-0"), "pods", 0)
    pod = build_pod(JobIdentity(namespace, "lm", uid), spec, order, None)
    listed = pod["spec"]["containers"][0]["env"]
    return {one["name"]: one["value"] for one in listed if "value" in one}


def test_jobs_of_one_name_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = environment("team-a", "uid-a"), environment("team-b", "uid-b")
    assert ours["UNBROKEN_JOB"] == theirs["UNBROKEN_JOB"]
    digests = []
    for given in (ours, theirs):
        for name in ("UNBROKEN_JOB", "UNBROKEN_JOB_UID"):
            monkeypatch.setenv(name, given[name])
        digests.append(job_digest(context()))
        assert digests[-1] == digest(job_of(given)), "worker and agent agree"
    assert digests[0] != digests[1]


@pytest.mark.slow
def test_a_snapshot_of_another_job_of_the_name_is_not_taken(tmp_path: Path) -> None:
    """Send a snapshot to an agent that accepts copies from every client."""
    given = environment("team-a", "uid-a")
    mine = {name: given[name] for name in ("UNBROKEN_JOB", "UNBROKEN_JOB_UID")}
    with running(tmp_path, program(tmp_path, ""), UNBROKEN_AGENT_AUTH="none", **mine) as agent:
        for job in ("lm", "uid-b"):
            assert agent.request("PUT", path(0, 1, 1), slot(0, 1, 1, job=job))[0] == 422
        assert copies(agent, 0) == []
        assert agent.request("PUT", path(0, 1, 1), slot(0, 1, 1, job="uid-a"))[0] == 200
        assert copies(agent, 0) == [Copy(1, 1)]


@pytest.mark.slow
def test_a_snapshot_is_the_one_that_its_tag_is_for(tmp_path: Path) -> None:
    with running(tmp_path, program(tmp_path, ""), UNBROKEN_JOB="job") as agent:
        sender = AgentRequests("127.0.0.1", agent.port, KEY)
        announced, sent = slot(0, 1, 1), slot(0, 1, 1, world=5)
        headers = sender.tagged("PUT", path(0, 1, 1), announced, {})
        sender.connection.request("PUT", path(0, 1, 1), sent, headers)
        answer = sender.connection.getresponse()
        assert (answer.status, b"announced" in answer.read()) == (422, True)
        sender.close()
        assert copies(agent, 0) == []
