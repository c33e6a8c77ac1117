"""Metrics of nodes as they are scraped, from objects of a real API server."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import aiohttp
import pytest
from prometheus_client import CollectorRegistry, Gauge

from tests.watching import PATIENCE_SECONDS, running
from unbroken.errors import WorldError
from unbroken.kube.informer import Informers
from unbroken.observe.server import HEALTH_PATH, serving_metrics
from unbroken.operator import definitions
from unbroken.operator.telemetry import MetricsPlace, OperatorMetrics, watch_nodes
from unbroken.spec.keys import HEALTH
from unbroken.spec.nodes.kinds import NODE_RECORD, NodeRecordSpec, RepairRecord, RepairState
from unbroken.spec.nodes.values import Action

REPAIR = RepairRecord(
    *(Action.REPLACE, "Xid79", "daemon", RepairState.DONE, 1010.0),
    acted_at=1014.0,
    returned_at=1040.0,
    ended_at=1050.0,
)


async def scraped(url: str, lines: set[str]) -> None:
    """Read the metrics until all of these lines are there."""
    found: set[str] = set()
    async with aiohttp.ClientSession() as session, asyncio.timeout(PATIENCE_SECONDS):
        while not lines <= found:
            async with session.get(url) as answer:
                assert answer.content_type == "text/plain"
                found = set((await answer.text()).splitlines())


async def test_a_node_and_its_repair_are_scraped(place: Any) -> None:
    async with place() as here:
        await definitions.install(here.client)
        informers, registry = Informers(here.client), CollectorRegistry()
        watch_nodes(informers, registry, since=1000.0)
        name = f"{here.namespace}-node"
        node = {"metadata": {"name": name, "labels": {HEALTH: "Schedulable"}}}
        record = NODE_RECORD.new(name, NodeRecordSpec(history=(REPAIR,)))
        async with (
            running(informers.run()),
            serving_metrics(registry, "127.0.0.1", 0) as url,
        ):
            await here.client.raw("POST", "api/v1/nodes", body=node)
            await here.client.raw("POST", NODE_RECORD.path, body=record)
            group = '{cluster_name="",instance_group=""}'
            lines = {
                f"hyperpod_node_health_status_schedulable{group} 1.0",
                'unbroken_node_repairs_total{action="replace",outcome="Done"} 1.0',
            }
            await scraped(url, lines)
            await here.client.raw("DELETE", f"api/v1/nodes/{name}")
            await here.client.raw("DELETE", f"{NODE_RECORD.path}/{name}")


async def test_an_operator_that_waits_is_healthy() -> None:
    async with (
        serving_metrics(OperatorMetrics(set()).registry, "127.0.0.1", 0) as url,
        aiohttp.ClientSession() as session,
        session.get(url.replace("/metrics", HEALTH_PATH)) as answer,
    ):
        assert (answer.status, await answer.text()) == (200, "ok\n")


def test_an_operator_that_waits_says_so_and_tells_of_no_job() -> None:
    metrics = OperatorMetrics(set())
    assert metrics.registry.get_sample_value("unbroken_operator_leading") == 0
    with metrics.leading() as registry:
        watched = Gauge("of_a_leader", "Known to the leader only.", registry=registry)
        watched.set(7)
        assert metrics.registry.get_sample_value("unbroken_operator_leading") == 1
        assert metrics.registry.get_sample_value("of_a_leader") == 7
    assert metrics.registry.get_sample_value("unbroken_operator_leading") == 0
    assert metrics.registry.get_sample_value("of_a_leader") is None


async def test_a_port_that_is_taken_matters_only_where_it_was_chosen(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def check(port: int) -> None:
        metrics = OperatorMetrics(set())
        async with metrics.serving(MetricsPlace(port=port, is_needed=False)):
            assert "choose another port" in caplog.text
        with pytest.raises(WorldError, match="choose another port"):
            async with metrics.serving(MetricsPlace(port=port)):
                pass

    with socket.create_server(("127.0.0.1", 0)) as taken:
        await check(taken.getsockname()[1])
