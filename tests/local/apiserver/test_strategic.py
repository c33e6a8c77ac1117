"""Strategic merge patches give what the real server gives; rows were checked against v1.20.2."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tables import cases
from unbroken.local.apiserver.http.status import ApiError, Object
from unbroken.local.apiserver.schema.schemas import builtin
from unbroken.local.apiserver.write.patch import strategic_merge_patch

CORE = "io.k8s.api.core.v1."
POD, NODE, SERVICE = builtin(CORE + "Pod"), builtin(CORE + "Node"), builtin(CORE + "Service")


def env(*names: str) -> list[Object]:
    """Variables; `a=1` sets a value, `a-` deletes."""
    items = []
    for name in names:
        if name.endswith("-"):
            items.append({"name": name[:-1], "$patch": "delete"})
        else:
            key, _, value = name.partition("=")
            items.append({"name": key, **({"value": value} if value else {})})
    return items


SPEC: Object = {
    "containers": [
        {
            "name": "a",
            "image": "i",
            "env": env("E=1", "F=2", "G=2"),
            "ports": [
                {"containerPort": 80, "protocol": "TCP"},
                {"containerPort": 53, "protocol": "UDP", "name": "dns"},
            ],
        },
        {"name": "b", "image": "i"},
        {"name": "c", "image": "i"},
    ],
    "volumes": [{"name": "v", "emptyDir": {}}, {"name": "w", "emptyDir": {}}],
    "tolerations": [{"key": "t", "operator": "Exists"}],
    "nodeSelector": {"k": "never"},
    "imagePullSecrets": [{"name": "s1"}],
}


def patched(patch: Object) -> Object:
    """SPEC after a patch to a pod's spec."""
    spec: Object = strategic_merge_patch({"spec": SPEC}, {"spec": patch}, POD)["spec"]
    return spec


@cases
def test_containers_merge_by_name(patch: Object, expected: str) -> None:
    found = [f"{c['name']}:{c['image']}" for c in patched(patch)["containers"]]
    assert " ".join(found) == expected


@pytest.mark.parametrize(
    ("patch", "order", "expected"),
    [
        (env("G=3", "H=x", "E-"), None, "F G H"),
        (env("X=1"), env("F", "X", "E"), "F X E G"),
        (env("H=1"), env("G", "H"), "E F G H"),
        # New items take the places of deleted ones in the order that the others keep to.
        (env("E-", "H=1"), env("H", "F"), "G H F"),
        (env("H=0", "E-", "F=8", "I=4"), env("H", "F", "I"), "G H F I"),
        (env("E=6", "H=9", "G-", "I=0"), env("E", "H", "I"), "E F H I"),
        (env("F=4", "I=2", "E-"), env("F", "I"), "F G I"),
    ],
)
def test_items_that_the_patch_does_not_order_keep_their_place(
    patch: list[Object], order: list[Object] | None, expected: str
) -> None:
    ordered = {"$setElementOrder/env": order} if order else {}
    spec = patched({"containers": [{"name": "a", "env": patch, **ordered}]})
    container = next(item for item in spec["containers"] if item["name"] == "a")
    assert " ".join(item["name"] for item in container["env"]) == expected


@cases
def test_other_fields_of_a_pod(patch: Object, changed: Object) -> None:
    expected = {k: v for k, v in {**SPEC, **changed}.items() if v is not None}
    assert patched(patch) == expected


def test_ports_are_found_by_number_alone() -> None:
    spec = patched({"containers": [{"name": "a", "ports": [{"containerPort": 53, "name": "x"}]}]})
    assert spec["containers"][0]["ports"] == [
        {"containerPort": 80, "protocol": "TCP"},
        {"containerPort": 53, "protocol": "UDP", "name": "x"},
    ]


@cases
def test_finalizers_merge_as_a_set(patch: Object, expected: str | None) -> None:
    target = {"metadata": {"finalizers": ["a", "b", "c"]}}
    found = strategic_merge_patch(target, {"metadata": patch}, POD)["metadata"].get("finalizers")
    assert (found and " ".join(found)) == expected


def test_node_taints_are_replaced_and_conditions_merged() -> None:
    node = {
        "spec": {"taints": [{"key": "a", "effect": "NoSchedule"}]},
        "status": {
            "conditions": [
                {"type": "Ready", "status": "True", "reason": "x"},
                {"type": "DiskPressure", "status": "False"},
            ]
        },
    }
    patch = {
        "spec": {"taints": [{"key": "b", "effect": "NoExecute"}]},
        "status": {"conditions": [{"type": "Ready", "status": "False"}]},
    }
    assert strategic_merge_patch(node, patch, NODE) == {
        "spec": {"taints": [{"key": "b", "effect": "NoExecute"}]},
        "status": {
            "conditions": [
                {"type": "Ready", "status": "False", "reason": "x"},
                {"type": "DiskPressure", "status": "False"},
            ]
        },
    }


def test_service_ports_merge_by_port() -> None:
    service = {"spec": {"ports": [{"name": n, "port": p} for n, p in (("x", 80), ("y", 81))]}}
    patch = {
        "spec": {
            "$setElementOrder/ports": [{"port": 90}, {"port": 80}],
            "ports": [{"port": 90, "name": "n"}, {"port": 81, "$patch": "delete"}],
        }
    }
    found = strategic_merge_patch(service, patch, SERVICE)["spec"]["ports"]
    assert found == [{"name": "n", "port": 90}, {"name": "x", "port": 80}]


def test_unmergeable_types_are_replaced() -> None:
    patch = {"spec": {"containers": "x", "nodeSelector": ["y"]}}
    found = strategic_merge_patch({"spec": SPEC}, patch, POD)["spec"]
    assert (found["containers"], found["nodeSelector"]) == ("x", ["y"])


@cases
def test_a_malformed_patch_is_a_bad_request(patch: Any, message: str) -> None:
    target = {"metadata": {"finalizers": ["a"]}, "spec": SPEC}
    with pytest.raises(ApiError) as caught:
        strategic_merge_patch(target, patch, POD)
    assert caught.value.code == 400
    assert message in caught.value.message


NAMES = st.sampled_from("ABCDE")
VARIABLES = st.lists(
    st.fixed_dictionaries({"name": NAMES}, optional={"value": st.sampled_from("123")}),
    unique_by=lambda item: item["name"],
    max_size=5,
)


@given(VARIABLES, VARIABLES, st.sets(NAMES))
def test_a_merged_list_is_the_merge_of_its_items(
    old: list[Object], new: list[Object], gone: set[str]
) -> None:
    new = [item for item in new if item["name"] not in gone]
    patch = [*new, *({"name": name, "$patch": "delete"} for name in sorted(gone))]
    target = {"spec": {"containers": [{"name": "a", "env": old}]}}
    change = {"spec": {"containers": [{"name": "a", "env": patch}]}}
    before = copy.deepcopy((target, change))
    found = strategic_merge_patch(target, change, POD)["spec"]["containers"][0]["env"]
    assert (target, change) == before
    model = {item["name"]: item for item in old if item["name"] not in gone}
    for item in new:
        model[item["name"]] = {**model.get(item["name"], {}), **item}
    assert {item["name"]: item for item in found} == model
    assert len(found) == len(model)
    names = [item["name"] for item in found]
    assert [n for n in names if n in {i["name"] for i in new}] == [i["name"] for i in new]
    untouched = {i["name"] for i in old} - {i["name"] for i in new} - gone
    assert [n for n in names if n in untouched] == [
        i["name"] for i in old if i["name"] in untouched
    ]


@given(VARIABLES, VARIABLES)
def test_an_order_directive_orders_all_that_it_names(old: list[Object], new: list[Object]) -> None:
    order = [{"name": item["name"]} for item in new]
    target = {"spec": {"containers": [{"name": "a", "env": old}]}}
    change = {"spec": {"containers": [{"name": "a", "env": new, "$setElementOrder/env": order}]}}
    found = strategic_merge_patch(target, change, POD)["spec"]["containers"][0]["env"]
    wanted = [item["name"] for item in order]
    assert [item["name"] for item in found if item["name"] in wanted] == wanted
