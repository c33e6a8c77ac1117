"""Runs the cluster API: sockets, the clock, random ids."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from aiohttp import web

from unbroken.errors import SpecError, WorldError
from unbroken.kube.client import KubeClient
from unbroken.kube.clock import wall

from .calls import Around
from .credentials import read_credentials
from .server import Service, application
from .store import Store

CLOSING_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class ClusterApiOptions:
    """Where the cluster API listens, and whom it lets in."""

    host: str = "127.0.0.1"
    port: int = 0
    """0: any that is free."""
    credentials: Path | None = None
    """File of keys; None: who reaches the loopback address may do everything."""
    region: str = "us-west-2"
    account: str = "000000000000"
    """Of the ARNs of clusters, where a request does not say."""


@asynccontextmanager
async def serve_cluster_api(client: KubeClient, options: ClusterApiOptions) -> AsyncIterator[str]:
    """Serve the cluster API during the block; its address, as `--endpoint-url` takes it.

    SpecError where it would let anybody in, WorldError where it cannot listen.
    """
    credentials = read_credentials(options.credentials) if options.credentials else None
    if credentials is None and not _is_loopback(options.host):
        raise SpecError(
            f"the cluster API at {options.host} needs credentials: --cluster-api-credentials FILE"
        )
    around = Around(
        Store(client),
        wall,
        lambda digits: secrets.token_hex((digits + 1) // 2)[:digits],
        options.region,
        options.account,
    )
    runner = web.AppRunner(
        application(Service(around, credentials)), access_log=None, shutdown_timeout=CLOSING_SECONDS
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, options.host, options.port)
        try:
            await site.start()
        except OSError as error:
            text = f"the cluster API cannot listen on {options.host}:{options.port}: {error}"
            raise WorldError(text) from error
        host, port = runner.addresses[0][:2]
        yield f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    finally:
        await runner.cleanup()


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
