"""Pods, service and status that a RayCluster gets, by KubeRay's samples and test cases."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import yaml

from tests.job_samples import MANIFESTS
from unbroken.local.ray.decisions.pods import gcs_port, pod_name, start_command
from unbroken.local.ray.decisions.raycluster import expected_workers, plan
from unbroken.local.ray.decisions.values import ClusterPicture, Create, DeletePod, RayPod

Object = dict[str, Any]
NOW = 1_000_000.0
PORT = 34567
PORTS = range(PORT, PORT + 100)
GROUP = "workergroup"


def sample(name: str = "sample") -> Object:
    """Return one of KubeRay's samples; others may follow it in its file."""
    found: Object = next(yaml.safe_load_all((MANIFESTS / f"raycluster-{name}.yaml").read_text()))
    return found


def seen(
    cluster: Object | None = None, *, has_service: bool = True, **fields: Any
) -> ClusterPicture:
    """Return the picture of a RayCluster; `fields` replace fields of its spec."""
    given = cluster or sample()
    picture = ClusterPicture(
        *(given["metadata"]["name"], "default", "uid", 1),
        spec={**given["spec"], **fields},
        status={},
    )
    return with_service(picture) if has_service else picture


def with_service(picture: ClusterPicture) -> ClusterPicture:
    """Return the picture once its service exists."""
    (order,) = plan(picture, NOW, PORTS).orders
    assert isinstance(order, Create)
    return replace(picture, service=order.body)


def head(**fields: Any) -> RayPod:
    """Return a head that is ready."""
    ready: Object = {"address": "127.64.0.2", "phase": "Running", "is_ready": True, **fields}
    return RayPod("raycluster-kuberay-head-x", "head-uid", "head", "headgroup", **ready)


def worker(picture: ClusterPicture, slot: int, **fields: Any) -> RayPod:
    """Return a worker that has joined the head."""
    name = pod_name(picture, GROUP, slot)
    ready: Object = {"phase": "Running", "is_ready": True, "head_uid": "head-uid", **fields}
    return RayPod(name, f"uid-{slot}", "worker", GROUP, f"127.64.1.{slot + 2}", **ready)


def group_of(picture: ClusterPicture, **fields: Any) -> ClusterPicture:
    """Return the picture with other fields of its worker group."""
    (group,) = picture.spec["workerGroupSpecs"]
    return replace(picture, spec={**picture.spec, "workerGroupSpecs": [{**group, **fields}]})


def created(picture: ClusterPicture) -> list[Object]:
    """Return the objects that a plan creates."""
    orders = plan(picture, NOW, PORTS).orders
    return [dict(one.body) for one in orders if isinstance(one, Create)]


def deleted(picture: ClusterPicture) -> list[str]:
    """Return the names of the pods that a plan deletes."""
    orders = plan(picture, NOW, PORTS).orders
    return [one.name for one in orders if isinstance(one, DeletePod)]


def variables(pod: Object) -> Object:
    """Return the variables of the Ray container that have plain values."""
    env = pod["spec"]["containers"][0]["env"]
    return {one["name"]: one["value"] for one in env if "value" in one}


# --- the order of things


def test_the_service_comes_first_and_keeps_the_port_of_the_gcs() -> None:
    (service,) = created(seen(has_service=False))
    assert service["metadata"]["name"] == "raycluster-kuberay-head-svc"
    ports = {one["name"]: (one["port"], one["targetPort"]) for one in service["spec"]["ports"]}
    assert ports == {
        "gcs-server": (6379, PORT),
        "dashboard": (8265, 8265),
        "client": (10001, 10001),
    }
    assert gcs_port(service) == PORT
    (pod,) = created(seen())
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()


def test_a_port_that_the_spec_names_is_kept() -> None:
    given = sample()
    given["spec"]["headGroupSpec"]["rayStartParams"] = {"port": "6380"}
    picture = seen(given)
    assert picture.service is not None
    assert gcs_port(picture.service) == 6380
    assert "--port=6380" in created(picture)[0]["spec"]["containers"][0]["args"][0]


@pytest.mark.parametrize("pod", [None, head(is_ready=False), head(is_leaving=True)])
def test_workers_wait_for_a_head_that_is_ready(pod: RayPod | None) -> None:
    picture = replace(seen(), pods=(pod,) if pod else ())
    labels = [one["metadata"]["labels"]["ray.io/node-type"] for one in created(picture)]
    assert labels == ([] if pod else ["head"])


def test_workers_are_made_up_to_the_number_of_replicas() -> None:
    picture = group_of(replace(seen(), pods=(head(),)), replicas=3)
    names = [one["metadata"]["name"] for one in created(picture)]
    assert names == [pod_name(picture, GROUP, slot) for slot in range(3)]
    there = replace(picture, pods=(head(), worker(picture, 1)))
    assert [one["metadata"]["name"] for one in created(there)] == [names[0], names[2]]


@pytest.mark.parametrize(
    ("group", "number"),
    [
        ({"replicas": 3, "minReplicas": 0, "maxReplicas": 5}, 3),
        ({"minReplicas": 2, "maxReplicas": 5}, 2),
        ({"replicas": 1, "minReplicas": 2, "maxReplicas": 5}, 2),
        ({"replicas": 9, "minReplicas": 0, "maxReplicas": 5}, 5),
        ({"replicas": 2, "numOfHosts": 4}, 8),
        ({"replicas": 2, "numOfHosts": 0}, 2),
        ({"replicas": 3, "suspend": True}, 0),
    ],
)
def test_replicas_stay_between_their_bounds(group: Object, number: int) -> None:
    assert expected_workers(group) == number


def test_no_two_pods_have_an_agent_at_one_port() -> None:
    picture = group_of(replace(seen(), pods=(head(),)), replicas=3)
    bodies = [*created(seen()), *created(picture)]
    assert len(bodies) == 4
    for pod in bodies:
        (container,) = pod["spec"]["containers"]
        port = container["livenessProbe"]["httpGet"]["port"]
        assert f"--dashboard-agent-listen-port={port} " in container["args"][0]
    workers = [one["spec"]["containers"][0]["livenessProbe"]["httpGet"] for one in bodies[1:]]
    assert len({one["port"] for one in workers}) == 3
    few = plan(picture, NOW, PORTS[:2]).orders
    assert len(few) == 2


# --- what is deleted


def test_the_last_workers_go_first_when_there_are_too_many() -> None:
    picture = group_of(seen(), replicas=1)
    pods = (head(), *(worker(picture, slot) for slot in range(3)))
    assert sorted(deleted(replace(picture, pods=pods))) == sorted([pods[2].name, pods[3].name])


def test_workers_that_the_autoscaler_names_go_and_no_other_takes_their_place() -> None:
    picture = seen()
    pods = (head(), worker(picture, 0), worker(picture, 1))
    named = group_of(
        replace(picture, pods=pods),
        replicas=1,
        scaleStrategy={"workersToDelete": [pods[1].name]},
    )
    assert deleted(named) == [pods[1].name]
    assert created(named) == []


@pytest.mark.parametrize(
    ("start", "end", "named"), [(4, 2, 2), (4, 1, 1), (3, 2, 1), (3, 3, 1), (4, 3, 2), (2, 0, 1)]
)
@pytest.mark.parametrize("is_last", [False, True])
def test_named_workers_go_and_no_others_until_the_number_is_right(
    start: int, end: int, named: int, is_last: bool
) -> None:
    picture = replace(seen(), pods=(head(), *(worker(seen(), slot) for slot in range(start))))
    before = {pod.name for pod in picture.pods[1:]}
    names = sorted(before, reverse=is_last)[:named]
    marks = {"workersToDelete": names}
    picture = group_of(picture, replicas=end, minReplicas=0, scaleStrategy=marks)
    new, gone = 0, set[str]()
    for _ in range(6):
        # Pods leave slowly: each is seen twice while it leaves.
        leaving = {pod.name for pod in picture.pods if pod.is_leaving}
        orders = deleted(picture)
        assert not leaving & set(orders)
        new += len(created(picture))
        gone |= set(orders)
        pods = [
            replace(pod, is_leaving=pod.is_leaving or pod.name in orders) for pod in picture.pods
        ]
        known = {pod.name for pod in pods}
        pods += [
            replace(worker(picture, 0), name=body["metadata"]["name"])
            for body in created(picture)
            if body["metadata"]["name"] not in known
        ]
        picture = replace(picture, pods=tuple(pods))
        assert not leaving or deleted(picture) == [], "nothing more goes while they leave"
        picture = replace(picture, pods=tuple(p for p in pods if p.name not in leaving))
    assert set(names) <= gone
    assert len(gone) == max(named, start - end)
    assert new == max(end - (start - named), 0)
    assert len(picture.workers(GROUP)) == end


def test_a_worker_that_a_user_deletes_takes_no_other_with_it() -> None:
    picture = group_of(seen(), replicas=3)
    pods = [head(), *(worker(picture, slot) for slot in range(4))]
    pods[1] = replace(pods[1], is_leaving=True)
    assert deleted(replace(picture, pods=tuple(pods))) == []


@pytest.mark.parametrize(
    ("fields", "goes"),
    [
        ({"phase": "Failed"}, True),
        ({"phase": "Succeeded"}, True),
        ({"exit_code": 1, "restart_policy": "Never"}, True),
        ({"exit_code": 1, "restart_policy": "Always"}, False),
        ({"head_uid": "of a head before"}, True),
        ({"phase": "Failed", "is_leaving": True}, False),
        ({"is_ready": False}, False),
    ],
)
def test_a_worker_that_cannot_come_back_is_replaced(fields: Object, goes: bool) -> None:
    picture = seen()
    pods = (head(), worker(picture, 0, **fields))
    assert bool(deleted(replace(picture, pods=pods))) is goes
    # A pod of the same name is created when the old one is gone, and not before.
    assert created(replace(picture, pods=pods)) == []


@pytest.mark.parametrize(
    ("fields", "goes"),
    [
        ({"phase": "Failed"}, True),
        ({"exit_code": 1, "restart_policy": "Never"}, True),
        ({"exit_code": 1}, False),
        ({"is_ready": False}, False),
    ],
)
def test_a_head_that_has_ended_is_replaced(fields: Object, goes: bool) -> None:
    picture = replace(seen(), pods=(head(**fields),))
    assert bool(deleted(picture)) is goes


def test_a_suspended_cluster_loses_all_pods_and_a_suspended_group_its_own() -> None:
    picture = seen()
    pods = (head(), worker(picture, 0))
    whole = replace(picture, pods=pods, spec={**picture.spec, "suspend": True})
    assert deleted(whole) == [pods[0].name, pods[1].name]
    assert created(replace(whole, pods=())) == []
    assert deleted(group_of(replace(picture, pods=pods), suspend=True)) == [pods[1].name]


def test_a_cluster_that_is_being_deleted_is_left_alone() -> None:
    assert plan(replace(seen(), is_leaving=True), NOW, PORTS) == plan(
        replace(seen(), is_leaving=True, pods=(head(phase="Failed"),)), NOW, PORTS
    )


# --- pods


def test_labels_and_variables_are_those_of_kuberay() -> None:
    picture = seen()
    (first,) = created(picture)
    (second,) = created(replace(picture, pods=(head(),)))
    for pod, node_type, group in ((first, "head", "headgroup"), (second, "worker", GROUP)):
        labels = pod["metadata"]["labels"]
        assert labels["ray.io/cluster"] == "raycluster-kuberay"
        assert (labels["ray.io/node-type"], labels["ray.io/group"]) == (node_type, group)
        assert labels["ray.io/identifier"] == f"raycluster-kuberay-{node_type}"
        assert labels["ray.io/is-ray-node"] == "yes"
        (owner,) = pod["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["uid"]) == ("RayCluster", "uid")
    assert variables(first)["RAY_ADDRESS"] == f"$(UNBROKEN_POD_IP):{PORT}"
    joined = variables(second)
    assert joined["RAY_ADDRESS"] == f"127.64.0.2:{PORT}"
    assert joined["FQ_RAY_IP"] == "raycluster-kuberay-head-svc.default.svc.cluster.local"
    (alias,) = second["spec"]["hostAliases"]
    assert alias["ip"] == "127.64.0.2"
    assert joined["FQ_RAY_IP"] in alias["hostnames"]


def test_labels_that_select_pods_cannot_be_overruled() -> None:
    given = sample()
    template = given["spec"]["headGroupSpec"]["template"]
    template["metadata"] = {"labels": {"ray.io/cluster": "other", "team": "a"}}
    (pod,) = created(seen(given))
    labels = pod["metadata"]["labels"]
    assert (labels["ray.io/cluster"], labels["team"]) == ("raycluster-kuberay", "a")


@pytest.mark.parametrize(
    ("parameters", "resources", "has", "lacks"),
    [
        ({}, {"limits": {"cpu": "1500m", "memory": "1Gi"}}, "--num-cpus=2 ", "--num-gpus"),
        ({}, {"requests": {"cpu": "3"}}, "--num-cpus=3", "--memory"),
        ({"num-cpus": "0"}, {"limits": {"cpu": "8"}}, "--num-cpus=0", "--num-cpus=8"),
        ({}, {"limits": {"nvidia.com/gpu": "4"}}, "--num-gpus=4", "--num-cpus"),
        ({"num-gpus": "8"}, {"limits": {"nvidia.com/gpu": "4"}}, "--num-gpus=8", "--num-gpus=4"),
        ({"include-dashboard": "true"}, {}, "--include-dashboard=true", "--memory"),
        ({"no-monitor": "True"}, {}, "--no-monitor", "=True"),
        ({"no-monitor": "false"}, {}, "--block", "no-monitor"),
        ({"metrics-export-port": "8080"}, {}, "--block", "8080"),
        ({"node-ip-address": "1.2.3.4"}, {}, "--node-ip-address=$(UNBROKEN_POD_IP)", "1.2.3.4"),
        ({}, {"limits": {"memory": "1Gi"}}, "--object-store-memory=322122547", "--num-cpus"),
        ({}, {"limits": {"memory": "100Mi"}}, "--object-store-memory=83886080", "--num-cpus"),
    ],
)
def test_ray_is_started_with(parameters: Object, resources: Object, has: str, lacks: str) -> None:
    text = start_command(parameters, resources)
    assert has in text
    assert lacks not in text


@pytest.mark.parametrize(
    ("container", "annotations", "text"),
    [
        ({}, {}, "ulimit -n 65536; exec ray start"),
        ({"command": ["echo"], "args": ["a"]}, {}, "echo a && ulimit -n 65536; exec ray start"),
        ({"command": ["bash", "-c", "ray start --head"]}, {}, "bash -c ray start --head"),
        ({"command": ["./own.sh"]}, {"ray.io/overwrite-container-cmd": "true"}, "./own.sh"),
    ],
)
def test_a_command_of_its_own_runs_before_ray(
    container: Object, annotations: Object, text: str
) -> None:
    given = sample()
    template = given["spec"]["headGroupSpec"]["template"]
    template["spec"]["containers"][0] |= container
    template["metadata"] = {"annotations": annotations}
    (pod,) = created(seen(given))
    made = pod["spec"]["containers"][0]
    words = [*made["command"], *made.get("args", ())]
    assert " ".join(words).removeprefix("/bin/bash -c -- ").startswith(text)


@pytest.mark.parametrize(
    ("command", "stays"),
    [
        (["/bin/sh", "-c", "ray stop"], False),
        (["ray", "stop"], False),
        (["/bin/sh", "-c", "sync"], True),
    ],
)
def test_a_hook_that_would_stop_the_ray_of_all_pods_is_left_out(
    command: list[str], stays: bool
) -> None:
    given = sample()
    (container,) = given["spec"]["headGroupSpec"]["template"]["spec"]["containers"]
    container["lifecycle"] = {"preStop": {"exec": {"command": command}}}
    (pod,) = created(seen(given))
    assert bool(pod["spec"]["containers"][0]["lifecycle"]) is stays


@pytest.mark.parametrize(("name", "volume"), [("sample", "ray-tmp"), ("complete", "ray-logs")])
def test_each_pod_has_a_folder_of_its_own_for_ray(name: str, volume: str) -> None:
    (pod,) = created(seen(sample(name)))
    mounts = {one["mountPath"]: one["name"] for one in pod["spec"]["containers"][0]["volumeMounts"]}
    assert mounts["/tmp/ray"] == volume
    assert mounts["/dev/shm"] == "shared-mem"
    volumes = [one["name"] for one in pod["spec"]["volumes"]]
    assert sorted(volumes) == sorted({volume, "shared-mem"})


# --- status


def status(picture: ClusterPicture) -> Object:
    """Return the status that a plan writes."""
    found = plan(picture, NOW, PORTS).status
    assert found is not None
    return dict(found)


def conditions(found: Object) -> dict[str, tuple[str, str]]:
    """Return status and reason by type."""
    return {one["type"]: (one["status"], one["reason"]) for one in found["conditions"]}


def test_a_cluster_is_ready_when_all_its_pods_are() -> None:
    picture = seen()
    alone = status(replace(picture, pods=(head(),)))
    assert "state" not in alone or alone["state"] is None
    assert conditions(alone)["RayClusterProvisioned"] == ("False", "RayClusterPodsProvisioning")
    assert conditions(alone)["HeadPodReady"] == ("True", "HeadPodRunningAndReady")
    whole = status(replace(picture, pods=(head(), worker(picture, 0))))
    assert whole["state"] == "ready"
    assert conditions(whole)["RayClusterProvisioned"][1] == "AllPodRunningAndReadyFirstTime"
    wanted = {"desiredWorkerReplicas": 1, "availableWorkerReplicas": 1, "readyWorkerReplicas": 1}
    wanted |= {"minWorkerReplicas": 1, "maxWorkerReplicas": 5, "desiredCPU": "2"}
    assert (wanted | {"desiredMemory": "6Gi", "desiredGPU": "0"}).items() <= whole.items()
    assert whole["head"] == {
        "podIP": "127.64.0.2",
        "podName": "raycluster-kuberay-head-x",
        "serviceIP": "127.64.0.2",
        "serviceName": "raycluster-kuberay-head-svc",
    }
    assert whole["endpoints"]["gcs-server"] == str(PORT)


def test_a_status_is_written_once() -> None:
    picture = replace(seen(), pods=(head(),))
    again = replace(picture, status=json.loads(json.dumps(status(picture))))
    assert plan(again, NOW + 5, PORTS).status is None


def test_a_cluster_that_was_ready_stays_so_until_it_is_suspended() -> None:
    picture = seen()
    before = status(replace(picture, pods=(head(), worker(picture, 0))))
    lost = status(replace(picture, status=before))
    assert lost["state"] == "ready"
    assert conditions(lost)["HeadPodReady"] == ("False", "HeadPodNotFound")
    assert conditions(lost)["RayClusterProvisioned"][0] == "True"
    assert "podIP" not in lost["head"]
    asleep = replace(picture, status=before, spec={**picture.spec, "suspend": True})
    going = status(replace(asleep, pods=(head(),)))
    assert conditions(going)["RayClusterSuspending"][0] == "True"
    gone = status(asleep)
    assert gone["state"] == "suspended"
    assert conditions(gone)["RayClusterSuspended"][0] == "True"
    assert conditions(gone)["RayClusterSuspending"][0] == "False"
    assert conditions(gone)["RayClusterProvisioned"][0] == "False"
    assert sorted(gone["stateTransitionTimes"]) == ["ready", "suspended"]


def test_gpus_are_counted() -> None:
    given = sample()
    (group,) = given["spec"]["workerGroupSpecs"]
    group["replicas"] = 3
    resources = group["template"]["spec"]["containers"][0]["resources"]
    resources["limits"]["nvidia.com/gpu"] = 8
    assert status(seen(given))["desiredGPU"] == "24"


# --- Ray's token


def access(pod: Object) -> list[Object]:
    """Return the variables by which the containers of a pod find the token."""
    env = [one for container in pod["spec"]["containers"] for one in container["env"]]
    return [one for one in env if one["name"].startswith("RAY_AUTH_")]


def test_all_pods_get_the_token_of_their_raycluster() -> None:
    given = sample()
    given["spec"]["enableInTreeAutoscaling"] = True
    reference = {"name": "raycluster-kuberay-ray-token", "key": "auth_token"}
    wanted = [
        {"name": "RAY_AUTH_MODE", "value": "token"},
        {"name": "RAY_AUTH_TOKEN", "valueFrom": {"secretKeyRef": reference}},
    ]
    (pod,) = created(seen(given))
    assert access(pod) == wanted * 2  # Ray's, and the autoscaler's
    (pod,) = created(replace(seen(given), pods=(head(),)))
    assert access(pod) == wanted


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("RAY_AUTH_MODE", {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN"}),
        ("RAY_AUTH_TOKEN", {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN"}),
        # RAY_AUTH_TOKEN would overrule the file.
        ("RAY_AUTH_TOKEN_PATH", {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"}),
    ],
)
def test_a_users_own_token_is_kept(name: str, wanted: set[str]) -> None:
    given, own = sample(), {"name": name, "value": "own"}
    given["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]["env"] = [own]
    (pod,) = created(seen(given))
    found = access(pod)
    assert own in found
    assert {one["name"] for one in found} == wanted
    assert len(found) == 2
