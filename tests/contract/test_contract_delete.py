"""Deleting: grace, preconditions, finalizers, propagation, whole collections, namespaces."""

from __future__ import annotations

import pytest

from tests.apiclient import Api, Object
from tests.samples import config_map, define, definition, open_schema, pod, widget


def held(here: Api, name: str = "a") -> Object:
    """A config map with a finalizer."""
    body = config_map(name)
    body["metadata"]["finalizers"] = ["example.com/hold"]
    return here.post("configmaps", body).made


def test_delete_answers_with_success_and_what_it_was(here: Api) -> None:
    made = here.post("configmaps", config_map("a")).made
    answer = here.delete("configmaps/a")
    assert answer.code == 200
    status = answer.object
    assert (status["kind"], status["status"]) == ("Status", "Success")
    assert status["details"] == {
        "name": "a",
        "kind": "configmaps",
        "uid": made["metadata"]["uid"],
    }
    assert here.get("configmaps/a").code == 404


def test_second_delete_is_404(here: Api) -> None:
    here.post("configmaps", config_map("a")).done()
    here.delete("configmaps/a").done()
    assert here.delete("configmaps/a").failure == (404, "NotFound")


def test_dry_run_deletes_nothing(here: Api) -> None:
    here.post("configmaps", config_map("a")).done()
    assert here.delete("configmaps/a", dryRun="All").code == 200
    assert here.delete("configmaps/a", {"dryRun": ["All"]}).code == 200
    assert "deletionTimestamp" not in here.get("configmaps/a").made["metadata"]


def test_name_can_be_taken_again_by_another_object(here: Api) -> None:
    first = here.post("configmaps", config_map("a")).made
    here.delete("configmaps/a").done()
    second = here.post("configmaps", config_map("a")).made
    assert first["metadata"]["uid"] != second["metadata"]["uid"]


@pytest.mark.parametrize("field", ["uid", "resourceVersion"])
def test_precondition_that_does_not_hold_is_409(here: Api, field: str) -> None:
    made = here.post("configmaps", config_map("a")).made
    answer = here.delete("configmaps/a", {"preconditions": {field: "1"}})
    assert answer.failure == (409, "Conflict")
    assert "precondition" in answer.message
    good = {"preconditions": {field: made["metadata"][field]}}
    assert here.delete("configmaps/a", good).code == 200


def test_finalizer_holds_the_object(here: Api) -> None:
    made = held(here)
    answer = here.delete("configmaps/a")
    assert (answer.code, answer.object["kind"]) == (200, "ConfigMap")
    metadata = here.get("configmaps/a").made["metadata"]
    assert metadata["deletionTimestamp"]
    assert metadata["deletionGracePeriodSeconds"] == 0
    assert int(metadata["resourceVersion"]) > int(made["metadata"]["resourceVersion"])


def test_second_delete_of_what_is_held_changes_nothing(here: Api) -> None:
    held(here)
    here.delete("configmaps/a").done()
    before = here.get("configmaps/a").made
    assert here.delete("configmaps/a").code == 200
    assert here.get("configmaps/a").made == before


def test_removal_of_the_last_finalizer_ends_the_object(here: Api) -> None:
    held(here)
    here.delete("configmaps/a").done()
    version = here.get("configmaps/a").made["metadata"]["resourceVersion"]
    change = {"metadata": {"finalizers": None}}
    with here.watch("configmaps", resourceVersion=version) as events:
        assert here.patch("merge", "configmaps/a", change).code == 200
        assert events.events(1) == [("DELETED", "a")]
    assert here.get("configmaps/a").code == 404


def test_what_is_going_takes_no_new_finalizer(here: Api) -> None:
    held(here)
    here.delete("configmaps/a").done()
    change = {"metadata": {"finalizers": ["example.com/hold", "example.com/more"]}}
    answer = here.patch("merge", "configmaps/a", change)
    assert answer.failure == (422, "Invalid")
    assert ("FieldValueForbidden", "metadata.finalizers") in answer.causes


def test_pod_without_a_node_goes_at_once(here: Api) -> None:
    here.post("pods", pod("a")).done()
    answer = here.delete("pods/a")
    assert (answer.code, answer.object["kind"]) == (200, "Pod")
    assert here.get("pods/a").code == 404


def test_pod_on_a_node_is_given_its_grace(here: Api) -> None:
    made = here.post("pods", pod("a", nodeName="n1", terminationGracePeriodSeconds=7)).made
    answer = here.delete("pods/a")
    assert (answer.code, answer.object["kind"]) == (200, "Pod")
    metadata = here.get("pods/a").made["metadata"]
    assert metadata["deletionGracePeriodSeconds"] == 7
    assert metadata["deletionTimestamp"] > made["metadata"]["creationTimestamp"]


@pytest.mark.parametrize("body", [True, False], ids=["body", "query"])
def test_grace_can_be_chosen(here: Api, body: bool) -> None:
    here.post("pods", pod("a", nodeName="n1")).done()
    if body:
        here.delete("pods/a", {"gracePeriodSeconds": 3}).done()
    else:
        here.delete("pods/a", gracePeriodSeconds=3).done()
    assert here.get("pods/a").made["metadata"]["deletionGracePeriodSeconds"] == 3


def test_grace_can_be_made_shorter_and_not_longer(here: Api) -> None:
    here.post("pods", pod("a", nodeName="n1")).done()
    found = []
    for seconds in (20, 5, 50):
        here.delete("pods/a", gracePeriodSeconds=seconds).done()
        found.append(here.get("pods/a").made["metadata"]["deletionGracePeriodSeconds"])
    assert found == [20, 5, 5]


def test_grace_of_zero_removes_a_pod_from_the_server(here: Api) -> None:
    here.post("pods", pod("a", nodeName="n1")).done()
    here.delete("pods/a").done()
    assert here.delete("pods/a", gracePeriodSeconds=0).code == 200
    assert here.get("pods/a").code == 404


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
def test_finished_pod_goes_at_once(here: Api, phase: str) -> None:
    here.post("pods", pod("a", nodeName="n1")).done()
    here.patch("merge", "pods/a/status", {"status": {"phase": phase}}).done()
    here.delete("pods/a").done()
    assert here.get("pods/a").code == 404


def test_kubelet_ends_a_pod_only_if_it_is_the_same(here: Api) -> None:
    made = here.post("pods", pod("a", nodeName="n1")).made
    here.delete("pods/a").done()
    here.delete("pods/a", gracePeriodSeconds=0).done()
    here.post("pods", pod("a", nodeName="n1")).done()
    options = {"gracePeriodSeconds": 0, "preconditions": {"uid": made["metadata"]["uid"]}}
    assert here.delete("pods/a", options).failure == (409, "Conflict")


PROPAGATIONS = [
    ("Foreground", ["foregroundDeletion"]),
    ("Orphan", ["orphan"]),
    ("Background", None),
]


@pytest.mark.parametrize(("policy", "finalizers"), PROPAGATIONS)
def test_propagation_policy_becomes_a_finalizer(
    here: Api, policy: str, finalizers: list[str] | None
) -> None:
    here.post("configmaps", config_map("a")).done()
    here.delete("configmaps/a", {"propagationPolicy": policy}).done()
    answer = here.get("configmaps/a")
    if finalizers is None:
        assert answer.code == 404
    else:
        metadata = answer.made["metadata"]
        assert (metadata["finalizers"], "deletionTimestamp" in metadata) == (finalizers, True)


BAD_OPTIONS: list[tuple[str, Object]] = [
    ("unknown policy", {"propagationPolicy": "Sideways"}),
    ("policy and orphans", {"propagationPolicy": "Orphan", "orphanDependents": True}),
    ("unknown dry run", {"dryRun": ["Some"]}),
]


@pytest.mark.parametrize(
    "options", [row[1] for row in BAD_OPTIONS], ids=[row[0] for row in BAD_OPTIONS]
)
def test_bad_options_are_refused(here: Api, options: Object) -> None:
    here.post("configmaps", config_map("a")).done()
    assert here.delete("configmaps/a", options).failure == (422, "Invalid")
    assert here.get("configmaps/a").code == 200


def test_collection_is_deleted_by_selector(here: Api) -> None:
    for name, label in (("a", "x"), ("b", "x"), ("c", "y")):
        body = config_map(name)
        body["metadata"]["labels"] = {"l": label}
        here.post("configmaps", body).done()
    answer = here.delete("configmaps", labelSelector="l=x")
    assert (answer.code, answer.object["kind"]) == (200, "ConfigMapList")
    assert {item["metadata"]["name"] for item in answer.object["items"]} == {"a", "b"}
    assert [i["metadata"]["name"] for i in here.get("configmaps").made["items"]] == ["c"]


def test_collection_is_deleted_by_field(here: Api) -> None:
    for name in "ab":
        here.post("configmaps", config_map(name)).done()
    here.delete("configmaps", fieldSelector="metadata.name=a").done()
    assert [i["metadata"]["name"] for i in here.get("configmaps").made["items"]] == ["b"]


def test_whole_collection_is_deleted(here: Api, api: Api) -> None:
    for name in "abc":
        here.post("configmaps", config_map(name)).done()
    other = f"{here.namespace}-other"
    api.post("namespaces", {"metadata": {"name": other}}).done()
    api.within(other).post("configmaps", config_map("a")).done()
    here.delete("configmaps").done()
    assert here.get("configmaps").made["items"] == []
    assert api.within(other).get("configmaps/a").code == 200


def test_collection_keeps_what_a_finalizer_holds(here: Api) -> None:
    held(here, "a")
    here.post("configmaps", config_map("b")).done()
    here.delete("configmaps").done()
    found = here.get("configmaps").made["items"]
    assert [item["metadata"]["name"] for item in found] == ["a"]
    assert found[0]["metadata"]["deletionTimestamp"]


def test_bad_selector_deletes_nothing(here: Api) -> None:
    here.post("configmaps", config_map("a")).done()
    assert here.delete("configmaps", labelSelector="=x").failure == (400, "BadRequest")
    assert here.get("configmaps/a").code == 200


def test_namespace_is_terminating_and_takes_nothing_new(here: Api, api: Api) -> None:
    here.post("configmaps", config_map("a")).done()
    answer = api.delete(f"namespaces/{here.namespace}")
    assert (answer.code, answer.object["kind"]) == (200, "Namespace")
    found = api.get(f"namespaces/{here.namespace}").made
    assert found["status"]["phase"] == "Terminating"
    assert found["metadata"]["deletionTimestamp"]
    refused = here.post("configmaps", config_map("b"))
    assert refused.failure == (403, "Forbidden")
    assert f"namespace {here.namespace} because it is being terminated" in refused.message
    assert ("NamespaceTerminating", "metadata.namespace") in refused.causes


def test_namespace_is_finalized_through_its_subresource(here: Api, api: Api) -> None:
    path = f"namespaces/{here.namespace}"
    api.delete(path).done()
    found = api.get(path).made
    found["spec"]["finalizers"] = []
    assert api.put(f"{path}/finalize", found).code == 200
    assert api.get(path).code == 404


@pytest.mark.parametrize("name", ["default", "kube-system", "kube-public"])
def test_namespace_that_must_stay_is_not_deleted(api: Api, name: str) -> None:
    answer = api.delete(f"namespaces/{name}")
    assert answer.failure == (403, "Forbidden")
    assert "this namespace may not be deleted" in answer.message


def test_namespaces_are_not_deleted_as_a_collection(api: Api) -> None:
    assert api.delete("namespaces").failure == (405, "MethodNotAllowed")


def test_custom_resource_held_by_a_finalizer(here: Api) -> None:
    group = f"{here.namespace}.example.com"
    define(here, definition(group, open_schema()))
    what = f"{group}/v1:widgets"
    body = widget(group, "a")
    body["metadata"]["finalizers"] = ["example.com/hold"]
    here.post(what, body).done()
    assert here.delete(f"{what}/a").made["metadata"]["deletionTimestamp"]
    assert here.patch("merge", f"{what}/a", {"metadata": {"finalizers": []}}).code == 200
    assert here.get(f"{what}/a").code == 404
