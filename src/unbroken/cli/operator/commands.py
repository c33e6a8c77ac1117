"""`unbroken operator`: the operator as a program of its own, for any cluster."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unbroken.cli.cluster.api import tls_files
from unbroken.cli.nodes.check_options import CheckImage, CheckLink, CheckLogs, link_bandwidth
from unbroken.cli.nodes.options import (
    NodeCommand,
    NodeRecovery,
    Provider,
    RepairDryRun,
    RepairShare,
)
from unbroken.cli.options import Context, Embedded
from unbroken.cli.place import cluster_of
from unbroken.spec.nodes.keys import NodeProvider, Recovery

from .key import KeyFile, KeyPlace, KeySecretName, key_place
from .parts import Without
from .webhook_options import (
    WebhookClientAuthority,
    WebhookPort,
    WebhookService,
    webhook_options,
)

if TYPE_CHECKING:
    from unbroken.cluster_api.driver import ClusterApiOptions, Tls
    from unbroken.kube.client import KubeClient
    from unbroken.operator.driver import OperatorOptions
    from unbroken.operator.telemetry.metrics import MetricsPlace
    from unbroken.operator.webhook.registration import WebhookOptions

log = logging.getLogger(__name__)

COLLECT = (150_000, 20, 100)
"""New objects before each generation is searched for garbage.  With Python's own 700 a quarter of
the time of a recovery of 4,000 agents went there (benchmarks/operator_path.py)."""
DEFAULT_SHARE = 0.2
"""Share of the nodes that may be under repair at once (docs/design/nodes.md)."""

Port = Annotated[
    int | None,
    typer.Option("--cluster-api-port", min=1, max=65535, help="Serve the cluster API, too."),
]
Credentials = Annotated[
    Path | None,
    typer.Option(
        "--cluster-api-credentials",
        help="File of the keys that may call the cluster API, in the form of ~/.aws/credentials. "
        "Required by --cluster-api-port.",
        show_default=False,
    ),
]
TlsCert = Annotated[
    Path | None,
    typer.Option(
        "--cluster-api-tls-cert",
        help="Serve the cluster API by HTTPS with this certificate (PEM, with its chain).",
        show_default="plain HTTP",
    ),
]
TlsKey = Annotated[
    Path | None,
    typer.Option("--cluster-api-tls-key", help="Private key of --cluster-api-tls-cert (PEM)."),
]

Namespace = Annotated[
    str | None,
    typer.Option(
        "-n", "--namespace", help="Run the jobs of this namespace only.", show_default="all"
    ),
]
Kubeconfig = Annotated[
    Path | None,
    typer.Option("--kubeconfig", help="Of the cluster.", show_default="KUBECONFIG's"),
]
MetricsPort = Annotated[
    int | None,
    typer.Option(
        "--metrics-port",
        min=0,
        max=65535,
        help="Serve metrics for Prometheus; 0: none.",
        show_default="8081, if it is free",
    ),
]
MetricsHost = Annotated[
    str, typer.Option("--metrics-host", help="Address that metrics are served at.")
]


def command(
    kubeconfig: Kubeconfig = None,
    context: Context = None,
    directory: Embedded = None,
    namespace: Namespace = None,
    lease_namespace: Annotated[
        str, typer.Option("--lease-namespace", help="Where operators agree on who acts.")
    ] = "kube-system",
    cluster_api_port: Port = None,
    cluster_api_host: Annotated[
        str, typer.Option("--cluster-api-host", help="Address that the cluster API listens on.")
    ] = "127.0.0.1",
    cluster_api_credentials: Credentials = None,
    cluster_api_tls_cert: TlsCert = None,
    cluster_api_tls_key: TlsKey = None,
    metrics_port: MetricsPort = None,
    metrics_host: MetricsHost = "127.0.0.1",
    node_recovery: NodeRecovery = None,
    node_provider: Provider = None,
    node_command: NodeCommand = None,
    repair_share: RepairShare = None,
    repair_dry_run: RepairDryRun = None,
    check_image: CheckImage = "",
    check_logs: CheckLogs = None,
    check_link: CheckLink = None,
    without: Without = None,
    webhook_port: WebhookPort = None,
    webhook_service: WebhookService = None,
    webhook_client_ca: WebhookClientAuthority = None,
    key_file: KeyFile = None,
    key_secret: KeySecretName = None,
) -> None:
    """Run the operator in the foreground. Of several on one cluster, one acts.

    Each of several serves the cluster API, which remembers nothing.

    An embedded cluster has its own, unless it was started with --no-operator.
    """
    # Here, because it loads the whole operator: other commands answer faster without.
    from unbroken.operator.driver import OperatorOptions
    from unbroken.operator.election import LeaderTerms
    from unbroken.operator.nodes.checks_pods import CheckerOptions
    from unbroken.operator.nodes.repair import options_of

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    keys = key_place(key_file, key_secret, kubeconfig, directory)
    file, context = cluster_of(kubeconfig, context, directory)
    repair = options_of(
        node_recovery or Recovery.AUTOMATIC, node_provider or NodeProvider.NONE, node_command or "",
        DEFAULT_SHARE if repair_share is None else repair_share, bool(repair_dry_run),
    )  # fmt: skip
    least = link_bandwidth(check_link)
    options = partial(
        OperatorOptions,
        namespace=namespace,
        terms=LeaderTerms(namespace=lease_namespace),
        checks=CheckerOptions(check_image, log_directory=check_logs, link_bandwidth=least),
        repair=repair,
        metrics=_metrics(metrics_host, metrics_port),
        without=frozenset(without or ()),
    )
    tls = tls_files(cluster_api_tls_cert, cluster_api_tls_key)
    serving = _serving(cluster_api_host, cluster_api_port, cluster_api_credentials, tls)
    webhook = webhook_options(webhook_port, webhook_service, webhook_client_ca)
    asyncio.run(_run(file, context, partial(_work, options, keys, serving, webhook)))


def _serving(
    host: str, port: int | None, credentials: Path | None, tls: Tls | None
) -> ClusterApiOptions | None:
    from unbroken.cluster_api.driver import ClusterApiOptions

    return None if port is None else ClusterApiOptions(credentials, host, port, tls)


def _metrics(host: str, port: int | None) -> MetricsPlace | None:
    from unbroken.operator.telemetry.metrics import MetricsPlace

    if port is None:
        # Another operator on this machine may have it; one that waits need not be scraped.
        return MetricsPlace(host, is_needed=False)
    return MetricsPlace(host, port) if port else None


async def _run(
    file: Path | str | None,
    context: str | None,
    work: Callable[[KubeClient], Coroutine[Any, Any, None]],
) -> None:
    from unbroken.kube.client import connect

    gc.set_threshold(*COLLECT)
    client = connect(file, context=context, manager="unbroken-operator")
    running = asyncio.ensure_future(work(client))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, running.cancel)
    try:
        with contextlib.suppress(asyncio.CancelledError):
            await running
    finally:
        await client.close()


async def _work(
    make: Callable[..., OperatorOptions],
    keys: KeyPlace,
    serving: ClusterApiOptions | None,
    webhook: WebhookOptions | None,
    client: KubeClient,
) -> None:
    from unbroken.cluster_api.driver import serve_cluster_api
    from unbroken.operator.driver import run_operator

    options = make(key=await keys.read(client))
    async with contextlib.AsyncExitStack() as stack:
        if serving is not None:
            address = await stack.enter_async_context(serve_cluster_api(client, serving))
            log.info("cluster_api=%s", address)
        if webhook is not None:
            from unbroken.operator.webhook.registration import serve_webhook

            address = await stack.enter_async_context(serve_webhook(client, webhook, options.key))
            log.info("webhook=%s", address)
        await run_operator(client, None, options)
