"""The HyperPodPyTorchJob: its spec and status as values.

Field names are the CRD's in snake case; `codec` renames them.  What a field means, its default and
its limits are the CRD's (HyperPod training operator, CRD v1; the log rules as of agent 1.1.3).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

GROUP, VERSION, KIND = "sagemaker.amazonaws.com", "v1", "HyperPodPyTorchJob"
PLURAL = "hyperpodpytorchjobs"

Object = Mapping[str, Any]
"""A part of a Kubernetes object that is passed on as it is."""


class CleanPodPolicy(Enum):
    """Which pods are deleted when the job has ended."""

    ALL = "All"
    ONLY_COMPLETE = "OnlyComplete"
    NONE = "None"


@dataclass(frozen=True, slots=True)
class LogRule:
    """One entry of `logMonitoringConfiguration`; patterns match from the start of a line."""

    name: str
    log_pattern: str
    expected_start_cut_off_in_seconds: float | None = None
    expected_recurring_frequency_in_seconds: float | None = None
    stop_pattern: str | None = None
    metric_threshold: float | None = None
    operator: str | None = None
    metric_evaluation_data_points: int = 1
    fault_on_match: bool = False


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """How many restarts before the next rung of the ladder."""

    eval_period_seconds: int
    num_restart_before_full_job_restart: int | None = None
    max_full_job_restarts: int | None = None
    max_num_repeat_offenders_to_avoid: int | None = None
    scale_up_snooze_time_in_seconds: int = 0


@dataclass(frozen=True, slots=True)
class RunPolicy:
    """Limits of a job's life; None: no limit."""

    clean_pod_policy: CleanPodPolicy = CleanPodPolicy.ALL
    job_max_retry_count: int | None = None
    active_deadline_seconds: int | None = None
    startup_deadline_seconds: int | None = None
    fault_deadline_seconds: int | None = None
    suspend: bool = False
    workload_mode: str | None = None
    ttl_seconds_after_finished: int = -1
    """Seconds that a finished job is kept; -1: for ever.  0 in a manifest means for ever too: the
    stock client writes 0 into every job that it makes, and reads it back afterwards."""
    log_monitoring_configuration: tuple[LogRule, ...] = ()
    restart_policy: RestartPolicy | None = None


@dataclass(frozen=True, slots=True)
class ElasticPolicy:
    """Sizes that a job may have."""

    min_replicas: int | None = None
    max_replicas: int | None = None
    replica_increment_step: int | None = None
    replica_discrete_values: tuple[int, ...] = ()
    scaling_timeout_in_seconds: int | None = None
    graceful_shutdown_timeout_in_seconds: int | None = None
    faulty_scale_down_timeout_in_seconds: int | None = None


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """A group of equal pods: `replicas` that train and `spares` that wait."""

    name: str
    template: Object
    replicas: int = 0
    spares: int = 0
    max_replicas: int | None = None


@dataclass(frozen=True, slots=True)
class JobSpec:
    """What a user wants."""

    replica_specs: tuple[ReplicaSpec, ...]
    nproc_per_node: str = "auto"
    """`auto`, `cpu`, `gpu`, or a number."""
    run_policy: RunPolicy = RunPolicy()
    elastic_policy: ElasticPolicy | None = None

    @property
    def nnodes(self) -> int:
        """Pods that train at the same time: the number of node ranks."""
        return sum(replica.replicas for replica in self.replica_specs)


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition of the status; exactly the keys that the stock client knows."""

    type: str
    status: str
    reason: str = ""
    message: str = ""
    last_transition_time: float = 0.0
    """Seconds since the epoch; RFC 3339 on the wire."""
    last_probe_time: float | None = None


@dataclass(frozen=True, slots=True)
class RestartStatus:
    """Budget used in the running evaluation period."""

    current_eval_period: int = 0
    """Number of the period, counted from the job's start in steps of evalPeriodSeconds."""
    full_job_restart_count: int = 0
    restart_count: int = 0
    """Process-level restarts in this period since the last full job restart."""


@dataclass(frozen=True, slots=True)
class FaultyPods:
    """The culprits of the latest fault (`latestFaultyPodInstanceList`)."""

    restart_type: str
    """PLR (processes in their pods) or JLR (all pods)."""
    faulty_instance_id_list: tuple[str, ...] = ()
    faulty_pod_list: tuple[str, ...] = ()
    faulty_rank_list: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class JobStatus:
    """What became of it.  The stock client refuses keys that it does not know, so there are no
    others; what this operator does not write (`other`) is kept as it was found."""

    start_time: float | None = None
    completion_time: float | None = None
    conditions: tuple[Condition, ...] = ()
    restart_count: int = 0
    """Restarts so far, which is also the number of the newest attempt."""
    restart_status: RestartStatus | None = None
    master_addr: str | None = None
    master_port: str | None = None
    job_pods: tuple[Object, ...] = ()
    latest_faulty: FaultyPods | None = None
    other: Object = field(default_factory=dict)
