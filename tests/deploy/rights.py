"""Rights that a ServiceAccount has, and rights that it has used, in the same form."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tests.deploy.charts import Object, of_kind

Right = tuple[str, str]
"""Resource as `nodes/status.GROUP` (with `@NAMESPACE` if it is granted in one), and verb."""


def granted(objects: list[Object], account: str) -> set[Right]:
    """Return the rights of a ServiceAccount by the bindings among objects."""
    found: set[Right] = set()
    bindings = [*of_kind(objects, "ClusterRoleBinding"), *of_kind(objects, "RoleBinding")]
    for binding in bindings:
        if all(subject["name"] != account for subject in binding["subjects"]):
            continue
        reference, namespace = binding["roleRef"], binding["metadata"].get("namespace", "")
        for role in of_kind(objects, reference["kind"], reference["name"]):
            if role["metadata"].get("namespace", "") == namespace:
                found |= set(_of(role["rules"], namespace))
    return found


def _of(rules: Iterable[Mapping[str, Any]], namespace: str) -> Iterator[Right]:
    for rule in rules:
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                for verb in rule["verbs"]:
                    yield what(resource, group, namespace), verb


def what(resource: str, group: str = "", namespace: str = "") -> str:
    """Return the form of the first half of a Right."""
    named = f"{resource}.{group}" if group else resource
    return f"{named}@{namespace}" if namespace else named


def used(entries: Iterable[Object], known: set[Right]) -> set[Right]:
    """Return the rights that admitted requests in the audit log, in the form of `known`."""
    found = set()
    for entry in entries:
        target = entry.get("objectRef")
        if target is None:
            continue  # discovery, which everybody may read
        resource = "/".join(filter(None, (target["resource"], target.get("subresource"))))
        group, namespace = target.get("apiGroup", ""), target.get("namespace", "")
        narrow = what(resource, group, namespace), entry["verb"]
        found.add(narrow if narrow in known else (what(resource, group), entry["verb"]))
    return found


def refused(entries: Iterable[Object]) -> list[str]:
    """Return the requests that were refused for a missing right."""
    return sorted(
        {
            f"{one['verb']} {one['requestURI']}"
            for one in entries
            if one.get("annotations", {}).get("authorization.k8s.io/decision") == "forbid"
        }
    )
