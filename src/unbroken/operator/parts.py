"""The parts of the operator: how each is switched, what it needs, and its rights in Kubernetes.

`unbroken operator --without`, the roles of the chart and the table of the guide are made from it
(tools/operator_parts.py).  A test compares the roles with the audit log of a real API server.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum

from unbroken.spec.job_kinds import (
    JOB_SET,
    PYTORCHJOB,
    RAY_CLUSTER,
    RAY_JOB,
    TRAIN_JOB,
    TRAIN_RUNTIME,
    JobKind,
)
from unbroken.spec.keys import HYPERPOD_GROUP, KUEUE_GROUP, OWN_GROUP
from unbroken.spec.kubeflow.trainjob import RUNTIME_KIND
from unbroken.spec.nodes.values import NodeProvider

WITHOUT = "--without"
JOBS, OURS, KUEUE = HYPERPOD_GROUP, OWN_GROUP, KUEUE_GROUP
LEASES, ADMISSION = "coordination.k8s.io", "admissionregistration.k8s.io"
EXTENSIONS = "apiextensions.k8s.io"
POLICY = "policy"
CLUSTER_API, KARPENTER = "cluster.x-k8s.io", "karpenter.sh"
DEFINITIONS, REGISTRATIONS = "customresourcedefinitions", "validatingwebhookconfigurations"
PROVIDED = "list patch delete"
"""Verbs on the machines of a provider that is not unbroken's own."""


class ChartRole(Enum):
    """Roles of the chart; the value names the template that holds a role's rules."""

    NAMESPACED = "unbroken.jobRules"
    """Holds in every namespace, or in the one of `operator.namespace`."""
    CLUSTER = "unbroken.clusterRules"
    LEASE = "unbroken.leaseRules"
    """Holds in the namespace of the Lease."""
    KEY = "unbroken.keyRules"
    """Holds in the release's own namespace."""
    CHECKS = "unbroken.checkRules"
    """Holds in the namespace of the pods that test nodes."""
    CLUSTER_API = "unbroken.clusterApiRules"
    """Role of another ServiceAccount: the chart runs the cluster API as a program of its own."""


@dataclass(frozen=True, slots=True)
class Right:
    """One rule of a role."""

    role: ChartRole
    group: str
    resource: str
    """Plural, with a subresource where it is one: `pods/log`."""
    verbs: str
    """Separated by spaces."""
    name: str = ""
    """The only object that the rule holds for; empty: all."""
    provider: NodeProvider | None = None
    """The node provider that needs the right; None: all."""


class PartName(StrEnum):
    """Names of the parts, as `--without` and the chart's templates spell them."""

    JOBS = "jobs"
    DEFINITIONS = "definitions"
    NODES = "nodes"
    PYTORCHJOBS = "pytorchjobs"
    TRAINJOBS = "trainjobs"
    JOBSETS = "jobsets"
    RAY = "ray"
    TRAINER = "trainer"
    QUEUES = "queues"
    WEBHOOK = "webhook"
    CLUSTER_API = "cluster-api"
    REPORTS = "reports"


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorPart:
    """One part of the operator."""

    help: str
    """Says what the part does."""
    option: str = WITHOUT
    """Option of `unbroken operator` that turns the part off (`--without`) or on; empty: none."""
    is_on: bool = True
    """True if the part is on by default."""
    needs: str = ""
    """Condition without which the part does nothing; empty: none."""
    is_clusterwide: bool = False
    """The part is not for an operator of one namespace."""
    chart: str | None = ""
    """The chart's value that turns the part on; empty: always on, None: never."""
    rights: tuple[Right, ...] = ()
    resumes: tuple[JobKind, ...] = ()
    """The kinds of jobs that the part resumes."""


def _resuming(kind: JobKind) -> OperatorPart:
    """Return the part that resumes jobs of a kind after the loss of a node or a pod."""
    return OperatorPart(
        help=f"Resumes {kind.name}s (auto-resume).",
        needs=f"the definition of {kind.name}s",
        chart=f"{kind.plural}.enabled",
        rights=(
            Right(ChartRole.NAMESPACED, kind.group, kind.plural, "list watch patch"),
            Right(ChartRole.CLUSTER, EXTENSIONS, DEFINITIONS, "list watch", kind.resource),
        ),
        resumes=(kind,),
    )


PARTS: Mapping[PartName, OperatorPart] = {
    PartName.JOBS: OperatorPart(
        help="Runs HyperPodPyTorchJobs.",
        option="",
        rights=(
            Right(ChartRole.NAMESPACED, JOBS, "hyperpodpytorchjobs", "list watch patch delete"),
            Right(ChartRole.NAMESPACED, JOBS, "hyperpodpytorchjobs/status", "patch"),
            # Pods and Secrets block the deletion of their job, for which some servers ask a right.
            Right(ChartRole.NAMESPACED, JOBS, "hyperpodpytorchjobs/finalizers", "update"),
            Right(ChartRole.NAMESPACED, OURS, "incidents", "list watch create patch delete"),
            Right(ChartRole.NAMESPACED, "", "pods", "get list watch create delete"),
            # While a job trains its pods are not evicted: it moves from the node by itself.
            Right(ChartRole.NAMESPACED, POLICY, "poddisruptionbudgets", "get create delete"),
            # The key of a job's agents, in a Secret that the operator cannot read.
            Right(ChartRole.NAMESPACED, "", "secrets", "create"),
            # List: only an event of the kubelet says why it cannot mount a pod's volume.
            Right(ChartRole.NAMESPACED, "", "events", "list create patch"),
            # Which nodes are healthy, and requests to fence a node (an annotation).
            Right(ChartRole.CLUSTER, "", "nodes", "get list watch patch"),
            Right(ChartRole.LEASE, LEASES, "leases", "create"),
            Right(ChartRole.LEASE, LEASES, "leases", "get list watch update", "unbroken-operator"),
            # The operator's own key, in a Secret that it cannot read either.
            Right(ChartRole.KEY, "", "secrets", "create"),
        ),
    ),
    PartName.DEFINITIONS: OperatorPart(
        help="Installs the CustomResourceDefinitions of unbroken.",
        chart=None,
        rights=(Right(ChartRole.CLUSTER, EXTENSIONS, DEFINITIONS, "get create patch"),),
    ),
    PartName.NODES: OperatorPart(
        help="Repairs and checks nodes, and runs Clusters.",
        needs="an operator of all namespaces",
        is_clusterwide=True,
        chart="nodes.enabled",
        rights=(
            Right(ChartRole.CLUSTER, OURS, "noderecords", "list watch create patch delete"),
            Right(ChartRole.CLUSTER, OURS, "nodechecks", "get list watch create delete"),
            Right(ChartRole.CLUSTER, OURS, "nodechecks/status", "patch"),
            Right(ChartRole.CHECKS, "", "pods/log", "get"),
            Right(ChartRole.CLUSTER, OURS, "clusters", "get list watch update patch"),
            Right(ChartRole.CLUSTER, OURS, "clusters/status", "update"),
            Right(ChartRole.CLUSTER, OURS, "machines", "list watch create delete"),
            Right(ChartRole.CLUSTER, OURS, "machines", "get patch", provider=NodeProvider.MACHINES),
            Right(
                ChartRole.CLUSTER,
                CLUSTER_API,
                "machines",
                PROVIDED,
                provider=NodeProvider.CLUSTER_API,
            ),
            Right(
                ChartRole.CLUSTER,
                KARPENTER,
                "nodeclaims",
                PROVIDED,
                provider=NodeProvider.KARPENTER,
            ),
            Right(ChartRole.CLUSTER, OURS, "noderecords", "get", provider=NodeProvider.AWS),
        ),
    ),
    PartName.PYTORCHJOBS: _resuming(PYTORCHJOB),
    PartName.TRAINJOBS: _resuming(TRAIN_JOB),
    PartName.JOBSETS: _resuming(JOB_SET),
    PartName.RAY: OperatorPart(
        help="Resumes RayJobs and RayClusters (auto-resume).",
        needs="the definitions of RayClusters and RayJobs",
        chart="ray.enabled",
        rights=(
            Right(ChartRole.NAMESPACED, RAY_CLUSTER.group, "rayclusters", "list watch patch"),
            Right(ChartRole.NAMESPACED, RAY_JOB.group, "rayjobs", "list watch patch"),
            # A job whose head was lost is started again by its deployment status.
            Right(ChartRole.NAMESPACED, RAY_JOB.group, "rayjobs/status", "patch"),
            Right(ChartRole.CLUSTER, EXTENSIONS, DEFINITIONS, "list watch", RAY_CLUSTER.resource),
            Right(ChartRole.CLUSTER, EXTENSIONS, DEFINITIONS, "list watch", RAY_JOB.resource),
        ),
        resumes=(RAY_JOB, RAY_CLUSTER),
    ),
    PartName.TRAINER: OperatorPart(
        help=f"Runs TrainJobs of the runtime {TRAIN_RUNTIME} as HyperPodPyTorchJobs.",
        needs="the definitions of TrainJobs and ClusterTrainingRuntimes",
        chart="trainer.runtime",
        rights=(
            Right(ChartRole.NAMESPACED, TRAIN_JOB.group, TRAIN_JOB.plural, "list watch"),
            # The HyperPodPyTorchJob blocks the deletion of its TrainJob.
            Right(
                ChartRole.NAMESPACED, TRAIN_JOB.group, f"{TRAIN_JOB.plural}/finalizers", "update"
            ),
            Right(ChartRole.NAMESPACED, JOBS, "hyperpodpytorchjobs", "create"),
            # The result of a job, as an annotation of the pod that waits for it.
            Right(ChartRole.NAMESPACED, "", "pods", "patch"),
            Right(
                ChartRole.CLUSTER,
                RUNTIME_KIND.group,
                RUNTIME_KIND.plural,
                "list watch",
                TRAIN_RUNTIME,
            ),
            Right(ChartRole.CLUSTER, EXTENSIONS, DEFINITIONS, "list watch", TRAIN_JOB.resource),
            Right(ChartRole.CLUSTER, EXTENSIONS, DEFINITIONS, "list watch", RUNTIME_KIND.resource),
        ),
    ),
    PartName.QUEUES: OperatorPart(
        help="Lets jobs wait in Kueue's queues.",
        needs="Kueue",
        chart="kueue.enabled",
        rights=(
            Right(ChartRole.NAMESPACED, KUEUE, "workloads", "list watch create patch delete"),
            Right(ChartRole.NAMESPACED, KUEUE, "workloads/status", "update"),
            Right(ChartRole.CLUSTER, EXTENSIONS, DEFINITIONS, "list watch", f"workloads.{KUEUE}"),
            # The quota's nodes, and which job goes first.
            Right(ChartRole.CLUSTER, KUEUE, "resourceflavors", "list watch"),
            Right(ChartRole.CLUSTER, KUEUE, "workloadpriorityclasses", "get"),
            Right(ChartRole.CLUSTER, "scheduling.k8s.io", "priorityclasses", "get list"),
        ),
    ),
    PartName.WEBHOOK: OperatorPart(
        help="Refuses jobs that cannot run when they are applied.",
        option="--webhook-port",
        is_on=False,
        needs="an operator of all namespaces",
        is_clusterwide=True,
        chart="webhook.enabled",
        rights=(
            Right(ChartRole.CLUSTER, ADMISSION, REGISTRATIONS, "create"),
            Right(
                ChartRole.CLUSTER, ADMISSION, REGISTRATIONS, "get list watch patch", "unbroken-jobs"
            ),
            # Whether a user may create pods, before a dry run of the job's pod template.
            Right(ChartRole.CLUSTER, "authorization.k8s.io", "subjectaccessreviews", "create"),
        ),
    ),
    PartName.CLUSTER_API: OperatorPart(
        help="Serves SageMaker's operations on clusters.",
        option="--cluster-api-port",
        is_on=False,
        needs="an operator with the part `nodes`",
        chart="clusterApi.enabled",
        rights=(
            Right(ChartRole.CLUSTER_API, OURS, "clusters", "get list create update delete"),
            Right(ChartRole.CLUSTER_API, OURS, "clusters/status", "update"),
            Right(ChartRole.CLUSTER_API, OURS, "machines", "list delete"),
            Right(ChartRole.CLUSTER_API, OURS, "noderecords", "get"),
            # BatchRebootClusterNodes and BatchReplaceClusterNodes annotate nodes.
            Right(ChartRole.CLUSTER_API, "", "nodes", "get patch"),
        ),
    ),
    PartName.REPORTS: OperatorPart(
        help="Gives the reports of agents to the live page of the cluster.",
        option="--reports-port",
        is_on=False,
        chart="page.enabled",
        rights=(Right(ChartRole.CLUSTER, "authentication.k8s.io", "tokenreviews", "create"),),
    ),
}
