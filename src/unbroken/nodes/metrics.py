"""Serves the metrics of a node: those of its system, of its GPUs, and of the daemon itself."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector

from unbroken.log_lines import Log
from unbroken.observe.server import serving_metrics

from .gpu_metrics import GpuMetrics
from .host_metrics import HostMetrics

log = Log(__name__)


@dataclass(frozen=True, slots=True)
class MetricsPlace:
    """Address at which a daemon serves metrics, and their families."""

    host: str
    port: int
    """0: any that is free."""
    has_host: bool = True
    """Serve the names of node-exporter."""
    has_gpus: bool = True
    """Serve the names of the DCGM exporter."""


@asynccontextmanager
async def serving_node(
    place: MetricsPlace | None, root: Path, node: str
) -> AsyncIterator[GpuMetrics | None]:
    """Serve for the time of the block; yield the metrics of GPUs, which the caller feeds.

    Raises WorldError if the port is taken.
    """
    if place is None:
        yield None
        return
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    gpus = GpuMetrics(registry) if place.has_gpus else None
    system = HostMetrics(registry, root, node) if place.has_host else None
    refresh = None if system is None else system.refresh
    async with serving_metrics(registry, place.host, place.port, refresh) as address:
        log.info("metrics are served", node=node, address=address)
        yield gpus
