"""The server: requests in, answers out, and the discovery and OpenAPI pages that it keeps as bytes.

Reviews are questions about the caller that are answered and not stored. A client with the server's
token may do everything; RBAC objects are stored for the clients that manage them and restrict
nobody. The answers say so.

Pages that describe the server (health, version, discovery, OpenAPI) depend on the served kinds
alone. So each is made when first asked for and kept until a definition changes.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import msgspec
from aiohttp import web

from unbroken.listener import admitted
from unbroken.local.apiserver.kinds.definitions import Definitions
from unbroken.local.apiserver.kinds.kinds import Catalogue, Kind
from unbroken.local.apiserver.schema.constraints import invalid_value
from unbroken.local.apiserver.store import Store, encode
from unbroken.local.apiserver.write import deletion, subresources
from unbroken.local.apiserver.write.writes import APPLY_PATCH, PATCHES, Result, WriteContext, Writer
from unbroken.log_lines import Log

from . import bodies, discovery, openapi
from .proxy import NodeProxy
from .reads import Presenter, Watch, get, list_page, with_form
from .requests import (
    BODY_BYTES_MAX,
    Query,
    Target,
    list_options,
    negotiate,
    parse_path,
    write_options,
)
from .status import ApiError, Object, bad_request, invalid

USER = {"username": "unbroken:admin", "groups": ["system:masters", "system:authenticated"]}
WHY = "the local cluster's token may do everything; RBAC objects are stored, not enforced"
ACCESS = (
    "selfsubjectaccessreviews",
    "subjectaccessreviews",
    "localsubjectaccessreviews",
)


def answer(target: Target, body: Object, token: str) -> Object:
    """The review with its status; ApiError 400 for one that asks nothing."""
    plural, spec = target.kind.plural, body.get("spec")
    if plural == "selfsubjectreviews":
        return {**body, "status": {"userInfo": USER}}
    if not isinstance(spec, dict):
        raise bad_request(f"{target.kind.kind}: spec must be an object")
    if plural in ACCESS:
        if not spec.get("resourceAttributes") and not spec.get("nonResourceAttributes"):
            text = "exactly one of nonResourceAttributes or resourceAttributes must be specified"
            cause = invalid_value("spec.resourceAttributes", None, text)
            raise invalid(target.kind.group, target.kind.kind, "", [cause])
        return {**body, "status": {"allowed": True, "reason": WHY}}
    if plural == "selfsubjectrulesreviews":
        rule = {"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"]}
        other = {"verbs": ["*"], "nonResourceURLs": ["*"]}
        return {
            **body,
            "status": {
                "resourceRules": [rule],
                "nonResourceRules": [other],
                "incomplete": False,
            },
        }
    if plural == "tokenreviews":
        asked = spec.get("token")
        if not isinstance(asked, str) or not asked:
            return {**body, "status": {"user": {}, "error": "no token was given"}}
        if hmac.compare_digest(asked.encode(), token.encode()):
            return {**body, "status": {"authenticated": True, "user": USER}}
        return {**body, "status": {"user": {}, "error": "the token is not known"}}
    raise ApiError(404, "NotFound", "the server could not find the requested resource")


log = Log(__name__)

WARNINGS_MAX, WARNINGS_BYTES, WARNING_CHARACTERS = 50, 4096, 512
"""Clients read 8 KiB of headers, and Python's 100 of them; kube-apiserver warns with 4 KiB."""

WATCH_SECONDS = 3600
"""Longest watch when the client sets no limit."""
BOOKMARK_SECONDS = 60
"""Time between bookmarks (kube-apiserver v1.33: about a minute)."""
OPEN_PATHS = ("/healthz", "/livez", "/readyz", "/version")
"""Answered without a token, as by role system:public-info-viewer."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete answer."""

    body: bytes
    code: int = 200
    warnings: tuple[str, ...] = ()
    media: str = "application/json"


class ApiServer:
    """Answers requests over one store.  `handle` is the handler for aiohttp's low-level server."""

    def __init__(
        self, store: Store, catalogue: Catalogue, around: WriteContext, token: str, proxy: NodeProxy
    ) -> None:
        self._store = store
        self._catalogue = catalogue
        self._context = around
        self._token = token
        self._proxy = proxy
        self._writer = Writer(store, catalogue, around)
        self._definitions = Definitions(store, catalogue, self._writer, around)
        self._documents = Documents(catalogue)
        self._definitions.load()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request; never raises but for cancellation and lost connections."""
        try:
            self._authenticate(request)
            return await self._dispatch(request)
        except ApiError as refusal:
            return _refused(request, refusal)
        except web.HTTPRequestEntityTooLarge:
            text = f"Request entity too large: limit is {BODY_BYTES_MAX}"
            return _refused(request, ApiError(413, "RequestEntityTooLarge", text))
        except web.RequestPayloadError:
            return _refused(request, bad_request("the body of the request cannot be decoded"))
        except ConnectionError:
            raise
        except Exception as defect:  # a defect here must not end the server
            log.exception("request failed", method=request.method, path=request.path)
            text = f"Internal error occurred: {type(defect).__name__}"
            return _refused(request, ApiError(500, "InternalError", text))

    def _authenticate(self, request: web.BaseRequest) -> None:
        if request.path in OPEN_PATHS:
            return
        given = request.headers.get("Authorization", "")
        wanted = f"Bearer {self._token}"
        if not hmac.compare_digest(given.encode("utf-8", "replace"), wanted.encode()):
            raise ApiError(401, "Unauthorized", "Unauthorized")
        admitted(request)

    async def _dispatch(self, request: web.BaseRequest) -> web.StreamResponse:
        path = unquote(request.rel_url.raw_path)
        document = self._documents.find(path, request.headers.get("Accept", ""))
        if document is not None:
            if request.method not in ("GET", "HEAD"):
                raise _no_method()
            return _response(request, Answer(document.body, media=document.media))
        query = Query(request.query)
        is_old_watch = "/watch/" in path
        if is_old_watch:
            path = path.replace("/watch/", "/", 1)
        target = parse_path(path, self._catalogue)
        if target.kind.verbs == ("create",):
            return await self._review(request, target)
        if target.subresource:
            return await self._subresource(request, target, query)
        if request.method == "GET" and (is_old_watch or (query.flag("watch") and not target.name)):
            return await self._watch(request, target, query)
        handler = self._handlers(target).get(request.method)
        if handler is None:
            raise _no_method()
        return _response(request, await handler(request, target, query))

    def _handlers(self, target: Target) -> dict[str, Handler]:
        if target.name:
            return {
                "GET": self._get,
                "PUT": self._put,
                "PATCH": self._patch,
                "DELETE": self._delete,
            }
        across = target.kind.namespaced and not target.namespace
        if across:
            return {"GET": self._list}
        result: dict[str, Handler] = {
            "GET": self._list,
            "POST": self._post,
            "DELETE": self._delete_all,
        }
        if "deletecollection" not in target.kind.verbs:
            del result["DELETE"]
        return result

    async def _get(self, request: web.BaseRequest, target: Target, query: Query) -> Answer:
        entry = get(self._store, target)
        return Answer(self._presenter(request, target, query).object(entry))

    async def _list(self, request: web.BaseRequest, target: Target, query: Query) -> Answer:
        options = list_options(query, is_watch=False)
        presenter = self._presenter(request, target, query)
        return Answer(list_page(self._store, target, options, presenter))

    async def _post(self, request: web.BaseRequest, target: Target, query: Query) -> Answer:
        options = write_options(query, request.headers.get("User-Agent", ""))
        content = await _object(request, is_strict=options.validation == "Strict")
        result = self._writer.create(target, content, options)
        return self._written(request, target, query, result)

    async def _put(self, request: web.BaseRequest, target: Target, query: Query) -> Answer:
        options = write_options(query, request.headers.get("User-Agent", ""))
        content = await _object(request, is_strict=options.validation == "Strict")
        result = self._writer.update(target, get(self._store, target), content, options)
        return self._written(request, target, query, result)

    async def _patch(self, request: web.BaseRequest, target: Target, query: Query) -> Answer:
        media = request.headers.get("Content-Type", "").split(";")[0].strip()
        if media not in PATCHES:
            raise bodies.unsupported_media(media, list(PATCHES))
        options = write_options(query, request.headers.get("User-Agent", ""))
        patch = bodies.decode(await request.read(), media)
        if media != APPLY_PATCH:
            live = get(self._store, target)
            result = self._writer.patch(target, live, media, patch, options)
            return self._written(request, target, query, result)
        if not query.text("fieldManager"):
            raise ApiError(
                422,
                "Invalid",
                "PatchOptions.meta.k8s.io is invalid: fieldManager: Required value: is required "
                "for apply patch",
                details={"group": "meta.k8s.io", "kind": "PatchOptions"},
            )
        if not isinstance(patch, dict):
            raise ApiError(400, "BadRequest", "error decoding YAML: an object is needed")
        entry = self._store.collection(target.kind.storage).entries.get(target.key)
        if entry is None and target.subresource:
            get(self._store, target)
        result = self._writer.apply(target, entry, patch, options)
        return self._written(request, target, query, result)

    async def _delete(self, request: web.BaseRequest, target: Target, query: Query) -> Answer:
        options = deletion.delete_options(query, await _optional_object(request))
        entry = get(self._store, target)
        result = self._definitions.delete(target, entry, options)
        if not result.is_gone or target.kind.resource in deletion.RETURNS_OBJECT:
            return self._written(request, target, query, result)
        return Answer(msgspec.json.encode(deletion.success(target.kind, result.entry.decode())))

    async def _delete_all(self, request: web.BaseRequest, target: Target, query: Query) -> Answer:
        options = deletion.delete_options(query, await _optional_object(request))
        listing = list_options(query, is_watch=False)
        presenter = self._presenter(request, target, query)
        answer = list_page(self._store, target, listing, presenter)
        plain = Presenter(target, with_form(negotiate(""), ""), self._context.clock)
        for item in msgspec.json.decode(list_page(self._store, target, listing, plain))["items"]:
            meta = item["metadata"]
            key = (meta.get("namespace", ""), meta["name"])
            entry = self._store.collection(target.kind.storage).entries[key]
            one = Target(target.kind, target.version, *key)
            self._definitions.delete(one, entry, options)
        return Answer(answer)

    def _presenter(self, request: web.BaseRequest, target: Target, query: Query) -> Presenter:
        form = negotiate(request.headers.get("Accept", ""))
        return Presenter(target, with_form(form, query.text("includeObject")), self._context.clock)

    def _written(
        self, request: web.BaseRequest, target: Target, query: Query, result: Result
    ) -> Answer:
        """The answer to a write; what follows from it has happened by then."""
        self._definitions.after(target, result)
        body = self._presenter(request, target, query).object(result.entry)
        return Answer(body, 201 if result.is_new else 200, tuple(result.warnings))

    async def _watch(
        self, request: web.BaseRequest, target: Target, query: Query
    ) -> web.StreamResponse:
        options = list_options(query, is_watch=True)
        watch = Watch(self._store, target, options, self._presenter(request, target, query))
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.enable_chunked_encoding()
        limit = options.timeout_seconds or WATCH_SECONDS
        try:
            news = watch.begin()
            await response.prepare(request)
            end = asyncio.get_running_loop().time() + limit
            while True:
                if news:
                    await response.write(news)
                news = await _next(watch, end, has_bookmarks=options.has_bookmarks)
        except ApiError as error:
            if not response.prepared:
                await response.prepare(request)
            event = {"type": "ERROR", "object": error.as_object()}
            await response.write(msgspec.json.encode(event) + b"\n")
        except _WatchEndedError:
            if options.has_bookmarks:
                await response.write(watch.bookmark())
        except ConnectionResetError:
            return response  # The client has left, which watchers do at any moment.
        await response.write_eof()
        return response

    async def _review(self, request: web.BaseRequest, target: Target) -> web.StreamResponse:
        if request.method != "POST":
            raise _no_method()
        content = await _object(request)
        result = answer(target, content, self._token)
        return _response(request, Answer(encode(result), 201))

    async def _subresource(
        self, request: web.BaseRequest, target: Target, query: Query
    ) -> web.StreamResponse:
        method, sub, resource = request.method, target.subresource, target.kind.resource
        if sub == "status" and target.version.has_status:
            handler = {"GET": self._get, "PUT": self._put, "PATCH": self._patch}.get(method)
            if handler is None:
                raise _no_method()
            return _response(request, await handler(request, target, query))
        if sub == "scale" and target.version.scale:
            return _response(request, await self._scale(request, target, query))
        if resource == "pods" and sub in ("log", "exec", "portforward"):
            entry = get(self._store, target)
            return await self._proxy.forward(request, sub, entry.decode(), self._store)
        if (resource, sub) not in (
            ("pods", "binding"),
            ("pods", "eviction"),
            ("namespaces", "finalize"),
        ):
            raise subresources.not_offered(target)
        if method != ("PUT" if sub == "finalize" else "POST"):
            raise _no_method()
        options = write_options(query, request.headers.get("User-Agent", ""))
        content = await _object(request)
        if sub == "finalize":
            result = subresources.finalize(self._store, self._writer, target, content, options)
            return _response(request, self._written(request, target, query, result))
        if sub == "binding":
            subresources.bind(self._store, self._writer, target, content, options)
        else:
            subresources.evict(self._store, self._writer, self._catalogue, target, content)
        done = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}
        return _response(request, Answer(msgspec.json.encode({**done, "code": 201}), 201))

    async def _scale(self, request: web.BaseRequest, target: Target, query: Query) -> Answer:
        entry = get(self._store, target)
        if request.method == "GET":
            return Answer(encode(subresources.scale_object(target, entry)))
        options = write_options(query, request.headers.get("User-Agent", ""))
        if request.method == "PUT":
            scale = await _object(request)
        elif request.method == "PATCH":
            media = request.headers.get("Content-Type", "").split(";")[0].strip()
            patch = bodies.decode(await request.read(), media or bodies.JSON)
            scale = subresources.patched_scale(target, entry, media, patch)
        else:
            raise _no_method()
        result = subresources.put_scale(self._writer, target, entry, scale, options)
        return Answer(encode(subresources.scale_object(target, result.entry)))


Handler = Callable[[web.BaseRequest, Target, Query], Awaitable[Answer]]


class _WatchEndedError(Exception):
    """The time that the client gave the watch is over."""


async def _next(watch: Watch, end: float, *, has_bookmarks: bool) -> bytes:
    """The next bytes of a watch: events, or a bookmark when nothing happened for a while."""
    now = asyncio.get_running_loop().time()
    due = min(end, now + BOOKMARK_SECONDS) if has_bookmarks else end
    try:
        async with asyncio.timeout_at(due):
            await watch.wait()
    except TimeoutError:
        if asyncio.get_running_loop().time() >= end:
            raise _WatchEndedError from None
        return watch.bookmark()
    return watch.news()


def _no_method() -> ApiError:
    return ApiError(
        405, "MethodNotAllowed", "the server does not allow this method on the requested resource"
    )


async def _object(request: web.BaseRequest, *, is_strict: bool = False) -> Object:
    body = await request.read()
    media = request.headers.get("Content-Type", "")
    content = bodies.decode_object(body, media)
    if is_strict and "json" in media:
        repeated = [f'duplicate field "{path}"' for path in bodies.repeated_fields(body)]
        if repeated:
            raise ApiError(400, "BadRequest", f"strict decoding error: {', '.join(repeated)}")
    return content


async def _optional_object(request: web.BaseRequest) -> Object | None:
    body = await request.read()
    if not body:
        return None
    return bodies.decode_object(body, request.headers.get("Content-Type", ""))


def _refused(request: web.BaseRequest, error: ApiError) -> web.Response:
    return _response(request, Answer(msgspec.json.encode(error.as_object()), error.code))


def _response(request: web.BaseRequest, answer: Answer) -> web.Response:
    headers: dict[str, Any] = {"Content-Type": answer.media, "Cache-Control": "no-cache, private"}
    response = web.Response(body=answer.body, status=answer.code, headers=headers)
    for text in _on_one_line(answer.warnings):
        response.headers.add("Warning", f'299 - "{text}"')  # RFC 7234 warn-code 299
    if answer.code == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    if len(answer.body) > 128 * 1024 and "gzip" in request.headers.get("Accept-Encoding", ""):
        # kube-apiserver v1.33 compresses from this size on, at level 1.
        response.enable_compression(web.ContentCoding.gzip)
    return response


def _on_one_line(warnings: Sequence[str]) -> Iterator[str]:
    """The warnings as quoted texts of a header; those that do not fit any more are left out."""
    left = WARNINGS_BYTES
    for text in warnings[:WARNINGS_MAX]:
        plain = "".join(one if one.isprintable() else "?" for one in " ".join(text.split()))
        cut = plain[:WARNING_CHARACTERS].replace("\\", "\\\\").replace('"', '\\"')
        left -= len(cut.encode())
        if left < 0:
            return
        yield cut


HEALTH = ("/healthz", "/livez", "/readyz")


@dataclass(frozen=True, slots=True)
class Document:
    """A page."""

    body: bytes
    media: str = "application/json"


class Documents:
    """All pages of one server."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._made: dict[tuple[str, str], Document] = {}
        self._generation = -1

    def find(self, path: str, accept: str) -> Document | None:
        """The page at `path`; None when the path is not one of a page, ApiError 404 or 406."""
        if path.startswith(HEALTH) and path.split("/")[1] in [name[1:] for name in HEALTH]:
            return Document(b"ok", "text/plain")
        clean = path.rstrip("/") or "/"
        if not _is_page(clean):
            return None
        if self._generation != self._catalogue.generation:
            self._made.clear()
            self._generation = self._catalogue.generation
        form = _aggregated_version(accept) if clean in ("/api", "/apis") else ""
        if clean == "/openapi/v2" and openapi.wants_protobuf(accept):
            form = "protobuf"
        document = self._made.get((clean, form))
        if document is None:
            document = self._made[clean, form] = self._make(clean, form)
        return document

    def _make(self, path: str, form: str) -> Document:
        kinds = list(self._catalogue)
        if path == "/":
            return _json(
                {"paths": ["/api", "/apis", *HEALTH, "/openapi/v2", "/openapi/v3", "/version"]}
            )
        if path == "/version":
            return _json(discovery.VERSION)
        if form == "protobuf":
            return Document(openapi.v2_protobuf(kinds), openapi.V2_PROTOBUF_MEDIA)
        if path == "/openapi/v2":
            return Document(openapi.v2_document(kinds))
        if path == "/openapi/v3":
            return _json(openapi.v3_root(kinds))
        if path.startswith("/openapi/v3/"):
            return Document(openapi.v3_document(kinds, *_group_version(path[len("/openapi/v3") :])))
        if form:
            body = discovery.aggregated(kinds, path, form)
            return Document(msgspec.json.encode(body), discovery.aggregated_media(form))
        return _json(_discovered(kinds, path))


def _discovered(kinds: list[Kind], path: str) -> Object:
    if path == "/api":
        return discovery.core_versions()
    if path == "/apis":
        return discovery.groups(kinds)
    group, version = _group_version(path)
    if not version:
        return discovery.group(kinds, group)
    return discovery.resources(kinds, group, version)


def _json(content: Object) -> Document:
    return Document(msgspec.json.encode(content))


def _is_page(path: str) -> bool:
    parts = path.split("/")[1:]
    match parts[0]:
        case "" | "version" | "openapi":
            return True
        case "api":
            return len(parts) <= 2
        case "apis":
            return len(parts) <= 3
        case _:
            return False


def _group_version(path: str) -> tuple[str, str]:
    """Group and version of /api/v1, /apis/GROUP or /apis/GROUP/VERSION."""
    match path.strip("/").split("/"):
        case ["api", version]:
            return "", version
        case ["apis", group]:
            return group, ""
        case ["apis", group, version]:
            return group, version
        case _:
            raise ApiError(404, "NotFound", "the server could not find the requested resource")


def _aggregated_version(accept: str) -> str:
    """`v2` or `v2beta1` when the client asks for aggregated discovery, else empty."""
    for choice in accept.split(","):
        media, *rest = (part.strip() for part in choice.split(";"))
        wanted = dict(part.split("=", 1) for part in rest if "=" in part)
        if media == "application/json" and wanted.get("as") == "APIGroupDiscoveryList":
            return wanted["v"] if wanted.get("v") in ("v2", "v2beta1") else ""
        if media == "application/json" and "as" not in wanted:
            return ""
    return ""
