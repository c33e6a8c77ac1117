"""Ports of pods through the API server, with kubectl in both of its protocols and with Python."""

from __future__ import annotations

import hashlib
import http.client
import os
import re
import select
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client, config
from kubernetes.stream import portforward

from tests.e2e.clusters import Cluster, pod
from tests.watching import PATIENCE_SECONDS

pytestmark = pytest.mark.slow
PROGRAM = Path(__file__).parent / "programs/port_server.py"
BIG = os.urandom(1 << 16) * 64
DIGEST = hashlib.sha256(BIG).hexdigest()
PAGE, DIGESTS, BROKEN, NOBODY = 8000, 8001, 8002, 9
Dial = Callable[[], socket.socket]
Forward = Callable[..., AbstractContextManager[tuple[int, "subprocess.Popen[str]"]]]


@pytest.fixture(scope="module")
def web(cluster: Cluster) -> str:
    """A pod that serves a page at one port and digests of what it gets at another."""
    if os.environ.get("UNBROKEN_E2E") == "real":
        pytest.skip("nodes that are processes do not serve a real control plane")
    env = [{"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]
    probe = {"tcpSocket": {"port": BROKEN}, "periodSeconds": 1}
    made = pod("web", sys.executable, str(PROGRAM), container={"env": env, "readinessProbe": probe})
    made["metadata"]["labels"] = {"app": "web"}
    ports = [{"port": PAGE}]
    service = {"metadata": {"name": "web"}, "spec": {"selector": {"app": "web"}, "ports": ports}}
    cluster.apply(made, {"apiVersion": "v1", "kind": "Service", **service})
    cluster.wait("pod/web", "condition=Ready")
    return "web"


@pytest.fixture(params=["websocket", "spdy"])
def forward(cluster: Cluster, web: str, request: pytest.FixtureRequest) -> Forward:
    """`kubectl port-forward`, as it is now and as it was before 1.31."""
    chosen = "true" if request.param == "websocket" else "false"

    @contextmanager
    def forward(what: str, port: int) -> Iterator[tuple[int, subprocess.Popen[str]]]:
        words = [cluster.kubectl_path, "port-forward", what, f":{port}"]
        environment = {**cluster.environment, "KUBECTL_PORT_FORWARD_WEBSOCKETS": chosen}
        pipe = subprocess.PIPE
        with subprocess.Popen(words, stdout=pipe, stderr=pipe, text=True, env=environment) as run:
            assert run.stdout is not None
            found = re.match(r"Forwarding from 127\.0\.0\.1:(\d+) ->", run.stdout.readline())
            try:
                assert found, run.communicate(timeout=PATIENCE_SECONDS)
                yield int(found[1]), run
            finally:
                run.terminate()

    return forward


def page(connection: http.client.HTTPConnection) -> tuple[int, bytes]:
    """Fetch the page that the pod serves."""
    connection.request("GET", "/")
    answer = connection.getresponse()
    return answer.status, answer.read()


def digest(dial: Dial) -> str:
    """Send all, say that this was all, and read the digest of what the pod got."""
    with dial() as connection:
        connection.sendall(BIG)
        connection.shutdown(socket.SHUT_WR)
        with connection.makefile("rb") as answer:
            return answer.read().decode()


def test_kubectl_forwards_a_port_of_a_pod_and_of_a_service(forward: Forward) -> None:
    for what in ("pod/web", "service/web"):
        with forward(what, PAGE) as (port, _):
            for _ in range(2):
                connection = http.client.HTTPConnection("localhost", port, timeout=PATIENCE_SECONDS)
                assert page(connection) == (200, b"page of the pod\n")
                connection.close()


def test_kubectl_carries_many_connections_at_once_and_their_ends(forward: Forward) -> None:
    with forward("pod/web", DIGESTS) as (port, _):

        def dial() -> socket.socket:
            return socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_SECONDS)

        # Nothing is ever read for this one, and nothing comes: it keeps nobody waiting.
        with dial() as idle, ThreadPoolExecutor(10) as pool:
            idle.sendall(b"x")
            found = [pool.submit(digest, dial) for _ in range(10)]
            assert {one.result() for one in found} == {DIGEST}
        assert digest(dial) == DIGEST


def test_kubectl_is_told_that_nothing_listens(forward: Forward) -> None:
    with forward("pod/web", NOBODY) as (port, run):
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_SECONDS) as connection:
            assert connection.recv(1) == b""
        _, told = run.communicate(timeout=PATIENCE_SECONDS)
    assert "error forwarding port 9 to pod web: no connection to 127." in told
    assert "Connection refused" in told


def test_kubectl_goes_on_after_a_connection_that_the_program_breaks(forward: Forward) -> None:
    with forward("pod/web", BROKEN) as (port, run):
        for _ in range(3):
            with socket.create_connection(
                ("127.0.0.1", port), timeout=PATIENCE_SECONDS
            ) as connection:
                connection.sendall(b"x")
                assert connection.recv(1) == b""
        assert run.poll() is None


def test_the_python_client_forwards_several_ports(cluster: Cluster, web: str) -> None:
    with config.new_client_from_config(str(cluster.directory / "kubeconfig")) as api:
        core = client.CoreV1Api(api)

        @contextmanager
        def dial(*ports: int) -> Iterator[Any]:
            wanted = ",".join(str(port) for port in ports)
            asked = core.connect_get_namespaced_pod_portforward
            before = set(threading.enumerate())
            forwarded = portforward(asked, web, "default", ports=wanted)
            started = set(threading.enumerate()) - before
            try:
                yield forwarded
            finally:
                forwarded.close()
                for thread in started:
                    thread.join()
                # The client leaves its connection open where the server was the first to end it.
                forwarded.websocket.shutdown()

        with dial(PAGE, DIGESTS) as forwarded:
            connection = http.client.HTTPConnection("web")
            connection.sock = forwarded.socket(PAGE)
            assert page(connection) == (200, b"page of the pod\n")
            # This client has no way to say that this was all: the program counts.
            forwarded.socket(DIGESTS).sendall(f"{len(BIG)}\n".encode() + BIG)
            answer = b""
            while len(answer) < len(DIGEST):
                answer += forwarded.socket(DIGESTS).recv(100)
            assert answer.decode() == DIGEST
        with dial(NOBODY) as refused:
            assert refused.socket(NOBODY).recv(1) == b""
            assert "Connection refused" in refused.error(NOBODY)


def ask(cluster: Cluster, path: str, headers: dict[str, str]) -> tuple[int, str]:
    """Ask the API server to forward ports; its refusal."""
    loaded = client.Configuration()
    config.load_kube_config(str(cluster.directory / "kubeconfig"), client_configuration=loaded)
    trusted = ssl.create_default_context(cafile=loaded.ssl_ca_cert)
    place = loaded.host.removeprefix("https://")
    connection = http.client.HTTPSConnection(place, context=trusted, timeout=PATIENCE_SECONDS)
    said = {"Authorization": str(loaded.get_api_key_with_prefix("BearerToken")), **headers}
    connection.request("POST", f"/api/v1/namespaces/default/pods/{path}", headers=said)
    with closing(connection), connection.getresponse() as answer:
        return answer.status, answer.read().decode()


def test_what_cannot_be_forwarded_is_refused(cluster: Cluster, web: str) -> None:
    upgrade = {"Connection": "Upgrade", "Upgrade": "SPDY/3.1"}
    code, text = ask(cluster, "web/portforward", {})
    assert (code, "needs an upgrade" in text) == (400, True)
    code, text = ask(cluster, "web/portforward", {**upgrade, "X-Stream-Protocol-Version": "v9"})
    assert (code, "none of the protocols" in text) == (403, True)
    socket_upgrade = {"Connection": "Upgrade", "Upgrade": "websocket"}
    code, text = ask(cluster, "web/portforward", socket_upgrade)
    assert (code, "SPDY/3.1+portforward.k8s.io" in text) == (400, True)
    cluster.apply(pod("waits", "true", nodeSelector={"no": "such"}))
    code, text = ask(cluster, "waits/portforward", upgrade)
    assert (code, "does not have a host assigned" in text) == (400, True)
    assert ask(cluster, "absent/portforward", upgrade)[0] == 404


def test_connections_end_with_the_client(cluster: Cluster, web: str, forward: Forward) -> None:
    with (
        forward("pod/web", DIGESTS) as (port, run),
        socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_SECONDS) as connection,
    ):
        connection.sendall(b"held")
        until(lambda: "held" in cluster.kubectl("logs", web, "--tail=1").stdout)
        run.kill()
        run.wait()
        until(lambda: "gone" in cluster.kubectl("logs", web, "--tail=1").stdout)


def until(is_so: Callable[[], bool]) -> None:
    """Ask until it is so; the test's time limit ends it."""
    while not is_so():
        select.select([], [], [], 0.05)
