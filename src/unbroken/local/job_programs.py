"""The registry of programs that run jobs of other kinds than ours on the local cluster.

Each stands in for the operator of its kind: it installs the definition, checks what is applied and
makes the pods.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Final

from unbroken.kube.client import KubeClient
from unbroken.kube.informer import Informers
from unbroken.local.apiserver.write.admission import Admit
from unbroken.spec.job_kinds import (
    BATCH_JOB,
    HYPERPOD_JOB,
    JOB_SET,
    PYTORCHJOB,
    RAY_CLUSTER,
    TRAIN_JOB,
    JobKind,
)

from . import kubeflow, ray
from .admissions import admit_job, warn_no_controller
from .state import ClusterOptions


@dataclass(frozen=True, slots=True)
class JobProgram:
    """A program that runs the jobs of one kind."""

    kind: JobKind
    is_wanted: Callable[[ClusterOptions], bool]
    """Returns whether the options of the cluster request the program."""
    install: Callable[[KubeClient], Awaitable[None]]
    """Installs the definition of the kind and returns once the API serves it."""
    run: Callable[[KubeClient, Informers], Coroutine[None, None, None]]
    """Runs jobs until cancelled."""
    admit: Admit
    """Checks a job when it is applied, also where the program does not run."""


JOB_PROGRAMS: Final = (
    JobProgram(
        PYTORCHJOB,
        is_wanted=lambda options: options.pytorchjobs,
        install=kubeflow.install,
        run=kubeflow.run_pytorchjobs,
        admit=kubeflow.admit_pytorchjob,
    ),
    JobProgram(
        RAY_CLUSTER,
        is_wanted=lambda options: options.ray,
        install=ray.install,
        run=ray.run_ray,
        admit=ray.admit_raycluster,
    ),
)
ADMISSIONS: Final[Mapping[str, Admit]] = {
    HYPERPOD_JOB.resource: admit_job,
    **{program.kind.resource: program.admit for program in JOB_PROGRAMS},
    "rayjobs.ray.io": ray.admit_rayjob,
    **dict.fromkeys(ray.NOT_RUN, ray.warn_not_run),
    **{kind.resource: warn_no_controller for kind in (TRAIN_JOB, JOB_SET, BATCH_JOB)},
}
"""Checks of jobs by the resource of their kind."""


def job_programs(options: ClusterOptions) -> list[JobProgram]:
    """List the programs that a cluster of these options runs."""
    return [program for program in JOB_PROGRAMS if program.is_wanted(options)]
