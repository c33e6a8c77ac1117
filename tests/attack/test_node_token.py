"""The attack: a local user listens at the address of a lost node, and gets the nodes' token.

The API server sent the token of all nodes to any program that listened at a node's address. While a
node is off, any user of the machine could listen there and wait for `kubectl logs`. Such a user
could then run commands in the pods of the other nodes as the user of `unbroken up`.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from tests.apiclient import Api
from tests.apiservers import Cluster
from tests.samples import pod
from tests.watching import PATIENCE_SECONDS
from unbroken.local.node_calls import VALID_SECONDS, authorization, is_authorized

TOKEN, ADDRESS, TARGET, NOW = "secret", "127.65.0.1:10250", "/exec/a/b/c?command=ls", 1_000.0


@pytest.mark.slow
def test_who_listens_where_a_node_was_learns_no_token(
    clusters: Callable[[str], Cluster],
) -> None:
    cluster = clusters("embedded")
    token = (cluster.kubeconfig.parent / "kubelet-token").read_text()
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nhi\n"
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        closing(Api(cluster)) as found,
        ThreadPoolExecutor(1) as pool,
    ):
        port = listener.getsockname()[1]
        api = found.within("default")
        api.post(
            "/api/v1/nodes", {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "off"}}
        ).done()
        status = {
            "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": port}},
        }
        api.patch("merge", "/api/v1/nodes/off/status", {"status": status}).done()
        api.post("pods", pod("victim", nodeName="off")).done()

        def impostor() -> bytes:
            listener.settimeout(PATIENCE_SECONDS)
            link, _ = listener.accept()
            with link:
                seen = link.recv(65536)
                link.sendall(answer)
            return seen

        seen = pool.submit(impostor)
        api.get("pods/victim/log", tailLines=1)
        heard = seen.result(30)
        api.delete("pods/victim", gracePeriodSeconds=0).done()
        api.delete("/api/v1/nodes/off").done()
    assert b"/containerLogs/default/victim/main?tailLines=1" in heard
    assert token.encode() not in heard
    assert re.search(rb"(?i)authorization: unbroken-node [0-9]+:[0-9a-f]{64}\r\n", heard)


@pytest.mark.parametrize(
    ("token", "address", "target", "seconds"),
    [
        (TOKEN, "127.65.1.1:10250", TARGET, 0.0),
        (TOKEN, ADDRESS, "/exec/a/b/c?command=id", 0.0),
        (TOKEN, ADDRESS, TARGET, VALID_SECONDS + 1.0),
        (TOKEN, ADDRESS, TARGET, -VALID_SECONDS - 1.0),
        ("other", ADDRESS, TARGET, 0.0),
        ("", ADDRESS, TARGET, 0.0),
    ],
)
def test_what_was_heard_is_good_for_nothing_else(
    token: str, address: str, target: str, seconds: float
) -> None:
    heard = authorization(TOKEN, ADDRESS, TARGET, NOW)
    assert is_authorized(heard, TOKEN, ADDRESS, TARGET, NOW)
    assert not is_authorized(heard, token, address, target, NOW + seconds)


@pytest.mark.parametrize(
    "header",
    ["", f"Bearer {TOKEN}", "Unbroken-Node", "Unbroken-Node 1000:", "Unbroken-Node 9:\udcff"],
)
def test_what_is_no_authorization_is_refused(header: str) -> None:
    assert not is_authorized(header, TOKEN, ADDRESS, TARGET, NOW)
