"""Kubeflow's PyTorchJob (kubeflow.org/v1) as values: its spec and its status.

Names and defaults are those of the training operator 1.8 (`pytorch_types.go`, `common_types.go`,
`pytorch_defaults.go`).

Reading of a status is tolerant: malformed parts become defaults.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any

from msgspec import Meta

from unbroken.spec.auto_resume import resume_problems
from unbroken.spec.job.rules import PODS_MAX, check_kinds
from unbroken.spec.keys import KUBEFLOW_GROUP, PYTORCHJOB_PREFIX
from unbroken.spec.problems import Problem, Report, below
from unbroken.spec.schema.fields import (
    Count,
    Positive,
    Time,
    blank_record,
    read_record,
    write_record,
)

GROUP, VERSION, KIND, PLURAL = KUBEFLOW_GROUP, "v1", "PyTorchJob", "pytorchjobs"
PATH = f"apis/{GROUP}/{VERSION}"
CONTAINER = "pytorch"
"""Name of the container that trains; every template must have it."""
PORT_NAME, PORT = "pytorchjob-port", 23456

OPERATOR_LABEL, OPERATOR = PYTORCHJOB_PREFIX + "operator-name", "pytorchjob-controller"

NAME_MAX = 63
"""Longest name of a pod's service (RFC 1035), which is the name of the pod."""
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")

PortNumber = Annotated[int, Meta(ge=1, le=65535)]


class Replica(Enum):
    """The two types of replicas."""

    MASTER = "Master"
    WORKER = "Worker"


class KubeflowRestartPolicy(Enum):
    """Treatment of a pod whose program fails."""

    ON_FAILURE = "OnFailure"
    """Its containers are started again."""
    ALWAYS = "Always"
    NEVER = "Never"
    """The job fails."""
    EXIT_CODE = "ExitCode"
    """Exit codes from 128 get a new pod; lower codes fail the job."""


class KubeflowCleanPodPolicy(Enum):
    """The pods that are deleted when the job has ended."""

    NONE = "None"
    RUNNING = "Running"
    ALL = "All"


@dataclass(frozen=True, slots=True)
class KubeflowReplicaSpec:
    """Pods of one type."""

    replicas: Count = 1
    restart_policy: KubeflowRestartPolicy = KubeflowRestartPolicy.ON_FAILURE
    template: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ReplicaSpecs:
    """Pods of every type; at least one is given."""

    master: KubeflowReplicaSpec | None = field(default=None, metadata={"key": Replica.MASTER.value})
    worker: KubeflowReplicaSpec | None = field(default=None, metadata={"key": Replica.WORKER.value})


@dataclass(frozen=True, slots=True)
class KubeflowRunPolicy:
    """Time limits of a job, and what is kept after its end."""

    clean_pod_policy: KubeflowCleanPodPolicy = KubeflowCleanPodPolicy.NONE
    ttl_seconds_after_finished: Count | None = None
    active_deadline_seconds: Positive | None = None
    backoff_limit: Count | None = None
    """Restarts of containers before the job fails."""
    scheduling_policy: Mapping[str, Any] = field(default_factory=dict)
    """The policy of gang scheduling, which the scheduler does."""
    suspend: bool = False
    managed_by: str = ""


@dataclass(frozen=True, slots=True)
class RendezvousSetting:
    """One setting of torchrun's `--rdzv-conf`."""

    key: str
    value: str = ""


@dataclass(frozen=True, slots=True)
class KubeflowElasticPolicy:
    """Options of torchrun, passed as variables `PET_...`."""

    min_replicas: Positive | None = None
    max_replicas: Positive | None = None
    rdzv_backend: str = "c10d"
    rdzv_port: PortNumber | None = None
    rdzv_host: str = ""
    rdzv_id: str = ""
    rdzv_conf: tuple[RendezvousSetting, ...] = ()
    standalone: bool = False
    n_proc_per_node: Positive | None = None
    max_restarts: Count | None = None
    metrics: tuple[Mapping[str, Any], ...] = ()
    """Metrics of the HorizontalPodAutoscaler that the training operator creates."""


@dataclass(frozen=True, slots=True)
class PyTorchJobSpec:
    """The spec of a PyTorchJob."""

    pytorch_replica_specs: ReplicaSpecs
    run_policy: KubeflowRunPolicy = KubeflowRunPolicy()
    elastic_policy: KubeflowElasticPolicy | None = None
    nproc_per_node: str = ""
    """`auto`, `cpu`, `gpu` or a number; empty: the default of the program."""

    def replicas(self) -> dict[Replica, KubeflowReplicaSpec]:
        """Return the replica specs that are given, the master first."""
        specs = self.pytorch_replica_specs
        both = ((Replica.MASTER, specs.master), (Replica.WORKER, specs.worker))
        return {replica: spec for replica, spec in both if spec is not None}


@dataclass(frozen=True, slots=True)
class ParsedPyTorchJob:
    """A job that was read, with its problems and warnings."""

    spec: PyTorchJobSpec
    problems: tuple[Problem, ...] = ()
    warnings: tuple[str, ...] = ()


def parse_pytorchjob(content: Any) -> ParsedPyTorchJob:
    """Read the spec of a PyTorchJob, with all problems, and warnings of fields without effect."""
    report = Report()
    spec = content.get("spec") if isinstance(content, Mapping) else None
    if not isinstance(spec, Mapping):
        report.required("spec")
        return ParsedPyTorchJob(blank_record(PyTorchJobSpec), tuple(report.problems))
    py_torch_job = read_record(PyTorchJobSpec, spec, "spec", report)
    _check_name(content, py_torch_job, report)
    _check_replicas(py_torch_job, report)
    _check_elastic(py_torch_job, report)
    for problem in resume_problems(_annotations(content)):
        report.warn(problem)
    return ParsedPyTorchJob(py_torch_job, tuple(report.problems), tuple(report.warnings))


def _check_name(content: Mapping[str, Any], spec: PyTorchJobSpec, report: Report) -> None:
    """Check that the names of the pods are valid names of services."""
    metadata = content.get("metadata")
    name = metadata.get("name") if isinstance(metadata, Mapping) else None
    if not isinstance(name, str):
        return  # generated, or missing, which the API will report
    if not _NAME.fullmatch(name):
        why = (
            "must be small letters, digits and '-', and begin with a letter: services are named so"
        )
        report.invalid("metadata.name", name, why)
    for replica, one in spec.replicas().items():
        longest = f"{name}-{replica.value.lower()}-{max(one.replicas - 1, 0)}"
        if len(longest) > NAME_MAX:
            why = f"must be {len(longest) - NAME_MAX} letters shorter, for there will be {longest}"
            report.invalid("metadata.name", name, why)


def _check_replicas(spec: PyTorchJobSpec, report: Report) -> None:
    place = "spec.pytorchReplicaSpecs"
    replicas = spec.replicas()
    if not replicas and not report.has_below(place):
        report.required(place, "a Master or a Worker")
    master = replicas.get(Replica.MASTER)
    if master is not None and master.replicas > 1:
        # `validatePyTorchReplicaSpecs` of the training operator's webhook.
        report.invalid(f"{place}.Master.replicas", master.replicas, "there is one master at most")
    pods = sum(one.replicas for one in replicas.values())
    if pods > PODS_MAX:
        report.invalid(place, pods, f"a job has at most {PODS_MAX} pods")
    for replica, one in replicas.items():
        where = f"{place}.{replica.value}.template.spec.containers"
        pod = one.template.get("spec")
        containers = pod.get("containers") if isinstance(pod, Mapping) else None
        listed = containers if isinstance(containers, list | tuple) else ()
        names = [item.get("name") for item in listed if isinstance(item, Mapping)]
        if CONTAINER not in names and not report.has_below(f"{place}.{replica.value}"):
            report.required(where, f"one of them must be named {CONTAINER}")
        if isinstance(pod, Mapping):
            check_kinds(pod, f"{place}.{replica.value}.template.spec", report)
        if isinstance(pod, Mapping) and pod.get("restartPolicy"):
            where = f"{place}.{replica.value}.template.spec.restartPolicy"
            report.warn(f"{where}: not used; the restartPolicy beside the template counts")


def _check_elastic(spec: PyTorchJobSpec, report: Report) -> None:
    policy = spec.elastic_policy
    if policy is None:
        return
    least, most = policy.min_replicas, policy.max_replicas
    if least is not None and most is not None and least > most:
        place = below("spec.elasticPolicy", "minReplicas")
        report.invalid(place, least, f"must not be more than maxReplicas ({most})")
    if (least is None) != (most is None):
        place = below("spec.elasticPolicy", "minReplicas" if least is None else "maxReplicas")
        report.required(place, "minReplicas and maxReplicas go together")
    if spec.pytorch_replica_specs.worker is None:
        report.required("spec.pytorchReplicaSpecs.Worker", "elasticPolicy is about workers")


def _annotations(content: Mapping[str, Any]) -> Mapping[str, str]:
    metadata = content.get("metadata")
    result = metadata.get("annotations") if isinstance(metadata, Mapping) else None
    listed = result if isinstance(result, Mapping) else {}
    return {str(key): str(value) for key, value in listed.items()}


@dataclass(frozen=True, slots=True)
class JobCondition:
    """A condition: Created, Running, Restarting, Suspended, Succeeded or Failed."""

    type: str
    status: str
    """`True` or `False`."""
    reason: str = ""
    message: str = ""
    last_update_time: Time = 0.0
    last_transition_time: Time = 0.0


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """Numbers of pods of one type."""

    active: int = 0
    succeeded: int = 0
    failed: int = 0
    """Includes running pods that are being deleted: they may never report how they ended."""
    selector: str = ""
    label_selector: Mapping[str, Any] = field(default_factory=dict)
    """The older form of `selector`; read, never written."""


@dataclass(frozen=True, slots=True)
class ReplicaStatuses:
    """Numbers of pods by type; None: the job has no pods of that type."""

    master: ReplicaStatus | None = field(default=None, metadata={"key": Replica.MASTER.value})
    worker: ReplicaStatus | None = field(default=None, metadata={"key": Replica.WORKER.value})


@dataclass(frozen=True, slots=True)
class PyTorchJobStatus:
    """The status of a PyTorchJob."""

    conditions: tuple[JobCondition, ...] = ()
    """Conditions, the newest last."""
    replica_statuses: ReplicaStatuses = ReplicaStatuses()
    start_time: Time | None = None
    completion_time: Time | None = None
    last_reconcile_time: Time | None = None
    """Never written by this controller."""

    def has(self, type: str) -> bool:
        """True if the condition is true."""
        return any(
            condition.type == type and condition.status == "True" for condition in self.conditions
        )

    @property
    def is_finished(self) -> bool:
        """True if nothing is run any more."""
        return self.has("Succeeded") or self.has("Failed")


def status_from(content: Any) -> PyTorchJobStatus:
    """Return the status of an object; empty if it has none."""
    result = content if isinstance(content, Mapping) else {}
    return read_record(PyTorchJobStatus, result, "status", Report())


def status_to(status: PyTorchJobStatus) -> dict[str, Any]:
    """Return the status as a merge patch that leaves no stale part of it."""
    written = write_record(status)
    replicas = written.get("replicaStatuses") or {}
    counts = dict.fromkeys(("active", "succeeded", "failed"))
    written["replicaStatuses"] = {
        replica: None if item is None else {**counts, **{k: v for k, v in item.items() if v}}
        for replica, item in {**dict.fromkeys(r.value for r in Replica), **replicas}.items()
    }
    return {"startTime": None, "completionTime": None, **written}
