"""The cluster API that a command calls, and the key that signs its requests."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unbroken.cli.place import find
from unbroken.errors import SpecError, UnbrokenError
from unbroken.local import state

if TYPE_CHECKING:
    from unbroken.cluster_api.signatures import Credential

EndpointUrl = Annotated[
    str | None,
    typer.Option(
        "--endpoint-url",
        envvar="AWS_ENDPOINT_URL_SAGEMAKER",
        help="Address of the cluster API. Its key is in AWS_ACCESS_KEY_ID and "
        "AWS_SECRET_ACCESS_KEY.",
        show_default="address and key of the local cluster",
    ),
]
REGION = "us-west-2"
KEY_ID, SECRET, TOKEN = "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"
CA_BUNDLE = "AWS_CA_BUNDLE"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Address and key of a cluster API."""

    url: str
    credential: Credential
    region: str
    ca_bundle: str
    """File of certificates to trust; empty for those of the system."""


def endpoint(url: str | None, directory: Path | None, context: str | None) -> Endpoint:
    """The cluster API that options and environment name; SpecError if it or its key is unknown."""
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or REGION
    # A named folder comes before an address in the environment.
    if url and directory is None and not os.environ.get("UNBROKEN_DIR"):
        # A shell may hold keys of AWS beside the address of a local cluster.
        key = _own_key_for(url, context) or credential_of(os.environ)
        if key is None:
            raise SpecError(
                f"no key for the cluster API at {url}: set {KEY_ID} and {SECRET} "
                "(`unbroken status` shows those of a local cluster)"
            )
        return Endpoint(url, key, region, os.environ.get(CA_BUNDLE, ""))
    running = _own(directory, context)
    return Endpoint(running.cluster_api, key_of(running), region, "")


def _own(directory: Path | None, context: str | None) -> state.State:
    place = find(directory, context)
    place.require_running()
    result = state.running(place.paths) if place.paths is not None else None
    if result is None or not result.cluster_api:
        raise SpecError(
            "the address of the cluster API is not known; name it with --endpoint-url "
            "(the operator serves the API with --cluster-api-port)"
        )
    return result


def _own_key_for(url: str, context: str | None) -> Credential | None:
    """The key of the local cluster if the address is that of its cluster API, else None."""
    try:
        result = _own(None, context)
    except UnbrokenError:
        return None  # no local cluster runs, so the address is of another one
    return key_of(result) if result.cluster_api.rstrip("/") == url.rstrip("/") else None


def key_of(running: state.State) -> Credential:
    """The key of a running local cluster; SpecError if it cannot be read."""
    from unbroken.cluster_api.signatures import read_credentials  # slow to load

    if not running.cluster_api_credentials:
        raise SpecError(
            "this cluster was started by an older version, without a key for its cluster API; "
            "restart it: unbroken down, then unbroken up"
        )
    return next(iter(read_credentials(Path(running.cluster_api_credentials)).values()))


def credential_of(environment: Mapping[str, str]) -> Credential | None:
    """The key in the environment variables of the aws CLI; None if they are not set."""
    from unbroken.cluster_api.signatures import Credential

    key, secret = environment.get(KEY_ID), environment.get(SECRET)
    if not key or not secret:
        return None
    return Credential(key, secret, environment.get(TOKEN, ""))
