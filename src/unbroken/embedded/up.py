"""The embedded cluster as one program: API server, scheduler, controllers and nodes together.

`run` is what `unbroken up` does in the foreground.  The parts know each other through the
Kubernetes API alone.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import msgspec

from unbroken.embedded.apiserver.driver import Serving, serving
from unbroken.errors import WorldError
from unbroken.kube.client import connect
from unbroken.kube.clock import wall
from unbroken.kube.informers import Informers

from . import networks
from .controllers import ControllerOptions, run_controllers
from .node import NodeOptions, run_node, stop_pods
from .node.addresses import NODES_MAX
from .scheduler import run_scheduler
from .state import ClusterOptions, Paths, State, process_started

log = logging.getLogger(__name__)


@contextmanager
def _sole(paths: Paths) -> Iterator[None]:
    """Be the only `up` of the directory."""
    handle = os.open(paths.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise WorldError(f"a cluster already runs from {paths.directory}") from error
        yield
    finally:
        os.close(handle)


async def run(paths: Paths, options: ClusterOptions, on_ready: Callable[[State], None]) -> None:
    """Run the cluster until SIGTERM or SIGINT, then stop its pods.

    `on_ready` is called once, when the API answers and the nodes have registered.  WorldError when
    the cluster cannot run.
    """
    paths.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    with _sole(paths):
        paths.options.write_bytes(msgspec.json.encode(options))
        try:
            async with serving(paths.directory, options.port) as server:
                await _run_parts(paths, options, server, stopped, on_ready)
        finally:
            paths.state.unlink(missing_ok=True)
            await stop_pods(paths.nodes)


async def _run_parts(
    paths: Paths,
    options: ClusterOptions,
    server: Serving,
    stopped: asyncio.Event,
    on_ready: Callable[[State], None],
) -> None:
    client = connect(server.internal_kubeconfig)
    started = process_started(os.getpid())
    assert started is not None
    state = State(os.getpid(), started, server.url, str(server.kubeconfig), wall())
    controllers = ControllerOptions(volume_directory=paths.directory / "volumes")
    informers = Informers(client)
    first_index = networks.claim(paths.directory) * NODES_MAX
    try:
        async with asyncio.TaskGroup() as parts:
            running_parts = [
                parts.create_task(informers.run(), name="informers"),
                parts.create_task(run_controllers(client, controllers, informers)),
                parts.create_task(run_scheduler(client, informers), name="scheduler"),
            ]
            registered = [asyncio.Event() for _ in range(options.nodes)]
            for index, event in enumerate(registered):
                node = _node_options(paths, options, server, first_index + index, f"node-{index}")
                part = run_node(client, node, on_registered=event.set)
                running_parts.append(parts.create_task(part, name=node.name))
            for event in registered:
                await event.wait()
            paths.state.write_bytes(msgspec.json.encode(state))
            on_ready(state)
            await stopped.wait()
            for part_task in running_parts:
                part_task.cancel()
    finally:
        await client.close()


def _node_options(
    paths: Paths, options: ClusterOptions, server: Serving, index: int, name: str
) -> NodeOptions:
    machine = machine_size()
    return NodeOptions(
        name=name,
        directory=paths.nodes / name,
        index=index,
        cpu=options.cpu or machine["cpu"],
        memory=options.memory or machine["memory"],
        gpus=options.gpus,
        labels=options.labels,
        kubelet_token=server.kubelet_token,
    )


def machine_size() -> Mapping[str, str]:
    """CPUs and memory of this machine as quantities."""
    pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return {"cpu": str(os.cpu_count() or 1), "memory": f"{pages * page_bytes // 1024}Ki"}
