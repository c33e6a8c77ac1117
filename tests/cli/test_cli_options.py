"""Options that commands share: a dataclass as a parameter, and where its options appear."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from unbroken.cli.app import App, expanded


@dataclass(frozen=True)
class Inner:
    """A group inside a group."""

    folder: Annotated[Path | None, typer.Option("--dir", help="A folder.")] = None
    count: Annotated[int, typer.Option(min=0)] = 3


@dataclass(frozen=True, kw_only=True)
class Outer:
    """A group with an argument, an option and a group."""

    name: Annotated[str, typer.Argument()]
    loud: Annotated[bool, typer.Option("--loud")] = False
    inner: Inner


@pytest.fixture
def calls() -> list[object]:
    """What the command was called with."""
    return []


@pytest.fixture
def app(calls: list[object]) -> App:
    """An app whose callback and command take groups."""
    app = App(add_completion=False)

    @app.callback()
    def first(ctx: typer.Context, inner: Inner) -> None:
        """Run first."""
        calls.append((ctx.invoked_subcommand, inner))

    @app.command()
    def act(before: bool = False, *, outer: Outer, after: bool = False) -> None:
        """Do it."""
        calls.append((before, outer, after))

    return app


def test_a_group_is_built_from_the_options_given_and_its_defaults(
    app: App, calls: list[object]
) -> None:
    words = ["--count", "1", "act", "--dir", "here", "x", "--after", "--loud"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    outer = Outer(name="x", loud=True, inner=Inner(Path("here"), 3))
    assert calls == [("act", Inner(None, 1)), (False, outer, True)]


def test_options_of_a_group_are_listed_at_its_place_with_their_limits(app: App) -> None:
    shown = CliRunner().invoke(app, ["act", "--help"]).stdout
    options = ["--before", "--loud", "--dir", "--count", "--after"]
    assert sorted(options, key=shown.index) == options
    wrong = CliRunner().invoke(app, ["act", "x", "--count", "-1"])
    assert wrong.exit_code == 2
    assert "--count" in wrong.output
    missing = CliRunner().invoke(app, ["act"])
    assert (missing.exit_code, "'NAME'" in missing.output.upper()) == (2, True)


def test_a_command_without_groups_is_as_it_was() -> None:
    def act(count: int, *, loud: bool = False) -> int:
        return count + loud

    assert expanded(act)(count=2, loud=True) == 3
