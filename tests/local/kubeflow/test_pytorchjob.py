"""Orders for a PyTorchJob, pod by pod, and its status."""

from __future__ import annotations

from typing import Any

import pytest

from tests.local.kubeflow.drive_pytorchjob import Script, script
from unbroken.local.kubeflow.decisions import Plan, RecordJobEvent
from unbroken.spec.keys import RENDEZVOUS_PORT
from unbroken.spec.kubeflow.pytorchjob import ReplicaStatus

Object = dict[str, Any]


def tells(found: Plan) -> list[str]:
    """Return the reasons of its events."""
    return [order.reason for order in found.orders if isinstance(order, RecordJobEvent)]


def test_a_job_gets_a_pod_and_a_service_for_each_replica_and_runs() -> None:
    job = script(workers=2, master=True)
    job.look()
    names = {"lm-master-0", "lm-worker-0", "lm-worker-1"}
    assert set(job.pods) == job.services == names
    assert job.state == [("Created", "True")]
    assert job.status.start_time == 1000.0
    assert job.look().orders == (), "nothing is missing any more"
    job.run_all()
    assert job.state == [("Created", "True"), ("Running", "True")]
    assert job.status.replica_statuses.worker == ReplicaStatus(
        active=2,
        selector="training.kubeflow.org/job-name=lm,"
        "training.kubeflow.org/operator-name=pytorchjob-controller,"
        "training.kubeflow.org/replica-type=worker",
    )
    again = job.look()
    assert (again.orders, again.status) == ((), None), "what is well is left alone"


def test_the_masters_end_is_the_jobs() -> None:
    job = script(workers=1, master=True)
    job.run_all()
    job.change("lm-worker-0", phase="Succeeded")
    job.look()
    assert job.state[-1] == ("Running", "True")
    job.now = 1010.0
    job.change("lm-master-0", phase="Succeeded")
    assert tells(job.look()) == ["PyTorchJobSucceeded"]
    assert job.state == [("Created", "True"), ("Running", "False"), ("Succeeded", "True")]
    assert job.status.completion_time == 1010.0
    assert job.look() == Plan()


def test_without_a_master_all_workers_must_succeed() -> None:
    job = script(workers=2)
    job.run_all()
    job.change("lm-worker-0", phase="Succeeded")
    job.look()
    assert not job.status.is_finished
    job.change("lm-worker-1", phase="Succeeded")
    job.look()
    assert job.status.has("Succeeded")


@pytest.mark.parametrize(
    ("policy", "code", "is_made_anew"),
    [
        ("OnFailure", None, True),
        ("Always", 1, True),
        ("Never", 1, False),
        ("ExitCode", 1, False),
        ("ExitCode", 127, False),
        ("ExitCode", 137, True),
        ("ExitCode", None, False),
    ],
)
def test_a_failed_pod_is_made_anew_as_its_policy_says(
    policy: str, code: int | None, is_made_anew: bool
) -> None:
    job = script(policy=policy)
    job.run_all()
    old = job.pods["lm-worker-1"].uid
    job.change("lm-worker-1", phase="Failed", exit_code=code)
    said = tells(job.look())
    assert job.status.has("Failed") is not is_made_anew
    if not is_made_anew:
        assert "PyTorchJobFailed" in said
        job.look()
        assert job.left() == {"lm-worker-0", "lm-worker-1"}, "cleanPodPolicy None"
        return
    assert "PyTorchJobRestarting" in said
    assert job.state[-1] == ("Restarting", "True")
    assert job.left() == {"lm-worker-0"}
    job.look()
    assert job.pods["lm-worker-1"].uid != old
    job.change("lm-worker-1", phase="Running")
    job.look()
    assert job.state == [("Created", "True"), ("Running", "True")]


def test_pods_that_others_delete_are_a_restart() -> None:
    job = script()
    job.run_all()
    for name in job.pods:
        job.change(name, is_leaving=True)
    found = job.look()
    assert tells(found) == ["PyTorchJobRestarting"]
    assert "2 Worker replica(s) failed" in found.orders[0].message  # type: ignore[union-attr]
    assert tells(job.look()) == [], "it is said once"
    assert job.left() == set()
    job.look()
    assert set(job.pods) == {"lm-worker-0", "lm-worker-1"}


@pytest.mark.parametrize(
    ("limit", "restarts", "fails"), [(0, 1, True), (3, 2, False), (3, 3, True)]
)
def test_restarts_of_containers_count_against_the_backoff_limit(
    limit: int, restarts: int, fails: bool
) -> None:
    job = script(runPolicy={"backoffLimit": limit})
    job.run_all()
    job.change("lm-worker-0", restarts=restarts)
    job.look()
    assert job.status.has("Failed") is fails
    job.look()
    assert len(job.left()) == 2, "cleanPodPolicy None keeps the pods, and so their logs"


@pytest.mark.parametrize(
    ("limit", "policy", "left"),
    [
        ({"backoffLimit": 1}, "None", {"lm-worker-0", "lm-worker-1", "lm-worker-2"}),
        ({"backoffLimit": 1}, "Running", {"lm-worker-1"}),
        ({"backoffLimit": 1}, "All", set[str]()),
        ({"activeDeadlineSeconds": 60}, "None", {"lm-worker-1"}),
        ({"activeDeadlineSeconds": 60}, "Running", {"lm-worker-1"}),
        ({"activeDeadlineSeconds": 60}, "All", set[str]()),
    ],
)
def test_a_limit_leaves_the_pods_that_the_policy_keeps(
    limit: Object, policy: str, left: set[str]
) -> None:
    job = script(workers=3, runPolicy={"cleanPodPolicy": policy, **limit})
    job.run_all()
    job.change("lm-worker-1", phase="Succeeded")
    job.look()
    job.change("lm-worker-0", restarts=1)
    job.now += 60.0
    job.look()
    assert job.status.has("Failed")
    job.look()
    assert job.left() == left
    job.look()
    worker = job.status.replica_statuses.worker
    assert worker is not None
    assert worker.active == len(left - {"lm-worker-1"}), "no pod that is gone counts as active"
    assert worker.succeeded == 1
    assert worker.active + worker.failed == 2


def test_pods_that_are_made_anew_count_against_the_backoff_limit() -> None:
    job = script(workers=1, policy="ExitCode", runPolicy={"backoffLimit": 2})
    for number in (1, 2):
        job.run_all()
        job.change("lm-worker-0", phase="Failed", exit_code=137)
        job.look()
        job.change("lm-worker-0", is_leaving=False)
        job.look()
        assert job.replaced.count == number, "one that is seen twice counts once"
        assert not job.status.has("Failed") or number == 2
        job.change("lm-worker-0", is_leaving=True)
        job.left()
    job.look()
    assert job.status.has("Failed")
    assert "backoff limit" in job.status.conditions[-1].message


def test_a_job_that_takes_too_long_fails_at_its_deadline() -> None:
    job = script(runPolicy={"activeDeadlineSeconds": 60})
    job.look()
    assert job.look().again_at == 1060.0
    job.now = 1060.0
    job.look()
    assert job.status.has("Failed")
    assert "active longer" in job.status.conditions[-1].message
    job.look()
    assert job.left() == set()


@pytest.mark.parametrize(
    ("policy", "left"),
    [
        ("None", {"lm-master-0", "lm-worker-0", "lm-worker-1"}),
        ("Running", {"lm-master-0", "lm-worker-1"}),
        ("All", set[str]()),
    ],
)
def test_pods_are_cleaned_up_by_policy(policy: str, left: set[str]) -> None:
    job = script(master=True, runPolicy={"cleanPodPolicy": policy})
    job.run_all()
    job.change("lm-worker-1", phase="Succeeded")
    job.change("lm-master-0", phase="Succeeded")
    job.look()
    job.look()
    assert job.left() == left
    assert job.services == left


def test_a_job_goes_when_its_time_after_the_end_is_over() -> None:
    job = script(workers=1, runPolicy={"ttlSecondsAfterFinished": 30})
    job.run_all()
    job.change("lm-worker-0", phase="Succeeded")
    job.look()
    assert job.look().again_at == 1030.0
    job.now = 1030.0
    job.look()
    assert job.is_gone


def test_a_suspended_job_has_no_pods_and_comes_back() -> None:
    job = script()
    job.run_all()
    job.job["spec"]["runPolicy"] = {"suspend": True}
    assert "PyTorchJobSuspended" in tells(job.look())
    assert job.left() == set()
    assert not job.services
    assert not job.status.has("Running")
    assert job.look().orders == ()
    job.job["spec"]["runPolicy"] = {"suspend": False}
    job.now = 2000.0
    assert "PyTorchJobResumed" in tells(job.look())
    assert len(job.pods) == 2
    assert job.status.start_time == 2000.0
    assert not job.status.has("Suspended")


def test_fewer_replicas_end_the_last_pods() -> None:
    job = script(workers=3)
    job.run_all()
    job.job["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"] = 1
    job.look()
    assert job.left() == {"lm-worker-0"}


def test_a_job_that_cannot_be_understood_fails_with_every_problem() -> None:
    job = script(runPolicy={"cleanPodPolicy": "Some", "backoffLimit": -1})
    job.look()
    message = job.status.conditions[-1].message
    assert job.status.has("Failed")
    assert "spec.runPolicy.cleanPodPolicy" in message
    assert "spec.runPolicy.backoffLimit" in message
    assert not job.pods


def test_the_job_of_another_manager_is_left_alone() -> None:
    job = script(runPolicy={"managedBy": "kueue.x-k8s.io/multikueue"})
    assert job.look() == Plan()


# --- pods


def variables(job: Script, name: str) -> dict[str, str]:
    """Return the variables of the pod's first container."""
    job.look()
    listed = job.bodies[name]["spec"]["containers"][0]["env"]
    assert len({one["name"] for one in listed}) == len(listed)
    return {one["name"]: one["value"] for one in listed}


def test_with_a_master_plain_torch_finds_its_rank() -> None:
    job = script(workers=2, master=True, nprocPerNode=2)
    found = variables(job, "lm-worker-1")
    assert (found["RANK"], found["PET_NODE_RANK"], found["WORLD_SIZE"]) == ("2", "2", "6")
    assert found["MASTER_ADDR"] == found["PET_MASTER_ADDR"] == "127.0.0.1"
    assert found["MASTER_PORT"] == found["PET_MASTER_PORT"] == "4000"
    assert (found["PET_NNODES"], found["PET_NPROC_PER_NODE"]) == ("3", "2")
    assert variables(job, "lm-master-0")["RANK"] == "0"


def test_an_elastic_policy_tells_torchrun_where_to_meet() -> None:
    policy = {"minReplicas": 1, "maxReplicas": 64, "maxRestarts": 100, "rdzvId": "x"}
    policy = {**policy, "rdzvConf": [{"key": "timeout", "value": "9"}, {"key": "a", "value": "b"}]}
    found = variables(script(elasticPolicy=policy), "lm-worker-0")
    assert found["PET_RDZV_ENDPOINT"] == "127.0.0.1:4000"
    assert (found["PET_RDZV_BACKEND"], found["PET_NNODES"]) == ("c10d", "1:64")
    assert (found["PET_MAX_RESTARTS"], found["PET_RDZV_ID"]) == ("100", "x")
    assert found["PET_RDZV_CONF"] == "timeout=9,a=b"
    assert "RANK" not in found


def test_pods_keep_off_nodes_that_wait_for_repair_whatever_else_they_ask() -> None:
    key = "sagemaker.amazonaws.com/node-health-status"
    leaving = [
        "UnschedulablePendingReboot",
        "UnschedulablePendingReplace",
        "UnschedulablePendingReplacement",
    ]
    is_well = {"key": key, "operator": "NotIn", "values": leaving}
    job = script(workers=1)
    job.look()
    required = "requiredDuringSchedulingIgnoredDuringExecution"

    def terms() -> list[Object]:
        by_node = job.bodies["lm-worker-0"]["spec"]["affinity"]["nodeAffinity"]
        found: list[Object] = by_node[required]["nodeSelectorTerms"]
        return found

    assert terms() == [{"matchExpressions": [is_well]}]
    own = [{"key": "gpu", "operator": "Exists"}]
    named = [{"key": "metadata.name", "operator": "In", "values": ["n"]}]
    given = {"nodeSelectorTerms": [{"matchExpressions": own}, {"matchFields": named}]}
    template = job.job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]
    template["spec"]["affinity"] = {"nodeAffinity": {required: given}, "podAffinity": {}}
    job.pods.clear()
    job.look()
    assert terms() == [
        {"matchExpressions": [*own, is_well]},
        {"matchFields": named, "matchExpressions": [is_well]},
    ]


def test_a_port_that_the_container_names_is_where_they_meet() -> None:
    job = script(workers=1, master=True)
    for one in job.job["spec"]["pytorchReplicaSpecs"].values():
        container = one["template"]["spec"]["containers"][0]
        ports = [{"name": "pytorchjob-port", "containerPort": 29500}]
        one["template"] = {"spec": {"containers": [{**container, "ports": ports}]}}
    assert variables(job, "lm-worker-0")["MASTER_PORT"] == "29500"


def test_a_pod_is_labelled_owned_and_keeps_what_its_template_says() -> None:
    job = script(policy="ExitCode")
    env = [{"name": "A", "value": "1"}, {"name": "PYTHONUNBUFFERED", "value": "0"}]
    container = {"name": "pytorch", "image": "any", "env": env}
    template = {
        "metadata": {"labels": {"app": "lm"}, "annotations": {"note": "x"}},
        "spec": {"containers": [container], "nodeSelector": {"a": "b"}},
    }
    job.job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"] = template
    found = variables(job, "lm-worker-1")
    assert (found["A"], found["PYTHONUNBUFFERED"]) == ("1", "1")
    body = job.bodies["lm-worker-1"]
    assert body["metadata"]["labels"] == {
        "app": "lm",
        "training.kubeflow.org/job-name": "lm",
        "training.kubeflow.org/operator-name": "pytorchjob-controller",
        "training.kubeflow.org/replica-type": "worker",
        "training.kubeflow.org/replica-index": "1",
    }
    assert body["metadata"]["annotations"]["note"] == "x"
    assert body["metadata"]["annotations"][RENDEZVOUS_PORT].isdecimal()
    assert body["metadata"]["ownerReferences"][0]["uid"] == "uid"
    assert (body["spec"]["restartPolicy"], body["spec"]["nodeSelector"]) == ("Never", {"a": "b"})
    names = body["spec"]["hostAliases"][0]["hostnames"]
    assert names == ["lm-worker-0", "lm-worker-1"]
    assert "env" not in template.get("spec", {})
    assert container["env"] == env, "the job itself is not changed"
