"""OpenAPI documents, v3 by group and version and v2 in one, made from the kinds.

They carry what kubectl reads: schemas with their descriptions, merge rules and kinds (explain,
apply), and operations with their kinds, query parameters and patch types (--dry-run=server,
--validate).  Descriptions of parameters are short; there are no operations for exec and logs.
Shapes as of kube-apiserver v1.33 (v3) and v1.20.2 (v2).

kubectl before 1.27 asks for v2 as protobuf only. The messages are those of gnostic's
OpenAPIv2.proto; of them what our own v2 document contains. A message is a table: JSON key -> (field
number, how its value is written).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import msgspec

from unbroken.local.apiserver.kinds.kinds import Kind, Version
from unbroken.local.apiserver.schema.schemas import REF, builtin_definitions

from .discovery import SCALE, STATUS, VERSION, Subresource, group_versions, subresources
from .status import ApiError, Object

Writer = Callable[[int, Any], bytes]
"""(field number, value) -> bytes"""
Table = Mapping[str, tuple[int, Writer]]


def encode(document: Object) -> bytes:
    """A v2 document as `openapi.v2.Document`."""
    return _message(DOCUMENT, document)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _bytes(number: int, value: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _text(number: int, value: str) -> bytes:
    return _bytes(number, value.encode())


def _integer(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(int(value) % 2**64)


def _double(number: int, value: float) -> bytes:
    return _varint(number << 3 | 1) + struct.pack("<d", value)


def _any(number: int, value: Any) -> bytes:
    """`Any`: YAML text in field 2; JSON is YAML, and quicker to write."""
    return _bytes(number, _bytes(2, msgspec.json.encode(value)))


def _each(write: Writer) -> Writer:
    return lambda number, values: b"".join(write(number, value) for value in values)


def _named(write: Writer, inner: int) -> Writer:
    """A message of name (1) and value (2) for every pair, in field `inner`; 0: without holder."""

    def pairs(number: int, values: Mapping[str, Any]) -> bytes:
        made = [_text(1, name) + write(2, value) for name, value in values.items()]
        if not inner:
            return b"".join(_bytes(number, pair) for pair in made)
        return _bytes(number, b"".join(_bytes(inner, pair) for pair in made))

    return pairs


def _message(table: Table, value: Object) -> bytes:
    """A message; keys with `x-` are vendor extensions, others without a place are left out."""
    out = [
        write(number, value[key])
        for key, (number, write) in table.items()
        if key in value and value[key] is not None
    ]
    extensions = {key: item for key, item in value.items() if key.startswith("x-")}
    if extensions and "x-" in table:
        number, write = table["x-"]
        out.append(write(number, extensions))
    return b"".join(out)


def _nested(table: Table) -> Writer:
    return lambda number, value: _bytes(number, _message(table, value))


def _schema(number: int, value: Object) -> bytes:
    return _bytes(number, _message(SCHEMA, value))


def _wrapped(inner: int, write: Writer, number: int, value: Any) -> bytes:
    """A message whose one field `inner` holds the value (a proto `oneof`, or a list's holder)."""
    return _bytes(number, write(inner, value))


def _additional(number: int, value: Any) -> bytes:
    is_schema = isinstance(value, dict)
    return _bytes(number, _schema(1, value) if is_schema else _integer(2, value))


def _parameter(number: int, value: Object) -> bytes:
    """ParametersItem > Parameter > BodyParameter, or > NonBodyParameter > query or path."""
    if value["in"] == "body":
        return _bytes(number, _bytes(1, _nested(BODY)(1, value)))
    in_query = value["in"] == "query"
    made = _nested(PROTOBUF_QUERY if in_query else PATH)(3 if in_query else 4, value)
    return _bytes(number, _bytes(1, _bytes(2, made)))


def _response(number: int, value: Object) -> bytes:
    """ResponseValue > Response; its schema is a SchemaItem."""
    return _bytes(number, _nested(RESPONSE)(1, value))


EXTENSIONS = _named(_any, 0)
SCHEMA: Table = {
    "$ref": (1, _text), "format": (2, _text), "title": (3, _text), "description": (4, _text),
    "default": (5, _any), "multipleOf": (6, _double), "maximum": (7, _double),
    "exclusiveMaximum": (8, _integer), "minimum": (9, _double), "exclusiveMinimum": (10, _integer),
    "maxLength": (11, _integer), "minLength": (12, _integer), "pattern": (13, _text),
    "maxItems": (14, _integer), "minItems": (15, _integer), "uniqueItems": (16, _integer),
    "maxProperties": (17, _integer), "minProperties": (18, _integer),
    "required": (19, _each(_text)), "enum": (20, _each(_any)),
    "additionalProperties": (21, _additional), "type": (22, partial(_wrapped, 1, _text)),
    "items": (23, partial(_wrapped, 1, _schema)), "properties": (25, _named(_schema, 1)),
    "x-": (31, EXTENSIONS),
}  # fmt: skip
BODY: Table = {
    "description": (1, _text), "name": (2, _text), "in": (3, _text), "required": (4, _integer),
    "schema": (5, _schema),
}  # fmt: skip
PROTOBUF_QUERY: Table = {
    "required": (1, _integer), "in": (2, _text), "description": (3, _text), "name": (4, _text),
    "type": (6, _text), "uniqueItems": (20, _integer),
}  # fmt: skip
PATH: Table = {
    "required": (1, _integer), "in": (2, _text), "description": (3, _text), "name": (4, _text),
    "type": (5, _text), "uniqueItems": (19, _integer),
}  # fmt: skip
RESPONSE: Table = {"description": (1, _text), "schema": (2, partial(_wrapped, 1, _schema))}
OPERATION: Table = {
    "tags": (1, _each(_text)), "description": (3, _text), "operationId": (5, _text),
    "produces": (6, _each(_text)), "consumes": (7, _each(_text)),
    "parameters": (8, _each(_parameter)), "responses": (9, _named(_response, 1)),
    "schemes": (10, _each(_text)), "x-": (13, EXTENSIONS),
}  # fmt: skip
_operation = _nested(OPERATION)
PATH_ITEM: Table = {
    "get": (2, _operation), "put": (3, _operation), "post": (4, _operation),
    "delete": (5, _operation), "patch": (8, _operation), "parameters": (9, _each(_parameter)),
}  # fmt: skip
DOCUMENT: Table = {
    "swagger": (1, _text),
    "info": (2, _nested({"title": (1, _text), "version": (2, _text)})),
    "paths": (8, _named(_nested(PATH_ITEM), 2)),
    "definitions": (9, _named(_schema, 1)),
}


META = "io.k8s.apimachinery.pkg.apis.meta.v1."
REF_V2 = "#/definitions/"
SCALE_NAME = "io.k8s.api.autoscaling.v1.Scale"
PATCHES = (
    "application/json-patch+json",
    "application/merge-patch+json",
    "application/apply-patch+yaml",
)
STRATEGIC = "application/strategic-merge-patch+json"
SPELLINGS: Mapping[str, tuple[Object, Object]] = {
    "int-or-string": (
        {"oneOf": [{"type": "integer"}, {"type": "string"}], "format": "int-or-string"},
        {"type": "string", "format": "int-or-string"},
    ),
    "quantity": ({"oneOf": [{"type": "string"}, {"type": "number"}]}, {"type": "string"}),
}
"""Spellings by the format that the definitions have: how v3 and v2 say that it is a number or a
string."""
NOT_IN_V2 = ("oneOf", "anyOf", "not", "nullable", "x-kubernetes-validations", "allOf")

QUERY: Mapping[str, tuple[str, str]] = {
    "pretty": ("string", "If 'true', then the output is pretty printed."),
    "allowWatchBookmarks": ("boolean", "Sends BOOKMARK events in a watch."),
    "continue": ("string", "Where an earlier list with a limit ended."),
    "fieldSelector": ("string", "Restricts the list by fields; everything by default."),
    "labelSelector": ("string", "Restricts the list by labels; everything by default."),
    "limit": ("integer", "The most objects that one answer lists."),
    "resourceVersion": ("string", "Version that the answer must at least show."),
    "resourceVersionMatch": ("string", "How resourceVersion is applied to a list."),
    "sendInitialEvents": ("boolean", "Begins a watch with the objects that are there."),
    "timeoutSeconds": ("integer", "Ends the list or watch after this time."),
    "watch": ("boolean", "Answers with changes as they happen."),
    "dryRun": ("string", "'All': nothing is stored."),
    "fieldManager": ("string", "Name of the actor that makes these changes."),
    "fieldValidation": ("string", "'Ignore', 'Warn' or 'Strict': what unknown fields lead to."),
    "force": ("boolean", "Server-side apply takes fields that other managers own."),
    "gracePeriodSeconds": ("integer", "Seconds until the object is deleted; 0: at once."),
    "orphanDependents": ("boolean", "Deprecated: use propagationPolicy."),
    "propagationPolicy": ("string", "'Orphan', 'Background' or 'Foreground'."),
}
LIST = (
    "allowWatchBookmarks", "continue", "fieldSelector", "labelSelector", "limit",
    "resourceVersion", "resourceVersionMatch", "sendInitialEvents", "timeoutSeconds", "watch",
)  # fmt: skip
WRITE = ("dryRun", "fieldManager", "fieldValidation")
DELETE = ("dryRun", "gracePeriodSeconds", "orphanDependents", "propagationPolicy")


@dataclass(frozen=True, slots=True)
class _Operation:
    """One method of one path, before it is spelled as v2 or v3."""

    method: str
    action: str
    verb: str
    """The verb that the kind has when the operation is served."""
    parameters: tuple[str, ...]
    body: str = ""
    """Name of the schema of the body; empty: none."""
    answer: str = ""


def v3_root(kinds: Iterable[Kind]) -> Object:
    """The page /openapi/v3; an address changes when the document behind it does."""
    every = list(kinds)
    paths: Object = {}
    for group, version in group_versions(every):
        path = f"apis/{group}/{version}" if group else f"api/{version}"
        digest = _digest(every, group, version)
        paths[path] = {"serverRelativeURL": f"/openapi/v3/{path}?hash={digest}"}
    return {"paths": paths}


def v3_document(kinds: Iterable[Kind], group: str, version: str) -> bytes:
    """The page /openapi/v3/apis/GROUP/VERSION as JSON; ApiError 404 if nothing is served there."""
    served = _served(kinds, group, version)
    if not served:
        raise ApiError(404, "NotFound", "the server could not find the requested resource")
    schemas = _schemas(served, _schema_v3, REF)
    document = {
        "openapi": "3.0.0",
        "info": {"title": "Kubernetes", "version": VERSION["gitVersion"]},
        "paths": _paths(served, _path_v3, _operation_v3),
        "components": {"schemas": schemas, "securitySchemes": _security()},
    }
    return msgspec.json.encode(document)


def v2_document(kinds: Iterable[Kind]) -> bytes:
    """The page /openapi/v2 as JSON."""
    return msgspec.json.encode(_v2(kinds))


def v2_protobuf(kinds: Iterable[Kind]) -> bytes:
    """The page /openapi/v2 as kubectl before 1.27 asks for it."""
    return encode(_v2(kinds))


V2_PROTOBUF_MEDIA = "application/com.github.proto-openapi.spec.v2.v1.0+protobuf"
"""Content type of `v2_protobuf`; clients ask for it so, or with an `@` that no media type has."""


def wants_protobuf(accept: str) -> bool:
    """True if the Accept header of a request for /openapi/v2 puts protobuf first."""
    first = accept.partition(",")[0].partition(";")[0].strip()
    return first.replace("@", ".") == V2_PROTOBUF_MEDIA


def _v2(kinds: Iterable[Kind]) -> Object:
    every = list(kinds)
    served = [
        pair for group, version in group_versions(every) for pair in _served(every, group, version)
    ]
    return {
        "swagger": "2.0",
        "info": {"title": "Kubernetes", "version": VERSION["gitVersion"]},
        "paths": _paths(served, _path_v2, _operation_v2),
        "definitions": _schemas(served, _schema_v2, REF_V2),
        "securityDefinitions": _security(),
        "security": [{"BearerToken": []}],
    }


def _security() -> Object:
    return {
        "BearerToken": {
            "description": "Bearer Token authentication",
            "type": "apiKey",
            "name": "authorization",
            "in": "header",
        }
    }


def _served(kinds: Iterable[Kind], group: str, version: str) -> list[tuple[Kind, Version]]:
    return [
        (kind, kind.versions[version])
        for kind in kinds
        if kind.group == group and version in kind.versions
    ]


@cache
def _builtin_digest() -> str:
    return hashlib.sha256(msgspec.json.encode(builtin_definitions())).hexdigest()


def _digest(kinds: Iterable[Kind], group: str, version: str) -> str:
    """Digest of everything that a document is made from, without making it."""
    content: list[Any] = [VERSION["gitVersion"], _builtin_digest()]
    for kind, served in _served(kinds, group, version):
        content.append([kind.kind, kind.plural, kind.namespaced, kind.verbs])
        content.append([part.name for part in subresources(kind, served)])
        if served.schema_name not in builtin_definitions():
            content.append(served.schema.raw)
    return hashlib.sha256(msgspec.json.encode(content)).hexdigest().upper()


# Schemas


def _schemas(
    served: Sequence[tuple[Kind, Version]], spell: Callable[[Any], Object], ref: str
) -> Object:
    """Definitions of the served kinds, their lists, and all that these refer to."""
    known = builtin_definitions()
    out: Object = {}
    todo = [META + name for name in ("Status", "DeleteOptions", "Patch")]
    for kind, version in served:
        if version.schema_name not in known:
            out[version.schema_name] = spell(version.schema.raw)
        todo.append(version.schema_name)
        if version.scale is not None:
            todo.append(SCALE_NAME)
        if "list" in kind.verbs:
            name = version.schema_name + "List"
            out[name] = spell(_list_schema(kind, version))
            todo += _references(out[name], ref)
    while todo:
        name = todo.pop()
        if name not in out:
            out[name] = spell(known[name])
        elif name in known:
            continue
        todo += [other for other in _references(out[name], ref) if other not in out]
    return dict(sorted(out.items()))


def _references(value: Any, ref: str) -> Iterator[str]:
    if isinstance(value, list):
        for item in value:
            yield from _references(item, ref)
    elif isinstance(value, dict):
        target = value.get("$ref")
        if isinstance(target, str):
            yield target.removeprefix(ref)
        for item in value.values():
            if isinstance(item, dict | list):
                yield from _references(item, ref)


def _list_schema(kind: Kind, version: Version) -> Object:
    described = builtin_definitions()["io.k8s.api.core.v1.Pod"]["properties"]
    list_kind = kind.list_kind or kind.kind + "List"
    return {
        "description": f"{list_kind} is a list of {kind.kind}",
        "type": "object",
        "required": ["items"],
        "properties": {
            "apiVersion": described["apiVersion"],
            "items": {
                "description": f"List of {kind.plural}.",
                "type": "array",
                "items": {"$ref": REF + version.schema_name},
            },
            "kind": described["kind"],
            "metadata": {"$ref": REF + META + "ListMeta", "description": "Standard list metadata."},
        },
        "x-kubernetes-group-version-kind": [_gvk(kind, version, list_kind)],
    }


def _gvk(kind: Kind, version: Version, name: str = "") -> Object:
    return {"group": kind.group, "kind": name or kind.kind, "version": version.name}


def _schema_v3(raw: Any) -> Object:
    """Return a schema in the form of v3: a reference is alone, and other fields are around it."""
    spelled = SPELLINGS.get(raw.get("format", "")) if "type" not in raw else None
    if spelled and "$ref" not in raw:
        beside = {k: v for k, v in raw.items() if k != "x-kubernetes-int-or-string" and v}
        return {**beside, **spelled[0]} if raw["format"] != "quantity" else _quantity(raw, 0)
    out = _inside(raw, _schema_v3)
    target = out.pop("$ref", None)
    if target is None:
        return out
    # What a definition says of an object's name is enforced, and not published.
    out.pop("properties", None)
    return {**out, "allOf": [{"$ref": target}]} if out else {"$ref": target}


def _quantity(raw: Any, form: int) -> Object:
    described = {"description": raw["description"]} if raw.get("description") else {}
    return {**described, **SPELLINGS["quantity"][form]}


def _schema_v2(raw: Any) -> Object:
    """A schema as v2 spells it, without what v2 cannot say."""
    form = raw.get("format", "")
    if form in SPELLINGS and "type" not in raw and "$ref" not in raw:
        described = {"description": raw["description"]} if raw.get("description") else {}
        return {**described, **SPELLINGS[form][1]}
    source = {key: value for key, value in raw.items() if key not in NOT_IN_V2}
    if raw.get("x-kubernetes-preserve-unknown-fields") or raw.get("nullable"):
        # Clients refuse fields that v2 does not declare, and null where it gives a type.
        for key in ("items", "properties", *(["type"] if raw.get("nullable") else [])):
            source.pop(key, None)
    out = _inside(source, _schema_v2)
    target = out.get("$ref")
    if target is not None:
        out["$ref"] = target.replace(REF, REF_V2)
        out.pop("properties", None)
    return out


def _inside(raw: Any, spell: Callable[[Any], Object]) -> Object:
    """`raw` with the schemas inside it spelled."""
    out: Object = {}
    for key, value in raw.items():
        if key == "properties":
            is_object = "x-kubernetes-group-version-kind" in raw
            out[key] = {
                name: spell(_without_enum(field) if is_object else field)
                for name, field in value.items()
            }
        elif key in ("items", "additionalProperties", "not") and isinstance(value, Mapping):
            out[key] = spell(value)
        elif key in ("allOf", "anyOf", "oneOf"):
            out[key] = [spell(part) for part in value]
        elif value != "":
            out[key] = value
    return out


def _without_enum(field: Any) -> Any:
    """The definitions' source gives apiVersion and kind an enum of one; the server's do not."""
    enum = field.get("enum") or ()
    is_identity = len(enum) == 1 and "Servers" in field.get("description", "")
    return {k: v for k, v in field.items() if k != "enum"} if is_identity else field


# Paths


def _paths(
    served: Sequence[tuple[Kind, Version]],
    spell_path: Callable[[Sequence[str]], Object],
    spell: Callable[[Kind, Version, _Operation, Object, str], Object],
) -> Object:
    paths: Object = {}
    for kind, version in served:
        for path, names, operations, identity in _routes(kind, version):
            made = {
                operation.method: spell(kind, version, operation, identity, path)
                for operation in operations
            }
            if made:
                paths[path] = {**made, **spell_path(names)}
    return dict(sorted(paths.items()))


def _routes(
    kind: Kind, version: Version
) -> Iterator[tuple[str, list[str], list[_Operation], Object]]:
    """(path, names in the path, operations, what they work on) of one kind."""
    root = f"/apis/{kind.group}/{version.name}" if kind.group else f"/api/{version.name}"
    names = ["namespace"] if kind.namespaced else []
    middle = "/namespaces/{namespace}" if kind.namespaced else ""
    collection, listing, single = _operations(version.schema_name, kind.verbs)
    identity = _gvk(kind, version)
    yield f"{root}{middle}/{kind.plural}", names, [*listing, *collection], identity
    if kind.namespaced:
        yield f"{root}/{kind.plural}", [], listing, identity
    path = f"{root}{middle}/{kind.plural}/{{name}}"
    yield path, ["name", *names], single, identity
    for part in subresources(kind, version):
        if part in (STATUS, SCALE):
            name = SCALE_NAME if part is SCALE else version.schema_name
            _, _, operations = _operations(name, part.verbs)
            shown = _scale_identity(part) if part is SCALE else identity
            yield f"{path}/{part.name}", ["name", *names], operations, shown


def _scale_identity(part: Subresource) -> Object:
    return {"group": part.group, "kind": part.kind, "version": part.version}


def _operations(
    name: str, verbs: Sequence[str]
) -> tuple[list[_Operation], list[_Operation], list[_Operation]]:
    """Operations on a collection, those that list, and those on one object."""
    status, options = META + "Status", META + "DeleteOptions"
    collection = [
        _Operation("post", "post", "create", WRITE, name, name),
        _Operation(
            "delete", "deletecollection", "deletecollection", (*LIST, *DELETE), options, status
        ),
    ]
    listing = [_Operation("get", "list", "list", LIST, "", name + "List")]
    single = [
        _Operation("get", "get", "get", (), "", name),
        _Operation("put", "put", "update", WRITE, name, name),
        _Operation("patch", "patch", "patch", (*WRITE, "force"), META + "Patch", name),
        _Operation("delete", "delete", "delete", DELETE, options, status),
    ]
    kept = [
        [o for o in operations if o.verb in verbs] for operations in (collection, listing, single)
    ]
    return kept[0], kept[1], kept[2]


def _about(kind: Kind, version: Version, operation: _Operation, identity: Object) -> Object:
    """Return the part of an operation that both forms share."""
    words = (kind.group.split(".")[0] or "core", version.name)
    title = "".join(word[:1].upper() + word[1:] for word in words)
    scope = "Namespaced" if kind.namespaced else ""
    return {
        "description": f"{operation.action} {identity['kind']}",
        "operationId": f"{operation.action}{title}{scope}{identity['kind']}",
        "tags": ["_".join(words)],
        "x-kubernetes-action": operation.action,
        "x-kubernetes-group-version-kind": identity,
    }


def _patches(kind: Kind) -> tuple[str, ...]:
    return PATCHES if kind.is_custom else (*PATCHES, STRATEGIC)


def _operation_v3(
    kind: Kind, version: Version, operation: _Operation, identity: Object, path: str
) -> Object:
    out = _about(kind, version, operation, identity)
    if path.endswith(("/status", "/scale")):
        out["operationId"] += path.rpartition("/")[2].title()
    out["parameters"] = [_query_v3(name) for name in operation.parameters]
    if operation.body:
        medias = _patches(kind) if operation.method == "patch" else ("*/*",)
        content = {media: {"schema": {"$ref": REF + operation.body}} for media in medias}
        out["requestBody"] = {"content": content}
        if operation.method != "delete":
            out["requestBody"]["required"] = True
    answer = {"application/json": {"schema": {"$ref": REF + operation.answer}}}
    out["responses"] = {
        "200": {"description": "OK", "content": answer},
        "401": {"description": "Unauthorized"},
    }
    return out


def _query_v3(name: str) -> Object:
    kind, description = QUERY[name]
    schema = {"type": kind, "uniqueItems": True}
    return {"name": name, "in": "query", "description": description, "schema": schema}


def _path_v3(names: Sequence[str]) -> Object:
    schema = {"type": "string", "uniqueItems": True}
    given = [{**_in_path(name), "schema": schema} for name in names]
    return {"parameters": [*given, _query_v3("pretty")]}


def _in_path(name: str) -> Object:
    description = "name of the object" if name == "name" else "object name and auth scope"
    return {"name": name, "in": "path", "description": description, "required": True}


def _operation_v2(
    kind: Kind, version: Version, operation: _Operation, identity: Object, path: str
) -> Object:
    out = _about(kind, version, operation, identity)
    if path.endswith(("/status", "/scale")):
        out["operationId"] += path.rpartition("/")[2].title()
    out["consumes"] = list(_patches(kind)) if operation.method == "patch" else ["*/*"]
    out["produces"] = ["application/json"]
    out["schemes"] = ["https"]
    out["parameters"] = [_query_v2(name) for name in operation.parameters]
    if operation.body:
        body: Object = {"name": "body", "in": "body"}
        if operation.method != "delete":
            body["required"] = True
        schema = {"$ref": REF_V2 + operation.body}
        out["parameters"].insert(0, {**body, "schema": schema})
    answer = {"$ref": REF_V2 + operation.answer}
    out["responses"] = {
        "200": {"description": "OK", "schema": answer},
        "401": {"description": "Unauthorized"},
    }
    return out


def _query_v2(name: str) -> Object:
    kind, description = QUERY[name]
    result = {"name": name, "in": "query", "description": description, "type": kind}
    return {**result, "uniqueItems": True}


def _path_v2(names: Sequence[str]) -> Object:
    given = [{**_in_path(name), "type": "string", "uniqueItems": True} for name in names]
    return {"parameters": [*given, _query_v2("pretty")]}
