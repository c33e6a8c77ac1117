"""The older HyperPod CLI's `config.yaml` (hyperpod 2.x), and the PyTorchJob that it describes.

Keys, defaults and the manifest are those of aws/sagemaker-hyperpod-cli, branch release_v2:
`custom_launcher/examples/custom_script/config.yaml`, `k8s_templates/training/training.yaml`,
`validators/job_validator.py`. One thing differs: the script is a command of the container and no
ConfigMap, and its rendezvous is set by the job's controller (`PET_RDZV_ENDPOINT`).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

from msgspec import Meta

from unbroken.spec.auto_resume import resume_problems
from unbroken.spec.keys import AUTO_RESUME, DEEP_CHECK, HEALTH, MAX_RETRIES, QUEUE
from unbroken.spec.nodes.instance_types import EFA, GPU, NEURON, InstanceType
from unbroken.spec.problems import Problem, Report
from unbroken.spec.schema.fields import CHOICES, Filled, Positive, read_record

from .pytorchjob import CONTAINER, GROUP, KIND, VERSION, KubeflowRestartPolicy

Object = dict[str, Any]
MISSING = "???"
"""Hydra's mark of a value that must be filled in."""
HEALTHY: Final = {HEALTH: ["Schedulable"]}
CHECKED: Final = {DEEP_CHECK: ["Passed"]}
SCHEDULABLE: Final[Object] = {"required": HEALTHY, "preferred": CHECKED, "weights": [100]}
"""Nodes for a job that is described by options and names none (command_constants.py)."""
CHECKED_ONLY: Final[Object] = {"required": {**HEALTHY, **CHECKED}}

_PLAIN = re.compile(r"[\w./:=,@%+$-]+", re.ASCII)
"""A word that the shell takes as it is."""
PullPolicy = Annotated[str, Meta(extra={CHOICES: ("Always", "IfNotPresent", "Never")})]
ClusterType = Annotated[str, Meta(extra={CHOICES: ("k8s",)})]


def _key(name: str) -> dict[str, str]:
    return {"key": name}


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """`training_cfg.run`."""

    name: Filled
    nodes: Positive
    ntasks_per_node: Positive | None = field(default=None, metadata=_key("ntasks_per_node"))
    """Tasks of a node; None: one for each accelerator."""


@dataclass(frozen=True, slots=True)
class TrainingConfig:
    """`training_cfg`."""

    entry_script: Filled = field(metadata=_key("entry_script"))
    run: TrainingRun
    script_args: tuple[str, ...] = field(default=(), metadata=_key("script_args"))
    """Pieces of the command line."""
    pre_script: tuple[str, ...] = field(default=(), metadata=_key("pre_script"))
    post_script: tuple[str, ...] = field(default=(), metadata=_key("post_script"))


@dataclass(frozen=True, slots=True)
class VolumeClaim:
    """A PersistentVolumeClaim and its mount path."""

    claim_name: str
    mount_path: str


@dataclass(frozen=True, slots=True)
class HostVolume:
    """A directory of the node."""

    volume_name: str
    host_path: str
    mount_path: str


@dataclass(frozen=True, slots=True)
class NodeLabels:
    """Labels that nodes must or should have: key -> values."""

    required: Mapping[str, Any] = field(default_factory=dict)
    preferred: Mapping[str, Any] = field(default_factory=dict)
    weights: tuple[int, ...] = ()
    """Weight of each preferred label; a missing one is 100."""


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """`cluster.cluster_config`."""

    namespace: str = ""
    custom_labels: Mapping[str, str] = field(default_factory=dict, metadata=_key("custom_labels"))
    annotations: Mapping[str, Any] = field(default_factory=dict)
    service_account_name: str = field(default="", metadata=_key("service_account_name"))
    priority_class_name: str = field(default="", metadata=_key("priority_class_name"))
    label_selector: NodeLabels | None = field(default=None, metadata=_key("label_selector"))
    persistent_volume_claim: Mapping[str, Any] = field(
        default_factory=dict, metadata=_key("persistentVolumeClaim")
    )
    """A single claim, as in the earliest files."""
    persistent_volume_claims: tuple[VolumeClaim, ...] = field(
        default=(), metadata=_key("persistent_volume_claims")
    )
    volumes: tuple[HostVolume, ...] = ()
    pull_policy: PullPolicy = "Always"
    restart_policy: KubeflowRestartPolicy = KubeflowRestartPolicy.NEVER


@dataclass(frozen=True, slots=True)
class ClusterPart:
    """`cluster`."""

    instance_type: Filled = field(metadata=_key("instance_type"))
    cluster_type: ClusterType = field(metadata=_key("cluster_type"))
    cluster_config: ClusterConfig = field(metadata=_key("cluster_config"))


@dataclass(frozen=True, slots=True)
class HyperpodConfig:
    """The whole file."""

    training_cfg: TrainingConfig = field(metadata=_key("training_cfg"))
    cluster: ClusterPart
    container: Filled
    """The image."""
    base_results_dir: str = field(default="", metadata=_key("base_results_dir"))
    container_mounts: tuple[str, ...] = field(default=(), metadata=_key("container_mounts"))
    """Paths of the node that are mounted at the same place."""
    env_vars: Mapping[str, Any] = field(default_factory=dict, metadata=_key("env_vars"))
    git: Mapping[str, Any] = field(default_factory=dict)
    hydra: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the launcher itself; not used."""
    defaults: tuple[Mapping[str, Any], ...] = ()


def read_config(content: Any) -> tuple[HyperpodConfig, tuple[Problem, ...]]:
    """Return the file's content as values, and all problems; places as `cluster.x`."""
    report = Report()
    hyperpod_config = read_record(HyperpodConfig, _prepared(content, report), "", report)
    _check(hyperpod_config, report)
    return hyperpod_config, tuple(report.problems)


def _prepared(content: Any, report: Report) -> Any:
    """Return the content without values that Hydra requires to be filled in, script arguments as a
    list."""
    content = _without_holes(content, "", report)
    training = content.get("training_cfg") if isinstance(content, dict) else None
    if isinstance(training, dict):
        for key in ("script_args", "pre_script", "post_script"):
            training[key] = _lines(training.get(key))
    if isinstance(content, dict) and isinstance(content.get("container_mounts"), list):
        mounts = content["container_mounts"]
        content["container_mounts"] = [mount for mount in mounts if mount is not None]
    return content


def _without_holes(value: Any, path: str, report: Report) -> Any:
    match value:
        case dict():
            return {
                key: _without_holes(inner, f"{path}.{key}" if path else str(key), report)
                for key, inner in value.items()
            }
        case list():
            return [
                _without_holes(inner, f"{path}[{index}]", report)
                for index, inner in enumerate(value)
            ]
        case str() if value == MISSING:
            report.required(path, "??? stands for a value that you give")
            return None
        case str() if "${" in value and not path.startswith("training_cfg."):
            report.invalid(path, value, "references between values are not followed here")
            return None
        case _:
            return value


def _lines(value: Any) -> Any:
    """Return the pieces of a command line, in any of its forms: one text, a list, or `--option:
    value`."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        return value
    pieces: list[Any] = []
    for item in value:
        if isinstance(item, dict):
            pairs = item.items()
            pieces += [" ".join([str(key), *_words(inner)]) for key, inner in pairs]
        elif item is not None:
            pieces.append(item)
    return pieces


def _words(value: Any) -> list[str]:
    """Return the words of an option's value: none of null, several of a list, else one."""
    if value is None:
        return []
    if isinstance(value, list):
        return [word for inner in value for word in _words(inner)]
    return [_word(str(value))]


def _word(text: str) -> str:
    """Return a text as one word of the shell, in which variables are replaced.

    A text in quotes stays as it is: that CLI quotes nothing, so files for it do it themselves.
    """
    if _PLAIN.fullmatch(text) or (len(text) > 1 and text[0] == text[-1] and text[0] in "\"'"):
        return text
    return '"' + re.sub(r'([\\"`])', r"\\\1", text) + '"'


def _check(config: HyperpodConfig, report: Report) -> None:
    if config.git.get("repo_url"):
        why = "a script is not fetched; have it in the image, or in a volume"
        report.forbidden("git.repo_url", why)
    options, place = config.cluster.cluster_config, "cluster.cluster_config"
    for problem in resume_problems(annotations_of(options)):
        report.invalid(f"{place}.annotations", "", problem)
    wants_resume = annotations_of(options).get(AUTO_RESUME) == "true"
    if wants_resume and options.restart_policy is not KubeflowRestartPolicy.ON_FAILURE:
        why = f"{AUTO_RESUME} needs OnFailure"
        report.invalid(f"{place}.restartPolicy", options.restart_policy.value, why)
    if bool(options.custom_labels.get(QUEUE)) != bool(options.priority_class_name):
        why = f"it and the label {QUEUE} go together: give both or neither"
        report.invalid(f"{place}.priority_class_name", options.priority_class_name, why)
    selector = options.label_selector
    if selector is not None:
        for part, labels in (("required", selector.required), ("preferred", selector.preferred)):
            for key, values in labels.items():
                if not isinstance(values, str | list) or not values:
                    report.invalid(f"{place}.label_selector.{part}.{key}", values, "list values")
        if selector.weights and len(selector.weights) != len(selector.preferred):
            why = "one for each label that is preferred"
            report.invalid(f"{place}.label_selector.weights", selector.weights, why)


def annotations_of(options: ClusterConfig) -> dict[str, str]:
    """Return annotations as texts: YAML makes booleans and numbers of them."""
    return {key: _text(value) for key, value in options.annotations.items() if value is not None}


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


# --- the manifest


def pytorchjob(config: HyperpodConfig, machine: InstanceType) -> Object:
    """Return the job; `machine`: the resources of the instance type."""
    options, run = config.cluster.cluster_config, config.training_cfg.run
    labels = {"app": run.name, **options.custom_labels}
    metadata: Object = {"name": run.name, "labels": labels}
    if options.namespace:
        metadata["namespace"] = options.namespace
    if annotations := annotations_of(options):
        metadata["annotations"] = annotations
    worker = {
        "replicas": run.nodes,
        "restartPolicy": options.restart_policy.value,
        "template": {"metadata": {"labels": labels}, "spec": _pod(config, machine)},
    }
    spec: Object = {"pytorchReplicaSpecs": {"Worker": worker}}
    if run.nodes > 1:
        together = {"minReplicas": run.nodes, "maxReplicas": run.nodes}
        spec["elasticPolicy"] = {"rdzvBackend": "c10d", **together}
    version = f"{GROUP}/{VERSION}"
    return {"apiVersion": version, "kind": KIND, "metadata": metadata, "spec": spec}


def tasks_of(config: HyperpodConfig, machine: InstanceType) -> int:
    """Return the processes of each node."""
    return config.training_cfg.run.ntasks_per_node or machine.gpus or machine.neuron or 1


def _pod(config: HyperpodConfig, machine: InstanceType) -> Object:
    options = config.cluster.cluster_config
    volumes, mounts = zip(*_volumes(config), strict=True)
    container: Object = {
        "name": CONTAINER,
        "image": config.container,
        "imagePullPolicy": options.pull_policy,
        "command": ["/bin/bash", "-c", command(config, machine)],
        "env": [{"name": key, "value": _text(value)} for key, value in _variables(config)],
        "volumeMounts": list(mounts),
        "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
    }
    asked = {GPU: min(tasks_of(config, machine), machine.gpus)}
    asked |= {NEURON: machine.neuron, EFA: machine.efa}
    needed = {name: str(count) for name, count in asked.items() if count}
    if needed:
        container["resources"] = {"requests": needed, "limits": needed}
    pod: Object = {"containers": [container], "volumes": list(volumes)}
    if options.service_account_name:
        pod["serviceAccountName"] = options.service_account_name
    if options.priority_class_name:
        pod["priorityClassName"] = options.priority_class_name
    affinity = _affinity(options.label_selector)
    if affinity:
        pod["affinity"] = {"nodeAffinity": affinity}
    return pod


def command(config: HyperpodConfig, machine: InstanceType) -> str:
    """Return the shell script of the container."""
    training = config.training_cfg
    options = f"--nproc_per_node {tasks_of(config, machine)} --nnodes {training.run.nodes}"
    words = ["torchrun", options, shlex.quote(training.entry_script), *training.script_args]
    return "\n".join(["set -ex", *training.pre_script, " ".join(words), *training.post_script])


def _variables(config: HyperpodConfig) -> Iterator[tuple[str, Any]]:
    for name, value in config.env_vars.items():
        if value is not None:
            yield name, value


def _volumes(config: HyperpodConfig) -> Iterator[tuple[Object, Object]]:
    """Return each volume and its mount."""
    options = config.cluster.cluster_config
    claims = list(options.persistent_volume_claims)
    item = options.persistent_volume_claim
    if item.get("claimName") and item.get("mountPath"):
        claims.append(VolumeClaim(str(item["claimName"]), str(item["mountPath"])))
    for claim in claims:
        source = {"persistentVolumeClaim": {"claimName": claim.claim_name}}
        yield _volume(claim.claim_name, source, claim.mount_path)
    for volume in options.volumes:
        yield _volume(volume.volume_name, _host(volume.host_path), volume.mount_path)
    for index, path in enumerate(config.container_mounts):
        yield _volume(f"mount-{index}", _host(path), path)
    yield _volume("shm", {"hostPath": {"path": "/dev/shm", "type": "Directory"}}, "/dev/shm")


def _host(path: str) -> Object:
    return {"hostPath": {"path": path}}


def _volume(name: str, source: Object, path: str) -> tuple[Object, Object]:
    return {"name": name, **source}, {"name": name, "mountPath": path}


def _affinity(selector: NodeLabels | None) -> Object:
    if selector is None:
        return {}
    result: Object = {}
    if selector.required:
        term = {"matchExpressions": [_in(*pair) for pair in selector.required.items()]}
        result["requiredDuringSchedulingIgnoredDuringExecution"] = {"nodeSelectorTerms": [term]}
    if selector.preferred:
        weights = selector.weights or (100,) * len(selector.preferred)
        pairs = zip(weights, selector.preferred.items(), strict=False)
        result["preferredDuringSchedulingIgnoredDuringExecution"] = [
            {"weight": weight, "preference": {"matchExpressions": [_in(*pair)]}}
            for weight, pair in pairs
        ]
    return result


def _in(key: str, values: Any) -> Object:
    listed = [values] if isinstance(values, str) else [_text(value) for value in values]
    return {"key": key, "operator": "In", "values": listed}


# --- from options


def resume_annotations(retries: int) -> Object:
    """Return the two annotations that request auto-resume."""
    return {AUTO_RESUME: True, MAX_RETRIES: retries}
