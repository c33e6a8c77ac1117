"""The registry of job kinds: which objects of a cluster are jobs, and which pods are theirs.

Node checks, node repairs and `unbroken nodes` ask here whether a pod belongs to a job.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from unbroken.spec.job import types as hyperpod
from unbroken.spec.kubeflow import pytorchjob

ENDED_PHASES = frozenset({"Succeeded", "Failed"})
"""Phases of a pod that has ended."""


@dataclass(frozen=True, slots=True)
class JobKind:
    """A kind of object that runs a job in pods."""

    group: str
    version: str
    kind: str
    plural: str
    pod_label: str
    """Label of the job's pods; its value is the name of the job."""

    @property
    def resource(self) -> str:
        """The plural with its group, which is also the name of the kind's definition."""
        return f"{self.plural}.{self.group}"


HYPERPOD_JOB = JobKind(
    hyperpod.GROUP, hyperpod.VERSION, hyperpod.KIND, hyperpod.PLURAL, hyperpod.JOB_LABEL
)
PYTORCHJOB = JobKind(
    *(pytorchjob.GROUP, pytorchjob.VERSION, pytorchjob.KIND, pytorchjob.PLURAL),
    pod_label=pytorchjob.JOB_LABEL,
)
BATCH_JOB = JobKind("batch", "v1", "Job", "jobs", "batch.kubernetes.io/job-name")
JOB_SET = JobKind(
    "jobset.x-k8s.io", "v1alpha2", "JobSet", "jobsets", "jobset.sigs.k8s.io/jobset-name"
)
RAY_CLUSTER = JobKind("ray.io", "v1", "RayCluster", "rayclusters", "ray.io/cluster")
JOB_KINDS = (HYPERPOD_JOB, PYTORCHJOB, BATCH_JOB, JOB_SET, RAY_CLUSTER)


def is_pod_of_a_job(labels: Mapping[str, str], phase: str | None) -> bool:
    """Whether a pod with these labels belongs to a job of any kind and has not ended."""
    return phase not in ENDED_PHASES and any(kind.pod_label in labels for kind in JOB_KINDS)
