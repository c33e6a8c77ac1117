"""Runs RayClusters and RayJobs on the local cluster, in the place of KubeRay's operator."""

from __future__ import annotations

from .admission import NOT_RUN, admit_raycluster, admit_rayjob, warn_not_run
from .controller import install, ray_tokens, run_ray

__all__ = [
    "NOT_RUN",
    "admit_raycluster",
    "admit_rayjob",
    "install",
    "ray_tokens",
    "run_ray",
    "warn_not_run",
]
