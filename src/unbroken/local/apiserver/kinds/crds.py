"""Kinds of custom resources, made from their definitions, and what a definition may say.

Not evaluated here: rules in CEL, and conversion by webhook (refused; versions of one kind differ
by apiVersion alone).  Names, wording and paths follow apiextensions-apiserver v1.33, most of it
tried against v1.20.2.

The schemas inside a definition are structural, and their defaults fit.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from unbroken.errors import SpecError
from unbroken.local.apiserver.http.status import Cause, Object
from unbroken.local.apiserver.schema import structural
from unbroken.local.apiserver.schema.constraints import (
    FORMATS,
    forbidden,
    go_text,
    invalid_value,
    pattern,
    required_value,
)
from unbroken.local.apiserver.schema.constraints import unsupported as not_supported
from unbroken.local.apiserver.schema.schemas import REF, Schema, builtin, builtin_definitions
from unbroken.local.apiserver.schema.structural import OBJECT_META
from unbroken.local.apiserver.tables.custom_columns import custom_columns, json_path

from .kinds import Kind, Version

SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
NOT_A_SUBDOMAIN = (
    "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or "
    "'.', and must start and end with an alphanumeric character (e.g. 'example.com', regex used "
    f"for validation is '{SUBDOMAIN.pattern}')"
)
NOT_A_LABEL = (
    "a DNS-1035 label must consist of lower case alphanumeric characters or '-', start with an "
    "alphabetic character, and end with an alphanumeric character (e.g. 'my-name',  or 'abc-123', "
    f"regex used for validation is '{LABEL.pattern}')"
)
MIXED_CASE = "may have mixed case, but should otherwise match: " + NOT_A_LABEL
COLUMN_TYPES = ("boolean", "date", "integer", "number", "string")
COLUMN_FORMATS = (
    "byte", "date", "date-time", "double", "float", "int32", "int64", "password",
)  # fmt: skip
PROTECTED_GROUPS = ("k8s.io", "kubernetes.io")
APPROVAL = "api-approved.kubernetes.io"
VERSION_NAME = re.compile(r"v([1-9]\d*)(?:(alpha|beta)([1-9]\d*))?")


def validate_definition(crd: Object) -> list[Cause]:
    """Everything wrong with a definition, whether or not its defaults have been set."""
    spec = crd.get("spec") or {}
    causes = [*_identity(crd, spec), *_group_and_scope(spec), *_versions(spec)]
    causes += [*_required_names(spec), *_names(spec.get("names") or {})]
    for index, version in enumerate(spec.get("versions") or ()):
        causes += _version(spec, version, index)
    return causes + list(_conversion(spec))


def validate_update(crd: Object, old: Object) -> list[Cause]:
    """Return forbidden changes of a definition; in addition to `validate_definition`."""
    causes = []
    spec, before = crd["spec"], old["spec"]
    fixed = [("group", spec["group"], before["group"])]
    fixed += [("names.plural", spec["names"]["plural"], before["names"]["plural"])]
    if is_established(old):
        fixed += [("scope", spec["scope"], before["scope"])]
        fixed += [("names.kind", spec["names"]["kind"], before["names"]["kind"])]
    for path, now, then in fixed:
        if now != then:
            causes.append(invalid_value(f"spec.{path}", now, "field is immutable"))
    names = {version["name"] for version in spec["versions"]}
    for index, name in enumerate((old.get("status") or {}).get("storedVersions") or ()):
        if name not in names:
            path = f"status.storedVersions[{index}]"
            causes.append(invalid_value(path, name, "must appear in spec.versions"))
    return causes


def definition_warnings(crd: Object) -> list[str]:
    """Warnings for the answer to a create or update: what is accepted and has no effect."""
    spec = crd["spec"]
    result = []
    for index, version in enumerate(spec["versions"]):
        schema = (version.get("schema") or {}).get("openAPIV3Schema")
        if schema:
            result += schema_warnings(schema, _path(spec, index, "schema"))
    return list(dict.fromkeys(result))


def _path(spec: Object, index: int, key: str) -> str:
    """Return the path of a version's part; what all versions share is reported as the
    definition's."""
    versions = spec["versions"]
    is_shared = all(version.get(key) == versions[0].get(key) for version in versions)
    if key == "schema":
        place = "spec.validation" if is_shared else f"spec.versions[{index}].schema"
        return f"{place}.openAPIV3Schema"
    return f"spec.{key}" if is_shared else f"spec.versions[{index}].{key}"


def _identity(crd: Object, spec: Object) -> Iterator[Cause]:
    name = (crd.get("metadata") or {}).get("name") or ""
    names, group = spec.get("names") or {}, spec.get("group") or ""
    if name != f"{names.get('plural', '')}.{group}":
        yield invalid_value("metadata.name", name, 'must be spec.names.plural+"."+spec.group')
    if any(group == owned or group.endswith("." + owned) for owned in PROTECTED_GROUPS):
        given = (crd["metadata"].get("annotations") or {}).get(APPROVAL, "")
        path = f"metadata.annotations[{APPROVAL}]"
        link = "see https://github.com/kubernetes/enhancements/pull/1111"
        if not given:
            why = f'protected groups must have approval annotation "{APPROVAL}", {link}'
            yield required_value(path, why)
        elif not given.startswith("unapproved") and not urlsplit(given).netloc:
            why = f"must be a URL to the approving pull request or unapproved, {link}"
            yield invalid_value(path, given, why)


def _group_and_scope(spec: Object) -> Iterator[Cause]:
    group, scope = spec.get("group") or "", spec.get("scope") or ""
    if not group:
        yield required_value("spec.group")
    elif not SUBDOMAIN.fullmatch(group) or len(group) > 253:
        yield invalid_value("spec.group", group, NOT_A_SUBDOMAIN)
    elif "." not in group:
        yield invalid_value("spec.group", group, "should be a domain with at least one dot")
    if not scope:
        yield required_value("spec.scope")
    elif scope not in ("Cluster", "Namespaced"):
        yield not_supported("spec.scope", scope, ["Cluster", "Namespaced"])
    if spec.get("preserveUnknownFields"):
        why = (
            "cannot set to true, set x-preserve-unknown-fields to true in "
            "spec.versions[*].schema instead"
        )
        yield invalid_value("spec.preserveUnknownFields", True, why)


def _versions(spec: Object) -> Iterator[Cause]:
    versions = spec.get("versions") or []
    names = [version.get("name") or "" for version in versions]
    for index, name in enumerate(names):
        if not _is_label(name):
            yield invalid_value(f"spec.versions[{index}].name", name, NOT_A_LABEL)
    if len(set(names)) < len(names):
        yield invalid_value("spec.versions", names, "must contain unique version names")
    if sum(bool(version.get("storage")) for version in versions) != 1:
        why = "must have exactly one version marked as storage version"
        yield invalid_value("spec.versions", names, why)


def _required_names(spec: Object) -> Iterator[Cause]:
    names = spec.get("names") or {}
    # Without a kind nothing can be derived, and the server names everything that is missing.
    optional = () if names.get("kind") else ("singular", "listKind")
    for key in ("plural", "singular", "kind", "listKind"):
        if not names.get(key) and (key in ("plural", "kind") or key in optional):
            yield required_value(f"spec.names.{key}")


def _is_label(text: str) -> bool:
    return bool(LABEL.fullmatch(text)) and len(text) <= 63


def _names(names: Object) -> Iterator[Cause]:
    for key in ("plural", "singular"):
        text = names.get(key) or ""
        if text and not _is_label(text):
            yield invalid_value(f"spec.names.{key}", text, NOT_A_LABEL)
    for key in ("kind", "listKind"):
        text = names.get(key) or ""
        if text and not _is_label(text.lower()):
            yield invalid_value(f"spec.names.{key}", text, MIXED_CASE)
    for key in ("shortNames", "categories"):
        for index, text in enumerate(names.get(key) or ()):
            if not _is_label(text):
                yield invalid_value(f"spec.names.{key}[{index}]", text, NOT_A_LABEL)
    if names.get("kind") and names["kind"] == names.get("listKind"):
        why = "kind and listKind may not be the same"
        yield invalid_value("spec.names.listKind", names["listKind"], why)


def _version(spec: Object, version: Object, index: int) -> Iterator[Cause]:
    schema = (version.get("schema") or {}).get("openAPIV3Schema")
    if not schema:
        path = f"spec.versions[{index}].schema.openAPIV3Schema"
        yield required_value(path, "schemas are required")
    path = _path(spec, index, "schema")
    if schema and (index == 0 or path.startswith("spec.versions")):
        yield from schema_causes(schema, path)
    path = _path(spec, index, "additionalPrinterColumns")
    if index == 0 or path.startswith("spec.versions"):
        for number, column in enumerate(version.get("additionalPrinterColumns") or ()):
            yield from _column(column, f"{path}[{number}]")
    path = _path(spec, index, "subresources")
    scale = (version.get("subresources") or {}).get("scale")
    if scale is not None and (index == 0 or path.startswith("spec.versions")):
        yield from _scale(scale, f"{path}.scale")
    for number, field in enumerate(version.get("selectableFields") or ()):
        place = f"spec.versions[{index}].selectableFields[{number}].jsonPath"
        yield from _simple_path(field.get("jsonPath") or "", place)
    if version.get("deprecationWarning") and not version.get("deprecated"):
        place = f"spec.versions[{index}].deprecationWarning"
        why = "can only be set for deprecated versions"
        yield invalid_value(place, version["deprecationWarning"], why)


def _simple_path(text: str, path: str) -> Iterator[Cause]:
    if not text:
        yield required_value(path)
    elif not text.startswith("."):
        yield invalid_value(path, text, "must be a simple json path starting with .")
    else:
        try:
            json_path(text)
        except ValueError as error:
            yield invalid_value(path, text, f"is an invalid path: {error}")


def _column(column: Object, path: str) -> Iterator[Cause]:
    kind = column.get("type") or ""
    one_of = "must be one of " + ",".join(COLUMN_TYPES)
    if not column.get("name"):
        yield required_value(f"{path}.name")
    if not kind:
        yield required_value(f"{path}.type", one_of)
    elif kind not in COLUMN_TYPES:
        yield invalid_value(f"{path}.type", kind, one_of)
    if column.get("format") and column["format"] not in COLUMN_FORMATS:
        why = "must be one of " + ",".join(COLUMN_FORMATS)
        yield invalid_value(f"{path}.format", column["format"], why)
    yield from _simple_path(column.get("jsonPath") or "", f"{path}.JSONPath")


def _scale(scale: Object, path: str) -> Iterator[Cause]:
    roots = {
        "specReplicasPath": ((".spec.",), "should be a json path under .spec"),
        "statusReplicasPath": ((".status.",), "should be a json path under .status"),
        "labelSelectorPath": (
            (".spec.", ".status."),
            "should be a json path under either .spec or .status",
        ),
    }
    for key, (starts, why) in roots.items():
        text = scale.get(key) or ""
        if not text and key == "labelSelectorPath":
            continue
        problems = list(_simple_path(text, f"{path}.{key}"))
        yield from problems
        if not problems and not text.startswith(starts):
            yield invalid_value(f"{path}.{key}", text, why)
        elif not problems and not re.fullmatch(r"(\.[^.\[\]]+)+", text):
            why = "must be a simple json path of field names only"
            yield invalid_value(f"{path}.{key}", text, why)


def _conversion(spec: Object) -> Iterator[Cause]:
    strategy = (spec.get("conversion") or {}).get("strategy") or "None"
    if strategy == "Webhook":
        why = "this server calls no conversion webhooks; use None, and versions of one schema"
        yield forbidden("spec.conversion.strategy", f"Webhook: {why}")
    elif strategy != "None":
        yield not_supported("spec.conversion.strategy", strategy, ["None", "Webhook"])


def set_defaults(crd: Object, now: str) -> Object:
    """Fill in, in place, what a valid definition may leave out; `now` is RFC 3339.

    A definition without a status gets one that knows of no other definition: see `established`.
    """
    spec = crd["spec"]
    names = spec["names"]
    names["singular"] = names.get("singular") or names["kind"].lower()
    names["listKind"] = names.get("listKind") or names["kind"] + "List"
    spec["conversion"] = spec.get("conversion") or {"strategy": "None"}
    spec.pop("preserveUnknownFields", None)
    for version in spec["versions"]:
        version.setdefault("served", False)
        version.setdefault("storage", False)
    if not crd.get("status"):
        crd["status"] = established(crd, (), now)["status"]
    return crd


def established(crd: Object, others: Iterable[Object], now: str) -> Object:
    """The definition with the status that follows from its names and those of all `others`."""
    spec, old = crd["spec"], crd.get("status") or {}
    conflicts = names_conflict(crd, others)
    if conflicts:
        reason, message = conflicts[0]
        accepted = ("False", reason, message)
        ready = ("False", "NotAccepted", "not all names are accepted")
    else:
        accepted = ("True", "NoConflicts", "no conflicts found")
        ready = ("True", "InitialNamesAccepted", "the initial names have been accepted")
    if is_established(crd):
        # Once established a definition stays so; only its new names are not accepted.
        ready = ("True", "InitialNamesAccepted", "the initial names have been accepted")
    conditions = [_condition(old, "NamesAccepted", accepted, now)]
    conditions.append(_condition(old, "Established", ready, now))
    handled = ("NamesAccepted", "Established")
    conditions += [c for c in old.get("conditions") or () if c["type"] not in handled]
    storage = next(version["name"] for version in spec["versions"] if version.get("storage"))
    stored = [*(old.get("storedVersions") or ())]
    names = (old.get("acceptedNames") or {"plural": "", "kind": ""}) if conflicts else spec["names"]
    status = {
        **old,
        "conditions": conditions,
        "acceptedNames": copy.deepcopy(names),
        "storedVersions": stored if storage in stored else [*stored, storage],
    }
    return {**copy.deepcopy(crd), "status": status}


def _condition(old: Object, kind: str, wanted: tuple[str, str, str], now: str) -> Object:
    status, reason, message = wanted
    before = next((c for c in old.get("conditions") or () if c["type"] == kind), None)
    changed_at = before["lastTransitionTime"] if before and before["status"] == status else now
    return {
        "type": kind,
        "status": status,
        "lastTransitionTime": changed_at,
        "reason": reason,
        "message": message,
    }


def is_established(crd: Object) -> bool:
    """True if the kind is served."""
    conditions = (crd.get("status") or {}).get("conditions") or ()
    return any(c["type"] == "Established" and c["status"] == "True" for c in conditions)


def names_conflict(crd: Object, others: Iterable[Object]) -> list[tuple[str, str]]:
    """(reason, message) of every name that another definition of the group has already."""
    resources: set[str] = set()
    kinds: set[str] = set()
    for other in others:
        names = (other.get("status") or {}).get("acceptedNames") or {}
        if other["spec"]["group"] != crd["spec"]["group"] or _same_name(crd, other):
            continue
        taken = (names.get("plural"), names.get("singular"), *(names.get("shortNames") or ()))
        resources |= set(filter(None, taken))
        kinds |= set(filter(None, (names.get("kind"), names.get("listKind"))))
    names = crd["spec"]["names"]
    result = []
    for key, taken_names in (("plural", resources), ("singular", resources)):
        if names.get(key) in taken_names:
            result.append((f"{key.title()}Conflict", f'"{names[key]}" is already in use'))
    short = [f'"{x}" is already in use' for x in names.get("shortNames") or () if x in resources]
    if short:
        text = short[0] if len(short) == 1 else "[" + ", ".join(short) + "]"
        result.append(("ShortNamesConflict", text))
    for key, reason in (("kind", "KindConflict"), ("listKind", "ListKindConflict")):
        if names.get(key) in kinds:
            result.append((reason, f'"{names[key]}" is already in use'))
    return result


def _same_name(crd: Object, other: Object) -> bool:
    return bool(crd["metadata"]["name"] == other["metadata"]["name"])


def version_rank(name: str) -> tuple[int, int, int, str]:
    """Sort key that puts the version first that clients should prefer: v2, v1, v1beta2, x."""
    match = VERSION_NAME.fullmatch(name)
    if match is None:
        return (3, 0, 0, name)
    level = {None: 0, "beta": 1, "alpha": 2}[match[2]]
    return (level, -int(match[1]), -int(match[3] or 0), name)


def kind_of(crd: Object) -> Kind:
    """The kind that a valid definition (defaults set) makes."""
    spec = crd["spec"]
    names = spec["names"]
    served = [version for version in spec["versions"] if version.get("served")]
    served.sort(key=lambda version: version_rank(version["name"]))
    return Kind(
        group=spec["group"],
        kind=names["kind"],
        plural=names["plural"],
        singular=names["singular"],
        namespaced=spec["scope"] == "Namespaced",
        versions={version["name"]: _served(spec, version) for version in served},
        storage_version=next(v["name"] for v in spec["versions"] if v.get("storage")),
        list_kind=names["listKind"],
        short_names=tuple(names.get("shortNames") or ()),
        categories=tuple(names.get("categories") or ()),
        is_custom=True,
    )


def _served(spec: Object, version: Object) -> Version:
    group, kind = spec["group"], spec["names"]["kind"]
    subresources = version.get("subresources") or {}
    fields = [
        field["jsonPath"].removeprefix(".") for field in version.get("selectableFields") or ()
    ]
    warning = None
    if version.get("deprecated"):
        warning = version.get("deprecationWarning")
        warning = warning or f"{group}/{version['name']} {kind} is deprecated"
    reverse = ".".join(reversed(group.split(".")))
    return Version(
        name=version["name"],
        schema=_whole_schema(version["schema"]["openAPIV3Schema"], spec, version["name"]),
        schema_name=f"{reverse}.{version['name']}.{kind}",
        columns=custom_columns(version.get("additionalPrinterColumns") or ()),
        has_status=subresources.get("status") is not None,
        scale=subresources.get("scale"),
        selectable_fields=("metadata.name", "metadata.namespace", *fields),
        deprecation=warning,
    )


def _whole_schema(declared: Mapping[str, Any], spec: Object, version: str) -> Schema:
    """Return the declared schema with the fields of every object; its rules about names stay in
    force."""
    fields = dict(declared.get("properties") or {})
    meta = builtin(OBJECT_META).raw
    narrowed = (fields.get("metadata") or {}).get("properties") or {}
    described = builtin_definitions()["io.k8s.api.core.v1.Pod"]["properties"]
    text = {key: described[key]["description"] for key in ("apiVersion", "kind", "metadata")}
    own = {
        "apiVersion": {"type": "string", "description": text["apiVersion"]},
        "kind": {"type": "string", "description": text["kind"]},
        "metadata": {
            "$ref": REF + OBJECT_META,
            "description": text["metadata"],
            **({"properties": {**meta["properties"], **narrowed}} if narrowed else {}),
        },
    }
    identity = {"group": spec["group"], "version": version, "kind": spec["names"]["kind"]}
    root = {
        **declared,
        "properties": {**own, **{k: v for k, v in fields.items() if k not in own}},
        "x-kubernetes-group-version-kind": [identity],
    }
    return Schema(root, builtin_definitions())


Raw = Mapping[str, Any]
PROPS = "io.k8s.apiextensions-apiserver.pkg.apis.apiextensions.v1.JSONSchemaProps"
TYPES = ["array", "boolean", "integer", "number", "object", "string"]
SCALARS = ("boolean", "integer", "number", "string")
UNSUPPORTED = (
    "$ref", "id", "patternProperties", "definitions", "dependencies", "additionalItems",
)  # fmt: skip
IGNORED_FORMATS = {
    "int32", "int64", "float", "double", "password", "bsonobjectid", "isbn", "isbn10", "isbn13",
    "creditcard", "ssn", "rgbcolor",
}  # fmt: skip
"""Formats that the API server knows and that constrain nothing, here or at all."""
NOT_IN_COMBINATIONS = {
    "type": "must be empty to be structural",
    "description": "must be empty to be structural",
    "title": "must be empty to be structural",
    "default": "must be undefined to be structural",
    "additionalProperties": "must be undefined to be structural",
    "nullable": "must be false to be structural",
    "x-kubernetes-preserve-unknown-fields": "must be undefined to be structural",
    "x-kubernetes-embedded-resource": "must be false to be structural",
    "x-kubernetes-int-or-string": "must be false to be structural",
    "x-kubernetes-list-type": "must be undefined to be structural",
    "x-kubernetes-list-map-keys": "must be empty to be structural",
    "x-kubernetes-map-type": "must be undefined to be structural",
}
INT_OR_STRING = [{"type": "integer"}, {"type": "string"}]


def schema_causes(root: Raw, path: str) -> list[Cause]:
    """Everything wrong with the schema of a version; `path` is where it stands."""
    causes = list(_undecodable(root, path)) or [*_root(root, path), *_node(root, path, "")]
    # A default can only be tried against a schema that is sound.
    return causes or list(_defaults(root, path))


def schema_warnings(root: Raw, path: str) -> list[str]:
    """Return the parts of the schema that are accepted and have no effect here."""
    warnings = []
    for node, place in _walk(root, path):
        if node.get("x-kubernetes-validations"):
            warnings.append(
                f"{place}.x-kubernetes-validations: rules in CEL are not evaluated by this server"
            )
        name = node.get("format", "")
        if name and name not in FORMATS and name not in IGNORED_FORMATS:
            warnings.append(f'{place}.format: unrecognized format "{name}"')
    return warnings


def _children(raw: Raw, path: str) -> Iterator[tuple[Raw, str, str]]:
    """(schema, path, what it is a schema of) of the values inside."""
    for name, field in (raw.get("properties") or {}).items():
        yield field, f"{path}.properties[{name}]", "object fields"
    if isinstance(raw.get("additionalProperties"), Mapping):
        yield raw["additionalProperties"], f"{path}.additionalProperties", "object fields"
    if isinstance(raw.get("items"), Mapping):
        yield raw["items"], f"{path}.items", "array items"


def _combinations(raw: Raw, path: str) -> Iterator[tuple[Raw, str]]:
    for key in ("allOf", "anyOf", "oneOf"):
        for index, part in enumerate(raw.get(key) or ()):
            yield part, f"{path}.{key}[{index}]"
    if isinstance(raw.get("not"), Mapping):
        yield raw["not"], f"{path}.not"


def _walk(raw: Raw, path: str) -> Iterator[tuple[Raw, str]]:
    yield raw, path
    for child, place, _ in _children(raw, path):
        yield from _walk(child, place)


def _undecodable(raw: Any, path: str) -> Iterator[Cause]:
    """Wrong JSON types; `items` and `additionalProperties` may be of several, and nest."""
    if problem := structural.decode_errors(raw, builtin(PROPS)):
        yield invalid_value(path, raw, problem)
        return
    for node, place in _all(raw, path):
        if not isinstance(node, Mapping):
            yield invalid_value(place, node, "must be a schema")
            continue
        for key, other in (("items", list), ("additionalProperties", bool)):
            inside = node.get(key)
            if isinstance(inside, Mapping):
                yield from _undecodable(inside, f"{place}.{key}")
            elif inside is not None and not isinstance(inside, other):
                yield invalid_value(f"{place}.{key}", inside, "must be a schema")


def _all(raw: Any, path: str) -> Iterator[tuple[Any, str]]:
    """A node and all below that are no `items` or `additionalProperties`."""
    yield raw, path
    if isinstance(raw, Mapping):
        for name, field in (raw.get("properties") or {}).items():
            yield from _all(field, f"{path}.properties[{name}]")
        for part, place in _combinations(raw, path):
            yield from _all(part, place)


def _root(raw: Raw, path: str) -> Iterator[Cause]:
    if not raw.get("type"):
        yield required_value(f"{path}.type", "must not be empty at the root")
    elif raw["type"] != "object":
        yield invalid_value(f"{path}.type", raw["type"], "must be object at the root")
    if raw.get("nullable"):
        yield forbidden(f"{path}.nullable", "nullable cannot be true at the root")
    if "additionalProperties" in raw:
        yield forbidden(f"{path}.additionalProperties", "must not be used at the root")
    for name, kind in (("apiVersion", "string"), ("kind", "string"), ("metadata", "object")):
        field = (raw.get("properties") or {}).get(name)
        if field is not None and field.get("type") != kind:
            place = f"{path}.properties[{name}].type"
            yield invalid_value(place, field.get("type", ""), f"must be {kind}")
    yield from _metadata(raw, path)


def _metadata(raw: Raw, path: str) -> Iterator[Cause]:
    declared = (raw.get("properties") or {}).get("metadata") or {}
    is_allowed = set(declared) <= {"type", "description", "properties"} and set(
        declared.get("properties") or ()
    ) <= {"name", "generateName"}
    if not is_allowed:
        yield forbidden(
            f"{path}.properties[metadata]",
            "must not specify anything other than name and generateName, but metadata is "
            "implicitly specified",
        )


def _node(raw: Raw, path: str, of: str) -> Iterator[Cause]:
    """Rules of one node and all below; `of` is empty at the root."""
    yield from _type(raw, path, of)
    yield from _shape(raw, path)
    yield from _lists_and_maps(raw, path)
    for part, place in _combinations(raw, path):
        yield from _combination(part, place, raw)
    for child, place, kind in _children(raw, path):
        yield from _node(child, place, kind)


def _type(raw: Raw, path: str, of: str) -> Iterator[Cause]:
    kind = raw.get("type") or ""
    is_open = raw.get("x-kubernetes-int-or-string") or raw.get(
        "x-kubernetes-preserve-unknown-fields"
    )
    if not kind and of and not is_open:
        yield required_value(f"{path}.type", f"must not be empty for specified {of}")
    if kind and kind not in TYPES:
        yield not_supported(f"{path}.type", kind, TYPES)
    if kind == "null":
        yield forbidden(
            f"{path}.type", "type cannot be set to null, use nullable as an alternative"
        )
    if kind == "array" and raw.get("items") is None:
        yield required_value(f"{path}.items", "must be specified")
    if isinstance(raw.get("items"), list):
        yield forbidden(f"{path}.items", "items must be a schema object and not an array")


def _shape(raw: Raw, path: str) -> Iterator[Cause]:
    for key in UNSUPPORTED:
        if key in raw:
            yield forbidden(f"{path}.{key}", f"{key} is not supported")
    if raw.get("uniqueItems"):
        yield forbidden(
            f"{path}.uniqueItems",
            "uniqueItems cannot be set to true since the runtime complexity becomes quadratic",
        )
    if raw.get("properties") and raw.get("additionalProperties", True) is not True:
        yield forbidden(
            f"{path}.additionalProperties",
            "additionalProperties and properties are mutual exclusive",
        )
    yield from _pattern(raw, path)
    if raw.get("x-kubernetes-preserve-unknown-fields") is False:
        place = f"{path}.x-kubernetes-preserve-unknown-fields"
        yield invalid_value(place, False, "must be true or undefined")
    if raw.get("x-kubernetes-embedded-resource"):
        yield from _embedded(raw, path)


def _pattern(raw: Raw, path: str) -> Iterator[Cause]:
    if text := raw.get("pattern"):
        try:
            pattern(text)
        except SpecError as error:
            why = f"must be a valid regular expression, but isn't: {error}"
            yield invalid_value(f"{path}.pattern", text, why)


def _embedded(raw: Raw, path: str) -> Iterator[Cause]:
    if not raw.get("properties") and not raw.get("x-kubernetes-preserve-unknown-fields"):
        yield required_value(
            f"{path}.properties",
            "must not be empty if x-kubernetes-embedded-resource is true without "
            "x-kubernetes-preserve-unknown-fields",
        )
    if raw.get("type") != "object":
        yield invalid_value(
            f"{path}.type",
            raw.get("type", ""),
            "must be object if x-kubernetes-embedded-resource is true",
        )


def _lists_and_maps(raw: Raw, path: str) -> Iterator[Cause]:
    kind, of_list, of_map = (
        raw.get(key) for key in ("type", "x-kubernetes-list-type", "x-kubernetes-map-type")
    )
    if of_list is not None:
        if kind != "array":
            why = "must be array if x-kubernetes-list-type is specified"
            yield invalid_value(f"{path}.type", kind or "", why)
        if of_list not in ("atomic", "set", "map"):
            place = f"{path}.x-kubernetes-list-type"
            yield not_supported(place, of_list, ["atomic", "set", "map"])
    if of_map is not None:
        if kind != "object":
            why = "must be object if x-kubernetes-map-type is specified"
            yield invalid_value(f"{path}.type", kind or "", why)
        if of_map not in ("atomic", "granular"):
            place = f"{path}.x-kubernetes-map-type"
            yield not_supported(place, of_map, ["atomic", "granular"])
    items = raw.get("items")
    if isinstance(items, Mapping):
        yield from _set(raw, items, path)
        yield from _map_keys(raw, items, path)


def _set(raw: Raw, items: Raw, path: str) -> Iterator[Cause]:
    if raw.get("x-kubernetes-list-type") != "set":
        return
    inside = "map" if items.get("type") == "object" else "list"
    if items.get("type") not in ("object", "array"):
        return
    key = f"x-kubernetes-{inside}-type"
    if items.get(key) != "atomic" and (inside == "map" or key in items):
        yield invalid_value(
            f"{path}.items.{key}",
            items.get(key),
            "must be atomic as item of a list with x-kubernetes-list-type=set",
        )


def _map_keys(raw: Raw, items: Raw, path: str) -> Iterator[Cause]:
    keys: list[str] = raw.get("x-kubernetes-list-map-keys") or []
    place = f"{path}.x-kubernetes-list-map-keys"
    if raw.get("x-kubernetes-list-type") != "map":
        if keys:
            why = "must be map if x-kubernetes-list-map-keys is non-empty"
            yield required_value(f"{path}.x-kubernetes-list-type", why)
        return
    if not keys:
        yield required_value(place, "must not be empty if x-kubernetes-list-type is map")
    if items.get("type") != "object":
        why = "must be object if parent array's x-kubernetes-list-type is map"
        yield invalid_value(f"{path}.items.type", items.get("type", ""), why)
    fields = items.get("properties") or {}
    shown = "[]string{" + ", ".join(map(go_text, keys)) + "}"
    if not set(keys) <= set(fields):
        why = "entries must all be names of item properties"
        yield Cause("FieldValueInvalid", place, f"Invalid value: {shown}: {why}")
    if len(set(keys)) < len(keys):
        why = "must not contain duplicate entries"
        yield Cause("FieldValueInvalid", place, f"Invalid value: {shown}: {why}")
    for key in sorted(set(keys) & set(fields)):
        yield from _map_key(key, items, f"{path}.items.properties[{key}]")


def _map_key(key: str, items: Raw, path: str) -> Iterator[Cause]:
    field = items["properties"][key]
    if "default" not in field and key not in (items.get("required") or ()):
        yield required_value(
            f"{path}.default",
            "this property is in x-kubernetes-list-map-keys, so it must have a default or be a "
            "required property",
        )
    if field.get("type") and field["type"] not in SCALARS:
        why = "must be a scalar type if parent array's x-kubernetes-list-type is map"
        yield invalid_value(f"{path}.type", field["type"], why)


def _combination(raw: Raw, path: str, outer: Raw) -> Iterator[Cause]:
    """Inside allOf, anyOf, oneOf and not, values are constrained and nothing is declared."""
    is_type_allowed = outer.get("x-kubernetes-int-or-string") and raw in INT_OR_STRING
    for key in sorted(NOT_IN_COMBINATIONS.keys() & raw.keys()):
        is_unset = raw[key] is False or raw[key] == ""
        if not is_unset and not (key == "type" and is_type_allowed):
            yield forbidden(f"{path}.{key}", NOT_IN_COMBINATIONS[key])
    yield from _pattern(raw, path)
    for child, place, _ in _children(raw, path):
        if not place.endswith(".additionalProperties"):
            yield from _combination(child, place, {})
    for part, place in _combinations(raw, path):
        yield from _combination(part, place, outer)


def _defaults(raw: Raw, path: str) -> Iterator[Cause]:
    for node, place in _walk(raw, path):
        value = node.get("default")
        if value is None:
            continue
        holder = Schema({"type": "object", "properties": {"default": node}}, {})
        _, dropped = structural.prune({"default": value}, holder)
        if dropped:
            yield invalid_value(f"{place}.default", value, "must not have unknown fields")
        for cause in structural.validate(value, Schema(node, {})):
            inside = "" if cause.field in ("", "<nil>") else f".{cause.field}"
            yield Cause(cause.reason, f"{place}.default{inside}", cause.message)
