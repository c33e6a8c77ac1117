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
from unbroken.spec.keys import JOB_LABEL, JOB_NAME_LABEL, PYTORCHJOB_LABEL
from unbroken.spec.kubeflow import pytorchjob

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
        found: Any = job
        for key in self.suspend_field.split("."):
            found = found.get(key) if isinstance(found, Mapping) else None
        return bool(found)

    def suspension(self, is_suspended: bool) -> dict[str, Any]:
        """Return the merge patch that suspends a job or lets it run again."""
        *outer, last = self.suspend_field.split(".")
        patch: dict[str, Any] = {last: is_suspended}
        for key in reversed(outer):
            patch = {key: patch}
        return patch

    def has_ended(self, job: Mapping[str, Any]) -> bool:
        """True if a condition of the job object says that the job has ended."""
        conditions = (job.get("status") or {}).get("conditions") or ()
        return any(
            one.get("type") in self.end_conditions and one.get("status") == "True"
            for one in conditions
        )


HYPERPOD_JOB = JobKind(
    *(hyperpod.GROUP, hyperpod.VERSION, hyperpod.KIND, hyperpod.PLURAL),
    pod_label=JOB_LABEL,
    suspend_field="spec.runPolicy.suspend",
)
PYTORCHJOB = JobKind(
    *(pytorchjob.GROUP, pytorchjob.VERSION, pytorchjob.KIND, pytorchjob.PLURAL),
    pod_label=PYTORCHJOB_LABEL,
    suspend_field="spec.runPolicy.suspend",
    end_conditions=("Succeeded", "Failed"),
)
BATCH_JOB = JobKind("batch", "v1", "Job", "jobs", "batch.kubernetes.io/job-name")
OLDER_BATCH_LABELS = frozenset({JOB_NAME_LABEL, "controller-uid"})
"""Labels of the pods of a batch Job, all that they have of it before Kubernetes 1.27."""
JOB_SET = JobKind(
    "jobset.x-k8s.io", "v1alpha2", "JobSet", "jobsets", "jobset.sigs.k8s.io/jobset-name"
)
RAY_CLUSTER = JobKind("ray.io", "v1", "RayCluster", "rayclusters", "ray.io/cluster")
JOB_KINDS = (HYPERPOD_JOB, PYTORCHJOB, BATCH_JOB, JOB_SET, RAY_CLUSTER)


def is_pod_of_a_job(labels: Mapping[str, str], phase: str | None) -> bool:
    """True if a pod with these labels belongs to a job of any kind and has not ended."""
    is_of_one = any(kind.pod_label in labels for kind in JOB_KINDS)
    return phase not in ENDED_PHASES and (is_of_one or labels.keys() >= OLDER_BATCH_LABELS)
