"""Kinds of this project about nodes as data, and their objects as values: Machine, Cluster,
NodeCheck and NodeRecord.

Reading is tolerant: malformed parts become a default and a problem.

- A provider makes a node of a Machine, and repairs are ordered for it. On the local cluster each is
  a node of processes; the name is that of the node.
- A Cluster has groups of equal machines, as the cluster API made them. The API's own objects are
  stored unchanged; this module has the parts that the rest of the project needs.
- A NodeCheck has nodes to be tested, and the results. It is made by `unbroken check`, by the
  cluster API, when a node joins, and after a repair.
- A NodeRecord has the blame of a node, over all jobs, and its repairs. There is one for each node,
  with its name; it outlives jobs, and a machine that was replaced.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any, Generic, TypeVar

from msgspec import Meta

from unbroken.errors import SpecError
from unbroken.spec.job.incident import GROUP, VERSION
from unbroken.spec.problems import Problem, Report
from unbroken.spec.schema.fields import Natural, blank_record, read_record, write_record
from unbroken.spec.schema.fields import PreciseTime as Time

from .values import Action, NodeRecovery


class MachinePhase(Enum):
    """Phase of a machine."""

    PENDING = "Pending"
    STARTING = "Starting"
    """Its node is brought up, its lifecycle script runs."""
    RUNNING = "Running"
    REBOOTING = "Rebooting"
    RESETTING = "Resetting"
    """Its GPUs are being reset."""
    STOPPING = "Stopping"
    """Being deleted: some of its processes may still be alive."""
    FAILED = "Failed"
    """The check cannot start: see the message."""


@dataclass(frozen=True, slots=True)
class MachineTaint:
    """A taint of the node from its start."""

    key: str
    effect: str
    value: str = ""


@dataclass(frozen=True, slots=True)
class LifeCycle:
    """Scripts of the instance group, as `LifeCycleConfig`."""

    source: str = ""
    """`s3://bucket/prefix`, mapped to a directory by configuration."""
    on_create: str = ""
    """File in `source`, run before the node joins, with `SAGEMAKER_...` of the documented names."""
    on_init_complete: str = ""
    """File in `source`, run after it has joined."""


@dataclass(frozen=True, slots=True)
class MachineSpec:
    """The desired state of a machine."""

    cluster: str = ""
    """Cluster object that it belongs to; empty: none."""
    instance_group: str = ""
    instance_type: str = ""
    """Type such as `ml.p5.48xlarge`: gives its capacity; empty: as the local cluster was
    started."""
    threads_per_core: Natural = 0
    """1: a node of a type with two threads for each core offers one CPU for each core. 0 or 2: all
    virtual CPUs."""
    logical_id: str = ""
    """Logical id of the place in its group, kept when the machine is replaced."""
    labels: Mapping[str, str] = field(default_factory=dict)
    taints: tuple[MachineTaint, ...] = ()
    life_cycle: LifeCycle = LifeCycle()
    boots: Natural = 0
    """Reboots ordered so far: raise it to order one."""
    resets: Natural = 0
    """Resets of the GPUs ordered so far."""


@dataclass(frozen=True, slots=True)
class MachineStatus:
    """The observed state of a machine."""

    phase: MachinePhase = MachinePhase.PENDING
    message: str = ""
    boots: Natural = 0
    """Reboots carried out: when it equals the spec's, all have been."""
    resets: Natural = 0
    index: Natural | None = None
    """Number of its addresses on this host; local cluster only."""
    boot_id: str = ""
    started_at: Time | None = None
    """Time of its latest start."""
    life_cycle: str = ""
    """State of the newest script: empty, Skipped, Running, Succeeded or Failed."""
    life_cycle_log: str = ""
    """File with its output."""


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """The request for a cluster. The object's name is the cluster's, in lower case."""

    name: str
    """Name as given: a cluster's name may have capitals."""
    cluster_id: str
    """12 of [a-z0-9], the end of its ARN."""
    request: Mapping[str, Any]
    """The members of CreateCluster as UpdateCluster left them, InstanceGroups among them."""
    node_recovery: NodeRecovery = NodeRecovery.AUTOMATIC
    tags: Mapping[str, str] = field(default_factory=dict)
    targets: Mapping[str, Any] = field(default_factory=dict)
    """Instance group -> machines wanted, if different from the request's InstanceCount."""


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """The state of a cluster."""

    phase: str = "Creating"
    """A ClusterStatus of the API."""
    message: str = ""
    created_at: Time | None = None
    updated_at: Time | None = None
    state: Mapping[str, Any] = field(default_factory=dict)
    """Groups, instances, operations and events, as the controller of clusters keeps them."""


def script_names(path: str) -> tuple[str, ...]:
    """Return the path of a lifecycle script below its folder, split. Raises SpecError if it may
    lead elsewhere.

    Names are taken literally: `%2e%2e` is an ordinary name.
    """
    names = tuple(path.split("/"))
    for name in names:
        if name in ("", ".", "..") or not name.isprintable():
            raise SpecError(
                f"{path[:200]!r}: each part between slashes must be the name of a folder or file, "
                f"not {name[:80]!r}"
            )
    return names


KEPT_SECONDS = 86400.0
"""Seconds after which an ended check is deleted."""


class CheckKind(Enum):
    """Kind of a test; all but BASIC have SageMaker's names."""

    BASIC = "Basic"
    """Tests of a few seconds: whether every part exists and answers."""
    STRESS = "InstanceStress"
    CONNECTIVITY = "InstanceConnectivity"
    TRAINING = "MultiNodeTrainingValidation"


class CheckPhase(Enum):
    """Progress of a check."""

    PENDING = "Pending"
    RUNNING = "Running"
    PASSED = "Passed"
    FAILED = "Failed"
    """A node is faulty: `status.faulty` names it."""
    UNKNOWN = "Unknown"
    """The check could not be run or completed: `status.message` has the reason. No node is
    blamed."""


class Outcome(Enum):
    """Outcome of one test on one node."""

    PASS = "pass"
    FAIL = "fail"
    UNKNOWN = "unknown"
    """The test could not be run or completed: no fault."""
    SKIPPED = "skipped"
    """The node has no such hardware."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One test on one node."""

    node: str
    kind: CheckKind
    test: str
    """Name such as `memory-pattern`, `disk-read-back`, `all-reduce-bandwidth`."""
    outcome: Outcome
    seconds: float
    message: str = ""
    measured: float | None = None
    expected: float | None = None
    """The limit that the value was compared with."""
    unit: str = ""
    peer: str = ""
    """The other node of a pair."""
    backend: str = ""
    """Backend of torch.distributed that moved the data; empty: no links were measured."""


@dataclass(frozen=True, slots=True)
class NodeCheckSpec:
    """The nodes and tests of a check."""

    nodes: tuple[str, ...]
    kinds: tuple[CheckKind, ...] = (CheckKind.BASIC,)
    reason: str = ""
    """Author and reason of the check, in words."""
    is_forced: bool = False
    """Test nodes while pods train there; otherwise wait for a busy node."""
    timeout_seconds: Annotated[int, Meta(ge=1)] = 7200


@dataclass(frozen=True, slots=True)
class NodeCheckStatus:
    """The results of a check."""

    phase: CheckPhase = CheckPhase.PENDING
    message: str = ""
    """Its activity, the reason of its wait, or the result, in a line."""
    started_at: Time | None = None
    ended_at: Time | None = None
    done: int = 0
    total: int = 0
    """Tests so far, and in all."""
    results: tuple[CheckResult, ...] = ()
    faulty: tuple[str, ...] = ()
    """Nodes found at fault."""


HISTORY_MAX = 20
BLAME_MAX = 50


class BlameKind(Enum):
    """Kind of evidence against a node."""

    FAULT = "fault"
    """The node's daemon saw a fault."""
    INCIDENT = "incident"
    """A job's incident names the node as culprit."""
    CHECK = "check"
    """A check failed."""
    LOST = "lost"
    """The node went silent."""
    RELAPSE = "relapse"
    """A fault within the probation after a repair."""


@dataclass(frozen=True, slots=True)
class BlameEntry:
    """One piece of evidence against a node."""

    at: Time
    kind: BlameKind
    source: str
    """Reason of the fault, `NAMESPACE/INCIDENT`, or name of the check."""
    text: str
    """The evidence, in a line."""
    weight: float
    """Points when the entry was new; they decay."""


class RepairState(Enum):
    """Stage of a repair, in order."""

    WAITING = "Waiting"
    """Waiting for its turn, for permission or for a person; `message` has the reason."""
    DRAINING = "Draining"
    """Jobs are moving off."""
    ACTING = "Acting"
    """Ordered from the provider."""
    CHECKING = "Checking"
    """The node is back and is being tested."""
    DONE = "Done"
    FAILED = "Failed"
    """The next rung, or a person, follows."""


@dataclass(frozen=True, slots=True)
class RepairRecord:
    """One repair.  Times: seconds since the epoch, None: not reached."""

    action: Action
    reason: str
    """Reason of the repair, in a line."""
    asked_by: str
    """`daemon`, `label`, `annotation`, `check`, `lost`, or another origin."""
    state: RepairState
    began_at: Time
    """Time at which the need was seen."""
    fault: str = ""
    """Reason of the fault (`fault-reasons`), by which repeats are recognised."""
    message: str = ""
    tries: int = 0
    withdrawn_at: Time | None = None
    """Time at which it was taken out of service: jobs have a bounded time from then on to move
    off."""
    acted_at: Time | None = None
    returned_at: Time | None = None
    """Time at which the node, or its replacement, was Ready again."""
    ended_at: Time | None = None
    check: str = ""
    """NodeCheck that tests the node."""
    replacement: str = ""
    """Node that replaces it; empty: the same, or not known."""
    boot_id: str = ""
    """Boot ID of the node when the repair was ordered."""


@dataclass(frozen=True, slots=True)
class NodeRecordSpec:
    """All that is kept about a node."""

    blame: tuple[BlameEntry, ...] = ()
    """Entries, oldest first, at most BLAME_MAX."""
    repair: RepairRecord | None = None
    """The repair under way."""
    history: tuple[RepairRecord, ...] = ()
    """Ended repairs, oldest first, at most HISTORY_MAX."""
    quarantined_at: Time | None = None
    """Time since when the node takes no pods until `unbroken nodes clear`; None: it takes pods."""
    quarantine_reason: str = ""
    probation_until: Time | None = None
    """Time until which a fault counts as the last repair's failure."""
    cleared_at: Time | None = None
    cleared_by: str = ""
    """Author of the latest appeal that was granted, with its reason."""
    node_uid: str = ""
    """Uid of the Node that `machine` was taken from; empty: none was."""
    machine: str = ""
    """Provider ID that the Node had when it joined.  Only this machine is repaired: a node that is
    taken over later may name another."""


Spec = TypeVar("Spec")
Status = TypeVar("Status")


@dataclass(frozen=True, slots=True)
class OwnKind(Generic[Spec, Status]):
    """A kind of `unbroken.dev/v1` whose objects have no namespace."""

    kind: str
    plural: str
    short: str
    """Short name that kubectl accepts for the plural."""
    spec: type[Spec]
    status: type[Status] | None
    """Class of the status; None: the kind has no status."""

    @property
    def path(self) -> str:
        """Return the path of the collection at the API server."""
        return f"apis/{GROUP}/{VERSION}/{self.plural}"

    def new(self, name: str, spec: Spec, metadata: Mapping[str, Any] | None = None) -> Any:
        """Return an object to create; `metadata` has its fields besides the name."""
        return {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": self.kind,
            "metadata": {"name": name, **(metadata or {})},
            "spec": write_record(spec),
        }

    def spec_of(self, content: Any) -> tuple[Spec, tuple[Problem, ...]]:
        """Return the spec of an object, and its problems."""
        return _part(self.spec, content, "spec")

    def status_of(self, content: Any) -> tuple[Status, tuple[Problem, ...]]:
        """Return the status of an object, and its problems; defaults if it has none yet."""
        assert self.status is not None
        return _part(self.status, content, "status")


Record = TypeVar("Record")


def _part(record: type[Record], content: Any, part: str) -> tuple[Record, tuple[Problem, ...]]:
    report = Report()
    result = content.get(part) if isinstance(content, Mapping) else None
    if not isinstance(result, Mapping):
        if result is not None:
            report.invalid(part, result, "must be an object")
        return blank_record(record), tuple(report.problems)
    return read_record(record, result, part, report), tuple(report.problems)


CLUSTER = OwnKind("Cluster", "clusters", "ubc", ClusterSpec, ClusterStatus)
MACHINE = OwnKind("Machine", "machines", "ubm", MachineSpec, MachineStatus)
NODE_CHECK = OwnKind("NodeCheck", "nodechecks", "nc", NodeCheckSpec, NodeCheckStatus)
NODE_RECORD: OwnKind[NodeRecordSpec, None] = OwnKind(
    "NodeRecord", "noderecords", "nr", NodeRecordSpec, None
)
OWN_KINDS: tuple[OwnKind[Any, Any], ...] = (CLUSTER, MACHINE, NODE_CHECK, NODE_RECORD)
