"""`unbroken run`: run a manifest or a script, and follow it to its end.

The arguments are split into its own, torchrun's and those of the script. The parser is argparse
with all options, as in torchrun: abbreviations, joined short options and the end of the options
mean the same.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from unbroken.agent.options import OPTIONS, node_count, split_after_script
from unbroken.cli.app import App, PlainCommand
from unbroken.cli.options import CommonOptions
from unbroken.cli.place import ClusterPlace, Use
from unbroken.cli.show import note
from unbroken.errors import SpecError

from . import manifests
from .launch import JobSource, RunRequest, pods_of, run_job, start_cluster
from .manifests import is_manifest

FIELDS = {
    "--nnodes": "spec.replicaSpecs[].replicas",
    "--nproc-per-node": "spec.nprocPerNode",
    "--spares": "spec.replicaSpecs[].spares",
    "--max-restarts": "spec.runPolicy.jobMaxRetryCount",
}
"""Fields of a manifest that correspond to options for a script."""
COMMAND = "spec.replicaSpecs[].template.spec.containers[].command"
STANDALONE = "--standalone"

Own = Sequence[tuple[tuple[str, ...], bool]]
"""Options of the command: their spellings, and True for a flag."""


@dataclass(frozen=True, slots=True)
class Words:
    """The arguments of a command line, sorted."""

    own: list[str]
    """Options of `unbroken run`, and unknown options before the script, which it refuses."""
    passed: list[str]
    """Options of torchrun and the agent, with full names."""
    rest: list[str]
    """The manifest or script, and its arguments."""


class _RunParser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise SpecError(message)


class _Take(argparse.Action):
    """An action that appends an option with its full name and value to a list."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Append `--name` or `--name=value`."""
        name = next(string for string in self.option_strings if string.startswith("--"))
        taken = getattr(namespace, self.dest)
        taken.append(name if self.nargs == 0 else f"{name}={values}")


def split(arguments: Sequence[str], own: Own, environ: Mapping[str, str] = os.environ) -> Words:
    """Sort the arguments of a command line; SpecError for an ambiguous or incomplete option."""
    first = _parser(own)
    first.add_argument("program")
    head, rest = split_after_script(
        arguments, lambda words: first.parse_known_args(words, _empty())
    )
    parser = _parser(own)
    parser.add_argument("program", nargs="?", default=None)
    found, unknown = parser.parse_known_args(head, _empty())
    if unknown:
        return Words([*found.own, *unknown], found.passed, [])
    if found.program is None:
        return Words(found.own, found.passed, [])
    if is_manifest(found.program):
        _, unknown = _parser(own).parse_known_args(rest, found)
        return Words(found.own, found.passed, ["--", found.program, *unknown])
    _add_variables(found, environ)
    passed = [word for word in found.passed if word != STANDALONE]
    return Words(found.own, passed, ["--", found.program, *rest])


def _empty() -> argparse.Namespace:
    return argparse.Namespace(own=[], passed=[])


def _parser(own: Own) -> _RunParser:
    parser = _RunParser(add_help=False, argument_default=argparse.SUPPRESS)
    taken: set[str] = set()
    for spellings, is_flag in own:
        every = tuple(dict.fromkeys(form for spelling in spellings for form in _both(spelling)))
        parser.add_argument(*every, dest="own", action=_Take, nargs=0 if is_flag else None)
        taken.update(every)
    for option in OPTIONS:
        if taken.isdisjoint(option.spellings):
            nargs = 0 if option.is_flag else None
            parser.add_argument(*option.spellings, dest="passed", action=_Take, nargs=nargs)
    return parser


def _both(spelling: str) -> tuple[str, ...]:
    """The spellings of an option with dashes and with underscores, which torchrun accepts."""
    if not spelling.startswith("--"):
        return (spelling,)
    return (spelling, f"--{spelling[2:].replace('-', '_')}")


def _add_variables(found: argparse.Namespace, environ: Mapping[str, str]) -> None:
    """Add options from the environment that the command line does not set."""
    given = {word.partition("=")[0] for word in (*found.own, *found.passed)}
    for option in OPTIONS:
        name, value = f"--{option.name}", environ.get(option.variable)
        if not option.has_variable or value is None or name in given:
            continue
        words = found.own if name in FIELDS else found.passed
        if not option.is_flag:
            words.append(f"{name}={value}")
        elif value not in ("0", ""):
            words.append(name)


def in_manifest(
    program: str, sizes: Sequence[str], passed: Sequence[str], arguments: Sequence[str]
) -> None:
    """Raise SpecError for options and arguments that a manifest must contain itself."""
    problems = [f"{name}: write it to {FIELDS[name]}" for name in sizes]
    names = [word.partition("=")[0] for word in passed]
    problems += [f"{name}: write it to the launch line in {COMMAND}" for name in names]
    if arguments:
        words = " ".join(arguments)
        problems.append(
            f"{words}: not an option of `unbroken run`; write arguments of the script to {COMMAND}"
        )
    if problems:
        raise SpecError(
            f"{program} is a manifest, which must contain sizes and arguments: "
            + "; ".join(problems)
        )


USAGE = "{JOB.yaml [OPTIONS] | [OPTIONS] SCRIPT.py [ARGS...]}"


class RunCommand(PlainCommand):
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
        source = manifests.RunScript(script, program, is_module, sizes_of)
        _check_local(place)
        for text in manifests.check_script(source, name):
            note(f"warning: {text}")
    start_cluster(place, pods_of(source))
    own = source.parsed.namespace if isinstance(source, manifests.JobManifest) else ""
    request = RunRequest(source, name, detach, options.output)
    raise typer.Exit(run_job(place, options.namespace or own, request))


def _read(program: str, name: str | None, namespace: str) -> manifests.JobManifest:
    manifest = manifests.read(program)
    for warning in manifest.parsed.warnings:
        note(f"warning: {warning}")
    if namespace and manifest.parsed.namespace not in ("", namespace):
        raise SpecError(f"-n {namespace}: the manifest has namespace {manifest.parsed.namespace}")
    return manifest if name is None else manifests.renamed(manifest, name)


def _check_local(place: ClusterPlace) -> None:
    if place.paths is None:
        raise SpecError(
            "a script runs on a local cluster only: for this cluster, write a manifest whose "
            "image has the script; or leave out --context and --kubeconfig"
        )
