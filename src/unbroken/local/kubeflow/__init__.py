"""Runs Kubeflow's PyTorchJobs on the embedded cluster, in the place of the training operator."""

from __future__ import annotations

from .controller import install, run_pytorchjobs

__all__ = ["install", "run_pytorchjobs"]
