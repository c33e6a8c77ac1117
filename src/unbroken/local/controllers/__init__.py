"""The controllers of a cluster: garbage, namespaces, nodes, volumes, accounts, endpoints."""

from __future__ import annotations

from .driver import ControllerOptions, run_controllers

__all__ = ["ControllerOptions", "run_controllers"]
