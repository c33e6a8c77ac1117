"""`unbroken run`: run a manifest or a script, and follow it to its end."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from unbroken.agent.options import node_count
from unbroken.cli.app import App, Command
from unbroken.cli.options import CommonOptions
from unbroken.cli.place import Place, Use
from unbroken.cli.show import note
from unbroken.errors import SpecError

from . import manifests
from .launch import JobSource, RunRequest, pods_of, run_job, start_cluster
from .words import FIELDS, in_manifest, split

USAGE = "{JOB.yaml [OPTIONS] | [OPTIONS] SCRIPT.py [ARGS...]}"


class RunCommand(Command):
    """A command with torchrun's options before a script, and its own around a manifest."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the options of `unbroken run`; torchrun's and the agent's go to `ctx.obj`."""
        own = [option for option in self.get_params(ctx) if option.param_type_name == "option"]
        try:
            words = split(
                args, [(tuple(item.opts), getattr(item, "is_flag", False)) for item in own]
            )
        except SpecError as error:
            raise typer.BadParameter(str(error), ctx=ctx) from None
        ctx.obj = words.passed
        return super().parse_args(ctx, [*words.own, *words.rest])

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The usage line with both forms of the command."""
        return [USAGE]


Program = Annotated[
    str,
    typer.Argument(
        metavar="JOB.yaml | SCRIPT.py", help="Manifest or script to run.", show_default=False
    ),
]
Arguments = Annotated[
    list[str] | None, typer.Argument(metavar="ARGS...", help="Arguments of the script.")
]
Nodes = Annotated[
    str | None,
    typer.Option("--nnodes", metavar="N", help="Number of pods: N or N:N.", show_default="1"),
]
Processes = Annotated[
    str | None,
    typer.Option(
        "--nproc-per-node",
        metavar="N",
        help="Processes of each pod: N, auto, cpu or gpu.",
        show_default="1",
    ),
]
Spares = Annotated[
    int | None, typer.Option("--spares", min=0, help="Number of spare pods.", show_default="0")
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
    str | None, typer.Option("--name", help="Name of the job.", show_default="the script's")
]
Detach = Annotated[
    bool, typer.Option("--detach", "-d", help="Return when the job has been created.")
]


app = App()


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
    *,
    options: CommonOptions,
) -> None:
    """Run a HyperPodPyTorchJob manifest, or a script as torchrun would.

    `unbroken run JOB.yaml` takes its options before or after the manifest.

    `unbroken run SCRIPT.py ARGS...` takes its options before the script; all words after the
    script are its arguments. It takes torchrun's options too (--log-dir, -m, --no-python, ...),
    abbreviated or as `PET_...` in the environment.

    The command starts the local cluster if it does not run, shows the output of rank 0 and a
    line for each incident, and ends with the job's exit code. A script runs
    in this folder, with this shell's environment and Python. Press Ctrl-C once for a prompt,
    twice to stop the job.

    Example: `unbroken run --nnodes 2 --nproc-per-node 4 --spares 1 train.py --epochs 3`
    """
    place = options.target.place(Use.RUN)
    given = arguments or []
    if manifests.is_manifest(program):
        sizes = (nnodes, nproc, spares, max_restarts)
        names = [name for name, value in zip(FIELDS, sizes, strict=True) if value is not None]
        in_manifest(program, names, ctx.obj, given)
        source: JobSource = _read(program, name, options.namespace)
    else:
        script = [*ctx.obj, "--", program, *given]  # each word after it is the script's
        is_module = "--module" in ctx.obj
        nodes = node_count(nnodes or "1")
        sizes_of = manifests.Sizes(nodes, nproc or "1", spares or 0, max_restarts)
        source = manifests.Script(script, program, is_module, sizes_of)
        _check_local(place)
        for text in manifests.check_script(source, name):
            note(f"warning: {text}")
    start_cluster(place, pods_of(source))
    own = source.parsed.namespace if isinstance(source, manifests.Manifest) else ""
    request = RunRequest(source, name, detach, options.output)
    raise typer.Exit(run_job(place, options.namespace or own, request))


def _read(program: str, name: str | None, namespace: str) -> manifests.Manifest:
    manifest = manifests.read(program)
    for warning in manifest.parsed.warnings:
        note(f"warning: {warning}")
    if namespace and manifest.parsed.namespace not in ("", namespace):
        raise SpecError(f"-n {namespace}: the manifest has namespace {manifest.parsed.namespace}")
    return manifest if name is None else manifests.renamed(manifest, name)


def _check_local(place: Place) -> None:
    if place.paths is None:
        raise SpecError(
            "a script runs on a local cluster only: for this cluster, write a manifest whose "
            "image has the script; or leave out --context and --kubeconfig"
        )
