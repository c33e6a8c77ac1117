"""The Pod and the Secret of a job, as objects, and injection of the agent into images without it.
Pure.

The user's template takes precedence; docs/design/training-jobs.md lists the additions.

The pods of a job are packed by a preferred affinity to topology labels of nodes. AWS: EC2's
instance topology; Google: GKE's compact placement; Oracle: OKE's RDMA labels.

An init container copies the agent and its own Python from the agent's image to a volume
(`deploy/relocatable.py` makes them). The container that trains starts the agent from there, with
its own command as the agent's arguments (`agent.injected`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lightkube.resources.core_v1 import Pod

from unbroken.core.job.events import CreatePod, NodeName
from unbroken.errors import SpecError
from unbroken.spec import keys
from unbroken.spec.job.launch import lacks_agent, training_container
from unbroken.spec.job.types import PRELOAD_VARIABLE, WARM_VARIABLE, AgentSource, JobSpec, Switch
from unbroken.spec.job_kinds import HYPERPOD_JOB
from unbroken.wire.agent import PORT
from unbroken.wire.warm import IN_PROCESS_VARIABLE

Object = dict[str, Any]

SOURCE = "/opt/unbroken-agent"
"""Folder of the agent in its image (deploy/Containerfile)."""
VOLUME = INIT_CONTAINER = "unbroken-agent"
MOUNT = "/unbroken"
"""Mount path of the volume, in both containers. Any user may write there."""
FOLDER = f"{MOUNT}/agent"
COMMAND = (
    *(f"{FOLDER}/lib/loader", "--library-path", f"{FOLDER}/lib"),
    *(f"{FOLDER}/bin/python3", "-I", "-S", "-u", f"{FOLDER}/run.py"),
)
"""Command that starts the agent without any program or library of the image."""
SHARED_RESOURCES = ("cpu", "memory")
USER_FIELDS = ("runAsUser", "runAsGroup", "runAsNonRoot", "seccompProfile", "seLinuxOptions")
"""Fields of a security context that the init container has from the container that trains."""


@dataclass(frozen=True, slots=True)
class AgentToInject:
    """The agent that this operator adds to pods."""

    image: str = ""
    """Image that has the agent in `SOURCE`; empty: the nodes have it, and nothing is copied."""
    command: tuple[str, ...] = COMMAND
    """Words before the user's command."""


def inject(pod: Object, agent: AgentToInject | None) -> None:
    """Add the agent to a pod's specification. Raises SpecError if there is none to add."""
    if agent is None:
        raise SpecError(
            f"{keys.AGENT}: injected needs an operator that knows the agent's image: start it with "
            "--agent-image (the chart does)"
        )
    name = training_container(pod)
    (container,) = (item for item in pod["containers"] if item["name"] == name)
    container["command"] = [*agent.command, *(container.get("command") or ())]
    if not agent.image:
        return
    mount = {"name": VOLUME, "mountPath": MOUNT}
    container["volumeMounts"] = [*(container.get("volumeMounts") or ()), mount]
    pod["volumes"] = [*(pod.get("volumes") or ()), {"name": VOLUME, "emptyDir": {}}]
    first = _init_container(container, agent.image, mount)
    pod["initContainers"] = [first, *(pod.get("initContainers") or ())]


def _init_container(container: Mapping[str, Any], image: str, mount: Object) -> Object:
    """Return the container that copies.

    It requests no more than the container that trains, so that the pod's place, quality of service
    and quota do not change.
    """
    context = container.get("securityContext") or {}
    asked = container.get("resources") or {}
    result: Object = {
        "name": INIT_CONTAINER,
        "image": image,
        # -T: after a reboot of the node the folder may already exist.
        "command": ["cp", "-rT", SOURCE, FOLDER],
        "volumeMounts": [mount],
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {
            **{key: context[key] for key in USER_FIELDS if key in context},
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
    }
    resources = {
        kind: {name: asked[kind][name] for name in SHARED_RESOURCES if name in asked[kind]}
        for kind in ("requests", "limits")
        if asked.get(kind)
    }
    if resources:
        result["resources"] = resources
    return result


LEVELS = (
    ("topology.kubernetes.io/zone",),
    ("topology.k8s.aws/network-node-layer-1", "oci.oraclecloud.com/rdma.hpc_island_id"),
    (
        "topology.k8s.aws/network-node-layer-2",
        "cloud.google.com/gce-topology-block",
        "oci.oraclecloud.com/rdma.network_block_id",
    ),
    (
        "topology.k8s.aws/network-node-layer-3",
        "cloud.google.com/gce-topology-subblock",
        "oci.oraclecloud.com/rdma.local_block_id",
    ),
    ("topology.kubernetes.io/rack", keys.RACK),
)
"""Keys of the topology labels, widest level first; at each level the first that a node has."""
WEIGHTS = (100, 80, 60, 40, 20)
"""Weight of each level for each pod there, 1 to 100.

A wide network counts more than a narrow one, so that a job stays under one spine before it stays
under one leaf.
"""
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"


def topology_keys(labels: Mapping[str, str]) -> tuple[str, ...]:
    """Return the key of a node's label at each level; empty: it has none."""
    return tuple(next((key for key in level if labels.get(key)), "") for level in LEVELS)


def pack(pod: Object, job: str, present: Collection[str]) -> None:
    """Let a pod prefer nodes near the other pods of the job, by the topology labels that are
    `present` on nodes.

    A label with a rule in the template itself is left to the template.
    """
    affinity: Object = pod.get("affinity") or {}
    near: Object = affinity.get("podAffinity") or {}
    own = {*_keys_of(near), *_keys_of(affinity.get("podAntiAffinity") or {})}
    own.update(str(item.get("topologyKey")) for item in pod.get("topologySpreadConstraints") or ())
    selector = {"matchLabels": {keys.JOB_LABEL: job}}
    wishes = [
        {"weight": weight, "podAffinityTerm": {"topologyKey": key, "labelSelector": selector}}
        for weight, level in zip(WEIGHTS, LEVELS, strict=True)
        for key in level
        if key in present and key not in own
    ]
    if wishes:
        near = {**near, PREFERRED: [*(near.get(PREFERRED) or ()), *wishes]}
        pod["affinity"] = {**affinity, "podAffinity": near}


def _keys_of(rules: Mapping[str, Any]) -> Iterable[str]:
    preferred = (rule.get("podAffinityTerm") or {} for rule in rules.get(PREFERRED) or ())
    return [str(term.get("topologyKey")) for term in (*(rules.get(REQUIRED) or ()), *preferred)]


VARIABLES = {
    keys.WARM: WARM_VARIABLE,
    keys.PRELOAD: PRELOAD_VARIABLE,
    keys.IN_PROCESS: IN_PROCESS_VARIABLE,
}
"""Annotations that agents or workers need, and their environment variables."""

MORE_THAN_ALL = 1_000_000
"""Pods that must stay, by a job's PodDisruptionBudget; a job has 50,000 at most."""

OUR_AGENTS = ("unbrokenrun", "unbroken.agent", f"{FOLDER}/run.py")
"""Words in a command that runs our agent; the last is the one that is injected."""
KEY_VOLUME = "unbroken-agent-key"
KEY_DIRECTORY, KEY_ENTRY = "/var/run/unbroken", "key"


@dataclass(frozen=True, slots=True)
class JobIdentity:
    """Identity of the job that owns the objects."""

    namespace: str
    name: str
    uid: str
    annotations: Mapping[str, str] = field(default_factory=dict)

    @property
    def has_key(self) -> bool:
        """True if its agents and its operator share a key, by which they authenticate each
        other."""
        return self.annotations.get(keys.AGENT_AUTH) != "none"

    def owner_reference(self) -> Object:
        """Return the reference that the job's objects carry."""
        return HYPERPOD_JOB.owner_reference(self.name, self.uid)


def job_identity(job: Mapping[str, Any]) -> JobIdentity:
    """Return the identity of a job object."""
    metadata = job["metadata"]
    return JobIdentity(
        metadata["namespace"],
        metadata["name"],
        metadata["uid"],
        dict(metadata.get("annotations") or {}),
    )


def key_secret(job: JobIdentity, name: str, key: bytes) -> Object:
    """Return the Secret that gives the job's agents their key."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": name,
            "labels": {keys.JOB_LABEL: job.name},
            "ownerReferences": [job.owner_reference()],
        },
        "type": "Opaque",
        "immutable": True,
        "stringData": {KEY_ENTRY: key.hex()},
    }


def disruption_budget(job: JobIdentity, version: str) -> Object:
    """Return the budget that refuses every eviction of the job's pods, for as long as it trains.

    A job moves from a node by itself, and then deletes its pod there (`core.job.moves`). The budget
    has a number, because a share is counted by a subresource `scale`, which jobs lack.
    """
    return {
        "apiVersion": version,
        "kind": "PodDisruptionBudget",
        "metadata": {
            "name": job.name,
            "labels": {keys.JOB_LABEL: job.name},
            "ownerReferences": [job.owner_reference()],
        },
        "spec": {
            "minAvailable": MORE_THAN_ALL,
            "selector": {"matchLabels": {keys.JOB_LABEL: job.name}},
        },
    }


def mounted_secret(pod: Pod) -> str | None:
    """Return the name of the Secret from which a pod has its job's key; None: it has none of this
    operator's.

    Pods of versions before the key was derived have a volume of another name.
    """
    for volume in (pod.spec and pod.spec.volumes) or ():
        if volume.name == KEY_VOLUME:
            return volume.secret.secretName if volume.secret else None
    return None


def runs_our_agent(pod: Pod) -> bool:
    """True if a command of the pod names our agent, as the one that is injected does.

    What `hyperpodrun` is, only the image knows.
    """
    containers = (pod.spec and pod.spec.containers) or ()
    words = (word for one in containers for word in (*(one.command or ()), *(one.args or ())))
    return any(name in word for word in words for name in OUR_AGENTS)


def _needs_agent(job: JobIdentity, pod: Object, agent: AgentToInject | None) -> bool:
    """True if the agent is to be added: on request, or without a word on it to torchrun and
    accelerate."""
    source = job.annotations.get(keys.AGENT)
    if source is not None or agent is None:
        return source == AgentSource.INJECTED.value
    name = training_container(pod)
    trains = [item for item in pod.get("containers") or () if item["name"] == name]
    return any(lacks_agent(container) for container in trains)


def build_pod(
    job: JobIdentity,
    spec: JobSpec,
    order: CreatePod,
    secret: str | None,
    unusable: Collection[NodeName] = (),
    agent: AgentToInject | None = None,
    topology_keys: Collection[str] = (),
) -> Object:
    """Return the ordered pod, to be created in the job's namespace. Raises SpecError if it cannot
    be made.

    `secret`: the name of the Secret with the job's key; None for a job without one.
    `topology_keys`: the topology labels that nodes have; the job is packed by them. `agent`: for
    jobs that request an injected agent; None: they are refused. If there is no other node, the pod
    may go to an `unusable` one of the nodes to be avoided. By the time that the scheduler allows
    it, the node has recovered.
    """
    replica = next(one for one in spec.replica_specs if one.name == order.replica_spec)
    given = replica.template.get("metadata") or {}
    # Copied as far as it is changed here: a copy of 1 MiB takes 60 ms, and a job has many pods.
    pod: Object = dict(replica.template.get("spec") or {})
    for kind in ("initContainers", "containers"):
        if kind in pod:
            pod[kind] = [dict(container) for container in pod[kind] or ()]
    pod.setdefault("restartPolicy", "Always")
    if not pod.get("serviceAccountName") and not pod.get("serviceAccount"):
        # The agent sends nothing to Kubernetes; a named service account is the user's wish.
        pod.setdefault("automountServiceAccountToken", False)
    if secret is not None:
        _add_volume(pod, secret)
    added = _environment(job, spec, order, has_key=secret is not None)
    for container in (*(pod.get("initContainers") or ()), *(pod.get("containers") or ())):
        # The pod's status then has the last output of a container that has failed.
        container.setdefault("terminationMessagePolicy", "FallbackToLogsOnError")
    for container in pod.get("containers") or ():
        _equip(container, added, has_key=secret is not None)
    _open_port(pod)
    if _needs_agent(job, pod, agent):
        inject(pod, agent)
    _avoid(pod, set(order.avoid) - set(unusable))
    _shun(pod, set(order.avoid) & set(unusable))
    if job.annotations.get(keys.PACKING) != Switch.OFF.value:
        pack(pod, job.name, topology_keys)
    metadata: Object = {
        "name": order.name,
        "namespace": job.namespace,
        "labels": {
            # Templates select their own pods by it, under any name.
            keys.JOB_NAME_LABEL: job.name,
            **(given.get("labels") or {}),
            keys.JOB_LABEL: job.name,
            keys.REPLICA_LABEL: order.replica_spec,
            keys.INDEX_LABEL: str(order.index),
        },
        "annotations": given.get("annotations") or {},
        "ownerReferences": [job.owner_reference()],
    }
    if given.get("finalizers"):
        metadata["finalizers"] = given["finalizers"]
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod}


def _environment(
    job: JobIdentity, spec: JobSpec, order: CreatePod, *, has_key: bool
) -> list[Object]:
    values = {
        "NNODES": str(spec.nnodes),
        "NPROC_PER_NODE": spec.nproc_per_node,
        "AGENT_PORT": str(PORT),
        "UNBROKEN_JOB": job.name,
        "UNBROKEN_JOB_UID": job.uid,
        "UNBROKEN_POD": str(order.name),
    }
    if has_key:
        values["UNBROKEN_AGENT_KEY_FILE"] = f"{KEY_DIRECTORY}/{KEY_ENTRY}"
    else:
        values["UNBROKEN_AGENT_AUTH"] = "none"
    for annotation, variable in VARIABLES.items():
        if annotation in job.annotations:
            values[variable] = job.annotations[annotation]
    fields = {"AGENT_HOST": "status.podIP", "UNBROKEN_POD_UID": "metadata.uid"}
    told = [
        {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
        for name, path in fields.items()
    ]
    return [*told, *({"name": name, "value": value} for name, value in values.items())]


def _equip(container: Object, added: Iterable[Object], *, has_key: bool) -> None:
    own = container.get("env") or []
    names = {entry["name"] for entry in own}
    # First, so that the user's own variables can refer to these as $(NAME).
    container["env"] = [*(entry for entry in added if entry["name"] not in names), *own]
    if has_key:
        mount = {"name": KEY_VOLUME, "mountPath": KEY_DIRECTORY, "readOnly": True}
        container["volumeMounts"] = [*(container.get("volumeMounts") or ()), mount]


def _add_volume(pod: Object, name: str) -> None:
    secret = {"secretName": name, "items": [{"key": KEY_ENTRY, "path": KEY_ENTRY}]}
    pod["volumes"] = [*(pod.get("volumes") or ()), {"name": KEY_VOLUME, "secret": secret}]


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
    """Keep the pod off these nodes, in addition to its node affinity."""
    if not nodes:
        return
    by_node = _node_affinity(pod)
    required = by_node.get(REQUIRED) or {}
    terms = required.get("nodeSelectorTerms") or [None]
    rules = _not_in(nodes)
    by_node[REQUIRED] = {"nodeSelectorTerms": [_with_rules(term, rules) for term in terms]}


def _shun(pod: Object, nodes: Collection[NodeName]) -> None:
    """Let the pod prefer every other node."""
    if nodes:
        by_node = _node_affinity(pod)
        wish = {"weight": 100, "preference": {"matchFields": _not_in(nodes)}}
        by_node[PREFERRED] = [*(by_node.get(PREFERRED) or ()), wish]


def _node_affinity(pod: Object) -> Object:
    affinity = pod["affinity"] = dict(pod.get("affinity") or {})
    result: Object = dict(affinity.get("nodeAffinity") or {})
    affinity["nodeAffinity"] = result
    return result


def _not_in(nodes: Collection[NodeName]) -> list[Object]:
    # One rule for each node: the API takes one value in a rule about metadata.name.
    return [{"key": "metadata.name", "operator": "NotIn", "values": [n]} for n in sorted(nodes)]


def _with_rules(term: Object | None, rules: Iterable[Object]) -> Object:
    # Terms are alternatives, so each needs the rule. One without rules matches nothing, and stays
    # so.
    if term is not None and not any(term.values()):
        return term
    given = term or {}
    return {**given, "matchFields": [*(given.get("matchFields") or ()), *rules]}
