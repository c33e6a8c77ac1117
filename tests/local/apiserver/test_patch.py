"""JSON patches and merge patches give what RFC 6902, RFC 7396 and Kubernetes v1.20 give."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unbroken.local.apiserver.http.status import ApiError, Object
from unbroken.local.apiserver.write.patch import (
    MAX_COPIED_BYTES,
    MAX_COPY_DEPTH,
    MAX_DEPTH,
    MAX_OPERATIONS,
    copy_json,
    json_patch,
    merge_patch,
    same_json,
)

TARGET: Object = {
    "data": {"x": "1", "y": "2"},
    "items": [1, 2, 3],
    "a/b": {"m~n": 0},
    "~1": 0,
    "n": None,
}

SCALARS = st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["", "a", "b"])
KEYS = st.sampled_from(["a", "b", "c", "d"])
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=12,
)
OBJECTS = st.dictionaries(KEYS, VALUES, max_size=4)


def op(name: str, path: str, **more: Any) -> Object:
    """One operation; `source` stands for `from`."""
    renamed = {"from" if key == "source" else key: value for key, value in more.items()}
    return {"op": name, "path": path, **renamed}


@pytest.mark.parametrize(
    ("operations", "changed"),
    [
        ([], {}),
        ([op("add", "/data/z", value="3")], {"data": {"x": "1", "y": "2", "z": "3"}}),
        ([op("add", "/data/z")], {"data": {"x": "1", "y": "2", "z": None}}),
        ([op("add", "/data/x", value=[])], {"data": {"x": [], "y": "2"}}),
        ([op("add", "/items/0", value=0)], {"items": [0, 1, 2, 3]}),
        ([op("add", "/items/3", value=4)], {"items": [1, 2, 3, 4]}),
        ([op("add", "/items/-", value=4)], {"items": [1, 2, 3, 4]}),
        ([op("remove", "/items/1")], {"items": [1, 3]}),
        ([op("remove", "/items/-1")], {"items": [1, 2]}),
        ([op("remove", "/data/x"), op("remove", "/data/y")], {"data": {}}),
        ([op("replace", "/items/1", value={"k": 1})], {"items": [1, {"k": 1}, 3]}),
        ([op("replace", "/a~1b/m~0n", value=1)], {"a/b": {"m~n": 1}}),
        ([op("replace", "/~01", value=1)], {"~1": 1}),
        ([op("replace", "/new", value=1)], {"new": 1}),
        ([op("copy", "/items/0", source="/data/x")], {"items": ["1", 1, 2, 3]}),
        ([op("move", "/data/x", source="/data/y")], {"data": {"x": "2"}}),
        ([op("move", "/items/2", source="/items/0")], {"items": [2, 3, 1]}),
        ([op("move", "/data/x", source="/data/x")], {}),
        ([op("test", "/data", value={"y": "2", "x": "1"})], {}),
        ([op("test", "/data/missing", value=None)], {}),
        ([op("test", "/n", value=None)], {}),
        ([op("test", "/items/0", value=1.0)], {}),
    ],
)
def test_operations_change_what_they_name(operations: list[Object], changed: Object) -> None:
    assert json_patch(TARGET, operations) == {**TARGET, **changed}


def test_the_whole_document_can_be_replaced() -> None:
    assert json_patch(TARGET, [op("replace", "", value={"new": 1})]) == {"new": 1}
    assert json_patch(TARGET, [op("add", "", value={"new": 1})]) == {"new": 1}


@pytest.mark.parametrize("operations", [{}, 1, None, "x", [1], [None], [[]], ["add"]])
def test_what_is_no_list_of_operations_is_a_bad_request(operations: object) -> None:
    with pytest.raises(ApiError) as caught:
        json_patch(TARGET, operations)
    assert (caught.value.code, caught.value.reason) == (400, "BadRequest")


@pytest.mark.parametrize(
    ("operation", "why"),
    [
        (op("foo", "/data/x"), "unexpected kind"),
        ({"path": "/data/x"}, "unexpected kind"),
        (op([], "/data/x"), "unexpected kind"),  # type: ignore[arg-type]
        ({"op": "add", "value": 1}, 'needs the string "path"'),
        (op("add", 5, value=1), 'needs the string "path"'),  # type: ignore[arg-type]
        (op("add", "data", value=1), 'must start with "/"'),
        (op("add", "/none/x", value=1), "missing path"),
        (op("add", "/data/x/y", value=1), "missing path"),
        (op("add", "/items/4", value=1), "out of bounds"),
        (op("add", "/items/01", value=1), "no index"),
        (op("add", "/items/x", value=1), "no index"),
        (op("add", "/items/" + "9" * 5000, value=1), "no index"),
        (op("add", "", value=[]), "no object"),
        (op("remove", ""), "cannot be removed"),
        (op("remove", "/data/q"), "missing path"),
        (op("remove", "/items/3"), "out of bounds"),
        (op("remove", "/items/-"), "no index"),
        (op("remove", "/items/-4"), "out of bounds"),
        (op("replace", "/none/q", value=1), "missing path"),
        (op("replace", "/items/3", value=1), "out of bounds"),
        (op("copy", "/data/z"), 'needs the string "from"'),
        (op("copy", "/data/z", source="/q"), "missing path"),
        (op("move", "/data/z", source="/q"), "missing path"),
        (op("move", "/data/z", source="/data"), "into itself"),
        (op("test", "/data/x", value="9"), "failed"),
        (op("test", "/data/x"), "failed"),
        (op("test", "/items/0", value=True), "failed"),
        (op("test", "/items", value=[1, 2]), "failed"),
        (op("test", "/missing", value=1), "missing path"),
        (op("test", "/none/x", value=None), "missing path"),
    ],
)
def test_what_cannot_be_applied_is_invalid(operation: Object, why: str) -> None:
    with pytest.raises(ApiError) as caught:
        json_patch(TARGET, [operation])
    error = caught.value
    assert (error.code, error.reason) == (422, "Invalid")
    assert error.message == "the server rejected our request due to an error in our request"
    assert why in error.details["causes"][0]["message"]


def test_the_number_of_operations_is_bounded() -> None:
    test = op("test", "/data/x", value="1")
    assert json_patch(TARGET, [test] * MAX_OPERATIONS) == TARGET
    with pytest.raises(ApiError) as caught:
        json_patch(TARGET, [test] * (MAX_OPERATIONS + 1))
    assert (caught.value.code, caught.value.reason) == (413, "RequestEntityTooLarge")
    assert caught.value.message == (
        "Request entity too large: The allowed maximum operations in a JSON patch is 10000, "
        "got 10001"
    )


def test_copies_cannot_blow_a_document_up() -> None:
    target = {"a": {"text": "x" * (MAX_COPIED_BYTES // 100)}}
    doubling = [op("copy", f"/a/{i}", source="/a") for i in range(20)]
    with pytest.raises(ApiError) as caught:
        json_patch(target, doubling)
    assert "copies of more than" in caught.value.details["causes"][0]["message"]


@pytest.mark.parametrize(
    "operations",
    [
        [op("add", "/a" * i, value={}) for i in range(1, MAX_DEPTH + 2)],
        # Each move wraps the nest into one more object without naming a long path.
        [
            step
            for _ in range(MAX_COPY_DEPTH + 1)
            for step in (
                op("add", "/new", value={}),
                op("move", "/new/a", source="/a"),
                op("move", "/a", source="/new"),
            )
        ],
    ],
)
def test_operations_cannot_nest_without_bound(operations: list[Object]) -> None:
    with pytest.raises(ApiError) as caught:
        json_patch({"a": {}}, operations)
    assert caught.value.code == 422
    assert "nested too deeply" in caught.value.details["causes"][0]["message"]


# The examples of RFC 7396, appendix A, whose target and patch are objects.
@pytest.mark.parametrize(
    ("target", "patch", "expected"),
    [
        ({"a": "b"}, {"a": "c"}, {"a": "c"}),
        ({"a": "b"}, {"b": "c"}, {"a": "b", "b": "c"}),
        ({"a": "b"}, {"a": None}, {}),
        ({"a": "b", "b": "c"}, {"a": None}, {"b": "c"}),
        ({"a": ["b"]}, {"a": "c"}, {"a": "c"}),
        ({"a": "c"}, {"a": ["b"]}, {"a": ["b"]}),
        ({"a": {"b": "c"}}, {"a": {"b": "d", "c": None}}, {"a": {"b": "d"}}),
        ({"a": [{"b": "c"}]}, {"a": [1]}, {"a": [1]}),
        ({"e": None}, {"a": 1}, {"e": None, "a": 1}),
        ({}, {"a": {"bb": {"ccc": None}}}, {"a": {"bb": {}}}),
        ({"a": 1}, {"a": {"b": 2, "c": None}}, {"a": {"b": 2}}),
        ({}, {"a": [None, {"b": None}]}, {"a": [None, {"b": None}]}),
    ],
)
def test_merge_patch_follows_its_rfc(target: Object, patch: Object, expected: Object) -> None:
    assert merge_patch(target, patch) == expected


@pytest.mark.parametrize("patch", [[], 1, None, "x", True])
def test_a_merge_patch_must_be_an_object(patch: object) -> None:
    with pytest.raises(ApiError) as caught:
        merge_patch({}, patch)
    assert caught.value.code == 400


def difference(old: Object, new: Object) -> Object:
    """The merge patch that leads from one object without nulls to another."""
    patch: Object = dict.fromkeys(old.keys() - new.keys())
    for key, value in new.items():
        before = old.get(key)
        if isinstance(before, dict) and isinstance(value, dict):
            patch[key] = difference(before, value)
        else:
            patch[key] = value
    return patch


def no_nulls(value: Any) -> Any:
    """The value with null fields left out, which a merge patch cannot set."""
    if isinstance(value, dict):
        return {key: no_nulls(item) for key, item in value.items() if item is not None}
    return value


@given(OBJECTS, OBJECTS)
def test_merge_patch_leads_from_any_object_to_any_other(old: Object, new: Object) -> None:
    old, new = no_nulls(old), no_nulls(new)
    assert merge_patch(old, difference(old, new)) == new


def containers(value: Any) -> set[int]:
    """Identities of all dicts and lists in a value."""
    if isinstance(value, dict):
        return {id(value)}.union(*map(containers, value.values()))
    if isinstance(value, list):
        return {id(value)}.union(*map(containers, value))
    return set()


@given(OBJECTS, OBJECTS)
def test_a_patch_changes_nothing_given_and_shares_nothing(target: Object, patch: Object) -> None:
    before = copy.deepcopy((target, patch))
    merged = merge_patch(target, patch)
    operations = [op("add", f"/{key}", value=value) for key, value in patch.items()]
    patched = json_patch(target, operations)
    given_values = containers(target) | containers(patch)
    assert not given_values & (containers(merged) | containers(patched))
    assert (target, patch) == before


@given(VALUES, VALUES)
def test_same_json_tells_booleans_from_numbers(left: Any, right: Any) -> None:
    assert same_json(left, copy.deepcopy(left))
    if same_json(left, right):
        assert repr(sorted_keys(left)) == repr(sorted_keys(right))


def sorted_keys(value: Any) -> Any:
    """The value with its keys in one order."""
    if isinstance(value, dict):
        return {key: sorted_keys(value[key]) for key in sorted(value)}
    return [sorted_keys(item) for item in value] if isinstance(value, list) else value


def test_a_copy_is_bounded_in_depth() -> None:
    nest: Any = 0
    for _ in range(MAX_COPY_DEPTH):
        nest = [nest]
    assert copy_json(nest) == nest
    with pytest.raises(ApiError):
        copy_json([nest])
