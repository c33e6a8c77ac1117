"""The controller of RayClusters against both API servers; the test acts as the nodes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import yaml
from aiohttp import web

from tests import loopback
from tests.job_samples import MANIFESTS
from tests.operator.conftest import Place, conditions, own_address
from tests.watching import Watcher, running
from unbroken.kube.informer import Informers
from unbroken.local.ray import run_ray
from unbroken.local.ray.decisions.pods import DASHBOARD_PORT

Object = dict[str, Any]
Open = Callable[[], Any]
NAME = "raycluster-kuberay"


@asynccontextmanager
async def controller(place: Place) -> AsyncIterator[None]:
    """Run the controller for every namespace."""
    informers = Informers(place.client)
    async with running(informers.run(), run_ray(place.client, informers)):
        for kind in ("rayclusters", "rayjobs"):  # it installs one after the other
            await place.until(kind, lambda _: True)
        yield


def sample() -> Object:
    """Return KubeRay's smallest sample."""
    found: Object = yaml.safe_load((MANIFESTS / "raycluster-sample.yaml").read_text())
    return found


async def pod_of(place: Place, node_type: str) -> Object:
    """Wait for the pod of this type; return it."""

    def named(listed: Object) -> list[Object]:
        return [
            one
            for one in listed["items"]
            if one["metadata"]["labels"]["ray.io/node-type"] == node_type
        ]

    (found,) = named(await place.until("pods", named))
    return found


async def say_ready(place: Place, pod: Object, address: str) -> None:
    """Set the status of a running pod, as a node does."""
    ready = {"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    status = {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}]}
    path = place.path(f"pods/{pod['metadata']['name']}/status")
    await place.client.merge(path, {"status": {**status, "conditions": [ready]}})


async def remove(place: Place, pod: Object) -> None:
    """Remove a pod at once."""
    await place.delete(f"pods/{pod['metadata']['name']}", gracePeriodSeconds=0)


@pytest.mark.parametrize("version", ["v1", "v1alpha1"])
async def test_a_cluster_gets_its_head_then_its_workers_and_is_ready(
    place: Open, version: str
) -> None:
    async with place() as here, controller(here):
        path = f"apis/ray.io/{version}/namespaces/{here.namespace}/rayclusters"
        await here.client.raw("POST", path, body={**sample(), "apiVersion": f"ray.io/{version}"})
        await here.until(f"services/{NAME}-head-svc", lambda _: True)
        await say_ready(here, await pod_of(here, "head"), "10.0.0.2")
        worker = await pod_of(here, "worker")
        assert worker["spec"]["hostAliases"][0]["ip"] == "10.0.0.2"
        await say_ready(here, worker, "10.0.0.3")
        done = await here.until(
            f"rayclusters/{NAME}", lambda one: one.get("status", {}).get("state") == "ready"
        )
        assert {"HeadPodReady", "RayClusterProvisioned"} <= conditions(done).keys()
        assert done["status"]["head"]["podIP"] == "10.0.0.2"


async def test_lost_pods_come_back_and_workers_follow_their_head(place: Open) -> None:
    async with place() as here, controller(here):
        await here.post("rayclusters", sample())
        head = await pod_of(here, "head")
        await say_ready(here, head, "10.0.0.2")
        worker = await pod_of(here, "worker")
        await remove(here, worker)
        again = await here.until(
            f"pods/{worker['metadata']['name']}",
            lambda one: one["metadata"]["uid"] != worker["metadata"]["uid"],
        )
        await say_ready(here, again, "10.0.0.3")
        await remove(here, head)
        new = await here.until(
            f"pods/{head['metadata']['name']}",
            lambda one: one["metadata"]["uid"] != head["metadata"]["uid"],
        )
        # The worker of the head before goes first.
        await here.absent(f"pods/{worker['metadata']['name']}")
        await say_ready(here, new, "10.0.0.9")
        last = await pod_of(here, "worker")
        assert last["spec"]["hostAliases"][0]["ip"] == "10.0.0.9"


async def test_a_suspended_cluster_has_no_pods_and_comes_back(place: Open) -> None:
    async with place() as here, controller(here):
        await here.post("rayclusters", sample())
        await pod_of(here, "head")
        await here.merge(f"rayclusters/{NAME}", {"spec": {"suspend": True}})
        await here.until("pods", lambda listed: not listed["items"])
        await here.until(
            f"rayclusters/{NAME}", lambda one: one["status"].get("state") == "suspended"
        )
        await here.merge(f"rayclusters/{NAME}", {"spec": {"suspend": False}})
        await pod_of(here, "head")


async def test_a_rayjob_has_a_cluster_until_it_is_suspended(place: Open) -> None:
    async with place() as here, controller(here):
        text = (MANIFESTS / "rayjob-shutdown.yaml").read_text()
        body: Object = next(yaml.safe_load_all(text))
        name = body["metadata"]["name"]
        await here.post("rayjobs", body)
        begun = await here.until(f"rayjobs/{name}", lambda one: one.get("status"))
        assert begun["status"]["jobDeploymentStatus"] == "Initializing"
        cluster = begun["status"]["rayClusterName"]
        made = await here.until(f"rayclusters/{cluster}", lambda _: True)
        (owner,) = made["metadata"]["ownerReferences"]
        assert owner["uid"] == begun["metadata"]["uid"]
        head = await pod_of(here, "head")
        assert head["metadata"]["labels"]["ray.io/cluster"] == cluster
        await here.merge(f"rayjobs/{name}", {"spec": {"suspend": True}})
        await here.until(
            f"rayjobs/{name}", lambda one: one["status"]["jobDeploymentStatus"] == "Suspended"
        )
        assert await here.get(f"rayclusters/{cluster}") is None


# --- Ray's token

SECRET = f"{NAME}-ray-token"


async def test_each_raycluster_has_its_token_in_a_secret_of_its_own(place: Open) -> None:
    async with place() as here, controller(here):
        found = [await token_of_new(here)]
        await here.delete(f"rayclusters/{NAME}")
        await here.absent(f"rayclusters/{NAME}")
        await here.delete(f"secrets/{SECRET}")  # as the garbage collector does
        found.append(await token_of_new(here))
        assert found[0] != found[1]


async def token_of_new(place: Place) -> str:
    """Create the RayCluster; return its token."""
    uid = (await place.post("rayclusters", sample()))["metadata"]["uid"]
    secret = await place.until(f"secrets/{SECRET}", lambda _: True)
    assert [one["uid"] for one in secret["metadata"]["ownerReferences"]] == [uid]
    return str(secret["data"]["auth_token"])


async def test_a_secret_of_somebody_else_is_not_taken(place: Open) -> None:
    async with place() as here, controller(here):
        other = {"metadata": {"name": SECRET}, "stringData": {"auth_token": "known"}}
        await here.post("secrets", other)
        await here.post("rayclusters", sample())
        await told(here, "FailedToCreateSecret")
        assert (await here.until("pods", lambda _: True))["items"] == []
        await here.delete(f"secrets/{SECRET}")
        await pod_of(here, "head")


@pytest.mark.parametrize("status", [200, 401, 403])
async def test_a_head_that_asks_for_no_token_is_named(place: Open, status: int) -> None:
    address = own_address(1)
    asked = Watcher[str]()

    async def jobs(request: web.Request) -> web.Response:
        asked(request.headers.get("Authorization", ""))
        return web.json_response([], status=status)

    app = web.Application()
    app.add_routes([web.get("/api/jobs/", jobs)])
    dashboard = loopback.serving(app, address, DASHBOARD_PORT)
    async with dashboard, place() as here, controller(here):
        await here.post("rayclusters", sample())
        await say_ready(here, await pod_of(here, "head"), address)
        if status == 200:
            await told(here, "RayIsOpen")
        await asked.until(bool)
        await pod_of(here, "worker")
        assert set(asked.seen) == {""}  # heads of earlier tests are asked, too
        assert ("RayIsOpen" in await reasons(here)) is (status == 200)


async def told(place: Place, reason: str) -> None:
    """Wait for an event with this reason."""
    await place.until(
        "events", lambda listed: any(one["reason"] == reason for one in listed["items"])
    )


async def reasons(place: Place) -> set[str]:
    """Return the reasons of all events."""
    return {one["reason"] for one in (await place.until("events", lambda _: True))["items"]}
