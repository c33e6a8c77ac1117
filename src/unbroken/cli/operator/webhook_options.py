"""Options of the webhook that judges jobs when they are applied."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unbroken.errors import SpecError

if TYPE_CHECKING:
    from unbroken.operator.webhook.registration import WebhookOptions

WebhookPort = Annotated[
    int | None,
    typer.Option(
        "--webhook-port",
        min=0,
        max=65535,
        help="Have the API server ask here before it stores a job, so that `kubectl apply` refuses "
        "what could not run; the certificate is derived from the operator's key. 0: any free port.",
    ),
]
WebhookService = Annotated[
    str | None,
    typer.Option(
        "--webhook-service",
        metavar="NAMESPACE/NAME",
        help="The Service whose port 443 leads to --webhook-port. Without it the API server asks "
        "at 127.0.0.1, where it has to be.",
    ),
]


WebhookClientAuthority = Annotated[
    Path | None,
    typer.Option(
        "--webhook-client-ca",
        metavar="FILE",
        help="PEM file of the authority that signs the API server's client certificate for "
        "webhooks. Nobody without such a certificate is answered. Default: only the secret path, "
        "which the API server alone is told, says who asks.",
    ),
]


def webhook_options(
    port: int | None, service: str | None, authority: Path | None = None
) -> WebhookOptions | None:
    """Options of the webhook; None: no webhook."""
    from unbroken.operator.webhook.registration import WebhookOptions, service_of

    if port is None:
        if service is not None:
            raise typer.BadParameter("--webhook-service goes with --webhook-port")
        if authority is not None:
            raise typer.BadParameter("--webhook-client-ca goes with --webhook-port")
        return None
    trusted = "" if authority is None else _certificates(authority)
    return WebhookOptions(port, service_of(service) if service else None, trusted)


def _certificates(file: Path) -> str:
    """The text of a file of certificates; SpecError where it has none."""
    try:
        text = file.read_text("ascii")
        ssl.create_default_context(cadata=text)
    except (OSError, ValueError, ssl.SSLError) as error:
        raise SpecError(f"--webhook-client-ca {file}: no certificates (PEM): {error}") from error
    return text
