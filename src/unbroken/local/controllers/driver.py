"""The controllers of the local cluster as one program, with the default service accounts.

Each namespace gets its default account and the cluster's certificate, after kube-controller-manager
v1.33, pkg/controller/serviceaccount and pkg/controller/certificates/rootcacertpublisher.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lightkube.resources.coordination_v1 import Lease
from lightkube.resources.core_v1 import (
    ConfigMap,
    Endpoints,
    Namespace,
    Node,
    PersistentVolume,
    PersistentVolumeClaim,
    Pod,
    Service,
    ServiceAccount,
)
from lightkube.resources.discovery_v1 import EndpointSlice
from lightkube.resources.policy_v1 import PodDisruptionBudget

from unbroken.kube.cache import HasMetadata, key_of
from unbroken.kube.client import KubeClient, Object
from unbroken.kube.errors import Forbidden, NotFound
from unbroken.kube.events import EventRecorder
from unbroken.kube.informer import Informer, Informers, all_synced
from unbroken.kube.workqueue import WorkQueue
from unbroken.log_lines import Log

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


ACCOUNT = "default"
CERTIFICATE = "kube-root-ca.crt"


class Accounts:
    """Keeps both objects in every namespace that is not being deleted."""

    def __init__(
        self, client: KubeClient, namespaces: Informer[Namespace], certificate: str
    ) -> None:
        self._client = client
        self._namespaces = namespaces
        self._certificate = certificate
        self._accounts = Informer(
            client, ServiceAccount, fields=f"metadata.name={ACCOUNT}", on_change=self._on_kept
        )
        self._certificates = Informer(
            client, ConfigMap, fields=f"metadata.name={CERTIFICATE}", on_change=self._on_kept
        )
        self._queue = WorkQueue("account", self._complete, workers=4)

    async def run(self) -> None:
        """Complete namespaces until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._accounts.run())
            tasks.create_task(self._certificates.run())
            await all_synced(self._accounts, self._certificates)
            self._namespaces.subscribe(self._on_namespace)
            await self._queue.run()

    def _on_namespace(self, old: Namespace | None, new: Namespace | None) -> None:
        if new is not None:
            self._queue.add(key_of(new).name)

    def _on_kept(self, old: HasMetadata | None, new: HasMetadata | None) -> None:
        if old is not None:
            self._queue.add(key_of(old).namespace)

    async def _complete(self, name: str) -> None:
        namespace = self._namespaces.get(name)
        if namespace is None or (namespace.metadata and namespace.metadata.deletionTimestamp):
            return
        if self._accounts.get(ACCOUNT, name) is None:
            await self._create(name, "ServiceAccount", "serviceaccounts", ACCOUNT, {})
        held = self._certificates.get(CERTIFICATE, name)
        data = {"ca.crt": self._certificate}
        if held is None:
            await self._create(name, "ConfigMap", "configmaps", CERTIFICATE, {"data": data})
        elif held.data != data:
            path = f"api/v1/namespaces/{name}/configmaps/{CERTIFICATE}"
            await self._client.merge(path, {"data": data})

    async def _create(
        self, namespace: str, kind: str, plural: str, name: str, content: Object
    ) -> None:
        body: Object = {"apiVersion": "v1", "kind": kind, "metadata": {"name": name}, **content}
        # Refused where the namespace is being deleted (403) or is gone (404).
        with suppress(Forbidden, NotFound):
            await self._client.create_if_absent(f"api/v1/namespaces/{namespace}/{plural}", body)
