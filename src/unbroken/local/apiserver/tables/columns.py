"""Tables: what `kubectl get` shows of each built-in kind.

Columns and cells are those of pkg/printers/internalversion/printers.go of Kubernetes v1.33.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from unbroken.local.apiserver.http.status import Object
from unbroken.local.apiserver.kinds.kinds import Column, Kind, Version, to_storage
from unbroken.local.apiserver.validation.fields import at

from . import cells
from .cells import NONE, UNSET, age

Cell = Callable[[Object, float], Any]


def table(
    kind: Kind,
    version: Version,
    contents: Iterable[Object],
    now: float,
    include_object: str,
    list_meta: Object,
) -> Object:
    """The `meta.k8s.io/v1` Table of objects; include_object: Metadata, None or Object."""
    columns = version.columns or DEFAULT_COLUMNS
    rows: list[Object] = []
    for content in contents:
        stored = to_storage(kind, content)
        row: Object = {"cells": [column.cell(stored, now) for column in columns]}
        if kind.resource == "pods":
            conditions = cells.row_conditions(content)
            row |= {"conditions": conditions} if conditions else {}
        if include_object == "Object":
            row["object"] = content
        else:
            row["object"] = partial_metadata(content) if include_object != "None" else None
        rows.append(row)
    definitions = [
        {
            "name": column.name,
            "type": column.type,
            "format": column.format,
            "description": column.description,
            "priority": column.priority,
        }
        for column in columns
    ]
    return {
        "kind": "Table",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": list_meta,
        "columnDefinitions": definitions,
        "rows": rows,
    }


def partial_metadata(content: Object) -> Object:
    """An object with nothing but its metadata."""
    meta = content["metadata"]
    return {"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": meta}


def _text(name: str, path: str, *, absent: str = "", wide: bool = False) -> Column:
    return _column(name, lambda content, _: at(content, path) or absent, wide=wide)


def _number(name: str, path: str) -> Column:
    return _column(name, lambda content, _: at(content, path) or 0, type_="integer")


def _length(name: str, *paths: str) -> Column:
    def count(content: Object, _: float) -> int:
        return sum(len(at(content, path) or ()) for path in paths)

    return _column(name, count)


def _column(name: str, cell: Cell, *, wide: bool = False, type_: str = "string") -> Column:
    return Column(name, cell, type=type_, priority=int(wide))


def _of(name: str, cell: Callable[[Object], Any], *, wide: bool = False) -> Column:
    return _column(name, lambda content, _: cell(content), wide=wide)


NAME = Column("Name", lambda content, _: content["metadata"].get("name", ""), format="name")
AGE = _column("Age", lambda content, now: age(now, content["metadata"].get("creationTimestamp")))
CREATED = _column(
    "Created At", lambda content, _: content["metadata"].get("creationTimestamp"), type_="date"
)
DEFAULT_COLUMNS = (NAME, CREATED)
"""Columns of a kind that has none of its own."""


_PODS = (
    NAME,
    _of("Ready", cells.pod_ready),
    _of("Status", lambda pod: cells.pod_summary(pod).status),
    _column("Restarts", lambda pod, now: cells.pod_summary(pod).restarts_text(now)),
    AGE,
    _of("IP", cells.pod_ip, wide=True),
    _text("Node", "spec.nodeName", absent=NONE, wide=True),
    _text("Nominated Node", "status.nominatedNodeName", absent=NONE, wide=True),
    _of("Readiness Gates", cells.readiness_gates, wide=True),
)


_NODES = (
    NAME,
    _of("Status", cells.node_status),
    _of("Roles", cells.node_roles),
    AGE,
    _text("Version", "status.nodeInfo.kubeletVersion"),
    _of("Internal-IP", cells.node_address("InternalIP"), wide=True),
    _of("External-IP", cells.node_address("ExternalIP"), wide=True),
    _text("OS-Image", "status.nodeInfo.osImage", absent="<unknown>", wide=True),
    _text("Kernel-Version", "status.nodeInfo.kernelVersion", absent="<unknown>", wide=True),
    _text(
        "Container-Runtime",
        "status.nodeInfo.containerRuntimeVersion",
        absent="<unknown>",
        wide=True,
    ),
)


_EVENTS = (
    _column("Last Seen", cells.last_seen),
    _text("Type", "type"),
    _text("Reason", "reason"),
    _of("Object", cells.event_object),
    _text("Subobject", "involvedObject.fieldPath", wide=True),
    _of("Source", cells.event_source, wide=True),
    _of("Message", lambda event: (event.get("message") or "").strip()),
    _column("First Seen", cells.first_seen, wide=True),
    _of("Count", cells.event_count, wide=True),
    Column("Name", NAME.cell, format="name", priority=1),
)


_STORAGE = (
    _of("StorageClass", cells.storage_class),
    _text("VolumeAttributesClass", "spec.volumeAttributesClassName", absent=UNSET),
)
_VOLUME_MODE = _text("VolumeMode", "spec.volumeMode", absent=UNSET, wide=True)


_BINDINGS = (
    NAME,
    _of("Role", lambda c: f"{at(c, 'roleRef.kind')}/{at(c, 'roleRef.name')}"),
    AGE,
    _of("Users", cells.subjects("User"), wide=True),
    _of("Groups", cells.subjects("Group"), wide=True),
    _of("ServiceAccounts", cells.subjects("ServiceAccount"), wide=True),
)

COLUMNS: Mapping[str, tuple[Column, ...]] = {
    "namespaces": (NAME, _text("Status", "status.phase"), AGE),
    "pods": _PODS,
    "nodes": _NODES,
    "events": _EVENTS,
    "events.events.k8s.io": _EVENTS,
    "configmaps": (NAME, _length("Data", "data", "binaryData"), AGE),
    "secrets": (NAME, _text("Type", "type"), _length("Data", "data"), AGE),
    "services": (
        NAME,
        _text("Type", "spec.type"),
        _of("Cluster-IP", cells.cluster_ip),
        _of("External-IP", cells.external_ip),
        _of("Port(s)", cells.service_ports),
        AGE,
        _of("Selector", lambda content: cells.labels_text(at(content, "spec.selector")), wide=True),
    ),
    "endpoints": (NAME, _of("Endpoints", cells.endpoints), AGE),
    "serviceaccounts": (NAME, _length("Secrets", "secrets"), AGE),
    "persistentvolumeclaims": (
        NAME,
        _of("Status", cells.phase),
        _text("Volume", "spec.volumeName"),
        _of("Capacity", lambda c: cells.bound("status.capacity.storage")(c) or ""),
        _of("Access Modes", lambda c: cells.modes(cells.bound("status.accessModes")(c))),
        *_STORAGE,
        AGE,
        _VOLUME_MODE,
    ),
    "persistentvolumes": (
        NAME,
        _text("Capacity", "spec.capacity.storage"),
        _of("Access Modes", lambda content: cells.modes(at(content, "spec.accessModes"))),
        _text("Reclaim Policy", "spec.persistentVolumeReclaimPolicy"),
        _of("Status", cells.phase),
        _of("Claim", cells.claim),
        *_STORAGE,
        _text("Reason", "status.reason"),
        AGE,
        _VOLUME_MODE,
    ),
    "endpointslices.discovery.k8s.io": (
        NAME,
        _text("AddressType", "addressType"),
        _of("Ports", cells.slice_ports),
        _of("Endpoints", cells.slice_addresses),
        AGE,
    ),
    "leases.coordination.k8s.io": (NAME, _text("Holder", "spec.holderIdentity"), AGE),
    "priorityclasses.scheduling.k8s.io": (
        NAME,
        _number("Value", "value"),
        _column("Global-Default", lambda c, _: bool(c.get("globalDefault")), type_="boolean"),
        AGE,
        _text("PreemptionPolicy", "preemptionPolicy"),
    ),
    "storageclasses.storage.k8s.io": (
        Column("Name", lambda content, _: cells.storage_class_name(content), format="name"),
        _text("Provisioner", "provisioner"),
        _text("ReclaimPolicy", "reclaimPolicy", absent="Delete"),
        _text("VolumeBindingMode", "volumeBindingMode", absent="Immediate"),
        _of("AllowVolumeExpansion", lambda content: bool(content.get("allowVolumeExpansion"))),
        AGE,
    ),
    "poddisruptionbudgets.policy": (
        NAME,
        _of("Min Available", cells.amount("spec.minAvailable")),
        _of("Max Unavailable", cells.amount("spec.maxUnavailable")),
        _number("Allowed Disruptions", "status.disruptionsAllowed"),
        AGE,
    ),
    "jobs.batch": (
        NAME,
        _of("Status", cells.job_status),
        _of("Completions", cells.completions),
        _column("Duration", cells.job_duration),
        AGE,
        _of("Containers", lambda job: cells.containers(job, "name"), wide=True),
        _of("Images", lambda job: cells.containers(job, "image"), wide=True),
        _of(
            "Selector",
            lambda job: cells.selector_text(at(job, "spec.selector")) or NONE,
            wide=True,
        ),
    ),
    "rolebindings.rbac.authorization.k8s.io": _BINDINGS,
    "clusterrolebindings.rbac.authorization.k8s.io": _BINDINGS,
}
"""Columns of built-in kinds by resource; the others have DEFAULT_COLUMNS."""
