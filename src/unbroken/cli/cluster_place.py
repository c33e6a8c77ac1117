"""Where the cluster API is that a command speaks to, and as whom."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unbroken.embedded import state
from unbroken.errors import SpecError

from .place import find

if TYPE_CHECKING:
    from unbroken.cluster_api.signatures import Credential

EndpointUrl = Annotated[
    str | None,
    typer.Option(
        "--endpoint-url",
        envvar="AWS_ENDPOINT_URL_SAGEMAKER",
        help="Address of the cluster API.",
        show_default="that of the embedded cluster",
    ),
]
REGION = "us-west-2"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A cluster API as the options and the environment name it."""

    url: str
    credential: Credential | None
    region: str


def endpoint(url: str | None, directory: Path | None, context: str | None) -> Endpoint:
    """The cluster API that is meant; SpecError where none is known."""
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or REGION
    # A folder that is named comes before an address that the environment has.
    return Endpoint(
        url if url and directory is None else _own(directory, context),
        credential_of(os.environ),
        region,
    )


def _own(directory: Path | None, context: str | None) -> str:
    place = find(directory, context)
    place.require_running()
    found = state.running(place.paths) if place.paths is not None else None
    if found is None or not found.cluster_api:
        raise SpecError(
            "it is not known where this cluster's API for clusters is; name it with "
            "--endpoint-url (the operator serves it with --cluster-api-port)"
        )
    return found.cluster_api


def credential_of(environment: Mapping[str, str]) -> Credential | None:
    """The key of the variables that the aws CLI reads; None: requests are not signed."""
    from unbroken.cluster_api.signatures import Credential

    key, secret = environment.get("AWS_ACCESS_KEY_ID"), environment.get("AWS_SECRET_ACCESS_KEY")
    if not key or not secret:
        return None
    return Credential(key, secret, environment.get("AWS_SESSION_TOKEN", ""))
