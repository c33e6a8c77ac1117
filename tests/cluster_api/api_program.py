"""The cluster API and its controller in a thread of the test, over the local API server.

The test stands for the provider of machines: `Hands` controls whether each machine becomes a node.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

from lightkube.resources.core_v1 import Node

from tests.apiclient import Api, Object
from tests.apiservers import Cluster
from tests.watching import PATIENCE_SECONDS, wait_until
from unbroken.cluster_api.driver import ClusterApiOptions, serve_cluster_api
from unbroken.cluster_api.signatures import Credential, Message, credentials_text, sign
from unbroken.kube.client import KubeClient, connect
from unbroken.kube.clock import rfc3339, wall
from unbroken.kube.errors import ApiRefusal
from unbroken.kube.events import EventRecorder
from unbroken.kube.informer import Informers
from unbroken.kube.workqueue import WorkQueue
from unbroken.operator import definitions
from unbroken.operator.clusters import Clusters
from unbroken.operator.kinds import MachineObject
from unbroken.operator.nodes.checks import Checker
from unbroken.operator.nodes.checks_pods import CheckerOptions
from unbroken.spec.nodes.kinds import CLUSTER, MACHINE, NODE_CHECK

PATHS = {"clusters": CLUSTER.path, "machines": MACHINE.path, "nodechecks": NODE_CHECK.path}
JSON = "application/x-amz-json-1.1"
KEY = Credential("AKIDEXAMPLE", "secret/of+it")
"""The key in `credentials_file`."""


@dataclass
class Answer:
    """The server's answer."""

    status: int
    body: Any
    headers: dict[str, str]

    @property
    def code(self) -> str:
        """Code of an error; empty for a success."""
        return "" if self.status == 200 else str(self.body["__type"])

    @property
    def message(self) -> str:
        """Message of an error."""
        return str(self.body["message"])


@dataclass
class Hands:
    """The provider: whether machines come up, and which fail."""

    fails: set[str] = field(default_factory=set)
    """Groups whose machines cannot come up."""


class Running:
    """A running cluster API."""

    def __init__(self, api: Api) -> None:
        self.cluster = api.cluster
        self.api = api
        self.endpoint = ""
        self.hands = Hands()
        self.run_checker: Callable[[], AbstractContextManager[None]] = nullcontext
        self.key = KEY

    def send(
        self,
        target: str,
        body: bytes,
        *,
        method: str = "POST",
        path: str = "/",
        is_signed: bool = True,
        **headers: str,
    ) -> Answer:
        """Send one request as it is given."""
        place = urlsplit(self.endpoint)
        assert place.hostname is not None
        connection = http.client.HTTPConnection(
            place.hostname, place.port, timeout=PATIENCE_SECONDS
        )
        sent = {"host": place.netloc, "content-type": JSON, "x-amz-target": target}
        sent |= {name.replace("_", "-").lower(): value for name, value in headers.items()}
        if is_signed:
            # As in our own client: equal calls within a second are distinguished.
            sent["amz-sdk-invocation-id"] = uuid4().hex
            sent = sign(Message(method, "/", "", sent, body), self.key, "us-west-2", wall())
        try:
            connection.request(method, path, body, sent)
            response = connection.getresponse()
            said = response.read()
        finally:
            connection.close()
        found = {name.lower(): value for name, value in response.getheaders()}
        return Answer(response.status, json.loads(said), found)

    def call(self, operation: str, **members: Any) -> Answer:
        """Call an operation."""
        return self.send(f"SageMaker.{operation}", json.dumps(members).encode())

    def ok(self, operation: str, **members: Any) -> Any:
        """Call an operation that must succeed; return its answer."""
        answer = self.call(operation, **members)
        assert answer.status == 200, answer
        return answer.body

    def until(self, what: Callable[[], Any], holds: Callable[[Any], object]) -> Any:
        """Call `what` until `holds` is true of its result; return it."""
        return wait_until(what, holds)

    def until_phase(self, name: str, phase: str) -> Any:
        """Return the description of a cluster, once it is in the phase."""
        return self.until(
            lambda: self.ok("DescribeCluster", ClusterName=name),
            lambda found: found["ClusterStatus"] == phase,
        )

    def gone(self, name: str) -> None:
        """Delete a cluster, and wait until it is gone."""
        self.ok("DeleteCluster", ClusterName=name)
        self.until(
            lambda: self.call("DescribeCluster", ClusterName=name),
            lambda found: found.code == "ResourceNotFound",
        )

    def objects(self, plural: str) -> list[Object]:
        """Return the objects of a kind of ours, or the nodes."""
        path = PATHS.get(plural, f"api/v1/{plural}")
        items: list[Object] = self.api.get(f"/{path}").made["items"]
        return items


@contextmanager
def running_api(cluster: Cluster, options: ClusterApiOptions | None = None) -> Iterator[Running]:
    """Run the programs in a thread of their own, until the block ends."""
    options = options or ClusterApiOptions(credentials_file(cluster.kubeconfig.parent))
    ready = threading.Event()
    stop: list[Callable[[], None]] = []
    with closing(Api(cluster)) as api, ThreadPoolExecutor(1, "cluster-api") as pool:
        found = Running(api)
        program = pool.submit(asyncio.run, _serve(found, options, ready, stop))
        program.add_done_callback(lambda _: ready.set())
        try:
            ready.wait()
            if not program.done():
                yield found
        finally:
            for one in stop:
                one()
            program.result()


async def _serve(
    found: Running,
    options: ClusterApiOptions,
    ready: threading.Event,
    stop: list[Callable[[], None]],
) -> None:
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()
    async with connect(found.cluster.kubeconfig) as client:
        await definitions.install(client)
        informers = Informers(client)
        async with serve_cluster_api(client, options) as endpoint, asyncio.TaskGroup() as tasks:
            programs = [informers.run(), Clusters(client, informers).run()]
            programs.append(_provide(client, informers, found.hands))
            started = [tasks.create_task(one) for one in programs]
            found.endpoint = endpoint
            found.run_checker = _checker(loop, client, informers)
            stop.append(lambda: loop.call_soon_threadsafe(stopped.set))
            ready.set()
            await stopped.wait()
            for one in started:
                one.cancel()


def _checker(
    loop: asyncio.AbstractEventLoop, client: KubeClient, informers: Informers
) -> Callable[[], AbstractContextManager[None]]:
    """Return a block in which the checker runs. It has no image: no check can be made."""

    @contextmanager
    def block() -> Iterator[None]:
        recorder = EventRecorder(client, "unbroken-operator")
        checker = Checker(client, informers, recorder, CheckerOptions())
        started = asyncio.run_coroutine_threadsafe(checker.run(), loop)
        try:
            yield
        finally:
            started.cancel()

    return block


async def _provide(client: KubeClient, informers: Informers, hands: Hands) -> None:
    """Bring each machine up as a ready node, and remove the nodes of machines that are gone."""
    machines, nodes = informers.of(MachineObject), informers.of(Node)

    async def work(name: str) -> None:
        machine = machines.get(name)
        if machine is None:
            if nodes.get(name) is not None:
                await client.raw("DELETE", f"api/v1/nodes/{name}")
            return
        spec, _ = MACHINE.spec_of(machine)
        is_failed = spec.instance_group in hands.fails
        phase = "Failed" if is_failed else "Running"
        if (machine.get("status") or {}).get("phase") == phase:
            return
        if not is_failed:
            await _join(client, name, spec.labels, [_taint(one) for one in spec.taints])
        status = {"phase": phase, **({"message": "OnCreate ended with 1"} if is_failed else {})}
        path = f"{MACHINE.path}/{name}/status"
        await client.merge(path, {"status": status})

    queue: WorkQueue[str] = WorkQueue("provider", work)
    await informers.synced()
    machines.subscribe(lambda old, new: queue.add((new or old)["metadata"]["name"]))  # type: ignore[index]
    nodes.subscribe(lambda old, new: queue.add((new or old).metadata.name))  # type: ignore[union-attr,arg-type]
    await queue.run()


def _taint(taint: Any) -> Object:
    return {"key": taint.key, "value": taint.value, "effect": taint.effect}


async def _join(client: KubeClient, name: str, labels: Any, taints: list[Object]) -> None:
    body = {"metadata": {"name": name, "labels": dict(labels)}, "spec": {"taints": taints}}
    try:
        await client.raw("POST", "api/v1/nodes", body=body)
    except ApiRefusal as error:
        if error.reason != "AlreadyExists":
            raise
    condition = {
        "type": "Ready",
        "status": "True",
        "reason": "Up",
        "lastTransitionTime": rfc3339(wall()),
    }
    status = {
        "conditions": [condition],
        "addresses": [{"type": "InternalIP", "address": "10.9.8.7"}],
    }
    await client.merge(f"api/v1/nodes/{name}/status", {"status": status})


def credentials_file(folder: Path) -> Path:
    """Write the keys that may call."""
    path = folder / "credentials"
    path.write_text(credentials_text(KEY))
    return path
