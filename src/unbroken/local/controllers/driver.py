"""All controllers of the local cluster as one program, on shared informers."""

from __future__ import annotations

import asyncio
import base64
import binascii
from dataclasses import dataclass
from pathlib import Path

from lightkube.resources.coordination_v1 import Lease
from lightkube.resources.core_v1 import (
    Endpoints,
    Namespace,
    Node,
    PersistentVolume,
    PersistentVolumeClaim,
    Pod,
    Service,
)
from lightkube.resources.discovery_v1 import EndpointSlice
from lightkube.resources.policy_v1 import PodDisruptionBudget

from unbroken.kube.client import KubeClient
from unbroken.kube.events import EventRecorder
from unbroken.kube.informer import Informers
from unbroken.log_lines import Log

from .accounts import Accounts
from .collector import GarbageCollector
from .disruption import DisruptionBudgets
from .endpoints import EndpointWriter
from .inventory import Inventory
from .namespaces import NamespaceDeleter
from .node_lifecycle import NodeLifecycle
from .volumes import VolumeBinder

log = Log(__name__)

SHARED = [
    *(Endpoints, EndpointSlice, Lease, Namespace, Node),
    *(PersistentVolume, PersistentVolumeClaim, Pod, PodDisruptionBudget, Service),
]


@dataclass(frozen=True, slots=True)
class ControllerOptions:
    """Options of the controllers besides the API."""

    volume_directory: Path
    """Directories of PersistentVolumeClaims are made and removed here."""
    node_grace_seconds: float = 40.0
    """A node silent for so long is unreachable (kube-controller-manager
    --node-monitor-grace-period was 40 s until v1.31, 50 s since)."""
    orphan_seconds: float = 10.0
    """Pods of a node that was deleted go after this time."""


async def run_controllers(
    client: KubeClient, options: ControllerOptions, informers: Informers | None = None
) -> None:
    """Run every controller until cancelled.

    `informers`: shared ones, which the caller runs; None: of its own.
    """
    async with asyncio.TaskGroup() as tasks:
        if informers is None:
            informers = Informers(client)
            tasks.create_task(informers.run())
        recorder = EventRecorder(client, "unbroken-controllers")
        inventory = Inventory(client, informers, SHARED)
        namespaces = informers.of(Namespace)
        nodes = NodeLifecycle(
            client, informers, recorder, options.node_grace_seconds, options.orphan_seconds
        )
        directory = await asyncio.to_thread(options.volume_directory.resolve)
        tasks.create_task(recorder.run())
        tasks.create_task(inventory.run())
        tasks.create_task(Accounts(client, namespaces, certificate(client)).run())
        tasks.create_task(nodes.run())
        tasks.create_task(VolumeBinder(client, informers, recorder, directory).run())
        await inventory.ready.wait()
        slices = inventory.kinds.get(("discovery.k8s.io", "endpointslices"))
        has_slices = slices is not None and slices.version == "v1"
        budgets = inventory.kinds.get(("policy", "poddisruptionbudgets"))
        if budgets is not None and budgets.version == "v1":
            tasks.create_task(DisruptionBudgets(client, informers).run())
        tasks.create_task(EndpointWriter(client, informers, has_slices).run())
        tasks.create_task(NamespaceDeleter(client, namespaces, inventory).run())
        tasks.create_task(GarbageCollector(client, inventory).run())
        log.info("controllers run", count=len(inventory.kinds))


def certificate(client: KubeClient) -> str:
    """The cluster's certificates as PEM, from the client's own configuration; empty if none."""
    cluster = client.config.cluster
    if cluster.certificate_auth_data:
        try:
            return base64.b64decode(cluster.certificate_auth_data).decode()
        except (binascii.Error, UnicodeDecodeError):
            return ""
    if cluster.certificate_auth:
        return Path(client.config.abs_file(cluster.certificate_auth)).read_text()
    return ""
