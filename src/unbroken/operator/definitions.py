"""Sees to it that the cluster knows our kinds."""

from __future__ import annotations

import logging
import re
from functools import partial
from typing import Any
from urllib.parse import quote

import msgspec

from unbroken.errors import WorldError
from unbroken.kube.client import ApiRefusal, KubeClient
from unbroken.operator.jobs.requests import CONFLICT, MERGE, NOT_FOUND, persist
from unbroken.spec.job import incident
from unbroken.spec.job import types as job
from unbroken.spec.nodes.kinds import OWN_KINDS
from unbroken.spec.schema.crd import MADE_BY, definitions

from .kinds import INCIDENTS, JOBS

log = logging.getLogger(__name__)

PATH = "apis/apiextensions.k8s.io/v1/customresourcedefinitions"
FORBIDDEN = 403


async def install(client: KubeClient) -> None:
    """Apply the definitions of our kinds, and wait until the API serves them.

    Those of a later version stay: an operator that waits to lead may be older than the one that
    does.  Where applying is not allowed, what somebody else has installed will do; SpecError if
    nobody has.
    """
    for definition in definitions():
        name = definition["metadata"]["name"]
        try:
            await persist(f"definition={name} write=apply", partial(_apply, client, definition))
        except ApiRefusal as error:
            if error.code != FORBIDDEN:
                raise
            log.info('definition=%s not_installed="%s"', name, error)
    await served(client)


async def served(client: KubeClient) -> None:
    """Return once the API serves our kinds."""
    own = (kind.path for kind in OWN_KINDS)
    for kind in (f"{JOBS}/{job.PLURAL}", f"{INCIDENTS}/{incident.PLURAL}", *own):
        await persist(f"kind={kind} wait=served", partial(_serve, client, kind))


async def _apply(client: KubeClient, definition: dict[str, Any]) -> None:
    # Not by server-side apply: servers before 1.25 then refuse rules in CEL, which they would
    # otherwise leave out.
    path = f"{PATH}/{quote(definition['metadata']['name'])}"
    try:
        try:
            found = msgspec.json.decode(await client.raw("GET", path))
            mark = definition["metadata"]["annotations"]
            theirs = (found["metadata"].get("annotations") or {}).get(MADE_BY, "")
            if _parts(theirs) > _parts(mark[MADE_BY]):
                name = definition["metadata"]["name"]
                log.warning("definition=%s kept_of_version=%s", name, theirs)
                return
            metadata = {
                "resourceVersion": found["metadata"]["resourceVersion"],
                "annotations": mark,
            }
            body = {"metadata": metadata, "spec": definition["spec"]}
            await client.raw("PATCH", path, body=body, headers=MERGE)
        except ApiRefusal as error:
            if error.code != NOT_FOUND:
                raise
            await client.raw("POST", PATH, body=definition)
    except ApiRefusal as error:
        if error.code != CONFLICT:
            raise
        # Another operator does the same: the replicas of a new installation start together.
        raise WorldError(str(error), 0.0) from error


def _parts(version: str) -> list[int]:
    """Numbers to compare versions by; a text without any is before all."""
    return [int(one) for one in re.findall(r"\d+", version)[:3]]


async def _serve(client: KubeClient, path: str) -> None:
    """Return if the API serves the kind; WorldError while it may be about to."""
    try:
        await client.raw("GET", path, parameters={"limit": "1"})
    except ApiRefusal as error:
        if error.code == NOT_FOUND:
            raise WorldError(
                f"the cluster does not serve {path}; an administrator installs it with: "
                "kubectl apply --server-side -f deploy/crds",
                1.0,
            ) from error
        # Listing in all namespaces may be more than an operator of one namespace is allowed.
        if error.code != FORBIDDEN:
            raise
