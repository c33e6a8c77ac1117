"""A cluster whose pods run HyperPod's own agent."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.clusters import Cluster, find_kubectl
from tests.interop.stock_agent import NotInstalledError, StockAgent, installed


@pytest.fixture(scope="session")
def stock() -> StockAgent:
    """The agent, or why there is none."""
    pytest.importorskip("torch")
    try:
        return installed()
    except NotInstalledError as error:
        pytest.skip(f"{error}")


@pytest.fixture(scope="session")
def kubectl_path() -> str:
    """kubectl from the PATH or the virtual environment."""
    return find_kubectl()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, kubectl_path: str) -> Iterator[Cluster]:
    """Two nodes and the operator."""
    found = Cluster(tmp_path_factory.mktemp("cluster") / "state", kubectl_path)
    found.unbroken("up", "--detach", "--nodes", "2", "--cpu-per-node", "8")
    yield found
    found.take_away()
