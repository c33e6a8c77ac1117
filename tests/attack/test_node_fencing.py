"""A tenant's pod that did not go got a healthy node fenced, with the pods of everybody there.

A finalizer on the pod, and its deletion, were enough.  The fence was asked for again and again, as
long as the pod's object stayed: 1,220 times in 38 s.  The tenant could write all of the evidence.
"""

from __future__ import annotations

import asyncio
from typing import Any

from lightkube.models.core_v1 import ObjectReference
from lightkube.resources.core_v1 import Node, Pod

from tests.operator.conftest import place as place
from tests.operator.pytorchjobs import add_node, say_ready
from tests.watching import PATIENCE_SECONDS, running
from unbroken.core.fencing import FENCES_AN_HOUR, Fence
from unbroken.kube.clock import wall
from unbroken.kube.events import EventRecorder
from unbroken.kube.informer import Informer, all_synced
from unbroken.local.machines.pool import Fence as MachineFence
from unbroken.operator.fences import REFUSED, Fences, read_fences, write_fences
from unbroken.spec.keys import FENCE, FENCES

EVIL = ObjectReference(kind="PyTorchJob", namespace="default", name="evil", uid="evil")
FINALIZER = ["example.com/stay"]


def annotations(found: Any) -> dict[str, str]:
    """Return the annotations of an object."""
    return (found or {}).get("metadata", {}).get("annotations") or {}


async def lift(here: Any, node: str) -> None:
    """Let the provider lift the fence of a node."""
    await here.merge(f"nodes/{node}", {"metadata": {"annotations": {FENCE: None}}})


async def test_a_ready_node_is_never_fenced_and_a_silent_one_once_for_each_pod(place: Any) -> None:
    async with place() as here:
        node = f"{here.namespace}-n0"
        await add_node(here, node)
        recorder = EventRecorder(here.client, "test")
        async with running(recorder.run()):
            for uid in ("u0", "u1", "u2"):
                await Fences(here.client, recorder).ask(node, uid, "pod evil-0", EVIL)
            assert FENCE not in annotations(await here.get(f"nodes/{node}"))

            await say_ready(here, node, "Unknown")
            await Fences(here.client, recorder).ask(node, "u0", "pod evil-0", EVIL)
            assert annotations(await here.get(f"nodes/{node}"))[FENCE] == "pod evil-0"
            await lift(here, node)
            # Each is another operator, which knows only what the Node says.
            for _ in range(3):
                await Fences(here.client, recorder).ask(node, "u0", "pod evil-0", EVIL)
            assert FENCE not in annotations(await here.get(f"nodes/{node}"))
            listed = "api/v1/namespaces/default/events"
            query = {"fieldSelector": f"involvedObject.name={node},reason={REFUSED}"}
            said = b""
            async with asyncio.timeout(PATIENCE_SECONDS):
                while b"fenced before for pod evil-0" not in said:
                    said = await here.client.raw("GET", listed, parameters=query)


async def test_a_node_is_fenced_only_so_often_within_an_hour(place: Any) -> None:
    async with place() as here:
        node = f"{here.namespace}-n0"
        await add_node(here, node)
        await say_ready(here, node, "Unknown")
        fences = Fences(here.client, EventRecorder(here.client, "test"))
        asked = 0
        for number in range(FENCES_AN_HOUR + 5):
            await fences.ask(node, f"u{number}", "pod evil-0", EVIL)
            asked += FENCE in annotations(await here.get(f"nodes/{node}"))
            await lift(here, node)
        assert asked == FENCES_AN_HOUR


async def test_a_node_counts_as_dead_only_while_its_kubelet_is_silent(place: Any) -> None:
    async with place() as here:
        node = f"{here.namespace}-n0"
        await add_node(here, node)
        fences = Fences(here.client, EventRecorder(here.client, "test"), dead_seconds=60.0)
        for status, is_dead in (("True", False), ("False", False), ("Unknown", True)):
            await say_ready(here, node, status)
            assert await fences.ask(node, "u0", "pod evil-0", EVIL) is is_dead
        future = "2200-01-01T00:00:00Z"
        await say_ready(here, node, "Unknown", future)
        assert not await fences.ask(node, "u1", "pod evil-0", EVIL)


def test_malformed_fences_of_a_node_count_as_missing() -> None:
    now = float(int(wall()))
    made = tuple(Fence(f"u{number}", now) for number in range(100))
    assert read_fences(write_fences(made)) == made[-32:]
    for text in ("", ",,", "2026 u", "x" * 10**6, "9" * 5000 + " u", "\udc80 u", "," * 10**5):
        assert read_fences(text) == ()


async def test_a_kept_pod_of_a_fenced_machine_does_not_keep_it_fenced(place: Any) -> None:
    """Nothing of the machine runs: a pod deleted without grace is over, whoever keeps its object.

    The phase stays Running, since no kubelet says otherwise.
    """
    async with place() as here:
        name = f"{here.namespace}-n0"
        await add_node(here, name)
        await here.merge(f"nodes/{name}", {"metadata": {"annotations": {FENCE: "lost"}}})
        spec = {"nodeName": name, "containers": [{"name": "c", "image": "any"}]}
        metadata = {"name": "evil-0", "finalizers": FINALIZER}
        await here.post("pods", {"metadata": metadata, "spec": spec})
        await here.client.merge(here.path("pods/evil-0/status"), {"status": {"phase": "Running"}})
        pods = Informer(here.client, Pod, namespace=here.namespace)
        async with running(pods.run()):
            await all_synced(pods)
            fence = MachineFence(here.client, pods)
            async with asyncio.timeout(PATIENCE_SECONDS):
                while FENCE in annotations(await here.get(f"nodes/{name}")):
                    node = await here.client.get_or_none(f"api/v1/nodes/{name}", Node)
                    await fence.prove(node)
        kept = await here.get("pods/evil-0")
        assert kept is not None
        assert "deletionTimestamp" in kept["metadata"]
        found = await here.get(f"nodes/{name}")
        assert found is not None
        assert "out-of-service" not in str(found["spec"])
        assert FENCES not in annotations(found)
        await here.merge("pods/evil-0", {"metadata": {"finalizers": None}})
