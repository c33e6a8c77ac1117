"""Auto-resume of Ray on both API servers; the test acts as the nodes, KubeRay and the dashboard."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from tests import loopback
from tests.operator.conftest import Place
from tests.operator.pytorchjobs import BOTH, add_node
from tests.operator.resume.faults import UNHEALTHY, annotations, is_leaving, kubelet_ends, node
from tests.watching import running
from unbroken.kube.events import EventRecorder
from unbroken.local.ray import install
from unbroken.operator.resume.jobs import ResumeOptions
from unbroken.operator.resume.ray_controller import run_ray_resume
from unbroken.spec.keys import (
    AUTO_RESUME,
    LOG_MONITORING,
    MAX_RETRIES,
    RESUME_COUNT,
    RESUME_DEFAULT,
    RESUME_FAULT,
    RESUME_LOSSES,
    RESUME_RAY,
)

Object = dict[str, Any]
Open = Callable[[], Any]
CONTAINER = {"name": "ray", "image": "any"}
GROUP = {"rayStartParams": {}, "template": {"spec": {"containers": [CONTAINER]}}}
SPEC = {
    "headGroupSpec": GROUP,
    "workerGroupSpecs": [{**GROUP, "groupName": "w", "replicas": 1, "maxReplicas": 2}],
}
HOST = "127.0.0.1"


@asynccontextmanager
async def resumer(place: Place, default: int = 0) -> AsyncIterator[None]:
    """Run auto-resume for this namespace."""
    await install(place.client)
    recorder = EventRecorder(place.client, "test")
    work = run_ray_resume(place.client, None, recorder, ResumeOptions(place.namespace, default))
    async with running(recorder.run(), work):
        yield


def state(found: Object) -> Object:
    """Return the recorded attempt."""
    read: Object = json.loads(annotations(found).get(RESUME_RAY, "{}"))
    return read


def losses(found: Object) -> list[Object]:
    """Return the recorded losses."""
    read: list[Object] = json.loads(annotations(found).get(RESUME_LOSSES, "[]"))
    return read


async def add_cluster(
    place: Place,
    owner: Object | None = None,
    *,
    rules: str = "",
    asks: bool = True,
    **head: str,
) -> Object:
    """Create a RayCluster, which `asks` by annotation; `head` are parameters of `ray start` of its
    head."""
    given = {**(BOTH if asks else {}), **({LOG_MONITORING: rules} if rules else {})}
    metadata: Object = {"name": "ray", "annotations": given}
    if owner is not None:
        about = {"apiVersion": "ray.io/v1", "kind": "RayJob", "controller": True}
        named = {"name": owner["metadata"]["name"], "uid": owner["metadata"]["uid"]}
        metadata = {"name": "ray", "ownerReferences": [{**about, **named}]}
    spec = {**SPEC, "headGroupSpec": {**GROUP, "rayStartParams": head}}
    await place.until("rayclusters", lambda _: True)
    body = {"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": metadata, "spec": spec}
    return await place.post("rayclusters", body)


async def add_pod(place: Place, cluster: Object, name: str, index: int) -> Object:
    """Create a RayCluster's pod that runs and is ready on a node, as KubeRay does."""
    metadata = cluster["metadata"]
    about = {"apiVersion": "ray.io/v1", "kind": "RayCluster", "controller": True}
    kind = "head" if name.startswith("head") else "worker"
    labels = {"ray.io/cluster": metadata["name"], "ray.io/node-type": kind}
    owner = {**about, "name": metadata["name"], "uid": metadata["uid"]}
    body = {
        "metadata": {"name": name, "labels": labels, "ownerReferences": [owner]},
        "spec": {"nodeName": node(place, index), "containers": [CONTAINER]},
    }
    made = await place.post("pods", body)
    ready = {"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    status = {"phase": "Running", "podIP": HOST, "podIPs": [{"ip": HOST}], "conditions": [ready]}
    await place.client.merge(place.path(f"pods/{name}/status"), {"status": status})
    return made


class Dashboard:
    """The dashboard of a head, with Ray's API of jobs (dashboard/modules/job/job_head.py)."""

    def __init__(self) -> None:
        self.jobs: dict[str, Object] = {}
        self.refused: list[str] = []
        self.packages: set[str] = set()
        self.port = 0

    def add(self, request: Object) -> None:
        """Add a running job."""
        kept = {key: request.get(key) for key in ("entrypoint", "runtime_env", "metadata")}
        id = request["submission_id"]
        self.jobs[id] = {"type": "SUBMISSION", "submission_id": id, "status": "RUNNING", **kept}

    def lose(self) -> None:
        """Lose the head, with all its jobs."""
        self.jobs = {}

    async def listed(self, request: web.Request) -> web.Response:
        """Answer GET /api/jobs/."""
        driver = {"type": "DRIVER", "status": "RUNNING", "submission_id": None, "entrypoint": ""}
        return web.json_response([driver, *self.jobs.values()])

    async def submitted(self, request: web.Request) -> web.Response:
        """Answer POST /api/jobs/."""
        body = await request.json()
        if body["submission_id"] in self.jobs:
            self.refused.append(body["submission_id"])
            return web.Response(status=400, text="already exists")
        self.add(body)
        return web.json_response({"job_id": "x", "submission_id": body["submission_id"]})

    async def package(self, request: web.Request) -> web.Response:
        """Answer GET /api/packages/gcs/NAME."""
        return web.Response(status=200 if request.match_info["name"] in self.packages else 404)

    def routes(self) -> list[web.RouteDef]:
        """Return the requests that it answers."""
        return [
            web.get("/api/jobs/", self.listed),
            web.post("/api/jobs/", self.submitted),
            web.get("/api/packages/gcs/{name}", self.package),
        ]

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Serve at a free port of this machine."""
        app = web.Application()
        app.add_routes(self.routes())
        async with loopback.serving(app, HOST) as self.port:
            yield


async def test_a_worker_of_an_unhealthy_node_is_deleted_alone(place: Open) -> None:
    async with place() as here, resumer(here):
        for index in range(3):
            await add_node(here, node(here, index))
        cluster = await add_cluster(here)
        for index, name in enumerate(("head", "w-0", "w-1")):
            await add_pod(here, cluster, name, index)
        await here.until("rayclusters/ray", lambda one: state(one).get("head"))
        await here.merge(f"nodes/{node(here, 1)}", UNHEALTHY)
        found = await here.until("rayclusters/ray", lambda one: RESUME_COUNT in annotations(one))
        assert annotations(found)[RESUME_COUNT] == "1"
        assert "UnschedulablePendingReboot" in annotations(found)[RESUME_FAULT]
        await here.until("pods/w-0", is_leaving)
        said = await here.event("RayClusterRestarting")
        assert said["involvedObject"]["uid"] == cluster["metadata"]["uid"]
        assert "deletes 1 of 3 pods (restart 1 of at most 1)" in said["message"]
        for name in ("head", "w-1"):
            kept = await here.get(f"pods/{name}")
            assert kept is not None
            assert not is_leaving(kept)
        await kubelet_ends(here, "w-0")
        (loss,) = losses(await here.until("rayclusters/ray", lambda one: losses(one)))
        assert (loss["culprit"], loss["remedy"]) == (f"node {node(here, 1)}", "deletes 1 of 3 pods")
        assert "ran" not in loss
        await add_pod(here, cluster, "w-2", 2)
        (loss,) = losses(await here.until("rayclusters/ray", lambda one: "ran" in losses(one)[-1]))
        assert loss["ran"] >= loss["decided"] >= loss["at"]


async def test_a_raycluster_without_annotations_leaves_an_unhealthy_node_by_default(
    place: Open,
) -> None:
    dashboard = Dashboard()
    async with place() as here, dashboard.serving(), resumer(here, 3):
        dashboard.add({"entrypoint": "x", "submission_id": "one"})
        for index in range(3):
            await add_node(here, node(here, index))
        port = {"dashboard-port": str(dashboard.port)}
        cluster = await add_cluster(here, asks=False, **port)
        for index, name in enumerate(("head", "w-0", "w-1")):
            await add_pod(here, cluster, name, index)
        await here.until("rayclusters/ray", lambda one: annotations(one).get(RESUME_DEFAULT) == "3")
        await here.merge(f"nodes/{node(here, 1)}", UNHEALTHY)
        await here.until("pods/w-0", is_leaving)
        said = await here.event("RayClusterRestarting")
        assert "deletes 1 of 3 pods (restart 1 of at most 3)" in said["message"]
        kept = await here.get("rayclusters/ray")
        assert RESUME_RAY not in annotations(kept), "its jobs may hold secrets"


async def test_jobs_are_submitted_to_the_next_head_once_with_their_environment(
    place: Open,
) -> None:
    dashboard = Dashboard()
    given = {"entrypoint": "python train.py", "metadata": {"team": "a"}}
    async with place() as here, dashboard.serving():
        dashboard.add({**given, "submission_id": "one", "runtime_env": {"env_vars": {"A": "b"}}})
        lost = {"working_dir": "gcs://_ray_pkg_1.zip"}
        dashboard.add({**given, "submission_id": "two", "runtime_env": lost})
        for index in range(2):
            await add_node(here, node(here, index))
        async with resumer(here):
            cluster = await add_cluster(here, **{"dashboard-port": str(dashboard.port)})
            await add_pod(here, cluster, "head-a", 0)
            await here.until("rayclusters/ray", lambda one: len(state(one).get("jobs", ())) == 2)
        # The operator is away while the head is lost.
        await kubelet_ends(here, "head-a")
        dashboard.lose()
        async with resumer(here):
            await here.until("rayclusters/ray", lambda one: state(one).get("isLost"))
            await add_pod(here, cluster, "head-b", 1)
            await here.until("rayclusters/ray", lambda one: not state(one).get("isLost"))
            await here.event("RayClusterResumed")
            said = await here.event("AutoResumeImpossible")
        assert "two-attempt-1" in said["message"]
        assert "--working-dir" in said["message"]
    assert dashboard.refused == []
    (job,) = dashboard.jobs.values()
    assert job["submission_id"] == "one-attempt-1"
    assert given.items() <= job.items()
    expected = {"A": "b", "UNBROKEN_RESUME": "1", "JOB_RESTART_COUNT": "1"}
    assert job["runtime_env"]["env_vars"] == expected


async def test_a_rayjob_begins_again_after_its_last_pod_is_gone(place: Open) -> None:
    async with place() as here:
        await install(here.client)
        for index in range(2):
            await add_node(here, node(here, index))
        body = {
            "apiVersion": "ray.io/v1",
            "kind": "RayJob",
            "metadata": {"name": "count", "annotations": BOTH},
            "spec": {
                "entrypoint": "python train.py",
                "runtimeEnvYAML": "env_vars:\n  A: b\n",
                "rayClusterSpec": SPEC,
            },
        }
        await here.until("rayjobs", lambda _: True)
        job = await here.post("rayjobs", body)
        cluster = await add_cluster(here, job)
        for index, name in enumerate(("head", "w-0")):
            await add_pod(here, cluster, name, index)
        status = {"jobDeploymentStatus": "Running", "rayClusterName": "ray", "jobId": "count-1"}
        await here.merge("rayjobs/count/status", {"status": status})
        async with resumer(here):
            await here.until("rayjobs/count", lambda one: state(one).get("head"))
            await here.merge(f"nodes/{node(here, 0)}", UNHEALTHY)
            for name in ("head", "w-0"):
                await here.until(f"pods/{name}", is_leaving)
            await here.until("rayclusters/ray", lambda one: one["spec"].get("suspend"))
            # KubeRay: suspended, once no pod is left.
            await kubelet_ends(here, "head")
            await here.merge("rayclusters/ray/status", {"status": {"state": "suspended"}})
            found = await here.get("rayjobs/count")
            assert found is not None
            assert found["status"]["jobDeploymentStatus"] == "Running"
            await kubelet_ends(here, "w-0")
            found = await here.until(
                "rayjobs/count",
                lambda one: one["status"]["jobDeploymentStatus"] == "Retrying",
            )
        variables = json.loads(found["spec"]["runtimeEnvYAML"])["env_vars"]
        assert variables == {"A": "b", "UNBROKEN_RESUME": "1", "JOB_RESTART_COUNT": "1"}
        assert annotations(found)[RESUME_COUNT] == "1"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({AUTO_RESUME: "true"}, "job-max-retry-count"),
        ({**BOTH, MAX_RETRIES: "-1"}, "whole number"),
        ({**BOTH, LOG_MONITORING: '[{"name": "a", "logPattern": "(?=x)"}]'}, "look-ahead"),
    ],
)
async def test_wrong_annotations_are_told(
    place: Open, given: Mapping[str, str], words: str
) -> None:
    async with place() as here, resumer(here):
        await here.until("rayclusters", lambda _: True)
        metadata = {"name": "ray", "annotations": given}
        about = {"apiVersion": "ray.io/v1", "kind": "RayCluster"}
        await here.post("rayclusters", {**about, "metadata": metadata, "spec": SPEC})
        assert words in (await here.event("AutoResumeInvalid"))["message"]
