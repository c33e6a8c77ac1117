"""KubeRay's contract of RayClusters and RayJobs: a sample in; pods, service, events, status out.

The samples are KubeRay's own.  What is expected of them is written after its source (1.7,
ray-operator/controllers/ray): names and labels of pods (common/pod.go), ports and selector of the
service (common/service.go), desired resources and states (utils/util.go, raycluster_controller.go),
deployment states of jobs (rayjob_controller.go).  The test is the nodes, and the dashboard.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import yaml
from aiohttp import web

from tests import loopback
from tests.job_samples import MANIFESTS
from tests.operator.conftest import Place, conditions, own_address
from tests.operator.test_raycluster_controller import controller, pod_of, say_ready
from unbroken.spec.times import time_seconds

Object = dict[str, Any]
Open = Callable[[], Any]
HOST = own_address(0)
"""The address of the head, at which the stand-in for its dashboard listens."""
DASHBOARD_PORT = 8265
ENDED = "2026-01-01T00:00:00Z"
"""End of a job in the dashboard."""
TABLE = {"Accept": "application/json;as=Table;v=v1;g=meta.k8s.io"}
PORTS = {"dashboard": 8265, "client": 10001}
"""Ports that all samples declare in addition to that of the GCS, by name.

KubeRay adds `metrics` to the service, which the local cluster leaves out: there each pod has a port
of its own for it.
"""


@dataclass(frozen=True)
class Contract:
    """The pods, services and status that a sample of a RayCluster leads to."""

    group: str
    replicas: int
    most: int
    cpu: str
    """Requests of head and workers together."""
    memory: str
    gcs: str = "gcs"
    """Name of the port of the GCS."""


CLUSTERS = {
    "sample": Contract("workergroup", 1, 5, "2", "6Gi", "gcs-server"),
    "complete": Contract("small-group", 1, 10, "1", "3Gi"),
    "autoscaler": Contract("small-group", 0, 10, "1", "2Gi"),
    "embedded-gcs-ft": Contract("small-group", 1, 10, "2", "3Gi"),
}
JOBS = ("sample", "shutdown", "sidecar-mode")


def manifest(name: str) -> Object:
    """The first object of a sample."""
    found: Object = next(yaml.safe_load_all((MANIFESTS / f"{name}.yaml").read_text()))
    return found


def labels(cluster: str, node_type: str, group: str) -> Object:
    """The labels by which KubeRay and its users find a pod."""
    return {
        "app.kubernetes.io/created-by": "kuberay-operator",
        "app.kubernetes.io/name": "kuberay",
        "ray.io/cluster": cluster,
        "ray.io/group": group,
        "ray.io/identifier": f"{cluster}-{node_type}",
        "ray.io/is-ray-node": "yes",
        "ray.io/node-type": node_type,
    }


async def all_ready(place: Place, workers: int) -> list[Object]:
    """Have the head and the workers run, and return the workers."""
    await say_ready(place, await pod_of(place, "head"), HOST)

    def of_workers(listed: Object) -> list[Object]:
        kind = "ray.io/node-type"
        return [one for one in listed["items"] if one["metadata"]["labels"][kind] == "worker"]

    listed = await place.until("pods", lambda found: len(of_workers(found)) == workers)
    for number, one in enumerate(of_workers(listed)):
        await say_ready(place, one, f"127.99.1.{number + 2}")
    return of_workers(listed)


def by_name(listed: list[Object]) -> Object:
    """Environment variables by name: values, or None where they come from elsewhere."""
    return {one["name"]: one.get("value") for one in listed}


@pytest.mark.parametrize("sample", CLUSTERS)
async def test_a_sample_becomes_its_service_and_pods(place: Open, sample: str) -> None:
    wanted, body = CLUSTERS[sample], manifest(f"raycluster-{sample}")
    name = body["metadata"]["name"]
    async with place() as here, controller(here):
        made = await here.post("rayclusters", body)
        service = await here.until(f"services/{name}-head-svc", lambda _: True)
        head = await pod_of(here, "head")
        workers = await all_ready(here, wanted.replicas)
    owned = {"apiVersion": "ray.io/v1", "kind": "RayCluster", "uid": made["metadata"]["uid"]}
    for one in (service, head, *workers):
        (owner,) = one["metadata"]["ownerReferences"]
        assert owned.items() <= owner.items()
        assert owner["controller"] is True
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"].items() <= head["metadata"]["labels"].items()
    ports = {one["name"]: one["port"] for one in service["spec"]["ports"]}
    assert ports == {**PORTS, wanted.gcs: 6379}
    assert re.fullmatch(rf"{name}-head-\w{{5}}", head["metadata"]["name"])
    assert labels(name, "head", "headgroup").items() <= head["metadata"]["labels"].items()
    for worker in workers:
        pattern = rf"{name}-{wanted.group}-worker-\w{{5}}"
        assert re.fullmatch(pattern, worker["metadata"]["name"])
        expected = labels(name, "worker", wanted.group)
        assert expected.items() <= worker["metadata"]["labels"].items()
    _check_ray(head, workers, body)


def _check_ray(head: Object, workers: list[Object], body: Object) -> None:
    """The containers keep what the sample says, and have KubeRay's variables and command."""
    container, *others = head["spec"]["containers"]
    is_autoscaled = body["spec"].get("enableInTreeAutoscaling")
    assert [one["name"] for one in others] == (["autoscaler"] if is_autoscaled else [])
    group = body["spec"]["headGroupSpec"]
    (given,) = group["template"]["spec"]["containers"]
    assert (container["image"], container["resources"]) == (given["image"], given["resources"])
    variables = by_name(container["env"])
    assert variables["RAY_USAGE_STATS_KUBERAY_IN_USE"] == "1"
    assert variables.keys() >= {"RAY_CLUSTER_NAME", "RAY_PORT", "RAY_ADDRESS"}
    start = variables["KUBERAY_GEN_RAY_START_CMD"]
    assert {"ray", "start", "--head", "--block"} <= set(start.split())
    for option, value in group["rayStartParams"].items():
        assert option == "dashboard-host" or f"--{option}={value}" in start
    mounted = {one["mountPath"] for one in container["volumeMounts"]}
    assert mounted >= {one["mountPath"] for one in given.get("volumeMounts", ())} | {"/dev/shm"}
    for worker in workers:
        (container,) = worker["spec"]["containers"]
        variables = by_name(container["env"])
        assert variables.keys() >= {"FQ_RAY_IP", "RAY_IP", "RAY_PORT", "RAY_ADDRESS"}
        assert variables["RAY_ADDRESS"].endswith(f":{variables['RAY_PORT']}")
        assert re.match("ray start .*--address=", variables["KUBERAY_GEN_RAY_START_CMD"])


@pytest.mark.parametrize("sample", CLUSTERS)
async def test_a_sample_gets_its_status_events_and_columns(place: Open, sample: str) -> None:
    wanted, body = CLUSTERS[sample], manifest(f"raycluster-{sample}")
    name = body["metadata"]["name"]
    async with place() as here, controller(here):
        await here.post("rayclusters", body)
        first = await here.until(
            f"rayclusters/{name}", lambda one: one.get("status", {}).get("endpoints")
        )
        assert "state" not in first["status"]
        assert "RayClusterProvisioned" not in conditions(first)
        await all_ready(here, wanted.replicas)

        def is_ready(one: Object) -> bool:
            count = one["status"]["readyWorkerReplicas"]
            return one["status"].get("state") == "ready" and count == wanted.replicas

        found = (await here.until(f"rayclusters/{name}", is_ready))["status"]
        table = await here.call("GET", "rayclusters", headers=TABLE)
        told = {one["reason"] for one in (await here.call("GET", "events"))["items"]}
    counts = {
        **{"desiredWorkerReplicas": wanted.replicas, "availableWorkerReplicas": wanted.replicas},
        **{"minWorkerReplicas": wanted.replicas, "maxWorkerReplicas": wanted.most},
        **{"desiredCPU": wanted.cpu, "desiredMemory": wanted.memory, "desiredGPU": "0"},
        **{"desiredTPU": "0", "observedGeneration": 1},
    }
    assert counts.items() <= found.items()
    assert found["head"]["podIP"] == found["head"]["serviceIP"] == HOST
    assert found["head"]["serviceName"] == f"{name}-head-svc"
    assert found["endpoints"].keys() == {*PORTS, wanted.gcs}
    assert found["endpoints"]["dashboard"] == "8265"
    assert "ready" in found["stateTransitionTimes"]
    assert {"HeadPodReady", "RayClusterProvisioned"} == conditions({"status": found}).keys()
    (row,) = table["rows"]
    titles = [one["name"].lower() for one in table["columnDefinitions"]]
    cells = dict(zip(titles, row["cells"], strict=True))
    shown = {"desired workers": wanted.replicas, "cpus": wanted.cpu, "memory": wanted.memory}
    assert {**shown, "gpus": "0", "status": "ready"}.items() <= cells.items()
    assert told >= {"CreatedService", "CreatedHeadPod"}
    assert ("CreatedWorkerPod" in told) is bool(wanted.replicas)


class Dashboard:
    """The dashboard of a head: it takes one job, and says of it what the test wants."""

    def __init__(self) -> None:
        self.status = "RUNNING"
        self.submissions: list[Object] = []

    async def submitted(self, request: web.Request) -> web.Response:
        """Take a job."""
        self.submissions.append(await request.json())
        return web.json_response({"submission_id": self.submissions[-1]["submission_id"]})

    async def job(self, request: web.Request) -> web.Response:
        """Answer with the status of a job."""
        if request.match_info["id"] not in {one["submission_id"] for one in self.submissions}:
            return web.Response(status=404)
        told = {"status": self.status, "message": "told by the test"}
        milliseconds = time_seconds(ENDED) * 1000
        return web.json_response({**told, "end_time": milliseconds})

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Answer at the address of the head for the time of the block."""
        app = web.Application()
        app.add_routes(
            [web.post("/api/jobs/", self.submitted), web.get("/api/jobs/{id}", self.job)]
        )
        async with loopback.serving(app, HOST, DASHBOARD_PORT):
            yield


def is_deployed(status: str) -> Callable[[Object], bool]:
    """A predicate of a RayJob: it has this deployment status."""
    return lambda job: bool((job.get("status") or {}).get("jobDeploymentStatus") == status)


@pytest.mark.parametrize("sample", JOBS)
@pytest.mark.parametrize(
    ("end", "deployment"),
    [("SUCCEEDED", "Complete"), ("FAILED", "Failed")],
)
async def test_a_job_of_a_sample_is_submitted_once_and_ends(
    place: Open, sample: str, end: str, deployment: str
) -> None:
    body, dashboard = manifest(f"rayjob-{sample}"), Dashboard()
    name, has_shutdown = body["metadata"]["name"], sample == "shutdown"
    if has_shutdown:
        body["spec"]["ttlSecondsAfterFinished"] = 0
    async with place() as here, controller(here), dashboard.serving():
        await here.post("rayjobs", body)
        begun = (await here.until(f"rayjobs/{name}", is_deployed("Initializing")))["status"]
        assert re.fullmatch(rf"{name}-\w{{5}}", begun["jobId"])
        assert re.fullmatch(rf"{name}-\w{{5}}", begun["rayClusterName"])
        cluster = await here.until(f"rayclusters/{begun['rayClusterName']}", lambda _: True)
        about = {"ray.io/originated-from-crd": "RayJob", "ray.io/originated-from-cr-name": name}
        assert about.items() <= cluster["metadata"]["labels"].items()
        assert cluster["metadata"]["ownerReferences"][0]["name"] == name
        given = body["spec"]["rayClusterSpec"]["headGroupSpec"]
        assert cluster["spec"]["headGroupSpec"] == given
        await all_ready(here, 1)
        runs = (await here.until(f"rayjobs/{name}", is_deployed("Running")))["status"]
        assert runs["dashboardURL"] == f"{HOST}:{DASHBOARD_PORT}"
        assert (runs["jobStatus"], runs["jobId"]) == ("RUNNING", begun["jobId"])
        dashboard.status = end
        done = (await here.until(f"rayjobs/{name}", is_deployed(deployment)))["status"]
        if has_shutdown:
            await here.absent(f"rayclusters/{begun['rayClusterName']}")
        else:
            assert await here.get(f"rayclusters/{begun['rayClusterName']}") is not None
    (sent,) = dashboard.submissions
    assert sent["entrypoint"] == "python /home/ray/samples/sample_code.py"
    assert sent["submission_id"] == begun["jobId"]
    assert sent["runtime_env"]["env_vars"] == {"counter_name": "test_counter"}
    assert sent["runtime_env"]["pip"] == ["requests==2.26.0", "pendulum==2.1.2"]
    is_good = end == "SUCCEEDED"
    assert (done["succeeded"], done["failed"]) == (int(is_good), int(not is_good))
    assert done.get("reason") == (None if is_good else "AppFailed")
    assert (done["jobStatus"], done["message"]) == (end, "told by the test")
    assert done["endTime"] == ENDED
