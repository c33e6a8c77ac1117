"""Writes the Endpoints and EndpointSlices of services that select pods."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import msgspec
from lightkube.resources.core_v1 import Endpoints, Pod, Service
from lightkube.resources.discovery_v1 import EndpointSlice

from unbroken.kube.cache import HasMetadata, Key, changed, key_of
from unbroken.kube.client import KubeClient, Object
from unbroken.kube.conditions import is_ready
from unbroken.kube.errors import Forbidden, NotFound
from unbroken.kube.informers import Informers, all_synced
from unbroken.kube.workqueue import WorkQueue

from .endpoint_rules import MANAGED_BY, MANAGER, SERVICE_NAME, backends, endpoints, selects, slices


class EndpointWriter:
    """Keeps addresses of services in line with their pods.

    `has_slices`: the API knows discovery.k8s.io/v1, which is younger than Endpoints.
    """

    def __init__(self, client: KubeClient, informers: Informers, has_slices: bool) -> None:
        self._client = client
        self._services = informers.of(Service)
        self._pods = informers.of(Pod)
        self._endpoints = informers.of(Endpoints)
        self._slices = informers.of(EndpointSlice) if has_slices else None
        self._by_namespace: dict[str, dict[str, Service]] = {}
        self._queue: WorkQueue[Key] = WorkQueue("endpoints", self._write, workers=4)

    async def run(self) -> None:
        """Write until cancelled."""
        await all_synced(self._services, self._pods, self._endpoints)
        if self._slices is not None:
            await self._slices.synced.wait()
            self._slices.subscribe(self._on_slice)
        self._services.subscribe(self._on_service)
        self._pods.subscribe(self._on_pod)
        self._endpoints.subscribe(self._on_endpoints)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._queue.run())

    def _on_service(self, old: Service | None, new: Service | None) -> None:
        key = key_of(changed(old, new))
        services = self._by_namespace.setdefault(key.namespace, {})
        if new is None:
            services.pop(key.name, None)
            if not services:
                del self._by_namespace[key.namespace]
        else:
            services[key.name] = new
        self._queue.add(key)

    def _on_pod(self, old: Pod | None, new: Pod | None) -> None:
        services = self._by_namespace.get(key_of(changed(old, new)).namespace)
        if not services or (old and new and _shown(old) == _shown(new)):
            return
        for service in services.values():
            if any(pod is not None and selects(service, pod) for pod in (old, new)):
                self._queue.add(key_of(service))

    def _on_endpoints(self, old: Endpoints | None, new: Endpoints | None) -> None:
        key = key_of(changed(old, new))
        if key.name in self._by_namespace.get(key.namespace, {}):
            self._queue.add(key)

    def _on_slice(self, old: EndpointSlice | None, new: EndpointSlice | None) -> None:
        item = changed(old, new)
        name = _service_of(item)
        if name:
            self._queue.add(Key(key_of(item).namespace, name))

    async def _write(self, key: Key) -> None:
        service = self._services.get(key.name, key.namespace)
        if service is not None and not (service.spec and service.spec.selector):
            return  # somebody else's to write
        wanted_slices: list[Object] = []
        if service is None:
            await self._client.delete_if_present(_path("v1", "endpoints", key))
        else:
            behind = backends(service, self._pods.items())
            wanted = endpoints(service, behind)
            held = self._endpoints.get(key.name, key.namespace)
            await self._put(_path("v1", "endpoints", key), wanted, held, ("subsets",))
            wanted_slices = slices(service, behind)
        if self._slices is not None:
            await self._write_slices(key, wanted_slices)

    async def _write_slices(self, key: Key, wanted: list[Object]) -> None:
        assert self._slices is not None
        held = {
            key_of(endpoint_slice).name: endpoint_slice
            for endpoint_slice in self._slices.items()
            if key_of(endpoint_slice).namespace == key.namespace
            and _service_of(endpoint_slice) == key.name
        }
        for item in wanted:
            place = Key(key.namespace, item["metadata"]["name"])
            path = _path("discovery.k8s.io/v1", "endpointslices", place)
            await self._put(path, item, held.pop(place.name, None), ("endpoints", "ports"))
        for name in held:
            place = Key(key.namespace, name)
            await self._client.delete_if_present(
                _path("discovery.k8s.io/v1", "endpointslices", place)
            )

    async def _put(
        self, path: str, wanted: Object, held: HasMetadata | None, fields: tuple[str, ...]
    ) -> None:
        # Refused where the namespace is being deleted (403) or is gone (404).
        with suppress(Forbidden, NotFound):
            if held is None:
                await self._client.raw("POST", path.rpartition("/")[0], body=wanted)
                return
            present: Object = msgspec.to_builtins(held)
            if all((present.get(name) or []) == (wanted.get(name) or []) for name in fields):
                return
            version = held.metadata.resourceVersion if held.metadata else None
            metadata = {**wanted["metadata"], "resourceVersion": version}
            await self._client.raw("PUT", path, body={**wanted, "metadata": metadata})


def _shown(pod: Pod) -> Any:
    """Return the parts of a pod that its services show."""
    metadata, spec, status = pod.metadata, pod.spec, pod.status
    return (
        metadata and (metadata.labels, metadata.uid, metadata.deletionTimestamp is None),
        spec and spec.nodeName,
        status and (status.podIP, status.phase),
        is_ready(pod),
    )


def _service_of(item: EndpointSlice) -> str:
    """The service whose slice this is, if it is one of ours."""
    labels = (item.metadata and item.metadata.labels) or {}
    return labels.get(SERVICE_NAME, "") if labels.get(MANAGED_BY) == MANAGER else ""


def _path(version: str, plural: str, key: Key) -> str:
    root = "api" if version == "v1" else "apis"
    return f"{root}/{version}/namespaces/{key.namespace}/{plural}/{key.name}"
