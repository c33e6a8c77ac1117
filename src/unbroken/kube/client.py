"""The Kubernetes API's client: lightkube's, connected and extended.

`connect` finds the configuration. `KubeClient` adds to lightkube what informers and discovery need
(a page of a list, one watch with bookmarks, plain paths). `api_errors` translates lightkube's
errors into this project's errors.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar
from urllib.parse import urlsplit

import httpx2
import msgspec
import yaml
from lightkube import ApiError, AsyncClient, KubeConfig
from lightkube.config.client_adapter import ExecAuth, async_check_output, verify_cluster
from lightkube.config.kubeconfig import DEFAULT_KUBECONFIG, SERVICE_ACCOUNT, SingleConfig
from lightkube.config.models import User, UserExec
from lightkube.core.exceptions import ConfigError
from lightkube.core.generic_client import BasicRequest
from lightkube.core.resource import NamespacedResource, Resource, api_info

from unbroken.errors import PeerError, SpecError, UnbrokenError, WorldError
from unbroken.foreign_numbers import whole_number

from .bounds import ObjectBudgets, cut
from .errors import AlreadyExists, Conflict, NotFound, Unauthorized, refusal
from .transport import NOT_ALLOWED, AiohttpTransport, GuardedTransport

Object = dict[str, Any]
"""One Kubernetes object as decoded JSON."""

R = TypeVar("R", bound=Resource)
T = TypeVar("T")

MERGE = {"Content-Type": "application/merge-patch+json"}
"""Headers of a JSON merge patch (RFC 7386)."""
STRATEGIC = {"Content-Type": "application/strategic-merge-patch+json"}
"""Headers of a patch that merges lists of built-in kinds by their keys."""

TIMEOUT = httpx2.Timeout(30.0, connect=5.0)
"""Timeout of a request that is no watch.

The server's own limit is 60 s (kube-apiserver --request-timeout), but nothing here requests more
than a page at a time.
"""

BEGIN_SECONDS = 30.0
"""Seconds until the first byte of a streamed answer."""

UNUSABLE = (
    *(ConfigError, OSError, KeyError, ValueError, AttributeError, TypeError),
    *(msgspec.ValidationError, yaml.YAMLError),
)
"""Errors that lightkube raises for a file that is no kubeconfig."""

RETRY_SECONDS = 1.0
"""Seconds before a retry if the server names no time."""

# One line per request at INFO would hide this project's own lines.
logging.getLogger("httpx2").setLevel(logging.WARNING)

BUSY = frozenset({401, 408, 429, 500, 502, 503, 504})
"""Status codes that may change on a retry.

401 is that of a token whose file does not hold a newer one yet; a retry reads the file again.
"""


class _ListMeta(msgspec.Struct):
    resourceVersion: str | None = None
    continue_: str | None = msgspec.field(name="continue", default=None)


class _List(msgspec.Struct):
    metadata: _ListMeta
    items: list[msgspec.Raw] | None = None


class _WatchEvent(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _EventType(msgspec.Struct):
    type: str


class _Envelope(msgspec.Struct):
    """A list whose items are replaced by numbers."""

    metadata: _ListMeta
    items: list[int] | None = None


@dataclass(frozen=True, slots=True)
class ListPage:
    """Part of a list: undecoded objects, the list's version, where the next page starts."""

    items: list[msgspec.Raw]
    version: str
    next: str | None


def _page(body: bytes) -> ListPage:
    try:
        result = msgspec.json.decode(body, type=_List)
        items = result.items or []
        metadata = result.metadata
    except (RecursionError, msgspec.DecodeError):
        # The decoder cannot even skip one item: it is too deep, or no text.
        text, pieces = cut(body, 2)
        envelope = msgspec.json.decode(text, type=_Envelope)
        items = [msgspec.Raw(pieces[number]) for number in envelope.items or ()]
        metadata = envelope.metadata
    return ListPage(items, metadata.resourceVersion or "", metadata.continue_)


def _event(line: bytes) -> _WatchEvent:
    try:
        return msgspec.json.decode(line, type=_WatchEvent)
    except (RecursionError, msgspec.DecodeError):
        text, (item, *_) = cut(line, 1)
        return _WatchEvent(msgspec.json.decode(text, type=_EventType).type, msgspec.Raw(item))


@dataclass(frozen=True, slots=True)
class ListScope:
    """Scope of a list or a watch.  `namespace` None: all; selectors as the API writes them."""

    resource: type[Resource]
    namespace: str | None = None
    labels: str | None = None
    fields: str | None = None

    def path(self) -> str:
        """Return the path of the collection below the server's root."""
        info = api_info(self.resource)
        if self.namespace is not None and not issubclass(self.resource, NamespacedResource):
            raise SpecError(f"{info.resource.kind} has no namespaces")
        group = f"apis/{info.resource.group}" if info.resource.group else "api"
        inner = f"namespaces/{self.namespace}/" if self.namespace is not None else ""
        return f"{group}/{info.resource.version}/{inner}{info.plural}"

    def parameters(self) -> dict[str, str]:
        """Return the selectors as query parameters."""
        asked = {"labelSelector": self.labels, "fieldSelector": self.fields}
        return {name: value for name, value in asked.items() if value}


class _CredentialStatus(msgspec.Struct):
    token: Annotated[str, msgspec.Meta(pattern=r"^[!-~]+\Z")]


class _ExecCredential(msgspec.Struct):
    """The output of a program for credentials."""

    status: _CredentialStatus


class _ProgramAuth(ExecAuth):
    """Credentials of the program that a kubeconfig names.

    lightkube runs it for each request that is refused: as many at once as there are requests.
    """

    def __init__(self, program: UserExec) -> None:
        super().__init__(program)
        self._lock = asyncio.Lock()

    async def async_auth_flow(
        self, request: httpx2.Request
    ) -> AsyncGenerator[httpx2.Request, httpx2.Response]:
        """Send the request with the token, and again with a newer one if it is refused."""
        used = self._last_bearer
        if used is not None:
            request.headers["Authorization"] = used
            response = yield request
            if response.status_code != HTTPStatus.UNAUTHORIZED:
                return
        async with self._lock:
            if self._last_bearer == used:
                self._last_bearer = f"Bearer {await self._token()}"
        request.headers["Authorization"] = self._last_bearer or ""
        yield request

    async def _token(self) -> str:
        """Run the program.  Raises ConfigError, without what it printed: that may be a token."""
        command, environment = self._prepare()
        name = f"the program for credentials {command[0]}"
        try:
            printed = await async_check_output(command, environment)
            return msgspec.json.decode(printed, type=_ExecCredential).status.token
        except OSError as error:
            raise ConfigError(f"{name} does not start: {error.strerror}") from None
        except (ValueError, RecursionError):
            raise ConfigError(f"{name} printed no ExecCredential with a token") from None


class KubeClient(AsyncClient):
    """lightkube's client with additions. Use it as `async with`, or `await client.close()`."""

    def __init__(
        self,
        config: SingleConfig,
        carrier: AiohttpTransport,
        manager: str,
        may_write: Callable[[], bool] | None = None,
        objects: ObjectBudgets | None = None,
    ) -> None:
        self._carrier, self._manager, self._may_write = carrier, manager, may_write
        self.objects = objects or ObjectBudgets()
        """Budgets of the namespaces whose objects are watched."""
        super().__init__(
            config,
            timeout=TIMEOUT,
            field_manager=manager,
            trust_env=False,
            transport=GuardedTransport(carrier, may_write) if may_write else carrier,
        )
        auth = self._client._client.auth
        if isinstance(auth, ExecAuth):
            self._client._client.auth = _ProgramAuth(auth._exec)

    @property
    def is_local(self) -> bool:
        """True if the server has a loopback address: it is a process of this machine."""
        return _is_local(self.config.cluster.server)

    def guarded(self, may_write: Callable[[], bool]) -> KubeClient:
        """Return a client over the same connections whose writes need permission; it must not be
        closed.

        Each write asks at the moment it leaves, and fails with WorldError if the answer is no.
        """
        return KubeClient(self.config, self._carrier, self._manager, may_write, self.objects)

    def require_leave(self) -> None:
        """Raise WorldError if a write would be refused now: for effects elsewhere."""
        if self._may_write is not None and not self._may_write():
            raise WorldError(NOT_ALLOWED, retry_after_seconds=RETRY_SECONDS)

    async def pause(self, seconds: float) -> None:
        """Wait before a retry: `Contact.pause` of the connections that this client shares."""
        await self._carrier.contact.pause(seconds)

    async def __aenter__(self) -> Self:
        return self

    async def list_page(self, scope: ListScope, limit: int, start: str | None = None) -> ListPage:
        """Return one page of a list; `start` is the page before's `next`. Raises as
        `api_errors`."""
        parameters = {**scope.parameters(), "limit": str(limit)}
        if start:
            parameters["continue"] = start
        body = await self.raw("GET", scope.path(), parameters=parameters)
        with api_errors(f"list {scope.path()}"):
            return _page(body)

    async def watch_events(
        self, scope: ListScope, version: str, server_seconds: int, idle_seconds: float
    ) -> AsyncGenerator[tuple[str, msgspec.Raw], None]:
        """Yield one watch from `version`: (type, undecoded object), bookmarks included.

        It ends when the server ends it, after `server_seconds` at most. Raises as `api_errors`, a
        WorldError after `idle_seconds` without a byte, ApiRefusal 410 if the version is gone.
        """
        doing = f"watch {scope.path()}"
        request = BasicRequest(
            "GET",
            scope.path(),
            params={
                **scope.parameters(),
                "watch": "true",
                "allowWatchBookmarks": "true",
                "resourceVersion": version,
                "timeoutSeconds": str(server_seconds),
            },
            timeout=httpx2.Timeout(idle_seconds, connect=5.0),
        )
        with api_errors(doing):
            async with _soon(doing):
                response = await self._send(request, stream=True)
            try:
                await _raise_for_status(response)
                async with aclosing(_lines(response)) as lines:
                    async for line in lines:
                        event = _event(line)
                        if event.type == "ERROR":
                            raise _refusal(doing, event.object)
                        yield event.type, event.object
            finally:
                await response.aclose()

    async def text_lines(
        self,
        path: str,
        parameters: Mapping[str, str],
        longest: int | None = None,
        idle_seconds: float | None = None,
    ) -> AsyncGenerator[str, None]:
        """Yield lines of an answer that lasts until the server ends it, such as a followed log.

        `longest`: bytes of a line that are kept; None: all of them. Raises as `api_errors`, a
        WorldError after `idle_seconds` without a byte; None: it waits for any time.
        """
        timeout = httpx2.Timeout(idle_seconds, connect=5.0)
        request = BasicRequest("GET", path, params=dict(parameters), timeout=timeout)
        with api_errors(f"GET {path}"):
            response = await self._send(request, stream=True)
            try:
                await _raise_for_status(response)
                rest = b""
                async for chunk in response.aiter_bytes():
                    *lines, rest = (rest + chunk).split(b"\n")
                    rest = rest[:longest]
                    for line in lines:
                        yield line[:longest].decode(errors="replace")
                if rest:
                    yield rest.decode(errors="replace")
            finally:
                await response.aclose()

    async def _send(self, request: BasicRequest, *, stream: bool = False) -> httpx2.Response:
        send: Callable[..., Awaitable[httpx2.Response]] = self._client.send
        return await send(self._client.build_adapter_request(request), stream=stream)

    async def raw(
        self,
        method: str,
        path: str,
        *,
        body: object = None,
        parameters: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> bytes:
        """Return the body of the answer to a request for a path below the root, such as `version`.

        Raises as `api_errors`.
        """
        query = dict(parameters or {})
        if method in ("PATCH", "POST", "PUT") and self._client._field_manager:
            query.setdefault("fieldManager", self._client._field_manager)
        request = BasicRequest(
            method,
            path.lstrip("/"),
            params=query,
            data=body,
            headers=dict(headers) if headers else None,
        )
        with api_errors(f"{method} {path}"):
            response = await self._send(request)
            await _raise_for_status(response)
            content: bytes = response.content
            return content

    async def get_or_none(self, path: str, kind: type[T]) -> T | None:
        """Return an object or a list, decoded as `kind`; None if the API has no such object."""
        try:
            result = await self.raw("GET", path)
        except NotFound:
            return None
        with api_errors(f"GET {path}"):
            return msgspec.json.decode(result, type=kind)

    async def create_if_absent(self, collection: str, body: Mapping[str, Any]) -> bool:
        """Create an object; False if one of its name exists."""
        try:
            await self.raw("POST", collection, body=body)
        except AlreadyExists:
            return False
        return True

    async def merge(
        self,
        path: str,
        body: Mapping[str, Any],
        *,
        uid: str | None = None,
        version: str | None = None,
    ) -> bytes:
        """Merge `body` into an object, and return the object.

        Raises Conflict if its uid is not `uid`, or its resourceVersion no longer `version`.
        """
        wanted = {"uid": uid, "resourceVersion": version}
        given = {key: value for key, value in wanted.items() if value is not None}
        if given:
            body = {**body, "metadata": {**body.get("metadata", {}), **given}}
        return await self.raw("PATCH", path, body=body, headers=MERGE)

    async def merge_if_present(
        self,
        path: str,
        body: Mapping[str, Any],
        *,
        uid: str | None = None,
        version: str | None = None,
    ) -> bool:
        """Merge as `merge`; return False if the API has no such object."""
        try:
            await self.merge(path, body, uid=uid, version=version)
        except NotFound:
            return False
        return True

    async def delete_if_present(
        self,
        path: str,
        uid: str | None = None,
        *,
        grace_seconds: int | None = None,
        propagation: str | None = None,
    ) -> bool:
        """Delete an object; return False if it is gone, or another one (not of `uid`) has its
        name."""
        options: Object = {} if uid is None else {"preconditions": {"uid": uid}}
        if grace_seconds is not None:
            options["gracePeriodSeconds"] = grace_seconds
        if propagation is not None:
            options["propagationPolicy"] = propagation
        try:
            await self.raw("DELETE", path, body=options or None)
        except NotFound:
            return False
        except Conflict:
            if uid is None:
                raise
            return False
        return True


class TokenClients:
    """Clients of one cluster that differ in their token alone, over the same connections.

    Nothing else of the kubeconfig's user is sent: no certificate, no other credential. Use it as
    `async with`.
    """

    def __init__(self, config: SingleConfig, manager: str) -> None:
        self._config, self._manager = config, manager
        is_local = _is_local(config.cluster.server)
        verify = verify_cluster(config.cluster, User(), config.abs_file, trust_env=not is_local)
        self._carrier = AiohttpTransport(verify, is_local=is_local)

    def client(self, token: str) -> KubeClient:
        """Return a client with this token; it must not be closed."""
        config = self._config._replace(user=User(token=token))
        return KubeClient(config, self._carrier, self._manager)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._carrier.aclose()


def connect(
    kubeconfig: Path | str | None = None, *, context: str | None = None, manager: str = "unbroken"
) -> KubeClient:
    """Return a client for the cluster of `kubeconfig`; nothing is sent yet.

    Without a file: that of KUBECONFIG, else the pod's own service account, else ~/.kube/config.
    `context` None: the file's current one. `manager` is the field manager of every write. Raises
    SpecError if there is no usable configuration.
    """
    try:
        config = _configuration(kubeconfig).get(context)
        if config is None:
            raise SpecError("the kubeconfig has no current context")
        config = config._replace(user=config.user or User())
        if urlsplit(config.cluster.server).scheme not in ("http", "https"):
            raise SpecError("no usable kubeconfig: the server of its cluster is no URL")
        is_local = _is_local(config.cluster.server)
        verify = verify_cluster(
            config.cluster, config.user or User(), config.abs_file, trust_env=not is_local
        )
    except UNUSABLE as error:
        raise SpecError(f"no usable kubeconfig: {_config_problem(error)}") from error
    return KubeClient(config, AiohttpTransport(verify, is_local=is_local), manager)


def _config_problem(error: Exception) -> str:
    """The error of an unusable kubeconfig in one line, without lines of the file: one may be a
    token."""
    match error:
        case yaml.MarkedYAMLError() if error.problem_mark:
            place = error.problem_mark
            return f"no YAML at line {place.line + 1}, column {place.column + 1}: {error.problem}"
        case yaml.YAMLError():
            return "no YAML"
        case KeyError():
            return f"it has no {error}"
        case AttributeError() | TypeError():
            return "its clusters, contexts or users do not have the form of a kubeconfig"
        case _:
            return str(error)


def _configuration(kubeconfig: Path | str | None) -> KubeConfig:
    if kubeconfig is not None:
        return KubeConfig.from_file(kubeconfig)
    named = [name for name in os.environ.get("KUBECONFIG", "").split(os.pathsep) if name]
    if named:
        return KubeConfig.from_file(next((n for n in named if Path(n).exists()), named[0]))
    if "KUBERNETES_SERVICE_HOST" in os.environ and Path(SERVICE_ACCOUNT, "token").exists():
        return KubeConfig.from_service_account()
    return KubeConfig.from_file(DEFAULT_KUBECONFIG)


def _is_local(server: str) -> bool:
    host = urlsplit(server).hostname or ""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@contextmanager
def api_errors(doing: str) -> Iterator[None]:
    """Raise errors of a request in the block as ApiRefusal, PeerError or WorldError.

    WorldError: trying again may help (no connection, time-out, 401, 429, 5xx). ApiRefusal: any
    other error of the API. PeerError: an answer that is not of the API. `doing` starts the text:
    "bind pod a/b".
    """
    try:
        yield
    except (httpx2.HTTPError, msgspec.DecodeError, ConfigError) as error:
        raise as_unbroken(error, doing) from error


def as_unbroken(error: Exception, doing: str) -> UnbrokenError:
    """Return the error that `api_errors` raises for an error of lightkube, httpx or msgspec."""
    match error:
        case ApiError():
            status = error.status
            return _sorted(doing, status.message or "", status.code or 0, status.reason or "")
        case httpx2.HTTPStatusError():
            text = error.response.text[:200].strip()
            return _sorted(doing, text, error.response.status_code, "")
        case ConfigError():
            # The token's file is missing for a moment, or a program for credentials failed.
            return WorldError(f"{doing}: {error}", retry_after_seconds=RETRY_SECONDS)
        case httpx2.HTTPError():
            text = str(error) or type(error).__name__
            return WorldError(f"{doing}: {text}", retry_after_seconds=RETRY_SECONDS)
        case _:
            return PeerError(f"{doing}: the answer cannot be read: {error}")


def _sorted(doing: str, message: str, code: int, reason: str) -> UnbrokenError:
    if code == HTTPStatus.UNAUTHORIZED:
        message = "the server does not accept this credential (401 Unauthorized); has it expired?"
        return Unauthorized(f"{doing}: {message}", retry_after_seconds=RETRY_SECONDS)
    text = f"{doing}: {message or reason or code}"
    if code in BUSY:
        return WorldError(text, retry_after_seconds=RETRY_SECONDS)
    return refusal(text, code, reason)


def _refusal(doing: str, raw: msgspec.Raw) -> UnbrokenError:
    status: Object = msgspec.json.decode(raw, type=Object)
    code = whole_number(str(status.get("code"))) or 0
    return _sorted(doing, str(status.get("message")), code, str(status.get("reason") or ""))


@asynccontextmanager
async def _soon(doing: str) -> AsyncIterator[None]:
    """Limit the time until a watch begins to be answered: kube-apiserver does so at once.

    Only later data may take any time; a dead connection must not.
    """
    try:
        async with asyncio.timeout(BEGIN_SECONDS):
            yield
    except TimeoutError as error:
        text = f"{doing}: no answer within {BEGIN_SECONDS:g} s"
        raise WorldError(text, retry_after_seconds=RETRY_SECONDS) from error


async def _raise_for_status(response: httpx2.Response) -> None:
    if response.is_success:
        return
    await response.aread()
    if response.headers["Content-Type"] == "application/json":
        raise ApiError(request=response.request, response=response)
    response.raise_for_status()
    raise httpx2.HTTPStatusError(  # a redirect, which no API server sends
        f"HTTP {response.status_code}", request=response.request, response=response
    )


async def _lines(response: httpx2.Response) -> AsyncGenerator[bytes, None]:
    rest = b""
    async for chunk in response.aiter_bytes():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line:
                yield line
