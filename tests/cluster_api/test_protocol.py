"""The protocol, and every operation of the service model over it: what is wrong is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from api_program import Running, credentials_file, running_api
from shape_samples import broken, good

from apiservers import Cluster
from unbroken.cluster_api.driver import ClusterApiOptions, serve_cluster_api
from unbroken.cluster_api.operations import HANDLERS
from unbroken.cluster_api.server import BODY_BYTES, is_local
from unbroken.cluster_api.shapes import schema
from unbroken.cluster_api.signatures import Credential, Message, sign
from unbroken.errors import SpecError
from unbroken.kube.client import connect
from unbroken.kube.clock import wall

pytestmark = pytest.mark.slow
SCHEMA = schema()
OPERATIONS = sorted(SCHEMA.operations)
ACCEPTED = {"", "ResourceNotFound"}
"""Of a valid request about a cluster that is not there, or about none."""
BY_MEANING = {
    "CreateCluster": "RestrictedInstanceGroups",
    "UpdateCluster": "RestrictedInstanceGroups",
    "DescribeClusterNode": "Give one of",
    **dict.fromkeys(("ListClusters",), "NextToken"),
}
"""Requests with every member there is contradict themselves here; what is then said."""


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_valid_request_passes_validation(running: Running, operation: str) -> None:
    value = good(SCHEMA, SCHEMA.operations[operation].input)
    answer = running.call(operation, **value)
    if operation not in HANDLERS:
        assert answer.code == "UnsupportedOperationException"
        assert f"{operation} is not offered here" in answer.message
    elif operation in BY_MEANING:
        assert answer.code == "ValidationException"
        assert BY_MEANING[operation] in answer.message
    else:
        assert answer.code in ACCEPTED, answer


@pytest.mark.parametrize("operation", OPERATIONS)
def test_each_violated_constraint_is_refused(running: Running, operation: str) -> None:
    for case in broken(SCHEMA, operation):
        answer = running.call(operation, **case.value)
        assert (answer.status, answer.code) == (400, "ValidationException"), (case, answer)
        wanted = f"at '{case.path}' failed to satisfy constraint: Member must {case.constraint}"
        assert wanted in answer.message, case


def test_every_answer_has_an_id_and_the_content_type(running: Running) -> None:
    for answer in (running.call("ListClusters"), running.call("DescribeCluster", ClusterName="x")):
        assert len(answer.headers["x-amzn-requestid"]) == 32
        assert answer.headers["content-type"] == "application/x-amz-json-1.1"


@pytest.mark.parametrize(
    ("target", "body", "options", "status", "code"),
    [
        ("SageMaker.Nothing", b"{}", {}, 400, "UnknownOperationException"),
        ("ListClusters", b"{}", {}, 400, "UnknownOperationException"),
        ("", b"{}", {}, 400, "UnknownOperationException"),
        ("SageMaker.ListClusters", b"{", {}, 400, "SerializationException"),
        ("SageMaker.ListClusters", b"\xff\xfe", {}, 400, "SerializationException"),
        ("SageMaker.ListClusters", b"[" * 100_000, {}, 400, "SerializationException"),
        ("SageMaker.ListClusters", b"[]", {}, 400, "ValidationException"),
        ("SageMaker.ListClusters", b"null", {}, 400, "ValidationException"),
        ("SageMaker.ListClusters", b" " * (BODY_BYTES + 1), {}, 413,
         "RequestEntityTooLargeException"),
        ("SageMaker.ListClusters", b"{}", {"method": "GET"}, 404, "UnknownOperationException"),
        ("SageMaker.ListClusters", b"{}", {"path": "/other"}, 404, "UnknownOperationException"),
        ("SageMaker.ListClusters", b"{}", {"Content_Type": "text/plain"}, 415,
         "UnsupportedMediaTypeException"),
        ("SageMaker.ListClusters", b"{}", {"Host": "evil.example.com"}, 403,
         "AccessDeniedException"),
    ],
)  # fmt: skip
def test_what_is_no_call_is_refused(
    running: Running, target: str, body: bytes, options: dict[str, str], status: int, code: str
) -> None:
    answer = running.send(target, body, **options)
    assert (answer.status, answer.code) == (status, code)
    assert answer.message


def test_an_empty_body_is_an_empty_request(running: Running) -> None:
    assert running.send("SageMaker.ListClusters", b"").status == 200


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1:8080", True),
        ("127.0.0.1", True),
        ("localhost:1", True),
        ("[::1]:8080", True),
        ("", False),
        ("10.0.0.1:80", False),
        ("localhost.evil.com", False),
    ],
)
def test_which_hosts_are_this_machine(host: str, expected: bool) -> None:
    assert is_local(host) is expected


# --- with credentials


@pytest.fixture(scope="module")
def guarded(
    clusters: Callable[[str], Cluster], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    """The cluster API with credentials."""
    file = credentials_file(tmp_path_factory.mktemp("keys"))
    with running_api(clusters("embedded"), ClusterApiOptions(credentials=file)) as found:
        yield found


def signed(running: Running, key: Credential, body: bytes, now: float) -> dict[str, str]:
    headers = {
        "host": running.endpoint.removeprefix("http://"),
        "content-type": "application/x-amz-json-1.1",
        "x-amz-target": "SageMaker.ListClusters",
    }
    made = sign(Message("POST", "/", "", headers, body), key, "eu-west-1", now)
    return {name: one for name, one in made.items() if name not in headers or name == "host"}


def test_only_who_has_a_key_may_call(guarded: Running) -> None:
    key = Credential("AKIDEXAMPLE", "secret/of+it")
    body = json.dumps({"MaxResults": 5}).encode()
    target, now = "SageMaker.ListClusters", wall()
    assert guarded.send(target, body, **signed(guarded, key, body, now)).status == 200
    for answer, code in (
        (guarded.send(target, body), "MissingAuthenticationTokenException"),
        (
            guarded.send(target, body, **signed(guarded, Credential(key.key_id, "x"), body, now)),
            "InvalidSignatureException",
        ),
        (
            guarded.send(target, body, **signed(guarded, key, body, now - 400)),
            "InvalidSignatureException",
        ),
        (
            guarded.send(target, b"{}", **signed(guarded, key, body, now)),
            "InvalidSignatureException",
        ),
    ):
        assert (answer.status, answer.code) == (403, code)


async def _serve(cluster: Cluster, options: ClusterApiOptions) -> None:
    async with connect(cluster.kubeconfig) as client, serve_cluster_api(client, options):
        raise AssertionError("it must not serve")


def test_other_addresses_need_credentials(clusters: Callable[[str], Cluster]) -> None:
    import asyncio

    with pytest.raises(SpecError, match="needs credentials: --cluster-api-credentials"):
        asyncio.run(_serve(clusters("embedded"), ClusterApiOptions(host="0.0.0.0")))
    missing = ClusterApiOptions(credentials=Path("/nowhere/credentials"))
    with pytest.raises(SpecError, match="cannot read the credentials"):
        asyncio.run(_serve(clusters("embedded"), missing))
