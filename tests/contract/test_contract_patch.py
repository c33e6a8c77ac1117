"""Patches: JSON, merge and strategic merge."""

from __future__ import annotations

from typing import Any

import pytest

from tests.apiclient import Api, Object
from tests.samples import config_map, define, definition, open_schema, pod, service, widget
from tests.tables import cases


@cases
def test_json_patch(here: Api, patch: list[Object], data: Object) -> None:
    here.post("configmaps", config_map("m", a="1", b="2")).done()
    changed = here.patch("json", "configmaps/m", patch).made
    assert changed["data"] == data
    assert here.get("configmaps/m").made == changed


BAD_JSON_PATCHES: list[tuple[str, Any, int]] = [
    ("test that fails", [{"op": "test", "path": "/data/a", "value": "2"}], 422),
    ("remove of nothing", [{"op": "remove", "path": "/data/none"}], 422),
    ("replace of nothing", [{"op": "replace", "path": "/none/none", "value": "1"}], 422),
    ("unknown operation", [{"op": "fold", "path": "/data/a"}], 422),
    ("no list", {"op": "add", "path": "/data/a", "value": "1"}, 400),
    ("no JSON", b"[{", 400),
    ("result of a wrong type", [{"op": "replace", "path": "/data/a", "value": {}}], 422),
    ("result that is invalid", [{"op": "add", "path": "/data/not ok", "value": "x"}], 422),
    ("another name", [{"op": "replace", "path": "/metadata/name", "value": "b"}], 400),
]


@pytest.mark.parametrize(
    ("patch", "code"),
    [row[1:] for row in BAD_JSON_PATCHES],
    ids=[row[0] for row in BAD_JSON_PATCHES],
)
def test_bad_json_patch_changes_nothing(here: Api, patch: object, code: int) -> None:
    made = here.post("configmaps", config_map("m", a="1")).made
    answer = here.patch("json", "configmaps/m", patch)
    reason = {400: "BadRequest", 422: "Invalid"}[code]
    assert answer.failure == (code, reason)
    assert here.get("configmaps/m").made == made


def test_json_patch_may_hold_ten_thousand_operations(here: Api) -> None:
    here.post("configmaps", config_map("m", a="1")).done()
    operation = {"op": "test", "path": "/data/a", "value": "1"}
    assert here.patch("json", "configmaps/m", [operation] * 10_000).code == 200
    answer = here.patch("json", "configmaps/m", [operation] * 10_001)
    assert answer.failure == (413, "RequestEntityTooLarge")


def test_merge_patch_merges_maps_and_removes_nulls(here: Api) -> None:
    here.post("configmaps", config_map("m", a="1", b="2")).done()
    changed = here.patch("merge", "configmaps/m", {"data": {"a": None, "c": "3"}}).made
    assert changed["data"] == {"b": "2", "c": "3"}


def test_merge_patch_replaces_lists(here: Api) -> None:
    here.post("services", service("m", a=1, b=2)).done()
    change = {"spec": service("m", b=2)["spec"]}
    assert list(targets(here.patch("merge", "services/m", change).made)) == ["b"]


def test_patch_on_a_stale_version_is_409(here: Api) -> None:
    made = here.post("configmaps", config_map("m", a="1")).made
    here.patch("merge", "configmaps/m", {"data": {"a": "2"}}).done()
    stale = {"metadata": {"resourceVersion": made["metadata"]["resourceVersion"]}}
    answer = here.patch("merge", "configmaps/m", {**stale, "data": {"a": "3"}})
    assert answer.failure == (409, "Conflict")


def test_patch_of_the_uid_is_422(here: Api) -> None:
    here.post("configmaps", config_map("m")).done()
    answer = here.patch("merge", "configmaps/m", {"metadata": {"uid": "other"}})
    assert answer.failure == (422, "Invalid")
    assert ("FieldValueInvalid", "metadata.uid") in answer.causes


@pytest.mark.parametrize("kind", ["json", "merge", "strategic"])
def test_patch_of_what_is_missing_is_404(here: Api, kind: str) -> None:
    answer = here.patch(kind, "configmaps/none", [] if kind == "json" else {})
    assert answer.failure == (404, "NotFound")


@pytest.mark.parametrize("kind", ["merge", "strategic"])
def test_patch_that_changes_nothing_keeps_the_version(here: Api, kind: str) -> None:
    made = here.post("configmaps", config_map("m", a="1")).made
    assert here.patch(kind, "configmaps/m", {"data": {"a": "1"}}).made == made


@pytest.mark.parametrize("content", ["application/json", "text/plain", "application/patch"])
def test_unknown_kind_of_patch_is_415(here: Api, content: str) -> None:
    here.post("configmaps", config_map("m")).done()
    answer = here.send("PATCH", "configmaps/m", {}, content)
    assert answer.failure == (415, "UnsupportedMediaType")


def test_dry_run_patches_nothing(here: Api) -> None:
    made = here.post("configmaps", config_map("m", a="1")).made
    change = {"data": {"a": "2"}}
    assert here.patch("merge", "configmaps/m", change, dryRun="All").made["data"] == {"a": "2"}
    assert here.get("configmaps/m").made == made


def test_patch_validates(here: Api) -> None:
    made = here.post("configmaps", config_map("m")).made
    answer = here.patch("merge", "configmaps/m", {"metadata": {"labels": {"x": "not ok"}}})
    assert answer.failure == (422, "Invalid")
    assert here.get("configmaps/m").made == made


def targets(found: Object) -> dict[str, int]:
    """Target ports of a service by the names of its ports, in their order."""
    return {port["name"]: port["targetPort"] for port in found["spec"]["ports"]}


def strategic(here: Api, spec: Object) -> dict[str, int]:
    """Target ports of a service after a strategic merge patch of its spec."""
    here.post("services", service("m", a=1, b=2)).done()
    return targets(here.patch("strategic", "services/m", {"spec": spec}).made)


def test_strategic_patch_merges_containers_by_name(here: Api) -> None:
    two = [{"name": "a", "image": "one"}, {"name": "b", "image": "two"}]
    here.post("pods", pod("m", containers=two)).done()
    change = {"spec": {"containers": [{"name": "b", "image": "three"}]}}
    found = here.patch("strategic", "pods/m", change).made["spec"]["containers"]
    assert {c["name"]: c["image"] for c in found} == {"a": "one", "b": "three"}


def test_strategic_patch_merges_ports_by_number(here: Api) -> None:
    ports = [{"port": ord("b"), "targetPort": 3}]
    assert strategic(here, {"ports": ports}) == {"a": 1, "b": 3}


def test_strategic_patch_puts_new_items_first(here: Api) -> None:
    found = strategic(here, service("m", c=3)["spec"])
    assert list(found) == ["c", "a", "b"]


def test_strategic_patch_deletes_an_item(here: Api) -> None:
    found = strategic(here, {"ports": [{"port": ord("a"), "$patch": "delete"}]})
    assert list(found) == ["b"]


def test_strategic_patch_replaces_a_list_that_says_so(here: Api) -> None:
    found = strategic(here, {"ports": [*service("m", c=3)["spec"]["ports"], {"$patch": "replace"}]})
    assert list(found) == ["c"]


def test_strategic_patch_replaces_a_map_that_says_so(here: Api) -> None:
    body = pod("m", {"a": "1", "b": "2"})
    here.post("pods", body).done()
    change = {"metadata": {"labels": {"$patch": "replace", "c": "3"}}}
    changed = here.patch("strategic", "pods/m", change).made
    assert changed["metadata"]["labels"] == {"c": "3"}


def test_strategic_patch_removes_a_null(here: Api) -> None:
    here.post("configmaps", config_map("m", a="1", b="2")).done()
    changed = here.patch("strategic", "configmaps/m", {"data": {"a": None}}).made
    assert changed["data"] == {"b": "2"}


def test_strategic_patch_orders_as_told(here: Api) -> None:
    spec = {
        "$setElementOrder/ports": [{"port": ord(name)} for name in "bca"],
        **service("m", c=3)["spec"],
    }
    assert list(strategic(here, spec)) == ["b", "c", "a"]


def test_strategic_patch_merges_finalizers(here: Api) -> None:
    body = config_map("m")
    body["metadata"]["finalizers"] = ["example.com/a"]
    here.post("configmaps", body).done()
    change: Object = {"metadata": {"finalizers": ["example.com/b"]}}
    changed = here.patch("strategic", "configmaps/m", change).made
    assert set(changed["metadata"]["finalizers"]) == {"example.com/a", "example.com/b"}
    change = {"metadata": {"$deleteFromPrimitiveList/finalizers": ["example.com/a"]}}
    changed = here.patch("strategic", "configmaps/m", change).made
    assert changed["metadata"]["finalizers"] == ["example.com/b"]


def test_strategic_patch_merges_conditions_of_a_node_by_type(here: Api, api: Api) -> None:
    name = f"{here.namespace}-n"
    api.post("nodes", {"metadata": {"name": name}}).done()
    for kind, status in (("Ready", "False"), ("DiskPressure", "False"), ("Ready", "True")):
        change = {"status": {"conditions": [{"type": kind, "status": status}]}}
        found = api.patch("strategic", f"nodes/{name}/status", change).made
    assert {c["type"]: c["status"] for c in found["status"]["conditions"]} == {
        "Ready": "True",
        "DiskPressure": "False",
    }


def test_strategic_patch_of_a_wrong_shape_is_refused(here: Api) -> None:
    made = here.post("services", service("m", a=1)).made
    answer = here.patch("strategic", "services/m", {"spec": {"ports": [{"name": "no port"}]}})
    assert 400 <= answer.code < 500 or here.cluster.is_real
    assert answer.object["kind"] == "Status"
    assert here.get("services/m").made == made


def test_custom_resource_takes_no_strategic_patch(here: Api) -> None:
    group = f"{here.namespace}.example.com"
    define(here, definition(group, open_schema(size={"type": "integer"})))
    what = f"{group}/v1:widgets"
    here.post(what, widget(group, "m", spec={"size": 1})).done()
    answer = here.patch("strategic", f"{what}/m", {"spec": {"size": 2}})
    assert answer.failure == (415, "UnsupportedMediaType")
    for kind, patch in (
        ("merge", {"spec": {"size": 3}}),
        ("json", [{"op": "replace", "path": "/spec/size", "value": 4}]),
    ):
        assert here.patch(kind, f"{what}/m", patch).code == 200
    assert here.get(f"{what}/m").made["spec"] == {"size": 4}
