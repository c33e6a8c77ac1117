"""Pages that describe the server: health, version, discovery, OpenAPI.

They depend on the served kinds alone, so each is made when first asked for and kept until a
definition changes.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from unbroken.local.apiserver.kinds.catalogue import Catalogue
from unbroken.local.apiserver.kinds.kinds import Kind

from . import discovery, openapi
from .status import ApiError, Object

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
