"""`unbroken up`: start the local cluster, in the foreground or detached."""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from unbroken.cli.app import App, option
from unbroken.cli.operator.options import RESUME_HELP, NotifyFlags, RepairFlags
from unbroken.cli.options import Directory
from unbroken.cli.place import DEFAULT, resolve
from unbroken.cli.programs import start_logging
from unbroken.cli.show import note
from unbroken.errors import SpecError, WorldError
from unbroken.kube.quantity import QuantityError, parse_quantity
from unbroken.local import state
from unbroken.local.folders import private
from unbroken.local.machines.decisions.scripts import source_mapping
from unbroken.spec.auto_resume import DEFAULT_RETRIES, RETRIES_MAX
from unbroken.spec.nodes.instance_types import instance_type as find_type

if TYPE_CHECKING:
    from unbroken.kube.client import KubeClient
    from unbroken.operator.reports import ReportSource

READY_FD = "UNBROKEN_READY_FD"
"""Environment variable: file descriptor on which a detached cluster reports that it is ready."""
OWN_OPTIONS = {
    "cpu": "--cpu-per-node",
    "memory": "--memory-per-node",
    "nvidia.com/gpu": "--gpu-per-node",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFlags:
    """Options of the cluster, by the names of `state.ClusterOptions`.

    None: keep the value of the last time.
    """

    nodes: int | None = option(min=0, max=200, help="Number of nodes.", show_default="1")
    cpu: str | None = option(
        "--cpu-per-node",
        metavar="CPUS",
        help="CPUs of each node, such as 4 or 500m.",
        show_default="all",
    )
    memory: str | None = option(
        "--memory-per-node",
        metavar="SIZE",
        help="Memory of each node, such as 8Gi.",
        show_default="all",
    )
    gpus: int | None = option(
        "--gpu-per-node", min=0, help="GPUs of each node (nvidia.com/gpu).", show_default="0"
    )
    instance_type: str | None = option(
        "--instance-type",
        metavar="ml.TYPE",
        help="Give nodes the resources and the label of this instance type; '' for none.",
        show_default="none",
    )
    resources: list[str] | None = option(
        "--resource", metavar="NAME=QUANTITY", help="Another resource of each node. Repeatable."
    )
    labels: list[str] | None = option(
        "--label", metavar="KEY=VALUE", help="Label of every node. Repeatable."
    )
    images: list[str] | None = option(
        "--image-env",
        metavar="IMAGE=DIR",
        help="Python environment that stands for an image: its bin comes first on the PATH of "
        "containers of this image. Without a tag, for all tags. Repeatable.",
    )
    port: int | None = option(
        min=0, max=65535, help="Port of the Kubernetes API.", show_default="any"
    )
    operator: bool | None = option(
        "--operator/--no-operator",
        help="Run the operator in the cluster, or leave it to `unbroken operator`.",
        show_default="--operator",
    )
    pytorchjobs: bool | None = option(
        "--pytorchjobs/--no-pytorchjobs",
        help="Run Kubeflow's PyTorchJobs, or leave them to their own operator.",
        show_default="--pytorchjobs",
    )
    ray: bool | None = option(
        "--ray/--no-ray",
        help="Run RayClusters and RayJobs, or leave them to KubeRay's operator.",
        show_default="--ray",
    )
    resume_retries: int | None = option(
        "--resume-retries",
        min=0,
        max=RETRIES_MAX,
        help=RESUME_HELP,
        show_default=str(DEFAULT_RETRIES),
    )
    grace_seconds: float | None = option(
        "--node-grace",
        min=2,
        help="Seconds without a heartbeat until a node counts as lost.",
        show_default="4",
    )
    lifecycle_sources: list[str] | None = option(
        "--lifecycle-source",
        metavar="s3://BUCKET/PREFIX=DIR",
        help="Directory in place of an S3 address of lifecycle scripts. The scripts run on "
        "this machine with your rights. Repeatable.",
    )
    cluster_api_port: int | None = option(
        "--cluster-api-port",
        min=0,
        max=65535,
        help="Port of the cluster API on the loopback address.",
        show_default="any",
    )
    cluster_api_credentials: str | None = option(
        "--cluster-api-credentials",
        metavar="FILE",
        help="File of the keys that may call the cluster API, in the form of "
        "~/.aws/credentials; '' for the file of the cluster.",
        show_default="DIR/cluster-api-credentials, made at the first start",
    )
    ui_port: int | None = option(
        "--ui-port",
        min=0,
        max=65535,
        help="Port of the live page on the loopback address.",
        show_default="that of the last time, or any",
    )
    prometheus: str | None = option(
        "--prometheus",
        metavar="URL",
        help="Address of a Prometheus that scrapes this cluster: the live page shows dashboards "
        "of its data. '' for none.",
        show_default="none",
    )
    metrics_port: int | None = option(
        "--metrics-port",
        min=0,
        max=65535,
        help="Port of the metrics for Prometheus on the loopback address.",
        show_default="any",
    )
    checkpoint_memory: int | None = option(
        "--checkpoint-memory",
        min=0,
        max=100,
        metavar="PERCENT",
        help="Share of each node's memory for HyperPod's tiered checkpointing; 0 for none.",
        show_default="0",
    )
    notify: NotifyFlags
    repair: RepairFlags

    def over(self, saved: state.ClusterOptions) -> state.ClusterOptions:
        """The saved options with the given options in their place; SpecError."""
        given = _fields(self) | _fields(self.notify) | _fields(self.repair)
        del given["notify"], given["repair"]
        news = {
            name: _READERS[name](value) if name in _READERS else value
            for name, value in given.items()
            if value is not None
        }
        options = msgspec.structs.replace(saved, **news)
        _quantity("--cpu-per-node", options.cpu)
        _quantity("--memory-per-node", options.memory)
        if options.node_provider == "command" and not options.node_command:
            raise SpecError("--node-provider command needs --node-command COMMAND")
        return options


def _fields(group: Any) -> dict[str, Any]:
    return {field.name: getattr(group, field.name) for field in fields(group)}


def command(
    directory: Directory = DEFAULT,
    *,
    flags: ClusterFlags,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Return when the cluster is ready.")
    ] = False,
) -> None:
    """Start a Kubernetes API, an operator and nodes of processes on this machine.

    It needs neither root, nor a container runtime, nor a network.

    Options that are not given keep the value of the last time. Ctrl-C (or `unbroken down`) stops
    the cluster and its pods; its objects stay in DIR for the next time. Nodes may offer resources
    that this machine does not have: `--instance-type ml.p5.48xlarge`, or single ones with
    `--gpu-per-node 8 --resource vpc.amazonaws.com/efa=32`.

    Example: `unbroken up --nodes 3 --gpu-per-node 8 --detach`
    """
    paths = state.Paths(resolve(directory))
    result = state.running(paths)
    if result is not None:
        print(f"a cluster already runs from {paths.directory} (pid {result.pid})")
        print(_export_line(paths))
        print(_page_line(paths, result))
        return
    options = flags.over(state.saved_options(paths))
    if detach:
        pid = start_detached(paths, options)
        print(f"cluster with {options.nodes} node(s) is ready (pid {pid})")
        print(_export_line(paths))
        print(_page_line(paths, state.running(paths)))
    else:
        _foreground(paths, options)


def _quantity(option: str, text: str) -> str:
    if text:
        try:
            parse_quantity(text)
        except QuantityError as error:
            raise SpecError(f"{option}: {error}") from error
    return text


def _labels(pairs: list[str]) -> dict[str, str]:
    return _pairs("--label", pairs)


def _pairs(option: str, pairs: list[str]) -> dict[str, str]:
    for pair in pairs:
        if "=" not in pair or pair.startswith("="):
            raise SpecError(f"{option} {pair}: must be KEY=VALUE")
    return dict(pair.split("=", 1) for pair in pairs)


def _resources(pairs: list[str]) -> dict[str, str]:
    result = _pairs("--resource", pairs)
    for name, amount in result.items():
        _quantity(f"--resource {name}", amount)
        if own := OWN_OPTIONS.get(name):
            raise SpecError(f"--resource {name}: use {own}")
        if "/" not in name and not name.startswith("hugepages-"):
            raise SpecError(f"--resource {name}: must have a domain, such as example.com/{name}")
    return result


def _instance_type(name: str) -> str:
    if name:
        from unbroken.operator.instance_types import instance_types  # reads a table

        find_type(instance_types(), name)
    return name


def _lifecycle_sources(pairs: list[str]) -> dict[str, str]:
    result = {}
    for address, directory in source_mapping(pairs).items():
        path = Path(directory).expanduser().resolve()
        if not path.is_dir():
            raise SpecError(f"--lifecycle-source {address}: {path} is not a directory")
        result[address] = str(path)
    return result


def _images(pairs: list[str]) -> dict[str, str]:
    result = {}
    for image, directory in _pairs("--image-env", pairs).items():
        # Not resolved: the link to the environment is what a person replaces.
        path = Path(directory).expanduser().absolute()
        if not (path / "bin/python").exists():
            raise SpecError(
                f"--image-env {image}: {path} is no Python environment (no bin/python): make one "
                f"with: python3 -m venv {path}"
            )
        result[image] = str(path)
    return result


def _credentials(name: str) -> str:
    if not name:
        return ""
    from unbroken.cluster_api.signatures import read_credentials  # slow to load

    path = Path(name).expanduser().resolve()
    read_credentials(path)
    return str(path)


def _node_command(text: str) -> str:
    if text:
        from unbroken.operator.nodes.providers import parse_command  # slow to load

        parse_command(text)
    return text


def _notify_file(name: str) -> str:
    if not name:
        return ""
    from unbroken.operator.notifications import read_address  # slow to load

    path = Path(name).expanduser().resolve()
    read_address(path)
    return str(path)


def _prometheus(text: str) -> str:
    from unbroken.cli.page.prometheus import read_prometheus_address  # slow to load

    return read_prometheus_address(text) if text else ""


_READERS: dict[str, Callable[[Any], Any]] = {
    "instance_type": _instance_type,
    "resources": _resources,
    "labels": _labels,
    "images": _images,
    "node_command": _node_command,
    "lifecycle_sources": _lifecycle_sources,
    "cluster_api_credentials": _credentials,
    "prometheus": _prometheus,
    "notify_file": _notify_file,
}
"""Readers of the options that are not kept as they are given."""


def _export_line(paths: state.Paths) -> str:
    return f"export KUBECONFIG={shlex.quote(str(paths.kubeconfig))}"


def _page_line(paths: state.Paths, running: state.State | None) -> str:
    from unbroken.cli.page.commands import link_to  # slow to load

    # A cluster of an earlier version has no page: `unbroken ui` says what to do.
    has_page = running is not None and running.ui
    return f"page: {link_to(running, paths)}" if has_page else "page: unbroken ui"


def _foreground(paths: state.Paths, options: state.ClusterOptions) -> None:
    # Imported here because it loads the whole cluster; other commands take half the time without.
    from unbroken.cli.page.driver import serving_page
    from unbroken.local import up

    start_logging()
    logging.getLogger("httpx").setLevel(logging.WARNING)
    ready = os.environ.pop(READY_FD, None)

    def on_ready(running: state.State) -> None:
        if ready is not None:
            os.write(int(ready), b"ready\n")
            os.close(int(ready))
            return
        print(f"cluster with {options.nodes} node(s) is ready at {running.url}; Ctrl-C stops it")
        print(_export_line(paths))
        print(_page_line(paths, running), flush=True)

    def page(client: KubeClient, reports: ReportSource) -> AbstractAsyncContextManager[str]:
        return serving_page(paths, client, options.ui_port, options.prometheus, reports)

    asyncio.run(up.run(paths, options, page, on_ready))


def start_detached(paths: state.Paths, options: state.ClusterOptions) -> int:
    """Start `unbroken up` in a session of its own, wait until it is ready, and return its pid."""
    if notice := private(paths.directory):
        note(notice)
    arguments = ["--dir", str(paths.directory), *words_of(options)]
    receive, send = os.pipe()
    with paths.log.open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "unbroken.cli.main", "up", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[send],
            start_new_session=True,
            env={**os.environ, READY_FD: str(send)},
        )
    os.close(send)
    with os.fdopen(receive, "rb") as pipe:
        answer = pipe.readline()
    if answer != b"ready\n":
        process.wait()
        raise WorldError(f"the cluster did not start; {_last_line(paths.log)} (see {paths.log})")
    return process.pid


def words_of(options: state.ClusterOptions) -> Iterator[str]:
    """The options as arguments of `unbroken up`."""
    app = App()
    app.command()(command)
    for param in typer.main.get_command(app).params:
        value = getattr(options, str(param.name), None)
        if isinstance(value, bool):
            yield (param.opts if value else param.secondary_opts)[0]
        elif isinstance(value, dict):
            yield from (f"{param.opts[0]}={name}={given}" for name, given in value.items())
        elif value is not None:
            yield from (param.opts[0], str(value))


def _last_line(path: Path) -> str:
    lines = path.read_text(errors="replace").strip().splitlines()
    return lines[-1][:500] if lines else "its log is empty"
