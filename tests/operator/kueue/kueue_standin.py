"""Writes of Kueue's scheduler and controller to a Workload, without either of them.

They are those of kueue v0.16 (pkg/workload: SetQuotaReservation, SetEvictedCondition).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from tests.operator.conftest import Place
from tests.operator.kueue.kueue_definitions import GROUP, definitions
from tests.operator.resume.jobset_standin import is_served
from tests.watching import until
from unbroken.kube.client import KubeClient
from unbroken.kube.clock import rfc3339, wall
from unbroken.kube.errors import ApiRefusal

Object = dict[str, Any]
DEFINITIONS = "apis/apiextensions.k8s.io/v1/customresourcedefinitions"


class OldPlace(Place):
    """A namespace in which Kueue's API is v1beta1."""

    def path(self, what: str) -> str:
        """Return the path in v1beta1."""
        return super().path(what).replace("/v1beta2/", "/v1beta1/")


async def install(client: KubeClient, version: str) -> None:
    """Install Kueue's kinds, and wait until they are served."""
    for body in definitions(version):
        try:
            await client.raw("POST", DEFINITIONS, body=body)
        except ApiRefusal as error:
            assert error.code == 409, error
        path = f"apis/{GROUP}/{version}/{body['spec']['names']['plural']}"
        await until(lambda path=path: is_served(client, path))


def head(place: Place, kind: str) -> Object:
    """Return apiVersion and kind of an object."""
    return {"apiVersion": group(place).removeprefix("apis/"), "kind": kind}


def group(place: Place) -> str:
    """Return the path of Kueue's kinds."""
    return place.path("workloads").partition("/namespaces/")[0]


async def flavor(place: Place, name: str, **spec: Any) -> None:
    """Create a ResourceFlavor."""
    body = {**head(place, "ResourceFlavor"), "metadata": {"name": name}, "spec": spec}
    path = f"{group(place)}/resourceflavors"
    await place.client.raw("POST", path, body=body)


async def priority(place: Place, name: str, value: int) -> None:
    """Create a WorkloadPriorityClass."""
    body = {**head(place, "WorkloadPriorityClass"), "metadata": {"name": name}, "value": value}
    path = f"{group(place)}/workloadpriorityclasses"
    await place.client.raw("POST", path, body=body)


async def workload(place: Place, holds: Callable[[Object], object] = lambda _: True) -> Object:
    """Wait until the only Workload fits; return it."""

    def is_so(listed: Object) -> bool:
        items = listed["items"]
        return len(items) == 1 and bool(holds(items[0]))

    return one(await place.until("workloads", is_so))


def one(listed: Object) -> Object:
    """Return the only item."""
    (found,) = listed["items"]
    return dict(found)


def said(found: Object, condition: str) -> tuple[str, str]:
    """Return (status, reason) of a condition; empty if there is none."""
    for each in (found.get("status") or {}).get("conditions") or ():
        if each["type"] == condition:
            return each["status"], each["reason"]
    return "", ""


async def write(place: Place, change: Callable[[Object], None]) -> None:
    """Change the status of the only Workload."""
    while True:
        found = await workload(place)
        status = found.setdefault("status", {})
        change(status)
        path = f"{place.path('workloads')}/{found['metadata']['name']}/status"
        body = {**found, **head(place, "Workload")}
        try:
            await place.client.raw("PUT", path, body=body)
        except ApiRefusal as error:
            assert error.code == 409, error
        else:
            return


def say(status: Object, type: str, is_true: bool, reason: str, message: str = "") -> None:
    """Set a condition."""
    kept = [each for each in status.get("conditions") or () if each["type"] != type]
    text = "True" if is_true else "False"
    told = {"type": type, "status": text, "reason": reason, "message": message}
    status["conditions"] = [*kept, {**told, "lastTransitionTime": rfc3339(wall())}]


async def admit(place: Place, name: str, **assignment: Any) -> None:
    """Admit the Workload's pod set `pods` with a flavor."""
    assigned = {"name": "pods", "flavors": {"cpu": name}, **assignment}

    def change(status: Object) -> None:
        status["admission"] = {"clusterQueue": "cluster", "podSetAssignments": [assigned]}
        say(status, "QuotaReserved", True, "QuotaReserved", "Quota reserved in ClusterQueue")
        say(status, "Admitted", True, "Admitted", "The workload is admitted")
        for type in ("Evicted", "Preempted"):
            say(status, type, False, "QuotaReserved", "Previously: evicted")

    await write(place, change)


async def evict(place: Place, reason: str, message: str) -> None:
    """Ask the owner of the Workload to stop."""
    await write(place, lambda status: say(status, "Evicted", True, reason, message))


async def refuse(place: Place, message: str) -> None:
    """Say why the Workload waits."""
    await write(place, lambda status: say(status, "QuotaReserved", False, "Pending", message))


async def say_pods_ready(place: Place) -> None:
    """Set the status of every pod to that of a kubelet for a ready pod."""
    listed = msgspec.json.decode(await place.client.raw("GET", place.path("pods")))
    for each in listed["items"]:
        ready = {"type": "Ready", "status": "True"}
        path = f"pods/{each['metadata']['name']}/status"
        await place.merge(path, {"status": {"phase": "Running", "conditions": [ready]}})
