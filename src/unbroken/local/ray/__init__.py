"""Runs RayClusters on the local cluster, in the place of KubeRay's operator."""

from __future__ import annotations

from .admission import NOT_RUN, admit_raycluster, warn_not_run
from .controller import install, run_rayclusters

__all__ = ["NOT_RUN", "admit_raycluster", "install", "run_rayclusters", "warn_not_run"]
