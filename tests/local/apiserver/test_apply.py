"""Managed fields and server-side apply, as the real server has them (v1.20.2, where it agrees)."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tables import cases
from unbroken.local.apiserver.http.status import ApiError, Object
from unbroken.local.apiserver.schema.schemas import Schema, builtin
from unbroken.local.apiserver.write.apply import (
    LAST_APPLIED,
    MAX_ANNOTATIONS_BYTES,
    merge,
    server_side_apply,
    track_update,
)
from unbroken.local.apiserver.write.fieldsets import compare, field_set, intersection, paths

CONFIG_MAP = builtin("io.k8s.api.core.v1.ConfigMap")
JOB = builtin("io.k8s.api.batch.v1.Job")
POD = builtin("io.k8s.api.core.v1.Pod")
FREE = Schema({"type": "object", "x-kubernetes-preserve-unknown-fields": True}, {})


def clock(second: int) -> str:
    """A time."""
    return f"2026-01-01T00:00:{second:02}Z"


def config_map(data: Object | None = None, **metadata: Any) -> Object:
    """A config map `a`."""
    content = {} if data is None else {"data": data}
    meta = {"name": "a", **metadata}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, **content}


def job(*containers: Object, **spec: Any) -> Object:
    """A job `a`."""
    template = {"template": {"spec": {"containers": list(containers)}}} if containers else {}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "a"},
        "spec": {**spec, **template},
    }


def write(
    old: Object | None, new: Object, manager: str, second: int = 0, *, subresource: str = ""
) -> Object:
    """`new` with its records after an ordinary write."""
    tracked = track_update(
        old,
        new,
        JOB if new["kind"] == "Job" else CONFIG_MAP,
        manager=manager,
        api_version=new["apiVersion"],
        now=clock(second),
        subresource=subresource,
    )
    return {**new, "metadata": {**new["metadata"], "managedFields": tracked}}


def apply(
    live: Object | None, applied: Object, manager: str, second: int = 0, *, force: bool = False
) -> Object:
    """Server-side apply; the inputs must stay as they are."""
    before = copy.deepcopy((live, applied))
    found = server_side_apply(
        live,
        applied,
        JOB if applied["kind"] == "Job" else CONFIG_MAP,
        manager=manager,
        api_version=applied["apiVersion"],
        now=clock(second),
        force=force,
    )
    assert (live, applied) == before
    return found


def records(value: Object) -> list[str]:
    """One line for each entry: manager, operation, second, paths."""
    return [
        f"{e['manager']} {e['operation']} {int(e['time'][17:19])} {' '.join(paths(e['fieldsV1']))}"
        for e in value["metadata"]["managedFields"]
    ]


def test_an_entry_has_the_wire_form_of_the_real_server() -> None:
    created = write(None, config_map({"x": "1"}), "m", 7)
    assert created["metadata"]["managedFields"] == [
        {
            "manager": "m",
            "operation": "Update",
            "apiVersion": "v1",
            "time": clock(7),
            "fieldsType": "FieldsV1",
            "fieldsV1": {"f:data": {".": {}, "f:x": {}}},
        }
    ]
    changed = write(created, {**created, "data": {"x": "2"}}, "m", 8, subresource="status")
    assert changed["metadata"]["managedFields"][1]["subresource"] == "status"


# --- Ordinary writes --------------------------------------------------------------------------

CREATED = write(None, config_map({"x": "1", "y": "1"}), "m1", 1)


@cases
def test_a_write_owns_what_it_changes(
    data: Object | None, manager: str, expected: list[str]
) -> None:
    assert records(write(CREATED, config_map(data), manager, 2)) == expected


def test_entries_differ_by_manager_version_and_subresource() -> None:
    value = write(None, config_map({"x": "1"}), "m", 1)
    value = write(value, {**value, "data": {"x": "1", "y": "1"}}, "m", 2, subresource="status")
    newer = {**value, "apiVersion": "v2", "data": {**value["data"], "z": "1"}}
    value = write(value, newer, "m", 3)
    value = apply(value, {**config_map({"w": "1"}), "apiVersion": "v3"}, "m", 4)
    value = apply(value, {**config_map({"w": "1", "v": "1"}), "apiVersion": "v4"}, "m", 5)
    found = [
        (e["operation"], e["apiVersion"], e.get("subresource"))
        for e in value["metadata"]["managedFields"]
    ]
    assert found == [
        ("Apply", "v4", None),
        ("Update", "v1", None),
        ("Update", "v1", "status"),
        ("Update", "v2", None),
    ]


@pytest.mark.parametrize(
    ("given_records", "expected"),
    [
        (None, ["m1 Update 1 .data .data.x .data.y"]),
        ([], []),
        ([{}], []),
        ([{"manager": "x"}], ["m1 Update 1 .data .data.x .data.y"]),
        ("text", ["m1 Update 1 .data .data.x .data.y"]),
        (
            [{**CREATED["metadata"]["managedFields"][0], "fieldsV1": {"data": {}}}],
            ["m1 Update 1 .data .data.x .data.y"],
        ),
        (
            [{**CREATED["metadata"]["managedFields"][0], "manager": "renamed"}],
            ["renamed Update 1 .data .data.x .data.y"],
        ),
    ],
)
def test_a_writer_may_set_the_records(given_records: Any, expected: list[str]) -> None:
    new = config_map(CREATED["data"], managedFields=given_records)
    assert records(write(CREATED, new, "m2", 2)) == expected


def test_records_cannot_be_set_through_a_subresource() -> None:
    new = config_map({"x": "1", "y": "1"}, managedFields=[{}])
    assert records(write(CREATED, new, "m2", 2, subresource="status")) == records(CREATED)


def test_an_object_without_records_is_not_tracked_before_it_is_applied() -> None:
    bare = config_map({"x": "1"})
    changed = write(bare, config_map({"x": "2"}), "m", 2)
    assert records(changed) == []
    applied = apply(changed, config_map({"y": "1"}), "ap", 3)
    assert records(applied) == [
        "ap Apply 3 .data.y",
        "before-first-apply Update 3 .data .data.x",
    ]


def test_the_oldest_updaters_are_merged_beyond_ten() -> None:
    value = write(None, config_map({}), "m0", 0)
    for n in range(1, 12):
        value = write(
            value, config_map({**value["data"], f"k{n}": ""}, **value["metadata"]), f"m{n}", n
        )
    found = records(value)
    assert len(found) == 10
    assert found[0] == "ancient-changes Update 2 .data .data.k1 .data.k2"
    assert found[1:] == [f"m{n} Update {n} .data.k{n}" for n in range(3, 12)]


def test_updaters_of_different_versions_are_merged_apart() -> None:
    value = write(None, config_map({}), "m0", 0)
    for n in range(1, 14):
        new = config_map({**value["data"], f"k{n}": ""}, **value["metadata"])
        value = write(value, {**new, "apiVersion": "v1" if n % 2 else "v2"}, f"m{n}", n)
    ancient = [
        entry["apiVersion"]
        for entry in value["metadata"]["managedFields"]
        if entry["manager"] == "ancient-changes"
    ]
    assert sorted(ancient) == ["v1", "v2"]
    assert len(records(value)) == 10


# --- Apply ------------------------------------------------------------------------------------


def test_apply_creates() -> None:
    found = apply(None, config_map({"x": "1"}, namespace="n", labels={"a": "b"}), "ap", 1)
    assert found["data"] == {"x": "1"}
    assert (found["metadata"]["name"], found["metadata"]["namespace"]) == ("a", "n")
    assert records(found) == ["ap Apply 1 .data.x .metadata.labels.a"]


def test_applying_again_changes_nothing_not_even_the_time() -> None:
    once = apply(CREATED, config_map({"x": "1"}), "ap", 2)
    assert records(once) == ["ap Apply 2 .data.x", "m1 Update 1 .data .data.x .data.y"]
    assert apply(once, config_map({"x": "1"}), "ap", 3) == once


def test_an_applier_that_wants_less_without_effect_is_recorded() -> None:
    once = apply(CREATED, config_map({"x": "1", "y": "1"}), "ap", 2)
    less = apply(once, config_map({"x": "1"}), "ap", 3)
    assert less["data"] == {"x": "1", "y": "1"}
    assert records(less) == ["ap Apply 3 .data.x", "m1 Update 1 .data .data.x .data.y"]
    none = apply(less, config_map(), "ap", 4)
    assert records(none) == ["m1 Update 1 .data .data.x .data.y"]


def test_what_an_applier_gives_up_goes_unless_another_has_it() -> None:
    one = apply(None, config_map({"x": "1", "y": "1"}, labels={"l": "1"}), "one", 1)
    both = apply(one, config_map({"y": "1", "z": "1"}), "two", 2)
    less = apply(both, config_map(), "one", 3)
    assert less["data"] == {"y": "1", "z": "1"}
    assert "labels" not in less["metadata"]
    assert less["metadata"]["name"] == "a"
    assert records(less) == ["two Apply 2 .data.y .data.z"]


def test_an_item_stays_while_somebody_has_part_of_it() -> None:
    a, b = {"name": "a", "image": "i"}, {"name": "b", "image": "i"}
    live = apply(None, job(a, b), "one", 1)
    other = job({"name": "b", "command": ["x"]})
    live = apply(live, other, "two", 2)
    less = apply(live, job(parallelism=1), "one", 3)
    assert less["spec"] == {
        "parallelism": 1,
        "template": {"spec": {"containers": [{"name": "b", "command": ["x"]}]}},
    }


def test_what_nobody_has_stays() -> None:
    live = apply(None, config_map(labels={"x": "1"}), "one", 1)
    live = apply(live, config_map(labels={"y": "1"}), "two", 2)
    labels = {**live["metadata"]["labels"], "z": "1"}
    live = {**live, "metadata": {**live["metadata"], "labels": labels}}
    assert apply(live, config_map(), "one", 3)["metadata"]["labels"] == {"y": "1", "z": "1"}


def test_items_are_known_by_all_their_keys_with_defaults() -> None:
    def ports(*found: tuple[int, str | None]) -> Object:
        listed = [{"containerPort": n, **({"protocol": p} if p else {})} for n, p in found]
        return job({"name": "a", "ports": listed})

    live = apply(None, ports((53, None), (53, "UDP")), "one", 1)
    live = apply(live, ports((53, "TCP")), "two", 2)
    live = apply(live, ports((53, "UDP")), "one", 3)
    found = live["spec"]["template"]["spec"]["containers"][0]["ports"]
    assert found == [
        {"containerPort": 53, "protocol": "TCP"},
        {"containerPort": 53, "protocol": "UDP"},
    ]


@cases
def test_conflicts_are_told_in_kubernetes_words(
    applied: Object, message: str, fields: list[str]
) -> None:
    live = write(None, job({"name": "a", "image": "i"}, parallelism=1), "kubectl-client-side-apply")
    with pytest.raises(ApiError) as caught:
        apply(live, applied, "me")
    error = caught.value
    assert (error.code, error.reason, error.message) == (409, "Conflict", message)
    assert error.details == {
        "causes": [
            {
                "reason": "FieldManagerConflict",
                "message": 'conflict with "kubectl-client-side-apply" using batch/v1',
                "field": field,
            }
            for field in fields
        ]
    }


def test_conflicts_name_each_manager_with_its_subresource() -> None:
    live = apply(None, config_map({"x": "1", "y": "1", "z": "1"}), "ap", 1)
    live = write(
        live, {**live, "data": {"x": "1", "y": "2", "z": "1"}}, "st", 2, subresource="status"
    )
    with pytest.raises(ApiError) as caught:
        apply(live, config_map({"x": "2", "y": "3", "z": "1"}), "me")
    assert caught.value.message == (
        'Apply failed with 2 conflicts: conflicts with "ap":\n- .data.x\n'
        'conflicts with "st" with subresource "status" using v1:\n- .data.y'
    )


def test_force_takes_what_conflicts() -> None:
    found = apply(CREATED, config_map({"x": "2"}), "ap", 2, force=True)
    assert found["data"] == {"x": "2", "y": "1"}
    assert records(found) == ["ap Apply 2 .data.x", "m1 Update 1 .data .data.y"]


def test_equal_values_are_shared_and_ones_own_changed_freely() -> None:
    live = apply(CREATED, config_map({"x": "1"}), "one", 2)
    live = apply(live, config_map({"z": "1"}), "two", 3)
    changed = apply(live, config_map({"z": "2"}), "two", 4)
    assert changed["data"] == {"x": "1", "y": "1", "z": "2"}


@cases
def test_what_cannot_be_applied_is_a_bad_request(applied: Object, message: str) -> None:
    with pytest.raises(ApiError) as caught:
        apply(None, applied, "me")
    assert (caught.value.code, caught.value.message) == (400, message)


def test_server_owned_metadata_is_neither_set_nor_owned() -> None:
    live = {**CREATED, "metadata": {**CREATED["metadata"], "uid": "1", "generation": 3}}
    applied = config_map({"x": "1"}, creationTimestamp=None, generation=7, resourceVersion="5")
    found = apply(live, applied, "ap", 2)
    assert found["metadata"] == {
        **live["metadata"],
        "managedFields": found["metadata"]["managedFields"],
    }
    assert records(found)[0] == "ap Apply 2 .data.x"


# --- From client-side apply -------------------------------------------------------------------


def client_side(data: Object, **metadata: Any) -> Object:
    """A config map that `kubectl apply` has created."""
    text = json.dumps(config_map(data)) + "\n"
    value = config_map(data, annotations={LAST_APPLIED: text}, **metadata)
    return write(None, value, "kubectl-client-side-apply", 1)


def test_kubectl_takes_over_what_it_had_applied_on_the_client_side() -> None:
    live = client_side({"x": "1"})
    found = apply(live, config_map({"x": "2"}), "kubectl", 2)
    assert found["data"] == {"x": "2"}
    kept = json.loads(found["metadata"]["annotations"][LAST_APPLIED])
    assert kept == config_map({"x": "2"})
    with pytest.raises(ApiError):
        apply(live, config_map({"x": "2"}), "another", 2)


def test_kubectl_does_not_take_over_what_was_changed_since() -> None:
    live = client_side({"x": "1", "y": "1"})
    live = write(live, {**live, "data": {"x": "1", "y": "9"}}, "scaler", 2)
    with pytest.raises(ApiError) as caught:
        apply(live, config_map({"x": "2", "y": "2"}), "kubectl", 3)
    assert caught.value.message == (
        'Apply failed with 1 conflict: conflict with "scaler" using v1: .data.y'
    )


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "1", "{}", '{"metadata": 1}', "[" * 2000, "x" * 99]
)
def test_a_broken_annotation_grants_nothing(text: str) -> None:
    live = write(None, config_map({"x": "1"}, annotations={LAST_APPLIED: text}), "other", 1)
    with pytest.raises(ApiError) as caught:
        apply(live, config_map({"x": "2"}), "kubectl", 2)
    assert caught.value.code == 409


def test_an_annotation_that_would_be_too_large_is_dropped() -> None:
    live = client_side({"x": "1"})
    found = apply(live, config_map({"x": "2" * MAX_ANNOTATIONS_BYTES}), "kubectl", 2)
    assert LAST_APPLIED not in found["metadata"]["annotations"]


# --- Merging ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("live", "applied", "expected"),
    [
        ("a b c", "b", "a b c"),
        ("a b c", "c a", "b c a"),
        ("a b c", "x b", "a x b c"),
        ("a b c", "b x", "a b c x"),
        ("a b c", "x y", "a b c x y"),
        ("a b c", "c x b a", "c x b a"),
        ("", "b a", "b a"),
        ("a b", "", "a b"),
    ],
)
def test_merged_items_keep_to_the_order_that_is_applied(
    live: str, applied: str, expected: str
) -> None:
    old, new = (
        {"spec": {"containers": [{"name": name} for name in names.split()]}}
        for names in (live, applied)
    )
    found = merge(old, new, POD)["spec"]["containers"]
    assert " ".join(item["name"] for item in found) == expected


@pytest.mark.parametrize(
    ("live", "applied", "expected"),
    [
        ({"a": 1}, {"b": 2}, {"a": 1, "b": 2}),
        ({"a": {"b": 1}}, {"a": {"c": 1}}, {"a": {"b": 1, "c": 1}}),
        ({"a": [1, 2]}, {"a": [3]}, {"a": [3]}),
        ({"a": {"b": 1}}, {"a": 1}, {"a": 1}),
        ({"a": 1}, {"a": {"b": 1}}, {"a": {"b": 1}}),
        ({"a": {"b": 1}}, {"a": {}}, {"a": {"b": 1}}),
        ({"a": {"b": 1}}, {"a": None}, {"a": {"b": 1}}),
        ({"a": {}}, {"a": None}, {"a": None}),
    ],
)
def test_merging_without_a_schema(live: Object, applied: Object, expected: Object) -> None:
    assert merge(live, applied, FREE) == expected


# --- Properties -------------------------------------------------------------------------------

VALUES = st.sampled_from("12")
CONTAINER = st.fixed_dictionaries(
    {"name": st.sampled_from("abc")},
    optional={
        "image": VALUES,
        "command": st.lists(VALUES, max_size=2),
        "env": st.lists(
            st.fixed_dictionaries({"name": st.sampled_from("EF"), "value": VALUES}),
            unique_by=lambda item: item["name"],
            min_size=1,
        ),
    },
)
CONFIGURATIONS = st.builds(
    job,
    parallelism=st.integers(0, 2),
    selector=st.dictionaries(st.just("matchLabels"), st.dictionaries(VALUES, VALUES)),
    template=st.fixed_dictionaries(
        {
            "spec": st.fixed_dictionaries(
                {
                    "containers": st.lists(
                        CONTAINER, unique_by=lambda item: item["name"], min_size=1, max_size=3
                    )
                }
            )
        }
    ),
)
STEPS = st.lists(
    st.tuples(st.sampled_from(["one", "two"]), st.sampled_from(["apply", "write"]), CONFIGURATIONS),
    min_size=1,
    max_size=5,
)


@settings(max_examples=60)
@given(STEPS)
def test_whatever_happens_an_applier_gets_what_it_wants_and_records_are_true(
    steps: list[tuple[str, str, Object]],
) -> None:
    live: Object | None = None
    for second, (manager, kind, wanted) in enumerate(steps):
        if kind == "write":
            live = write(
                live, {**wanted, "metadata": (live or wanted)["metadata"]}, manager, second
            )
        else:
            live = apply(live, wanted, manager, second, force=True)
            assert not compare(live, merge(live, wanted, JOB), JOB).written
            assert apply(live, wanted, manager, second + 9) == live
        entries = live["metadata"]["managedFields"]
        everything = compare(None, live, JOB).written
        for entry in entries:
            fields = entry["fieldsV1"]
            assert fields
            # Nobody is said to have what is not there.
            assert intersection(fields, everything) == fields
        owned = {path for entry in entries for path in paths(entry["fieldsV1"])}
        claims = field_set({"spec": live["spec"]}, JOB)
        assert set(paths(claims)) <= owned
