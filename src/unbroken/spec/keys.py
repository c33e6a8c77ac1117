"""Every label, annotation, finalizer, taint and condition type that unbroken reads or writes.

Each is written here once; a test keeps such names out of every other module. The docstring of a key
names its object, its writer, and its readers.
"""

from __future__ import annotations

from enum import Enum

OWN_GROUP = "unbroken.dev"
"""API group of unbroken's own kinds."""
OWN_PREFIX = f"{OWN_GROUP}/"
HYPERPOD_GROUP = "sagemaker.amazonaws.com"
"""API group of HyperPodPyTorchJob."""
HYPERPOD_PREFIX = f"{HYPERPOD_GROUP}/"
KUBEFLOW_GROUP = "kubeflow.org"
TRAINER_GROUP = "trainer.kubeflow.org"
KUEUE_GROUP = "kueue.x-k8s.io"

# --- Jobs: annotations that a user writes on a HyperPodPyTorchJob, and the operator reads

AGENT = f"{OWN_PREFIX}agent"
"""Source of the agent. `injected`: the operator adds it to the job's pods. `image`: the image of
the pods has it. Without the annotation it is added where the command is `torchrun` or `accelerate
launch`."""
AGENT_AUTH = f"{OWN_PREFIX}agent-auth"
"""Authentication of commands by the agents. `token`: each command carries the job's token. `none`:
agents obey every caller, as HyperPod's agent does, and the operator serves every agent without a
proof. The operator repeats it on the pods."""
BUDDY = f"{OWN_PREFIX}buddy"
"""`on`: each agent copies its snapshots to an agent on another node. `off`: snapshots are not
copied."""
DETECTORS = f"{OWN_PREFIX}detectors"
"""Modes of the detectors of hangs and bad values: `DETECTOR=MODE; DETECTOR=MODE`, with `*` for
all other detectors.  Modes are `off`, `shadow`, `warn` and `act`."""
FENCE_BY = f"{OWN_PREFIX}fence-by"
"""Proof that the workers of an unreachable node have ended. `lease`: their lease has run out, or
the proof of `provider`. `provider`: the Node is deleted or has the out-of-service taint."""
IN_PROCESS = f"{OWN_PREFIX}in-process"
"""`on`: workers that leave a restartable function keep their process through a restart. `off`:
every restart makes new processes."""
LEASE_SECONDS = f"{OWN_PREFIX}lease-seconds"
"""Seconds that workers run while neither the operator nor all peers answer: 4 to 3600."""
LOG_RULE_RANKS = f"{OWN_PREFIX}log-rule-ranks"
"""Ranks that must match each log rule: `RULE=RANKS; RULE=RANKS`, with `*` for all other rules.
RANKS is `some` (any rank, the default), `node`, `every` or a list such as `0,8,16`."""
PACKING = f"{OWN_PREFIX}packing"
"""`on`: pods prefer nodes near the other pods of the job, by the topology labels of nodes.  `off`:
the operator adds no such preference."""
PLANNED_MOVES = f"{OWN_PREFIX}planned-moves"
"""`on`: the job leaves a node that has a notice before the node goes.  `off`: the job stays, and
its pods may be evicted."""
PRELOAD = f"{OWN_PREFIX}preload"
"""Modules that warm workers import before they start: `torch,numpy`.  Without it: the modules
that earlier attempts and runs of the program imported."""
RESTART = f"{OWN_PREFIX}restart"
"""Time of the newest order to restart (RFC 3339).  A new value orders a restart; `unbroken
restart` writes it."""
SAME_ERROR = f"{OWN_PREFIX}same-error"
"""Consequence of the same error at the same step. `stop`: the job fails. `restart`: it is restarted
as long as its restart budget lasts."""
WARM = f"{OWN_PREFIX}warm"
"""`on`: restarted workers are forked from a process that has their imports done. `off`: every
worker starts cold."""

# --- Jobs: what the operator writes

LEDGER = f"{OWN_PREFIX}ledger"
"""Annotation of a job: what its restarts were charged to; the operator writes and reads it."""
NOTIFIED = f"{OWN_PREFIX}notified"
"""Annotation of an Incident or NodeRecord: states that were told to the webhook of notifications;
the operator writes and reads it."""
JOB_LABEL = "HPJob"
"""Label of a job's pods, Secrets and Incidents: the job's name.  Commands select by it."""
JOB_NAME_LABEL = "job-name"
"""Label of the same pods and Incidents, for tools that look for this name."""
REPLICA_LABEL = f"{OWN_PREFIX}replica-spec"
"""Label of a job's pods: the name of their replica spec; the operator reads it."""
INDEX_LABEL = f"{OWN_PREFIX}index"
"""Label of a job's pods: their index in the replica spec; the operator and Kueue read it."""
CONTROL_PLANE = "hp-training-control-plane"
"""Label of the operator's pods.  Written by the chart and `unbroken up`; read by
`hyp get-operator-logs`."""


class ConditionType(Enum):
    """Condition types of a HyperPodPyTorchJob; the operator writes them."""

    CREATED = "Created"
    PODS_RUNNING = "PodsRunning"
    RUNNING = "Running"
    SUSPENDED = "Suspended"
    FAULTED = "Faulted"
    COMPLETED = "Completed"
    FAILED = "Failed"


# --- Nodes: HyperPod's keys
#
# Source: reference section 2.1; the documentation spells `fault-type` and `fault-reason`, real
# nodes have the plurals: those are written, both are read.

HEALTH = f"{HYPERPOD_PREFIX}node-health-status"
"""Label, a `Health`, and key of the taint.  The node daemon writes it; the operator reads it."""
DEEP_CHECK = f"{HYPERPOD_PREFIX}deep-health-check-status"
"""Label, a `DeepCheck`; the operator's checks write it."""
FAULT_TYPES = f"{HYPERPOD_PREFIX}fault-types"
"""Label: types of the newest fault; the node daemon writes it."""
FAULT_REASONS = f"{HYPERPOD_PREFIX}fault-reasons"
"""Label: reasons of the newest fault; the node daemon writes it."""
FAULT_TYPES_ALSO = f"{HYPERPOD_PREFIX}fault-type"
FAULT_REASONS_ALSO = f"{HYPERPOD_PREFIX}fault-reason"
FAULT_DETAILS = f"{HYPERPOD_PREFIX}fault-details"
"""Annotation: JSON array of {timestamp, type, reason, message}, newest last, by the node daemon."""
CLUSTER_NAME = f"{HYPERPOD_PREFIX}cluster-name"
"""Label of nodes and Machines: HyperPod's name of the cluster; metrics and commands read it."""
INSTANCE_GROUP = f"{HYPERPOD_PREFIX}instance-group-name"
"""Label of nodes and Machines: the instance group; metrics and commands read it."""
COMPUTE_TYPE = f"{HYPERPOD_PREFIX}compute-type"
"""Label of nodes: `hyperpod`."""
GPU_UNHEALTHY = "NvidiaGPUUnhealthy"
"""Condition of a node, by the node daemon: True while its GPU or driver is at fault."""
HARDWARE_UNHEALTHY = "HardwareUnhealthy"
"""Condition of a node, by the node daemon: True for any other fault that has an action."""

# --- Nodes: our own annotations

REPAIR = f"{OWN_PREFIX}repair"
"""An `Action` (reset, reboot, replace) that somebody orders whatever NodeRecovery is; the repairer
removes it when the repair begins."""
ADVICE = f"{OWN_PREFIX}advised-repair"
"""By the node daemon: the `Action` in the table of faults, if the documented label has no value for
it (`reset-gpu` is labelled UnschedulablePendingReboot)."""
VERIFIED = f"{OWN_PREFIX}verified"
"""By the repairer: the boot ID (`status.nodeInfo.bootID`), or `check NAME`, after which the node
was found healthy. The daemon withdraws its earlier faults when it changes."""
DAEMON_MEMORY = f"{OWN_PREFIX}node-daemon"
"""The node daemon's memory over its restarts."""
POWER = f"{OWN_PREFIX}power"
"""`off`: the pool of the local cluster cuts the machine's power; `unbroken chaos` writes it."""
FENCE = f"{OWN_PREFIX}fence"
"""The reason why the operator wants proof that nothing runs on the node; removed when a node that
was silent is back."""
FENCES = f"{OWN_PREFIX}fences"
"""By the operator: the latest fences that it asked for, each `TIME POD-UID`, separated by commas.
Remove it to allow more fences of the node within the hour."""
DRAIN = f"{OWN_PREFIX}drain"
"""By `unbroken nodes drain`: jobs must have left the node by this time (RFC 3339), or `none`."""
DEVICE_BANDWIDTH = f"{OWN_PREFIX}device-bandwidth"
"""The most GB/s that all GPUs of the node have had together, in deep checks that it passed."""
LINK_BANDWIDTH = f"{OWN_PREFIX}link-bandwidth"
"""The most GB/s that the node has had with another of its instance type, in deep checks that it
passed. Nodes of a local cluster have none: they share one machine, whatever their names."""
NOT_ENFORCED = f"{OWN_PREFIX}not-enforced"
"""By a node of the local cluster: requests of pods that it cannot fulfil, in words."""
RACK = f"{OWN_PREFIX}rack"
"""Label by an administrator: the rack, if `topology.kubernetes.io/rack` does not name it."""

# --- Repairs, checks, Machines and Clusters

REPAIR_ORDER = f"{OWN_PREFIX}repair-order"
"""Annotation of the object behind a node, by the repairer: identity of the newest order."""
CHECK_LABEL = f"{OWN_PREFIX}check"
"""Label of a check's pods: the NodeCheck that they belong to."""
CHECK_STEP = f"{OWN_PREFIX}check-step"
"""Annotation of a check's pod: its step, `KIND NODE` or `KIND NODE NODE`."""
CHECK_SECONDS = f"{OWN_PREFIX}check-seconds"
"""Annotation of a NodeCheck: seconds of each test under load; `unbroken nodes check` writes it."""
CHECK_PLANT = f"{OWN_PREFIX}check-plant"
"""Annotation of a node: faults for the tests to find there (`UNBROKEN_CHECK_PLANT`)."""
CHECK_HOLD = f"{OWN_PREFIX}check-hold"
"""Annotation of a node under a deep check: JSON {check, isOurs, before}.  `isOurs`: the label and
the taint are the check's; `before`: what `deep-health-check-status` was."""
MACHINE_FINALIZER = f"{OWN_PREFIX}machine"
"""On every Machine, by the pool and the repairer: it goes when nothing of it runs any more."""
CLUSTER_LABEL = CLUSTER_FINALIZER = f"{OWN_PREFIX}cluster"
"""Label of Machines and NodeChecks: the Cluster that they belong to.  As finalizer it keeps a
Cluster until its last Machine is gone."""
CLUSTER_ID = f"{OWN_PREFIX}cluster-id"
"""Label of a Cluster: the last part of its ARN, by which the cluster API finds it."""
CLUSTER_ARN = f"{OWN_PREFIX}cluster-arn"
"""Annotation of a Cluster, by the cluster API."""
CLIENT_TOKENS = f"{OWN_PREFIX}client-tokens"
"""Annotation of a Cluster: requests that the cluster API has carried out."""
MADE_BY = f"{OWN_PREFIX}version"
"""Annotation of a definition: the version of unbroken that it belongs to."""

# --- PyTorchJobs

PYTORCHJOB_PREFIX = f"training.{KUBEFLOW_GROUP}/"
PYTORCHJOB_LABEL = f"{PYTORCHJOB_PREFIX}job-name"
"""Label of a PyTorchJob's pods: the job's name.  Kubeflow's operator writes it, or ours."""
ROLE_LABEL = f"{PYTORCHJOB_PREFIX}job-role"
REPLICA_TYPE_LABEL = f"{PYTORCHJOB_PREFIX}replica-type"
REPLICA_INDEX_LABEL = f"{PYTORCHJOB_PREFIX}replica-index"
OPERATOR_LABEL = f"{PYTORCHJOB_PREFIX}operator-name"
PYTORCHJOB_MANAGER = f"{KUBEFLOW_GROUP}/training-operator"
"""`managedBy` of a job that is not somebody else's."""
RENDEZVOUS_PORT = f"{OWN_PREFIX}rendezvous-port"
"""Annotation of a pod of the local cluster: the port that its job meets at."""
REPLACED_PODS = f"{OWN_PREFIX}replaced-pods"
"""Annotation of a PyTorchJob of the local cluster: how many failed pods were replaced, and the uids
of the latest."""
RAY_HEAD = f"{OWN_PREFIX}ray-head"
"""Annotation of a Ray worker's pod on the local cluster: uid of the head's pod that it joins."""
AUTO_RESUME = f"{HYPERPOD_PREFIX}enable-job-auto-resume"
"""Annotation of a job of any kind that a user wants resumed; the operator reads it."""
MAX_RETRIES = f"{HYPERPOD_PREFIX}job-max-retry-count"
"""Annotation of the same job: the largest number of resumptions."""
LOG_MONITORING = f"{OWN_PREFIX}log-monitoring-configuration"
"""Annotation of a RayJob or a RayCluster with auto-resume, in YAML or JSON: log rules in the form
of `logMonitoringConfiguration`. A job that breaks a rule is restarted."""
RESUME_COUNT, RESUME_FAULT, RESUME_TIME, RESUME_PODS, RESUME_NODES, RESUME_EXHAUSTED = (
    f"{OWN_PREFIX}auto-resume-{name}"
    for name in ("count", "fault", "time", "pods", "nodes", "exhausted")
)
"""Annotations by the operator's auto-resume. They are the number of restarts, cause and time of the
latest restart, and the uids of the pods that it removes. They are also the unhealthy nodes, and the
cause that found no retry left."""
RESUME_DEFAULT = f"{OWN_PREFIX}auto-resume-default"
"""Annotation by auto-resume on a job without annotations of its user: the restarts that the cluster
allows it."""
RESUME_SUSPENDED = f"{OWN_PREFIX}auto-resume-suspended"
"""Annotation by auto-resume, "true" while it holds the job suspended for a restart."""
RESUME_LOSSES = f"{OWN_PREFIX}auto-resume-losses"
"""Annotation by auto-resume, in JSON: the latest 10 losses with culprit, cause, remedy and the
times (seconds since the epoch) of the first sign, the decision and the running job."""
RESUME_RAY = f"{OWN_PREFIX}auto-resume-ray"
"""Annotation by the operator's auto-resume on a RayJob or a RayCluster, in JSON. It has the head of
the attempt that runs, whether it is lost, and the jobs that ran on it."""

# --- TrainJobs of the runtime `unbroken-torch`

TRAINER_STEP = f"{TRAINER_GROUP}/trainjob-ancestor-step"
"""Label of a job in a ClusterTrainingRuntime, by the author of the runtime. `trainer`: its pods
train."""
TRAINER_MANAGER = f"{TRAINER_GROUP}/trainjob-controller"
"""`managedBy` of a TrainJob that is not somebody else's."""
RESULT_LABEL = f"{OWN_PREFIX}result-pod"
"""Label of the pod that waits for the result of a TrainJob, by the runtime; the operator selects by
it."""
RESULT = f"{OWN_PREFIX}result"
"""Annotation of the same pod, by the operator: `Completed`, or `Failed: ` and the reason. The pod
reads it and ends with the same result."""
RUNTIME_GATE = f"{OWN_PREFIX}pods-are-made-by-the-operator"
"""Scheduling gate of the pods that train, in the runtime. It keeps pods of a Job from starting: the
operator makes these pods, without the gate."""

# --- Kueue

KUEUE_PREFIX = f"{KUEUE_GROUP}/"
QUEUE = f"{KUEUE_PREFIX}queue-name"
"""Label of a job: the LocalQueue that it waits in."""
QUEUE_PRIORITY = f"{KUEUE_PREFIX}priority-class"
"""Label of a job: a WorkloadPriorityClass."""
TIME_LIMIT = f"{KUEUE_PREFIX}max-exec-time-seconds"
"""Label of a job: the seconds for which its Workload may be admitted."""
JOB_UID = f"{KUEUE_PREFIX}job-uid"
"""Label of a Workload, by the operator: the uid of its job."""
WORKLOAD, POD_SET, TOPOLOGY = (f"{KUEUE_PREFIX}{name}" for name in ("workload", "podset", "tas"))
"""Annotations and labels of pods, by the operator: their Workload, their pod set, and that their
places were assigned."""
WORKLOAD_SHAPE = f"{OWN_PREFIX}shape"
"""Annotation of a Workload, by the operator: the pods that it requests."""

# --- Kubernetes' own

OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"
"""Taint of a node that is proven to run nothing: by a person, a program that fences nodes, or the
operator, when a provider says that the machine is gone (value `machine-replaced`)."""
NOT_READY = "node.kubernetes.io/not-ready"
UNREACHABLE = "node.kubernetes.io/unreachable"
UNSCHEDULABLE = "node.kubernetes.io/unschedulable"
"""Taint of a cordoned node."""
INSTANCE_TYPES = ("node.kubernetes.io/instance-type", "beta.kubernetes.io/instance-type")
"""Labels of nodes, by their provider: the instance type, newest key first."""
