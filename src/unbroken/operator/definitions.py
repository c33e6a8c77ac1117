"""Installation of the project's CustomResourceDefinitions."""

from __future__ import annotations

import re
from functools import partial
from typing import Any
from urllib.parse import quote

from unbroken.errors import WorldError
from unbroken.kube.backoff import persist
from unbroken.kube.client import KubeClient
from unbroken.kube.errors import Conflict, Forbidden, NotFound
from unbroken.log_lines import Log
from unbroken.spec.job import incident
from unbroken.spec.job import types as job
from unbroken.spec.keys import MADE_BY
from unbroken.spec.nodes.kinds import OWN_KINDS
from unbroken.spec.schema.crd import definitions

from .kinds import INCIDENTS, JOBS

log = Log(__name__)

PATH = "apis/apiextensions.k8s.io/v1/customresourcedefinitions"


async def install(client: KubeClient) -> None:
    """Apply the definitions of the project's kinds, and wait until the API serves them.

    Those of a later version stay: a waiting operator may be older than the leader. If applying is
    not allowed, the installed definitions are used. Raises SpecError if there are none.
    """
    for definition in definitions():
        name = definition["metadata"]["name"]
        try:
            apply = partial(_apply, client, definition)
            await persist("apply a definition", apply, definition=name)
        except Forbidden as error:
            log.info("definition not installed", definition=name, error=error)
    await served(client)


async def served(client: KubeClient) -> None:
    """Return once the API serves the project's kinds."""
    own = (kind.path for kind in OWN_KINDS)
    for kind in (f"{JOBS}/{job.PLURAL}", f"{INCIDENTS}/{incident.PLURAL}", *own):
        await persist("list a kind", partial(_serve, client, kind), kind=kind)


async def _apply(client: KubeClient, definition: dict[str, Any]) -> None:
    # Not by server-side apply: servers before 1.25 then refuse rules in CEL, which they otherwise
    # drop.
    name, mark = definition["metadata"]["name"], definition["metadata"]["annotations"]
    path = f"{PATH}/{quote(name)}"
    try:
        result = await client.get_or_none(path, dict[str, Any])
        if result is None:
            await client.raw("POST", PATH, body=definition)
            return
        theirs = (result["metadata"].get("annotations") or {}).get(MADE_BY, "")
        if _parts(theirs) > _parts(mark[MADE_BY]):
            log.warning("definition of a newer version kept", definition=name, version=theirs)
            return
        body = {"metadata": {"annotations": mark}, "spec": definition["spec"]}
        await client.merge(path, body, version=result["metadata"]["resourceVersion"])
    except (Conflict, NotFound) as error:
        # Another operator does the same: the replicas of a new installation start together.
        raise WorldError(str(error), 0.0) from error


def _parts(version: str) -> list[int]:
    """Return numbers to compare versions by; a text without any comes before all."""
    return [int(item) for item in re.findall(r"[0-9]{1,9}", version)[:3]]


async def _serve(client: KubeClient, path: str) -> None:
    """Return if the API serves the kind. Raises WorldError while it may be about to."""
    try:
        await client.raw("GET", path, parameters={"limit": "1"})
    except NotFound as error:
        raise WorldError(
            f"the cluster does not serve {path}; an administrator installs it with: "
            "kubectl apply --server-side -f deploy/crds",
            1.0,
        ) from error
    except Forbidden:
        # Listing in all namespaces may be more than an operator of one namespace is allowed.
        return
