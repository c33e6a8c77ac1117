"""Options that commands share: a dataclass as a parameter, and where its options appear."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from unbroken.cli.app import App, expanded
from unbroken.cli.local.up import ClusterFlags, words_of
from unbroken.local.state import ClusterOptions


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
    """Collect the arguments of each call of the command."""
    return []


@pytest.fixture
def app(calls: list[object]) -> App:
    """Return an app whose callback and command take groups."""
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


def test_a_detached_cluster_gets_every_option(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("[default]\naws_access_key_id = a\naws_secret_access_key = b\n")
    keys.chmod(0o600)
    environment = tmp_path / "environment"
    (environment / "bin").mkdir(parents=True)
    (environment / "bin/python").touch()
    options = ClusterOptions(
        *(3, "2", "4Gi", 8, "ml.p5.48xlarge", {"example.com/x": "1"}, {"a": "b=c"}, 6443),
        *(False, False, False),
        resume_retries=0,
        images={"rayproject/ray": str(environment)},
        grace_seconds=7.0,
        node_recovery="None",
        node_provider="command",
        node_command="reset {node}",
        repair_share=0.5,
        repair_dry_run=True,
        lifecycle_sources={"s3://bucket/prefix": str(tmp_path)},
        cluster_api_port=8443,
        cluster_api_credentials=str(keys),
        metrics_port=9090,
    )
    app, found = App(), []

    @app.command()
    def up(directory: Annotated[str, typer.Option("--dir")] = "", *, flags: ClusterFlags) -> None:
        found.append(flags.over(ClusterOptions()))

    done = CliRunner().invoke(app, list(words_of(options)))
    assert done.exit_code == 0, done.output
    assert found == [options]
