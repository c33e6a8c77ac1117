"""Clusters with nodes for the end-to-end tests."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest

from tests.apiservers import CannotStartError
from tests.e2e.clusters import Cluster, find_kubectl
from tests.e2e.control import api_of, is_ready, is_tainted, power
from tests.e2e.planes import real_cluster


@pytest.fixture(scope="session")
def kubectl_path() -> str:
    """kubectl from the PATH or the virtual environment."""
    return find_kubectl()


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
    with two_nodes(tmp_path_factory.mktemp("cluster"), kubectl_path) as found:
        yield found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, kubectl_path: str) -> Iterator[Cluster]:
    """Start a cluster without an operator."""
    with two_nodes(tmp_path_factory.mktemp("alone"), kubectl_path, "--no-operator") as found:
        yield found


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory, kubectl_path: str) -> Iterator[Cluster]:
    """Start three nodes whose loss is noticed soon."""
    found = Cluster(tmp_path_factory.mktemp("machines") / "state", kubectl_path)
    found.unbroken("up", "--detach", "--nodes", "3", "--node-grace", "2")
    yield found
    found.take_away()


@pytest.fixture
def nodes(machines: Cluster) -> Iterator[Cluster]:
    """Provide the three nodes; switch all of them on at the end."""
    yield machines
    with closing(api_of(machines)) as api:
        for name in ("node-0", "node-1", "node-2"):
            power(machines, name, None)
            api.until("/api/v1/nodes", name, lambda node: is_ready(node) and not is_tainted(node))


@contextmanager
def two_nodes(folder: Path, kubectl_path: str, *options: str) -> Iterator[Cluster]:
    """A local cluster; with UNBROKEN_E2E=real, a real control plane."""
    if os.environ.get("UNBROKEN_E2E") == "real":
        with ExitStack() as stack:
            try:
                real = real_cluster(folder, kubectl_path, is_led=not options)
                yield stack.enter_context(real)
            except CannotStartError as error:
                pytest.skip(str(error))
        return
    found = Cluster(folder / "state", kubectl_path)
    sizes = ("--nodes", "2", "--gpu-per-node", "4", "--cpu-per-node", "8")
    found.unbroken("up", "--detach", *sizes, *options)
    yield found
    found.take_away()
