"""Clusters with nodes for the end-to-end tests."""

from __future__ import annotations

import itertools
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from e2e.clusters import Cluster


@pytest.fixture(scope="session")
def kubectl_path() -> str:
    """kubectl from the PATH or the virtual environment."""
    found = shutil.which("kubectl") or shutil.which("kubectl", path=Path(sys.executable).parent)
    assert found, "kubectl is missing; `make setup` installs it"
    return str(found)


@pytest.fixture
def make_cluster(tmp_path: Path, kubectl_path: str) -> Iterator[Callable[..., Cluster]]:
    """Start clusters that are taken away after the test."""
    numbers = itertools.count()
    with ExitStack() as stack:

        def make(*options: str) -> Cluster:
            cluster = Cluster(tmp_path / f"cluster-{next(numbers)}", kubectl_path)
            stack.callback(cluster.take_away)
            cluster.unbroken("up", "--detach", *options)
            return cluster

        yield make


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, kubectl_path: str) -> Iterator[Cluster]:
    """One cluster of two nodes for the tests of a module."""
    found = Cluster(tmp_path_factory.mktemp("cluster") / "state", kubectl_path)
    found.unbroken("up", "--detach", "--nodes", "2", "--gpu-per-node", "4", "--cpu-per-node", "8")
    yield found
    found.take_away()
