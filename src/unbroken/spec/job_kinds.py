"""The registry of job kinds: which objects of a cluster are jobs, and which pods are theirs.

Node checks, node repairs and `unbroken nodes` ask here whether a pod belongs to a job.
`operator/parts` lists the kinds that auto-resume restarts after the loss of a node, and
`local/job_programs` the programs that run jobs on the local cluster.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unbroken.spec.job import types as hyperpod
from unbroken.spec.keys import (
    JOB_LABEL,
    JOB_NAME_LABEL,
    PYTORCHJOB_LABEL,
    RESULT_LABEL,
    TRAINER_GROUP,
)
from unbroken.spec.kubeflow import pytorchjob
from unbroken.spec.lookup import value_at

FAILED = "Failed"
"""Type of the condition of a job that has failed, of every kind that has one."""
ENDED_PHASES = frozenset({"Succeeded", "Failed"})
"""Phases of a pod that has ended."""


@dataclass(frozen=True, slots=True)
class JobKind:
    """A kind of object that runs a job in pods."""

    group: str
    version: str
    name: str
    """The kind, as objects spell it."""
    plural: str
    pod_label: str
    """Label of the job's pods; its value is the name of the job."""
    suspend_field: str = "spec.suspend"
    """Path of the boolean that suspends a job."""
    end_conditions: tuple[str, ...] = ()
    """Types of conditions: one that is True says that the job has ended."""
    pod_owner: str = ""
    """Kind of the objects that own the job's pods; empty: the job itself."""
    state_field: str = ""
    """Path of the text that says how the job is, if no condition does."""
    end_states: tuple[str, ...] = ()
    """Texts there that say that the job has ended."""
    pods_field: str = ""
    """Path of the value of `pod_label`, if that is not the name of the job."""
    is_part: bool = False
    """A job of this kind that anything controls is resumed by its controller alone."""
    restarts_by_suspension: bool = False
    """Auto-resume suspends the job until its pods are gone; it deletes no pods, because their
    controller counts a deleted pod as a failure."""
    is_resumed_by_default: bool = False
    """Its jobs train: auto-resume watches over those without annotations, too."""

    @property
    def path(self) -> str:
        """The path of the group and version at the API server."""
        return f"apis/{self.group}/{self.version}"

    @property
    def resource(self) -> str:
        """The plural with its group, which is also the name of the kind's definition."""
        return f"{self.plural}.{self.group}"

    def owner_reference(self, name: str, uid: str) -> dict[str, Any]:
        """Return the reference by which objects of a job are deleted with it."""
        return {
            **{"apiVersion": f"{self.group}/{self.version}", "kind": self.name},
            **{"name": name, "uid": uid, "controller": True, "blockOwnerDeletion": True},
        }

    def is_suspended(self, job: Mapping[str, Any]) -> bool:
        """True if the job object asks to be suspended."""
        return bool(value_at(job, *self.suspend_field.split(".")))

    def suspension(self, is_suspended: bool) -> dict[str, Any]:
        """Return the merge patch that suspends a job or lets it run again."""
        *outer, last = self.suspend_field.split(".")
        patch: dict[str, Any] = {last: is_suspended}
        for key in reversed(outer):
            patch = {key: patch}
        return patch

    def has_ended(self, job: Mapping[str, Any]) -> bool:
        """True if the job object says that the job has ended."""
        return bool(self.end_of(job))

    def end_of(self, job: Mapping[str, Any]) -> str:
        """Return the condition, or the state, that says that the job has ended; empty: it has
        not."""
        conditions = value_at(job, "status", "conditions") or ()
        types = [one.get("type") for one in conditions if one.get("status") == "True"]
        state = value_at(job, *self.state_field.split(".")) if self.state_field else None
        found = [type for type in types if type in self.end_conditions]
        return next(iter([*found, *(one for one in self.end_states if one == state)]), "")

    def pods_of(self, job: Mapping[str, Any]) -> str:
        """Return the value of `pod_label` of the job's pods; empty: it has none yet."""
        path = self.pods_field or "metadata.name"
        return str(value_at(job, *path.split(".")) or "")


HYPERPOD_JOB = JobKind(
    *(hyperpod.GROUP, hyperpod.VERSION, hyperpod.KIND, hyperpod.PLURAL),
    pod_label=JOB_LABEL,
    suspend_field="spec.runPolicy.suspend",
)
PYTORCHJOB = JobKind(
    *(pytorchjob.GROUP, pytorchjob.VERSION, pytorchjob.KIND, pytorchjob.PLURAL),
    pod_label=PYTORCHJOB_LABEL,
    suspend_field="spec.runPolicy.suspend",
    end_conditions=("Succeeded", FAILED),
    is_resumed_by_default=True,
)
MPI_JOB = JobKind(
    *(pytorchjob.GROUP, "v2beta1", "MPIJob", "mpijobs"),
    pod_label=PYTORCHJOB_LABEL,
    suspend_field="spec.runPolicy.suspend",
    end_conditions=("Succeeded", FAILED),
)
"""Nothing resumes it. The training operator 1.x has version v1 of it, with the same label."""
BATCH_JOB = JobKind("batch", "v1", "Job", "jobs", "batch.kubernetes.io/job-name")
OLDER_BATCH_LABELS = frozenset({JOB_NAME_LABEL, "controller-uid"})
"""Labels of the pods of a batch Job, all that they have of it before Kubernetes 1.27."""
JOB_SET = JobKind(
    *("jobset.x-k8s.io", "v1alpha2", "JobSet", "jobsets"),
    pod_label="jobset.sigs.k8s.io/jobset-name",
    end_conditions=("Completed", FAILED),
    pod_owner=BATCH_JOB.name,
    restarts_by_suspension=True,
)
TRAIN_JOB = JobKind(
    *(TRAINER_GROUP, "v1alpha1", "TrainJob", "trainjobs"),
    # Its JobSet has its name (kubeflow/trainer 2.3, runtime/framework/plugins/jobset/jobset.go).
    pod_label=JOB_SET.pod_label,
    end_conditions=("Complete", FAILED),
    pod_owner=BATCH_JOB.name,
    restarts_by_suspension=True,
    is_resumed_by_default=True,
)
TRAIN_RUNTIME_KIND, TRAIN_RUNTIME = "ClusterTrainingRuntime", "unbroken-torch"
"""Kind and name of the runtime whose TrainJobs the operator runs as HyperPodPyTorchJobs."""
RAY_CLUSTER = JobKind(
    *("ray.io", "v1", "RayCluster", "rayclusters"),
    pod_label="ray.io/cluster",
    is_part=True,
    is_resumed_by_default=True,
)
RAY_JOB = JobKind(
    *("ray.io", "v1", "RayJob", "rayjobs"),
    pod_label=RAY_CLUSTER.pod_label,
    state_field="status.jobDeploymentStatus",
    end_states=("Complete", FAILED),
    pods_field="status.rayClusterName",
    is_resumed_by_default=True,
)
"""Its pods are those of its RayCluster, whose name the label has."""
JOB_KINDS = (HYPERPOD_JOB, PYTORCHJOB, MPI_JOB, BATCH_JOB, JOB_SET, TRAIN_JOB, RAY_CLUSTER)


def controller_of(thing: Mapping[str, Any]) -> tuple[JobKind, str] | None:
    """Return the job that controls an object, as its kind and name; None: no job does."""
    for owner in thing["metadata"].get("ownerReferences") or ():
        group = str(owner.get("apiVersion") or "").rpartition("/")[0]
        for kind in JOB_KINDS:
            if owner.get("controller") and (group, owner.get("kind")) == (kind.group, kind.name):
                return kind, str(owner.get("name") or "")
    return None


def names_our_runtime(job: Mapping[str, Any]) -> bool:
    """True if a TrainJob names the runtime whose jobs run as HyperPodPyTorchJobs."""
    named = value_at(job, "spec", "runtimeRef")
    if not isinstance(named, Mapping) or named.get("name") != TRAIN_RUNTIME:
        return False
    group, kind = named.get("apiGroup", TRAINER_GROUP), named.get("kind", TRAIN_RUNTIME_KIND)
    return (group, kind) == (TRAINER_GROUP, TRAIN_RUNTIME_KIND)


def is_resumed_by_itself(kind: JobKind, job: Mapping[str, Any]) -> bool:
    """True if the annotations of auto-resume on a job count: no other job resumes it."""
    owners = job["metadata"].get("ownerReferences") or ()
    is_controlled = any(owner.get("controller") for owner in owners)
    if kind is TRAIN_JOB and names_our_runtime(job):
        return False  # its HyperPodPyTorchJob restarts by itself
    return controller_of(job) is None and not (kind.is_part and is_controlled)


def is_pod_of_a_job(labels: Mapping[str, str], phase: str | None) -> bool:
    """True if a pod with these labels belongs to a job of any kind and has not ended.

    The pod that waits for the result of a TrainJob does no work of a job.
    """
    if RESULT_LABEL in labels:
        return False
    is_of_one = any(kind.pod_label in labels for kind in JOB_KINDS)
    return phase not in ENDED_PHASES and (is_of_one or labels.keys() >= OLDER_BATCH_LABELS)
