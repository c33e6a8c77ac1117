"""Runs pods as process groups; speaks only the Kubernetes API.

The names below are loaded when they are asked for: the launcher of containers imports this package
too, and must stay small.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .driver import NodeOptions as NodeOptions
    from .driver import run_node as run_node
    from .driver import stop_pods as stop_pods

__all__ = ["NodeOptions", "run_node", "stop_pods"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(name)
    from . import driver

    return getattr(driver, name)
