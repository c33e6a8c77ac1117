"""The `unbroken` command: loads the commands and prints errors as plain messages."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

from unbroken import __version__
from unbroken.errors import UnbrokenError

from .app import App
from .terminal import guard, guarded

COMMANDS = {
    "run": "run.commands:app",
    "jobs": "job.jobs:command",
    "describe": "job.describe:command",
    "logs": "job.logs:command",
    "explain": "job.explain:command",
    "stacks": "job.stacks:command",
    "blame": "job.blame:command",
    "detectors": "job.detectors:command",
    "restart": "job.change:restart",
    "suspend": "job.change:suspend",
    "resume": "job.change:resume",
    "delete": "job.change:delete",
    "up": "local.up:command",
    "down": "local.down:command",
    "status": "local.status:command",
    "operator": "operator.commands:command",
    "cluster-api": "cluster.api:command",
    "nodes": "nodes.commands:app",
    "check": "nodes.check:command",
    "doctor": "nodes.doctor:command",
    "cluster": "cluster.commands:app",
    "hyperpod": "hyperpod.commands:app",
    "chaos": "local.chaos:app",
    "rules": "rules.commands:app",
    "faults": "nodes.faults:app",
    "node-daemon": "nodes.daemon:command",
}
"""Commands in the order of the help: module below this package, and function or app in it."""


class _Commands(Mapping[str, Any]):
    """The commands by name.  A command is imported on use: all take five times as long as one."""

    def __getitem__(self, name: str) -> Any:
        module, _, attribute = COMMANDS[name].partition(":")
        found = getattr(import_module(f".{module}", __package__), attribute)
        if not isinstance(found, typer.Typer):
            one = App(add_completion=False, rich_markup_mode="markdown")
            one.command(name)(found)
            found = one
        command = typer.main.get_command(found)
        guard(command)
        command.name = name  # an app of several commands has no name of its own
        return command

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


class _Group(TyperGroup):
    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = _Commands()  # type: ignore[assignment]

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)


app = typer.Typer(
    name="unbroken",
    cls=_Group,
    help="Keeps PyTorch training jobs running through failures.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        print(f"unbroken {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(
        False, "--version", callback=_show_version, is_eager=True, help="Show the version."
    ),
) -> None:
    """Keeps PyTorch training jobs running through failures."""


def run() -> None:
    """Entry point of the command."""
    call(app)


def call(program: typer.Typer) -> None:
    """Run a program.  An UnbrokenError ends it with a message and status 1, Ctrl-C with 130."""
    try:
        program()
    except UnbrokenError as error:
        with guarded():
            print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    run()
