"""Special features of some built-in kinds, and storage and retrieval of all of them."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from tests.apiclient import Answer, Api, Object
from tests.samples import config_map, pod
from tests.tables import cases

SELECTOR: Object = {"matchLabels": {"a": "b"}}
ONCE: Object = {"spec": {**pod("x")["spec"], "restartPolicy": "Never"}}
RULES = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get"]}]
RBAC = "rbac.authorization.k8s.io"
ROLE = {"apiGroup": RBAC, "kind": "Role", "name": "a"}
SUBJECT = [{"kind": "User", "name": "u", "apiGroup": RBAC}]


def life(api: Api, what: str, name: str, fields: Object) -> None:
    """Create, get, list, label, replace and delete an object."""
    made = api.post(what, {"metadata": {"name": name}, **fields}).made
    assert api.get(f"{what}/{name}").made == made
    listed = api.get(what).made
    assert listed["kind"] == made["kind"] + "List"
    assert name in {item["metadata"]["name"] for item in listed["items"]}
    change = {"metadata": {"labels": {"x": "y"}}}
    changed = api.patch("merge", f"{what}/{name}", change).made
    assert changed["metadata"]["labels"]["x"] == "y"
    changed["metadata"]["annotations"] = {"x": "y"}
    assert api.put(f"{what}/{name}", changed).made["metadata"]["annotations"]["x"] == "y"
    assert api.delete(f"{what}/{name}").code == 200
    options = {"metadata": {"finalizers": None}}
    if api.get(f"{what}/{name}").code == 200:  # pv-protection and its like
        api.patch("merge", f"{what}/{name}", options).done()
    assert api.get(f"{what}/{name}").code == 404


@cases
def test_object_of_a_namespace_lives(here: Api, what: str, fields: Object) -> None:
    life(here, what, "a", fields)


@cases
def test_object_of_the_cluster_lives(here: Api, api: Api, what: str, fields: Object) -> None:
    life(api, what, f"{here.namespace}-a", fields)


SLICE: Object = {
    "addressType": "IPv4",
    "endpoints": [{"addresses": ["10.0.0.1"], "conditions": {"ready": True}}],
    "ports": [{"name": "web", "port": 80, "protocol": "TCP"}],
}


def test_endpoint_slice_lives(here: Api) -> None:
    version = "v1" if here.minor >= 21 else "v1beta1"
    life(here, f"discovery.k8s.io/{version}:endpointslices", "a", SLICE)


@pytest.mark.since(21, "PodDisruptionBudget v1")
def test_disruption_budget_lives(here: Api) -> None:
    life(here, "policy/v1:poddisruptionbudgets", "a", {"spec": {"selector": SELECTOR}})


def test_secret_takes_plain_strings(here: Api) -> None:
    body = {"metadata": {"name": "a"}, "stringData": {"p": "word"}, "data": {"q": "MQ=="}}
    made = here.post("secrets", body).made
    assert made["data"] == {"p": base64.b64encode(b"word").decode(), "q": "MQ=="}
    assert "stringData" not in made
    assert made["type"] == "Opaque"


def test_plain_string_wins_over_data(here: Api) -> None:
    body = {"metadata": {"name": "a"}, "stringData": {"p": "new"}, "data": {"p": "MQ=="}}
    assert here.post("secrets", body).made["data"] == {"p": base64.b64encode(b"new").decode()}


def test_secret_data_must_be_base64(here: Api) -> None:
    answer = here.post("secrets", {"metadata": {"name": "a"}, "data": {"p": "not base64!"}})
    assert answer.failure == (400, "BadRequest")
    assert here.get("secrets/a").code == 404


@pytest.mark.parametrize("what", ["secrets", "configmaps"])
def test_immutable_can_still_be_labelled(here: Api, what: str) -> None:
    here.post(what, {"metadata": {"name": "a"}, "immutable": True}).done()
    change = {"metadata": {"labels": {"x": "y"}}}
    assert here.patch("merge", f"{what}/a", change).code == 200


@pytest.mark.only_real("no proxy, so services are headless")
def test_service_gets_an_address_and_defaults(here: Api) -> None:
    body = {"metadata": {"name": "a"}, "spec": {"selector": {"x": "y"}, "ports": [{"port": 80}]}}
    spec = here.post("services", body).made["spec"]
    assert spec["type"] == "ClusterIP"
    assert spec["sessionAffinity"] == "None"
    if here.cluster.is_real:
        assert spec["clusterIP"].count(".") == 3
    else:  # nothing would forward an address: the name stands for its pods
        assert spec["clusterIP"] == "None"
    assert spec["clusterIPs"] == [spec["clusterIP"]]
    assert spec["ports"] == [{"port": 80, "protocol": "TCP", "targetPort": 80}]


@pytest.mark.only_real("no proxy, so services are headless")
def test_services_have_addresses_of_their_own(here: Api) -> None:
    if not here.cluster.is_real:
        pytest.skip("services of the embedded server have no addresses")
    found = set()
    for name in "abc":
        body = {"metadata": {"name": name}, "spec": {"ports": [{"port": 80}]}}
        found.add(here.post("services", body).made["spec"]["clusterIP"])
    assert len(found) == 3


def test_headless_service_has_no_address(here: Api) -> None:
    body = {"metadata": {"name": "a"}, "spec": {"clusterIP": "None", "selector": {"x": "y"}}}
    assert here.post("services", body).made["spec"]["clusterIP"] == "None"


def test_ports_of_a_service_need_names_if_they_are_several(here: Api) -> None:
    body = {"metadata": {"name": "a"}, "spec": {"ports": [{"port": 80}, {"port": 81}]}}
    answer = here.post("services", body)
    assert ("FieldValueRequired", "spec.ports[0].name") in answer.causes


def core_event(here: Api, name: str = "e") -> Object:
    """Return an event of core/v1 about a pod."""
    return {
        "metadata": {"name": name},
        "involvedObject": {"kind": "Pod", "name": "p", "namespace": here.namespace},
        "reason": "Started",
        "message": "it goes",
        "type": "Normal",
        "source": {"component": "kubelet", "host": "n1"},
        "firstTimestamp": "2024-01-01T00:00:00Z",
        "lastTimestamp": "2024-01-01T00:00:05Z",
        "count": 3,
    }


def test_event_is_seen_in_the_newer_group(here: Api) -> None:
    here.post("events", core_event(here)).done()
    found = here.get("events.k8s.io/v1:events/e").made
    assert found["apiVersion"] == "events.k8s.io/v1"
    assert (found["regarding"]["name"], found["note"]) == ("p", "it goes")
    assert found["deprecatedCount"] == 3
    assert found["deprecatedSource"] == {"component": "kubelet", "host": "n1"}
    assert found["deprecatedLastTimestamp"] == "2024-01-01T00:00:05Z"
    assert (found["reason"], found["type"]) == ("Started", "Normal")


def new_event(here: Api) -> Object:
    """Return an event of events.k8s.io/v1 about a pod."""
    return {
        "metadata": {"name": "e"},
        "eventTime": "2024-01-01T00:00:00.123456Z",
        "reportingController": "example.com/me",
        "reportingInstance": "me-1",
        "action": "Start",
        "reason": "Started",
        "type": "Normal",
        "note": "it goes",
        "regarding": {"kind": "Pod", "name": "p", "namespace": here.namespace},
    }


def test_event_of_the_newer_group_is_seen_in_core(here: Api) -> None:
    here.post("events.k8s.io/v1:events", new_event(here)).done()
    found = here.get("events/e").made
    assert found["apiVersion"] == "v1"
    assert (found["involvedObject"]["name"], found["message"]) == ("p", "it goes")
    assert found["eventTime"] == "2024-01-01T00:00:00.123456Z"
    assert found["reportingComponent"] == "example.com/me"
    assert found["reportingInstance"] == "me-1"


@pytest.mark.parametrize("field", ["reportingController", "reportingInstance", "action", "reason"])
def test_event_of_the_newer_group_must_be_complete(here: Api, field: str) -> None:
    body = {key: value for key, value in new_event(here).items() if key != field}
    answer = here.post("events.k8s.io/v1:events", body)
    assert answer.failure == (422, "Invalid")
    assert field in {found for _, found in answer.causes}


def test_event_must_be_in_the_namespace_of_its_object(here: Api) -> None:
    body = core_event(here)
    body["involvedObject"]["namespace"] = "other"
    answer = here.post("events", body)
    assert answer.failure == (422, "Invalid")
    assert ("FieldValueInvalid", "involvedObject.namespace") in answer.causes


@pytest.mark.parametrize(
    "selector",
    [
        *("involvedObject.name=p", "involvedObject.kind=Pod,type=Normal", "reason=Started"),
        *("source=kubelet", "reason!=Other"),
    ],
)
def test_events_are_selected_by_their_object(here: Api, selector: str) -> None:
    here.post("events", core_event(here, "e")).done()
    other = core_event(here, "f") | {"reason": "Other", "type": "Warning"}
    other["involvedObject"] |= {"name": "q", "kind": "Node"}
    other["source"] = {"component": "other"}
    here.post("events", other).done()
    found = here.get("events", fieldSelector=selector).made["items"]
    assert [item["metadata"]["name"] for item in found] == ["e"]


def test_event_stream_shows_both_groups(here: Api) -> None:
    with here.watch("events") as events:
        here.post("events.k8s.io/v1:events", new_event(here)).done()
        event = events.event()
    assert event["object"]["message"] == "it goes"


def test_lease_keeps_microseconds(here: Api) -> None:
    spec = {"holderIdentity": "a", "leaseDurationSeconds": 15}
    time = "2024-01-01T00:00:00.000001Z"
    body = {"metadata": {"name": "a"}, "spec": {**spec, "acquireTime": time}}
    made = here.post("coordination.k8s.io/v1:leases", body).made
    assert made["spec"]["acquireTime"] == time


def test_priority_class_gives_pods_their_priority(here: Api, api: Api) -> None:
    name = f"{here.namespace}-high"
    what = "scheduling.k8s.io/v1:priorityclasses"
    body = {"metadata": {"name": name}, "value": 1000, "preemptionPolicy": "Never"}
    api.post(what, body).done()
    wanted = pod("a", priorityClassName=name)

    def lags(answer: Answer) -> bool:
        return answer.code == 403 and "no PriorityClass with name" in answer.message

    spec = here.settled(lambda: here.post("pods", wanted), lags).made["spec"]
    assert spec["priority"] == 1000


def test_unknown_priority_class_is_refused(here: Api) -> None:
    answer = here.post("pods", pod("a", priorityClassName="none"))
    assert answer.failure == (403, "Forbidden")
    assert "no PriorityClass with name none was found" in answer.message


@pytest.mark.parametrize("field", ["serviceAccountName", "serviceAccount"])
def test_a_service_account_that_does_not_exist_is_refused(here: Api, field: str) -> None:
    if here.cluster.is_real:
        pytest.skip("this API server is started without admission of service accounts")
    answer = here.post("pods", pod("a", **{field: "ghost"}))
    assert answer.failure == (403, "Forbidden")
    account = f"{here.namespace}/ghost"
    said = f'error looking up service account {account}: serviceaccount "ghost" not found'
    assert said in answer.message
    here.post("serviceaccounts", {"metadata": {"name": "ghost"}}).done()

    def lags(answer: Answer) -> bool:
        return answer.code == 403 and said in answer.message

    made = here.settled(lambda: here.post("pods", pod("a", **{field: "ghost"})), lags).made
    assert made["spec"]["serviceAccountName"] == "ghost"


@pytest.mark.parametrize("name", ["system-node-critical", "system-cluster-critical"])
def test_system_priority_classes_exist(api: Api, name: str) -> None:
    assert api.get(f"scheduling.k8s.io/v1:priorityclasses/{name}").made["value"] >= 2_000_000_000


def test_value_of_a_priority_class_stays(here: Api, api: Api) -> None:
    what = "scheduling.k8s.io/v1:priorityclasses"
    name = f"{here.namespace}-stays"
    api.post(what, {"metadata": {"name": name}, "value": 1}).done()
    assert api.patch("merge", f"{what}/{name}", {"value": 2}).failure == (422, "Invalid")


def test_rbac_names_may_have_colons(here: Api, api: Api) -> None:
    name = f"system:{here.namespace}:x"
    life(api, f"{RBAC}/v1:clusterroles", name, {"rules": RULES})


def test_role_of_a_binding_stays(here: Api) -> None:
    what = f"{RBAC}/v1:rolebindings"
    here.post(what, {"metadata": {"name": "a"}, "roleRef": ROLE, "subjects": SUBJECT}).done()
    answer = here.patch("merge", f"{what}/a", {"roleRef": {"name": "b"}})
    assert ("FieldValueInvalid", "roleRef") in answer.causes


def test_admin_role_exists(api: Api) -> None:
    found = api.get(f"{RBAC}/v1:clusterroles/cluster-admin").made
    assert {"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]} in found["rules"]


def test_claim_starts_pending(here: Api) -> None:
    spec = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    made = here.post("persistentvolumeclaims", {"metadata": {"name": "a"}, "spec": spec}).made
    assert made["status"] == {"phase": "Pending"}
    assert made["spec"]["volumeMode"] == "Filesystem"


def test_job_is_told_apart_by_its_uid(here: Api) -> None:
    made = here.post("batch/v1:jobs", {"metadata": {"name": "a"}, "spec": {"template": ONCE}}).made
    uid = made["metadata"]["uid"]
    key = "batch.kubernetes.io/controller-uid" if here.minor >= 27 else "controller-uid"
    assert made["spec"]["selector"]["matchLabels"] == {key: uid}
    labels = made["spec"]["template"]["metadata"]["labels"]
    assert (labels["controller-uid"], labels["job-name"]) == (uid, "a")
    assert (made["spec"]["parallelism"], made["spec"]["completions"]) == (1, 1)
    assert made["spec"]["backoffLimit"] == 6


def test_node_gets_its_label_and_no_pod_range(here: Api, api: Api) -> None:
    name = f"{here.namespace}-n"
    body = {"metadata": {"name": name}, "status": {"capacity": {"cpu": "8", "memory": "1Gi"}}}
    made = api.post("nodes", body).made
    assert made["status"]["capacity"] == {"cpu": "8", "memory": "1Gi"}
    assert made["status"]["allocatable"] == {"cpu": "8", "memory": "1Gi"}


QUANTITIES: list[tuple[Any, str]] = [
    ("1000m", "1"),
    ("0.5", "500m"),
    (2, "2"),
    ("1024Mi", "1Gi"),
    ("1e3", "1e3"),
    ("1500m", "1500m"),
]


@pytest.mark.parametrize(("given", "kept"), QUANTITIES)
def test_quantity_is_kept_in_one_spelling(here: Api, given: object, kept: str) -> None:
    resources = {"limits": {"memory": given}}
    body = pod("a", containers=[{"name": "main", "image": "x", "resources": resources}])
    made = here.post("pods", body).made
    assert made["spec"]["containers"][0]["resources"]["limits"]["memory"] == kept


def test_object_of_one_group_is_not_in_another(here: Api) -> None:
    here.post("pods", pod("a")).done()
    assert here.get("batch/v1:pods/a").code == 404
    here.post("configmaps", config_map("a")).done()
    assert here.get("secrets/a").code == 404
