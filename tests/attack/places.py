"""Namespaces with an operator of their own, for attacks."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.apiservers import Cluster
from tests.operator.conftest import Place
from unbroken.kube.client import connect

NUMBERS = itertools.count(1)


@pytest.fixture
def place(cluster: Cluster) -> Callable[[], Any]:
    """Opens a new namespace of the cluster."""

    @asynccontextmanager
    async def opened() -> AsyncIterator[Place]:
        name = f"objects-{next(NUMBERS)}"
        async with connect(cluster.kubeconfig) as client:
            await client.raw("POST", "api/v1/namespaces", body={"metadata": {"name": name}})
            yield Place(client, name)

    return opened
