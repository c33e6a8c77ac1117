"""The HyperPodPyTorchJob: its spec, its options (annotations) and its status as values.

Field names are the CRD's in snake case; `codec` renames them. Meanings, defaults and limits of
fields are the CRD's (HyperPod training operator, CRD v1; log rules as in agent 1.1.3).

Annotation `unbroken.dev/log-rule-ranks` on the job: `RULE=WORD; RULE=WORD`, RULE `*` for the
others.

- `some`, the default of this operator: the job as a whole must log. A match of any rank of any node
  feeds the rule, and it hangs only when no node has a match any more. So if rank 0 alone logs the
  loss, or the last rank alone as in Megatron, the silent nodes do not hang.
- `node`, the meaning of the HyperPod agent, which reads local rank 0 of each node: some rank of
  each node must log. It applies if no word is given, that is, under another operator.
- `every`: each rank must log.
- `0,8,16`: each of these ranks must log; lines of other ranks do not count.

Values and `faultOnMatch` need no agreement: they count on any watched rank.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any

from msgspec import Meta

from unbroken.errors import SpecError
from unbroken.spec.keys import HYPERPOD_GROUP, KUEUE_PREFIX, QUEUE
from unbroken.spec.schema.fields import (
    CHOICES,
    INT_MAX,
    Count,
    IntOrString,
    Positive,
    Seconds,
    Time,
)

from .detectors import DEFAULTS, Detector, Mode

RANKS_KEY = "ranks"
"""Key of a rule in a start command."""


class RuleScope(Enum):
    """The ranks that must log so that a rule does not hang."""

    JOB = "some"
    NODE = "node"
    RANK = "every"


@dataclass(frozen=True, slots=True)
class RuleWatch:
    """The ranks whose lines feed a rule, and which of them must log."""

    scope: RuleScope = RuleScope.NODE
    ranks: frozenset[int] | None = None
    """Watched ranks; None: all."""

    def __str__(self) -> str:
        return self.scope.value if self.ranks is None else ",".join(map(str, sorted(self.ranks)))


OF_NODE = RuleWatch()


def read_watch(text: str) -> RuleWatch:
    """Read `some`, `node`, `every`, or ranks with commas. Raises SpecError."""
    word = text.strip()
    if word in {scope.value for scope in RuleScope}:
        return RuleWatch(RuleScope(word))
    parts = [part.strip() for part in word.split(",")]
    if all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts):
        return RuleWatch(RuleScope.RANK, frozenset(map(int, parts)))
    raise SpecError(f"{text!r} is none of some, node, every, or ranks such as 0,8")


def read_watches(annotation: str) -> dict[str, RuleWatch]:
    """Return the watches of the annotation's text by rule name. Raises SpecError."""
    watches = {}
    for part in filter(None, map(str.strip, annotation.split(";"))):
        name, is_pair, word = part.rpartition("=")
        if not is_pair or not name.strip():
            raise SpecError(f"{part!r} is not RULE=RANKS")
        watches[name.strip()] = read_watch(word)
    return watches


def watch_of(name: str, watches: Mapping[str, RuleWatch]) -> RuleWatch:
    """Return the ranks that are watched for the rule, by this operator's default."""
    return watches.get(name) or watches.get("*") or RuleWatch(RuleScope.JOB)


GROUP, VERSION, KIND = HYPERPOD_GROUP, "v1", "HyperPodPyTorchJob"
PLURAL = "hyperpodpytorchjobs"

Object = Mapping[str, Any]
"""A part of a Kubernetes object that is passed on as it is."""

Pattern = Annotated[str, Meta(min_length=1, max_length=4096)]
OPERATORS = ("gt", "gteq", "lt", "lteq", "eq")


class CleanPodPolicy(Enum):
    """The pods that are deleted when the job has ended."""

    ALL = "All"
    ONLY_COMPLETE = "OnlyComplete"
    NONE = "None"


@dataclass(frozen=True, slots=True)
class LogRule:
    """One entry of `logMonitoringConfiguration`; patterns match from the start of a line."""

    name: Annotated[str, Meta(min_length=1, max_length=253)]
    log_pattern: Pattern
    expected_start_cut_off_in_seconds: Seconds | None = None
    expected_recurring_frequency_in_seconds: Seconds | None = None
    stop_pattern: Pattern | None = None
    metric_threshold: float | None = None
    operator: Annotated[str, Meta(extra={CHOICES: OPERATORS})] | None = None
    metric_evaluation_data_points: Positive = 1
    fault_on_match: bool = False


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Restarts before the next rung of the ladder."""

    eval_period_seconds: Positive
    num_restart_before_full_job_restart: Count | None = None
    max_full_job_restarts: Count | None = None
    max_num_repeat_offenders_to_avoid: Count | None = None
    scale_up_snooze_time_in_seconds: Count = 0


@dataclass(frozen=True, slots=True)
class RunPolicy:
    """Limits of a job's life; None: no limit."""

    clean_pod_policy: CleanPodPolicy = CleanPodPolicy.ALL
    job_max_retry_count: Count | None = None
    active_deadline_seconds: Positive | None = None
    startup_deadline_seconds: Positive | None = None
    fault_deadline_seconds: Positive | None = None
    suspend: bool = False
    workload_mode: str | None = None
    ttl_seconds_after_finished: Annotated[int, Meta(ge=-1, le=INT_MAX)] = -1
    """Seconds that a finished job is kept; -1: for ever.

    0 in a manifest means for ever too, and is read as -1. The stock client writes 0 into every run
    policy that it makes, and reads the job back afterwards.
    """
    log_monitoring_configuration: Annotated[tuple[LogRule, ...], Meta(max_length=64)] = ()
    restart_policy: RestartPolicy | None = None


@dataclass(frozen=True, slots=True)
class ElasticPolicy:
    """Sizes that a job may have."""

    min_replicas: Positive | None = None
    max_replicas: Positive | None = None
    replica_increment_step: Positive | None = None
    replica_discrete_values: Annotated[tuple[Positive, ...], Meta(max_length=1024)] = ()
    scaling_timeout_in_seconds: Count | None = None
    graceful_shutdown_timeout_in_seconds: Count | None = None
    faulty_scale_down_timeout_in_seconds: Count | None = None


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """A group of equal pods: `replicas` that train and `spares` that wait."""

    name: Annotated[str, Meta(min_length=1, max_length=63)]
    template: Object
    replicas: Count = 0
    spares: Count = 0
    max_replicas: Count | None = None


@dataclass(frozen=True, slots=True)
class JobSpec:
    """The desired state of a job."""

    replica_specs: Annotated[tuple[ReplicaSpec, ...], Meta(min_length=1, max_length=64)]
    nproc_per_node: IntOrString = "auto"
    """`auto`, `cpu`, `gpu`, or a number."""
    run_policy: RunPolicy = RunPolicy()
    elastic_policy: ElasticPolicy | None = None

    @property
    def nnodes(self) -> int:
        """Pods that train at the same time: the number of node ranks."""
        return sum(replica.replicas for replica in self.replica_specs)


class AgentAuth(Enum):
    """Authentication of the operator by the agents."""

    TOKEN = "token"
    NONE = "none"


class AgentSource(Enum):
    """Source of the agent in a job's pods."""

    IMAGE = "image"
    """The pods' image, whose command starts the agent."""
    INJECTED = "injected"
    """The operator, which puts the agent before the command (`spec.job.launch`)."""


class SameError(Enum):
    """Consequence of an error that comes again at the same step."""

    STOP = "stop"
    """The job fails at once: no restart would help."""
    RESTART = "restart"
    """The job is restarted as long as its budget lasts."""


class Switch(Enum):
    """State of an option that is on by default."""

    ON = "on"
    OFF = "off"


class FenceBy(Enum):
    """Proof that the workers of an unreachable node have ended."""

    PROVIDER = "provider"
    """The Node is deleted, or tainted node.kubernetes.io/out-of-service."""
    LEASE = "lease"
    """As PROVIDER; or their lease has run out (`core.agent.machine`)."""


LEASE_SECONDS, LEASE_SECONDS_MIN, LEASE_SECONDS_MAX = 8.0, 4.0, 3600.0
"""Seconds of a lease: default and bounds. An agent counts as silent after 3 s: a shorter lease
would end workers for less."""


@dataclass(frozen=True, slots=True)
class JobOptions:
    """Options of a job beyond the CRD, as annotations `unbroken.dev/...` of the job."""

    agent_auth: AgentAuth = AgentAuth.TOKEN
    restart: Time | None = None
    """Time of the latest requested restart."""
    log_rule_ranks: Mapping[str, RuleWatch] = field(default_factory=dict)
    """Ranks that must log, by log rule; `*`: all other rules."""
    detectors: Mapping[Detector, Mode] = field(default_factory=lambda: dict(DEFAULTS))
    same_error: SameError = SameError.STOP
    in_process: Switch = Switch.ON
    """ON: workers that can leave their training keep their process through a restart."""
    warm: Switch = Switch.ON
    """ON: restarted workers may begin with their imports done."""
    preload: tuple[str, ...] = ()
    """Modules that warm workers begin with; empty: those that earlier ones imported."""
    buddy: Switch = Switch.ON
    """ON: snapshots are copied to an agent on another node."""
    packing: Switch = Switch.ON
    """ON: pods prefer nodes near the other pods of the job."""
    planned_moves: Switch = Switch.ON
    """ON: the job leaves a node that has a notice before the node goes."""
    fence_by: FenceBy = FenceBy.LEASE
    """Proof that the workers of an unreachable node have ended."""
    lease_seconds: float = LEASE_SECONDS
    """With `fence_by` LEASE: seconds that workers run while neither the operator nor all peers
    answer."""
    agent: AgentSource = AgentSource.IMAGE


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition of the status; exactly the keys that the stock client knows."""

    type: str
    status: str
    reason: str = ""
    message: str = ""
    last_transition_time: Time = 0.0
    last_probe_time: Time | None = None


@dataclass(frozen=True, slots=True)
class RestartStatus:
    """Budget used in the running evaluation period."""

    current_eval_period: Count = 0
    """Number of the period, counted from the job's start in steps of evalPeriodSeconds."""
    full_job_restart_count: Count = 0
    restart_count: Count = 0
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
    """The status of a job.

    The stock client refuses keys that it does not know, so there are no others. Fields that this
    operator does not write (`other`) are kept as found.
    """

    start_time: Time | None = None
    completion_time: Time | None = None
    conditions: tuple[Condition, ...] = ()
    restart_count: Count = 0
    """Restarts so far, which is also the number of the newest attempt."""
    restart_status: RestartStatus | None = None
    master_addr: str | None = None
    master_port: str | None = None
    job_pods: tuple[Object, ...] = ()
    latest_faulty: FaultyPods | None = field(
        default=None, metadata={"key": "latestFaultyPodInstanceList"}
    )
    other: Object = field(default_factory=dict)


WARM_VARIABLE, PRELOAD_VARIABLE = "UNBROKEN_WARM", "UNBROKEN_PRELOAD"
"""Variables of the agent; its workers do not see them."""
PRELOAD_MAX = 1000
_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


def read_preload(text: str) -> tuple[str, ...]:
    """Return names of modules, separated by commas. Raises SpecError."""
    names = tuple(dict.fromkeys(filter(None, map(str.strip, text.split(",")))))
    for name in names:
        if not _NAME.fullmatch(name):
            raise SpecError(f"{name[:80]!r} is no name of a module; write them like torch,numpy")
    if len(names) > PRELOAD_MAX:
        raise SpecError(f"names {len(names)} modules; at most {PRELOAD_MAX}")
    return names


POD_SETS_MAX = 8
"""Most pod sets of a Workload (kueue v0.16, workload_types.go)."""


def queue_of(job: Mapping[str, Any]) -> str:
    """Return the LocalQueue of a job from the API; empty: it has none."""
    metadata = job.get("metadata")
    labels = metadata.get("labels") if isinstance(metadata, Mapping) else None
    name = labels.get(QUEUE) if isinstance(labels, Mapping) else None
    return name if isinstance(name, str) else ""


def queue_warnings(job: Mapping[str, Any]) -> tuple[str, ...]:
    """Return warnings about parts of a job that need Kueue, which is not installed."""
    metadata = job.get("metadata")
    result = []
    if queue_of(job):
        result.append(
            f"metadata.labels[{QUEUE}]: no Kueue is known to this operator: the job runs without "
            "waiting for the queue"
        )
    for place in ("labels", "annotations"):
        given = metadata.get(place) if isinstance(metadata, Mapping) else None
        keys = given if isinstance(given, Mapping) else {}
        result += [
            f"metadata.{place}[{str(key)[:80]}]: no Kueue is known to this operator: it has no "
            "effect"
            for key in keys
            if str(key).startswith(KUEUE_PREFIX) and key != QUEUE
        ]
    return tuple(result)
