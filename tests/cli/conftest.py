"""A cluster for the commands' tests, and ways to call them as a person would."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cli_calls import Cli


@pytest.fixture
def make_cli(tmp_path: Path) -> Iterator[Callable[..., Cli]]:
    """Clusters of a test's own; `nodes` 0: none is started."""
    made: list[Cli] = []

    def make(nodes: int = 0) -> Cli:
        cli = Cli(tmp_path / f"cluster-{len(made)}", tmp_path)
        made.append(cli)
        if nodes:
            cli.call("up", "--detach", "--nodes", str(nodes))
        return cli

    yield make
    for cli in made:
        cli.call("down", "--purge", code=None)


@pytest.fixture(scope="module")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cli]:
    """One cluster of two nodes for the tests of a module."""
    folder = tmp_path_factory.mktemp("cli")
    found = Cli(folder / "cluster", folder)
    found.call("up", "--detach", "--nodes", "2")
    yield found
    found.call("down", "--purge", code=None)
