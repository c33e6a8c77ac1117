"""An API server and a node in this process, for tests of the whole runner.

Tests request logs and commands from the node itself, as the API server does.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from lightkube.resources.core_v1 import Event, Pod, ServiceAccount
from yarl import URL

from unbroken.kube.client import KubeClient, connect
from unbroken.kube.clock import wall
from unbroken.kube.errors import ApiRefusal
from unbroken.kube.informer import Informer
from unbroken.local.apiserver.driver import serving
from unbroken.local.node import NodeOptions, run_node
from unbroken.local.node_calls import authorization

Object = dict[str, Any]
PODS = "api/v1/namespaces/default/pods"
STORY_SECONDS = 90
TOKEN = "token-of-the-node"
MARK = "TEST_WORLD"


def node_index() -> int:
    """Return a number of its own for the node of each test process."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0")
    return 100 + int(worker.removeprefix("gw"))


class World:
    """API server, node and helpers of a story."""

    def __init__(self, directory: Path, client: KubeClient) -> None:
        self.directory = directory
        self.client = client
        self.node_directory = directory / "node"
        self.moved = asyncio.Event()
        self.pods = Informer(client, Pod, namespace="default", on_change=self._note)
        self._node: asyncio.Task[None] | None = None
        self._failures: list[BaseException] = []

    def _note(self, _old: Pod | None, _new: Pod | None) -> None:
        self.moved.set()

    def options(self, **fields: Any) -> NodeOptions:
        """Return the options of this world's node."""
        given: dict[str, Any] = {
            "name": "n1",
            "directory": self.node_directory,
            "index": node_index(),
            "cpu": "2",
            "memory": "4Gi",
            "labels": {"zone": "z"},
            "kubelet_token": TOKEN,
        }
        return NodeOptions(**{**given, **fields})

    @asynccontextmanager
    async def node(self, **fields: Any) -> AsyncIterator[None]:
        """Run the node while the block lasts; its pods stay."""
        registered = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            options = self.options(**fields)
            running = tasks.create_task(
                run_node(self.client, options, on_registered=registered.set)
            )
            await registered.wait()
            try:
                yield
            finally:
                running.cancel()

    async def create(self, name: str, *containers: Object, **spec: Any) -> Object:
        """Create a pod on the node; its processes carry its name (see `processes_of`)."""
        mark = {"name": MARK, "value": f"{self.directory}/{name}/"}
        marked = [{**c, "env": [*c.get("env", ()), mark]} for c in containers]
        body = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name},
            "spec": {"nodeName": "n1", "containers": marked, **spec},
        }
        return await self.post(PODS, body)

    async def post(self, path: str, body: Object) -> Object:
        """Create any object."""
        found: Object = json.loads(await self.client.raw("POST", path, body=body))
        return found

    async def delete(self, name: str, grace: int | None = None) -> None:
        """Ask for a pod's deletion."""
        parameters = {} if grace is None else {"gracePeriodSeconds": str(grace)}
        await self.client.raw("DELETE", f"{PODS}/{name}", parameters=parameters)

    async def get(self, path: str) -> Object | None:
        """Return any object as it is now; None if it is gone."""
        try:
            found: Object = json.loads(await self.client.raw("GET", path))
        except ApiRefusal as refusal:
            if refusal.code == 404:
                return None
            raise
        return found

    async def until(self, name: str, is_so: Callable[[Object | None], bool]) -> Object:
        """Wait until a pod fits; None stands for a pod that is gone."""
        while True:
            self.moved.clear()
            found = self.pods.get(name, "default")
            pod = None if found is None else found.to_dict()
            if is_so(pod):
                return pod or {}
            await self.moved.wait()

    async def phase(self, name: str, wanted: str) -> Object:
        """Wait for a phase."""
        return await self.until(
            name, lambda pod: pod is not None and pod["status"].get("phase") == wanted
        )

    async def ready(self, name: str) -> Object:
        """Wait until a pod is ready."""
        return await self.until(name, lambda pod: condition(pod, "Ready") == "True")

    async def gone(self, name: str) -> None:
        """Wait until a pod has left."""
        await self.until(name, lambda pod: pod is None)

    async def recorded(self, wanted: set[str]) -> None:
        """Wait until events with all of these reasons have been recorded."""
        moved = asyncio.Event()
        events = Informer(self.client, Event, namespace="default", on_change=lambda *_: moved.set())
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(events.run())
            while not wanted <= {str(event.reason) for event in events.items()}:
                moved.clear()
                await moved.wait()
            watching.cancel()

    async def service_account(self) -> None:
        """Wait until pods may be created: controllers make the account that they need."""
        made = asyncio.Event()
        accounts = Informer(
            self.client, ServiceAccount, namespace="default", on_change=lambda *_: made.set()
        )
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(accounts.run())
            await made.wait()
            watching.cancel()

    async def address(self) -> str:
        """Return the address of the node's own server."""
        node = await self.get("api/v1/nodes/n1")
        assert node is not None
        port = node["status"]["daemonEndpoints"]["kubeletEndpoint"]["Port"]
        return f"http://{node['status']['addresses'][0]['address']}:{port}"

    async def logs(self, name: str, container: str = "main", **query: str) -> str:
        """Return a container's log."""
        url = f"{await self.address()}/containerLogs/default/{name}/{container}"
        asked = URL(url).with_query(query)
        async with (
            aiohttp.ClientSession(headers=headers(asked), raise_for_status=True) as session,
            session.get(asked) as answer,
        ):
            return await answer.text()

    async def execute(
        self, name: str, *argv: str, stdin: bytes | None = None, tty: bool = False
    ) -> dict[int, bytes]:
        """Run a command in `main`; return the output of each channel."""
        query = [("command", part) for part in argv] + [("stdout", "true")]
        query += [("tty", "true")] if tty else [("stderr", "true")]
        query += [("stdin", "true")] if stdin is not None else []
        asked = URL(f"{await self.address()}/exec/default/{name}/main").with_query(query)
        found: dict[int, bytes] = {}
        async with (
            aiohttp.ClientSession(headers=headers(asked)) as session,
            session.ws_connect(asked, protocols=["v5.channel.k8s.io"]) as socket,
        ):
            if stdin is not None:
                await socket.send_bytes(b"\x00" + stdin)
                if not tty:
                    await socket.send_bytes(b"\xff\x00")
            async for message in socket:
                found[message.data[0]] = found.get(message.data[0], b"") + message.data[1:]
        return found


def headers(asked: URL) -> dict[str, str]:
    """Return the headers with which the API server calls the node."""
    said = authorization(TOKEN, asked.authority, asked.raw_path_qs, wall())
    return {"Authorization": said}


def processes_of(directory: Path, name: str = "") -> list[int]:
    """Return the live processes of a pod of the world in this directory, or of all its pods."""
    mark = f"{MARK}={directory}/{name}{'/' if name else ''}".encode()
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                variables = Path(f"/proc/{entry}/environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if any(variable.startswith(mark) for variable in variables):
                found.append(int(entry))
    return found


def condition(pod: Object | None, kind: str) -> str:
    """Return the status of a pod's condition; empty if there is none."""
    conditions = ((pod or {}).get("status") or {}).get("conditions") or ()
    return next((c["status"] for c in conditions if c["type"] == kind), "")


def state(pod: Object, container: str = "main") -> Object:
    """Return the status of a container; a blank one before the node has reported it."""
    statuses = [
        *(pod["status"].get("containerStatuses") or ()),
        *(pod["status"].get("initContainerStatuses") or ()),
    ]
    blank = {"state": {}, "restartCount": 0, "started": False}
    return next((s for s in statuses if s["name"] == container), blank)


def shell(text: str, name: str = "main", **fields: Any) -> Object:
    """Return a container that runs a shell script."""
    return {"name": name, "image": "none", "command": ["sh", "-c", text], **fields}


def in_world(directory: Path, story: Callable[[World], Awaitable[None]]) -> None:
    """Run a story in a world of its own; check that no process of it remains."""

    async def go() -> None:
        async with asyncio.timeout(STORY_SECONDS), serving(directory / "api") as server:
            client = connect(server.internal_kubeconfig)
            try:
                world = World(directory, client)
                async with asyncio.TaskGroup() as tasks:
                    watching = tasks.create_task(world.pods.run())
                    await world.pods.synced.wait()
                    await story(world)
                    watching.cancel()
            finally:
                await client.close()

    asyncio.run(go())
