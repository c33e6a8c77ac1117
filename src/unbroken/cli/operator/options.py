"""Groups of options of `unbroken operator`, and of `unbroken up` about the repair of nodes."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from enum import Enum
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from unbroken.cli.app import option
from unbroken.cli.cluster.api import tls_files
from unbroken.errors import SpecError
from unbroken.spec.auto_resume import DEFAULT_RETRIES, RETRIES_MAX
from unbroken.spec.keys import AGENT, AGENT_AUTH
from unbroken.spec.nodes.values import NodeProvider, NodeRecovery
from unbroken.spec.notifications import NotificationForm

if TYPE_CHECKING:
    from unbroken.cluster_api.driver import ClusterApiOptions
    from unbroken.operator.jobs.pods import AgentToInject
    from unbroken.operator.nodes.checks_pods import CheckerOptions
    from unbroken.operator.nodes.repair import RepairOptions
    from unbroken.operator.notifications import NotifyOptions
    from unbroken.operator.reports import ReportsOptions
    from unbroken.operator.telemetry import MetricsPlace
    from unbroken.operator.webhook.registration import WebhookOptions


DEFAULT_SHARE = 0.2
"""Share of the nodes that `unbroken operator` repairs at once (docs/design/nodes.md)."""
RESUME_HELP = (
    "Restarts of a PyTorchJob, TrainJob, RayJob or RayCluster without annotations of auto-resume "
    "after losses of pods and nodes; 0: only jobs with annotations restart."
)


@dataclass(frozen=True, slots=True)
class RepairFlags:
    """Options of the repair of nodes; None if not given."""

    node_recovery: NodeRecovery | None = option(
        "--node-recovery",
        help="Automatic: repair faulty nodes. None: repair only on a user's order. The "
        "NodeRecovery of a cluster overrides it.",
        show_default="Automatic",
    )
    node_provider: NodeProvider | None = option(
        "--node-provider",
        help="Provider that resets, reboots and replaces nodes.",
        show_default=False,
    )
    node_command: str | None = option(
        "--node-command",
        metavar="COMMAND",
        help="Command of the provider `command`. It gets NODE, ACTION and PROVIDER_ID in its "
        "environment, or as {node}, {action}, ... in its words. Exit status 0: done, 75: in "
        "progress.",
        show_default=False,
    )
    repair_share: float | None = option(
        "--repair-share",
        min=0.0,
        max=1.0,
        help="Largest share of the nodes under repair at a time; one node is always allowed.",
        show_default="0.2",
    )
    repair_dry_run: bool | None = option(
        "--repair-dry-run/--no-repair-dry-run",
        help="Only report in events and records what the repair would do.",
        show_default="--no-repair-dry-run",
    )

    def options(self) -> RepairOptions:
        """The options for an operator of its own; SpecError if they are invalid."""
        from unbroken.operator.nodes.repair import options_of

        return options_of(
            self.node_recovery or NodeRecovery.AUTOMATIC,
            self.node_provider or NodeProvider.NONE,
            self.node_command or "",
            DEFAULT_SHARE if self.repair_share is None else self.repair_share,
            bool(self.repair_dry_run),
        )


@dataclass(frozen=True, slots=True)
class NotifyFlags:
    """The webhook of notifications; None if not given."""

    notify_file: str | None = option(
        "--notify-file",
        metavar="FILE",
        help="File with the address of a webhook that gets a message about each incident and each "
        "repair of a node; '' for none. The address is a secret, so it is in no argument.",
        show_default="none",
    )
    notify_form: NotificationForm | None = option(
        "--notify-form",
        help="Form of the messages: json (all values) or slack (a text, as Slack and Mattermost "
        "take it).",
        show_default="json",
    )


@dataclass(frozen=True, slots=True)
class OperatorNotifyFlags:
    """The webhook of notifications, and the page that messages link to."""

    webhook: NotifyFlags
    notify_page: str = option(
        "--notify-page",
        default="",
        metavar="URL",
        help="Address of the live page, to which notifications link.",
        show_default="no links",
    )

    def options(self) -> NotifyOptions | None:
        """The options of notifications; None if there is no webhook."""
        from unbroken.operator.notifications import NotifyOptions

        if not self.webhook.notify_file:
            return None
        page = self.notify_page and f"{self.notify_page.rstrip('/')}/"
        form = self.webhook.notify_form or NotificationForm.JSON
        return NotifyOptions(Path(self.webhook.notify_file), form, page)


@dataclass(frozen=True, slots=True)
class ClusterApiFlags:
    """The cluster API, served by the operator."""

    cluster_api_port: int | None = option(
        "--cluster-api-port", min=1, max=65535, help="Serve the cluster API at this port."
    )
    cluster_api_host: str = option(
        "--cluster-api-host", default="127.0.0.1", help="Address where the cluster API listens."
    )
    cluster_api_credentials: Path | None = option(
        "--cluster-api-credentials",
        help="File of the keys that may call the cluster API, in the form of "
        "~/.aws/credentials. Required by --cluster-api-port.",
        show_default=False,
    )
    cluster_api_tls_cert: Path | None = option(
        "--cluster-api-tls-cert",
        help="Serve the cluster API by HTTPS with this certificate (PEM, with its chain).",
        show_default="plain HTTP",
    )
    cluster_api_tls_key: Path | None = option(
        "--cluster-api-tls-key", help="Private key of --cluster-api-tls-cert (PEM)."
    )

    def options(self, provider: NodeProvider | None) -> ClusterApiOptions | None:
        """Return the options of the cluster API for a node provider; None if it is not served."""
        from unbroken.cluster_api.driver import ClusterApiOptions

        tls = tls_files(self.cluster_api_tls_cert, self.cluster_api_tls_key)
        host, port = self.cluster_api_host, self.cluster_api_port
        if port is None:
            return None
        makes_machines = provider is NodeProvider.MACHINES
        return ClusterApiOptions(
            self.cluster_api_credentials, host, port, tls, makes_machines=makes_machines
        )


@dataclass(frozen=True, slots=True)
class MetricsFlags:
    """Metrics for Prometheus."""

    metrics_port: int | None = option(
        "--metrics-port",
        min=0,
        max=65535,
        help="Port of the metrics for Prometheus; 0 for none.",
        show_default="8081, if it is free",
    )
    metrics_host: str = option(
        "--metrics-host", default="127.0.0.1", help="Address where metrics are served."
    )

    def place(self) -> MetricsPlace | None:
        """The place where metrics are served; None if they are not."""
        from unbroken.operator.telemetry import MetricsPlace

        host, port = self.metrics_host, self.metrics_port
        if port is None:
            # Another operator on this machine may use the port; only the leader must be scraped.
            return MetricsPlace(host, is_needed=False)
        return MetricsPlace(host, port) if port else None


@dataclass(frozen=True, slots=True)
class CheckFlags:
    """Checks of nodes."""

    check_image: str = option(
        "--check-image",
        default="",
        help="Image for pods that test nodes; it must have this package and torch.",
        show_default="none: only nodes of a local cluster can be tested",
    )
    check_logs: Path | None = option(
        "--check-logs",
        metavar="DIR",
        help="Folder for the log files of deep checks.",
        show_default="none",
    )
    check_link: list[str] | None = option(
        "--check-link",
        metavar="TYPE=GB/s",
        help="Bus bandwidth that an all-reduce over all devices of two nodes of this type must "
        "reach in a deep check. Repeatable.",
        show_default="published for the type, else learned from other nodes of the type",
    )
    check_node_link: list[str] | None = option(
        "--check-node-link",
        metavar="TYPE=GB/s",
        help="Bus bandwidth that an all-reduce over all devices of one node of this type must "
        "reach in a deep check. Repeatable.",
        show_default="learned from other nodes of the type, if they have GPUs",
    )
    check_dcgm_level: int = option(
        "--check-dcgm-level",
        default=4,
        min=1,
        max=4,
        help="Level of NVIDIA's `dcgmi diag` in a deep check; 4 takes up to two hours.",
    )
    check_ranks: int = option(
        "--check-ranks",
        default=2,
        min=2,
        max=64,
        help="Processes of a node in tests of links, if it has no GPUs.",
    )

    def options(self) -> CheckerOptions:
        """The options of checks; BadParameter for an invalid limit."""
        from unbroken.operator.nodes.checks_pods import CheckerOptions

        return CheckerOptions(
            self.check_image,
            dcgm_level=self.check_dcgm_level,
            log_directory=self.check_logs,
            link_bandwidth=_limits("--check-link", self.check_link),
            node_bandwidth=_limits("--check-node-link", self.check_node_link),
            ranks=self.check_ranks,
        )


def _limits(flag: str, given: list[str] | None) -> dict[str, float]:
    return dict(_limit(flag, text) for text in given or ())


def _limit(flag: str, text: str) -> tuple[str, float]:
    """Instance type and GB/s of an option."""
    kind, _, amount = text.partition("=")
    try:
        bandwidth = float(amount)
    except ValueError:
        bandwidth = 0.0
    if not kind or not isfinite(bandwidth) or bandwidth <= 0:
        what = f"{text!r} must be TYPE=GB/s, such as ml.p5.48xlarge=30"
        raise typer.BadParameter(what, param_hint=flag)
    return kind, bandwidth


@dataclass(frozen=True, slots=True)
class LossFlags:
    """Losses of nodes and pods."""

    resume_retries: int = option(
        "--resume-retries", default=DEFAULT_RETRIES, min=0, max=RETRIES_MAX, help=RESUME_HELP
    )
    dead_seconds: float = option(
        "--dead-after",
        metavar="SECONDS",
        default=0.0,
        min=0,
        help="Seconds after which a silent node (Ready Unknown) counts as dead, so that its pods "
        "start elsewhere. Give it only if something surely switches the machines of silent nodes "
        "off within this time. 0: never.",
    )


class AgentAuthentication(Enum):
    """Whether agents have to prove the key of their job."""

    OPTIONAL = "optional"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class AgentFlags:
    """The agent that is added to pods, and agents that offer no proof."""

    agent_image: str = option(
        "--agent-image",
        default="",
        help="Image with the agent that is added to the pods of torchrun and of jobs that ask for "
        f"it (annotation {AGENT}: injected): the image of this operator.",
        show_default="none: nothing is added, and jobs that ask for it are refused",
    )

    agent_authentication: AgentAuthentication = option(
        "--agent-authentication",
        default=AgentAuthentication.OPTIONAL,
        help="required: refuse agents that offer no proof of their job's key, as HyperPod's own "
        f"does, except in jobs with the annotation {AGENT_AUTH}: none. optional: serve them "
        "without a proof. Agents of unbroken always prove.",
    )

    @property
    def is_proof_required(self) -> bool:
        """True if agents that offer no proof are refused."""
        return self.agent_authentication is AgentAuthentication.REQUIRED

    def agent(self) -> AgentToInject | None:
        """The agent for pods; None without an image."""
        from unbroken.operator.jobs.pods import AgentToInject

        return AgentToInject(self.agent_image) if self.agent_image else None


@dataclass(frozen=True, slots=True)
class WebhookFlags:
    """The webhook and who may call it."""

    webhook_port: int | None = option(
        "--webhook-port",
        min=0,
        max=65535,
        help="Serve an admission webhook at this port (0: any free port): `kubectl apply` "
        "refuses jobs that cannot run. The certificate is derived from the operator's key.",
    )
    webhook_service: str | None = option(
        "--webhook-service",
        metavar="NAMESPACE/NAME",
        help="Service whose port 443 leads to --webhook-port. Without it the API server "
        "calls 127.0.0.1, so it must run on this machine.",
    )
    webhook_client_ca: Path | None = option(
        "--webhook-client-ca",
        metavar="FILE",
        help="PEM file of the authority that signs the API server's client certificate for "
        "webhooks. Requests without such a certificate are refused. Without this option, only "
        "a secret path that the API server knows protects the webhook.",
    )

    def options(self) -> WebhookOptions | None:
        """The options of the webhook; None if there is none."""
        from unbroken.operator.webhook.registration import WebhookOptions, service_of

        service, authority = self.webhook_service, self.webhook_client_ca
        if self.webhook_port is None:
            if service is not None:
                raise typer.BadParameter("--webhook-service needs --webhook-port")
            if authority is not None:
                raise typer.BadParameter("--webhook-client-ca needs --webhook-port")
            return None
        trusted = "" if authority is None else _certificates(authority)
        return WebhookOptions(self.webhook_port, service_of(service) if service else None, trusted)


def _certificates(file: Path) -> str:
    """The text of a file of certificates; SpecError if it has none."""
    try:
        text = file.read_text("ascii")
        ssl.create_default_context(cadata=text)
    except (OSError, ValueError, ssl.SSLError) as error:
        raise SpecError(f"--webhook-client-ca {file}: no certificates (PEM): {error}") from error
    return text


@dataclass(frozen=True, slots=True)
class ReportsFlags:
    """The reports of agents for the live page of the cluster."""

    reports_port: int | None = option(
        "--reports-port",
        min=0,
        max=65535,
        help="Serve the newest reports of all agents at this port (0: any free port), for a live "
        "page in the cluster.",
    )
    reports_host: str = option(
        "--reports-host", default="127.0.0.1", help="Address where the reports are served."
    )
    reports_reader: str | None = option(
        "--reports-reader",
        metavar="NAMESPACE/NAME",
        help="ServiceAccount of the page, the only one that may read the reports. Required by "
        "--reports-port.",
        show_default=False,
    )

    def options(self) -> ReportsOptions | None:
        """The options of the server of reports; None if there is none.  Raises BadParameter."""
        from unbroken.operator.reports import ReportsOptions

        if self.reports_port is None:
            if self.reports_reader is not None:
                raise typer.BadParameter("--reports-reader needs --reports-port")
            return None
        namespace, slash, name = (self.reports_reader or "").partition("/")
        if not (namespace and slash and name) or "/" in name:
            raise typer.BadParameter("--reports-port needs --reports-reader NAMESPACE/NAME")
        return ReportsOptions(self.reports_port, (namespace, name), self.reports_host)
