"""Writes the Endpoints and EndpointSlices of services that select pods.

The addresses behind a service are pure functions, after kube-controller-manager v1.33,
pkg/controller/endpoint and staging endpointslice/reconciler.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
from lightkube.models.core_v1 import ServicePort
from lightkube.resources.core_v1 import Endpoints, Pod, Service
from lightkube.resources.discovery_v1 import EndpointSlice

from unbroken.kube.cache import HasMetadata, Key, changed, key_of
from unbroken.kube.client import KubeClient, Object
from unbroken.kube.conditions import is_ready
from unbroken.kube.errors import Forbidden, NotFound
from unbroken.kube.informer import Informers, all_synced
from unbroken.kube.workqueue import WorkQueue
from unbroken.spec.keys import OWN_GROUP

SERVICE_NAME = "kubernetes.io/service-name"
MANAGED_BY = "endpointslice.kubernetes.io/managed-by"
MANAGER = f"endpointslice-controller.{OWN_GROUP}"
HEADLESS = "service.kubernetes.io/headless"

SLICE_SIZE = 100
"""Endpoints a slice (kube-controller-manager --max-endpoints-per-slice)."""

Port = tuple[str, str, int]
"""Name, protocol, number."""


@dataclass(frozen=True, slots=True)
class Backend:
    """One pod behind a service."""

    name: str
    uid: str
    address: str
    node: str
    hostname: str
    is_ready: bool
    is_terminating: bool
    ports: tuple[Port, ...]


def selects(service: Service, pod: Pod) -> bool:
    """The pod is behind the service; services without selector have no pods."""
    selector = (service.spec and service.spec.selector) or {}
    labels = (pod.metadata and pod.metadata.labels) or {}
    return bool(selector) and all(labels.get(key) == value for key, value in selector.items())


def backends(service: Service, pods: Iterable[Pod]) -> list[Backend]:
    """Pods that the service leads to, in order of their names."""
    assert service.spec is not None
    always = bool(service.spec.publishNotReadyAddresses)
    result = [
        _backend(service, pod, always)
        for pod in pods
        if selects(service, pod)
        and pod.status
        and pod.status.podIP
        and pod.status.phase not in ("Succeeded", "Failed")
    ]
    return sorted(result, key=lambda backend: backend.name)


def _backend(service: Service, pod: Pod, always: bool) -> Backend:
    spec, status, metadata = pod.spec, pod.status, pod.metadata
    assert service.spec is not None
    assert spec is not None
    assert status is not None
    assert metadata is not None
    ready = is_ready(pod)
    terminating = metadata.deletionTimestamp is not None
    in_domain = bool(spec.hostname) and spec.subdomain == key_of(service).name
    return Backend(
        name=metadata.name or "",
        uid=metadata.uid or "",
        address=status.podIP or "",
        node=spec.nodeName or "",
        hostname=(spec.hostname or "") if in_domain else "",
        is_ready=always or (ready and not terminating),
        is_terminating=terminating,
        ports=_ports(service.spec.ports or (), pod),
    )


def _ports(wanted: Sequence[ServicePort], pod: Pod) -> tuple[Port, ...]:
    result = ((service_port, _target(service_port, pod)) for service_port in wanted)
    return tuple(
        (service_port.name or "", service_port.protocol or "TCP", number)
        for service_port, number in result
        if number
    )


def _target(port: ServicePort, pod: Pod) -> int:
    """The pod's port that a service port leads to; 0: it has none of that name."""
    target = port.targetPort
    if not target:
        return port.port
    if isinstance(target, int):
        return target
    for container in (pod.spec and pod.spec.containers) or ():
        for container_port in container.ports or ():
            if container_port.name == target and (container_port.protocol or "TCP") == (
                port.protocol or "TCP"
            ):
                return container_port.containerPort
    return 0


def endpoints(service: Service, behind: Sequence[Backend]) -> Object:
    """The Endpoints object, without what the server fills in.

    Pods that are going are left out, unless the service wants pods that are not ready.
    """
    assert service.spec is not None
    groups: defaultdict[tuple[Port, ...], tuple[list[Object], list[Object]]] = defaultdict(
        lambda: ([], [])
    )
    namespace, name = key_of(service)
    for backend in behind:
        if backend.is_terminating and not service.spec.publishNotReadyAddresses:
            continue
        address: Object = {
            "ip": backend.address,
            "targetRef": _reference(backend, namespace),
            **_place(backend),
        }
        groups[backend.ports][0 if backend.is_ready else 1].append(address)
    subsets = []
    for ports, (ready, other) in sorted(groups.items()):
        subset: Object = {}
        if ready:
            subset["addresses"] = ready
        if other:
            subset["notReadyAddresses"] = other
        if ports:
            subset["ports"] = [_port(port) for port in ports]
        subsets.append(subset)
    return {
        "apiVersion": "v1",
        "kind": "Endpoints",
        "metadata": {"name": name, "namespace": namespace, "labels": _labels(service)},
        **({"subsets": subsets} if subsets else {}),
    }


def slices(service: Service, behind: Sequence[Backend]) -> list[Object]:
    """The EndpointSlices, named after the service and numbered."""
    groups: defaultdict[tuple[Port, ...], list[Backend]] = defaultdict(list)
    for backend in behind:
        groups[backend.ports].append(backend)
    result: list[Object] = []
    for ports, members in sorted(groups.items()) or [((), [])]:
        for start in range(0, max(1, len(members)), SLICE_SIZE):
            part = members[start : start + SLICE_SIZE]
            result.append(_slice(service, len(result), ports, part))
    return result


def _slice(
    service: Service, number: int, ports: Sequence[Port], members: Sequence[Backend]
) -> Object:
    namespace, name = key_of(service)
    assert service.metadata is not None
    owner: Object = {
        "apiVersion": "v1",
        "kind": "Service",
        "name": name,
        "uid": service.metadata.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": f"{name}-{number}",
            "namespace": namespace,
            "labels": {**_labels(service), SERVICE_NAME: name, MANAGED_BY: MANAGER},
            "ownerReferences": [owner],
        },
        "addressType": "IPv4",
        "endpoints": [_endpoint(member, namespace) for member in members],
        "ports": [_port(port) for port in ports],
    }


def _endpoint(backend: Backend, namespace: str) -> Object:
    return {
        "addresses": [backend.address],
        "conditions": {
            "ready": backend.is_ready,
            "serving": backend.is_ready,
            "terminating": backend.is_terminating,
        },
        "targetRef": _reference(backend, namespace),
        **_place(backend),
    }


def _place(backend: Backend) -> Object:
    # Empty names are refused.
    named = {"nodeName": backend.node, "hostname": backend.hostname}
    return {field: name for field, name in named.items() if name}


def _labels(service: Service) -> Mapping[str, str]:
    labels = dict((service.metadata and service.metadata.labels) or {})
    if service.spec and service.spec.clusterIP == "None":
        labels[HEADLESS] = ""
    return labels


def _port(port: Port) -> Object:
    name, protocol, number = port
    return {**({"name": name} if name else {}), "port": number, "protocol": protocol}


def _reference(backend: Backend, namespace: str) -> Object:
    return {"kind": "Pod", "namespace": namespace, "name": backend.name, "uid": backend.uid}


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
