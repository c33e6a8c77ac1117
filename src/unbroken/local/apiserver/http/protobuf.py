"""Request bodies in Kubernetes' protobuf form, decoded into what the same object is as JSON.

kubectl's typed clients (create, auth) send no other form since v1.32; they take JSON as answer.
Field numbers come from data/protobuf.json.gz, made by tools/kubernetes_protobuf.py. Kubernetes
writes every field that is no pointer, even if it is empty. Such a zero is left out where Go's JSON
leaves it out. So what is stored is what a client that speaks JSON would have sent.
CustomResourceDefinitions are absent: clients send them as JSON.
"""

from __future__ import annotations

import gzip
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from functools import cache
from importlib import resources
from typing import Any, Literal, NamedTuple

import msgspec

from .status import Object, bad_request

MEDIA = "application/vnd.kubernetes.protobuf"
MAGIC = b"k8s\x00"
_UNKNOWN = "k8s.io.apimachinery.pkg.runtime.Unknown"
_META = "k8s.io.apimachinery.pkg.apis.meta.v1."
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_SIZES = {0: None, 1: 8, 2: None, 5: 4}
"""Bytes of a field, by wire type; None: said by a number, or none.  Kubernetes has no groups (3,
4)."""
_Raw = int | bytes | None
"""A value on the wire: a number, bytes of a given length, or something of fixed size."""


class _Field(NamedTuple):
    name: str
    type: str
    """A scalar's name, or that of a message."""
    mode: Literal["kept", "omitted", "repeated", "map", "inline"]


class _Table(NamedTuple):
    kinds: Mapping[str, str]
    messages: Mapping[str, Mapping[int, _Field]]
    wholes: frozenset[str]
    """Messages that are, as JSON, the value of their one field."""


class _DefectError(ValueError):
    """Error in a message; the names of the fields around it are added on the way up."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.place: list[str] = []


def decode(body: bytes) -> Object:
    """The object in a body of media type `MEDIA`; ApiError 400 where there is none."""
    if not body.startswith(MAGIC):
        raise bad_request("the body of the request is not protobuf: it does not begin with k8s\\0")
    try:
        envelope = _struct(_UNKNOWN, body[len(MAGIC) :], {})
        if envelope.get("contentEncoding") or envelope.get("contentType", "") not in ("", MEDIA):
            raise _DefectError("what the envelope holds is not plain protobuf")
        identity = envelope.get("typeMeta", {})
        version, kind = identity.get("apiVersion", ""), identity.get("kind", "")
        kinds = _table().kinds
        # DeleteOptions come in the version of what is deleted.
        message = kinds.get(f"{version}/{kind}") or kinds.get(f"*/{kind}")
        if message is None:
            name = f'kind "{kind:.99}" of version "{version:.99}"'
            raise _DefectError(f"{name} is not read from protobuf here, send it as JSON")
        result = _struct(message, envelope.get("raw", b""), {})
    except _DefectError as defect:
        place = "".join(reversed(defect.place)).removeprefix(".") or "the object"
        raise bad_request(f"the protobuf body is not valid: {place}: {defect}") from defect
    return {"apiVersion": version, "kind": kind, **result}


@cache
def _table() -> _Table:
    packed = (
        resources.files("unbroken.local.apiserver").joinpath("data/protobuf.json.gz").read_bytes()
    )
    raw = msgspec.json.decode(gzip.decompress(packed))
    messages = {
        name: {int(number): _Field(*field) for number, field in fields.items()}
        for name, fields in raw["messages"].items()
    }
    return _Table(raw["kinds"], messages, frozenset(raw["wholes"]))


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Unsigned value of the varint at `at`, and the place after it."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise _DefectError("the data ends within a number")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80 and value < 2**64:
            return value, at
    raise _DefectError("a number does not fit into 64 bits")


def _fields(data: bytes) -> Iterator[tuple[int, _Raw]]:
    """Number and value of each field."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, wire = key >> 3, key & 7
        if not 0 < number < 2**29:
            raise _DefectError(f"{number} is no field number")
        if wire not in _SIZES:
            raise _DefectError(f"field {number} has wire type {wire}")
        size, value = _SIZES[wire], None
        if size is None:
            value, at = _varint(data, at)
            size = value if wire == 2 else 0
        if size > len(data) - at:
            raise _DefectError(f"field {number} has {size} bytes, {len(data) - at} are left")
        yield number, data[at : at + size] if wire == 2 else value
        at += size


def _struct(message: str, data: bytes, out: Object) -> Object:
    """`out` with the fields in `data`; what occurs twice is merged, as protobuf demands."""
    fields = _table().messages[message]
    for number, raw in _fields(data):
        field = fields.get(number)
        if field is None:
            continue
        try:
            _put(out, field, raw)
        except _DefectError as defect:
            index = f"[{len(out.get(field.name, ()))}]" if field.mode == "repeated" else ""
            defect.place.append(f".{field.name}{index}" if field.name else index)
            raise
    return out


def _put(out: Object, field: _Field, raw: _Raw) -> None:
    if field.mode == "repeated":
        items: list[Any] = out.setdefault(field.name, [])
        items.extend(_items(field.type, raw))
    elif field.mode == "map":
        key, value = _entry(field.type, _bytes(raw))
        out.setdefault(field.name, {})[key] = value
    elif field.mode == "inline":
        _struct(field.type, _bytes(raw), out)
    else:
        value = _value(field.type, raw, out.get(field.name))
        if value is None or (field.mode == "omitted" and not value):
            out.pop(field.name, None)
        else:
            out[field.name] = value


def _items(kind: str, raw: _Raw) -> Iterator[Any]:
    """One item of a list, or the numbers packed together."""
    if isinstance(raw, bytes) and kind in _NUMBERS:
        at = 0
        while at < len(raw):
            number, at = _varint(raw, at)
            yield _NUMBERS[kind](number)
    else:
        yield _value(kind, raw)


def _entry(kind: str, data: bytes) -> tuple[str, Any]:
    """Key and value of one entry of a map."""
    key, value = "", None
    for number, raw in _fields(data):
        if number == 1:
            key = _text(_bytes(raw))
        elif number == 2:
            try:
                value = _value(kind, raw)
            except _DefectError as defect:
                defect.place.append(f"[{key}]")
                raise
    return key, "" if value is None and kind in ("string", "bytes") else value


def _value(kind: str, raw: _Raw, before: Any = None) -> Any:
    """One value of type `kind`; None is a time or a JSON value that says nothing."""
    if kind in _NUMBERS:
        if not isinstance(raw, int):
            raise _DefectError("a number belongs here")
        return _NUMBERS[kind](raw)
    data = _bytes(raw)
    if kind in _SCALARS:
        return _SCALARS[kind](data)
    if kind in _FORMS:
        return _FORMS[kind](_struct(kind, data, {}))
    if kind in _table().wholes:
        return _struct(kind, data, {}).get("")
    return _struct(kind, data, before if isinstance(before, dict) else {})


def _bytes(raw: _Raw) -> bytes:
    if not isinstance(raw, bytes):
        raise _DefectError("text, bytes or a message belong here")
    return raw


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise _DefectError(f"text that is not UTF-8 at byte {error.start}") from error


def _json(data: bytes) -> Any:
    try:
        return msgspec.json.decode(data) if data else None
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise _DefectError(f"not valid JSON: {error!s:.100}") from error


def _time(timespec: str) -> Callable[[Object], str | None]:
    def convert(stamp: Object) -> str | None:
        if not stamp:
            return None
        try:
            moment = _EPOCH + timedelta(0, stamp.get("seconds", 0), stamp.get("nanos", 0) // 1000)
        except OverflowError as error:
            raise _DefectError("a time outside the years 1 to 9999") from error
        return moment.replace(tzinfo=None).isoformat(timespec=timespec) + "Z"

    return convert


_NUMBERS: Mapping[str, Callable[[int], int]] = {
    "bool": bool,
    "int32": lambda value: (value + 2**31) % 2**32 - 2**31,
    "int64": lambda value: (value + 2**63) % 2**64 - 2**63,
}
_SCALARS: Mapping[str, Callable[[bytes], Any]] = {
    "string": _text,
    "bytes": lambda data: b64encode(data).decode(),
    "raw": bytes,
    "json": _json,
}
_FORMS: Mapping[str, Callable[[Object], Any]] = {
    _META + "Time": _time("seconds"),
    _META + "MicroTime": _time("microseconds"),
    "k8s.io.apimachinery.pkg.util.intstr.IntOrString": lambda union: (
        union.get("strVal", "") if union.get("type") == 1 else union.get("intVal", 0)
    ),
}
