"""Mapping of a TrainJob to a HyperPodPyTorchJob: each field, and the refusal of other fields."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.job_samples import changed
from tests.spec.random_json import JSON
from tests.train_jobs import COMMAND, patch, runtime, train_job
from unbroken.errors import SpecError
from unbroken.spec.job.parse import parse_job
from unbroken.spec.kubeflow.trainjob import MappedJob, Runtime, map_train_job, merged, read_runtime

Object = dict[str, Any]
DEFAULT = read_runtime(runtime())


def mapped(train: Object, among: Runtime = DEFAULT) -> Object:
    """Return the job of a TrainJob without problems."""
    found = map_train_job(train, among)
    assert [str(one) for one in found.problems] == []
    return found.body


def problems(train: Object, among: Runtime = DEFAULT) -> list[str]:
    """Return the problems of a TrainJob that has no job."""
    found = map_train_job(train, among)
    assert found == MappedJob({}, found.problems)
    return [str(one) for one in found.problems]


def pod(job: Object) -> Object:
    """Return the spec of the pods of a job."""
    (replica,) = job["spec"]["replicaSpecs"]
    spec: Object = replica["template"]["spec"]
    return spec


def test_a_job_has_the_name_the_pods_and_the_command_of_its_train_job() -> None:
    job = mapped(train_job())
    (replica,) = job["spec"]["replicaSpecs"]
    assert job["metadata"]["name"] == "lm"
    (owner,) = job["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"], owner["controller"]) == ("TrainJob", "u-1", True)
    assert (replica["name"], replica["replicas"], job["spec"]["nprocPerNode"]) == ("node", 2, "2")
    assert pod(job) == {"containers": [{"name": "node", "image": "any:1", "command": COMMAND}]}
    assert job["metadata"]["annotations"] == {"unbroken.dev/agent": "injected"}
    assert job["spec"]["runPolicy"] == {"suspend": False}


def test_fields_of_the_trainer_change_the_container_as_in_trainers_job_set() -> None:
    before = runtime()
    (container,) = before["spec"]["template"]["spec"]["replicatedJobs"][1]["template"]["spec"][
        "template"
    ]["spec"]["containers"]
    container |= {"image": "default:1", "args": ["old"], "env": [{"name": "A", "value": "1"}]}
    container["env"].append({"name": "B", "value": "1"})
    trainer = {
        "command": ["python", "train.py"],
        "env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}],
        "resourcesPerNode": {"limits": {"nvidia.com/gpu": 8}},
    }
    train = train_job(trainer=trainer, suspend=True)
    job = mapped(train, read_runtime(before))
    (found,) = pod(job)["containers"]
    assert (found["image"], found["command"]) == ("default:1", ["python", "train.py"])
    assert found["args"] == ["old"], "only the TrainJob's own args replace those of the runtime"
    assert found["env"] == [trainer["env"][0], {"name": "B", "value": "1"}]
    assert found["resources"] == {"limits": {"nvidia.com/gpu": 8}}
    assert job["spec"]["runPolicy"]["suspend"] is True
    assert job["spec"]["nprocPerNode"] == "auto"
    assert job["spec"]["replicaSpecs"][0]["replicas"] == 1


def test_patches_of_the_runtime_change_the_pods_that_train_and_no_others() -> None:
    data = {"name": "data", "persistentVolumeClaim": {"claimName": "corpus"}}
    mount = {"name": "data", "mountPath": "/data"}
    first = {
        "nodeSelector": {"pool": "a", "zone": "z"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "serviceAccountName": "trainer",
        "imagePullSecrets": [{"name": "registry"}],
        "volumes": [data],
        "containers": [{"name": "node", "volumeMounts": [mount]}],
    }
    second = {"nodeSelector": {"pool": "b"}, "volumes": [{"name": "data", "emptyDir": {}}]}
    labelled = {"metadata": {"labels": {"team": "a"}}}
    patches = [
        patch(first),
        patch(second, manager="kueue.x-k8s.io/manager"),
        patch({"nodeSelector": {"pool": "c"}}, job="result", manager="test.example/result"),
        patch({}, manager="test.example/labels"),
    ]
    last = patches[-1]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"][0]
    last["template"]["spec"]["template"] = labelled
    job = mapped(train_job(runtimePatches=patches))
    found = pod(job)
    assert found["nodeSelector"] == {"pool": "b", "zone": "z"}
    assert found["volumes"] == [{"name": "data", "emptyDir": {}}], "a volume has one source"
    assert found["containers"][0]["volumeMounts"] == [mount]
    for key in ("tolerations", "serviceAccountName", "imagePullSecrets"):
        assert found[key] == first[key]
    assert job["spec"]["replicaSpecs"][0]["template"]["metadata"] == {"labels": {"team": "a"}}


def test_annotations_give_what_a_train_job_has_no_field_for() -> None:
    rules = "- {name: start, logPattern: '.*loss.*', expectedStartCutOffInSeconds: 60}"
    annotations = {
        "unbroken.dev/agent": "image",
        "unbroken.dev/warm": "off",
        "unbroken.dev/log-monitoring-configuration": rules,
        "unbroken.dev/auto-resume-count": "1",
        "sagemaker.amazonaws.com/enable-job-auto-resume": "true",
        "sagemaker.amazonaws.com/job-max-retry-count": "7",
        "argocd.argoproj.io/tracking-id": "mine",
    }
    labels = {"app.kubernetes.io/instance": "mine", "kueue.x-k8s.io/queue-name": "team-a"}
    job = mapped(train_job(metadata={"annotations": annotations, "labels": labels}))
    own = {key: annotations[key] for key in ("unbroken.dev/agent", "unbroken.dev/warm")}
    assert job["metadata"]["annotations"] == own
    assert job["metadata"]["labels"] == {}, "tools would take the job for an object of theirs"
    policy = job["spec"]["runPolicy"]
    assert policy["jobMaxRetryCount"] == 7
    assert [rule["name"] for rule in policy["logMonitoringConfiguration"]] == ["start"]


@pytest.mark.parametrize(
    ("train", "said"),
    [
        (train_job(initializer={"dataset": {"storageUri": "hf://a/b"}}), "spec.initializer: Forb"),
        (train_job(podTemplateOverrides=[{}]), "spec.podTemplateOverrides: Forbidden: unknown"),
        (train_job(trainer={"image": "a"}), "spec.trainer.command: Required value: write torchrun"),
        (train_job(trainer={"command": COMMAND}), "spec.trainer.image: Required value"),
        (
            train_job(trainer={"image": "a", "command": ["bash", "-c", "torchrun a.py"]}),
            "the agent cannot take over 'bash'",
        ),
        (
            train_job(
                trainer={"image": "a", "command": COMMAND, "resourcesPerNode": {"claims": [1]}}
            ),
            "spec.trainer.resourcesPerNode.claims: Forbidden: unknown field",
        ),
        (
            train_job(trainer={"image": "a", "command": COMMAND, "numNodes": "many"}),
            "spec.trainer.numNodes: Invalid value",
        ),
        (
            train_job(trainer={"image": "a", "command": COMMAND, "numNodes": 2**30}),
            "spec.replicaSpecs: Invalid value: 1073741824: a job has at most 50000 pods",
        ),
        (
            train_job(runtimePatches=[patch({"containers": [{"name": "sidecar"}]})]),
            'containers: Unsupported value: "sidecar": supported values: "node"',
        ),
        (
            train_job(runtimePatches=[patch({}, metadata={"labels": {"a": "b"}})]),
            "replicatedJobs[0].template.metadata: Forbidden: the operator makes no Job",
        ),
        (
            train_job(metadata={"annotations": {"unbroken.dev/wram": "off"}}),
            "metadata.annotations[unbroken.dev/wram]: Forbidden: unknown",
        ),
        (
            train_job(
                metadata={"annotations": {"sagemaker.amazonaws.com/job-max-retry-count": "x"}}
            ),
            "job-max-retry-count must be a whole number",
        ),
        (
            train_job(metadata={"annotations": {"unbroken.dev/log-monitoring-configuration": "["}}),
            "metadata.annotations[unbroken.dev/log-monitoring-configuration]: Invalid value",
        ),
        (train_job(name="x" * 60), "pods would be called"),
    ],
)
def test_a_field_that_cannot_be_followed_is_refused_with_its_name(train: Object, said: str) -> None:
    (told,) = problems(train)
    assert said in told


def test_an_image_with_an_agent_may_have_any_command() -> None:
    trainer = {"image": "own:1", "command": ["bash", "-c", "exec hyperpodrun train.py"]}
    annotations = {"unbroken.dev/agent": "image"}
    found = mapped(train_job(trainer=trainer, metadata={"annotations": annotations}))
    assert pod(found)["containers"][0]["command"] == trainer["command"]


def test_a_container_that_the_operator_would_take_for_the_training_one_is_refused() -> None:
    template = {"spec": {"containers": [{"name": "node"}, {"name": "pytorch-log"}]}}
    (told,) = problems(train_job(), Runtime("node", template))
    assert "pytorch-log for the container that trains" in told


def test_the_container_that_trains_is_the_first() -> None:
    template = {"spec": {"containers": [{"name": "log", "image": "l:1"}, {"name": "node"}]}}
    found = mapped(train_job(), Runtime("node", template))
    assert [one["name"] for one in pod(found)["containers"]] == ["node", "log"]


def test_a_runtime_without_pods_that_train_says_what_it_lacks() -> None:
    for broken in ({}, {"spec": {"template": {"spec": {"replicatedJobs": [1, {}]}}}}):
        with pytest.raises(SpecError, match=r"trainjob-ancestor-step: trainer and a container"):
            read_runtime(broken)


def test_a_runtime_gives_the_number_of_nodes_and_keeps_its_own_gates() -> None:
    given = runtime()
    given["spec"]["mlPolicy"]["numNodes"] = 3
    job = given["spec"]["template"]["spec"]["replicatedJobs"][1]["template"]["spec"]["template"]
    job["spec"]["schedulingGates"].append({"name": "example.com/quota"})
    found = mapped(train_job(trainer={"image": "a", "command": COMMAND}), read_runtime(given))
    assert found["spec"]["replicaSpecs"][0]["replicas"] == 3
    assert pod(found)["schedulingGates"] == [{"name": "example.com/quota"}]


# --- whatever is given

PATCHES = [
    patch(
        {
            "containers": [{"name": "node", "env": [{"name": "A", "value": "b"}]}],
            "volumes": [{"name": "v", "emptyDir": {}}],
            "nodeSelector": {"a": "b"},
        }
    )
]
REPLICATED = "spec/runtimePatches/0/trainingRuntimeSpec/template/spec/replicatedJobs/0"
PLACES = [
    *("metadata", "metadata/name", "metadata/uid", "metadata/labels", "metadata/annotations"),
    *("spec", "spec/runtimeRef", "spec/suspend", "spec/managedBy", "spec/initializer"),
    *("spec/trainer", "spec/trainer/image", "spec/trainer/command", "spec/trainer/args"),
    *("spec/trainer/numNodes", "spec/trainer/numProcPerNode", "spec/trainer/env"),
    *("spec/trainer/resourcesPerNode", "spec/trainer/resourcesPerNode/limits"),
    *("spec/runtimePatches", "spec/runtimePatches/0", REPLICATED, f"{REPLICATED}/name"),
    f"{REPLICATED}/template/spec/template",
    *(f"{REPLICATED}/template/spec/template/{key}" for key in ("metadata", "spec")),
    *(
        f"{REPLICATED}/template/spec/template/spec/{key}"
        for key in ("containers", "containers/0", "containers/0/env", "volumes", "affinity")
    ),
]


@settings(max_examples=200)
@given(st.sampled_from(PLACES), JSON)
def test_no_value_at_any_place_is_more_than_a_problem(place: str, value: Any) -> None:
    train = changed(place, value, train_job(runtimePatches=PATCHES))
    before = copy.deepcopy(train)
    found = map_train_job(train, DEFAULT)
    assert train == before or value != value, "the TrainJob was changed"
    assert bool(found.body) is not bool(found.problems)
    if found.body:
        assert parse_job(found.body).problems == ()


@given(JSON)
def test_no_runtime_breaks_the_reading(value: Any) -> None:
    for place in ("spec", "spec/template/spec/replicatedJobs", "spec/mlPolicy"):
        try:
            found = read_runtime(changed(place, value, runtime()))
        except SpecError:
            continue
        map_train_job(train_job(runtimePatches=PATCHES), found)


@pytest.mark.parametrize("depth", [200, 100_000])
def test_a_deep_value_breaks_nothing(depth: int) -> None:
    deep: Any = {}
    for _ in range(depth):
        deep = {"affinity": deep}
    found = map_train_job(train_job(runtimePatches=[patch(deep), patch(deep)]), DEFAULT)
    assert bool(found.body) is not bool(found.problems)
    assert "affinity" in merged(deep, deep)
