"""Jobs of Ray that hang, against both API servers; the test is the nodes, KubeRay and the head."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web

from tests.operator.pytorchjobs import BOTH, add_node
from tests.operator.resume.faults import is_leaving, node
from tests.operator.resume.test_ray_resume_api import (
    SPEC,
    Dashboard,
    add_cluster,
    add_pod,
    losses,
    resumer,
    state,
)
from unbroken.local.ray import install
from unbroken.spec.keys import LOG_MONITORING, RESUME_COUNT

# A job counts as hung only LATE_SECONDS after the time of its rule.
pytestmark = pytest.mark.slow
Object = dict[str, Any]
Open = Callable[[], Any]
RULES = json.dumps(
    [
        {
            "name": "Steps",
            "logPattern": r".*step=(\d+)",
            "expectedStartCutOffInSeconds": 600,
            "expectedRecurringFrequencyInSeconds": 1,
        }
    ]
)
LOG = "starting\nstep=1 token=hf_0123456789abcdefgh\nstep=2\nwaiting for \x1b[31mrank 3\x1b[0m\n"
"""Log of a job that hangs after its second step."""


class Head(Dashboard):
    """A dashboard that also shows the logs of jobs, and stops jobs."""

    def __init__(self) -> None:
        super().__init__()
        self.logs: dict[str, str] = {}
        """Output of each job."""
        self.done: list[str] = []
        """Jobs that were stopped or submitted, in their order."""

    async def tail(self, request: web.Request) -> web.WebSocketResponse:
        """GET /api/jobs/ID/logs/tail: ten lines a message, then silence while the job runs."""
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        for line in self.logs[request.match_info["id"]].splitlines(keepends=True):
            await socket.send_str(line)
        await socket.receive()
        return socket

    async def stopped(self, request: web.Request) -> web.Response:
        """POST /api/jobs/ID/stop."""
        id = request.match_info["id"]
        self.done.append(f"stop {id}")
        self.jobs[id]["status"] = "STOPPED"
        return web.json_response({"stopped": True})

    async def submitted(self, request: web.Request) -> web.Response:
        """POST /api/jobs/."""
        body = await request.json()
        others = [one for one in self.jobs.values() if one["status"] == "RUNNING"]
        assert not any(one["entrypoint"] == body["entrypoint"] for one in others), "two at once"
        self.done.append(f"submit {body['submission_id']}")
        self.logs[body["submission_id"]] = "starting\n"
        return await super().submitted(request)

    def routes(self) -> list[web.RouteDef]:
        """The requests that it answers."""
        return [
            *super().routes(),
            web.get("/api/jobs/{id}/logs/tail", self.tail),
            web.post("/api/jobs/{id}/stop", self.stopped),
        ]


async def test_a_submitted_job_that_hangs_is_stopped_and_submitted_again(place: Open) -> None:
    head = Head()
    package = {"working_dir": "gcs://_ray_pkg_1.zip"}
    async with place() as here, head.serving(), resumer(here):
        head.packages.add("_ray_pkg_1.zip")
        for index in range(2):
            await add_node(here, node(here, index))
        cluster = await add_cluster(here, rules=RULES, **{"dashboard-port": str(head.port)})
        for index, name in enumerate(("head-a", "w-0")):
            await add_pod(here, cluster, name, index)
        head.logs = {"one": LOG, "two": "no step yet\n"}
        head.add({"submission_id": "one", "entrypoint": "python a.py", "runtime_env": package})
        head.add({"submission_id": "two", "entrypoint": "python b.py", "runtime_env": {}})
        said = await here.event("RayClusterResumed")
        found = await here.get("rayclusters/ray")
        assert found is not None
        for name in ("head-a", "w-0"):
            assert not is_leaving(await here.get(f"pods/{name}"))
    assert head.done == ["stop one", "submit one-attempt-1"]
    assert "one-attempt-1" in said["message"]
    (loss,) = losses(found)
    assert loss["culprit"] == "job one"
    assert loss["fault"] == (
        "job one is hung: no match of log rule Steps for 1 s; last line: waiting for rank 3"
    )
    assert loss["remedy"] == "stops 1 job and submits it again"
    assert loss["ran"] >= loss["decided"] >= loss["at"]
    assert found["metadata"]["annotations"][RESUME_COUNT] == "1"
    assert "hung" not in state(found)
    assert [one["id"] for one in state(found)["jobs"]] == ["one-attempt-1", "two"]
    variables = {"UNBROKEN_RESUME": "1", "JOB_RESTART_COUNT": "1"}
    assert head.jobs["one-attempt-1"]["runtime_env"] == {**package, "env_vars": variables}


async def test_a_job_whose_code_the_head_lacks_is_not_stopped(place: Open) -> None:
    head = Head()
    async with place() as here, head.serving(), resumer(here):
        await add_node(here, node(here, 0))
        cluster = await add_cluster(here, rules=RULES, **{"dashboard-port": str(head.port)})
        await add_pod(here, cluster, "head-a", 0)
        head.logs = {"one": LOG}
        lost = {"working_dir": "gcs://_ray_pkg_2.zip"}
        head.add({"submission_id": "one", "entrypoint": "python a.py", "runtime_env": lost})
        said = await here.event("AutoResumeImpossible")
    assert "one-attempt-1 is not submitted again" in said["message"]
    assert head.done == []


async def test_a_rayjob_that_hangs_loses_all_pods_and_begins_again(place: Open) -> None:
    head = Head()
    head.logs = {"count-1": LOG}
    async with place() as here, head.serving():
        await install(here.client)
        await add_node(here, node(here, 0))
        body = {
            "apiVersion": "ray.io/v1",
            "kind": "RayJob",
            "metadata": {"name": "count", "annotations": {**BOTH, LOG_MONITORING: RULES}},
            "spec": {"entrypoint": "python train.py", "rayClusterSpec": SPEC},
        }
        await here.until("rayjobs", lambda _: True)
        job = await here.post("rayjobs", body)
        cluster = await add_cluster(here, job, **{"dashboard-port": str(head.port)})
        await add_pod(here, cluster, "head", 0)
        status = {"jobDeploymentStatus": "Running", "rayClusterName": "ray", "jobId": "count-1"}
        await here.merge("rayjobs/count/status", {"status": {**status, "jobStatus": "PENDING"}})
        async with resumer(here):
            await here.until("rayjobs/count", lambda one: state(one).get("head"))
            await here.merge("rayjobs/count/status", {"status": {"jobStatus": "RUNNING"}})
            await here.until("pods/head", is_leaving)
            await here.until("rayclusters/ray", lambda one: one["spec"].get("suspend"))
            found = await here.get("rayjobs/count")
    assert found is not None
    (loss,) = losses(found)
    assert loss["culprit"] == "job count-1"
    assert "is hung: no match of log rule Steps for 1 s" in loss["fault"]
    assert loss["remedy"] == "deletes 1 of 1 pod"
    variables = json.loads(found["spec"]["runtimeEnvYAML"])["env_vars"]
    assert variables == {"UNBROKEN_RESUME": "1", "JOB_RESTART_COUNT": "1"}
    assert head.done == []
