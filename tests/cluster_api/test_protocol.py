"""The protocol, and every operation of the service model over it: errors are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.apiservers import Cluster
from tests.cluster_api.api_program import KEY, Running
from tests.cluster_api.shape_samples import broken, good
from unbroken.cluster_api.driver import ClusterApiOptions, serve_cluster_api
from unbroken.cluster_api.server import BODY_BYTES, HANDLERS
from unbroken.cluster_api.shapes import schema
from unbroken.cluster_api.signatures import Credential, Message, sign
from unbroken.errors import SpecError
from unbroken.kube.client import connect
from unbroken.kube.clock import wall

pytestmark = pytest.mark.slow
SCHEMA = schema()
OPERATIONS = sorted(SCHEMA.operations)
ACCEPTED = {"", "ResourceNotFound"}
"""Answers to a valid request about a cluster that does not exist, or about none."""
BY_MEANING = {
    "CreateCluster": "RestrictedInstanceGroups",
    "UpdateCluster": "RestrictedInstanceGroups",
    "DescribeClusterNode": "Give one of",
    **dict.fromkeys(("ListClusters",), "NextToken"),
}
"""Errors of requests that contradict themselves if they have every member."""


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
        ("SageMaker.ListClusters", b"{}", {"path": "/?X-Amz-Signature=00"}, 400,
         "MalformedQueryString"),
        ("SageMaker.ListClusters", b"{}", {"Content_Encoding": "gzip"}, 415,
         "UnsupportedMediaTypeException"),
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


# --- credentials


def test_only_who_has_a_key_may_call(running: Running) -> None:
    body = json.dumps({"MaxResults": 5}).encode()
    target, now = "SageMaker.ListClusters", wall()
    given = signed(running, KEY, body, now)
    assert running.send(target, body, is_signed=False, **given).status == 200
    other = Credential(KEY.key_id, "x")
    for headers, sent, code in (
        ({}, body, "MissingAuthenticationTokenException"),
        (signed(running, other, body, now), body, "InvalidSignatureException"),
        (signed(running, KEY, body, now - 400), body, "InvalidSignatureException"),
        (signed(running, KEY, body, now), b"{}", "InvalidSignatureException"),
    ):
        answer = running.send(target, sent, is_signed=False, **headers)
        assert (answer.status, answer.code) == (403, code)


def signed(running: Running, key: Credential, body: bytes, now: float) -> dict[str, str]:
    headers = {
        "host": running.endpoint.removeprefix("http://"),
        "content-type": "application/x-amz-json-1.1",
        "x-amz-target": "SageMaker.ListClusters",
    }
    made = sign(Message("POST", "/", "", headers, body), key, "eu-west-1", now)
    return {name: one for name, one in made.items() if name not in headers or name == "host"}


async def _serve(cluster: Cluster, options: ClusterApiOptions) -> None:
    async with connect(cluster.kubeconfig) as client, serve_cluster_api(client, options):
        raise AssertionError("it must not serve")


@pytest.mark.parametrize(
    ("path", "said"),
    [
        (None, "needs credentials: .*--cluster-api-credentials"),
        (Path("/nowhere/credentials"), "cannot read the credentials"),
    ],
)
async def test_it_does_not_start_without_credentials(
    clusters: Callable[[str], Cluster], path: Path | None, said: str
) -> None:
    with pytest.raises(SpecError, match=said):
        await _serve(clusters("embedded"), ClusterApiOptions(path))
