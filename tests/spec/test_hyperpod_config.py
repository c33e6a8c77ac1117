"""The older HyperPod CLI's config.yaml, and the PyTorchJob that it stands for."""

from __future__ import annotations

import copy
import shlex
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.tables import cases
from unbroken.spec.kubeflow.hyperpod_config import pytorchjob, read_config
from unbroken.spec.kubeflow.pytorchjob import parse_pytorchjob
from unbroken.spec.nodes.instance_types import InstanceType

Object = dict[str, Any]
FILE = """
defaults:
 - override hydra/job_logging: stdout
hydra:
 run:
  dir: .
 output_subdir: null
training_cfg:
 entry_script: ./train.py
 script_args:
  - --max_context_width: 4096
  - "--num_layers 32"
 run:
  name: llama
  nodes: 2
  ntasks_per_node: 8
cluster:
 cluster_type: k8s
 instance_type: ml.p5.48xlarge
 cluster_config:
  service_account_name: null
  persistent_volume_claims:
   - claimName: fsx
     mountPath: data
  namespace: kubeflow
  label_selector:
   required:
    sagemaker.amazonaws.com/node-health-status:
     - Schedulable
   preferred:
    sagemaker.amazonaws.com/deep-health-check-status:
     - Passed
   weights:
    - 100
  pullPolicy: Always
  restartPolicy: OnFailure
  annotations:
   sagemaker.amazonaws.com/enable-job-auto-resume: True
   sagemaker.amazonaws.com/job-max-retry-count: 1
  priority_class_name:
base_results_dir: ./result
container: docker.io/kubeflowkatib/pytorch-mnist:v1beta1-45c5727
container_mounts:
 - null
env_vars:
 NCCL_DEBUG: INFO
 EMPTY: null
"""
"""Configuration file as in the guides."""
P5 = InstanceType(cpu=192, memory_gib=2048, gpus=8, gpu="H100", efa=32)


def content(**changes: Any) -> Any:
    """The file with other values at some places, written with `__` for a point."""
    whole = yaml.safe_load(FILE)
    for place, value in changes.items():
        *parents, key = place.split("__")
        found = whole
        for parent in parents:
            found = found[parent]
        found[key] = value
    return whole


def made(machine: InstanceType = P5, **changes: Any) -> Object:
    """The job of a good file."""
    config, problems = read_config(content(**changes))
    assert not problems, problems
    job = pytorchjob(config, machine)
    assert not parse_pytorchjob(job).problems
    return job


def test_the_file_of_the_guides_is_the_job_that_it_means() -> None:
    job = made()
    assert job["metadata"] == {
        "name": "llama",
        "namespace": "kubeflow",
        "labels": {"app": "llama"},
        "annotations": {
            "sagemaker.amazonaws.com/enable-job-auto-resume": "true",
            "sagemaker.amazonaws.com/job-max-retry-count": "1",
        },
    }
    assert job["spec"]["elasticPolicy"]["minReplicas"] == 2
    worker = job["spec"]["pytorchReplicaSpecs"]["Worker"]
    assert (worker["replicas"], worker["restartPolicy"]) == (2, "OnFailure")
    pod = worker["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"][:2] == ["/bin/bash", "-c"]
    assert container["command"][2] == (
        "set -ex\ntorchrun --nproc_per_node 8 --nnodes 2 ./train.py "
        "--max_context_width 4096 --num_layers 32"
    )
    assert container["env"] == [{"name": "NCCL_DEBUG", "value": "INFO"}]
    wanted = {"nvidia.com/gpu": "8", "vpc.amazonaws.com/efa": "32"}
    assert container["resources"] == {"requests": wanted, "limits": wanted}
    assert [one["name"] for one in pod["volumes"]] == ["fsx", "shm"]
    affinity = pod["affinity"]["nodeAffinity"]
    terms = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert terms[0]["matchExpressions"][0]["values"] == ["Schedulable"]
    assert affinity["preferredDuringSchedulingIgnoredDuringExecution"][0]["weight"] == 100


@pytest.mark.parametrize(
    ("script_args", "words"),
    [
        ([{"--name": "my run"}], ["--name", "my run"]),
        ([{"--name": 'it\'s `1` "2" \\3'}], ["--name", 'it\'s `1` "2" \\3']),
        ([{"--json": '{"a":1}'}], ["--json", '{"a":1}']),
        ([{"--glob": "*.jsonl", "--cut": "a;b"}], ["--glob", "*.jsonl", "--cut", "a;b"]),
        ([{"--name": "'a b'"}, {"--other": '"a b"'}], ["--name", "a b", "--other", "a b"]),
        ([{"--home": "$HOME/my run"}], ["--home", "$HOME/my run"]),
        ([{"--flag": None}, None, {"--last": ""}], ["--flag", "--last", ""]),
        ([{"--sizes": [1, "2 3", None]}], ["--sizes", "1", "2 3"]),
        ([{"--yes": True}], ["--yes", "True"]),
        (["--sizes 1 2", "--flag"], ["--sizes", "1", "2", "--flag"]),
        ("--sizes 1 2", ["--sizes", "1", "2"]),
        ([{"--name": "two\nlines"}], ["--name", "two\nlines"]),
    ],
)
def test_values_of_script_args_are_one_word_each_and_null_is_none(
    script_args: Any, words: list[str]
) -> None:
    job = made(training_cfg__script_args=script_args)
    (container,) = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    line = container["command"][2].replace("\\`", "`")  # bash has commands in them, shlex does not
    assert shlex.split(line)[-len(words) - 1 :] == ["./train.py", *words]


def test_a_machine_without_accelerators_runs_one_process_and_asks_for_none() -> None:
    cpus = InstanceType(cpu=8, memory_gib=16)
    job = made(cpus, training_cfg__run={"name": "x", "nodes": 1})
    assert "elasticPolicy" not in job["spec"]
    (container,) = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    assert "--nproc_per_node 1 --nnodes 1" in container["command"][2]
    assert "resources" not in container


@cases
def test_what_is_wrong_is_said_with_its_place(changes: Object, problem: str) -> None:
    _, problems = read_config(content(**changes))
    assert [str(one) for one in problems if str(one).startswith(problem)], problems


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4) | st.just("???"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)
PLACES = [
    *("training_cfg", "cluster", "container", "env_vars", "git", "container_mounts"),
    *("training_cfg__script_args", "training_cfg__run", "cluster__cluster_config"),
    *("cluster__cluster_config__label_selector", "cluster__cluster_config__annotations"),
    *("cluster__cluster_config__volumes", "cluster__cluster_config__persistentVolumeClaim"),
]


@given(st.sampled_from(PLACES), ANY)
def test_nothing_makes_it_raise(place: str, value: Any) -> None:
    config, problems = read_config(content(**{place: copy.deepcopy(value)}))
    if not problems:
        pytorchjob(config, P5)
    read_config(value)
