"""A client for every contract case, and a namespace of its own."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest

from tests.apiclient import Api
from tests.apiservers import Cluster

NUMBERS = itertools.count(1)
"""Clusters belong to one test process, so that its own count makes names unique."""


@pytest.fixture(scope="session")
def clients() -> Iterator[tuple[dict[str, Api], ExitStack]]:
    """Clients by URL, whose connections are kept over tests and closed at the end."""
    with ExitStack() as stack:
        yield {}, stack


@pytest.fixture
def api(cluster: Cluster, clients: tuple[dict[str, Api], ExitStack]) -> Api:
    """Client of the cluster, without a namespace."""
    by_url, stack = clients
    if cluster.url not in by_url:
        by_url[cluster.url] = stack.enter_context(closing(Api(cluster)))
    return by_url[cluster.url]


@pytest.fixture
def here(api: Api) -> Api:
    """Client within a new namespace, which is left behind: the cluster is thrown away."""
    name = f"case-{next(NUMBERS)}"
    if api.cluster.has_built_in_kinds:
        api.post("namespaces", {"metadata": {"name": name}}).done()
    return api.within(name)
