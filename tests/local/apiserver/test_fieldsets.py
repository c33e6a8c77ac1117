"""Field sets are sets, differences are complete, and paths read as Kubernetes prints them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tables import cases
from unbroken.local.apiserver.http.status import Object
from unbroken.local.apiserver.schema.schemas import Schema, builtin
from unbroken.local.apiserver.write.fieldsets import (
    FieldSet,
    compare,
    difference,
    field_set,
    intersection,
    is_empty,
    is_field_set,
    leaves,
    paths,
    problems,
    remove,
    union,
    with_structs,
)

POD = builtin("io.k8s.api.core.v1.Pod")
SERVICE = builtin("io.k8s.api.core.v1.Service")
FREE = Schema({"type": "object", "x-kubernetes-preserve-unknown-fields": True}, {})
CUSTOM = Schema(
    {
        "type": "object",
        "properties": {
            "spec": {
                "type": "object",
                "properties": {
                    "size": {"type": "integer"},
                    "names": {
                        "type": "array",
                        "x-kubernetes-list-type": "set",
                        "items": {"type": "string"},
                    },
                    "rules": {
                        "type": "array",
                        "x-kubernetes-list-type": "map",
                        "x-kubernetes-list-map-keys": ["port", "host"],
                        "items": {
                            "type": "object",
                            "properties": {
                                "port": {"type": "integer"},
                                "host": {"type": "string", "default": "any"},
                                "weight": {"type": "integer"},
                            },
                        },
                    },
                    "whole": {"type": "object", "x-kubernetes-map-type": "atomic"},
                    "free": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
                },
            }
        },
    },
    {},
)


def pod(container: Object, **spec: Any) -> Object:
    """A pod of one container `a`."""
    return {"spec": {"containers": [{"name": "a", **container}], **spec}}


# Results of kubectl v1.32 and the real v1.20.2 for such configurations, without the parts that have
# become atomic since.
@pytest.mark.parametrize(
    ("value", "schema", "expected"),
    [
        ({}, POD, {}),
        (pod({"image": "i"}), POD, ['[name="a"]', '[name="a"].image', '[name="a"].name']),
        (
            pod({"ports": [{"containerPort": 80}, {"containerPort": 80, "protocol": "UDP"}]}),
            POD,
            [
                '[name="a"]',
                '[name="a"].name',
                '[name="a"].ports[containerPort=80,protocol="TCP"]',
                '[name="a"].ports[containerPort=80,protocol="UDP"]',
                '[name="a"].ports[containerPort=80,protocol="TCP"].containerPort',
                '[name="a"].ports[containerPort=80,protocol="UDP"].containerPort',
                '[name="a"].ports[containerPort=80,protocol="UDP"].protocol',
            ],
        ),
    ],
)
def test_an_applied_pod_claims_leaves_and_items(
    value: Object, schema: Schema, expected: list[str]
) -> None:
    prefix = ".spec.containers"
    assert paths(field_set(value, schema)) == [prefix + path for path in expected]


@cases
def test_the_schema_says_how_deep_a_claim_goes(spec: Object, expected: FieldSet | None) -> None:
    found = field_set({"spec": spec}, CUSTOM)
    assert found == ({"f:spec": expected} if expected else {})


def test_without_a_schema_maps_are_by_field_and_lists_whole() -> None:
    found = field_set({"spec": {"a": [{"name": "x"}], "b": {"c": 1}}}, FREE)
    assert found == {"f:spec": {".": {}, "f:a": {}, "f:b": {".": {}, "f:c": {}}}}


def test_metadata_is_known_whatever_the_schema() -> None:
    meta = {
        "labels": {"a": "1"},
        "finalizers": ["x"],
        "ownerReferences": [{"uid": "u", "kind": "K"}],
    }
    expected = {
        "f:metadata": {
            "f:labels": {"f:a": {}},
            "f:finalizers": {'v:"x"': {}},
            "f:ownerReferences": {'k:{"uid":"u"}': {}},
        }
    }
    bare = Schema({"type": "object", "properties": {"metadata": {"type": "object"}}}, {})
    for schema in (FREE, CUSTOM, POD, bare):
        assert field_set({"metadata": meta}, schema) == expected


@pytest.mark.parametrize(
    ("value", "schema", "expected"),
    [
        (pod({"image": "i"}), POD, []),
        ({"foo": 1}, POD, [".foo: field not declared in schema"]),
        (pod({"imag": 1}), POD, ['.spec.containers[name="a"].imag: field not declared in schema']),
        ({"spec": {"size": 1, "other": 2}}, CUSTOM, [".spec.other: field not declared in schema"]),
        ({"metadata": {"label": 1}}, CUSTOM, [".metadata.label: field not declared in schema"]),
        ({"spec": {"free": {"any": 1}}}, CUSTOM, []),
        ({"any": {"x": 1}}, FREE, []),
        (
            {"spec": {"names": ["a", "a"]}},
            CUSTOM,
            ['.spec.names: duplicate entries for key [="a"]'],
        ),
        (
            {"spec": {"rules": [{"port": 1}, {"port": 1, "host": "any"}]}},
            CUSTOM,
            ['.spec.rules: duplicate entries for key [host="any",port=1]'],
        ),
        (
            {"spec": {"containers": [{"image": "x"}]}},
            POD,
            [
                (
                    ".spec.containers: element 0: associative list with keys has an element that "
                    'omits all key fields ["name"] '
                    "(and doesn't have default values for any key fields)"
                )
            ],
        ),
    ],
)
def test_an_unusable_configuration_is_told(
    value: Object, schema: Schema, expected: list[str]
) -> None:
    assert problems(value, schema) == expected


def texts(old: Object | None, new: Object, schema: Schema) -> tuple[list[str], ...]:
    """Added, changed and removed paths."""
    found = compare(old, new, schema)
    return paths(found.added), paths(found.changed), paths(found.removed)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ({"size": 1}, {"size": 1}, ([], [], [])),
        ({"size": 1}, {"size": 2}, ([], [".size"], [])),
        ({}, {"size": 1}, ([".size"], [], [])),
        ({"size": 1}, {}, ([], [], [".size"])),
        ({"size": None}, {"size": 1}, ([], [".size"], [])),
        ({"names": ["a", "b"]}, {"names": ["b", "a"]}, ([], [], [])),
        ({"names": ["a"]}, {"names": ["b"]}, (['.names[="b"]'], [], ['.names[="a"]'])),
        ({}, {"names": ["b"]}, ([".names", '.names[="b"]'], [], [])),
        ({"names": ["b"]}, {}, ([], [], [".names", '.names[="b"]'])),
        ({"names": None}, {"names": ["b"]}, (['.names[="b"]'], [], [])),
        ({"names": None}, {"names": []}, ([], [".names"], [])),
        ({"names": ["a"]}, {"names": ["a", "a"]}, (['.names[="a"]'], [], ['.names[="a"]'])),
        ({"names": ["a", "a"]}, {"names": ["a"]}, (['.names[="a"]'], [], ['.names[="a"]'])),
        ({"names": ["a", "a"]}, {"names": ["a", "a"]}, ([], [], [])),
        ({"names": ["a", "a"]}, {"names": ["a"] * 3}, ([], ['.names[="a"]'], [])),
        (
            {"rules": [{"port": 1, "weight": 1}]},
            {"rules": [{"port": 1, "weight": 2}, {"port": 2}]},
            (
                ['.rules[host="any",port=2]', '.rules[host="any",port=2].port'],
                ['.rules[host="any",port=1].weight'],
                [],
            ),
        ),
        ({"whole": {"a": 1}}, {"whole": {"b": 1}}, ([], [".whole"], [])),
        ({"free": {"a": 1}}, {"free": {"b": 1}}, ([".free.b"], [], [".free.a"])),
        ({"free": {"a": {}}}, {"free": {"a": {"b": 1}}}, ([".free.a.b"], [], [])),
        ({"free": {"a": 1}}, {"free": {"a": {"b": 1}}}, ([".free.a.b"], [".free.a"], [])),
        ({"free": {"a": {"b": 1}}}, {"free": {"a": [1]}}, ([], [".free.a"], [".free.a.b"])),
        ({"free": {"a": [{"x": 1}]}}, {"free": {"a": [{"x": 2}]}}, ([], [".free.a"], [])),
    ],
)
def test_differences_by_field(old: Object, new: Object, expected: tuple[list[str], ...]) -> None:
    found = texts({"spec": old}, {"spec": new}, CUSTOM)
    assert found == tuple([f".spec{path}" for path in part] for part in expected)


def test_what_the_server_owns_is_no_difference() -> None:
    old = {"apiVersion": "v1", "kind": "A", "metadata": {"name": "a", "generation": 1}}
    new = {"apiVersion": "v2", "kind": "B", "metadata": {"resourceVersion": "5", "uid": "u"}}
    assert texts(old, new, FREE) == ([], [], [])


def test_structs_of_built_in_kinds_are_not_added_with_their_content() -> None:
    new = pod({}, nodeSelector={"a": "b"})
    added, _, _ = texts(None, new, POD)
    assert added == [
        ".spec.nodeSelector",
        '.spec.containers[name="a"]',
        '.spec.containers[name="a"].name',
    ]
    assert texts(None, {"spec": {"size": 1}}, CUSTOM)[0] == [".spec", ".spec.size"]


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("f:a.b/c", ".a.b/c"),
        ('k:{"port":1,"host":"x"}', '[host="x",port=1]'),
        ('v:"x"', '[="x"]'),
        ("i:3", "[3]"),
        ("k:{", "[{]"),
        ("k:[1]", "[[1]]"),
    ],
)
def test_path_elements_read_as_kubernetes_prints_them(key: str, text: str) -> None:
    assert paths({key: {}}) == [text]


@pytest.mark.parametrize(
    ("fields", "is_usable"),
    [
        ({}, True),
        ({"f:a": {".": {}, 'k:{"a":1}': {}, 'v:"x"': {}, "i:0": {}}}, True),
        ({"a": {}}, False),
        ({"f:a": None}, False),
        ({"f:a": {"f:b": 1}}, False),
        ([], False),
        (None, False),
    ],
)
def test_only_fields_v1_is_a_field_set(fields: object, is_usable: bool) -> None:
    assert is_field_set(fields) is is_usable


def test_a_bottomless_field_set_is_refused() -> None:
    deep: FieldSet = {}
    for _ in range(300):
        deep = {"f:a": deep}
    assert not is_field_set(deep)


# --- Laws -------------------------------------------------------------------------------------

ELEMENTS = st.sampled_from(["f:a", "f:b", 'k:{"name":"x"}', 'v:"y"'])


def from_paths(found: set[tuple[str, ...]]) -> FieldSet:
    """The set of these paths, built one by one."""
    root: FieldSet = {}
    for path in found:
        node = root
        for key in path:
            node = node.setdefault(key, {"none": True})
        node["self"] = True
    return settled(root)


def settled(node: Any) -> FieldSet:
    """`from_paths` after its marks: only a path that is a member and has more below gets `.`."""
    below = {k: settled(v) for k, v in node.items() if k not in ("none", "self")}
    return {".": {}, **below} if below and node.get("self") else below


def to_paths(fields: FieldSet) -> set[tuple[str, ...]]:
    """The paths of a set."""
    found = set()
    for key, node in fields.items():
        if key != ".":
            if not node or "." in node:
                found.add((key,))
            found |= {(key, *path) for path in to_paths(node)}
    return found


PATHS = st.sets(st.lists(ELEMENTS, min_size=1, max_size=3).map(tuple), max_size=8)


@given(PATHS, PATHS)
def test_the_operations_are_those_of_sets(left: set[Any], right: set[Any]) -> None:
    one, two = from_paths(left), from_paths(right)
    assert to_paths(one) == left
    for operation, expected in (
        (union, left | right),
        (difference, left - right),
        (intersection, left & right),
    ):
        found = operation(one, two)
        assert to_paths(found) == expected
        assert found == from_paths(expected)
        assert is_empty(found) is not bool(expected)
    assert (one, two) == (from_paths(left), from_paths(right))


@given(PATHS)
def test_leaves_have_nothing_below(found: set[Any]) -> None:
    expected = {p for p in found if not any(q[: len(p)] == p and q != p for q in found)}
    assert to_paths(leaves(from_paths(found))) == expected


PORTS = st.lists(
    st.fixed_dictionaries(
        {"port": st.integers(1, 2)},
        optional={"protocol": st.sampled_from(["TCP", "UDP"]), "name": st.sampled_from("xy")},
    ),
    max_size=3,
    unique_by=lambda port: (port["port"], port.get("protocol", "TCP")),
)
SERVICES = st.fixed_dictionaries(
    {
        "metadata": st.fixed_dictionaries(
            {}, optional={"labels": st.dictionaries(st.sampled_from("ab"), st.sampled_from("12"))}
        ),
        "spec": st.fixed_dictionaries(
            {},
            optional={"ports": PORTS, "type": st.sampled_from("XY"), "externalIPs": st.just(["1"])},
        ),
    }
)


@given(SERVICES, SERVICES)
def test_differences_turn_around_and_nothing_differs_from_itself(old: Object, new: Object) -> None:
    assert not compare(old, old, SERVICE).written
    there, back = compare(old, new, SERVICE), compare(new, old, SERVICE)
    assert there.added == back.removed
    assert to_paths(there.changed) == to_paths(back.changed)


@given(SERVICES)
def test_removing_all_that_is_claimed_leaves_nothing(value: Object) -> None:
    claimed = with_structs(field_set(value, SERVICE), SERVICE)
    rest = remove(value, claimed, SERVICE)
    assert not field_set(rest, SERVICE)


def test_removal_is_by_path_and_takes_what_it_empties() -> None:
    value = pod({"env": [{"name": "E", "value": "1"}, {"name": "F"}]}, nodeSelector={"a": "b"})
    fields = field_set(pod({"env": [{"name": "E"}]}), POD)
    container = fields["f:spec"]["f:containers"]['k:{"name":"a"}']
    only_e: FieldSet = {
        "f:spec": {"f:containers": {'k:{"name":"a"}': {"f:env": container["f:env"]}}}
    }
    assert remove(value, only_e, POD) == pod({"env": [{"name": "F"}]}, nodeSelector={"a": "b"})
    both = union(only_e, field_set(pod({"env": [{"name": "F"}]}), POD))
    both = difference(both, {"f:spec": {"f:containers": {'k:{"name":"a"}': {"f:name": {}}}}})
    both["f:spec"]["f:containers"]['k:{"name":"a"}'].pop(".", None)
    assert remove(value, both, POD) == pod({}, nodeSelector={"a": "b"})
