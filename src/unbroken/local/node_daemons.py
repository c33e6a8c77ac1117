"""The daemon of each node of the local cluster.

Its node has no kernel and no GPUs of its own, so files in the node's directory simulate them:
`kernel.log`, `libnvidia-ml.so.1`, and the file system below `host`. Faults of the host machine are
not attributed to one of its nodes: rebooting or replacing that node would not help.
"""

from __future__ import annotations

from pathlib import Path

from unbroken.kube.client import KubeClient
from unbroken.local.machines.node import Companion
from unbroken.nodes.driver import DaemonOptions, run_daemon

from .node import NodeOptions

KERNEL_LOG, LIBRARY, ROOT = "kernel.log", "libnvidia-ml.so.1", "host"
"""Files of a node's directory."""
SAMPLE_SECONDS = 5.0
"""There is little to look at."""


def daemon_beside(logs: Path) -> Companion:
    """Return the program that runs a node's daemon; its log is kept below `logs`."""

    async def watch(client: KubeClient, node: NodeOptions) -> None:
        kernel_log = node.directory / KERNEL_LOG
        kernel_log.touch()
        kernel_log.chmod(0o600)  # a writer of it can have the node repaired
        await run_daemon(client, _options(node, kernel_log, logs))

    return watch


def _options(node: NodeOptions, kernel_log: Path, logs: Path) -> DaemonOptions:
    return DaemonOptions(
        node.name,
        kernel_log=kernel_log,
        root=node.directory / ROOT,
        log_directory=logs,
        nvml_library=str(node.directory / LIBRARY),
        sample_seconds=SAMPLE_SECONDS,
    )
