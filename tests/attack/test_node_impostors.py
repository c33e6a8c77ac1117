"""The attack: a program answers in place of a node that is off, without end.

The API server read a node's error, and each message of a command's output, as a whole: 1 GiB of an
impostor's answer to `kubectl logs` or `kubectl exec` was in the memory of the whole local cluster.
Another user of the machine who listened there got what was typed into a command, and could answer
with any output.
"""

from __future__ import annotations

import base64
import hashlib
import os
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from urllib.parse import urlsplit

import pytest

from tests.apiclient import Api
from tests.apiservers import Cluster
from tests.samples import pod
from tests.watching import PATIENCE_SECONDS

pytestmark = pytest.mark.slow

GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
PIECE = 256 * 1024
SENT_MAX = 64 << 20
"""Bytes that the impostor sends if they are taken."""
TAKEN_MAX = 24 << 20
"""Bytes in the kernel's buffers of two sockets, and what the server reads before it gives up."""
LISTENER = """
import os, socket
os.setuid(65534)
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
link, _ = listener.accept()
print(link.recv(9), flush=True)
"""


@contextmanager
def node_at(api: Api, port: int) -> Iterator[None]:
    """Have a node of this port, and a pod that runs there."""
    api.post("/api/v1/nodes", {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "off"}})
    place = {
        "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
        "daemonEndpoints": {"kubeletEndpoint": {"Port": port}},
    }
    api.patch("merge", "/api/v1/nodes/off/status", {"status": place}).done()
    api.post("pods", pod("victim", nodeName="off")).done()
    container = {"name": "main", "image": "i", "imageID": "i", "ready": True, "restartCount": 0}
    running = {**container, "state": {"running": {}}}
    status = {"phase": "Running", "containerStatuses": [running]}
    api.patch("merge", "pods/victim/status", {"status": status}).done()
    try:
        yield
    finally:
        api.delete("pods/victim", gracePeriodSeconds=0).done()
        api.delete("/api/v1/nodes/off").done()


def sent(listener: socket.socket, opening: Callable[[bytes], bytes], piece: bytes) -> int:
    """Answer one connection without end; return how much of the answer was taken."""
    listener.settimeout(PATIENCE_SECONDS)
    link, _ = listener.accept()
    link.settimeout(PATIENCE_SECONDS)
    with link:
        head, count = b"", 0
        while b"\r\n\r\n" not in head:
            head += link.recv(65536)
        try:
            link.sendall(opening(head))
            while count < SENT_MAX:
                link.sendall(piece)
                count += len(piece)
        except ConnectionError:
            pass  # the server has had enough
        return count


def message_without_end(head: bytes) -> bytes:
    """Accept a WebSocket, and begin a message of a TiB."""
    found = dict(line.split(b": ", 1) for line in head.split(b"\r\n") if b": " in line)
    fields = {name.lower(): value for name, value in found.items()}
    accept = base64.b64encode(hashlib.sha1(fields[b"sec-websocket-key"] + GUID).digest())
    return (
        b"HTTP/1.1 101 x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Protocol: "
        + (fields[b"sec-websocket-protocol"] + b"\r\nSec-WebSocket-Accept: " + accept)
        + (b"\r\n\r\n\x82\x7f" + (1 << 40).to_bytes(8, "big"))
    )


def error_without_end(_head: bytes) -> bytes:
    """Begin an error."""
    return b"HTTP/1.1 500 No\r\nTransfer-Encoding: chunked\r\n\r\n"


def headers_without_end(_head: bytes) -> bytes:
    """Begin a head."""
    return b"HTTP/1.1 200 OK\r\n"


def talk(cluster: Cluster, call: str) -> tuple[int, bytes]:
    """Ask for a log, or for a command; return the status and the beginning of the answer."""
    where = urlsplit(cluster.url)
    context = ssl.create_default_context(cadata=cluster.ca)
    upgrade = (
        "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
        "Sec-WebSocket-Protocol: v5.channel.k8s.io, v4.channel.k8s.io\r\n"
        f"Sec-WebSocket-Key: {base64.b64encode(bytes(16)).decode()}\r\n"
    )
    request = (
        f"GET /api/v1/namespaces/default/pods/victim/{call} HTTP/1.1\r\nHost: x\r\n"
        f"Authorization: Bearer {cluster.token}\r\n{upgrade if call != 'log' else ''}\r\n"
    )
    place = (str(where.hostname), int(where.port or 0))
    with (
        socket.create_connection(place, PATIENCE_SECONDS) as plain,
        context.wrap_socket(plain, server_hostname=where.hostname) as link,
    ):
        link.sendall(request.encode())
        answer = link.recv(65536)
        status = int(answer.split()[1])
        if status == 101:
            while link.recv(65536):
                pass
        return status, answer


@pytest.mark.parametrize(
    ("opening", "piece", "call", "status"),
    [
        (error_without_end, b"40000\r\n" + b"a" * PIECE + b"\r\n", "log", 500),
        (headers_without_end, b"X-A: " + b"a" * 8000 + b"\r\n", "log", 503),
        (message_without_end, b"a" * PIECE, "exec?command=cat&stdin=1&stdout=1", 101),
        (headers_without_end, b"X-A: " + b"a" * 8000 + b"\r\n", "exec?command=cat&stdout=1", 503),
        (message_without_end, b"a" * PIECE, "portforward?ports=80", 101),
    ],
    ids=["error", "headers", "output", "headers-of-output", "forwarded"],
)
def test_an_answer_without_end_in_place_of_a_node_is_not_read(
    clusters: Callable[[str], Cluster],
    opening: Callable[[bytes], bytes],
    piece: bytes,
    call: str,
    status: int,
) -> None:
    cluster = clusters("embedded")
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        closing(Api(cluster)) as whole,
        ThreadPoolExecutor(1) as pool,
    ):
        api = whole.within("default")
        with node_at(api, listener.getsockname()[1]):
            impostor = pool.submit(sent, listener, opening, piece)
            assert talk(cluster, call)[0] == status
            assert impostor.result(PATIENCE_SECONDS) < TAKEN_MAX


@pytest.mark.skipif(os.geteuid() != 0, reason="acts as another user")
@pytest.mark.parametrize("call", ["log", "exec?command=cat&stdin=1", "portforward?ports=80"])
def test_another_user_at_the_place_of_a_node_is_not_called(
    clusters: Callable[[str], Cluster], call: str
) -> None:
    cluster = clusters("embedded")
    other = subprocess.Popen([sys.executable, "-c", LISTENER], stdout=subprocess.PIPE, text=True)
    with other, closing(Api(cluster)) as whole:
        try:
            assert other.stdout is not None
            port = int(other.stdout.readline())
            with node_at(whole.within("default"), port):
                status, answer = talk(cluster, call)
            assert (status, b"user 65534 of this machine listens" in answer) == (503, True), answer
            # The first that it hears is this.
            with socket.create_connection(("127.0.0.1", port), PATIENCE_SECONDS) as link:
                link.sendall(b"the test\n")
                assert other.stdout.readline() == "b'the test\\n'\n"
        finally:
            other.kill()
