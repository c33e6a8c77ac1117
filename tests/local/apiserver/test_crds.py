"""Definitions of custom resources; causes as a kube-apiserver v1.20.2 gave them."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from unbroken.local.apiserver.kinds import crds
from unbroken.local.apiserver.schema.structural import prune, validate
from unbroken.local.apiserver.tables.custom_columns import human_duration, json_path

NOW = "2024-05-01T12:00:00Z"
NOW_SECONDS = 1714564800.0
SCHEMA = "spec.validation.openAPIV3Schema"
AT_A = f"{SCHEMA}.properties[spec].properties[a]"


def definition(**version: Any) -> dict[str, Any]:
    """A small, valid definition; `version` is added to its only version."""
    spec = {"type": "object", "properties": {"a": {"type": "string"}}}
    schema = {"openAPIV3Schema": {"type": "object", "properties": {"spec": spec}}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": "others.sx.example.com"},
        "spec": {
            "group": "sx.example.com",
            "scope": "Namespaced",
            "names": {"plural": "others", "kind": "Other"},
            "versions": [
                {"name": "v1", "served": True, "storage": True, "schema": schema, **version}
            ],
        },
    }


def with_spec(**spec: Any) -> dict[str, Any]:
    """The small definition with parts of its spec replaced."""
    crd = definition()
    crd["spec"].update(spec)
    return crd


def with_schema(root: dict[str, Any]) -> dict[str, Any]:
    """The small definition with another schema."""
    return definition(schema={"openAPIV3Schema": root})


def with_a(field: Any) -> dict[str, Any]:
    """The small definition with another schema of spec.a."""
    spec = {"type": "object", "properties": {"a": field}}
    return with_schema({"type": "object", "properties": {"spec": spec}})


def found(crd: dict[str, Any]) -> list[tuple[str, str]]:
    """(path, message) of everything wrong with a definition."""
    return [(cause.field, cause.message) for cause in crds.validate_definition(crd)]


def test_a_sound_definition_is_taken_before_and_after_defaults() -> None:
    crd = definition()
    assert found(crd) == []
    assert found(crds.set_defaults(crd, NOW)) == []


NAME = (
    "metadata.name",
    'Invalid value: "others.sx.example.com": must be spec.names.plural+"."+spec.group',
)
TWO = [{"name": "v1"}, {"name": "v2"}]


@pytest.mark.parametrize(
    ("spec", "causes"),
    [
        (
            {"group": "nodots"},
            [
                NAME,
                ("spec.group", 'Invalid value: "nodots": should be a domain with at least one dot'),
            ],
        ),
        ({"group": ""}, [NAME, ("spec.group", "Required value")]),
        (
            {"group": "A_.b"},
            [NAME, ("spec.group", f'Invalid value: "A_.b": {crds.NOT_A_SUBDOMAIN}')],
        ),
        (
            {"scope": "Foo"},
            [("spec.scope", 'Unsupported value: "Foo": supported values: "Cluster", "Namespaced"')],
        ),
        ({"scope": None}, [("spec.scope", "Required value")]),
        (
            {"names": {}},
            [
                NAME,
                *(
                    (f"spec.names.{key}", "Required value")
                    for key in ("plural", "singular", "kind", "listKind")
                ),
            ],
        ),
        (
            {
                "names": {
                    "plural": "others",
                    "kind": "o t",
                    "singular": "X_",
                    "listKind": "o t",
                    "shortNames": ["A"],
                }
            },
            [
                ("spec.names.singular", f'Invalid value: "X_": {crds.NOT_A_LABEL}'),
                ("spec.names.kind", f'Invalid value: "o t": {crds.MIXED_CASE}'),
                ("spec.names.listKind", f'Invalid value: "o t": {crds.MIXED_CASE}'),
                ("spec.names.shortNames[0]", f'Invalid value: "A": {crds.NOT_A_LABEL}'),
                (
                    "spec.names.listKind",
                    'Invalid value: "o t": kind and listKind may not be the same',
                ),
            ],
        ),
        (
            {"versions": []},
            [
                (
                    "spec.versions",
                    (
                        "Invalid value: []interface {}{}: must have exactly one version "
                        "marked as storage version"
                    ),
                )
            ],
        ),
        (
            {"preserveUnknownFields": True},
            [
                (
                    "spec.preserveUnknownFields",
                    (
                        "Invalid value: true: cannot set to true, set "
                        "x-preserve-unknown-fields to true in spec.versions[*].schema instead"
                    ),
                )
            ],
        ),
        (
            {"conversion": {"strategy": "Foo"}},
            [
                (
                    "spec.conversion.strategy",
                    'Unsupported value: "Foo": supported values: "None", "Webhook"',
                )
            ],
        ),
        (
            {"conversion": {"strategy": "Webhook"}},
            [
                (
                    "spec.conversion.strategy",
                    (
                        "Forbidden: Webhook: this server calls no conversion webhooks; use "
                        "None, and versions of one schema"
                    ),
                )
            ],
        ),
    ],
)
def test_names_group_and_scope(spec: Any, causes: list[tuple[str, str]]) -> None:
    assert found(with_spec(**spec)) == causes


def test_names_of_a_protected_group_need_approval() -> None:
    crd = with_spec(group="x.k8s.io")
    crd["metadata"]["name"] = "others.x.k8s.io"
    assert [path for path, _ in found(crd)] == ["metadata.annotations[api-approved.kubernetes.io]"]
    crd["metadata"]["annotations"] = {crds.APPROVAL: "unapproved, for tests"}
    assert found(crd) == []


PATH = "must be a simple json path starting with ."
STORAGE = "must have exactly one version marked as storage version"


@pytest.mark.parametrize(
    ("version", "causes"),
    [
        ({"name": "V_1"}, [("spec.versions[0].name", f'Invalid value: "V_1": {crds.NOT_A_LABEL}')]),
        (
            {"storage": False},
            [("spec.versions", f'Invalid value: []interface {{}}{{"v1"}}: {STORAGE}')],
        ),
        ({"served": False}, []),
        (
            {"schema": {}},
            [("spec.versions[0].schema.openAPIV3Schema", "Required value: schemas are required")],
        ),
        (
            {"deprecationWarning": "x"},
            [
                (
                    "spec.versions[0].deprecationWarning",
                    'Invalid value: "x": can only be set for deprecated versions',
                )
            ],
        ),
        (
            {
                "additionalPrinterColumns": [
                    {"name": "a", "type": "string", "jsonPath": "spec.a"},
                    {"name": "", "type": "foo", "jsonPath": ".a", "format": "zzz"},
                    {"name": "x"},
                ]
            },
            [
                ("spec.additionalPrinterColumns[0].JSONPath", f'Invalid value: "spec.a": {PATH}'),
                ("spec.additionalPrinterColumns[1].name", "Required value"),
                (
                    "spec.additionalPrinterColumns[1].type",
                    'Invalid value: "foo": must be one of boolean,date,integer,number,string',
                ),
                (
                    "spec.additionalPrinterColumns[1].format",
                    (
                        'Invalid value: "zzz": must be one of '
                        "byte,date,date-time,double,float,int32,int64,password"
                    ),
                ),
                (
                    "spec.additionalPrinterColumns[2].type",
                    "Required value: must be one of boolean,date,integer,number,string",
                ),
                ("spec.additionalPrinterColumns[2].JSONPath", "Required value"),
            ],
        ),
        (
            {
                "subresources": {
                    "scale": {
                        "specReplicasPath": "spec.x",
                        "statusReplicasPath": ".spec.x",
                        "labelSelectorPath": ".foo",
                    }
                }
            },
            [
                ("spec.subresources.scale.specReplicasPath", f'Invalid value: "spec.x": {PATH}'),
                (
                    "spec.subresources.scale.statusReplicasPath",
                    'Invalid value: ".spec.x": should be a json path under .status',
                ),
                (
                    "spec.subresources.scale.labelSelectorPath",
                    'Invalid value: ".foo": should be a json path under either .spec or .status',
                ),
            ],
        ),
        (
            {"subresources": {"scale": {"specReplicasPath": ".spec.x"}}},
            [("spec.subresources.scale.statusReplicasPath", "Required value")],
        ),
    ],
)
def test_versions(version: Any, causes: list[tuple[str, str]]) -> None:
    assert found(definition(**version)) == causes


def test_a_column_whose_path_cannot_be_read_is_refused() -> None:
    column = {"name": "x", "type": "string", "jsonPath": ".a..b"}
    [(path, message)] = found(definition(additionalPrinterColumns=[column]))
    assert path == "spec.additionalPrinterColumns[0].JSONPath"
    assert "unrecognized path at '..b'" in message


def test_versions_with_schemas_of_their_own_are_told_apart() -> None:
    crd = definition()
    schema = {"openAPIV3Schema": {"type": "object", "properties": {"x": {}}}}
    crd["spec"]["versions"].append({"name": "v2", "served": True, "schema": schema})
    place = "spec.versions[1].schema.openAPIV3Schema.properties[x].type"
    assert found(crd) == [(place, "Required value: must not be empty for specified object fields")]
    crd["spec"]["versions"][1] = {**crd["spec"]["versions"][0], "storage": False}
    twice = 'Invalid value: []interface {}{"v1", "v1"}: must contain unique version names'
    assert found(crd) == [("spec.versions", twice)]


def listed(items: Any, **more: Any) -> dict[str, Any]:
    """Schema of a list; `more` are its x-kubernetes- keys."""
    keys = {"x-kubernetes-" + key.replace("_", "-"): value for key, value in more.items()}
    return {"type": "array", "items": items, **keys}


STRING = {"type": "string"}
K = {"type": "object", "properties": {"k": STRING}}
NEEDS_K = {**K, "required": ["k"]}
FIELD = "Required value: must not be empty for specified object fields"
TYPES = 'supported values: "array", "boolean", "integer", "number", "object", "string"'


@pytest.mark.parametrize(
    ("field", "causes"),
    [
        ({}, [(".type", FIELD)]),
        ({"type": "foo"}, [(".type", f'Unsupported value: "foo": {TYPES}')]),
        (
            {"type": "null"},
            [
                (".type", f'Unsupported value: "null": {TYPES}'),
                (".type", "Forbidden: type cannot be set to null, use nullable as an alternative"),
            ],
        ),
        ({"type": "object", "$ref": "#/x"}, [(".$ref", "Forbidden: $ref is not supported")]),
        ({"type": "array"}, [(".items", "Required value: must be specified")]),
        (
            listed({}),
            [(".items.type", "Required value: must not be empty for specified array items")],
        ),
        (
            listed([STRING]),
            [(".items", "Forbidden: items must be a schema object and not an array")],
        ),
        (
            {**K, "additionalProperties": False},
            [
                (
                    ".additionalProperties",
                    "Forbidden: additionalProperties and properties are mutual exclusive",
                )
            ],
        ),
        ({"type": "object", "additionalProperties": False}, []),
        ({"type": "object", "additionalProperties": {}}, [(".additionalProperties.type", FIELD)]),
        (
            {**listed(STRING), "uniqueItems": True},
            [
                (
                    ".uniqueItems",
                    (
                        "Forbidden: uniqueItems cannot be set to true since the runtime "
                        "complexity becomes quadratic"
                    ),
                )
            ],
        ),
        (
            {**STRING, "pattern": "["},
            [
                (
                    ".pattern",
                    (
                        'Invalid value: "[": must be a valid regular expression, but isn\'t: '
                        "not a regular expression: missing ]"
                    ),
                )
            ],
        ),
        (
            {**STRING, "default": 1},
            [(".default", 'Invalid value: "integer":  in body must be of type string: "integer"')],
        ),
        (
            {**K, "default": {"k": 1}},
            [
                (
                    ".default.k",
                    'Invalid value: "integer": k in body must be of type string: "integer"',
                )
            ],
        ),
        (
            {**K, "default": {"c": 1}},
            [
                (
                    ".default",
                    'Invalid value: map[string]interface {}{"c":1}: must not have unknown fields',
                )
            ],
        ),
        ({**STRING, "nullable": True, "default": None}, []),
        (
            {**STRING, "x-kubernetes-list-type": "set"},
            [
                (
                    ".type",
                    'Invalid value: "string": must be array if x-kubernetes-list-type is specified',
                )
            ],
        ),
        (
            listed(STRING, list_type="foo"),
            [
                (
                    ".x-kubernetes-list-type",
                    'Unsupported value: "foo": supported values: "atomic", "set", "map"',
                )
            ],
        ),
        (
            listed(STRING, list_type="map"),
            [
                (
                    ".x-kubernetes-list-map-keys",
                    "Required value: must not be empty if x-kubernetes-list-type is map",
                ),
                (
                    ".items.type",
                    (
                        'Invalid value: "string": must be object if parent array\'s '
                        "x-kubernetes-list-type is map"
                    ),
                ),
            ],
        ),
        (
            listed(K, list_type="map", list_map_keys=["k"]),
            [
                (
                    ".items.properties[k].default",
                    (
                        "Required value: this property is in x-kubernetes-list-map-keys, so "
                        "it must have a default or be a required property"
                    ),
                )
            ],
        ),
        (listed(NEEDS_K, list_type="map", list_map_keys=["k"]), []),
        (
            listed(NEEDS_K, list_type="map", list_map_keys=["z", "k", "k"]),
            [
                (
                    ".x-kubernetes-list-map-keys",
                    (
                        'Invalid value: []string{"z", "k", "k"}: entries must all be names '
                        "of item properties"
                    ),
                ),
                (
                    ".x-kubernetes-list-map-keys",
                    'Invalid value: []string{"z", "k", "k"}: must not contain duplicate entries',
                ),
            ],
        ),
        (
            listed(
                {**NEEDS_K, "properties": {"k": {"type": "object"}}},
                list_type="map",
                list_map_keys=["k"],
            ),
            [
                (
                    ".items.properties[k].type",
                    (
                        'Invalid value: "object": must be a scalar type if parent array\'s '
                        "x-kubernetes-list-type is map"
                    ),
                )
            ],
        ),
        (
            listed(STRING, list_map_keys=["k"]),
            [
                (
                    ".x-kubernetes-list-type",
                    "Required value: must be map if x-kubernetes-list-map-keys is non-empty",
                )
            ],
        ),
        (
            listed({"type": "object"}, list_type="set"),
            [
                (
                    ".items.x-kubernetes-map-type",
                    (
                        'Invalid value: "null": must be atomic as item of a list with '
                        "x-kubernetes-list-type=set"
                    ),
                )
            ],
        ),
        (
            {**STRING, "x-kubernetes-map-type": "atomic"},
            [
                (
                    ".type",
                    'Invalid value: "string": must be object if x-kubernetes-map-type is specified',
                )
            ],
        ),
        (
            {"type": "object", "x-kubernetes-map-type": "foo"},
            [
                (
                    ".x-kubernetes-map-type",
                    'Unsupported value: "foo": supported values: "atomic", "granular"',
                )
            ],
        ),
        ({"x-kubernetes-int-or-string": True}, []),
        ({"x-kubernetes-int-or-string": True, "anyOf": [{"type": "integer"}, STRING]}, []),
        ({"x-kubernetes-preserve-unknown-fields": True}, []),
        (
            {"type": "object", "x-kubernetes-embedded-resource": True},
            [
                (
                    ".properties",
                    (
                        "Required value: must not be empty if x-kubernetes-embedded-resource "
                        "is true without x-kubernetes-preserve-unknown-fields"
                    ),
                )
            ],
        ),
        (
            {**STRING, "x-kubernetes-preserve-unknown-fields": False},
            [
                (
                    ".x-kubernetes-preserve-unknown-fields",
                    "Invalid value: false: must be true or undefined",
                )
            ],
        ),
        ({**K, "anyOf": [{"properties": {"k": {"minLength": 1}}}]}, []),
        (
            {**K, "anyOf": [{"properties": {"k": STRING}}]},
            [(".anyOf[0].properties[k].type", "Forbidden: must be empty to be structural")],
        ),
        (
            {
                **K,
                "not": {
                    "description": "x",
                    "title": "y",
                    "nullable": True,
                    "default": 0,
                    "additionalProperties": {"minLength": 1},
                },
            },
            [
                (".not.additionalProperties", "Forbidden: must be undefined to be structural"),
                (".not.default", "Forbidden: must be undefined to be structural"),
                (".not.description", "Forbidden: must be empty to be structural"),
                (".not.nullable", "Forbidden: must be false to be structural"),
                (".not.title", "Forbidden: must be empty to be structural"),
            ],
        ),
        (
            {"anyOf": [{"type": "integer"}, STRING]},
            [
                (".type", FIELD),
                (".anyOf[0].type", "Forbidden: must be empty to be structural"),
                (".anyOf[1].type", "Forbidden: must be empty to be structural"),
            ],
        ),
        *(
            (
                {"type": "object", key: "x" if key == "id" else {}},
                [(f".{key}", f"Forbidden: {key} is not supported")],
            )
            for key in ("id", "patternProperties", "definitions", "dependencies", "additionalItems")
        ),
    ],
)
def test_schemas_are_structural(field: Any, causes: list[tuple[str, str]]) -> None:
    assert found(with_a(field)) == [(AT_A + path, message) for path, message in causes]


@pytest.mark.parametrize(
    ("root", "path", "message"),
    [
        ({"properties": {}}, ".type", "Required value: must not be empty at the root"),
        (
            {"type": "array", "items": STRING},
            ".type",
            'Invalid value: "array": must be object at the root',
        ),
        (
            {"type": "object", "additionalProperties": STRING},
            ".additionalProperties",
            "Forbidden: must not be used at the root",
        ),
        (
            {"type": "object", "nullable": True},
            ".nullable",
            "Forbidden: nullable cannot be true at the root",
        ),
        (
            {
                "type": "object",
                "properties": {
                    "metadata": {"type": "object", "properties": {"labels": {"type": "object"}}}
                },
            },
            ".properties[metadata]",
            (
                "Forbidden: must not specify anything other than name and generateName, but "
                "metadata is implicitly specified"
            ),
        ),
    ],
)
def test_the_root_of_a_schema_is_an_object(root: Any, path: str, message: str) -> None:
    assert found(with_schema(root)) == [(SCHEMA + path, message)]


@pytest.mark.parametrize(
    ("field", "path"),
    [
        (listed("x"), ".items"),
        (listed({"type": 1}), ".items"),
        (listed({"properties": {"x": None}}), ".items.properties[x]"),
        (listed({"anyOf": [{"items": 1}]}), ".items.anyOf[0].items"),
        ({"type": "object", "additionalProperties": []}, ".additionalProperties"),
        ({"type": "object", "additionalProperties": {"required": 1}}, ".additionalProperties"),
    ],
)
def test_what_is_no_schema_is_refused_wherever_it_nests(field: Any, path: str) -> None:
    assert [place for place, _ in found(with_a(field))] == [AT_A + path]


def test_rules_in_cel_and_unknown_formats_are_warned_of() -> None:
    rules = [{"rule": "self > 1"}]
    crd = with_a({"type": "integer", "x-kubernetes-validations": rules, "format": "int128"})
    assert found(crd) == []
    assert crds.definition_warnings(crd) == [
        f"{AT_A}.x-kubernetes-validations: rules in CEL are not evaluated by this server",
        f'{AT_A}.format: unrecognized format "int128"',
    ]
    assert crds.definition_warnings(definition()) == []


def test_defaults_name_the_singular_and_the_list() -> None:
    crd = crds.set_defaults(definition(), NOW)
    names = {"plural": "others", "kind": "Other", "singular": "other", "listKind": "OtherList"}
    assert crd["spec"]["names"] == names
    assert crd["spec"]["conversion"] == {"strategy": "None"}
    assert crd["status"]["acceptedNames"] == names
    assert crd["status"]["storedVersions"] == ["v1"]
    conditions = {
        c["type"]: (c["status"], c["reason"], c["message"]) for c in crd["status"]["conditions"]
    }
    assert conditions == {
        "NamesAccepted": ("True", "NoConflicts", "no conflicts found"),
        "Established": (
            "True",
            "InitialNamesAccepted",
            "the initial names have been accepted",
        ),
    }


def renamed(**names: Any) -> dict[str, Any]:
    """Another definition of the same group."""
    crd = with_spec(names={"plural": "news", "kind": "New", **names})
    crd["metadata"]["name"] = "news.sx.example.com"
    return crd


@pytest.mark.parametrize(
    ("names", "reason", "message"),
    [
        ({"singular": "other"}, "SingularConflict", '"other" is already in use'),
        ({"shortNames": ["ok", "other"]}, "ShortNamesConflict", '"other" is already in use'),
        (
            {"kind": "Other", "listKind": "L", "singular": "n"},
            "KindConflict",
            '"Other" is already in use',
        ),
        ({"listKind": "OtherList"}, "ListKindConflict", '"OtherList" is already in use'),
    ],
)
def test_a_name_that_is_taken_keeps_a_definition_from_being_served(
    names: Any, reason: str, message: str
) -> None:
    first = crds.set_defaults(definition(), NOW)
    crd = crds.set_defaults(renamed(**names), NOW)
    crd.pop("status")
    assert crds.names_conflict(crd, [first]) == [(reason, message)]
    status = crds.established(crd, [first], NOW)["status"]
    assert [c["status"] for c in status["conditions"]] == ["False", "False"]
    assert status["conditions"][0]["reason"] == reason
    assert status["acceptedNames"] == {"plural": "", "kind": ""}
    elsewhere = copy.deepcopy(first)
    elsewhere["spec"]["group"] = "other.example.com"
    assert crds.is_established(crds.established(crd, [elsewhere, crd], NOW))


def test_an_established_definition_stays_so_and_keeps_its_times() -> None:
    first = crds.set_defaults(definition(), NOW)
    crd = crds.set_defaults(renamed(), NOW)
    crd["spec"]["names"]["shortNames"] = ["other"]
    later = "2024-05-01T13:00:00Z"
    status = crds.established(crd, [first], later)["status"]
    assert [(c["status"], c["lastTransitionTime"]) for c in status["conditions"]] == [
        ("False", later),
        ("True", NOW),
    ]
    assert "shortNames" not in status["acceptedNames"]
    assert crds.established(first, [], later) == first


def test_every_version_that_was_stored_is_remembered() -> None:
    crd = crds.set_defaults(definition(), NOW)
    crd["spec"]["versions"][0]["storage"] = False
    crd["spec"]["versions"].append({**crd["spec"]["versions"][0], "name": "v2", "storage": True})
    updated = crds.established(crd, [], NOW)
    assert updated["status"]["storedVersions"] == ["v1", "v2"]
    old = copy.deepcopy(updated)
    del updated["spec"]["versions"][0]
    [cause] = crds.validate_update(updated, old)
    assert cause.field == "status.storedVersions[0]"
    assert cause.message == 'Invalid value: "v1": must appear in spec.versions'


@pytest.mark.parametrize(
    ("path", "value", "is_fixed_early"),
    [
        (("group",), "y.example.com", True),
        (("names", "plural"), "x", True),
        (("scope",), "Cluster", False),
        (("names", "kind"), "X", False),
    ],
)
def test_what_objects_are_stored_by_is_immutable(
    path: tuple[str, ...], value: str, is_fixed_early: bool
) -> None:
    old = crds.set_defaults(definition(), NOW)
    new = copy.deepcopy(old)
    holder = new["spec"]
    for name in path[:-1]:
        holder = holder[name]
    holder[path[-1]] = value
    [cause] = crds.validate_update(new, old)
    assert cause.field == ".".join(("spec", *path))
    assert cause.message == f'Invalid value: "{value}": field is immutable'
    del old["status"]
    assert bool(crds.validate_update(new, old)) is is_fixed_early


def kind_of(crd: dict[str, Any]) -> Any:
    """The kind of a definition, defaults set."""
    return crds.kind_of(crds.set_defaults(crd, NOW))


def test_a_definition_makes_a_kind() -> None:
    crd = definition(
        subresources={
            "status": {},
            "scale": {"specReplicasPath": ".spec.n", "statusReplicasPath": ".status.n"},
        },
        selectableFields=[{"jsonPath": ".spec.a"}],
        deprecated=True,
    )
    crd["spec"]["names"] |= {"shortNames": ["ot"], "categories": ["all"]}
    kind = kind_of(crd)
    assert (kind.group, kind.kind, kind.plural) == ("sx.example.com", "Other", "others")
    assert (kind.singular, kind.list_kind) == ("other", "OtherList")
    assert (kind.short_names, kind.categories) == (("ot",), ("all",))
    assert kind.is_custom
    assert kind.namespaced
    assert kind.storage_version == "v1"
    version = kind.versions["v1"]
    assert version.schema_name == "com.example.sx.v1.Other"
    assert version.has_status
    assert version.scale == {"specReplicasPath": ".spec.n", "statusReplicasPath": ".status.n"}
    assert version.selectable_fields == ("metadata.name", "metadata.namespace", "spec.a")
    assert version.deprecation == "sx.example.com/v1 Other is deprecated"


def test_served_versions_come_with_the_preferred_one_first() -> None:
    crd = definition()
    base = {**crd["spec"]["versions"][0], "storage": False}
    names = ["v1alpha1", "v1beta1", "v2", "v10", "v1beta2", "foo"]
    crd["spec"]["versions"] += [{**base, "name": name} for name in names]
    crd["spec"]["versions"].append({**base, "name": "v99", "served": False})
    expected = ["v10", "v2", "v1", "v1beta2", "v1beta1", "v1alpha1", "foo"]
    assert list(kind_of(crd).versions) == expected


def test_the_schema_knows_metadata_and_keeps_what_the_definition_says_of_a_name() -> None:
    narrow = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 3}}}
    schema = kind_of(with_schema({"type": "object", "properties": {"metadata": narrow}}))
    schema = schema.versions["v1"].schema
    given = {"kind": "Other", "metadata": {"name": "long", "labels": {"a": "b"}, "x": 1}}
    pruned, dropped = prune(given, schema)
    assert dropped == ["metadata.x"]
    assert [cause.field for cause in validate(pruned, schema)] == ["metadata.name"]
    assert schema.properties["metadata"].properties["ownerReferences"].list_map_keys == ("uid",)


OBJECT = {
    "metadata": {"name": "o", "creationTimestamp": "2024-05-01T10:00:00Z"},
    "spec": {
        "i": 3, "f": 3.7, "b": True, "s": "text", "d": "2024-05-01T11:58:30Z", "bad": "x",
        "list": ["a", "b"], "map": {"b": 1, "a": [1.0]}, "null": None, "a.b": "dotted",
        "conds": [{"type": "Old", "n": 1}, {"type": "Ready", "status": "True", "n": 5}],
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "path", "cell"),
    [
        ("integer", ".spec.i", 3),
        ("integer", ".spec.f", 3),
        ("integer", ".spec.s", None),
        ("integer", ".spec.b", None),
        ("number", ".spec.i", 3.0),
        ("boolean", ".spec.b", True),
        ("boolean", ".spec.s", None),
        ("string", ".spec.s", "text"),
        ("string", ".spec.b", "true"),
        ("string", ".spec.i", "3"),
        ("string", ".spec.f", "3.7"),
        ("string", ".spec.list", '["a","b"]'),
        ("string", ".spec.map", '{"a":[1.0],"b":1}'),
        ("string", ".spec.null", None),
        ("string", ".spec.missing.x", None),
        ("string", ".spec.s.x", None),
        ("string", ".spec.list[1]", "b"),
        ("string", ".spec.list[-1]", "b"),
        ("string", ".spec.list[2]", None),
        ("string", ".spec.list[*]", "a"),
        ("string", ".spec.list[1:]", "b"),
        ("string", r".spec.a\.b", "dotted"),
        ("string", ".spec['a.b']", "dotted"),
        ("string", '.spec.conds[?(@.type=="Ready")].status', "True"),
        ("string", ".spec.conds[?(@.type == 'Gone')].status", None),
        ("string", ".spec.conds[?(@.status)].type", "Ready"),
        ("string", ".spec.conds[?(@.n>1)].type", "Ready"),
        ("string", ".spec.conds[*].type", "Old"),
        ("date", ".spec.d", "90s"),
        ("date", ".spec.bad", "<invalid>"),
        ("date", ".spec.i", None),
    ],
)
def test_cells_of_columns(kind: str, path: str, cell: Any) -> None:
    column = {"name": "X", "type": kind, "jsonPath": path}
    columns = kind_of(definition(additionalPrinterColumns=[column])).versions["v1"].columns
    assert [column.name for column in columns] == ["Name", "X"]
    assert columns[0].cell(OBJECT, NOW_SECONDS) == "o"
    shown = columns[1].cell(OBJECT, NOW_SECONDS)
    assert (shown, type(shown)) == (cell, type(cell))


def test_without_columns_the_age_is_shown() -> None:
    columns = kind_of(definition()).versions["v1"].columns
    assert [(c.name, c.type) for c in columns] == [("Name", "string"), ("Age", "date")]
    assert columns[1].cell(OBJECT, NOW_SECONDS) == "120m"


@pytest.mark.parametrize("text", ["", "a", ".a..b", "{.a}", ".a[", ".a[?(@.b==x)]", ".a b"])
def test_what_is_no_path_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="path"):
        json_path(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-2, "<invalid>"), (-1, "0s"), (0, "0s"), (119, "119s"), (120, "2m"), (125, "2m5s"),
        (599, "9m59s"), (600, "10m"), (10_799, "179m"), (10_800, "3h"), (11_100, "3h5m"),
        (28_800, "8h"), (172_799, "47h"), (172_800, "2d"), (180_000, "2d2h"), (691_200, "8d"),
        (63_071_999, "729d"), (63_072_000, "2y"), (63_158_400, "2y1d"), (252_288_000, "8y"),
        (283_824_001, "9y"),
    ],
)  # fmt: skip
def test_ages_are_short(seconds: float, text: str) -> None:
    assert human_duration(seconds) == text
