"""The cluster API over HTTP: AWS's JSON 1.1 protocol (reference section 1.1).

Every call is `POST /` with the operation in X-Amz-Target, signed with Signature Version 4.  Nothing
of a request is acted on that its signature does not cover.

`HANDLERS` has the operations that are offered; every other one of the service is refused with
words.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web

from unbroken.errors import UnbrokenError
from unbroken.kube.client import Object
from unbroken.kube.clock import pause
from unbroken.listener import admitted
from unbroken.log_lines import Log

from .clusters import (
    add_tags,
    create_cluster,
    delete_cluster,
    delete_tags,
    describe_cluster,
    list_clusters,
    list_tags,
    update_cluster,
    update_cluster_software,
)
from .errors import ClusterApiError, not_offered
from .events import (
    describe_cluster_event,
    describe_cluster_operation,
    list_cluster_events,
    list_cluster_operations,
    start_cluster_health_check,
)
from .nodes import (
    batch_add_cluster_nodes,
    batch_delete_cluster_nodes,
    batch_reboot_cluster_nodes,
    batch_replace_cluster_nodes,
    describe_cluster_node,
    list_cluster_nodes,
)
from .shapes import check, schema
from .signatures import (
    NEXT_SECOND,
    Credential,
    Message,
    SameSecondError,
    SignatureClaim,
    UsedSignatures,
    admit,
    headers_of,
    verify_body,
)
from .store import ApiCall, CallContext, Handler

HANDLERS: Mapping[str, Handler] = {
    "AddTags": add_tags,
    "BatchAddClusterNodes": batch_add_cluster_nodes,
    "BatchDeleteClusterNodes": batch_delete_cluster_nodes,
    "BatchRebootClusterNodes": batch_reboot_cluster_nodes,
    "BatchReplaceClusterNodes": batch_replace_cluster_nodes,
    "CreateCluster": create_cluster,
    "DeleteCluster": delete_cluster,
    "DeleteTags": delete_tags,
    "DescribeCluster": describe_cluster,
    "DescribeClusterEvent": describe_cluster_event,
    "DescribeClusterNode": describe_cluster_node,
    "DescribeClusterOperation": describe_cluster_operation,
    "ListClusterEvents": list_cluster_events,
    "ListClusterNodes": list_cluster_nodes,
    "ListClusterOperations": list_cluster_operations,
    "ListClusters": list_clusters,
    "ListTags": list_tags,
    "StartClusterHealthCheck": start_cluster_health_check,
    "UpdateCluster": update_cluster,
    "UpdateClusterSoftware": update_cluster_software,
}


log = Log(__name__)

TARGET_PREFIX = "SageMaker."
CONTENT_TYPE = "application/x-amz-json-1.1"
HEALTH_PATH = "/healthz"
"""Answered to anybody, for the probe of a kubelet."""
BODY_BYTES = 1 << 20
"""A hundred instance groups of a CreateCluster, with all that they may say, take less."""
BODY_SECONDS = 10.0
"""Seconds until the whole body of a request must be here."""
REQUEST_ID_DIGITS = 32
KEPT_OPEN = (200, 400)
"""Statuses after which a connection may be used again."""


@dataclass(frozen=True, slots=True)
class Service:
    """Dependencies of the server."""

    around: CallContext
    credentials: Mapping[str, Credential]
    """Credentials by key id."""
    used: UsedSignatures


def application(service: Service) -> web.Application:
    """The server's routes."""
    app = web.Application(client_max_size=BODY_BYTES)

    async def answer(request: web.Request) -> web.Response:
        return await _answer(service, request)

    async def healthy(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    app.router.add_get(HEALTH_PATH, healthy)
    app.router.add_route("*", "/{path:.*}", answer)
    return app


async def _answer(service: Service, request: web.Request) -> web.Response:
    id = service.around.new_hex(REQUEST_ID_DIGITS)
    status, body = 200, b""
    try:
        body = msgspec.json.encode(await _call(service, request))
    except ClusterApiError as error:
        status, body = error.status, _error(error.code, error.message)
    except web.HTTPRequestEntityTooLarge:
        text = f"The request is larger than {BODY_BYTES} bytes"
        status, body = 413, _error("RequestEntityTooLargeException", text)
    except (web.RequestPayloadError, ConnectionError) as error:
        log.info("body of a request ended early", request=id, error=error)
        status, body = 400, _error("IncompleteBody", "The body is not as its headers say")
    except UnbrokenError as error:
        # The Kubernetes API did not answer as it should; clients try again.
        log.warning("Kubernetes API did not answer", request=id, error=error)
        status, body = 503, _error("ServiceUnavailable", f"Try again: {error}")
    except Exception:
        log.exception("request failed", request=id)
        status, body = 500, _error("InternalFailure", f"Request {id} met an error of ours")
    headers = {"x-amzn-RequestId": id, "Content-Type": CONTENT_TYPE}
    response = web.Response(status=status, body=body, headers=headers)
    if status not in KEPT_OPEN:
        response.force_close()
    return response


def _error(code: str, message: str) -> bytes:
    return msgspec.json.encode({"__type": code, "message": message})


async def _call(service: Service, request: web.Request) -> Object:
    _check_target(request)
    headers = headers_of(request.headers.items())
    _check_content(headers)
    claim = admit(headers, service.credentials, service.around.now())
    body = await _body(request)
    message = Message(request.method, "/", "", headers, body)
    verify_body(message, claim, service.credentials[claim.key_id])
    operation = _operation(headers["x-amz-target"])
    value = _decoded(body)
    check(schema(), operation, value)
    if operation not in HANDLERS:
        raise not_offered(operation)
    admitted(request)
    return await _carried_out(service, claim, operation, value)


async def _carried_out(
    service: Service, claim: SignatureClaim, operation: str, value: Mapping[str, Any]
) -> Object:
    try:
        service.used.take(operation, claim, service.around.now())
    except SameSecondError:
        await pause(NEXT_SECOND)
        raise
    try:
        return await HANDLERS[operation](ApiCall(service.around, value, claim.region))
    except BaseException:
        service.used.give_back(operation, claim)
        raise


def _check_target(request: web.Request) -> None:
    """Refuse every method and address but `POST /`.

    An address may hide things that no signature covers: a query, escapes, another host.
    """
    path, mark, _ = request.raw_path.partition("?")
    if request.method != "POST" or path != "/":
        raise ClusterApiError("UnknownOperationException", "Every operation is POST /", 404)
    if mark:
        text = "Requests are signed in the Authorization header; a query is not taken"
        raise ClusterApiError("MalformedQueryString", text)


def _check_content(headers: Mapping[str, str]) -> None:
    content_type = headers.get("content-type", "").partition(";")[0].strip()
    if content_type.lower() != CONTENT_TYPE:
        text = f"Content-Type must be {CONTENT_TYPE}"
        raise ClusterApiError("UnsupportedMediaTypeException", text, 415)
    if "content-encoding" in headers:
        text = "Content-Encoding is not taken: send the body as it was signed"
        raise ClusterApiError("UnsupportedMediaTypeException", text, 415)


async def _body(request: web.Request) -> bytes:
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await request.read()
    except TimeoutError as error:
        text = f"The body was not here within {BODY_SECONDS:.0f} s"
        raise ClusterApiError("RequestTimeoutException", text, 408) from error


def _operation(target: str) -> str:
    name = target.removeprefix(TARGET_PREFIX)
    if not target.startswith(TARGET_PREFIX) or name not in schema().operations:
        raise ClusterApiError("UnknownOperationException", f"Unknown operation '{target[:100]}'")
    return name


def _decoded(body: bytes) -> Any:
    try:
        return _pruned(msgspec.json.decode(body or b"{}"))
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ClusterApiError("SerializationException", f"The body is no JSON: {error}") from error


def _pruned(value: Any) -> Any:
    """Without members that are null, which means that they are not given."""
    if isinstance(value, dict):
        return {name: _pruned(item) for name, item in value.items() if item is not None}
    return [_pruned(item) for item in value] if isinstance(value, list) else value
