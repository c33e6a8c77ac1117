"""The local cluster as one program: API server, scheduler, controllers and nodes together.

`run` is what `unbroken up` does in the foreground.  The parts know each other through the
Kubernetes API alone.

The key of its cluster API is made at the first start, and kept in the directory. The loopback
address is open to every user of the machine; the key is readable by its owner only.

Each node has a daemon. The node has no kernel and no GPUs of its own, so files in the node's
directory simulate them: `kernel.log`, `libnvidia-ml.so.1`, and the file system below `host`. Faults
of the host machine are not attributed to one of its nodes: rebooting or replacing that node would
not help.

A pod stands for the operator where HyperPod's clients look for it. The operator is a part of
`unbroken up`, so nothing runs in this pod. `hyp get-operator-logs` and
`kubectl logs` find it by its namespace and label, and read what the operator has logged since the
cluster was started.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import platform
import secrets
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from unbroken.cluster_api.driver import ClusterApiOptions, serve_cluster_api
from unbroken.cluster_api.signatures import Credential, credentials_text
from unbroken.errors import SpecError, WorldError
from unbroken.kube.client import KubeClient, connect
from unbroken.kube.clock import rfc3339, wall
from unbroken.kube.informer import Informers
from unbroken.kube.observed import observing
from unbroken.local.apiserver.access import write_private
from unbroken.local.apiserver.driver import Serving, serving
from unbroken.local.machines.node import Companion
from unbroken.local.machines.pool import MachinePool, PoolOptions, maker
from unbroken.local.machines.scripts import stop_scripts
from unbroken.local.node.logs import log_options, stream
from unbroken.local.node.processes.cri_log import LogFile
from unbroken.local.ray import ray_tokens
from unbroken.log_lines import LINE_FORM, Log
from unbroken.nodes.driver import DaemonOptions, run_daemon
from unbroken.nodes.gpu_metrics import GpuMetrics
from unbroken.nodes.host_metrics import HostMetrics
from unbroken.observe.server import serving_metrics
from unbroken.operator import definitions
from unbroken.operator.driver import OperatorOptions, run_operator
from unbroken.operator.jobs.pods import AgentToInject
from unbroken.operator.key import kept_key
from unbroken.operator.nodes.checks_pods import CheckerOptions
from unbroken.operator.nodes.repair import options_of
from unbroken.operator.notifications import NotifyOptions
from unbroken.operator.reports import ReportSource
from unbroken.operator.telemetry import OperatorMetrics, watch_nodes
from unbroken.spec.keys import CONTROL_PLANE
from unbroken.spec.notifications import NotificationForm

from . import networks
from .checkpoint_memory import CheckpointShares, discard_memory, memory_beside
from .controllers import ControllerOptions, run_controllers
from .folders import private
from .job_programs import ADMISSIONS, job_programs
from .machines.pool import MachineRequests
from .networks import NODES_MAX
from .node import NodeOptions, stop_pods
from .scheduler import run_scheduler
from .state import ClusterOptions, Paths, State, process_started

KEY_ID_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"
KEY_ID_PREFIX, KEY_ID_RANDOM = "AKIA", 16
"""An access key id of AWS: the prefix of long-term keys and 16 letters and digits."""
SECRET_BYTES = 30
"""Bytes of a secret: as many as AWS has, which makes 40 characters; here none that a shell must
quote."""


def credentials_file(paths: Paths, options: ClusterOptions) -> Path:
    """The file of the keys that may call the cluster API; a key is made if there is none."""
    if options.cluster_api_credentials:
        return Path(options.cluster_api_credentials)
    path = paths.cluster_api_credentials
    if path.exists():
        path.chmod(0o600)
        return path
    letters = (secrets.choice(KEY_ID_LETTERS) for _ in range(KEY_ID_RANDOM))
    made = Credential(KEY_ID_PREFIX + "".join(letters), secrets.token_urlsafe(SECRET_BYTES))
    write_private(path, credentials_text(made).encode())
    return path


KERNEL_LOG, LIBRARY, ROOT = "kernel.log", "libnvidia-ml.so.1", "host"
"""Files of a node's directory."""
SAMPLE_SECONDS = 5.0
"""There is little to look at."""


def daemon_beside(logs: Path, gpus: GpuMetrics) -> Companion:
    """Return the program that runs a node's daemon; its log is kept below `logs`."""

    async def watch(client: KubeClient, node: NodeOptions) -> None:
        kernel_log = node.directory / KERNEL_LOG
        kernel_log.touch()
        kernel_log.chmod(0o600)  # a writer of it can have the node repaired
        try:
            await run_daemon(client, _options(node, kernel_log, logs), gpus)
        finally:
            gpus.node_gone(node.name)

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


log = Log(__name__)

Page = Callable[[KubeClient, ReportSource], AbstractAsyncContextManager[str]]
"""Serves the live page for the time of a block, and yields its address; the operator of the cluster
gives it the reports of agents."""


@contextmanager
def _sole(paths: Paths) -> Iterator[None]:
    """Be the only `up` of the directory."""
    handle = os.open(paths.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise WorldError(f"a cluster already runs from {paths.directory}") from error
        os.ftruncate(handle, 0)
        os.write(handle, f"{os.getpid()} {process_started(os.getpid())}".encode())
        yield
    finally:
        os.close(handle)


async def run(
    paths: Paths, options: ClusterOptions, page: Page, on_ready: Callable[[State], None]
) -> None:
    """Run the cluster, and the page beside it, until SIGTERM or SIGINT, then stop its pods.

    `on_ready` is called once, when the API answers and the nodes have registered.  WorldError when
    the cluster cannot run.
    """
    if notice := private(paths.directory):
        log.warning("data directory", problem=notice)
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    with _sole(paths):
        paths.options.write_bytes(msgspec.json.encode(options))
        try:
            with operator_log(paths.logs / "operator") as own_log:
                logs = {POD: own_log.read}
                async with serving(paths.directory, options.port, ADMISSIONS, logs) as server:
                    with observing() as result:
                        metrics = OperatorMetrics(result)
                        await _run_parts(paths, options, server, metrics, page, stopped, on_ready)
        finally:
            paths.state.unlink(missing_ok=True)
            await stop_scripts(paths.nodes)
            await stop_pods(paths.nodes)
            await asyncio.to_thread(discard_memory, paths.directory)


async def _run_parts(
    paths: Paths,
    options: ClusterOptions,
    server: Serving,
    metrics: OperatorMetrics,
    page: Page,
    stopped: asyncio.Event,
    on_ready: Callable[[State], None],
) -> None:
    client = connect(server.internal_kubeconfig)
    started = process_started(os.getpid())
    assert started is not None
    informers, reports = Informers(client), ReportSource()
    keys = credentials_file(paths, options)
    cluster_api = ClusterApiOptions(keys, port=options.cluster_api_port, keeps_checkpoints=True)
    # The nodes share this machine, but each has GPUs of its own.
    machine = HostMetrics(metrics.registry, Path("/"), platform.node())
    gpus = GpuMetrics(metrics.registry)
    try:
        await definitions.install(client)  # first: the servers and informers below read these kinds
        async with (
            serve_cluster_api(client, cluster_api) as address,
            serving_metrics(
                metrics.registry, "127.0.0.1", options.metrics_port, machine.refresh
            ) as told_at,
            page(client, reports) as ui,
            asyncio.TaskGroup() as parts,
        ):
            state = State(
                *(os.getpid(), started, server.url, str(server.kubeconfig), wall()),
                cluster_api=address,
                metrics=told_at,
                cluster_api_credentials=str(keys),
                ui=ui,
            )
            first = [parts.create_task(informers.run())]
            await show_operator(client, runs=options.operator)
            if not options.operator:
                watch_nodes(informers, metrics.registry, state.since)
            for program in job_programs(options):
                await program.install(client)
            first.append(
                await _start_machines(parts, paths, options, server, client, informers, gpus)
            )
            # Programs that evaluate nodes start later: after a restart, no node is late because of
            # it.
            others = [
                parts.create_task(part)
                for part in _programs(paths, options, client, informers, metrics, reports, ui)
            ]
            paths.state.write_bytes(msgspec.json.encode(state))
            on_ready(state)
            await stopped.wait()
            for task in (*first, *others):
                task.cancel()
    finally:
        await client.close()


async def _start_machines(
    parts: asyncio.TaskGroup,
    paths: Paths,
    options: ClusterOptions,
    server: Serving,
    client: KubeClient,
    informers: Informers,
    gpus: GpuMetrics,
) -> asyncio.Task[None]:
    """Run the machines; returns when those that there are to be have joined."""
    requests = MachineRequests(client)
    wanted = await requests.ensure(options.nodes)
    pool_options = PoolOptions(
        nodes=paths.nodes,
        logs=paths.logs,
        first_index=networks.claim(paths.directory) * NODES_MAX,
        make=maker(paths, options, server.kubelet_token),
        sources=options.lifecycle_sources,
        companions=(
            daemon_beside(paths.logs, gpus),
            memory_beside(paths.directory, CheckpointShares(informers, options.checkpoint_memory)),
        ),
    )
    pool = MachinePool(client, informers, pool_options)
    running = parts.create_task(pool.run())
    await pool.settled()
    if wanted.blocked:
        # Their names are free now.
        wanted = await requests.ensure(options.nodes)
        await pool.settled(wanted.create)
    return running


def _programs(
    paths: Paths,
    options: ClusterOptions,
    client: KubeClient,
    informers: Informers,
    metrics: OperatorMetrics,
    reports: ReportSource,
    page: str,
) -> Iterator[Coroutine[None, None, None]]:
    """Yield the programs other than the API server and the nodes."""
    controllers = ControllerOptions(
        volume_directory=paths.directory / "volumes", node_grace_seconds=options.for_nodes()[1]
    )
    yield run_controllers(client, controllers, informers)
    yield run_scheduler(client, informers)
    for program in job_programs(options):
        yield program.run(client, informers)
    if options.operator:
        repair = options_of(
            options.node_recovery,
            options.node_provider,
            options.node_command,
            options.repair_share,
            options.repair_dry_run,
        )
        checks = CheckerOptions(log_directory=paths.logs)
        key = kept_key(paths.operator_key)
        # Pods are processes here: the agent is this machine's, and there is nothing to copy.
        own = (sys.executable, "-P", "-m", "unbroken.agent.injected")
        agent = AgentToInject(command=own)
        wanted = OperatorOptions(
            checks=checks,
            repair=repair,
            agent=agent,
            resume_retries=options.resume_retries,
            notify=_notify(options, page),
            ray_tokens=ray_tokens(client.config),
            key=key,
        )
        yield run_operator(client, informers, wanted, metrics, reports)


def _notify(options: ClusterOptions, page: str) -> NotifyOptions | None:
    if not options.notify_file:
        return None
    form = NotificationForm(options.notify_form)
    return NotifyOptions(Path(options.notify_file), form, page)


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
