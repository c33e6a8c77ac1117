"""Subresources and reviews: scale, binding, eviction, tokens, rights."""

from __future__ import annotations

import base64
import json

import pytest

from tests.apiclient import Answer, Api, Object
from tests.samples import define, definition, open_schema, pod, widget


def scalable(here: Api) -> str:
    """Create a custom resource of two replicas, one of which runs; return its path."""
    group = f"{here.namespace}.example.com"
    paths = {
        "specReplicasPath": ".spec.count",
        "statusReplicasPath": ".status.count",
        "labelSelectorPath": ".status.selector",
    }
    schema = open_schema(count={"type": "integer"})
    schema["properties"]["status"] = {
        "type": "object",
        "properties": {"count": {"type": "integer"}, "selector": {"type": "string"}},
    }
    define(here, definition(group, schema, subresources={"status": {}, "scale": paths}))
    what = f"{group}/v1:widgets/a"
    here.post(f"{group}/v1:widgets", widget(group, "a", spec={"count": 2})).done()
    status = {"status": {"count": 1, "selector": "x=y"}}
    here.patch("merge", f"{what}/status", status).done()
    return what


def test_scale_shows_replicas_and_selector(here: Api) -> None:
    what = scalable(here)
    made = here.get(what).made
    scale = here.get(f"{what}/scale").made
    assert (scale["kind"], scale["apiVersion"]) == ("Scale", "autoscaling/v1")
    assert (scale["spec"], scale["status"]) == ({"replicas": 2}, {"replicas": 1, "selector": "x=y"})
    for field in ("name", "namespace", "uid", "resourceVersion", "creationTimestamp"):
        assert scale["metadata"][field] == made["metadata"][field]


def test_scale_changes_replicas(here: Api) -> None:
    what = scalable(here)
    scale = here.get(f"{what}/scale").made
    scale["spec"]["replicas"] = 5
    assert here.put(f"{what}/scale", scale).made["spec"] == {"replicas": 5}
    found = here.get(what).made
    assert (found["spec"]["count"], found["metadata"]["generation"]) == (5, 2)


def test_scale_can_be_patched(here: Api) -> None:
    what = scalable(here)
    here.patch("merge", f"{what}/scale", {"spec": {"replicas": 0}}).done()
    assert here.get(what).made["spec"]["count"] == 0


def test_scale_on_a_stale_version_is_409(here: Api) -> None:
    what = scalable(here)
    scale = here.get(f"{what}/scale").made
    here.patch("merge", what, {"spec": {"count": 3}}).done()
    assert here.put(f"{what}/scale", scale).failure == (409, "Conflict")


def test_negative_scale_is_refused(here: Api) -> None:
    what = scalable(here)
    answer = here.patch("merge", f"{what}/scale", {"spec": {"replicas": -1}})
    assert answer.failure == (422, "Invalid")
    assert here.get(what).made["spec"]["count"] == 2


def bind(here: Api, node: str) -> Object:
    """Return a binding of pod a."""
    return {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {"name": "a", "annotations": {"x": "y"}},
        "target": {"apiVersion": "v1", "kind": "Node", "name": node},
    }


def test_binding_puts_a_pod_on_a_node(here: Api) -> None:
    here.post("pods", pod("a")).done()
    answer = here.post("pods/a/binding", bind(here, "n1"))
    assert (answer.code, answer.object["status"]) == (201, "Success")
    found = here.get("pods/a").made
    assert found["spec"]["nodeName"] == "n1"
    assert found["metadata"]["annotations"] == {"x": "y"}
    scheduled = {c["type"]: c["status"] for c in found["status"]["conditions"]}
    assert scheduled == {"PodScheduled": "True"}


def test_second_binding_is_409(here: Api) -> None:
    here.post("pods", pod("a")).done()
    here.post("pods/a/binding", bind(here, "n1")).done()
    answer = here.post("pods/a/binding", bind(here, "n2"))
    assert answer.failure == (409, "Conflict")
    assert "pod a is already assigned to node" in answer.message
    assert here.get("pods/a").made["spec"]["nodeName"] == "n1"


@pytest.mark.parametrize("target", [{}, {"kind": "Node"}, {"kind": "Pod", "name": "x"}])
def test_binding_needs_a_node(here: Api, target: Object) -> None:
    here.post("pods", pod("a")).done()
    answer = here.post("pods/a/binding", {**bind(here, "n1"), "target": target})
    if here.cluster.is_real:
        assert answer.code == 500  # kube-apiserver blames itself
    else:
        assert answer.failure in {(400, "BadRequest"), (422, "Invalid")}
    assert "nodeName" not in here.get("pods/a").made["spec"]


def test_binding_of_a_missing_pod_is_404(here: Api) -> None:
    assert here.post("pods/a/binding", bind(here, "n1")).failure == (404, "NotFound")


def eviction(api: Api, **options: object) -> Object:
    """Return an eviction of pod a; v1 came with Kubernetes 1.22 and v1beta1 went with 1.25."""
    version = "v1" if api.minor >= 22 else "v1beta1"
    return {
        "apiVersion": f"policy/{version}",
        "kind": "Eviction",
        "metadata": {"name": "a"},
        **({"deleteOptions": options} if options else {}),
    }


def test_eviction_deletes_a_pod_with_its_grace(here: Api) -> None:
    here.post("pods", pod("a", nodeName="n1")).done()
    answer = here.post("pods/a/eviction", eviction(here))
    assert (answer.code, answer.object["status"]) == (201, "Success")
    assert here.get("pods/a").made["metadata"]["deletionGracePeriodSeconds"] == 30


def test_eviction_takes_options(here: Api) -> None:
    here.post("pods", pod("a", nodeName="n1")).done()
    here.post("pods/a/eviction", eviction(here, gracePeriodSeconds=4)).done()
    assert here.get("pods/a").made["metadata"]["deletionGracePeriodSeconds"] == 4


def test_eviction_of_a_missing_pod_is_404(here: Api) -> None:
    assert here.post("pods/a/eviction", eviction(here)).failure == (404, "NotFound")


def budgets(api: Api) -> str:
    """Return the collection of budgets; v1 came with Kubernetes 1.21."""
    return f"policy/{'v1' if api.minor >= 21 else 'v1beta1'}:poddisruptionbudgets"


def ready_pod(api: Api, name: str) -> None:
    """Create a pod that runs and is ready; evictions of other pods need no budget."""
    api.post("pods", pod(name, nodeName="n1", labels={"app": "x"})).done()
    is_ready = {"type": "Ready", "status": "True"}
    api.patch(
        "merge", f"pods/{name}/status", {"status": {"phase": "Running", "conditions": [is_ready]}}
    ).done()


def budget(api: Api, name: str = "b", **status: int) -> None:
    """Create a budget of the pods, with a status as the controller writes it."""
    spec = {"minAvailable": 1, "selector": {"matchLabels": {"app": "x"}}}
    api.post(budgets(api), {"metadata": {"name": name}, "spec": spec}).done()
    if status:
        counts = {"expectedPods": 1, "currentHealthy": 1, "desiredHealthy": 1, **status}
        whole = {"observedGeneration": 1, **counts}
        api.patch("merge", f"{budgets(api)}/{name}/status", {"status": whole}).done()


def test_an_eviction_is_refused_until_the_budget_is_known(here: Api) -> None:
    ready_pod(here, "a")
    budget(here)
    answer = here.post("pods/a/eviction", eviction(here))
    assert answer.failure == (429, "TooManyRequests")
    assert answer.object["details"]["causes"] == [
        {
            "reason": "DisruptionBudget",
            "message": "The disruption budget b is still being processed by the server.",
        }
    ]


def test_an_eviction_that_the_budget_forbids_says_why(here: Api) -> None:
    ready_pod(here, "a")
    budget(here, disruptionsAllowed=0)
    answer = here.post("pods/a/eviction", eviction(here))
    assert answer.failure == (429, "TooManyRequests")
    text = "Cannot evict pod as it would violate the pod's disruption budget."
    assert answer.message == text
    (cause,) = answer.object["details"]["causes"]
    assert cause["message"] == "The disruption budget b needs 1 healthy pods and has 1 currently"
    assert "deletionTimestamp" not in here.get("pods/a").made["metadata"]


def test_an_eviction_that_is_allowed_is_counted(here: Api) -> None:
    ready_pod(here, "a")
    budget(here, disruptionsAllowed=1)
    here.post("pods/a/eviction", eviction(here)).done()
    assert "deletionTimestamp" in here.get("pods/a").made["metadata"]
    status = here.get(f"{budgets(here)}/b").made["status"]
    assert (status["disruptionsAllowed"], list(status["disruptedPods"])) == (0, ["a"])


def test_a_pod_that_does_not_run_is_evicted_in_spite_of_its_budget(here: Api) -> None:
    here.post("pods", pod("a", nodeName="n1", labels={"app": "x"})).done()
    budget(here, disruptionsAllowed=0)
    here.post("pods/a/eviction", eviction(here)).done()


def test_a_pod_with_two_budgets_cannot_be_evicted(here: Api) -> None:
    ready_pod(here, "a")
    budget(here, "b")
    budget(here, "c")
    answer = here.post("pods/a/eviction", eviction(here))
    assert answer.code == 500
    assert "more than one PodDisruptionBudget" in answer.message


def test_logs_of_a_pod_that_has_no_node_are_empty(here: Api) -> None:
    here.post("pods", pod("a")).done()
    answer = here.get("pods/a/log")
    assert (answer.code // 100, answer.body) == (2, b"")


def claims(token: str) -> Object:
    """Return the claims of a JSON web token."""
    payload = token.split(".")[1]
    decoded: Object = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
    return decoded


def pods_have_none(answer: Answer) -> None:
    """Check that the embedded server refuses tokens, since it has only one user."""
    assert answer.failure == (501, "NotImplemented")
    assert "kubeconfig" in answer.message


def test_token_of_a_service_account(here: Api) -> None:
    here.post("serviceaccounts", {"metadata": {"name": "bot"}}).done()
    request = {"spec": {"audiences": ["here"], "expirationSeconds": 900}}
    answer = here.post("serviceaccounts/bot/token", request)
    if not here.cluster.is_real:
        pods_have_none(answer)
        return
    assert answer.code == 201
    status = answer.object["status"]
    assert status["expirationTimestamp"].endswith("Z")
    assert status["token"].count(".") == 2
    found = claims(status["token"])
    assert found["sub"] == f"system:serviceaccount:{here.namespace}:bot"
    assert found["aud"] == ["here"]
    assert found["exp"] - found["iat"] == 900


def test_token_of_a_missing_service_account_is_404(here: Api) -> None:
    answer = here.post("serviceaccounts/none/token", {"spec": {}})
    if not here.cluster.is_real:
        pods_have_none(answer)
        return
    assert answer.failure == (404, "NotFound")


AUTH = "authentication.k8s.io/v1:tokenreviews"


def test_token_review_of_the_token_in_use(api: Api) -> None:
    answer = api.post(AUTH, {"spec": {"token": api.cluster.token}})
    assert answer.code == 201
    status = answer.object["status"]
    assert status["authenticated"] is True
    assert status["user"]["username"]
    assert "system:masters" in status["user"]["groups"]


def test_token_review_of_another_token(api: Api) -> None:
    status = api.post(AUTH, {"spec": {"token": "other"}}).made["status"]
    assert not status.get("authenticated")


def test_admin_may_do_everything(api: Api) -> None:
    asked = {"verb": "delete", "resource": "pods", "namespace": "default"}
    what = "authorization.k8s.io/v1:selfsubjectaccessreviews"
    answer = api.post(what, {"spec": {"resourceAttributes": asked}})
    assert answer.code == 201
    assert answer.object["status"]["allowed"] is True
    assert answer.object["spec"]["resourceAttributes"] == asked


def test_admin_may_read_every_path(api: Api) -> None:
    what = "authorization.k8s.io/v1:selfsubjectaccessreviews"
    asked = {"nonResourceAttributes": {"path": "/metrics", "verb": "get"}}
    assert api.post(what, {"spec": asked}).made["status"]["allowed"] is True


def test_access_review_needs_a_question(api: Api) -> None:
    what = "authorization.k8s.io/v1:selfsubjectaccessreviews"
    assert api.post(what, {"spec": {}}).failure == (422, "Invalid")


def test_rules_of_the_admin_cover_everything(api: Api) -> None:
    what = "authorization.k8s.io/v1:selfsubjectrulesreviews"
    status = api.post(what, {"spec": {"namespace": "default"}}).made["status"]
    assert {"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"]} in status["resourceRules"]


@pytest.mark.since(28, "SelfSubjectReview v1")
def test_self_review_names_the_user(api: Api) -> None:
    made = api.post("authentication.k8s.io/v1:selfsubjectreviews", {}).made
    assert made["status"]["userInfo"]["username"]


def test_subresource_that_a_kind_has_not_is_404(here: Api) -> None:
    here.post("configmaps", {"metadata": {"name": "a"}}).done()
    assert here.get("configmaps/a/status").code == 404
    assert here.get("configmaps/a/scale").code == 404


@pytest.mark.parametrize("what", ["pods/none/status", "batch/v1:jobs/none/status"])
def test_subresource_of_what_is_missing_is_404(here: Api, what: str) -> None:
    assert here.get(what).failure == (404, "NotFound")
