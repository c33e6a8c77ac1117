"""The addresses behind a service, as Endpoints and as EndpointSlices.  Pure.

After kube-controller-manager v1.33, pkg/controller/endpoint and staging endpointslice/reconciler.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lightkube.models.core_v1 import ServicePort
from lightkube.resources.core_v1 import Pod, Service

from unbroken.kube.cache import key_of
from unbroken.kube.client import Object
from unbroken.kube.conditions import is_ready
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
