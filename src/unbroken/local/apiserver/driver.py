"""The API server as a program: its store, its server, the objects that every cluster has from its
first moment.

    python -m unbroken.local.apiserver --dir DIR [--port N]

alone, or within `unbroken up` through `serving`.
"""

from __future__ import annotations

import asyncio
import copy
import fcntl
import os
import random
import resource
import secrets
import ssl
import time
import uuid
from asyncio import Task
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http_parser import RawRequestMessage
from aiohttp.streams import StreamReader
from aiohttp.web_protocol import RequestHandler

from unbroken.errors import WorldError
from unbroken.listener import Connections, Limits, bound
from unbroken.local.apiserver.http.proxy import NodeProxy, ReadLog
from unbroken.local.apiserver.http.requests import BODY_BYTES_MAX, Target, WriteOptions
from unbroken.local.apiserver.http.server import ApiServer
from unbroken.local.apiserver.http.status import Object
from unbroken.local.apiserver.kinds.builtin import BUILTINS
from unbroken.local.apiserver.write.admission import Admit
from unbroken.local.apiserver.write.writes import WriteContext, Writer

from . import access
from .kinds.kinds import Catalogue
from .store import Store

CONNECTIONS_MAX = 4096
"""Hundreds of watches are usual."""
SUFFIX_LETTERS = "bcdfghjklmnpqrstvwxz2456789"
"""Letters of generated names (apimachinery v0.33, util/rand: no vowels, no look-alikes)."""


@dataclass(frozen=True, slots=True)
class Serving:
    """A running API server."""

    url: str
    """https, for clients with the kubeconfig."""
    kubeconfig: Path
    internal_kubeconfig: Path
    """Plain HTTP on loopback, for the other parts of this process; needs the token too."""
    token: str
    kubelet_token: str
    """Token that nodes require for logs and exec."""


@asynccontextmanager
async def serving(
    directory: Path,
    port: int = 0,
    admissions: Mapping[str, Admit] | None = None,
    own_logs: Mapping[str, ReadLog] | None = None,
) -> AsyncIterator[Serving]:
    """Serve from `directory` until the block is left.

    Port 0: the port used last time if it is still free.  `admissions` are the judges of custom
    kinds by resource, such as widgets.example.com.  `own_logs` are the logs of pods that no node
    runs, by the pod's namespace/name.  WorldError when another process serves
    the directory, or when the port or the files cannot be used.
    """
    with _locked(directory):
        identity = access.identity(directory)
        store = Store(directory / "objects.db")
        store.open()
        proxy = NodeProxy(identity.kubelet_token, own_logs or {})
        catalogue = Catalogue(BUILTINS)
        around = _write_context(admissions or {})
        server = ApiServer(store, catalogue, around, identity.token, proxy)
        create_defaults(store, catalogue, around)
        http = web.Server(server.handle, request_factory=_request, handler_cancellation=True)
        runner = web.ServerRunner(http, shutdown_timeout=0.5)
        connections = Connections(http, _limits())
        try:
            await runner.setup()
            url = await _listen(connections, access.last_port(directory, port), identity.tls)
            internal = await _listen(connections, (0,), None)
            kubeconfig = access.write_kubeconfig(directory / "kubeconfig", url, identity)
            inner = access.write_kubeconfig(directory / "internal.kubeconfig", internal, identity)
            yield Serving(url, kubeconfig, inner, identity.token, identity.kubelet_token)
        finally:
            connections.close()
            await proxy.close()
            await runner.cleanup()
            store.close()


def _limits() -> Limits:
    """Half of the process's descriptors: its nodes' connections to itself need the others."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors == resource.RLIM_INFINITY:
        return Limits(CONNECTIONS_MAX)
    return Limits(min(CONNECTIONS_MAX, descriptors // 2))


def _write_context(admissions: Mapping[str, Admit]) -> WriteContext:
    source = random.Random(secrets.randbits(128))
    return WriteContext(
        clock=time.time,
        new_uid=lambda: str(uuid.UUID(int=source.getrandbits(128), version=4)),
        new_suffix=lambda: "".join(source.choices(SUFFIX_LETTERS, k=5)),
        admissions=admissions,
    )


def _request(
    message: RawRequestMessage,
    payload: StreamReader,
    protocol: RequestHandler,
    writer: AbstractStreamWriter,
    task: Task[None],
) -> web.BaseRequest:
    loop = asyncio.get_running_loop()
    return web.BaseRequest(
        message, payload, protocol, writer, task, loop, client_max_size=BODY_BYTES_MAX
    )


async def _listen(
    connections: Connections, ports: tuple[int, ...], tls: ssl.SSLContext | None
) -> str:
    """Listen on the first of `ports` that is free; its URL."""
    for port in ports:
        try:
            (listening,) = await bound("127.0.0.1", port)
        except OSError as error:
            if port == ports[-1]:
                raise WorldError(f"cannot listen on 127.0.0.1:{port}: {error.strerror}") from error
            continue
        actual = listening.getsockname()[1]
        connections.listen(listening, tls)
        return f"{'https' if tls else 'http'}://127.0.0.1:{actual}"
    raise AssertionError("no port was given")


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Make and hold the directory for this process; WorldError when another one has it."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = directory / "apiserver.lock"
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise WorldError(f"another process already serves {directory}") from error
        yield
    finally:
        os.close(handle)


NAMESPACES = ("default", "kube-system", "kube-public", "kube-node-lease", "kubeflow")
"""Namespaces of every cluster, and the one in which HyperPod's documents start PyTorchJobs."""
PRIORITIES = {"system-cluster-critical": 2_000_000_000, "system-node-critical": 2_000_001_000}
"""kubernetes v1.33, pkg/apis/scheduling/helpers.go."""

RBAC = "rbac.authorization.k8s.io"
ADMIN_ROLE: Object = {
    "apiVersion": f"{RBAC}/v1",
    "kind": "ClusterRole",
    "metadata": {"name": "cluster-admin"},
    "rules": [
        {"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]},
        {"nonResourceURLs": ["*"], "verbs": ["*"]},
    ],
}
ADMIN_BINDING: Object = {
    "apiVersion": f"{RBAC}/v1",
    "kind": "ClusterRoleBinding",
    "metadata": {"name": "cluster-admin"},
    "roleRef": {"apiGroup": RBAC, "kind": "ClusterRole", "name": "cluster-admin"},
    "subjects": [{"apiGroup": RBAC, "kind": "Group", "name": "system:masters"}],
}


def create_defaults(store: Store, catalogue: Catalogue, around: WriteContext) -> None:
    """Create what is missing."""
    writer = Writer(store, catalogue, around)
    for name in NAMESPACES:
        content: Object = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
        _create(store, catalogue, writer, content, "", "namespaces")
    for name, value in PRIORITIES.items():
        content = {
            "apiVersion": "scheduling.k8s.io/v1",
            "kind": "PriorityClass",
            "metadata": {"name": name},
            "value": value,
        }
        _create(store, catalogue, writer, content, "scheduling.k8s.io", "priorityclasses")
    for content in (ADMIN_ROLE, ADMIN_BINDING):
        plural = f"{content['kind'].lower()}s"
        _create(store, catalogue, writer, copy.deepcopy(content), RBAC, plural)


def _create(
    store: Store, catalogue: Catalogue, writer: Writer, content: Object, group: str, plural: str
) -> None:
    kind, version = catalogue.find(group, "v1", plural)
    name = content["metadata"]["name"]
    if ("", name) not in store.collection(kind.storage).entries:
        writer.create(Target(kind, version), content, WriteOptions("kube-apiserver"))
