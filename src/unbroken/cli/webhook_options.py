"""Options of the webhook that judges jobs when they are applied."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from unbroken.controller.webhook import WebhookOptions

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


def webhook_options(port: int | None, service: str | None) -> WebhookOptions | None:
    """What was asked for; None: no webhook."""
    from unbroken.controller.webhook import WebhookOptions, service_of

    if port is None:
        if service is not None:
            raise typer.BadParameter("--webhook-service goes with --webhook-port")
        return None
    return WebhookOptions(port, service_of(service) if service else None)
