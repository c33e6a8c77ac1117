"""The Pod and the Secret of a job, as objects.  Pure.

What the user's template says stands; what is added is named in docs/design/training-jobs.md.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from unbroken.core.events import CreatePod, NodeName
from unbroken.spec.job import GROUP, KIND, VERSION, JobSpec
from unbroken.spec.warm import PRELOAD, PRELOAD_VARIABLE, WARM, WARM_VARIABLE
from unbroken.wire.agent import PORT

Object = dict[str, Any]

JOB_LABEL = "HPJob"
"""On every pod; the stock client selects by it."""
NAME_LABEL = "job-name"
REPLICA_LABEL, INDEX_LABEL = "unbroken.dev/replica-spec", "unbroken.dev/index"
AUTH_ANNOTATION = "unbroken.dev/agent-auth"
"""`none` on a job: its agents take commands without a token."""

REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"

TOKEN_VOLUME = "unbroken-agent-token"
TOKEN_DIRECTORY, TOKEN_KEY = "/var/run/unbroken", "token"


@dataclass(frozen=True, slots=True)
class JobIdentity:
    """Whose the objects are."""

    namespace: str
    name: str
    uid: str
    annotations: Mapping[str, str] = field(default_factory=dict)

    @property
    def wants_token(self) -> bool:
        """Its agents ask for the job's token."""
        return self.annotations.get(AUTH_ANNOTATION) != "none"

    @property
    def secret_name(self) -> str:
        """Of the Secret that holds the token."""
        return f"{self.name}-agent"

    def owner_reference(self) -> Object:
        """For everything that goes with the job."""
        return {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": KIND,
            "name": self.name,
            "uid": self.uid,
            "controller": True,
            "blockOwnerDeletion": True,
        }


def job_identity(job: Mapping[str, Any]) -> JobIdentity:
    """The identity of a job object."""
    metadata = job["metadata"]
    return JobIdentity(
        metadata["namespace"],
        metadata["name"],
        metadata["uid"],
        dict(metadata.get("annotations") or {}),
    )


def token_secret(job: JobIdentity, token: str) -> Object:
    """The Secret that gives the job's agents their token."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": job.secret_name,
            "labels": {JOB_LABEL: job.name},
            "ownerReferences": [job.owner_reference()],
        },
        "type": "Opaque",
        "stringData": {TOKEN_KEY: token},
    }


def build_pod(
    job: JobIdentity, spec: JobSpec, order: CreatePod, unusable: Collection[NodeName] = ()
) -> Object:
    """The pod that is ordered, to be created in the job's namespace.

    Of the nodes to be avoided it may go to an `unusable` one should there be no other: by the time
    that the scheduler lets it, the node has become well.
    """
    replica = next(one for one in spec.replica_specs if one.name == order.replica_spec)
    template = copy.deepcopy(dict(replica.template))
    given = template.get("metadata") or {}
    pod: Object = dict(template.get("spec") or {})
    pod.setdefault("restartPolicy", "Always")
    if not pod.get("serviceAccountName") and not pod.get("serviceAccount"):
        # The agent asks nothing of Kubernetes; a service account that was named is the user's wish.
        pod.setdefault("automountServiceAccountToken", False)
    if job.wants_token:
        _add_volume(pod, job)
    added = _environment(job, spec, order)
    for container in pod.get("containers") or ():
        _equip(container, added, job)
    _open_port(pod)
    _avoid(pod, order.avoid.difference(unusable))
    _shun(pod, order.avoid.intersection(unusable))
    metadata: Object = {
        "name": order.name,
        "namespace": job.namespace,
        "labels": {
            # Templates select their own pods by it, under whatever name they chose.
            NAME_LABEL: job.name,
            **(given.get("labels") or {}),
            JOB_LABEL: job.name,
            REPLICA_LABEL: order.replica_spec,
            INDEX_LABEL: str(order.index),
        },
        "annotations": given.get("annotations") or {},
        "ownerReferences": [job.owner_reference()],
    }
    if given.get("finalizers"):
        metadata["finalizers"] = given["finalizers"]
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod}


def _environment(job: JobIdentity, spec: JobSpec, order: CreatePod) -> list[Object]:
    values = {
        "NNODES": str(spec.nnodes),
        "NPROC_PER_NODE": spec.nproc_per_node,
        "AGENT_PORT": str(PORT),
        "UNBROKEN_JOB": job.name,
        "UNBROKEN_POD": str(order.name),
    }
    if job.wants_token:
        values["UNBROKEN_AGENT_TOKEN_FILE"] = f"{TOKEN_DIRECTORY}/{TOKEN_KEY}"
    else:
        values["UNBROKEN_AGENT_AUTH"] = "none"
    for annotation, variable in ((WARM, WARM_VARIABLE), (PRELOAD, PRELOAD_VARIABLE)):
        if annotation in job.annotations:
            values[variable] = job.annotations[annotation]
    address = {"name": "AGENT_HOST", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    return [address, *({"name": name, "value": value} for name, value in values.items())]


def _equip(container: Object, added: Iterable[Object], job: JobIdentity) -> None:
    own = container.get("env") or []
    names = {entry["name"] for entry in own}
    # First, so that the user's own variables can refer to these as $(NAME).
    container["env"] = [*(entry for entry in added if entry["name"] not in names), *own]
    if job.wants_token:
        mount = {"name": TOKEN_VOLUME, "mountPath": TOKEN_DIRECTORY, "readOnly": True}
        container["volumeMounts"] = [*(container.get("volumeMounts") or ()), mount]


def _add_volume(pod: Object, job: JobIdentity) -> None:
    secret = {"secretName": job.secret_name, "items": [{"key": TOKEN_KEY, "path": TOKEN_KEY}]}
    pod["volumes"] = [*(pod.get("volumes") or ()), {"name": TOKEN_VOLUME, "secret": secret}]


def training_container(pod: Mapping[str, Any]) -> str:
    """Name of the container that trains: the one named pytorch..., else the first.

    (Kubeflow's and the stock client's containers are named so; sidecars come in any order.)
    """
    names = [container["name"] for container in pod.get("containers") or ()]
    return next((name for name in names if name.startswith("pytorch")), names[0] if names else "")


def _open_port(pod: Object) -> None:
    containers = pod.get("containers") or ()
    declared = {p.get("containerPort") for c in containers for p in c.get("ports") or ()}
    if PORT in declared:
        return
    name = training_container(pod)
    for container in containers:
        if container["name"] == name:
            port = {"containerPort": PORT, "protocol": "TCP"}
            container["ports"] = [*(container.get("ports") or ()), port]


def _avoid(pod: Object, nodes: Collection[NodeName]) -> None:
    """Keep the pod off these nodes, whatever else its node affinity asks for."""
    if not nodes:
        return
    by_node = _node_affinity(pod)
    required = by_node.get(REQUIRED) or {}
    terms = required.get("nodeSelectorTerms") or [None]
    rules = _not_in(nodes)
    by_node[REQUIRED] = {"nodeSelectorTerms": [_with_rules(term, rules) for term in terms]}


def _shun(pod: Object, nodes: Collection[NodeName]) -> None:
    """Let the pod go to these nodes only if it fits nowhere else."""
    if nodes:
        by_node = _node_affinity(pod)
        wish = {"weight": 100, "preference": {"matchFields": _not_in(nodes)}}
        by_node[PREFERRED] = [*(by_node.get(PREFERRED) or ()), wish]


def _node_affinity(pod: Object) -> Object:
    affinity = pod["affinity"] = pod.get("affinity") or {}
    found: Object = affinity.get("nodeAffinity") or {}
    affinity["nodeAffinity"] = found
    return found


def _not_in(nodes: Collection[NodeName]) -> list[Object]:
    # One rule for each node: the API takes one value in a rule about metadata.name.
    return [{"key": "metadata.name", "operator": "NotIn", "values": [n]} for n in sorted(nodes)]


def _with_rules(term: Object | None, rules: Iterable[Object]) -> Object:
    # Terms are alternatives, so each must say it.  One without rules matches nothing: it stays so.
    if term is not None and not any(term.values()):
        return term
    given = term or {}
    return {**given, "matchFields": [*(given.get("matchFields") or ()), *rules]}
