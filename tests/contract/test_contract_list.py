"""Reading: get, list in pages and at versions, selectors."""

from __future__ import annotations

import pytest

from tests.apiclient import Api, Object
from tests.samples import config_map, pod
from tests.tables import cases

FIVE = ["a", "b", "c", "d", "e"]


def fill(here: Api, names: list[str] = FIVE) -> list[Object]:
    """Create config maps of these names, in this order."""
    return [here.post("configmaps", config_map(name)).made for name in names]


def names(listed: Object) -> list[str]:
    """Return the names of a list's items."""
    return [item["metadata"]["name"] for item in listed["items"]]


def test_missing_object_is_404(here: Api) -> None:
    answer = here.get("configmaps/none")
    assert answer.failure == (404, "NotFound")
    assert answer.message == 'configmaps "none" not found'
    assert answer.object["details"] == {"name": "none", "kind": "configmaps"}


def test_group_is_named_in_a_404(here: Api) -> None:
    answer = here.get("batch/v1:jobs/none")
    assert answer.message == 'jobs.batch "none" not found'
    assert answer.object["details"]["group"] == "batch"


def test_list_of_nothing_has_items(here: Api) -> None:
    found = here.get("configmaps").made
    assert (found["apiVersion"], found["kind"], found["items"]) == ("v1", "ConfigMapList", [])
    assert int(found["metadata"]["resourceVersion"]) > 0


def test_list_of_an_unknown_namespace_is_empty(api: Api) -> None:
    assert api.within("no-such-namespace").get("configmaps").made["items"] == []


def test_items_are_sorted_by_name_and_carry_no_kind(here: Api) -> None:
    fill(here, ["b", "c", "a"])
    found = here.get("configmaps").made
    assert names(found) == ["a", "b", "c"]
    assert "kind" not in found["items"][0]


def test_list_over_namespaces_has_all(here: Api, api: Api) -> None:
    fill(here, ["a"])
    other = f"{here.namespace}-other"
    api.post("namespaces", {"metadata": {"name": other}}).done()
    fill(api.within(other), ["a"])
    found = api.get("configmaps", fieldSelector="metadata.name=a").made["items"]
    assert {here.namespace, other} <= {item["metadata"]["namespace"] for item in found}


def test_pages_join_to_the_whole(here: Api) -> None:
    fill(here)
    first = here.get("configmaps", limit=2).made
    assert (names(first), first["metadata"]["remainingItemCount"]) == (["a", "b"], 3)
    token = first["metadata"]["continue"]
    second = here.get("configmaps", limit=2, **{"continue": token}).made
    assert (names(second), second["metadata"]["remainingItemCount"]) == (["c", "d"], 1)
    token = second["metadata"]["continue"]
    third = here.get("configmaps", limit=2, **{"continue": token}).made
    assert names(third) == ["e"]
    assert "continue" not in third["metadata"]
    assert "remainingItemCount" not in third["metadata"]


def test_limit_of_all_has_no_next_page(here: Api) -> None:
    fill(here)
    metadata = here.get("configmaps", limit=5).made["metadata"]
    assert "continue" not in metadata


def test_later_pages_show_the_state_of_the_first(here: Api) -> None:
    fill(here)
    first = here.get("configmaps", limit=2).made["metadata"]
    here.delete("configmaps/d").done()
    fill(here, ["bb"])
    rest = here.get("configmaps", limit=10, **{"continue": first["continue"]}).made
    assert names(rest) == ["c", "d", "e"]
    assert rest["metadata"]["resourceVersion"] == first["resourceVersion"]


def test_remaining_count_is_unknown_with_a_selector(here: Api) -> None:
    for name in FIVE:
        here.post("pods", pod(name, {"x": "y"})).done()
    metadata = here.get("pods", limit=2, labelSelector="x=y").made["metadata"]
    assert "continue" in metadata
    assert "remainingItemCount" not in metadata


def test_pages_of_a_selection_are_full(here: Api) -> None:
    for name in FIVE:
        here.post("pods", pod(name, {"odd": str(name in "ace")})).done()
    first = here.get("pods", limit=2, labelSelector="odd=True").made
    assert names(first) == ["a", "c"]
    token = first["metadata"]["continue"]
    rest = here.get("pods", limit=2, labelSelector="odd=True", **{"continue": token}).made
    assert names(rest) == ["e"]


def test_bad_continue_is_400(here: Api) -> None:
    answer = here.get("configmaps", limit=2, **{"continue": "!!"})
    assert answer.failure == (400, "BadRequest")


def test_continue_excludes_a_version(here: Api) -> None:
    fill(here)
    token = here.get("configmaps", limit=2).made["metadata"]["continue"]
    version = "5"
    answer = here.get("configmaps", resourceVersion=version, **{"continue": token})
    assert answer.failure == (400, "BadRequest")


def test_version_zero_may_be_any_state(here: Api) -> None:
    fill(here)
    assert here.get("configmaps", resourceVersion=0).code == 200
    assert here.get("configmaps/a", resourceVersion=0).made["metadata"]["name"] == "a"


def test_list_not_older_than_a_version(here: Api) -> None:
    version = fill(here)[-1]["metadata"]["resourceVersion"]
    found = here.get(
        "configmaps", resourceVersion=version, resourceVersionMatch="NotOlderThan"
    ).made
    assert sorted(names(found)) == FIVE  # v1.20 has its cache in no order
    assert int(found["metadata"]["resourceVersion"]) >= int(version)


def test_list_of_an_exact_version_is_the_state_of_then(here: Api) -> None:
    version = fill(here)[2]["metadata"]["resourceVersion"]
    here.delete("configmaps/a").done()
    found = here.get("configmaps", resourceVersion=version, resourceVersionMatch="Exact").made
    assert names(found) == ["a", "b", "c"]
    assert found["metadata"]["resourceVersion"] == version


VERSION_ERRORS = [
    ("match without a version", {"resourceVersionMatch": "Exact"}),
    ("unknown match", {"resourceVersion": "1", "resourceVersionMatch": "Nearly"}),
    ("exact version zero", {"resourceVersion": "0", "resourceVersionMatch": "Exact"}),
]


@pytest.mark.parametrize(
    "query", [row[1] for row in VERSION_ERRORS], ids=[row[0] for row in VERSION_ERRORS]
)
def test_bad_version_match_is_refused(here: Api, query: Object) -> None:
    answer = here.get("configmaps", **query)
    assert answer.failure == (422, "Invalid")
    assert "resourceVersionMatch" in answer.message


def test_version_of_the_future_is_refused(here: Api) -> None:
    made = fill(here)[-1]
    future = int(made["metadata"]["resourceVersion"]) + 1_000_000
    answer = here.get("configmaps", resourceVersion=future, resourceVersionMatch="NotOlderThan")
    assert answer.failure == (504, "Timeout")
    assert "Too large resource version" in answer.message


LABELS: dict[str, dict[str, str]] = {
    "a": {"app": "web", "tier": "front"},
    "b": {"app": "web"},
    "c": {"app": "db", "tier": "back"},
    "d": {},
}


@cases
def test_label_selector(here: Api, selector: str, expected: str | None) -> None:
    for name, labels in LABELS.items():
        body = config_map(name)
        body["metadata"]["labels"] = labels
        here.post("configmaps", body).done()
    answer = here.get("configmaps", labelSelector=selector)
    if expected is None:
        assert answer.failure == (400, "BadRequest")
    else:
        assert names(answer.made) == list(expected)


def test_label_selector_takes_numbers_by_order(here: Api) -> None:
    for size in ("5", "10", "x"):
        body = config_map(f"size-{size}")
        body["metadata"]["labels"] = {"size": size}
        here.post("configmaps", body).done()
    assert names(here.get("configmaps", labelSelector="size>7").made) == ["size-10"]
    assert names(here.get("configmaps", labelSelector="size<7").made) == ["size-5"]


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        ("metadata.name=a", "a"),
        ("metadata.name!=a", "b"),
        ("spec.nodeName=n1", "b"),
        ("spec.nodeName=", "a"),
        ("status.phase=Pending", "ab"),
        ("status.phase!=Pending", ""),
        ("spec.restartPolicy=Never,metadata.name=b", "b"),
        ("spec.schedulerName=default-scheduler", "ab"),
    ],
)
def test_field_selector_of_pods(here: Api, selector: str, expected: str) -> None:
    here.post("pods", pod("a")).done()
    here.post("pods", pod("b", nodeName="n1", restartPolicy="Never")).done()
    assert names(here.get("pods", fieldSelector=selector).made) == list(expected)


@pytest.mark.parametrize(
    ("what", "selector"),
    [("pods", "spec.nothing=a"), ("configmaps", "data.key=x"), ("pods", "metadata.name")],
)
def test_bad_field_selector_is_400(here: Api, what: str, selector: str) -> None:
    assert here.get(what, fieldSelector=selector).failure == (400, "BadRequest")


def test_single_object_needs_no_list_to_be_found_by_name(here: Api) -> None:
    made = fill(here, ["a", "b"])[0]
    found = here.get("configmaps", fieldSelector="metadata.name=a").made
    assert found["items"][0]["metadata"]["uid"] == made["metadata"]["uid"]
