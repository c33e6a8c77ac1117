"""The cluster API over HTTP: AWS's JSON 1.1 protocol (reference section 1.1).

Every call is `POST /` with the operation in X-Amz-Target.  Where no credentials are configured the
server takes any signature; it then answers only requests that name this machine as their host, for
a web page in a browser here could otherwise send some.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any

import msgspec
from aiohttp import web

from unbroken.errors import UnbrokenError

from .calls import Around, Call, Object
from .errors import ApiError, not_offered
from .operations import HANDLERS
from .shapes import schema
from .signatures import AUTHORIZATION, Credential, Message, verify
from .validation import check

log = logging.getLogger(__name__)

TARGET_PREFIX = "SageMaker."
CONTENT_TYPE = "application/x-amz-json-1.1"
BODY_BYTES = 1 << 20
"""A hundred instance groups of a CreateCluster, with all that they may say, take less."""
REQUEST_ID_DIGITS = 32


@dataclass(frozen=True, slots=True)
class Service:
    """What the server needs."""

    around: Around
    credentials: Mapping[str, Credential] | None
    """By key id; None: signatures are not looked at."""


def application(service: Service) -> web.Application:
    """The server's routes."""
    app = web.Application(client_max_size=BODY_BYTES)

    async def answer(request: web.Request) -> web.Response:
        return await _answer(service, request)

    app.router.add_route("*", "/{path:.*}", answer)
    return app


async def _answer(service: Service, request: web.Request) -> web.Response:
    id = service.around.new_hex(REQUEST_ID_DIGITS)
    status, body = 200, b""
    try:
        body = msgspec.json.encode(await _call(service, request))
    except ApiError as error:
        status, body = error.status, _error(error.code, error.message)
    except web.HTTPRequestEntityTooLarge:
        text = f"The request is larger than {BODY_BYTES} bytes"
        status, body = 413, _error("RequestEntityTooLargeException", text)
    except UnbrokenError as error:
        # The Kubernetes API did not answer as it should; clients try again.
        log.warning('request=%s reason="%s"', id, error)
        status, body = 503, _error("ServiceUnavailable", f"Try again: {error}")
    except Exception:
        log.exception("request=%s target=%s", id, request.headers.get("X-Amz-Target", "")[:100])
        status, body = 500, _error("InternalFailure", f"Request {id} met an error of ours")
    headers = {"x-amzn-RequestId": id, "Content-Type": CONTENT_TYPE}
    return web.Response(status=status, body=body, headers=headers)


def _error(code: str, message: str) -> bytes:
    return msgspec.json.encode({"__type": code, "message": message})


async def _call(service: Service, request: web.Request) -> Object:
    if request.method != "POST" or request.path != "/":
        raise ApiError("UnknownOperationException", "Every operation is POST /", 404)
    if request.content_type != CONTENT_TYPE:
        text = f"Content-Type must be {CONTENT_TYPE}"
        raise ApiError("UnsupportedMediaTypeException", text, 415)
    body = await request.read()
    region = _who(service, request, body)
    operation = _operation(request.headers.get("X-Amz-Target", ""))
    value = _decoded(body)
    check(schema(), operation, value)
    handler = HANDLERS.get(operation)
    if handler is None:
        raise not_offered(operation)
    return await handler(Call(service.around, value, region))


def _who(service: Service, request: web.Request, body: bytes) -> str:
    """The region that the request is signed for; ApiError where it may not come in."""
    headers = {name.lower(): value for name, value in request.headers.items()}
    if service.credentials is not None:
        message = Message(request.method, request.path, request.query_string, headers, body)
        claim = verify(message, service.credentials, service.around.now())
        return claim.region or service.around.region
    if not is_local(headers.get("host", "")):
        text = "Without credentials only requests to a loopback address are answered"
        raise ApiError("AccessDeniedException", text, 403)
    found = AUTHORIZATION.fullmatch(headers.get("authorization", "").strip())
    parts = found[1].split("/") if found is not None else []
    is_usable = len(parts) >= 5 and parts[-3].replace("-", "").isalnum() and parts[-3].islower()
    return parts[-3] if is_usable else service.around.region


def is_local(host: str) -> bool:
    """Whether the host of a request, with or without its port, is this machine's loopback."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
    name = name.strip("[]")
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"


def _operation(target: str) -> str:
    name = target.removeprefix(TARGET_PREFIX)
    if not target.startswith(TARGET_PREFIX) or name not in schema().operations:
        raise ApiError("UnknownOperationException", f"Unknown operation '{target[:100]}'")
    return name


def _decoded(body: bytes) -> Any:
    try:
        return _pruned(msgspec.json.decode(body or b"{}"))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError("SerializationException", f"The body is no JSON: {error}") from error


def _pruned(value: Any) -> Any:
    """Without members that are null, which means that they are not given."""
    if isinstance(value, dict):
        return {name: _pruned(one) for name, one in value.items() if one is not None}
    return [_pruned(one) for one in value] if isinstance(value, list) else value
