"""Installs the definitions of job kinds that the local cluster runs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from unbroken.errors import WorldError
from unbroken.kube.backoff import persist
from unbroken.kube.client import KubeClient
from unbroken.kube.errors import NotFound

DEFINITIONS = "apis/apiextensions.k8s.io/v1/customresourcedefinitions"


async def install_definition(client: KubeClient, body: Mapping[str, Any], path: str) -> None:
    """Install a kind where it is missing, and wait until the API serves it at `path`."""
    name = body["metadata"]["name"]

    async def serve() -> None:
        try:
            await client.raw("GET", path, parameters={"limit": "1"})
        except NotFound as error:
            raise WorldError(f"{path} is not served yet", 0.1) from error

    create = partial(client.create_if_absent, DEFINITIONS, body)
    await persist("create a definition", create, definition=name)
    await persist("list a kind", serve, kind=name)
