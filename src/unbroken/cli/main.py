"""The `unbroken` command: collects the commands and turns our errors into plain messages."""

from __future__ import annotations

import sys

import typer

from unbroken import __version__
from unbroken.errors import UnbrokenError

from . import (
    change,
    chaos,
    describe,
    detectors,
    down,
    explain,
    jobs,
    logs,
    operator,
    rules,
    stacks,
    status,
    up,
)
from . import run as running

app = typer.Typer(
    name="unbroken",
    help="Keeps PyTorch training jobs running through failures.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("run", cls=running.RunCommand, context_settings={"allow_interspersed_args": False})(
    running.command
)
for name, command in (
    ("jobs", jobs.command),
    ("describe", describe.command),
    ("logs", logs.command),
    ("explain", explain.command),
    ("stacks", stacks.command),
    ("detectors", detectors.command),
    ("restart", change.restart),
    ("suspend", change.suspend),
    ("resume", change.resume),
    ("delete", change.delete),
    ("up", up.command),
    ("down", down.command),
    ("status", status.command),
    ("operator", operator.command),
):
    app.command(name)(command)
app.add_typer(chaos.app, name="chaos")
app.add_typer(rules.app, name="rules")


def _show_version(asked: bool) -> None:
    if asked:
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
    try:
        app()
    except UnbrokenError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    run()
