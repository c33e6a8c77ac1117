"""The local API server under generated garbage and changed requests of a real kubectl.

It must refuse them with a status below 500, keep its memory, and serve an honest client meanwhile.
"""

from __future__ import annotations

import ssl
import subprocess
from collections.abc import Iterator
from contextlib import closing
from urllib.parse import urlsplit

import pytest

from tests.apiclient import Api
from tests.apiservers import Cluster, embedded_cluster
from tests.attack.listeners import Recorder, Siege, besiege
from tests.e2e.clusters import find_kubectl
from tests.samples import config_map, pod

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with embedded_cluster(tmp_path_factory.mktemp("fuzz") / "state") as found:
        yield found


@pytest.fixture
def api(cluster: Cluster) -> Iterator[Api]:
    with closing(Api(cluster)) as found:
        yield found.within("default")


def siege_of(cluster: Cluster, api: Api) -> Siege:
    """The server's address, and an honest client of it."""
    place = urlsplit(cluster.url)
    assert place.hostname is not None
    assert place.port is not None
    stranger = ssl.create_default_context(cadata=cluster.ca)
    stranger.check_hostname = False
    return Siege(
        (place.hostname, place.port),
        cluster.process.pid,
        lambda: api.get("configmaps").done(),
        stranger,
    )


def kubectl(url: str, token: str, *arguments: str, text: str = "") -> None:
    """Run the real client; what it answers does not matter here."""
    found = find_kubectl()
    place = [f"--server={url}", f"--token={token}", "--insecure-skip-tls-verify"]
    command = [found, *place, "--cache-dir=/dev/null", *arguments]
    subprocess.run(command, input=text, text=True, capture_output=True, timeout=60, check=False)


def recorded(cluster: Cluster, siege: Siege) -> list[bytes]:
    """Requests of kubectl, one of each method and path."""
    manifest = """
        {"apiVersion": "v1", "kind": "List", "items": [
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}, "data": {"k": ""}},
            {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p", "labels": {"x": "y"}},
             "spec": {"containers": [{"name": "c", "image": "i", "command": ["true"]}]}}]}"""
    with Recorder(siege, cluster.kubeconfig.parent / "server.pem") as recorder:
        for arguments in (
            ("apply", "-f", "-"),
            ("apply", "--server-side", "--force-conflicts", "-f", "-"),
            ("create", "-f", "-"),
            ("patch", "configmap", "a", "-p", '{"data":{"k":"w"}}'),
            (
                "patch",
                "pod",
                "p",
                "--type=json",
                "-p",
                '[{"op":"remove","path":"/metadata/labels/x"}]',
            ),
            ("get", "pods", "-l", "x in (y,z)", "--field-selector", "status.phase!=Running"),
            ("logs", "p"),
            ("delete", "configmap", "a"),
        ):
            kubectl(recorder.url, cluster.token, *arguments, text=manifest)
    first: dict[bytes, bytes] = {}
    for request in recorder.requests:
        line, _, _ = request.partition(b"\r\n")
        if b" HTTP/1.1" in line:
            first.setdefault(line, request)
    return list(first.values())


def test_garbage_is_refused_and_honest_clients_are_served(cluster: Cluster, api: Api) -> None:
    siege = siege_of(cluster, api)
    requests = recorded(cluster, siege)
    assert {b"GET", b"POST", b"PATCH", b"DELETE"} <= {one.split(b" ")[0] for one in requests}
    besiege(siege, requests)
    siege.check()


def test_deep_and_long_documents_harm_nobody(api: Api) -> None:
    deep: object = "end"
    for _ in range(900):
        deep = {"a": deep}
    bad = pod("deep")
    bad["spec"]["template"] = deep
    answer = api.post("pods", bad)
    assert answer.code < 500, answer
    huge = config_map("digits")
    huge["metadata"]["generation"] = int("9" * 4_000)
    answer = api.post("configmaps", huge)
    assert answer.code < 500, answer
    api.get("configmaps").done()


@pytest.mark.parametrize(
    "names",
    [
        ['t\U00033d7b"\x0e\U000e00f3'],
        ["a\r\nX-Other: b"],
        ["\\" * 3_000],
        [f"f{n}" for n in range(900)],
    ],
    ids=["control", "line", "long", "many"],
)
def test_a_warning_repeats_a_strange_field_without_harm(api: Api, names: list[str]) -> None:
    """The server ended such a connection without an answer: no header may hold the name."""
    body = config_map(f"strange-{len(names)}-{len(names[0])}") | {name: {} for name in names}
    for _ in range(3):
        answer = api.post("configmaps", body)
        assert answer.code in (201, 409), answer


@pytest.mark.parametrize("header", ["Content-Type", "Accept", "Authorization", "User-Agent"])
def test_a_header_that_is_not_utf8_is_refused(cluster: Cluster, api: Api, header: str) -> None:
    siege = siege_of(cluster, api)
    kept = f"Authorization: Bearer {cluster.token}\r\n".encode()
    line = header.encode() + b": \x80application/json\r\n"
    path = b"/api/v1/namespaces/default/pods/p"
    request = b"PATCH " + path + b" HTTP/1.1\r\nHost: a\r\n"
    answer = siege.send(request + (b"" if header == "Authorization" else kept) + line + b"\r\n")
    assert answer.startswith(b"HTTP/1.1 400 "), answer


ALIASES = "\n".join(
    ["a0: &a0 {x: y}"]
    + [f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}" for n in range(1, 10)]
)


@pytest.mark.parametrize(
    "body",
    [
        "[" * 200_000,
        "{a: " * 100_000,
        "- " * 100_000,
        ALIASES,
        f"a: {'9' * 5_000}",
        f"a: 0x{'f' * 5_000}",
    ],
    ids=["flow", "maps", "blocks", "merges", "digits", "hexadecimal"],
)
def test_yaml_that_takes_long_is_refused_at_once(api: Api, body: str) -> None:
    text = f"apiVersion: v1\nkind: ConfigMap\nmetadata: {{name: a}}\n{body}"
    if not body.startswith("a"):
        text = body
    answer = api.send("POST", "configmaps", text.encode(), "application/yaml")
    assert answer.code == 400, answer
