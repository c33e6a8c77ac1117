"""Custom resources: definitions, schemas, versions, subresources, deletion."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.apiclient import Answer, Api, Object
from tests.samples import (
    CRDS,
    CUSTOM_RESOURCES,
    STRICT,
    config_map,
    define,
    definition,
    is_established,
    open_schema,
    warned,
    widget,
)
from tests.tables import cases

pytestmark = CUSTOM_RESOURCES


def group_of(here: Api) -> str:
    """Return a group of the test's own."""
    return f"{here.namespace}.example.com"


def defined(here: Api, schema: Object, **version: Any) -> str:
    """Define Widgets; return the short path of their collection."""
    group = group_of(here)
    define(here, definition(group, schema, **version))
    return f"{group}/v1:widgets"


def test_new_definition_is_established_and_served_at_once(here: Api) -> None:
    group = group_of(here)
    found = define(here, definition(group, open_schema(size={"type": "integer"})))
    conditions = {c["type"]: c["status"] for c in found["status"]["conditions"]}
    assert conditions == {"NamesAccepted": "True", "Established": "True"}
    assert found["status"]["acceptedNames"]["plural"] == "widgets"
    assert found["status"]["storedVersions"] == ["v1"]
    assert found["spec"]["names"]["listKind"] == "WidgetList"
    assert found["spec"]["conversion"] == {"strategy": "None"}
    made = here.post(f"{group}/v1:widgets", widget(group, "a", spec={"size": 1})).made
    assert (made["spec"], made["metadata"]["generation"]) == ({"size": 1}, 1)
    assert here.get(f"{group}/v1:widgets").made["kind"] == "WidgetList"


def test_definition_names_are_in_discovery(here: Api, api: Api) -> None:
    group = group_of(here)
    body = definition(group, open_schema(), subresources={"status": {}})
    body["spec"]["names"] |= {"shortNames": ["wd"], "categories": ["all"]}
    define(here, body)
    listed = api.get(f"/apis/{group}/v1").made["resources"]
    found = {each["name"]: each for each in listed}
    assert found["widgets"]["shortNames"] == ["wd"]
    assert found["widgets"]["categories"] == ["all"]
    assert (found["widgets"]["kind"], found["widgets"]["singularName"]) == ("Widget", "widget")
    assert set(found["widgets/status"]["verbs"]) == {"get", "patch", "update"}


def test_cluster_scoped_kind_has_no_namespace(here: Api, api: Api) -> None:
    group = group_of(here)
    body = definition(group, open_schema())
    body["spec"]["scope"] = "Cluster"
    define(here, body)
    made = api.post(f"{group}/v1:widgets", widget(group, "a")).made
    assert "namespace" not in made["metadata"]
    assert here.get(f"{group}/v1:widgets/a").code == 404


FIELDS: Object = {
    "size": {"type": "integer", "minimum": 1, "maximum": 9},
    "part": {"type": "number", "exclusiveMinimum": True, "minimum": 0},
    "step": {"type": "integer", "multipleOf": 5},
    "color": {"type": "string", "enum": ["red", "green"]},
    "code": {"type": "string", "pattern": "^[a-z]+$", "minLength": 2, "maxLength": 4},
    "list": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 2},
    "map": {"type": "object", "additionalProperties": {"type": "integer"}, "maxProperties": 2},
    "either": {"x-kubernetes-int-or-string": True},
    "flag": {"type": "boolean"},
    "when": {"type": "string", "format": "date-time"},
    "deep": {
        "type": "object",
        "required": ["name"],
        "properties": {"name": {"type": "string"}, "to": {"type": "string", "nullable": True}},
    },
    "one": {
        "type": "object",
        "properties": {"a": {"type": "string"}, "b": {"type": "string"}},
        "oneOf": [{"required": ["a"]}, {"required": ["b"]}],
    },
}


def family(reason: str) -> str:
    """Return the same text for reasons that only later versions distinguish.

    These are: a wrong type, too long, too many.
    """
    told = reason.removeprefix("FieldValue")
    return "FieldValueInvalid" if told in {"TypeInvalid", "TooLong", "TooMany"} else reason


@cases
def test_invalid_custom_resource_is_422_at_its_path(
    here: Api, spec: Object, reason: str, field: str
) -> None:
    what = defined(here, open_schema(**FIELDS))
    answer = here.post(what, widget(group_of(here), "a", spec=spec))
    assert answer.failure == (422, "Invalid")
    assert answer.message.startswith(f'Widget.{group_of(here)} "a" is invalid')
    found = {(family(told), path.split("[")[0]) for told, path in answer.causes}
    assert (reason, field) in found or (not field and len(found) == 1)
    assert here.get(what).made["items"] == []


VALID: list[Object] = [
    {"size": 1, "part": 0.5, "step": 10, "color": "red", "code": "abc", "list": ["a"]},
    {"map": {"a": 1}, "either": 5, "flag": True, "when": "2024-01-02T03:04:05Z"},
    {"either": "50%", "deep": {"name": "n", "to": None}, "one": {"a": "1"}},
    {"size": 2.0},
]


@pytest.mark.parametrize("spec", VALID)
def test_valid_custom_resource_is_kept_as_it_is(here: Api, spec: Object) -> None:
    what = defined(here, open_schema(**FIELDS))
    made = here.post(what, widget(group_of(here), "a", spec=spec)).made
    assert made["spec"] == spec
    assert here.get(f"{what}/a").made["spec"] == spec


def test_update_and_patch_are_validated(here: Api) -> None:
    what = defined(here, open_schema(**FIELDS))
    made = here.post(what, widget(group_of(here), "a", spec={"size": 1})).made
    assert here.put(f"{what}/a", {**made, "spec": {"size": 77}}).failure == (422, "Invalid")
    answer = here.patch("merge", f"{what}/a", {"spec": {"size": 77}})
    assert answer.failure == (422, "Invalid")
    assert here.get(f"{what}/a").made == made


def test_unknown_fields_are_pruned(here: Api) -> None:
    what = defined(here, open_schema(deep=FIELDS["deep"]))
    spec = {"deep": {"name": "n", "other": 1}, "more": {"x": "y"}}
    made = here.post(what, widget(group_of(here), "a", spec=spec, extra=1)).made
    assert made["spec"] == {"deep": {"name": "n"}}
    assert "extra" not in made


def test_unknown_fields_are_kept_where_the_schema_says_so(here: Api) -> None:
    anything = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    what = defined(here, open_schema(free=anything))
    spec = {"free": {"a": [1, {"b": None}], "c": "d"}, "other": 1}
    made = here.post(what, widget(group_of(here), "a", spec=spec)).made
    assert made["spec"] == {"free": spec["free"]}


def test_defaults_are_filled_in(here: Api) -> None:
    item = {"type": "object", "properties": {"size": {"type": "integer", "default": 3}}}
    schema = open_schema(
        color={"type": "string", "default": "red"},
        inner={"type": "object", "default": {}, "properties": item["properties"]},
        parts={"type": "array", "items": item},
    )
    what = defined(here, schema)
    made = here.post(what, widget(group_of(here), "a", spec={"parts": [{}, {"size": 1}]})).made
    assert made["spec"] == {
        "color": "red",
        "inner": {"size": 3},
        "parts": [{"size": 3}, {"size": 1}],
    }
    assert "spec" not in here.post(what, widget(group_of(here), "b")).made


def test_default_takes_the_place_of_a_null_that_is_not_allowed(here: Api) -> None:
    schema = open_schema(
        color={"type": "string", "default": "red"}, tone={"type": "string", "nullable": True}
    )
    what = defined(here, schema)
    body = widget(group_of(here), "a", spec={"color": None, "tone": None})
    assert here.post(what, body).made["spec"] == {"color": "red", "tone": None}


def test_metadata_and_kind_need_no_schema(here: Api) -> None:
    what = defined(here, {"type": "object"})
    body = widget(group_of(here), "a")
    body["metadata"] |= {"labels": {"x": "y"}, "annotations": {"x": "y"}}
    made = here.post(what, body).made
    assert made["metadata"]["labels"] == {"x": "y"}
    body["metadata"]["labels"] = {"x": "not ok"}
    body["metadata"]["name"] = "b"
    assert ("FieldValueInvalid", "metadata.labels") in here.post(what, body).causes


def test_object_may_hold_another(here: Api) -> None:
    embedded = {
        "type": "object",
        "x-kubernetes-embedded-resource": True,
        "x-kubernetes-preserve-unknown-fields": True,
    }
    what = defined(here, open_schema(template=embedded))
    body = widget(group_of(here), "a", spec={"template": config_map("x", k="v")})
    assert here.post(what, body).made["spec"]["template"] == config_map("x", k="v")
    body = widget(group_of(here), "b", spec={"template": {"data": {}}})
    assert here.post(what, body).failure == (422, "Invalid")


def test_list_with_keys_has_them_once(here: Api) -> None:
    item = {
        "type": "object",
        "required": ["name"],
        "properties": {"name": {"type": "string"}},
    }
    keyed = {
        "type": "array",
        "items": item,
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": ["name"],
    }
    tags = {"type": "array", "items": {"type": "string"}, "x-kubernetes-list-type": "set"}
    what = defined(here, open_schema(parts=keyed, tags=tags))
    spec = {"parts": [{"name": "a"}, {"name": "a"}], "tags": ["x", "x"]}
    answer = here.post(what, widget(group_of(here), "a", spec=spec))
    assert answer.causes == {
        ("FieldValueDuplicate", "spec.parts[1]"),
        ("FieldValueDuplicate", "spec.tags[1]"),
    }


def test_status_is_dropped_on_create_and_kept_apart(here: Api) -> None:
    what = defined(here, open_schema(size={"type": "integer"}), subresources={"status": {}})
    made = here.post(what, widget(group_of(here), "a", spec={"size": 1}, status={"x": 1})).made
    assert "status" not in made
    changed = here.patch("merge", f"{what}/a/status", {"status": {"x": 2}, "spec": {"size": 9}})
    assert (changed.made["status"], changed.made["spec"]) == ({"x": 2}, {"size": 1})
    assert changed.made["metadata"]["generation"] == 1
    changed = here.patch("merge", f"{what}/a", {"status": {"x": 3}, "spec": {"size": 2}})
    assert (changed.made["status"], changed.made["spec"]) == ({"x": 2}, {"size": 2})
    assert changed.made["metadata"]["generation"] == 2


def test_without_the_subresource_status_is_a_field(here: Api) -> None:
    what = defined(here, open_schema())
    made = here.post(what, widget(group_of(here), "a", status={"x": 1})).made
    assert made["status"] == {"x": 1}
    changed = here.patch("merge", f"{what}/a", {"status": {"x": 2}}).made
    assert changed["metadata"]["generation"] == 2
    assert here.get(f"{what}/a/status").code == 404


def test_labels_leave_the_generation(here: Api) -> None:
    what = defined(here, open_schema())
    here.post(what, widget(group_of(here), "a")).done()
    change = {"metadata": {"labels": {"x": "y"}}}
    assert here.patch("merge", f"{what}/a", change).made["metadata"]["generation"] == 1


def two_versions(group: str) -> Object:
    """Return a definition in which v1 is stored, v2 is served too, and v3 is not served."""
    body = definition(group, open_schema(size={"type": "integer"}))
    first = body["spec"]["versions"][0]
    for name, served in (("v2", True), ("v3", False)):
        body["spec"]["versions"].append({**first, "name": name, "served": served, "storage": False})
    return body


def test_versions_show_one_object(here: Api) -> None:
    group = group_of(here)
    define(here, two_versions(group))
    made = here.post(f"{group}/v1:widgets", widget(group, "a", spec={"size": 1})).made
    found = here.get(f"{group}/v2:widgets/a").made
    assert found["apiVersion"] == f"{group}/v2"
    assert found["metadata"]["uid"] == made["metadata"]["uid"]
    here.patch("merge", f"{group}/v2:widgets/a", {"spec": {"size": 2}}).done()
    found = here.get(f"{group}/v1:widgets/a").made
    assert (found["apiVersion"], found["spec"]) == (f"{group}/v1", {"size": 2})
    assert here.get(f"{group}/v3:widgets").code == 404


def test_watch_tells_objects_in_its_version(here: Api) -> None:
    group = group_of(here)
    define(here, two_versions(group))
    with here.watch(f"{group}/v2:widgets") as events:
        here.post(f"{group}/v1:widgets", widget(group, "a")).done()
        assert events.event()["object"]["apiVersion"] == f"{group}/v2"


def test_newest_version_is_preferred(here: Api, api: Api) -> None:
    group = group_of(here)
    define(here, two_versions(group))
    found = api.get(f"/apis/{group}").made
    assert [v["version"] for v in found["versions"]] == ["v2", "v1"]
    assert found["preferredVersion"]["version"] == "v2"


def test_new_schema_takes_effect(here: Api, api: Api) -> None:
    what = defined(here, open_schema(size={"type": "integer"}))
    group = group_of(here)
    path = f"{CRDS}/widgets.{group}"
    change = {"type": "integer", "maximum": 5}
    pointer = "/spec/versions/0/schema/openAPIV3Schema/properties/spec/properties"
    operations = [
        {"op": "replace", "path": f"{pointer}/size", "value": change},
        {"op": "add", "path": f"{pointer}/color", "value": {"type": "string"}},
    ]
    found = api.patch("json", path, operations).made
    assert found["metadata"]["generation"] == 2
    number = itertools.count()

    def try_it() -> Answer:
        return here.post(what, widget(group, f"w{next(number)}", spec={"size": 7}))

    answer = here.settled(try_it, lambda answer: answer.code == 201)
    assert answer.causes == {("FieldValueInvalid", "spec.size")}
    made = here.post(what, widget(group, "a", spec={"size": 1, "color": "red"})).made
    assert made["spec"] == {"size": 1, "color": "red"}


def test_deletion_takes_objects_and_paths_along(here: Api, api: Api) -> None:
    what = defined(here, open_schema())
    group = group_of(here)
    here.post(what, widget(group, "a")).done()
    with here.watch(what) as events:
        assert events.events(1) == [("ADDED", "a")]
        assert api.delete(f"{CRDS}/widgets.{group}").code == 200
        assert events.events(1) == [("DELETED", "a")]
    api.until(CRDS, f"widgets.{group}", lambda _: False)
    gone = here.settled(lambda: here.get(what), lambda answer: answer.code == 200)
    assert gone.code == 404


def test_definition_that_comes_back_has_no_old_objects(here: Api, api: Api) -> None:
    what = defined(here, open_schema())
    group = group_of(here)
    here.post(what, widget(group, "a")).done()
    api.delete(f"{CRDS}/widgets.{group}").done()
    api.until(CRDS, f"widgets.{group}", lambda _: False)
    defined(here, open_schema())
    assert here.get(what).made["items"] == []


def test_name_that_is_taken_is_not_accepted(here: Api, api: Api) -> None:
    group = group_of(here)
    define(here, definition(group, open_schema()))
    other = definition(group, open_schema())
    other["metadata"]["name"] = f"gadgets.{group}"
    other["spec"]["names"] |= {"plural": "gadgets", "singular": "gadget"}
    api.post(CRDS, other).done()

    def judged(found: Object) -> bool:
        conditions = found.get("status", {}).get("conditions") or []
        return any(c["type"] == "NamesAccepted" for c in conditions)

    found = api.until(CRDS, f"gadgets.{group}", judged)
    names = next(c for c in found["status"]["conditions"] if c["type"] == "NamesAccepted")
    assert names["status"] == "False"
    assert names["reason"] in {"KindConflict", "ListKindConflict"}
    assert not is_established(found)
    # Clients that load all definitions of a cluster stumble over two of one kind.
    api.delete(f"{CRDS}/gadgets.{group}").done()


def changed(group: str, **spec: Any) -> Object:
    """Return a definition whose spec has these fields in place of the usual ones."""
    body = definition(group, open_schema())
    body["spec"] |= spec
    return body


def schema_of(schema: Object) -> Any:
    """Return a definition of this schema."""
    return lambda group: definition(group, schema)


SCHEMA = "spec.validation.openAPIV3Schema"
"""Path of the schema if there is one version; in v1.20 and now."""
BAD_DEFINITIONS: list[tuple[str, Any, str]] = [
    (
        "name that is not plural.group",
        lambda group: definition(group, open_schema()) | {"metadata": {"name": f"x.{group}"}},
        "metadata.name",
    ),
    ("unknown scope", lambda group: changed(group, scope="Galaxy"), "spec.scope"),
    ("no versions", lambda group: changed(group, versions=[]), "spec.versions"),
    (
        "no stored version",
        lambda group: changed(
            group,
            versions=[
                {
                    "name": "v1",
                    "served": True,
                    "storage": False,
                    "schema": {"openAPIV3Schema": {"type": "object"}},
                }
            ],
        ),
        "spec.versions",
    ),
    (
        "version without a schema",
        lambda group: changed(group, versions=[{"name": "v1", "served": True, "storage": True}]),
        "spec.versions[0].schema.openAPIV3Schema",
    ),
    (
        "plural in upper case",
        lambda group: changed(
            group, names={"plural": "Widgets", "singular": "widget", "kind": "Widget"}
        ),
        "spec.names.plural",
    ),
    (
        "no kind",
        lambda group: changed(group, names={"plural": "widgets", "singular": "widget"}),
        "spec.names.kind",
    ),
    (
        "root that is no object",
        schema_of({"type": "string"}),
        f"{SCHEMA}.type",
    ),
    (
        "field without a type",
        schema_of({"type": "object", "properties": {"spec": {"properties": {}}}}),
        f"{SCHEMA}.properties[spec].type",
    ),
    (
        "array without items",
        schema_of(open_schema(x={"type": "array"})),
        f"{SCHEMA}.properties[spec].properties[x].items",
    ),
    (
        "default of a wrong type",
        schema_of(open_schema(x={"type": "string", "default": 1})),
        f"{SCHEMA}.properties[spec].properties[x].default",
    ),
    (
        "pattern that cannot be read",
        schema_of(open_schema(x={"type": "string", "pattern": "("})),
        "pattern",
    ),
    (
        "list map without keys",
        schema_of(
            open_schema(
                x={
                    "type": "array",
                    "items": {"type": "object"},
                    "x-kubernetes-list-type": "map",
                }
            )
        ),
        f"{SCHEMA}.properties[spec].properties[x].x-kubernetes-list-map-keys",
    ),
    (
        "constraint on metadata",
        schema_of({"type": "object", "properties": {"metadata": {"type": "string"}}}),
        f"{SCHEMA}.properties[metadata].type",
    ),
]


@pytest.mark.parametrize(
    ("make", "field"),
    [row[1:] for row in BAD_DEFINITIONS],
    ids=[row[0] for row in BAD_DEFINITIONS],
)
def test_bad_definition_is_422_at_its_path(here: Api, api: Api, make: Any, field: str) -> None:
    answer = api.post(CRDS, make(group_of(here)))
    assert answer.failure == (422, "Invalid")
    fields = {found for _, found in answer.causes}
    nearer = field.replace(SCHEMA, "spec.versions[0].schema.openAPIV3Schema")
    assert any(each in {field, nearer} or each.endswith(f".{field}") for each in fields), fields


def test_column_with_a_bad_path_is_refused(here: Api, api: Api) -> None:
    columns = [{"name": "X", "type": "string", "jsonPath": "spec.x"}]
    body = definition(group_of(here), open_schema(), additionalPrinterColumns=columns)
    assert api.post(CRDS, body).failure == (422, "Invalid")


def test_group_of_kubernetes_needs_an_approval(here: Api, api: Api) -> None:
    answer = api.post(CRDS, definition(f"{here.namespace}.k8s.io", open_schema()))
    assert answer.failure == (422, "Invalid")
    assert "api-approved.kubernetes.io" in answer.message


@pytest.mark.since(25, "field validation by the server")
@pytest.mark.parametrize(("mode", "code", "warning"), STRICT)
def test_unknown_field_of_a_custom_resource(
    here: Api, mode: str, code: int, warning: str | None
) -> None:
    what = defined(here, open_schema(size={"type": "integer"}))
    body = widget(group_of(here), "a", spec={"size": 1, "more": 2})
    answer = here.post(what, body, fieldValidation=mode)
    assert answer.code == code
    if code == 400:
        assert "strict decoding error" in answer.message
        assert 'unknown field "spec.more"' in answer.message
    assert warned(answer) == ([warning] if warning else [])
