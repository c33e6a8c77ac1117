"""The pods of a job, as built and as both API servers take them."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
from lightkube.resources.core_v1 import Pod

from tests.apiclient import Api
from tests.apiservers import Cluster
from tests.job_keys import key_in
from unbroken.core.job.events import CreatePod, NodeName, PodName
from unbroken.operator.jobs.pods import (
    COMMAND,
    LEVELS,
    PREFERRED,
    REQUIRED,
    JobIdentity,
    build_pod,
    disruption_budget,
    job_identity,
    key_secret,
    runs_our_agent,
)
from unbroken.spec.job.launch import training_container
from unbroken.spec.job.rules import PODS_MAX
from unbroken.spec.job.types import JobSpec, ReplicaSpec

Object = dict[str, Any]
SECRET = "lm-agent-0a1b"
KEY = bytes(range(32))
ZONE, BLOCK = "topology.kubernetes.io/zone", "cloud.google.com/gce-topology-block"
EVERY = {key for level in LEVELS for key in level}
JOB = JobIdentity("default", "lm", "0a1b2c3d-0000-0000-0000-000000000000")


def spec(template: Object, replicas: int = 2, nproc: str = "auto") -> JobSpec:
    """A job of one replica spec named `pods`."""
    return JobSpec((ReplicaSpec("pods", template, replicas),), nproc)


def order(index: int = 0, *avoid: str) -> CreatePod:
    """Create pod `lm-pods-<index>`."""
    nodes = frozenset(NodeName(name) for name in avoid)
    return CreatePod(PodName(f"lm-pods-{index}"), "pods", index, nodes)


def template(*containers: Object, **more: Any) -> Object:
    """A pod template; one container named `main` where none is given."""
    main = {"name": "main", "image": "any", "command": ["hyperpodrun", "train.py"]}
    return {"spec": {"containers": list(containers) or [main], **more}}


def variables(container: Object) -> dict[str, Any]:
    """Name -> value, or the field that it is taken from."""
    return {
        entry["name"]: entry.get("value") or entry["valueFrom"]["fieldRef"]["fieldPath"]
        for entry in container["env"]
    }


def test_a_pod_carries_its_job_and_what_the_agent_needs() -> None:
    pod = build_pod(JOB, spec(template()), order(1), SECRET)
    assert pod["metadata"]["name"] == "lm-pods-1"
    assert pod["metadata"]["labels"] == {
        "HPJob": "lm",
        "job-name": "lm",
        "unbroken.dev/replica-spec": "pods",
        "unbroken.dev/index": "1",
    }
    owner = pod["metadata"]["ownerReferences"][0]
    assert (owner["kind"], owner["uid"], owner["controller"]) == (
        "HyperPodPyTorchJob",
        JOB.uid,
        True,
    )
    container = pod["spec"]["containers"][0]
    assert variables(container) == {
        "AGENT_HOST": "status.podIP",
        "UNBROKEN_POD_UID": "metadata.uid",
        "NNODES": "2",
        "NPROC_PER_NODE": "auto",
        "AGENT_PORT": "8080",
        "UNBROKEN_JOB": "lm",
        "UNBROKEN_JOB_UID": JOB.uid,
        "UNBROKEN_POD": "lm-pods-1",
        "UNBROKEN_AGENT_KEY_FILE": "/var/run/unbroken/key",
    }
    assert container["ports"] == [{"containerPort": 8080, "protocol": "TCP"}]
    assert container["volumeMounts"][0]["mountPath"] == "/var/run/unbroken"
    assert pod["spec"]["volumes"][0]["secret"]["secretName"] == SECRET
    assert pod["spec"]["restartPolicy"] == "Always"
    assert pod["spec"]["automountServiceAccountToken"] is False


def test_the_template_wins_where_it_says_something() -> None:
    main = {
        "name": "main",
        "image": "any",
        "env": [{"name": "NNODES", "value": "9"}, {"name": "MINE", "value": "$(AGENT_HOST)"}],
        "ports": [{"containerPort": 8080, "name": "agent"}],
    }
    given = template(main, restartPolicy="OnFailure", serviceAccountName="mine")
    given["metadata"] = {"labels": {"job-name": "theirs", "HPJob": "no"}, "annotations": {"a": "b"}}
    pod = build_pod(JOB, spec(given), order(), SECRET)
    assert pod["metadata"]["labels"]["job-name"] == "theirs"
    assert pod["metadata"]["labels"]["HPJob"] == "lm"
    assert pod["metadata"]["annotations"] == {"a": "b"}
    container = pod["spec"]["containers"][0]
    assert variables(container)["NNODES"] == "9"
    names = [entry["name"] for entry in container["env"]]
    assert names.index("AGENT_HOST") < names.index("MINE")
    assert len(container["ports"]) == 1
    assert pod["spec"]["restartPolicy"] == "OnFailure"
    assert "automountServiceAccountToken" not in pod["spec"]
    assert "env" in main
    assert len(main["env"]) == 2, "the job's own template is left as it was"


def test_a_job_without_a_key_mounts_nothing() -> None:
    job = JobIdentity("default", "lm", "u", {"unbroken.dev/agent-auth": "none"})
    assert not job.has_key
    pod = build_pod(job, spec(template()), order(), None)
    assert "volumes" not in pod["spec"]
    container = pod["spec"]["containers"][0]
    assert "volumeMounts" not in container
    assert variables(container)["UNBROKEN_AGENT_AUTH"] == "none"
    assert "UNBROKEN_AGENT_KEY_FILE" not in variables(container)


@pytest.mark.parametrize(
    ("container", "is_ours"),
    [
        ({"command": ["unbrokenrun", "train.py"]}, True),
        ({"command": ["sh", "-c", "pip install x && exec unbrokenrun train.py"]}, True),
        ({"command": ["python", "-m"], "args": ["unbroken.agent", "train.py"]}, True),
        ({"command": [*COMMAND, "torchrun", "train.py"]}, True),
        ({"command": ["hyperpodrun", "train.py"]}, False),
        ({"args": ["train.py"]}, False),
        ({}, False),
    ],
)
def test_a_command_tells_whether_the_agent_must_prove_its_key(
    container: dict[str, Any], is_ours: bool
) -> None:
    containers = [{"name": "log"}, {"name": "c", **container}]
    pod = Pod.from_dict({"spec": {"containers": containers}})
    assert runs_our_agent(pod) is is_ours


def test_annotations_for_agents_and_workers_are_variables_of_pods() -> None:
    names = ("UNBROKEN_WARM", "UNBROKEN_PRELOAD", "UNBROKEN_IN_PROCESS")
    assert not {*names} & set(
        variables(build_pod(JOB, spec(template()), order(), SECRET)["spec"]["containers"][0])
    )
    given = {"warm": "off", "preload": "torch,numpy", "in-process": "off"}
    job = JobIdentity("default", "lm", "u", {f"unbroken.dev/{key}": given[key] for key in given})
    told = variables(build_pod(job, spec(template()), order(), SECRET)["spec"]["containers"][0])
    assert [told[name] for name in names] == [*given.values()]


@pytest.mark.parametrize(
    ("names", "trains"),
    [(["a", "b"], "a"), (["sidecar", "pytorch"], "pytorch"), (["x", "pytorch-job-container"], -1)],
)
def test_the_port_is_the_training_containers(names: list[str], trains: str | int) -> None:
    wanted = names[trains] if isinstance(trains, int) else trains
    containers = [{"name": name, "image": "any"} for name in names]
    pod = build_pod(JOB, spec(template(*containers)), order(), SECRET)
    assert training_container(pod["spec"]) == wanted
    assert [c["name"] for c in pod["spec"]["containers"] if c.get("ports")] == [wanted]
    assert all(variables(c)["NNODES"] == "2" for c in pod["spec"]["containers"])


def test_avoided_nodes_are_ruled_out_in_every_alternative() -> None:
    expression = {"key": "gpu", "operator": "Exists"}
    affinity = {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [{"matchExpressions": [expression]}, {"matchExpressions": []}]
            }
        },
        "podAntiAffinity": {"kept": True},
    }
    pod = build_pod(JOB, spec(template(affinity=affinity)), order(0, "b", "a"), SECRET)
    rules = [{"key": "metadata.name", "operator": "NotIn", "values": [name]} for name in ("a", "b")]
    found = pod["spec"]["affinity"]
    assert found["podAntiAffinity"] == {"kept": True}
    assert found["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"] == {
        "nodeSelectorTerms": [
            {"matchExpressions": [expression], "matchFields": rules},
            {"matchExpressions": []},
        ]
    }
    plain = build_pod(JOB, spec(template()), order(0, "a"), SECRET)["spec"]["affinity"][
        "nodeAffinity"
    ]
    terms = plain["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert terms == [{"matchFields": rules[:1]}]


def test_a_node_that_may_recover_is_only_shunned() -> None:
    pod = build_pod(
        JOB, spec(template()), order(0, "a", "b"), SECRET, {NodeName("b"), NodeName("c")}
    )
    found = pod["spec"]["affinity"]["nodeAffinity"]
    terms = found["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert [rule["values"] for rule in terms[0]["matchFields"]] == [["a"]]
    wishes = found["preferredDuringSchedulingIgnoredDuringExecution"]
    assert [rule["values"] for rule in wishes[0]["preference"]["matchFields"]] == [["b"]]


def packed(affinity: Object | None = None, job: JobIdentity = JOB, **more: Any) -> Object:
    """The affinity of a pod where nodes have the labels of a zone and of a block."""
    wanted = spec(template(**more, **({"affinity": affinity} if affinity else {})))
    pod = build_pod(job, wanted, order(), SECRET, topology_keys={BLOCK, ZONE})
    found: Object = pod["spec"].get("affinity") or {}
    return found


def test_a_pod_prefers_nodes_near_the_others_of_its_job_the_widest_level_most() -> None:
    wishes = packed()["podAffinity"][PREFERRED]
    assert [(one["weight"], one["podAffinityTerm"]["topologyKey"]) for one in wishes] == [
        (100, ZONE),
        (60, BLOCK),
    ]
    for wish in wishes:
        assert wish["podAffinityTerm"]["labelSelector"] == {"matchLabels": {"HPJob": "lm"}}


def test_packing_adds_to_the_templates_affinity_and_leaves_its_levels_alone() -> None:
    own = {"weight": 7, "podAffinityTerm": {"topologyKey": BLOCK, "labelSelector": {}}}
    given = {"nodeAffinity": {"kept": True}, "podAffinity": {PREFERRED: [own]}}
    found = packed(given)
    assert found["nodeAffinity"] == {"kept": True}
    first, second = found["podAffinity"][PREFERRED]
    assert (first, second["podAffinityTerm"]["topologyKey"]) == (own, ZONE)
    apart = {"podAntiAffinity": {REQUIRED: [{"topologyKey": BLOCK}]}}
    spread = [{"topologyKey": ZONE, "maxSkew": 1}]
    assert packed(apart, topologySpreadConstraints=spread) == apart


def test_nothing_is_packed_without_labels_or_against_the_annotation() -> None:
    off = replace(JOB, annotations={"unbroken.dev/packing": "off"})
    assert packed(job=off) == {}
    assert "affinity" not in build_pod(JOB, spec(template()), order(), SECRET)["spec"]


def test_both_servers_take_the_pod_and_its_secret(cluster: Cluster) -> None:
    with closing(Api(cluster, "default")) as api:
        take_pod(api, f"lm-{cluster.name}")


def take_pod(api: Api, name: str) -> None:
    """Create a pod and the secret that it mounts."""
    anchor = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}}
    uid = api.post("configmaps", anchor).made["metadata"]["uid"]
    job = job_identity({"metadata": {"namespace": "default", "name": name, "uid": uid}})
    secret = api.post("secrets", key_secret(job, f"{name}-agent-0a1b", KEY)).made
    assert key_in(secret) == KEY
    made = api.post(
        "pods",
        build_pod(
            job, spec(template()), order(0, "a", "b"), SECRET, {NodeName("b")}, topology_keys=EVERY
        ),
    ).made
    near = made["spec"]["affinity"]["podAffinity"][PREFERRED]
    assert {one["podAffinityTerm"]["topologyKey"] for one in near} == EVERY
    assert made["spec"]["containers"][0]["ports"][0]["containerPort"] == 8080
    assert made["metadata"]["ownerReferences"][0]["uid"] == uid


def test_the_budget_forbids_every_eviction_of_the_jobs_pods() -> None:
    made = disruption_budget(JOB, "policy/v1")
    pods = build_pod(JOB, spec(template()), order(0), SECRET)
    assert made["spec"]["minAvailable"] > PODS_MAX
    assert made["spec"]["selector"]["matchLabels"].items() <= pods["metadata"]["labels"].items()
    assert made["metadata"]["ownerReferences"] == [JOB.owner_reference()]
