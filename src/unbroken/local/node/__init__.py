"""Runs pods as process groups; speaks only the Kubernetes API.

A container is a process tree with a supervisor of its own (`supervisor`), forked from a launcher
(`launcher`). So it outlives the node's process, and its end is never lost. What a pod does is
decided by a pure machine (`lifecycle`) and carried out by its worker (`pod_worker`).

These are missing:

- Images: a container needs a command, which runs from the host's files.
- A network of the pod's own: it has an address in 127.0.0.0/8 (status.podIP), to which its programs
  must bind themselves.
- Seccomp and other confinement: a pod may do what its user may do.

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
