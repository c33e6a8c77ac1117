"""Definitions of custom resources; causes as a kube-apiserver v1.20.2 gave them."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.tables import cases
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


def found(crd: dict[str, Any]) -> list[str]:
    """`path: message` of everything wrong with a definition."""
    return [f"{cause.field}: {cause.message}" for cause in crds.validate_definition(crd)]


def test_a_sound_definition_is_taken_before_and_after_defaults() -> None:
    crd = definition()
    assert found(crd) == []
    assert found(crds.set_defaults(crd, NOW)) == []


@cases
def test_names_group_and_scope(spec: Any, causes: list[str]) -> None:
    assert found(with_spec(**spec)) == causes


def test_names_of_a_protected_group_need_approval() -> None:
    crd = with_spec(group="x.k8s.io")
    crd["metadata"]["name"] = "others.x.k8s.io"
    [cause] = found(crd)
    assert cause.startswith("metadata.annotations[api-approved.kubernetes.io]: ")
    crd["metadata"]["annotations"] = {crds.APPROVAL: "unapproved, for tests"}
    assert found(crd) == []


@cases
def test_versions(version: Any, causes: list[str]) -> None:
    assert found(definition(**version)) == causes


def test_a_column_whose_path_cannot_be_read_is_refused() -> None:
    column = {"name": "x", "type": "string", "jsonPath": ".a..b"}
    [cause] = found(definition(additionalPrinterColumns=[column]))
    assert cause.startswith("spec.additionalPrinterColumns[0].JSONPath: ")
    assert "unrecognized path at '..b'" in cause


def test_versions_with_schemas_of_their_own_are_told_apart() -> None:
    crd = definition()
    schema = {"openAPIV3Schema": {"type": "object", "properties": {"x": {}}}}
    crd["spec"]["versions"].append({"name": "v2", "served": True, "schema": schema})
    place = "spec.versions[1].schema.openAPIV3Schema.properties[x].type"
    assert found(crd) == [f"{place}: Required value: must not be empty for specified object fields"]
    crd["spec"]["versions"][1] = {**crd["spec"]["versions"][0], "storage": False}
    twice = 'Invalid value: []interface {}{"v1", "v1"}: must contain unique version names'
    assert found(crd) == [f"spec.versions: {twice}"]


@cases
def test_schemas_are_structural(field: Any, causes: list[str]) -> None:
    assert found(with_a(field)) == [AT_A + cause for cause in causes]


@cases
def test_the_root_of_a_schema_is_an_object(root: Any, cause: str) -> None:
    assert found(with_schema(root)) == [SCHEMA + cause]


@cases
def test_what_is_no_schema_is_refused_wherever_it_nests(field: Any, path: str) -> None:
    [cause] = found(with_a(field))
    assert cause.startswith(f"{AT_A}{path}: ")


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


@cases
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


@cases
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
