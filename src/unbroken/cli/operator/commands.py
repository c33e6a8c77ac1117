"""`unbroken operator`: the operator as a program of its own, for any cluster."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from unbroken.cli.nodes.options import RepairFlags
from unbroken.cli.programs import ProgramTarget, start_logging
from unbroken.log_lines import Log

from .key import KeyFlags, KeyPlace
from .options import (
    AgentFlags,
    CheckFlags,
    ClusterApiFlags,
    LossFlags,
    MetricsFlags,
    WebhookFlags,
)
from .parts import Without

if TYPE_CHECKING:
    from unbroken.cluster_api.driver import ClusterApiOptions
    from unbroken.kube.client import KubeClient
    from unbroken.operator.driver import OperatorOptions
    from unbroken.operator.webhook.registration import WebhookOptions

log = Log(__name__)

COLLECT = (150_000, 20, 100)
"""Thresholds of the garbage collector.  With Python's default of 700, collections took a quarter of
the recovery time of 4,000 agents (benchmarks/operator_path.py)."""


def command(
    target: ProgramTarget,
    namespace: Annotated[
        str | None,
        typer.Option(
            "-n", "--namespace", help="Run the jobs of this namespace only.", show_default="all"
        ),
    ] = None,
    lease_namespace: Annotated[
        str, typer.Option("--lease-namespace", help="Namespace of the lease for leader election.")
    ] = "kube-system",
    *,
    serving: ClusterApiFlags,
    metrics: MetricsFlags,
    repair: RepairFlags,
    checks: CheckFlags,
    losses: LossFlags,
    agent: AgentFlags,
    without: Without = None,
    webhook: WebhookFlags,
    key: KeyFlags,
) -> None:
    """Run the operator in the foreground. If several operators run, only the leader acts.

    Every operator serves the cluster API, which keeps no state.

    A local cluster has an operator, unless it was started with --no-operator.

    Example: `unbroken operator --context prod -n team-a`
    """
    # Imported here because it loads the whole operator.
    from unbroken.operator.driver import OperatorOptions
    from unbroken.operator.election import LeaderTerms

    start_logging()
    options = partial(
        OperatorOptions,
        namespace=namespace,
        terms=LeaderTerms(namespace=lease_namespace),
        checks=checks.options(),
        agent=agent.agent(),
        is_proof_required=agent.is_proof_required,
        repair=repair.options(),
        metrics=metrics.place(),
        without=frozenset(without or ()),
        resume_retries=losses.resume_retries,
        dead_seconds=losses.dead_seconds,
    )
    cluster_api = serving.options(repair.node_provider)
    work = partial(_work, options, key.place(target), cluster_api, webhook.options())
    target.run("unbroken-operator", work)


async def _work(
    make: Callable[..., OperatorOptions],
    keys: KeyPlace,
    serving: ClusterApiOptions | None,
    webhook: WebhookOptions | None,
    client: KubeClient,
) -> None:
    from unbroken.cluster_api.driver import serve_cluster_api
    from unbroken.operator.driver import run_operator

    gc.set_threshold(*COLLECT)
    options = make(key=await keys.read(client))
    async with contextlib.AsyncExitStack() as stack:
        if serving is not None:
            address = await stack.enter_async_context(serve_cluster_api(client, serving))
            log.info("cluster API serves", address=address)
        if webhook is not None:
            from unbroken.operator.webhook.registration import serve_webhook

            address = await stack.enter_async_context(serve_webhook(client, webhook, options.key))
            log.info("webhook serves", address=address)
        await run_operator(client, None, options)
