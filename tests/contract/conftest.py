"""A client for every contract case, and a namespace of its own."""

from __future__ import annotations

import itertools

import pytest

from apiclient import Api
from clusters import Cluster

NUMBERS = itertools.count(1)
"""Clusters belong to one test process, so that its own count makes names unique."""
CLIENTS: dict[str, Api] = {}
"""By URL: connections are kept over tests."""


@pytest.fixture
def api(cluster: Cluster) -> Api:
    """Client of the cluster, without a namespace."""
    if cluster.url not in CLIENTS:
        CLIENTS[cluster.url] = Api(cluster)
    return CLIENTS[cluster.url]


@pytest.fixture
def here(api: Api) -> Api:
    """Client within a new namespace, which is left behind: the cluster is thrown away."""
    name = f"case-{next(NUMBERS)}"
    api.post("namespaces", {"metadata": {"name": name}}).made  # noqa: B018
    return api.within(name)
