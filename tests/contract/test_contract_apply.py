"""Server-side apply: owners of fields, conflicts, removal of fields that are no longer applied."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from tests.apiclient import PATCHES, Api, Object
from tests.samples import config_map, define, definition, open_schema, pod, service, widget

MAP = "configmaps/m"


def entries(found: Object) -> dict[tuple[str, str], Object]:
    """Return managed fields by (manager, operation)."""
    return {
        (each["manager"], each["operation"]): each["fieldsV1"]
        for each in found["metadata"]["managedFields"]
    }


def test_apply_creates_what_is_missing(here: Api) -> None:
    answer = here.apply(MAP, config_map("m", a="1"))
    assert (answer.code, answer.object["data"]) == (201, {"a": "1"})
    assert entries(answer.object) == {("one", "Apply"): {"f:data": {"f:a": {}}}}


def test_second_apply_changes_what_is_there(here: Api) -> None:
    here.apply(MAP, config_map("m", a="1")).done()
    answer = here.apply(MAP, config_map("m", a="2", b="1"))
    assert (answer.code, answer.object["data"]) == (200, {"a": "2", "b": "1"})


def test_apply_of_the_same_changes_nothing(here: Api) -> None:
    made = here.apply(MAP, config_map("m", a="1")).made
    again = here.apply(MAP, config_map("m", a="1")).made
    if here.minor >= 21:  # v1.20 writes the time of every apply
        assert again == made
    assert again["data"] == made["data"]


def test_apply_takes_yaml(here: Api) -> None:
    body = yaml.safe_dump(config_map("m", a="1"))
    answer = here.send("PATCH", MAP, body, PATCHES["apply"], query={"fieldManager": "one"})
    assert answer.code == 201


def test_what_is_no_longer_applied_is_removed(here: Api) -> None:
    here.apply(MAP, config_map("m", a="1", b="2")).done()
    assert here.apply(MAP, config_map("m", a="1")).made["data"] == {"a": "1"}


def test_what_others_set_stays(here: Api) -> None:
    here.apply(MAP, config_map("m", a="1")).done()
    here.apply(MAP, config_map("m", b="2"), "two").done()
    changed = here.apply(MAP, config_map("m", a="3")).made
    assert changed["data"] == {"a": "3", "b": "2"}
    assert set(entries(changed)) == {("one", "Apply"), ("two", "Apply")}


def test_conflict_names_the_manager_and_the_field(here: Api) -> None:
    here.apply(MAP, config_map("m", a="1", b="2")).done()
    answer = here.apply(MAP, config_map("m", a="9"), "two")
    assert answer.failure == (409, "Conflict")
    assert answer.causes == {("FieldManagerConflict", ".data.a")}
    cause = answer.object["details"]["causes"][0]
    assert cause["message"] == 'conflict with "one"'
    assert answer.message == 'Apply failed with 1 conflict: conflict with "one": .data.a'
    assert here.get(MAP).made["data"] == {"a": "1", "b": "2"}


def test_conflicts_are_all_told(here: Api) -> None:
    here.apply(MAP, config_map("m", a="1", b="2")).done()
    answer = here.apply(MAP, config_map("m", a="8", b="9"), "two")
    assert answer.causes == {
        ("FieldManagerConflict", ".data.a"),
        ("FieldManagerConflict", ".data.b"),
    }
    assert answer.message == (
        'Apply failed with 2 conflicts: conflicts with "one":\n- .data.a\n- .data.b'
    )


def test_conflict_with_an_update_tells_how_it_was_made(here: Api) -> None:
    here.post("configmaps", config_map("m", a="1"), fieldManager="maker").done()
    answer = here.apply(MAP, config_map("m", a="2"))
    assert answer.failure == (409, "Conflict")
    message = answer.object["details"]["causes"][0]["message"]
    assert message.startswith('conflict with "maker" using v1')


def test_force_takes_the_field_over(here: Api) -> None:
    here.apply(MAP, config_map("m", a="1", b="2")).done()
    changed = here.apply(MAP, config_map("m", a="9"), "two", force=True).made
    assert changed["data"] == {"a": "9", "b": "2"}
    assert entries(changed) == {
        ("one", "Apply"): {"f:data": {"f:b": {}}},
        ("two", "Apply"): {"f:data": {"f:a": {}}},
    }


def test_same_value_is_owned_together(here: Api) -> None:
    here.apply(MAP, config_map("m", a="1")).done()
    changed = here.apply(MAP, config_map("m", a="1"), "two").made
    owned: Object = {"f:data": {"f:a": {}}}
    assert entries(changed) == {("one", "Apply"): owned, ("two", "Apply"): owned}


def test_field_goes_with_its_last_owner(here: Api) -> None:
    for manager in ("one", "two"):
        here.apply(MAP, config_map("m", a="1"), manager).done()
    assert here.apply(MAP, config_map("m")).made["data"] == {"a": "1"}
    assert "data" not in here.apply(MAP, config_map("m"), "two").made


def test_update_takes_a_field_from_who_applied_it(here: Api) -> None:
    here.apply(MAP, config_map("m", a="1", b="2")).done()
    change = {"data": {"a": "9"}}
    changed = here.patch("merge", MAP, change, fieldManager="two").made
    assert entries(changed) == {
        ("one", "Apply"): {"f:data": {"f:b": {}}},
        ("two", "Update"): {"f:data": {"f:a": {}}},
    }
    assert here.apply(MAP, config_map("m", a="1", b="2")).failure == (409, "Conflict")


@pytest.mark.parametrize("query", [{}, {"fieldManager": ""}, {"fieldManager": "x" * 129}])
def test_apply_requires_a_good_manager(here: Api, query: Object) -> None:
    answer = here.patch("apply", MAP, config_map("m"), **query)
    expected = (422, "Invalid") if here.cluster.is_real or query.get("fieldManager") else None
    assert answer.failure in {expected, (400, "BadRequest"), (422, "Invalid")}
    assert here.get(MAP).code == 404


def test_force_is_for_apply_only(here: Api) -> None:
    here.post("configmaps", config_map("m")).done()
    answer = here.patch("merge", MAP, {"data": {"a": "1"}}, force="true")
    assert answer.failure == (422, "Invalid")


BAD_APPLIES: list[tuple[str, Any]] = [
    ("managed fields", {"metadata": {"name": "m", "managedFields": [{"manager": "x"}]}}),
    ("another name", {"metadata": {"name": "n"}}),
    ("no kind", {"kind": None}),
    ("wrong kind", {"kind": "Secret"}),
    ("wrong version", {"apiVersion": "v2"}),
]


@pytest.mark.parametrize(
    "change", [row[1] for row in BAD_APPLIES], ids=[row[0] for row in BAD_APPLIES]
)
def test_bad_apply_is_400(here: Api, change: Object) -> None:
    body = {k: v for k, v in {**config_map("m"), **change}.items() if v is not None}
    answer = here.apply(MAP, body)
    if here.cluster.is_real and answer.code == 500:
        pytest.skip(f"v1.20 blames itself: {answer.message}")
    assert answer.failure == (400, "BadRequest")
    assert here.get(MAP).code == 404


def test_uid_in_an_apply_means_that_the_object_must_exist(here: Api) -> None:
    body = config_map("m")
    body["metadata"]["uid"] = "00000000-0000-0000-0000-000000000000"
    answer = here.apply(MAP, body)
    assert answer.failure == (409, "Conflict")
    assert here.get(MAP).code == 404


def test_version_in_an_apply_must_be_current(here: Api) -> None:
    made = here.apply(MAP, config_map("m", a="1")).made
    here.patch("merge", MAP, {"data": {"b": "2"}}).done()
    body = config_map("m", a="2")
    body["metadata"]["resourceVersion"] = made["metadata"]["resourceVersion"]
    assert here.apply(MAP, body).failure == (409, "Conflict")


def test_dry_run_applies_nothing(here: Api) -> None:
    assert here.apply(MAP, config_map("m", a="1"), dryRun="All").code == 201
    assert here.get(MAP).code == 404


SERVICE = "services/s"


def ports(**targets: int) -> Object:
    """Return a service of these ports, which is also what a manager of some ports applies."""
    return service("s", **targets)


def targets(found: Object) -> dict[str, int]:
    """Return the target port of each port."""
    return {port["name"]: port["targetPort"] for port in found["spec"]["ports"]}


def test_lists_with_keys_are_merged_by_them(here: Api) -> None:
    here.apply(SERVICE, ports(a=1)).done()
    changed = here.apply(SERVICE, ports(b=2), "two").made
    assert targets(changed) == {"a": 1, "b": 2}
    fields: Object = {f"f:{name}": {} for name in ("name", "port", "protocol", "targetPort")}
    assert entries(changed)["two", "Apply"]["f:spec"]["f:ports"] == {
        'k:{"port":98,"protocol":"TCP"}': {".": {}, **fields}
    }


def test_item_that_is_no_longer_applied_is_removed(here: Api) -> None:
    here.apply(SERVICE, ports(a=1, b=2)).done()
    assert targets(here.apply(SERVICE, ports(a=1)).made) == {"a": 1}


def test_item_with_another_owner_stays(here: Api) -> None:
    here.apply(SERVICE, ports(a=1, b=2)).done()
    here.apply(SERVICE, ports(b=2), "two").done()
    assert targets(here.apply(SERVICE, ports(a=1)).made) == {"a": 1, "b": 2}


def test_conflict_within_an_item_is_shown_with_its_key(here: Api) -> None:
    here.apply(SERVICE, ports(a=1)).done()
    answer = here.apply(SERVICE, ports(a=2), "two")
    assert answer.causes == {
        ("FieldManagerConflict", '.spec.ports[port=97,protocol="TCP"].targetPort')
    }


def test_defaults_belong_to_nobody(here: Api) -> None:
    made = here.apply(SERVICE, ports(a=1)).made
    assert made["spec"]["sessionAffinity"] == "None"
    assert "f:sessionAffinity" not in entries(made)["one", "Apply"]["f:spec"]


def test_sets_are_merged_by_value(here: Api) -> None:
    def body(*finalizers: str) -> Object:
        found = config_map("m")
        found["metadata"]["finalizers"] = list(finalizers)
        return found

    here.apply(MAP, body("example.com/a", "example.com/b")).done()
    changed = here.apply(MAP, body("example.com/c"), "two").made
    assert set(changed["metadata"]["finalizers"]) == {
        "example.com/a",
        "example.com/b",
        "example.com/c",
    }
    assert entries(changed)["two", "Apply"] == {
        "f:metadata": {"f:finalizers": {'v:"example.com/c"': {}}}
    }
    changed = here.apply(MAP, body("example.com/a")).made
    assert set(changed["metadata"]["finalizers"]) == {"example.com/a", "example.com/c"}


def test_atomic_maps_are_owned_whole(here: Api) -> None:
    labels = {"app": "a"}
    template = {"metadata": {"labels": labels}, "spec": pod("a", restartPolicy="Never")["spec"]}
    spec = {"manualSelector": True, "selector": {"matchLabels": labels}, "template": template}
    body = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "a"}, "spec": spec}
    made = here.apply("batch/v1:jobs/a", body).made
    assert entries(made)["one", "Apply"]["f:spec"]["f:selector"] == {}


def test_ports_have_two_keys(here: Api) -> None:
    port = {"containerPort": 80, "protocol": "TCP"}
    body = pod("p", containers=[{"name": "a", "image": "x", "ports": [port]}])
    made = here.apply("pods/p", body).made
    containers = entries(made)["one", "Apply"]["f:spec"]["f:containers"]
    assert 'k:{"containerPort":80,"protocol":"TCP"}' in containers['k:{"name":"a"}']["f:ports"]


def test_duplicate_keys_are_refused(here: Api) -> None:
    body = pod("p", containers=[{"name": "a", "image": "x"}, {"name": "a", "image": "y"}])
    answer = here.apply("pods/p", body)
    assert 400 <= answer.code < 500 or (here.cluster.is_real and answer.code == 500)
    assert here.get("pods/p").code == 404


@pytest.mark.since(22, "the subresource of managed fields")
def test_status_is_applied_apart(here: Api) -> None:
    here.apply("pods/p", pod("p")).done()
    status = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "p"},
        "status": {"phase": "Running"},
    }
    changed = here.apply("pods/p/status", status, "kubelet").made
    assert changed["status"]["phase"] == "Running"
    found = {(e["manager"], e.get("subresource")) for e in changed["metadata"]["managedFields"]}
    assert found == {("one", None), ("kubelet", "status")}


def test_status_can_be_applied(here: Api) -> None:
    here.post("pods", pod("p")).done()
    body: Object = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}}
    changed = here.apply("pods/p/status", {**body, "status": {"phase": "Running"}}).made
    assert changed["status"]["phase"] == "Running"


def test_apply_of_the_status_of_what_is_missing_is_404(here: Api) -> None:
    body = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "none"}}
    assert here.apply("pods/none/status", body).failure == (404, "NotFound")


def test_custom_resource_merges_as_its_schema_says(here: Api) -> None:
    group = f"{here.namespace}.example.com"
    item = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "size": {"type": "integer"}},
        "required": ["name"],
    }
    keyed = {"type": "array", "items": item}
    schema = open_schema(
        parts=keyed | {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
        tags={"type": "array", "items": {"type": "string"}, "x-kubernetes-list-type": "set"},
        words={"type": "array", "items": {"type": "string"}},
    )
    define(here, definition(group, schema))
    what = f"{group}/v1:widgets/w"
    one = {"parts": [{"name": "a", "size": 1}], "tags": ["x"], "words": ["p"]}
    here.apply(what, widget(group, "w", spec=one)).done()
    more: Object = {"parts": [{"name": "b", "size": 2}], "tags": ["y"]}
    changed = here.apply(what, widget(group, "w", spec=more), "two").made
    assert {p["name"]: p["size"] for p in changed["spec"]["parts"]} == {"a": 1, "b": 2}
    assert set(changed["spec"]["tags"]) == {"x", "y"}
    answer = here.apply(what, widget(group, "w", spec={"words": ["q"]}), "two")
    assert answer.causes == {("FieldManagerConflict", ".spec.words")}


def test_managers_of_many_applies_are_told_apart(here: Api) -> None:
    for number in range(5):
        here.apply(MAP, config_map("m", **{f"k{number}": "x"}), f"manager-{number}").done()
    found = here.get(MAP).made
    assert len(found["metadata"]["managedFields"]) == 5
    assert set(found["data"]) == {f"k{number}" for number in range(5)}
