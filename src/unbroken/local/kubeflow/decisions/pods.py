"""The pods and services of a PyTorchJob, as the training operator 1.8 makes them
(`common/pod.go`, `pytorch/envvar.go`, `pytorch/elastic.go`).  Pure.

Two things differ.  Pods keep off nodes that wait for repair, as HyperPod asks people to write into
each manifest.  And there is no DNS: all pods are on this machine, so they meet at 127.0.0.1, at
a port that the caller gives.  The names of the services stand in the pods' /etc/hosts, for scripts
that spell them out, where this host lets pods have one.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from unbroken.foreign_numbers import INT32_MAX, whole_number
from unbroken.spec import keys
from unbroken.spec.job_kinds import PYTORCHJOB
from unbroken.spec.kubeflow.pytorchjob import (
    CONTAINER,
    OPERATOR,
    OPERATOR_LABEL,
    PORT,
    PORT_NAME,
    ElasticPolicy,
    PyTorchJobSpec,
    Replica,
    ReplicaSpec,
    RestartPolicy,
)
from unbroken.spec.nodes.values import OLDER_HEALTH, Health

from .events import JobPicture

Object = dict[str, Any]
HERE = "127.0.0.1"
LEAVING = sorted((Health.PENDING_REBOOT.value, Health.PENDING_REPLACEMENT.value, *OLDER_HEALTH))
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def pod_name(job: str, replica: Replica, index: int) -> str:
    """Return the name of a pod and of its service."""
    return f"{job}-{replica.value.lower()}-{index}"


def labels_of(job: str, replica: Replica, index: int) -> dict[str, str]:
    """Return the labels of a pod and the selector of its service."""
    result = {
        keys.PYTORCHJOB_LABEL: job,
        OPERATOR_LABEL: OPERATOR,
        keys.REPLICA_TYPE_LABEL: replica.value.lower(),
        keys.REPLICA_INDEX_LABEL: str(index),
    }
    return result | ({keys.ROLE_LABEL: "master"} if replica is Replica.MASTER else {})


def selector_of(job: str, replica: Replica) -> str:
    """Return the selector of all pods of a type, as `status.replicaStatuses` has it."""
    wanted = {
        keys.PYTORCHJOB_LABEL: job,
        OPERATOR_LABEL: OPERATOR,
        keys.REPLICA_TYPE_LABEL: replica.value.lower(),
    }
    return ",".join(f"{key}={value}" for key, value in sorted(wanted.items()))


def service_body(job: JobPicture, replica: Replica, index: int) -> Object:
    """Return a headless service for one pod."""
    labels = labels_of(job.name, replica, index)
    port = _declared_port(job.parsed.spec.replicas()[replica]) or PORT
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(job, pod_name(job.name, replica, index), labels),
        "spec": {
            "clusterIP": "None",
            "selector": labels,
            "ports": [{"name": PORT_NAME, "port": port}],
        },
    }


def pod_body(job: JobPicture, replica: Replica, index: int, port: int) -> Object:
    """Return a pod.  `port`: rendezvous port of the job, unless the container names one."""
    spec = job.parsed.spec
    mine = spec.replicas()[replica]
    template = copy.deepcopy(dict(mine.template))
    given = template.get("metadata") or {}
    labels = {**(given.get("labels") or {}), **labels_of(job.name, replica, index)}
    metadata = _metadata(job, pod_name(job.name, replica, index), labels)
    metadata["annotations"] = {**(given.get("annotations") or {}), keys.RENDEZVOUS_PORT: str(port)}
    pod = template.get("spec") or {}
    policy = mine.restart_policy
    # A pod that is restarted for its exit code is replaced (`SetRestartPolicy`).
    pod["restartPolicy"] = "Never" if policy is RestartPolicy.EXIT_CODE else policy.value
    names = [
        pod_name(job.name, other, number)
        for other, one in spec.replicas().items()
        for number in range(one.replicas)
    ]
    aliases = {"ip": HERE, "hostnames": names}
    pod["hostAliases"] = [*(pod.get("hostAliases") or ()), aliases]
    _avoid_unhealthy(pod)
    added = dict(environment(spec, replica, index, port))
    for container in pod.get("containers") or ():
        kept = [item for item in container.get("env") or () if item.get("name") not in added]
        ours = [{"name": name, "value": value} for name, value in added.items()]
        container["env"] = kept + ours
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod}


def _avoid_unhealthy(pod: Object) -> None:
    """Keep the pod off nodes that wait for repair, whatever else its affinity asks for."""
    affinity = pod["affinity"] = dict(pod.get("affinity") or {})
    by_node = affinity["nodeAffinity"] = dict(affinity.get("nodeAffinity") or {})
    terms = (by_node.get(REQUIRED) or {}).get("nodeSelectorTerms") or [{}]
    is_well = {"key": keys.HEALTH, "operator": "NotIn", "values": LEAVING}
    # One of the terms must hold, so each needs the requirement.
    by_node[REQUIRED] = {
        "nodeSelectorTerms": [
            {**term, "matchExpressions": [*(term.get("matchExpressions") or ()), is_well]}
            for term in terms
        ]
    }


def environment(
    spec: PyTorchJobSpec, replica: Replica, index: int, port: int
) -> Iterator[tuple[str, str]]:
    """The variables that every container gets."""
    replicas = spec.replicas()
    total = sum(one.replicas for one in replicas.values())
    yield "PYTHONUNBUFFERED", "1"
    # Otherwise rank 0 sends its host name to the others, which cannot be resolved here.
    yield "PET_LOCAL_ADDR", HERE
    if Replica.MASTER in replicas:
        rank = index if replica is Replica.MASTER else index + 1
        count = whole_number(spec.nproc_per_node, 0, INT32_MAX)
        count = 1 if count is None else count
        meeting = str(_declared_port(replicas[Replica.MASTER]) or port)
        for prefix in ("", "PET_"):
            yield f"{prefix}MASTER_ADDR", HERE
            yield f"{prefix}MASTER_PORT", meeting
        yield "WORLD_SIZE", str(total * count)
        yield "RANK", str(rank)
        yield "PET_NODE_RANK", str(rank)
    if spec.nproc_per_node:
        yield "PET_NPROC_PER_NODE", spec.nproc_per_node
    if spec.elastic_policy is None:
        yield "PET_NNODES", str(total)
    else:
        yield from _elastic(spec.elastic_policy, replicas[Replica.WORKER], port)


def _elastic(policy: ElasticPolicy, workers: ReplicaSpec, port: int) -> Iterator[tuple[str, str]]:
    meeting = policy.rdzv_port or _declared_port(workers) or port
    yield "PET_RDZV_ENDPOINT", f"{policy.rdzv_host or HERE}:{meeting}"
    yield "PET_RDZV_BACKEND", policy.rdzv_backend
    if policy.min_replicas is not None:
        yield "PET_NNODES", f"{policy.min_replicas}:{policy.max_replicas}"
    else:
        yield "PET_NNODES", str(workers.replicas)
    if policy.max_restarts is not None:
        yield "PET_MAX_RESTARTS", str(policy.max_restarts)
    if policy.n_proc_per_node is not None:
        yield "PET_NPROC_PER_NODE", str(policy.n_proc_per_node)
    if policy.rdzv_id:
        yield "PET_RDZV_ID", policy.rdzv_id
    if policy.rdzv_conf:
        pairs = (
            f"{rendezvous_setting.key}={rendezvous_setting.value}"
            for rendezvous_setting in policy.rdzv_conf
        )
        yield "PET_RDZV_CONF", ",".join(pairs)
    if policy.standalone:
        yield "PET_STANDALONE", "1"


def _declared_port(spec: ReplicaSpec) -> int | None:
    """Return the rendezvous port that the training container names."""
    for container in (spec.template.get("spec") or {}).get("containers") or ():
        if container.get("name") == CONTAINER:
            for port in container.get("ports") or ():
                if port.get("name") == PORT_NAME:
                    return int(port["containerPort"])
    return None


def _metadata(job: JobPicture, name: str, labels: Mapping[str, str]) -> Object:
    owner = PYTORCHJOB.owner_reference(job.name, job.uid)
    result = {"name": name, "namespace": job.namespace, "labels": dict(labels)}
    return {**result, "ownerReferences": [owner]}
