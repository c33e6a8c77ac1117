"""Discovery: what the server says it serves, as lists per group and version and aggregated.

Everything follows from the kinds; groups come in the order of the kinds, which clients take as
priority.  Shapes as of kube-apiserver v1.33.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from unbroken.local.apiserver.kinds.crds import version_rank
from unbroken.local.apiserver.kinds.kinds import Kind, Version

from .status import ApiError, Object

VERSION: Object = {
    "major": "1",
    "minor": "33",
    "gitVersion": "v1.33.0+unbroken",
    "gitCommit": "",
    "gitTreeState": "clean",
    "buildDate": "2025-04-23T13:00:00Z",
    "goVersion": "none",
    "compiler": "none",
    "platform": "linux/amd64",
}
"""The page /version; clients read major, minor and gitVersion."""

STATUS_VERBS = ("get", "patch", "update")


@dataclass(frozen=True, slots=True)
class Subresource:
    """A part of an object with a path of its own."""

    name: str
    verbs: tuple[str, ...]
    kind: str = ""
    """Kind of the request and answer; empty: the object itself."""
    group: str = ""
    version: str = "v1"


STATUS = Subresource("status", STATUS_VERBS)
SCALE = Subresource("scale", STATUS_VERBS, "Scale", "autoscaling")
OF_BUILTINS = {
    "pods": (
        Subresource("binding", ("create",), "Binding"),
        Subresource("eviction", ("create",), "Eviction", "policy"),
        Subresource("exec", ("create", "get"), "PodExecOptions"),
        Subresource("log", ("get",)),
    ),
    "namespaces": (Subresource("finalize", ("update",)),),
}


def subresources(kind: Kind, version: Version) -> list[Subresource]:
    """Everything served below the objects of a kind, by name."""
    result = list(OF_BUILTINS.get(kind.resource, ()))
    if version.has_status:
        result.append(STATUS)
    if version.scale is not None:
        result.append(SCALE)
    return sorted(result, key=lambda part: part.name)


def core_versions(address: str = "") -> Object:
    """The page /api."""
    addresses = [{"clientCIDR": "0.0.0.0/0", "serverAddress": address}]
    return {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": addresses}


def groups(kinds: Iterable[Kind]) -> Object:
    """The page /apis."""
    return {
        "kind": "APIGroupList",
        "apiVersion": "v1",
        "groups": [_group(name, names) for name, names in _versions(kinds).items() if name],
    }


def group(kinds: Iterable[Kind], name: str) -> Object:
    """The page /apis/NAME; ApiError 404 for a group without kinds."""
    names = _versions(kinds).get(name)
    if not name or names is None:
        raise _not_served()
    return {"kind": "APIGroup", "apiVersion": "v1", **_group(name, names)}


def resources(kinds: Iterable[Kind], group: str, version: str) -> Object:
    """The page /api/VERSION or /apis/GROUP/VERSION; ApiError 404 if nothing is served there."""
    result = _served(kinds, group, version)
    if not result:
        raise _not_served()
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": f"{group}/{version}" if group else version,
        "resources": [row for kind in result for row in _rows(kind, kind.versions[version])],
    }


def aggregated(kinds: Iterable[Kind], path: str, form: str) -> Object:
    """The pages /api and /apis in one document; `form` is v2 or v2beta1."""
    every = list(kinds)
    names = {name: v for name, v in _versions(every).items() if bool(name) == (path == "/apis")}
    items = [
        {
            "metadata": {**({"name": name} if name else {}), "creationTimestamp": None},
            "versions": [
                {
                    "version": version,
                    "resources": [
                        _discovered(kind, kind.versions[version])
                        for kind in _served(every, name, version)
                    ],
                    "freshness": "Current",
                }
                for version in versions
            ],
        }
        for name, versions in names.items()
    ]
    return {
        "kind": "APIGroupDiscoveryList",
        "apiVersion": f"apidiscovery.k8s.io/{form}",
        "metadata": {},
        "items": items,
    }


def aggregated_media(form: str) -> str:
    """Content type of the aggregated form."""
    return f"application/json;g=apidiscovery.k8s.io;v={form};as=APIGroupDiscoveryList"


def group_versions(kinds: Iterable[Kind]) -> list[tuple[str, str]]:
    """Every (group, version) that is served, preferred versions first within a group."""
    result = _versions(kinds)
    return [(name, version) for name, versions in result.items() for version in versions]


def _not_served() -> ApiError:
    return ApiError(404, "NotFound", "the server could not find the requested resource")


def _versions(kinds: Iterable[Kind]) -> dict[str, list[str]]:
    """Versions by group, the preferred one first."""
    result: dict[str, set[str]] = {}
    for kind in kinds:
        if kind.versions:
            result.setdefault(kind.group, set()).update(kind.versions)
    return {name: sorted(versions, key=version_rank) for name, versions in result.items()}


def _group(name: str, versions: Sequence[str]) -> Object:
    listed = [{"groupVersion": f"{name}/{version}", "version": version} for version in versions]
    return {"name": name, "versions": listed, "preferredVersion": listed[0]}


def _served(kinds: Iterable[Kind], group: str, version: str) -> list[Kind]:
    result = [kind for kind in kinds if kind.group == group and version in kind.versions]
    return sorted(result, key=lambda kind: kind.plural)


def _storage_hash(kind: Kind) -> str:
    """Differs between storage versions; as apiserver's discovery.StorageVersionHash makes it."""
    text = f"{kind.group}/{kind.storage_version}/{kind.kind}"
    return base64.b64encode(hashlib.sha256(text.encode()).digest()[:8]).decode()


def _rows(kind: Kind, version: Version) -> list[Object]:
    row: Object = {
        "name": kind.plural,
        "singularName": kind.singular,
        "namespaced": kind.namespaced,
        "kind": kind.kind,
        "verbs": list(kind.verbs),
    }
    if kind.short_names:
        row["shortNames"] = list(kind.short_names)
    if kind.categories:
        row["categories"] = list(kind.categories)
    if "list" in kind.verbs:
        row["storageVersionHash"] = _storage_hash(kind)
    return [row, *(_subresource_row(kind, part) for part in subresources(kind, version))]


def _subresource_row(kind: Kind, part: Subresource) -> Object:
    elsewhere = {"group": part.group, "version": part.version} if part.group else {}
    return {
        "name": f"{kind.plural}/{part.name}",
        "singularName": "",
        "namespaced": kind.namespaced,
        **elsewhere,
        "kind": part.kind or kind.kind,
        "verbs": list(part.verbs),
    }


def _discovered(kind: Kind, version: Version) -> Object:
    # Group and version are left empty where they are those of the page (apiserver v1.33).
    identity = {"group": "", "version": "", "kind": kind.kind}
    result: Object = {
        "resource": kind.plural,
        "responseKind": identity,
        "scope": "Namespaced" if kind.namespaced else "Cluster",
        "singularResource": kind.singular,
        "verbs": list(kind.verbs),
    }
    if kind.short_names:
        result["shortNames"] = list(kind.short_names)
    if kind.categories:
        result["categories"] = list(kind.categories)
    parts = [
        {
            "subresource": part.name,
            "responseKind": {"group": part.group, "version": part.version, "kind": part.kind}
            if part.kind
            else identity,
            "verbs": list(part.verbs),
        }
        for part in subresources(kind, version)
    ]
    return {**result, "subresources": parts} if parts else result
