"""`unbroken cluster-api`: the cluster API as a program of its own, with its own rights."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unbroken.cli.programs import ProgramTarget, start_logging
from unbroken.errors import SpecError
from unbroken.log_lines import Log
from unbroken.spec.nodes.values import NodeProvider

if TYPE_CHECKING:
    from unbroken.cluster_api.driver import ClusterApiOptions, Tls
    from unbroken.kube.client import KubeClient

log = Log(__name__)


def command(
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Port to listen on.")],
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    credentials: Annotated[
        Path | None,
        typer.Option(
            "--credentials",
            "--cluster-api-credentials",
            help="File of the keys that may call the API, in the form of ~/.aws/credentials. "
            "Required.",
            show_default=False,
        ),
    ] = None,
    tls_cert: Annotated[
        Path | None,
        typer.Option(
            "--tls-cert",
            help="Serve HTTPS with this certificate (PEM, with its chain). A renewed file is "
            "loaded without a restart.",
            show_default="plain HTTP",
        ),
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option("--tls-key", help="Private key of --tls-cert (PEM).")
    ] = None,
    node_provider: Annotated[
        NodeProvider,
        typer.Option(
            "--node-provider",
            help="Node provider of the operator. Only `machines` makes machines for clusters; with "
            "another one, CreateCluster and scaling up are refused.",
        ),
    ] = NodeProvider.NONE,
    *,
    target: ProgramTarget,
) -> None:
    """Serve the cluster API for the aws CLI and boto3. It is stateless; you can run several
    replicas.

    An operator does the work; this program needs no rights to pods, jobs or secrets.

    Example: `unbroken cluster-api --port 8443 --credentials ~/.aws/credentials`
    """
    # slow to load
    from unbroken.cluster_api.driver import ClusterApiOptions

    start_logging()
    options = ClusterApiOptions(
        credentials,
        host,
        port,
        tls_files(tls_cert, tls_key),
        makes_machines=node_provider is NodeProvider.MACHINES,
    )
    target.run("unbroken-cluster-api", partial(_serve, options))


def tls_files(certificate: Path | None, key: Path | None) -> Tls | None:
    """Certificate and key, or None if neither is given; SpecError if only one is given."""
    from unbroken.cluster_api.driver import Tls

    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise SpecError("HTTPS needs both the certificate and its private key")
    return Tls(certificate, key)


async def _serve(options: ClusterApiOptions, client: KubeClient) -> None:
    from unbroken.cluster_api.driver import serve_cluster_api

    async with serve_cluster_api(client, options) as address:
        log.info("cluster API serves", address=address)
        await asyncio.Event().wait()
