"""Parsing of a request from its path, query and headers.  No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from unbroken.foreign_numbers import whole_number
from unbroken.local.apiserver.kinds.kinds import Catalogue, Kind, Version, no_such_page

from .status import ApiError, Cause, bad_request

BODY_BYTES_MAX = 3 * 1024 * 1024
"""Largest body that is read (kube-apiserver v1.33: MaxRequestBodyBytes, 3 MiB)."""


@dataclass(frozen=True, slots=True)
class Target:
    """The collection or the object that a path names."""

    kind: Kind
    version: Version
    namespace: str = ""
    """Empty: cluster-scoped, or all namespaces."""
    name: str = ""
    subresource: str = ""

    @property
    def key(self) -> tuple[str, str]:
        """Key of the object in the store."""
        return (self.namespace, self.name)

    @property
    def api_version(self) -> str:
        """API version that the client speaks."""
        return self.kind.api_version(self.version.name)


def parse_path(path: str, catalogue: Catalogue) -> Target:
    """The target of /api/v1/... or /apis/GROUP/VERSION/...; ApiError 404 for anything else."""
    parts = path.strip("/").split("/")
    if len(parts) >= 3 and parts[0] == "api":
        group, version, rest = "", parts[1], parts[2:]
    elif len(parts) >= 4 and parts[0] == "apis":
        group, version, rest = parts[1], parts[2], parts[3:]
    else:
        raise no_such_page()
    if "" in rest:
        raise no_such_page()
    namespace = ""
    if rest[0] == "namespaces" and len(rest) > 2 and not _is_namespace_subresource(group, rest):
        namespace, rest = rest[1], rest[2:]
    kind, served = catalogue.find(group, version, rest[0])
    if len(rest) > 3 or (kind.namespaced and not namespace and len(rest) > 1):
        raise no_such_page()
    if namespace and not kind.namespaced:
        raise no_such_page()
    name, subresource = (*rest[1:], "", "")[:2]
    return Target(kind, served, namespace, name, subresource)


def _is_namespace_subresource(group: str, rest: list[str]) -> bool:
    return group == "" and len(rest) == 3 and rest[2] in ("status", "finalize")


class Query:
    """Query parameters with the types that the API gives them; ApiError 400 where they differ."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self._values = values

    def text(self, name: str) -> str:
        """Empty when absent."""
        return self._values.get(name, "")

    def flag(self, name: str) -> bool:
        """`true`, `1` or an empty value are true, as Kubernetes converts them."""
        value = self._values.get(name)
        return value is not None and value.lower() not in ("false", "0")

    def integer(self, name: str) -> int | None:
        """None when absent."""
        value = self._values.get(name, "")
        if not value:
            return None
        digits = value.removeprefix("-")
        number = whole_number(digits)
        if number is None:
            raise bad_request(f'strconv.ParseInt: parsing "{value[:100]}": invalid syntax ({name})')
        return number if digits == value else -number


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """Options of create, update and patch."""

    manager: str
    is_dry_run: bool = False
    validation: str = "Warn"
    """fieldValidation: Ignore, Warn (the server's default since v1.27) or Strict."""
    force: bool | None = None
    """Take fields from other managers; server-side apply only."""


def write_options(query: Query, user_agent: str) -> WriteOptions:
    """Read them; ApiError 400 or 422 for values that do not exist."""
    dry_run = query.text("dryRun")
    if dry_run not in ("", "All"):
        raise ApiError(
            422,
            "Invalid",
            f'dryRun: Unsupported value: "{dry_run[:100]}": supported values: "All"',
            causes=[Cause("FieldValueNotSupported", "dryRun", 'supported values: "All"')],
        )
    validation = query.text("fieldValidation") or "Warn"
    if validation not in ("Ignore", "Warn", "Strict"):
        raise ApiError(
            422,
            "Invalid",
            f'fieldValidation: Unsupported value: "{validation[:100]}": '
            'supported values: "Ignore", "Strict", "Warn"',
        )
    manager = query.text("fieldManager")
    if len(manager) > 128 or not manager.isprintable():
        raise ApiError(422, "Invalid", "fieldManager: must be at most 128 printable characters")
    return WriteOptions(
        manager=manager or user_agent.split("/")[0][:128] or "unknown",
        is_dry_run=dry_run == "All",
        validation=validation,
        force=query.flag("force") if query.text("force") else None,
    )


@dataclass(frozen=True, slots=True)
class ListOptions:
    """Options of list and watch."""

    labels: str = ""
    fields: str = ""
    version: str = ""
    version_match: str = ""
    limit: int = 0
    continue_token: str = ""
    timeout_seconds: int | None = None
    has_bookmarks: bool = False
    sends_initial: bool = False
    """sendInitialEvents: a watch begins with the present state and a marked bookmark."""


def list_options(query: Query, *, is_watch: bool) -> ListOptions:
    """Read them; ApiError 400 or 422 for combinations that make no sense."""
    options = ListOptions(
        labels=query.text("labelSelector"),
        fields=query.text("fieldSelector"),
        version=query.text("resourceVersion"),
        version_match=query.text("resourceVersionMatch"),
        limit=max(query.integer("limit") or 0, 0),
        continue_token=query.text("continue"),
        timeout_seconds=query.integer("timeoutSeconds"),
        has_bookmarks=query.flag("allowWatchBookmarks"),
        sends_initial=query.flag("sendInitialEvents"),
    )
    if options.version and whole_number(options.version) is None:
        raise ApiError(
            400,
            "BadRequest",
            f'resourceVersion: Invalid value: "{options.version[:100]}": must be a number',
        )
    if options.continue_token and options.version not in ("", "0"):
        raise bad_request("specifying resource version is not allowed when using continue")
    problem = _watch_problem(options, query) if is_watch else _list_problem(options, query)
    if problem:
        raise ApiError(
            422,
            "Invalid",
            f"ListOptions.meta.k8s.io is invalid: {problem}",
            details={"group": "meta.k8s.io", "kind": "ListOptions"},
        )
    return options


def _list_problem(options: ListOptions, query: Query) -> str:
    match = options.version_match
    if query.text("sendInitialEvents"):
        return "sendInitialEvents: Forbidden: sendInitialEvents is forbidden for list"
    if not match:
        return ""
    if not options.version:
        return (
            "resourceVersionMatch: Forbidden: resourceVersionMatch is forbidden unless "
            "resourceVersion is provided"
        )
    if options.continue_token:
        return (
            "resourceVersionMatch: Forbidden: resourceVersionMatch is forbidden when "
            "continue is provided"
        )
    if match not in ("Exact", "NotOlderThan"):
        return (
            f'resourceVersionMatch: Unsupported value: "{match[:100]}": '
            'supported values: "Exact", "NotOlderThan"'
        )
    if match == "Exact" and options.version == "0":
        return (
            'resourceVersionMatch: Forbidden: resourceVersionMatch "Exact" is forbidden for '
            'resourceVersion "0"'
        )
    return ""


def _watch_problem(options: ListOptions, query: Query) -> str:
    match = options.version_match
    if query.text("sendInitialEvents"):
        if match != "NotOlderThan":
            return (
                "resourceVersionMatch: Forbidden: sendInitialEvents requires setting "
                "resourceVersionMatch to NotOlderThan"
            )
        return ""
    if match:
        return (
            "resourceVersionMatch: Forbidden: resourceVersionMatch is forbidden for watch "
            "unless sendInitialEvents is provided"
        )
    return ""


@dataclass(frozen=True, slots=True)
class Form:
    """Form of the answer: `Table`, `PartialObjectMetadata`, or the object itself."""

    shape: str = ""
    include_object: str = "Metadata"
    parameters: Mapping[str, str] = field(default_factory=dict)


def negotiate(accept: str) -> Form:
    """The first form in an Accept header that the server has; ApiError 406 if there is none."""
    for choice in accept.split(","):
        media, *rest = (part.strip() for part in choice.split(";"))
        parameters = dict(part.split("=", 1) for part in rest if "=" in part)
        if media not in ("application/json", "application/*", "*/*", ""):
            continue
        shape = parameters.get("as", "")
        if not shape:
            return Form(parameters=parameters)
        known = ("Table", "PartialObjectMetadata", "PartialObjectMetadataList")
        if parameters.get("g") == "meta.k8s.io" and shape in known:
            return Form(shape.removesuffix("List"), parameters=parameters)
    raise ApiError(
        406,
        "NotAcceptable",
        "only the following media types are accepted: application/json, "
        "application/json;as=Table;g=meta.k8s.io;v=v1, "
        "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1",
    )
