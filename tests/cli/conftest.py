"""A cluster for the commands' tests, and ways to call them as a person would."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.cli_calls import Cli


@pytest.fixture
def make_cli(tmp_path: Path) -> Iterator[Callable[..., Cli]]:
    """Clusters of a test's own; `nodes` 0: none is started."""
    numbers = itertools.count()
    with ExitStack() as stack:

        def make(nodes: int = 0) -> Cli:
            cli = Cli(tmp_path / f"cluster-{next(numbers)}", tmp_path)
            stack.callback(cli.take_away)
            if nodes:
                cli.call("up", "--detach", "--nodes", str(nodes))
            return cli

        yield make


@pytest.fixture(scope="module")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cli]:
    """One cluster of two nodes for the tests of a module."""
    folder = tmp_path_factory.mktemp("cli")
    found = Cli(folder / "cluster", folder)
    found.call("up", "--detach", "--nodes", "2")
    yield found
    found.take_away()
