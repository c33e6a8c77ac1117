"""Gives each namespace its default service account and the cluster's certificate.

After kube-controller-manager v1.33, pkg/controller/serviceaccount and
pkg/controller/certificates/rootcacertpublisher.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from lightkube.resources.core_v1 import ConfigMap, Namespace, ServiceAccount

from unbroken.kube.cache import HasMetadata, key_of
from unbroken.kube.client import KubeClient, Object
from unbroken.kube.errors import Forbidden, NotFound
from unbroken.kube.informer import Informer, all_synced
from unbroken.kube.workqueue import WorkQueue

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
