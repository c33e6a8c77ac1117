"""Runs Kubeflow's PyTorchJobs on the local cluster, in the place of the training operator."""

from __future__ import annotations

from .controller import admit_pytorchjob, install, run_pytorchjobs

__all__ = ["admit_pytorchjob", "install", "run_pytorchjobs"]
