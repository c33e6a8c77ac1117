"""The pod that stands for the operator of a local cluster, where HyperPod's clients look for it.

The operator is a part of `unbroken up`, so nothing runs in this pod. `hyp get-operator-logs` and
`kubectl logs` find it by its namespace and label, and read what the operator has logged since the
cluster was started.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from unbroken.errors import SpecError
from unbroken.kube.client import KubeClient
from unbroken.kube.clock import rfc3339, wall
from unbroken.local.node.logs import log_options, stream
from unbroken.local.node.processes.cri_log import LogFile
from unbroken.log_lines import LINE_FORM
from unbroken.spec.keys import CONTROL_PLANE

NAMESPACE = "aws-hyperpod"
NAME = "unbroken-operator"
CONTAINER = "operator"
POD = f"{NAMESPACE}/{NAME}"
PODS = f"api/v1/namespaces/{NAMESPACE}/pods"
OTHER_PARTS = ("unbroken.local", "unbroken.cluster_api")
"""Loggers of the parts of the cluster's process that are not the operator."""


class _Handler(logging.Handler):
    """Writes the operator's lines to its log, which rotates as that of a container."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter(LINE_FORM))
        self._log = LogFile(str(path))
        self._log.open()

    def filter(self, record: logging.LogRecord) -> bool:
        return not record.name.startswith(OTHER_PARTS)

    def emit(self, record: logging.LogRecord) -> None:
        line = f"{self.format(record)}\n".encode(errors="backslashreplace")
        self._log.write("stderr", line, int(record.created * 1e9))


@dataclass(frozen=True, slots=True)
class OperatorLog:
    """The log of this run of the operator."""

    path: Path

    def read(self, query: Mapping[str, str]) -> AsyncIterator[bytes]:
        """Return the log as a request for a pod's log asks; SpecError."""
        options = log_options(query, wall())
        if options.previous:
            raise SpecError(f'previous terminated container "{CONTAINER}" not found')
        return stream(self.path, options, asyncio.Event())


@contextmanager
def operator_log(directory: Path) -> Iterator[OperatorLog]:
    """Keep what the operator logs in `directory`, which begins empty, until the block is left."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(mode=0o700, parents=True)
    path = directory / "operator.log"
    handler = _Handler(path)
    logger = logging.getLogger("unbroken")
    logger.addHandler(handler)
    try:
        yield OperatorLog(path)
    finally:
        logger.removeHandler(handler)
        handler.close()


async def show_operator(client: KubeClient, *, runs: bool) -> None:
    """Create the operator's pod anew; with `runs` false, only delete that of an earlier `up`."""
    await client.delete_if_present(f"{PODS}/{NAME}", grace_seconds=0)
    if not runs:
        return
    await client.create_if_absent("api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
    labels = {CONTROL_PLANE: "hp-training-operator-controller-manager"}
    container = {"name": CONTAINER, "image": "unbroken"}
    pod = {
        "metadata": {"name": NAME, "labels": labels},
        # Of no scheduler: it has no node.
        "spec": {"containers": [container], "schedulerName": "unbroken-up"},
    }
    await client.raw("POST", PODS, body=pod)
    now = rfc3339(wall())
    running = {
        **container,
        **{"imageID": "", "ready": True, "started": True, "restartCount": 0},
        "state": {"running": {"startedAt": now}},
    }
    true = ("Initialized", "Ready", "ContainersReady", "PodScheduled")
    status = {
        "phase": "Running",
        "startTime": now,
        "conditions": [{"type": one, "status": "True", "lastTransitionTime": now} for one in true],
        "containerStatuses": [running],
    }
    await client.merge(f"{PODS}/{NAME}/status", {"status": status})
