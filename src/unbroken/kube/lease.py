"""Renewal of a Lease: the sign of life of a node or a program.

This is for holders that own their lease by name, as nodes do. Election among several holders is not
here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightkube.models.meta_v1 import OwnerReference

from unbroken.errors import UnbrokenError
from unbroken.log_lines import Log

from .backoff import Backoff
from .client import KubeClient, Object
from .clock import entropy, micro_time, monotonic, pause, wall

log = Log(__name__)

NODE_LEASES = "kube-node-lease"
"""The namespace of the nodes' leases."""


@dataclass(frozen=True, slots=True)
class LeaseTerms:
    """The holder of a lease, and how often it is renewed."""

    name: str
    namespace: str = NODE_LEASES
    holder: str = ""
    """Name of the holder; empty: the lease's name."""
    duration_seconds: int = 40
    """Seconds that a renewal lasts; kubelet v1.33: nodeLeaseDurationSeconds."""
    renew_seconds: float = 10.0
    """Seconds between renewals; kubelet v1.33: a quarter of the duration."""
    owners: Sequence[OwnerReference] = ()


async def keep_lease(client: KubeClient, terms: LeaseTerms) -> None:
    """Renew the lease until cancelled; create it if it does not exist.

    A failed renewal is soon tried again: after a server's restart, a node should not seem dead for
    longer than necessary.
    """
    backoff, random, failures = Backoff(first=0.2, limit=terms.renew_seconds), entropy(), 0
    while True:
        began = monotonic()
        try:
            await renew_lease(client, terms, wall())
        except UnbrokenError as error:
            failures += 1
            log.warning("lease not renewed", lease=terms.name, failures=failures, error=error)
            await client.pause(backoff.delay(failures, random))
        else:
            failures = 0
            await pause(began + terms.renew_seconds - monotonic())


async def renew_lease(client: KubeClient, terms: LeaseTerms, now: float) -> None:
    """Renew once; `now` is wall time. Raises as `api_errors`."""
    spec: Object = {
        "holderIdentity": terms.holder or terms.name,
        "leaseDurationSeconds": terms.duration_seconds,
        "renewTime": micro_time(now),
    }
    path = f"apis/coordination.k8s.io/v1/namespaces/{terms.namespace}/leases"
    if await client.merge_if_present(f"{path}/{terms.name}", {"spec": spec}):
        return
    body: Object = {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": terms.name, "ownerReferences": list(terms.owners)},
        "spec": {**spec, "acquireTime": spec["renewTime"]},
    }
    # Not through lightkube's model: its encoder leaves out the fraction of a whole second, which
    # MicroTime's parser refuses.
    await client.raw("POST", path, body=body)
