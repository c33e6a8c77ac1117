"""Programs that a kube-apiserver started alone needs: controllers, scheduler, nodes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tests.e2e.clusters import Cluster
from tests.watching import PATIENCE_SECONDS
from unbroken.local import networks
from unbroken.local.networks import NODES_MAX

SERVICES = """
import asyncio, sys
from pathlib import Path
from unbroken.local.controllers import ControllerOptions, run_controllers
from unbroken.local.scheduler import run_scheduler
from unbroken.kube.client import connect
from unbroken.kube.informer import Informers

async def main():
    client = connect(sys.argv[1])
    informers = Informers(client)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(informers.run())
        tasks.create_task(run_scheduler(client, informers))
        tasks.create_task(run_controllers(client, ControllerOptions(Path(sys.argv[2])), informers))

asyncio.run(main())
"""
"""Program of the controllers; its arguments are the kubeconfig and the folder of volumes."""


@contextmanager
def program(command: list[str]) -> Iterator[None]:
    """Run a program while the block runs."""
    process = subprocess.Popen(command)
    try:
        yield
    finally:
        process.terminate()
        process.wait(timeout=PATIENCE_SECONDS)


class Node:
    """A node of the local cluster as a process of its own, which ends with the block."""

    def __init__(self, cluster: Cluster, number: int, name: str = "", *options: str) -> None:
        name = name or f"n{number}"
        directory = cluster.directory / name
        directory.mkdir()
        index = networks.claim(cluster.directory) * NODES_MAX + number
        module = [sys.executable, "-m", "unbroken.local.node", "--name", name]
        self._command = [*module, "--dir", str(directory), "--index", str(index), "--cpu", "8"]
        self._command += ["--kubeconfig", str(cluster.directory / "kubeconfig"), *options]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> None:
        self._process = subprocess.Popen(self._command)

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.terminate()
        self._process.wait(timeout=PATIENCE_SECONDS)
        subprocess.run([*self._command, "--stop-pods"], check=True, timeout=PATIENCE_SECONDS)
