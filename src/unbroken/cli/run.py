"""`unbroken run`: run a manifest or a script, and follow it to its end."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from unbroken.errors import SpecError

from . import manifests
from .launch import Order, Wish, pods_of, run_wish, start_cluster
from .place import Context, Embedded, Form, Kubeconfig, Namespace, Output, Place, Use, find
from .show import note

PASSED_ON = {
    **dict.fromkeys(("--tee", "-t", "--redirects", "-r", "--log-dir", "--role"), 1),
    **dict.fromkeys(("--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf"), 1),
    **dict.fromkeys(("--node-rank", "--master-addr", "--master-port", "--local-addr"), 1),
    **dict.fromkeys(("--monitor-interval", "--start-method", "--local-ranks-filter"), 1),
    **dict.fromkeys(("--pre-train-script", "--pre-train-args", "--post-train-script"), 1),
    **dict.fromkeys(("--post-train-args", "--shutdown-signal", "--shutdown-timeout"), 1),
    **dict.fromkeys(("--signals-to-handle", "--server-log-level"), 1),
    **dict.fromkeys(("--module", "-m", "--no-python", "--run-path", "--standalone"), 0),
}
"""torchrun's options, and the agent's, that are the agent's to read: how many words follow."""


class RunCommand(TyperCommand):
    """Takes torchrun's options out of those before the script, whatever their order."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Our options are parsed as ever; torchrun's become `ctx.obj`."""
        values = {
            name: 0 if getattr(param, "is_flag", False) else 1
            for param in self.params
            for name in (*param.opts, *param.secondary_opts)
            if name.startswith("-")
        }
        own, passed = split_options(args, values)
        ctx.obj = passed
        return super().parse_args(ctx, own)


def split_options(args: list[str], own_values: dict[str, int]) -> tuple[list[str], list[str]]:
    """(our options and everything from the script on, torchrun's options)."""
    own: list[str] = []
    passed: list[str] = []
    at = 0
    while at < len(args) and args[at].startswith("-") and args[at] not in ("-", "--"):
        name, equals, value = args[at].partition("=")
        if name.startswith("--"):
            name = name.replace("_", "-")
        is_passed = name in PASSED_ON
        count = 0 if equals else (PASSED_ON if is_passed else own_values).get(name, 0)
        words = [f"{name}{equals}{value}", *args[at + 1 : at + 1 + count]]
        if name != "--standalone":  # Which is what a script here is anyway.
            (passed if is_passed else own).extend(words)
        at += 1 + count
    return own + args[at:], passed


Program = Annotated[
    str, typer.Argument(metavar="JOB.yaml | SCRIPT.py", help="What to run.", show_default=False)
]
Arguments = Annotated[list[str] | None, typer.Argument(metavar="ARGS...", help="Of the script.")]
Nodes = Annotated[int | None, typer.Option("--nnodes", min=1, help="Pods.", show_default="1")]
Processes = Annotated[
    str | None,
    typer.Option(
        "--nproc-per-node", help="Processes of each: a number, auto, cpu, gpu.", show_default="1"
    ),
]
Spares = Annotated[
    int | None, typer.Option("--spares", min=0, help="Pods that wait.", show_default="0")
]
Restarts = Annotated[
    int | None,
    typer.Option(
        "--max-restarts",
        min=0,
        metavar="N",
        help="Fail the job after N restarts, whether it makes progress or not.",
        show_default="3 in a row without progress; no limit with progress",
    ),
]
Name = Annotated[
    str | None, typer.Option("--name", help="Of the job.", show_default="the script's")
]
Detach = Annotated[
    bool, typer.Option("--detach", "-d", help="Return when the job has been created.")
]


app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


@app.command("run", cls=RunCommand, context_settings={"allow_interspersed_args": False})
def command(
    ctx: typer.Context,
    program: Program,
    arguments: Arguments = None,
    nnodes: Nodes = None,
    nproc: Processes = None,
    spares: Spares = None,
    max_restarts: Restarts = None,
    name: Name = None,
    detach: Detach = False,
    namespace: Namespace = "",
    output: Form = Output.TEXT,
    directory: Embedded = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Run a HyperPodPyTorchJob manifest, or a script as torchrun would.

    Starts the embedded cluster if there is none, shows the output of rank 0, says after each
    fault what broke and what it cost, and ends with the job's exit code. A script runs in this
    folder, with this shell's environment and Python. Ctrl-C asks, a second one stops the job.
    torchrun's other options (--log-dir, -m, --no-python, ...) are taken too.
    """
    place = find(directory, context, kubeconfig, Use.RUN)
    given = arguments or []
    if program == "-" or program.endswith(manifests.SUFFIXES):
        sizes = (nnodes, nproc, spares, max_restarts)
        if ctx.obj or given or sizes != (None,) * len(sizes):
            raise SpecError(f"{program}: sizes and arguments are in the manifest; give none here")
        wish: Wish = _read(program, name, namespace)
    else:
        script = [*ctx.obj, program, *given]
        is_module = bool({"-m", "--module"} & set(ctx.obj))
        sizes_of = manifests.Sizes(nnodes or 1, nproc or "1", spares or 0, max_restarts)
        wish = manifests.Script(script, program, is_module, sizes_of)
        _check_local(place)
        manifests.check_script(wish, name)
    start_cluster(place, pods_of(wish))
    where = namespace or (wish.parsed.namespace if isinstance(wish, manifests.Manifest) else "")
    raise typer.Exit(run_wish(place, where, Order(wish, name, detach, output)))


def _read(program: str, name: str | None, namespace: str) -> manifests.Manifest:
    found = manifests.read(program)
    for warning in found.parsed.warnings:
        note(f"warning: {warning}")
    if namespace and found.parsed.namespace not in ("", namespace):
        raise SpecError(f"-n {namespace}: the manifest says {found.parsed.namespace}")
    return found if name is None else manifests.renamed(found, name)


def _check_local(place: Place) -> None:
    if place.paths is None:
        raise SpecError(
            "a script runs on this machine, and this cluster is elsewhere: write a manifest "
            "with an image that holds the script, or leave --context and --kubeconfig out"
        )
