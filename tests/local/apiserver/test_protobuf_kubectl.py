"""Protobuf bodies of real kubectl: decoded, they equal the JSON that the same kubectl prints."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from unbroken.local.apiserver.http import bodies, protobuf
from unbroken.local.apiserver.http.status import Object, not_found

pytestmark = pytest.mark.slow
PROGRAM = shutil.which(
    "kubectl", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
)


def resources(version: str, *found: tuple[str, str]) -> Object:
    """Return the discovery of one version: (plural, kind) of each resource in it."""
    listed = [
        {"name": plural, "kind": kind, "namespaced": True, "verbs": ["get", "list"]}
        for plural, kind in found
    ]
    return {"kind": "APIResourceList", "groupVersion": version, "resources": listed}


APPS = {"groupVersion": "apps/v1", "version": "v1"}
DISCOVERY: dict[str, Object] = {
    "/api": {"kind": "APIVersions", "versions": ["v1"]},
    "/apis": {
        "kind": "APIGroupList",
        "groups": [{"name": "apps", "versions": [APPS], "preferredVersion": APPS}],
    },
    "/api/v1": resources("v1", ("pods", "Pod"), ("pods/log", "Pod")),
    "/apis/apps/v1": resources("apps/v1", ("deployments", "Deployment")),
}
"""Discovery documents that kubectl requests before it writes a rule."""


@dataclass(slots=True)
class Capture:
    """A server that keeps the posted bodies and answers with the same objects as JSON."""

    url: str = ""
    posted: list[tuple[str, bytes]] = field(default_factory=list)
    """Media type and body of each POST."""

    def from_protobuf(self) -> Object:
        """Return the only posted object; skip the test if an old kubectl sent it as JSON."""
        ((media, body),) = self.posted
        if media == bodies.JSON:
            pytest.skip(f"{PROGRAM} is older than v1.32 and sends JSON")
        assert media == protobuf.MEDIA
        return protobuf.decode(body)

    def kubectl(self, *arguments: str) -> str:
        """Run kubectl; return its output. The test fails with its error text."""
        assert PROGRAM is not None
        done = subprocess.run(
            [PROGRAM, "--server", self.url, *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, "KUBECONFIG": os.devnull},
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture
def capture() -> Iterator[Capture]:
    if PROGRAM is None:
        pytest.skip("no kubectl on the PATH")
    found = Capture()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *arguments: object) -> None:
            pass

        def do_GET(self) -> None:
            known = DISCOVERY.get(self.path.partition("?")[0])
            missing = not_found("", "anything", self.path).as_object()
            self._answer(200 if known else 404, known or missing)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            media = self.headers["Content-Type"]
            found.posted.append((media, body))
            answer = bodies.decode_object(body, media)
            if answer["kind"] == "SelfSubjectAccessReview":
                answer["status"] = {"allowed": True}
            self._answer(201, answer)

        def _answer(self, code: int, content: Object) -> None:
            text = json.dumps(content).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield found
    server.shutdown()
    thread.join()
    server.server_close()


def without_nothing(value: Any) -> Any:
    """Return `value` without nulls and without its empty structs."""
    if isinstance(value, list):
        return [without_nothing(item) for item in value]
    if not isinstance(value, dict):
        return value
    found = {key: without_nothing(item) for key, item in value.items()}
    empty = ("metadata", "spec", "resources", "status", "strategy", "loadBalancer")
    return {
        key: item
        for key, item in found.items()
        if item is not None and not (item == {} and key in empty)
    }


ROLE = "--verb=get --verb=list"
COMMANDS = [
    "namespace n",
    "configmap n --from-literal=k=v --from-literal=e= --append-hash",
    "configmap n --from-file=b=BINARY",
    "secret generic n --from-literal=k=v --from-literal=e= --from-file=b=BINARY",
    "secret docker-registry n --docker-username=u --docker-password=p --docker-server=s",
    "serviceaccount n",
    f"role n {ROLE} --resource=pods,deployments.apps --resource-name=x",
    f"clusterrole n {ROLE} --resource=pods/log",
    "clusterrole n --verb=get --non-resource-url=/logs/*",
    "clusterrole n --aggregation-rule=a=b",
    "rolebinding n --clusterrole=view --user=u --group=g --serviceaccount=ns:sa",
    "clusterrolebinding n --clusterrole=admin --group=g",
    "job n --image=x -- sh -c true",
    "service clusterip n --tcp=80:http --tcp=81",
    "service clusterip n --clusterip=None",
    "service nodeport n --tcp=80:8080 --node-port=30000",
    "service loadbalancer n --tcp=80",
    "service externalname n --external-name=x.example",
    "priorityclass n --value=-5 --description=d --global-default",
    "priorityclass n --value=0 --preemption-policy=Never",
    "poddisruptionbudget n --selector=a=b --min-available=50%",
    "poddisruptionbudget n --selector=a=b --max-unavailable=0",
]


@pytest.mark.parametrize("command", COMMANDS)
def test_what_is_created_is_what_is_printed(command: str, capture: Capture, tmp_path: Path) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\x00")
    arguments = ["create", *command.replace("BINARY", str(binary)).split()]
    before = arguments[: arguments.index("--")] if "--" in arguments else arguments
    after = arguments[len(before) :]
    printed = json.loads(
        capture.kubectl(*before, "--dry-run=client", "-o", "json", "--namespace=ns", *after)
    )
    name = capture.kubectl(*before, "-o", "name", "--namespace=ns", *after)
    assert without_nothing(capture.from_protobuf()) == without_nothing(printed)
    # Its output names the object, so kubectl has read the answer, which was JSON.
    assert name.strip().endswith("/" + printed["metadata"]["name"])


@pytest.mark.parametrize(
    ("command", "kind", "expected"),
    [
        (["whoami", "-o", "json"], "SelfSubjectReview", {}),
        (
            ["can-i", "delete", "pods", "--subresource=log", "--namespace=ns", "-q"],
            "SelfSubjectAccessReview",
            {
                "resourceAttributes": {
                    "namespace": "ns",
                    "verb": "delete",
                    "resource": "pods",
                    "subresource": "log",
                }
            },
        ),
    ],
)
def test_who_one_is_and_what_one_may(
    command: list[str], kind: str, expected: Object, capture: Capture
) -> None:
    capture.kubectl("auth", *command)
    found = capture.from_protobuf()
    assert found["kind"] == kind
    assert found.get("spec", {}) == expected
