"""`unbroken up`: start the embedded cluster, in the foreground or detached."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from unbroken.embedded import state
from unbroken.errors import SpecError, WorldError
from unbroken.kube.quantity import QuantityError, parse_quantity

from .place import DEFAULT, Directory, resolve

READY_FD = "UNBROKEN_READY_FD"
"""Environment variable: where a detached cluster says that it is ready."""
OWN_OPTIONS = {
    "cpu": "--cpu-per-node",
    "memory": "--memory-per-node",
    "nvidia.com/gpu": "--gpu-per-node",
}


Operator = Annotated[
    bool | None,
    typer.Option(
        "--operator/--no-operator",
        help="Run the operator too, or leave it to `unbroken operator`.",
        show_default="--operator",
    ),
]
NodeGrace = Annotated[
    float | None,
    typer.Option(
        "--node-grace", min=2, help="Seconds until a silent node is lost.", show_default="4"
    ),
]
Resources = Annotated[
    list[str] | None,
    typer.Option(
        "--resource",
        metavar="NAME=QUANTITY",
        help="More to offer.",
    ),
]


def command(
    directory: Directory = DEFAULT,
    nodes: Annotated[
        int | None, typer.Option(min=0, max=200, help="Number of nodes.", show_default="1")
    ] = None,
    cpu: Annotated[
        str | None, typer.Option("--cpu-per-node", help="Such as 4 or 500m.", show_default="all")
    ] = None,
    memory: Annotated[
        str | None, typer.Option("--memory-per-node", help="Such as 8Gi.", show_default="all")
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option("--gpu-per-node", min=0, help="nvidia.com/gpu to offer.", show_default="0"),
    ] = None,
    resource: Resources = None,
    label: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Label of every node.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Of the API.", show_default="any")
    ] = None,
    operator: Operator = None,
    grace: NodeGrace = None,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Return when the cluster is ready.")
    ] = False,
) -> None:
    """Start a Kubernetes cluster on this machine: no root, container runtime or network needed.

    Options that are not given keep the value of the last time. Ctrl-C (or `unbroken down`) stops
    the cluster and its pods; the objects stay in DIR for the next time. What nodes offer may be
    pretended: `--gpu-per-node 8 --resource vpc.amazonaws.com/efa=32`.
    """
    paths = state.Paths(resolve(directory))
    found = state.running(paths)
    if found is not None:
        print(f"a cluster already runs from {paths.directory} (pid {found.pid})")
        print(_export_line(paths))
        return
    saved = state.saved_options(paths)
    options = state.ClusterOptions(
        nodes=saved.nodes if nodes is None else nodes,
        cpu=_quantity("--cpu-per-node", saved.cpu if cpu is None else cpu),
        memory=_quantity("--memory-per-node", saved.memory if memory is None else memory),
        gpus=saved.gpus if gpus is None else gpus,
        resources=saved.resources if resource is None else _resources(resource),
        labels=saved.labels if label is None else _pairs("--label", label),
        port=saved.port if port is None else port,
        operator=saved.operator if operator is None else operator,
        grace_seconds=saved.grace_seconds if grace is None else grace,
    )
    if detach:
        pid = start_detached(paths, options)
        print(f"cluster with {options.nodes} node(s) is ready (pid {pid})")
        print(_export_line(paths))
    else:
        _foreground(paths, options)


def _quantity(option: str, text: str) -> str:
    if text:
        try:
            parse_quantity(text)
        except QuantityError as error:
            raise SpecError(f"{option}: {error}") from error
    return text


def _pairs(option: str, pairs: list[str]) -> dict[str, str]:
    for pair in pairs:
        if "=" not in pair or pair.startswith("="):
            raise SpecError(f"{option} {pair}: write it as KEY=VALUE")
    return dict(pair.split("=", 1) for pair in pairs)


def _resources(pairs: list[str]) -> dict[str, str]:
    found = _pairs("--resource", pairs)
    for name, amount in found.items():
        _quantity(f"--resource {name}", amount)
        if own := OWN_OPTIONS.get(name):
            raise SpecError(f"--resource {name}: {own} sets it")
        if "/" not in name and not name.startswith("hugepages-"):
            raise SpecError(f"--resource {name}: write it with its domain, as example.com/{name}")
    return found


def _export_line(paths: state.Paths) -> str:
    return f"export KUBECONFIG={paths.kubeconfig}"


def _foreground(paths: state.Paths, options: state.ClusterOptions) -> None:
    # Here, because it loads the whole cluster: other commands answer twice as fast without.
    from unbroken.embedded import up

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    ready = os.environ.pop(READY_FD, None)

    def on_ready(running: state.State) -> None:
        if ready is not None:
            os.write(int(ready), b"ready\n")
            os.close(int(ready))
            return
        print(f"cluster with {options.nodes} node(s) is ready at {running.url}; Ctrl-C stops it")
        print(_export_line(paths), flush=True)

    asyncio.run(up.run(paths, options, on_ready))


def start_detached(paths: state.Paths, options: state.ClusterOptions) -> int:
    """Start `unbroken up` in a session of its own, wait until it is ready; its pid."""
    paths.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    arguments = [
        *("--dir", str(paths.directory), "--nodes", str(options.nodes)),
        *("--cpu-per-node", options.cpu, "--memory-per-node", options.memory),
        *("--gpu-per-node", str(options.gpus), "--port", str(options.port)),
        "--operator" if options.operator else "--no-operator",
        *("--node-grace", str(options.grace_seconds)),
        *(f"--resource={name}={amount}" for name, amount in options.resources.items()),
        *(f"--label={key}={value}" for key, value in options.labels.items()),
    ]
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


def _last_line(path: Path) -> str:
    lines = path.read_text(errors="replace").strip().splitlines()
    return lines[-1][:500] if lines else "it said nothing"
