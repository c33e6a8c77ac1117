"""The checker against both API servers; the test acts as the node, since there is none."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from tests.apiservers import Cluster
from tests.watching import running, until
from unbroken.kube.client import MERGE, KubeClient, connect
from unbroken.kube.clock import micro_time, wall
from unbroken.kube.events import EventRecorder
from unbroken.kube.informer import Informers
from unbroken.operator import definitions
from unbroken.operator.nodes.checks import Checker
from unbroken.operator.nodes.checks_pods import CheckerOptions
from unbroken.spec.keys import CHECK_HOLD, DEEP_CHECK, HEALTH
from unbroken.spec.nodes.kinds import KEPT_SECONDS, NODE_CHECK, CheckKind, NodeCheckSpec

pytestmark = pytest.mark.slow

Object = dict[str, Any]
PODS = "api/v1/namespaces/unbroken-checks/pods"
NUMBERS = itertools.count(1)
TAINT = {"key": "team", "value": "a", "effect": "NoSchedule"}


class Place:
    """A node of an API server, and its checks."""

    def __init__(self, client: KubeClient) -> None:
        self.client = client
        self.node = f"checked-{next(NUMBERS)}"
        self.checks = [f"{self.node}-a", f"{self.node}-b"]

    async def ask(self, method: str, path: str, body: Object | None = None) -> Object:
        """Send one request; a PATCH is a merge."""
        headers = MERGE if method == "PATCH" else None
        found: Object = msgspec.json.decode(
            await self.client.raw(method, path, body=body, headers=headers)
        )
        return found

    async def until(self, path: str, holds: Callable[[Object], Any]) -> Any:
        """Wait until `holds` returns a true value for an object; return that value."""
        return holds(await until(lambda: self.ask("GET", path), holds))

    async def start(self, number: int, kind: CheckKind) -> str:
        """Create a check of the node; return its path."""
        body = NODE_CHECK.new(self.checks[number], NodeCheckSpec((self.node,), (kind,)))
        await self.ask("POST", NODE_CHECK.path, body)
        return f"{NODE_CHECK.path}/{self.checks[number]}"

    async def pod(self, number: int) -> str:
        """Return the path of a check's only pod."""
        label = f"{PODS}?labelSelector=unbroken.dev/check={self.checks[number]}"
        path, _, selector = label.partition("?labelSelector=")

        async def listed() -> list[Object]:
            raw = await self.client.raw("GET", path, parameters={"labelSelector": selector})
            items: list[Object] = msgspec.json.decode(raw)["items"]
            return items

        (one,) = await until(listed)
        return f"{PODS}/{one['metadata']['name']}"


@pytest.fixture
def place(cluster: Cluster) -> Callable[[], Any]:
    """Open a node of a cluster with a running checker."""

    @asynccontextmanager
    async def opened() -> AsyncIterator[Place]:
        async with connect(cluster.kubeconfig) as client:
            await definitions.install(client)
            one = Place(client)
            labels = {HEALTH: "Schedulable"}
            metadata = {"name": one.node, "labels": labels}
            await one.ask(
                "POST", "api/v1/nodes", {"metadata": metadata, "spec": {"taints": [TAINT]}}
            )
            recorder = EventRecorder(client, "checker")
            options = CheckerOptions(image="any")
            informers = Informers(client)
            checker = Checker(client, informers, recorder, options)
            async with running(recorder.run(), informers.run(), checker.run()):
                yield one
            for name in one.checks:
                await delete(one, f"{NODE_CHECK.path}/{name}")
            await delete(one, f"api/v1/nodes/{one.node}")

    return opened


async def delete(place: Place, path: str) -> None:
    """Delete an object that may be gone."""
    found = await place.client.raw("GET", path.rpartition("/")[0])
    if path.rpartition("/")[2] in [
        one["metadata"]["name"] for one in msgspec.json.decode(found)["items"]
    ]:
        await place.ask("DELETE", path)


def ended(check: Object) -> Object | None:
    """Return the status of a check that has ended."""
    status: Object = check.get("status") or {}
    return status if "endedAt" in status else None


def marks(node: Object) -> tuple[str | None, str | None, list[str], bool]:
    """Return health, deep check, keys of taints, and whether a check holds the node."""
    labels, annotations = node["metadata"]["labels"], node["metadata"].get("annotations") or {}
    keys = [one["key"] for one in node["spec"].get("taints") or ()]
    # A real control plane taints a node that has not said yet that it is ready.
    ours = [key for key in keys if not key.startswith("node.kubernetes.io/")]
    return labels.get(HEALTH), labels.get(DEEP_CHECK), ours, CHECK_HOLD in annotations


async def test_a_pod_that_ends_without_results_is_nobodys_fault(
    place: Callable[[], Any],
) -> None:
    async def check() -> None:
        async with place() as one:
            node = f"api/v1/nodes/{one.node}"
            check = await one.start(0, CheckKind.STRESS)
            pod = await one.pod(0)
            await one.until(
                node, lambda n: marks(n) == ("Unschedulable", "InProgress", ["team", HEALTH], True)
            )
            await one.ask(
                "PATCH", f"{pod}/status", {"status": {"phase": "Failed", "reason": "Lost"}}
            )
            status = await one.until(check, ended)
            assert (status["phase"], status.get("faulty")) == ("Unknown", None)
            assert "its pod failed: Lost" in status["results"][0]["message"]
            await one.until(node, lambda n: marks(n) == ("Schedulable", None, ["team"], False))
            # It is asked to go; whether it has is for its node to say, and there is none.
            await one.until(
                PODS,
                lambda pods: all(
                    "deletionTimestamp" in item["metadata"]
                    for item in pods["items"]
                    if item["metadata"]["name"] == pod.rpartition("/")[2]
                ),
            )

    await check()


async def test_one_check_of_a_node_waits_for_the_other(place: Callable[[], Any]) -> None:
    async with place() as one:
        await one.start(0, CheckKind.BASIC)
        pod = await one.pod(0)
        second = await one.start(1, CheckKind.BASIC)
        text = await one.until(second, lambda c: (c.get("status") or {}).get("message"))
        assert text == f"waiting for {one.node}: check {one.checks[0]} tests it"
        await one.ask("PATCH", f"{pod}/status", {"status": {"phase": "Succeeded"}})
        await one.pod(1)


async def test_a_check_of_a_node_that_is_not_there_ends_unknown(place: Callable[[], Any]) -> None:
    async with place() as one:
        body = NODE_CHECK.new(one.checks[0], NodeCheckSpec(("nowhere",), (CheckKind.BASIC,)))
        await one.ask("POST", NODE_CHECK.path, body)
        path = f"{NODE_CHECK.path}/{one.checks[0]}"
        status = await one.until(
            path, lambda c: "endedAt" in (c.get("status") or {}) and c["status"]
        )
        assert status["phase"] == "Unknown"
        assert status["results"][0]["message"] == "there is no node nowhere"


async def test_an_ended_check_is_kept_for_a_day(place: Callable[[], Any]) -> None:
    async with place() as one:
        ends = {}
        for number, age in enumerate((KEPT_SECONDS - 3600, KEPT_SECONDS + 1)):
            # The last one that a checker has ended, and that nothing is left to do of.
            spec = NodeCheckSpec(("nowhere",), (CheckKind.BASIC,))
            await one.ask("POST", NODE_CHECK.path, NODE_CHECK.new(one.checks[number], spec))
            path = f"{NODE_CHECK.path}/{one.checks[number]}"
            await one.until(path, ended)
            ends[number] = {"status": {"endedAt": micro_time(wall() - age)}}
        for number, body in ends.items():
            path = f"{NODE_CHECK.path}/{one.checks[number]}/status"
            await one.ask("PATCH", path, body)

        def names(found: Object) -> list[str]:
            return [item["metadata"]["name"] for item in found["items"]]

        await one.until(NODE_CHECK.path, lambda found: one.checks[1] not in names(found))
        assert one.checks[0] in names(await one.ask("GET", NODE_CHECK.path))
