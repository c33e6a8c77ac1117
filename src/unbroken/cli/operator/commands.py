"""`unbroken operator`: the operator as a program of its own, for any cluster.

Its master key is a file of its own, or of a mounted Secret. `--without` leaves out parts of the
operator.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unbroken.cli.app import option
from unbroken.cli.place import find
from unbroken.cli.programs import ProgramTarget, start_logging
from unbroken.errors import SpecError
from unbroken.local import state
from unbroken.log_lines import Log
from unbroken.operator.parts import PARTS, WITHOUT, PartName

from .options import (
    AgentFlags,
    CheckFlags,
    ClusterApiFlags,
    LossFlags,
    MetricsFlags,
    OperatorNotifyFlags,
    RepairFlags,
    ReportsFlags,
    WebhookFlags,
)

if TYPE_CHECKING:
    from unbroken.cluster_api.driver import ClusterApiOptions
    from unbroken.kube.client import KubeClient
    from unbroken.operator.driver import OperatorOptions
    from unbroken.operator.key import KeySecret
    from unbroken.operator.webhook.registration import WebhookOptions


@dataclass(frozen=True, slots=True)
class KeyPlace:
    """The file of the key, and the Secret that the kubelet mounts there, if any."""

    file: Path
    secret: KeySecret | None

    async def read(self, client: KubeClient) -> bytes:
        """Read the key; create it if it does not exist.  Raises SpecError."""
        from unbroken.operator.key import kept_key, mounted_key

        if self.secret is None:
            return kept_key(self.file)
        return await mounted_key(client, self.file, self.secret)


@dataclass(frozen=True, slots=True)
class KeyFlags:
    """The operator's master key."""

    key_file: Path | None = option(
        "--key-file",
        help="File with the operator's master key: 64 hexadecimal digits, mode 0600. All "
        "operators of a cluster need the same key. A missing file is created, unless "
        "--key-secret is given.",
        show_default="operator.key in the local cluster's folder, for other clusters "
        "in ~/.local/state/unbroken",
    )
    key_secret: str | None = option(
        "--key-secret",
        metavar="NAMESPACE/NAME",
        help="Secret that the kubelet mounts as --key-file (entry `key`). The operator "
        "creates a missing Secret, and never reads it.",
    )

    def place(self, target: ProgramTarget) -> KeyPlace:
        """The place of the key; SpecError if the options are incomplete."""
        from unbroken.operator.key import KeySecret

        if self.key_secret is None:
            return KeyPlace(self.key_file or _usual(target.kubeconfig, target.directory), None)
        namespace, slash, name = self.key_secret.partition("/")
        if not (namespace and slash and name) or "/" in name:
            raise SpecError(f"--key-secret {self.key_secret}: must be NAMESPACE/NAME")
        if self.key_file is None:
            raise SpecError("--key-secret needs --key-file: the file where the Secret is mounted")
        return KeyPlace(self.key_file, KeySecret(namespace, name))


def _usual(kubeconfig: Path | None, directory: Path | None) -> Path:
    if kubeconfig is None and directory is None and "KUBERNETES_SERVICE_HOST" in os.environ:
        raise SpecError(
            "no key: in a pod, mount a Secret and name it with --key-file and --key-secret "
            "(as the chart does); a key in the container would be lost with it"
        )
    if kubeconfig is not None:
        beside = state.Paths(kubeconfig.absolute().parent)
        paths = beside if beside.options.is_file() else None
    else:
        paths = find(directory, None).paths
    if paths is not None:
        return paths.operator_key
    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(base).expanduser() / "unbroken" / "operator.key"


LEFT = {name: part for name, part in PARTS.items() if part.option == WITHOUT}
"""Parts that can be left out."""


def part_of(text: str) -> PartName:
    """Read the name of a part that can be left out; BadParameter lists these parts."""
    if text not in LEFT:
        raise typer.BadParameter(f"{text!r} is not one of {', '.join(LEFT)}")
    return PartName(text)


Without = Annotated[
    list[PartName] | None,
    typer.Option(
        WITHOUT,
        parser=part_of,
        metavar="PART",
        help="Leave out a part; the operator then needs no rights for it. Repeatable. "
        + " ".join(f"{name}: {part.help}" for name, part in LEFT.items()),
        show_default="nothing is left out",
    ),
]


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
    notify: OperatorNotifyFlags,
    reports: ReportsFlags,
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
        notify=notify.options(),
        reports=reports.options(),
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
