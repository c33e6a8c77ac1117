"""Request bodies: JSON, YAML or protobuf into plain values; every surprise is an ApiError 4xx."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

import msgspec
import yaml

from . import protobuf
from .status import ApiError, Object, bad_request

JSON = "application/json"
YAML = "application/yaml"
DEPTH_MAX = 200
"""Deepest nesting that is taken; no API object comes near it."""
VALUES_MAX = 1_000_000
"""Values in one YAML document after its aliases are followed."""


class _Loader(yaml.CSafeLoader):
    """YAML with JSON's types only: a date stays text."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolver if not tag.endswith(":timestamp")]
    for first, resolver in yaml.CSafeLoader.yaml_implicit_resolvers.items()
}


def decode(body: bytes, content_type: str) -> Any:
    """The value in a body; ApiError 400 for bad syntax, 415 for another media type."""
    media = content_type.split(";")[0].strip().lower()
    if media in ("", JSON) or media.endswith("+json"):
        return _bounded(_json(body))
    if media == YAML or media.endswith("+yaml"):
        try:
            return _bounded(_json(body))
        except ApiError:
            return _bounded(_yaml(body))
    if media == protobuf.MEDIA:
        return _bounded(protobuf.decode(body))
    raise unsupported_media(media, [JSON, YAML, protobuf.MEDIA])


def decode_object(body: bytes, content_type: str) -> Object:
    """As `decode`, for a body that must be an object."""
    value = decode(body, content_type)
    if not isinstance(value, dict):
        raise bad_request(
            f"couldn't get version/kind; json parse error: the body is a "
            f"{type(value).__name__}, not an object"
        )
    return value


class _Pairs(dict[str, Any]):
    """An object that remembers which of its keys came twice."""

    twice: list[str]

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        counts = Counter(key for key, _ in pairs) if len(self) < len(pairs) else Counter[str]()
        self.twice = [key for key, count in counts.items() if count > 1]


def repeated_fields(body: bytes) -> list[str]:
    """Paths of the fields that a valid JSON body holds more than once."""
    result: list[str] = []
    level: list[tuple[str, Any]] = [("", json.loads(body, object_pairs_hook=_Pairs))]
    while level:
        path, value = level.pop()
        if isinstance(value, _Pairs):
            result += [f"{path}{key}" for key in value.twice]
            level += [(f"{path}{key}.", item) for key, item in value.items()]
        elif isinstance(value, list):
            level += [(f"{path[:-1]}[{index}].", item) for index, item in enumerate(value)]
    return sorted(result)


def unsupported_media(media: str, accepted: list[str]) -> ApiError:
    """415 that says what is taken."""
    return ApiError(
        415,
        "UnsupportedMediaType",
        f"the body of the request was in an unknown format ({media[:100]}) - accepted media types "
        f"include: {', '.join(accepted)}",
    )


def _json(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise bad_request(f"the body of the request is not valid JSON: {error!s:.200}") from error


def _yaml(body: bytes) -> Any:
    try:
        _check_events(body)
        return yaml.load(body, Loader=_Loader)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        text = " ".join(str(error).split())
        raise bad_request(f"error converting YAML to JSON: {text[:300]}") from error


def _check_events(body: bytes) -> None:
    """Refuse a document that takes long to build, before it is built.

    libyaml needs quadratic time for deep nesting, and merge keys (`<<`) of aliases of merge keys
    multiply without an end.
    """
    depth = 0
    for count, event in enumerate(yaml.parse(body, Loader=yaml.CSafeLoader)):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        elif isinstance(event, yaml.ScalarEvent) and event.implicit[0] and event.value == "<<":
            raise bad_request("YAML merge keys (<<) are not supported: write the fields out")
        if depth > DEPTH_MAX or count > VALUES_MAX:
            raise bad_request(
                f"the body of the request must have at most {VALUES_MAX} values and {DEPTH_MAX} "
                "levels"
            )


def _bounded(value: Any) -> Any:
    """`value` if JSON can hold it and it is neither too deep nor endlessly repeated."""
    count = 0
    level = [value]
    for _ in range(DEPTH_MAX):
        if not level:
            return value
        count += len(level)
        if count > VALUES_MAX:
            raise bad_request("the body of the request holds too many values")
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                if not all(isinstance(key, str) for key in item):
                    raise bad_request("the keys of an object must be text")
                below.extend(item.values())
            elif isinstance(item, list):
                below.extend(item)
            else:
                _check_scalar(item)
        level = below
    raise bad_request(f"the body of the request is nested deeper than {DEPTH_MAX} levels")


def _check_scalar(item: object) -> None:
    if isinstance(item, float) and not math.isfinite(item):
        raise bad_request("numbers must be finite")
    if isinstance(item, int) and not -(2**63) <= item < 2**64:
        raise bad_request(f"a number of {item.bit_length()} bits does not fit into 64 bits")
    if not isinstance(item, str | int | float | bool | None):
        raise bad_request(f"values of type {type(item).__name__} cannot be written as JSON")
