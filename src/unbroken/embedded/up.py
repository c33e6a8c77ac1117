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
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager

import msgspec

from unbroken.controller import definitions
from unbroken.controller.driver import run_operator
from unbroken.embedded.apiserver.driver import Serving, serving
from unbroken.errors import WorldError
from unbroken.kube.client import KubeClient, connect
from unbroken.kube.clock import wall
from unbroken.kube.informers import Informers

from . import networks
from .admissions import ADMISSIONS
from .controllers import ControllerOptions, run_controllers
from .node import NodeOptions, stop_pods
from .node.addresses import NODES_MAX
from .power import NodePower, retire
from .scheduler import run_scheduler
from .state import ClusterOptions, Paths, State, process_started

log = logging.getLogger(__name__)

HYPERPOD_LABELS = {
    "sagemaker.amazonaws.com/node-health-status": "Schedulable",
    "sagemaker.amazonaws.com/compute-type": "hyperpod",
}
"""What a healthy node of HyperPod has and manifests written for it select by."""


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
            async with serving(paths.directory, options.port, ADMISSIONS) as server:
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
    informers = Informers(client)
    first_index = networks.claim(paths.directory) * NODES_MAX
    nodes = {
        name: _node_options(paths, options, server, first_index + index, name)
        for index, name in enumerate(f"node-{number}" for number in range(options.nodes))
    }
    power = NodePower(client, informers, nodes)
    try:
        # With fewer nodes than last time, the others are gone, and with them their pods.
        await retire(client, [path for path in paths.nodes.glob("*") if path.name not in nodes])
        async with asyncio.TaskGroup() as parts:
            first = [parts.create_task(informers.run()), parts.create_task(power.run())]
            # Those that judge nodes come after: after a restart, no node is late because of it.
            await power.settled()
            await definitions.install(client)
            others = [
                parts.create_task(part) for part in _programs(paths, options, client, informers)
            ]
            paths.state.write_bytes(msgspec.json.encode(state))
            on_ready(state)
            await stopped.wait()
            for task in (*first, *others):
                task.cancel()
    finally:
        await client.close()


def _programs(
    paths: Paths, options: ClusterOptions, client: KubeClient, informers: Informers
) -> Iterator[Coroutine[None, None, None]]:
    """What runs beside the API server and the nodes."""
    controllers = ControllerOptions(
        volume_directory=paths.directory / "volumes", node_grace_seconds=options.for_nodes()[1]
    )
    yield run_controllers(client, controllers, informers)
    yield run_scheduler(client, informers)
    if options.operator:
        yield run_operator(client, informers)


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
        resources=options.resources,
        labels=options.labels,
        first_labels=HYPERPOD_LABELS,
        kubelet_token=server.kubelet_token,
        heartbeat_seconds=options.for_nodes()[0],
    )


def machine_size() -> Mapping[str, str]:
    """CPUs and memory of this machine as quantities."""
    pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return {"cpu": str(os.cpu_count() or 1), "memory": f"{pages * page_bytes // 1024}Ki"}
