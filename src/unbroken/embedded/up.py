"""The embedded cluster as one program: API server, scheduler, controllers and nodes together.

`run` is what `unbroken up` does in the foreground; `State` is how later commands find it.  The
parts know each other through the Kubernetes API alone.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

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

log = logging.getLogger(__name__)


class ClusterOptions(msgspec.Struct, frozen=True):
    """What a person chooses for a cluster; kept in DIR/cluster.json for the next `up`."""

    nodes: int = 1
    cpu: str = ""
    """Per node, as a Kubernetes quantity; empty: what the machine has."""
    memory: str = ""
    """Per node, as a Kubernetes quantity; empty: what the machine has."""
    gpus: int = 0
    """Per node, as nvidia.com/gpu."""
    labels: dict[str, str] = {}
    port: int = 0


class State(msgspec.Struct, frozen=True):
    """The `up` process of a directory, as DIR/up.json records it."""

    pid: int
    started: int
    """Start time of the process in clock ticks since boot (/proc/PID/stat): pid and start time
    together name a process for good."""
    url: str
    kubeconfig: str
    since: float
    """Seconds since the epoch."""


@dataclass(frozen=True, slots=True)
class Paths:
    """Files of one cluster directory."""

    directory: Path
    state: Path = field(init=False)
    options: Path = field(init=False)
    lock: Path = field(init=False)
    log: Path = field(init=False)
    nodes: Path = field(init=False)
    kubeconfig: Path = field(init=False)

    def __post_init__(self) -> None:
        for name, file in (
            ("state", "up.json"),
            ("options", "cluster.json"),
            ("lock", "up.lock"),
            ("log", "up.log"),
            ("nodes", "nodes"),
            ("kubeconfig", "kubeconfig"),
        ):
            object.__setattr__(self, name, self.directory / file)


def process_started(pid: int) -> int | None:
    """Start time of a live process in clock ticks since boot; None when there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def running(paths: Paths) -> State | None:
    """The cluster that runs from the directory; None when there is none."""
    try:
        state = msgspec.json.decode(paths.state.read_bytes(), type=State)
    except (OSError, msgspec.MsgspecError):
        return None
    return state if process_started(state.pid) == state.started else None


def saved_options(paths: Paths) -> ClusterOptions:
    """What the last `up` used; the defaults for a new directory."""
    try:
        return msgspec.json.decode(paths.options.read_bytes(), type=ClusterOptions)
    except FileNotFoundError:
        return ClusterOptions()
    except (OSError, msgspec.MsgspecError) as error:
        raise WorldError(f"cannot read {paths.options}: {error}; remove it to start over") from None


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
