"""The `unbroken` command: loads the commands and prints errors as plain messages."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

import typer

from unbroken import __version__
from unbroken.errors import UnbrokenError

from .app import CONTEXT, App, PlainGroup
from .terminal import guard, guarded

GROUPS = {
    "Jobs": {
        "run": "run.commands:app",
        "jobs": "job.jobs:command",
        "top": "top.commands:command",
        "describe": "job.describe:command",
        "logs": "job.logs:command",
        "explain": "job.explain:command",
        "incidents": "job.incidents:command",
        "stacks": "job.stacks:command",
        "blame": "job.blame:command",
        "detectors": "job.detectors:command",
        "restart": "job.change:restart",
        "suspend": "job.change:suspend",
        "resume": "job.change:resume",
        "delete": "job.change:delete",
    },
    "This machine": {
        "up": "local.up:command",
        "down": "local.down:command",
        "status": "local.status:command",
        "ui": "page.commands:command",
        "doctor": "nodes.doctor:command",
    },
    "Drills": {"chaos": "local.chaos:app"},
    "Nodes": {
        "nodes": "nodes.commands:app",
        "check": "nodes.check:command",
        "faults": "nodes.faults:app",
    },
    "Log rules": {"rules": "rules.commands:app"},
    "HyperPod": {"cluster": "cluster.commands:app", "hyperpod": "hyperpod.commands:app"},
    "Services of a Kubernetes cluster": {
        "operator": "operator.commands:command",
        "node-daemon": "nodes.daemon:command",
        "checkpoint-memory": "nodes.checkpoint_memory:command",
        "cluster-api": "cluster.api:command",
        "page-server": "page.service:command",
    },
}
"""Commands by group, in the order of the help: module below this package, and object in it."""
COMMANDS = {name: group for group, names in GROUPS.items() for name in names}
"""The group of each command."""


class _Commands(Mapping[str, Any]):
    """The commands by name.  A command is imported on use: all take five times as long as one."""

    def __getitem__(self, name: str) -> Any:
        group = COMMANDS[name]
        module, _, attribute = GROUPS[group][name].partition(":")
        result = getattr(import_module(f".{module}", __package__), attribute)
        if not isinstance(result, typer.Typer):
            one = App()
            one.command(name)(result)
            result = one
        command = typer.main.get_command(result)
        guard(command)
        command.name = name  # an app of several commands has no name of its own
        command.rich_help_panel = group  # type: ignore[attr-defined]
        return command

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


class _Group(PlainGroup):
    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = _Commands()  # type: ignore[assignment]

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)


app = typer.Typer(
    name="unbroken",
    cls=_Group,
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    context_settings=CONTEXT,
)
FIRST_STEPS = """\
unbroken keeps PyTorch training jobs running through failures.

  unbroken run train.py               run a script; the options of torchrun work here
  unbroken jobs                       list jobs
  unbroken explain JOB                show what failed, why, and what was done about it
  unbroken top                        watch jobs, ranks and nodes live in the terminal
  unbroken ui                         print a link to the live page of all this
  unbroken chaos kill-worker JOB      kill a worker of a job to see the recovery
  unbroken down                       stop the local cluster and its jobs
  unbroken --help                     show all commands; unbroken COMMAND --help has examples
"""
"""Text of `unbroken` without a command, before the line about the local cluster."""


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        print(f"unbroken {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    ctx: typer.Context,
    version: bool = typer.Option(
        False, "--version", callback=_show_version, is_eager=True, help="Show the version."
    ),
) -> None:
    """Keep PyTorch training jobs running through failures.

    To complete commands, options and names of jobs and nodes with the Tab key, run
    `unbroken --install-completion` once.
    """
    if ctx.invoked_subcommand is None:
        print(FIRST_STEPS)
        print(_state_of_the_local_cluster())


def _state_of_the_local_cluster() -> str:
    """Print whether the local cluster of `unbroken run` is running, and the next command."""
    from unbroken.local import state  # slow to load

    from .place import Use, choose

    paths = choose(None, None, None, Use.RUN)[0].paths
    if paths is None or state.running(paths) is None:
        return "No local cluster is running. `unbroken run` and `unbroken up` start one."
    return f"The local cluster in {paths.directory} is running. `unbroken status` shows it."


def run() -> None:
    """Entry point of the command."""
    call(app)


def call(program: typer.Typer) -> None:
    """Run a program.

    An UnbrokenError, or a disk that is too full for the output, ends it with a message and status
    1, and Ctrl-C with 130. A reader that has gone ends it with status 1.
    """
    _open_closed_streams()
    try:
        try:
            program()
        finally:
            sys.stdout.flush()
    except UnbrokenError as error:
        _say_error(error)
        sys.exit(1)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EPIPE) or error.filename is not None:
            raise
        if error.errno == errno.ENOSPC:
            _say_error(f"cannot write the output: {error.strerror}")
        # Python writes what is left once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def _open_closed_streams() -> None:
    """Open /dev/null in place of each standard stream that the caller has closed (`>&-`).

    Else Python has None there, and the next file that is opened, such as a database, takes its
    descriptor and with it what is printed.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            # The lowest free descriptor, which is this one.
            os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, os.fdopen(descriptor, "r" if descriptor == 0 else "w"))


def _say_error(error: object) -> None:
    with guarded():
        print(f"error: {error}", file=sys.stderr)


if __name__ == "__main__":
    run()
