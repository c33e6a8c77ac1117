"""The autoscaler of a RayCluster: its container, its access, and who decides on workers then."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
from lightkube.config.kubeconfig import KubeConfig

from tests.local.ray.test_raycluster import (
    NOW,
    PORTS,
    created,
    deleted,
    group_of,
    head,
    sample,
    seen,
    worker,
)
from unbroken.local.apiserver import access
from unbroken.local.job_programs import ADMISSIONS
from unbroken.local.ray.controller import access_of
from unbroken.local.ray.decisions.pods import pod_name
from unbroken.local.ray.decisions.raycluster import plan
from unbroken.local.ray.decisions.values import ACCESS, Access, ClusterPicture, access_body

Object = dict[str, Any]
AUTOSCALED = {"enableInTreeAutoscaling": True}
GROUP = "workergroup"


def containers(**fields: Any) -> tuple[Object, Object, Object]:
    """The pod of a head that is autoscaled, its Ray container and its autoscaler."""
    (pod,) = created(seen(**AUTOSCALED, **fields))
    ray, autoscaler = pod["spec"]["containers"]
    return pod["spec"], ray, autoscaler


def test_the_autoscaler_runs_beside_ray_with_kuberays_variables() -> None:
    pod, ray, autoscaler = containers()
    assert autoscaler["name"] == "autoscaler"
    assert autoscaler["image"] == ray["image"]
    (words,) = autoscaler["args"]
    named = "--cluster-name $(RAY_CLUSTER_NAME) --cluster-namespace $(RAY_CLUSTER_NAMESPACE)"
    assert f"exec ray kuberay-autoscaler {named} --gcs-address $(UNBROKEN_POD_IP):" in words
    found = {one["name"]: one.get("value") for one in autoscaler["env"]}
    assert {"RAY_HEAD_POD_NAME", "KUBERAY_CRD_VER", "KUBERNETES_SERVICE_HOST"} <= found.keys()
    assert str(found["AUTOSCALER_METRIC_PORT"]) not in ray["args"][0]
    assert "--no-monitor" in ray["args"][0]
    mounted = {mount["mountPath"]: mount["name"] for mount in autoscaler["volumeMounts"]}
    assert mounted.keys() == {ACCESS, "/tmp/ray"}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes[mounted[ACCESS]]["secret"] == {"secretName": "raycluster-kuberay-autoscaler"}
    assert mounted["/tmp/ray"] in volumes


def test_a_head_that_is_not_autoscaled_has_ray_alone() -> None:
    (pod,) = created(seen())
    (ray,) = pod["spec"]["containers"]
    assert "--no-monitor" not in ray["args"][0]


def test_options_replace_and_add_to_the_container() -> None:
    more = {"name": "AUTOSCALER_UPDATE_INTERVAL_S", "value": "1"}
    given = {"image": "other", "resources": {"limits": {"cpu": "1"}}, "env": [more]}
    _, _, found = containers(autoscalerOptions={**given, "idleTimeoutSeconds": 5})
    assert (found["image"], found["resources"]) == ("other", given["resources"])
    assert found["env"][-1] == more
    assert "idleTimeoutSeconds" not in found


@pytest.mark.parametrize(
    "options", [{"env": 7}, {"resources": []}, {"image": {}}, {"volumeMounts": "x"}]
)
def test_options_of_a_wrong_type_are_refused_and_break_nothing(options: Object) -> None:
    given = sample()
    given["spec"] |= {**AUTOSCALED, "autoscalerOptions": options}
    (problem,) = ADMISSIONS["rayclusters.ray.io"](given).problems
    assert problem.path == f"spec.autoscalerOptions.{next(iter(options))}"
    assert "must be" in problem.message
    _, _, found = containers(autoscalerOptions=options)
    assert found["image"] == "rayproject/ray:2.52.0"


def picture(**group: Any) -> ClusterPicture:
    """A RayCluster with a head and three workers, which is autoscaled."""
    found = group_of(seen(**AUTOSCALED), **group)
    pods = [head(), *(worker(found, slot) for slot in range(3))]
    return ClusterPicture(
        *(found.name, found.namespace, found.uid, 1, found.spec, found.status),
        pods=tuple(pods),
        service=found.service,
    )


def test_only_workers_that_the_autoscaler_names_are_deleted() -> None:
    assert deleted(picture(replicas=1)) == []
    name = picture().pods[2].name
    marked = {"workersToDelete": [name]}
    assert deleted(picture(replicas=2, scaleStrategy=marked)) == [name]


def test_the_autoscaler_cannot_leave_the_bounds_of_a_group() -> None:
    assert len(created(picture(replicas=9, maxReplicas=4))) == 1
    found = plan(picture(replicas=0, minReplicas=2, maxReplicas=4), NOW, PORTS).status
    assert found is not None
    counts = ("desiredWorkerReplicas", "minWorkerReplicas", "maxWorkerReplicas")
    assert [found[name] for name in counts] == [2, 2, 4]


def test_a_name_that_is_still_marked_is_given_to_no_new_pod() -> None:
    whole = picture(replicas=3, maxReplicas=4)
    marked = {"workersToDelete": [pod_name(whole, GROUP, 3), pod_name(whole, GROUP, 4)]}
    (made,) = created(picture(replicas=4, maxReplicas=4, scaleStrategy=marked))
    assert made["metadata"]["name"] == pod_name(whole, GROUP, 5)


def test_the_secret_has_the_address_that_users_have(tmp_path: Path) -> None:
    known = access.identity(tmp_path)
    access.write_kubeconfig(tmp_path / "kubeconfig", "https://127.0.0.1:4433", known)
    inner = access.write_kubeconfig(tmp_path / "inner", "http://127.0.0.1:999", known)
    config = KubeConfig.from_file(inner).get()
    assert config is not None
    found = access_of(config)
    assert (found.host, found.port, found.token) == ("127.0.0.1", "4433", known.token)
    body = access_body("ray", "uid", found)
    data = {key: base64.b64decode(value) for key, value in body["data"].items()}
    assert data["ca.crt"].startswith(b"-----BEGIN CERTIFICATE-----")
    assert (data["token"], data["port"]) == (known.token.encode(), b"4433")
    assert body["metadata"]["ownerReferences"][0]["uid"] == "uid"
    (tmp_path / "kubeconfig").unlink()
    assert access_of(config) == Access("127.0.0.1", "999", known.token, "")
