"""Creating objects: what the server adds, and what it refuses."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from tests.apiclient import Api, Object
from tests.samples import config_map, pod
from tests.tables import cases

UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"


def test_server_sets_identity_version_and_time(here: Api) -> None:
    answer = here.post("configmaps", config_map("a", key="value"))
    assert answer.code == 201
    metadata = answer.object["metadata"]
    assert re.fullmatch(UUID, metadata["uid"])
    assert int(metadata["resourceVersion"]) > 0
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", metadata["creationTimestamp"])
    assert metadata["namespace"] == here.namespace
    assert answer.object["data"] == {"key": "value"}
    assert here.get("configmaps/a").made == answer.object


def test_uid_and_time_sent_by_a_client_are_ignored(here: Api) -> None:
    body = config_map("a")
    body["metadata"] |= {"uid": "mine", "creationTimestamp": "2001-01-01T00:00:00Z"}
    metadata = here.post("configmaps", body).made["metadata"]
    assert metadata["uid"] != "mine"
    assert not metadata["creationTimestamp"].startswith("2001")


def test_kind_and_version_may_be_left_out(here: Api) -> None:
    made = here.post("configmaps", {"metadata": {"name": "a"}}).made
    assert (made["apiVersion"], made["kind"]) == ("v1", "ConfigMap")


def test_generate_name_adds_five_characters(here: Api) -> None:
    body = {"metadata": {"generateName": "made-"}}
    first, second = (here.post("configmaps", body).made["metadata"] for _ in range(2))
    assert re.fullmatch(r"made-[a-z0-9]{5}", first["name"])
    assert first["generateName"] == "made-"
    assert first["name"] != second["name"]


def test_second_create_of_a_name_is_409(here: Api) -> None:
    here.post("configmaps", config_map("a")).done()
    answer = here.post("configmaps", config_map("a"))
    assert answer.failure == (409, "AlreadyExists")
    assert answer.message == 'configmaps "a" already exists'
    assert answer.object["details"] == {"name": "a", "kind": "configmaps"}


def test_dry_run_answers_and_stores_nothing(here: Api) -> None:
    answer = here.post("configmaps", config_map("a"), dryRun="All")
    assert (answer.code, answer.object["metadata"]["name"]) == (201, "a")
    assert "resourceVersion" not in answer.object["metadata"]
    assert here.get("configmaps/a").failure == (404, "NotFound")


def test_dry_run_validates(here: Api) -> None:
    assert here.post("configmaps", config_map("A"), dryRun="All").failure == (422, "Invalid")


def test_unknown_dry_run_is_refused(here: Api) -> None:
    assert here.post("configmaps", config_map("a"), dryRun="Some").failure == (422, "Invalid")


def test_yaml_is_taken(here: Api) -> None:
    text = yaml.safe_dump(config_map("a", key="value"))
    assert here.send("POST", "configmaps", text, "application/yaml").made["data"] == {
        "key": "value"
    }


def test_pod_gets_the_defaults_of_kubernetes(here: Api) -> None:
    made = here.post("pods", pod("a")).made
    spec = made["spec"]
    assert spec["restartPolicy"] == "Always"
    assert spec["dnsPolicy"] == "ClusterFirst"
    assert spec["schedulerName"] == "default-scheduler"
    assert spec["terminationGracePeriodSeconds"] == 30
    assert spec["securityContext"] == {}
    assert spec["enableServiceLinks"] is True
    assert (spec["priority"], spec["preemptionPolicy"]) == (0, "PreemptLowerPriority")
    container = spec["containers"][0]
    assert container["imagePullPolicy"] == "Always"
    assert container["terminationMessagePath"] == "/dev/termination-log"
    assert container["terminationMessagePolicy"] == "File"
    assert container["resources"] == {}
    assert made["status"] == {"phase": "Pending", "qosClass": "BestEffort"}


@pytest.mark.parametrize("key", ["not-ready", "unreachable"])
def test_pod_tolerates_a_lost_node_for_five_minutes(here: Api, key: str) -> None:
    tolerations = here.post("pods", pod("a")).made["spec"]["tolerations"]
    assert {
        "key": f"node.kubernetes.io/{key}",
        "operator": "Exists",
        "effect": "NoExecute",
        "tolerationSeconds": 300,
    } in tolerations


@pytest.mark.parametrize(
    ("image", "policy"), [("busybox:1.36", "IfNotPresent"), ("busybox:latest", "Always")]
)
def test_pull_policy_follows_the_tag(here: Api, image: str, policy: str) -> None:
    body = pod("a", containers=[{"name": "main", "image": image}])
    made = here.post("pods", body).made
    assert made["spec"]["containers"][0]["imagePullPolicy"] == policy


@pytest.mark.parametrize(
    ("resources", "quality"),
    [
        ({"limits": {"cpu": "1", "memory": "1Gi"}}, "Guaranteed"),
        ({"requests": {"cpu": "1"}}, "Burstable"),
        ({"limits": {"cpu": "1", "memory": "1Gi"}, "requests": {"cpu": "500m"}}, "Burstable"),
    ],
)
def test_quality_of_service_follows_the_resources(
    here: Api, resources: Object, quality: str
) -> None:
    body = pod("a", containers=[{"name": "main", "image": "x", "resources": resources}])
    made = here.post("pods", body).made
    assert made["status"]["qosClass"] == quality


def test_limits_become_requests(here: Api) -> None:
    resources = {"limits": {"cpu": "1", "nvidia.com/gpu": 2}}
    body = pod("a", containers=[{"name": "main", "image": "x", "resources": resources}])
    found = here.post("pods", body).made["spec"]["containers"][0]["resources"]
    assert found["requests"] == {"cpu": "1", "nvidia.com/gpu": "2"}
    assert found["limits"] == {"cpu": "1", "nvidia.com/gpu": "2"}


def test_status_sent_with_a_create_is_dropped(here: Api) -> None:
    body = {**pod("a"), "status": {"phase": "Running", "podIP": "1.2.3.4"}}
    assert here.post("pods", body).made["status"]["phase"] == "Pending"


NAMES = ["UPPER", "under_score", "-start", "end-", "dot.", "a" * 254, "sp ace", "a/b", "ä", ".."]


@pytest.mark.parametrize("name", NAMES)
def test_bad_name_is_422_at_its_path(here: Api, name: str) -> None:
    answer = here.post("configmaps", config_map(name))
    assert answer.failure == (422, "Invalid")
    assert ("FieldValueInvalid", "metadata.name") in answer.causes
    assert answer.object["details"]["kind"] == "ConfigMap"
    assert here.get("configmaps").made["items"] == []


def test_name_is_required(here: Api) -> None:
    answer = here.post("configmaps", {"metadata": {}})
    assert answer.failure == (422, "Invalid")
    assert answer.causes == {("FieldValueRequired", "metadata.name")}
    assert "name or generateName is required" in answer.message


def container(**fields: Any) -> Object:
    """A pod whose container has `fields`."""
    return pod("a", containers=[{"name": "main", "image": "x", **fields}])


BAD_PODS: list[tuple[str, Object, str, str]] = [
    ("no containers", pod("a", containers=[]), "FieldValueRequired", "spec.containers"),
    ("no image", container(image=""), "FieldValueRequired", "spec.containers[0].image"),
    ("no container name", container(name=""), "FieldValueRequired", "spec.containers[0].name"),
    (
        *("bad container name", container(name="A_b")),
        *("FieldValueInvalid", "spec.containers[0].name"),
    ),
    (
        "two containers of one name",
        pod("a", containers=[{"name": "x", "image": "x"}] * 2),
        *("FieldValueDuplicate", "spec.containers[1].name"),
    ),
    (
        *("bad restart policy", pod("a", restartPolicy="Sometimes")),
        *("FieldValueNotSupported", "spec.restartPolicy"),
    ),
    (
        *("bad pull policy", container(imagePullPolicy="Maybe")),
        *("FieldValueNotSupported", "spec.containers[0].imagePullPolicy"),
    ),
    (
        *("port out of range", container(ports=[{"containerPort": 70000}])),
        *("FieldValueInvalid", "spec.containers[0].ports[0].containerPort"),
    ),
    (
        *("mount without a volume", container(volumeMounts=[{"name": "v", "mountPath": "/v"}])),
        *("FieldValueNotFound", "spec.containers[0].volumeMounts[0].name"),
    ),
    (
        *("bad variable name", container(env=[{"name": "a=b", "value": "x"}])),
        *("FieldValueInvalid", "spec.containers[0].env[0].name"),
    ),
    (
        "request over the limit",
        container(resources={"limits": {"cpu": "1"}, "requests": {"cpu": "2"}}),
        *("FieldValueInvalid", "spec.containers[0].resources.requests"),
    ),
    (
        *("negative quantity", container(resources={"limits": {"cpu": "-1"}})),
        *("FieldValueInvalid", "spec.containers[0].resources.limits[cpu]"),
    ),
    (
        *("bad label value", pod("a", {"ok": "not ok"})),
        *("FieldValueInvalid", "metadata.labels"),
    ),
    (*("bad label key", pod("a", {"/x": "y"})), *("FieldValueInvalid", "metadata.labels")),
    (*("long label", pod("a", {"x": "y" * 64})), *("FieldValueInvalid", "metadata.labels")),
    (
        *("bad node selector", pod("a", nodeSelector={"x": "not ok"})),
        *("FieldValueInvalid", "spec.nodeSelector"),
    ),
    (
        *("bad toleration", pod("a", tolerations=[{"operator": "Is", "key": "x"}])),
        *("FieldValueNotSupported", "spec.tolerations[0].operator"),
    ),
    (
        *("volume of no kind of name", pod("a", volumes=[{"name": "A", "emptyDir": {}}])),
        *("FieldValueInvalid", "spec.volumes[0].name"),
    ),
]


@pytest.mark.parametrize(
    ("body", "reason", "field"), [row[1:] for row in BAD_PODS], ids=[row[0] for row in BAD_PODS]
)
def test_bad_pod_is_422_at_its_path(here: Api, body: Object, reason: str, field: str) -> None:
    answer = here.post("pods", body)
    assert answer.failure == (422, "Invalid")
    assert (reason, field) in answer.causes
    assert here.get("pods").made["items"] == []


def test_every_problem_is_told_at_once(here: Api) -> None:
    body = pod("A", {"x": "not ok"}, containers=[{"name": "main", "image": ""}])
    answer = here.post("pods", body)
    fields = {field for _, field in answer.causes}
    assert {"metadata.name", "metadata.labels", "spec.containers[0].image"} <= fields
    assert answer.message.startswith('Pod "A" is invalid: [')


@cases
def test_bad_object_is_422_at_its_path(here: Api, what: str, body: Object, field: str) -> None:
    answer = here.post(what, body)
    assert answer.failure == (422, "Invalid")
    assert field in {found for _, found in answer.causes}


def test_name_of_a_service_begins_with_a_digit_in_newer_versions_only(here: Api) -> None:
    body = {"metadata": {"name": "1a"}, "spec": {"ports": [{"port": 80}]}}
    answer = here.post("services", body)
    if answer.code == 201:
        assert here.minor >= 34  # RelaxedServiceNameValidation
    else:
        assert answer.failure == (422, "Invalid")
        assert here.minor < 36
        assert "metadata.name" in {found for _, found in answer.causes}


def test_namespace_must_exist(api: Api) -> None:
    answer = api.within("no-such-namespace").post("configmaps", config_map("a"))
    assert answer.failure == (404, "NotFound")
    assert answer.message == 'namespaces "no-such-namespace" not found'


def test_namespace_of_the_body_must_be_that_of_the_path(here: Api) -> None:
    body = config_map("a")
    body["metadata"]["namespace"] = "other"
    answer = here.post("configmaps", body)
    assert answer.failure == (400, "BadRequest")
    assert answer.message == (
        "the namespace of the provided object does not match the namespace sent on the request"
    )


def test_resource_version_may_not_be_set(here: Api) -> None:
    body = config_map("a")
    body["metadata"]["resourceVersion"] = "1"
    answer = here.post("configmaps", body)
    assert answer.code in (400, 500)  # v1.20 answers 500, later ones 400
    assert "resourceVersion should not be set on objects to be created" in answer.message
    assert here.get("configmaps/a").code == 404


@pytest.mark.parametrize(
    ("change", "code"),
    [({"kind": "Secret"}, 400), ({"apiVersion": "v2"}, 400), ({"apiVersion": "apps/v1"}, 400)],
)
def test_wrong_kind_is_400(here: Api, change: Object, code: int) -> None:
    answer = here.post("configmaps", config_map("a") | change)
    assert answer.failure == (code, "BadRequest")
    assert here.get("configmaps").made["items"] == []


def test_media_type_must_be_known(here: Api) -> None:
    answer = here.send("POST", "configmaps", "x", "text/plain")
    assert answer.failure == (415, "UnsupportedMediaType")


def test_accepted_media_type_must_be_known(here: Api) -> None:
    answer = here.send("GET", "configmaps", headers={"Accept": "text/html"})
    assert answer.failure == (406, "NotAcceptable")


def test_unknown_resource_is_404(here: Api) -> None:
    assert here.post("gadgets", {"metadata": {"name": "a"}}).code == 404
    assert here.post("no.such.group/v1:gadgets", {"metadata": {"name": "a"}}).code == 404


@pytest.mark.parametrize(
    ("method", "what"),
    [("POST", "configmaps/a"), ("PUT", "configmaps"), ("PATCH", "configmaps")],
)
def test_verb_that_a_path_has_not_is_405(here: Api, method: str, what: str) -> None:
    assert here.send(method, what, config_map("a")).failure == (405, "MethodNotAllowed")


def test_namespace_is_made_active_with_a_finalizer(api: Api, here: Api) -> None:
    found = api.get(f"namespaces/{here.namespace}").made
    assert found["status"]["phase"] == "Active"
    assert found["spec"]["finalizers"] == ["kubernetes"]


def test_built_in_namespaces_exist(api: Api) -> None:
    for name in ("default", "kube-system", "kube-public", "kube-node-lease"):
        assert api.get(f"namespaces/{name}").made["status"]["phase"] == "Active"
