"""AddTags, ListTags, DeleteTags: of clusters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from unbroken.spec.nodes.cluster import ClusterSpec

from .calls import Call, Object
from .errors import invalid, limit_exceeded
from .pages import page
from .store import ARN, Stored

TAGS_MAX = 50
"""Most tags of one resource (TagList, API 2017-07-24)."""


def tags_of(given: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Tags by key; ValidationException for a key that is given twice."""
    result: dict[str, str] = {}
    for item in given:
        if item["Key"] in result:
            raise invalid(f"Duplicate tag keys: '{item['Key']}'")
        if item["Key"].lower().startswith("aws:"):
            raise invalid(f"Tag keys must not begin with 'aws:': '{item['Key']}'")
        result[item["Key"]] = item["Value"]
    return result


async def add_tags(call: Call) -> Object:
    """AddTags: adds, and overwrites what has the same key."""
    new = tags_of(call.body["Tags"])

    def change(stored: Stored) -> tuple[ClusterSpec, Object]:
        tags = {**stored.spec.tags, **new}
        if len(tags) > TAGS_MAX:
            raise limit_exceeded(f"{len(tags)} tags; a resource has at most {TAGS_MAX}")
        return replace(stored.spec, tags=tags), {}

    stored = await call.store.change(_cluster(call), change)
    return {"Tags": _listed(stored.spec.tags)}


async def list_tags(call: Call) -> Object:
    """ListTags."""
    stored = await call.store.find(_cluster(call))
    tags = _listed(stored.spec.tags)
    result, token = page(tags, lambda item: ("", item["Key"]), call.body, is_descending=False)
    return {"Tags": result, **({"NextToken": token} if token else {})}


async def delete_tags(call: Call) -> Object:
    """DeleteTags; keys that are not there are no error."""
    gone = set(call.body["TagKeys"])

    def change(stored: Stored) -> tuple[ClusterSpec, Object]:
        kept = {key: value for key, value in stored.spec.tags.items() if key not in gone}
        return replace(stored.spec, tags=kept), {}

    await call.store.change(_cluster(call), change)
    return {}


def _cluster(call: Call) -> str:
    arn = call.text("ResourceArn")
    if ARN.fullmatch(arn) is None:
        raise invalid(f"ResourceArn '{arn}': only clusters have tags here")
    return arn


def _listed(tags: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"Key": key, "Value": value} for key, value in sorted(tags.items())]
