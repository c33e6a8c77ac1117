"""Tables of the built-in kinds: what `kubectl get` shows, computed by the server.

Source of columns and of the summing-up of pods and nodes: kubernetes v1.33,
pkg/printers/internalversion/printers.go.  Columns of custom kinds are in `custom_columns`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from . import podcolumns
from .custom_columns import age
from .durations import human_duration, seconds_of
from .kinds import Column, Kind, Version
from .status import Object

NONE = "<none>"
UNKNOWN = "<unknown>"
Cell = Callable[[Object, float], Any]


def partial_metadata(content: Object) -> Object:
    """The object as `PartialObjectMetadata`."""
    return {
        "kind": "PartialObjectMetadata",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": content["metadata"],
    }


def table(
    kind: Kind,
    version: Version,
    contents: Iterable[Object],
    now: float,
    include_object: str,
    list_meta: Object,
) -> Object:
    """The objects as a `meta.k8s.io/v1` Table; `include_object`: None, Metadata or Object."""
    columns = version.columns or DEFAULT
    rows = []
    for content in contents:
        row: Object = {"cells": [column.cell(content, now) for column in columns]}
        if kind.resource == "pods" and podcolumns.row_conditions(content):
            row["conditions"] = podcolumns.row_conditions(content)
        if include_object == "Metadata":
            row["object"] = partial_metadata(content)
        elif include_object == "Object":
            row["object"] = content
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


def at(content: Any, path: str) -> Any:
    """The value at a dotted path; None where there is none."""
    for part in path.split("."):
        content = content.get(part) if isinstance(content, dict) else None
    return content


def _value(path: str, absent: Any = "") -> Cell:
    def cell(content: Object, _: float) -> Any:
        found = at(content, path)
        return absent if found in (None, "") else found

    return cell


def _count(*paths: str) -> Cell:
    return lambda content, _: sum(len(at(content, path) or ()) for path in paths)


def _age(path: str = "metadata.creationTimestamp") -> Cell:
    return lambda content, now: age(at(content, path), now) or UNKNOWN


NAME = Column("Name", _value("metadata.name"), format="name", description="Name of the object.")
AGE = Column("Age", _age(), description="Time since the object was created.")
DEFAULT = (NAME, Column("Age", _age(), description="Time since the object was created."))


def _shown(name: str, cell: Cell, type_: str = "string") -> Column:
    return Column(name, cell, type_)


def _wide(name: str, cell: Cell, type_: str = "string") -> Column:
    return Column(name, cell, type_, priority=1)


def labels_text(labels: Any) -> str:
    """Labels or a selector on one line."""
    if not isinstance(labels, dict) or not labels:
        return NONE
    if "matchLabels" in labels or "matchExpressions" in labels:
        parts = [
            f"{key}={value}" for key, value in sorted((labels.get("matchLabels") or {}).items())
        ]
        parts += [_expression(item) for item in labels.get("matchExpressions") or []]
        return ",".join(parts) or NONE
    return ",".join(f"{key}={value}" for key, value in sorted(labels.items()))


def _expression(item: Object) -> str:
    key, values = item.get("key", ""), ",".join(item.get("values") or [])
    match item.get("operator"):
        case "In":
            return f"{key} in ({values})"
        case "NotIn":
            return f"{key} notin ({values})"
        case "DoesNotExist":
            return f"!{key}"
        case _:
            return str(key)


# --- Pods ---------------------------------------------------------------------------------------


def _pod(show: Callable[[podcolumns.Summary, float], Any]) -> Cell:
    return lambda pod, now: show(podcolumns.summary(pod), now)


def _pod_ip(pod: Object, _: float) -> str:
    addresses = at(pod, "status.podIPs") or []
    return str(addresses[0]["ip"]) if addresses else str(at(pod, "status.podIP") or NONE)


POD = (
    NAME,
    _shown("Ready", _pod(lambda pod, _: f"{pod.ready}/{pod.total}")),
    _shown("Status", _pod(lambda pod, _: pod.status)),
    _shown("Restarts", _pod(lambda pod, now: pod.restarts_text(now))),
    AGE,
    _wide("IP", _pod_ip),
    _wide("Node", _value("spec.nodeName", NONE)),
    _wide("Nominated Node", _value("status.nominatedNodeName", NONE)),
    _wide("Readiness Gates", lambda pod, _: podcolumns.readiness_gates(pod)),
)

# --- Nodes --------------------------------------------------------------------------------------

ROLE = "node-role.kubernetes.io/"


def _node_status(node: Object, _: float) -> str:
    words: list[str] = []
    for condition in at(node, "status.conditions") or []:
        if condition["type"] == "Ready":
            words = {"True": ["Ready"], "False": ["NotReady"]}.get(condition["status"], [])
    words = words or ["Unknown"]
    if at(node, "spec.unschedulable"):
        words.append("SchedulingDisabled")
    return ",".join(words)


def _node_roles(node: Object, _: float) -> str:
    roles = set()
    for key, value in (at(node, "metadata.labels") or {}).items():
        if key.startswith(ROLE) and len(key) > len(ROLE):
            roles.add(key[len(ROLE) :])
        elif key == "kubernetes.io/role" and value:
            roles.add(value)
    return ",".join(sorted(roles)) or NONE


def _address(kind: str) -> Cell:
    def cell(node: Object, _: float) -> str:
        addresses = at(node, "status.addresses") or []
        return next((str(a["address"]) for a in addresses if a["type"] == kind), NONE)

    return cell


NODE = (
    NAME,
    _shown("Status", _node_status),
    _shown("Roles", _node_roles),
    AGE,
    _shown("Version", _value("status.nodeInfo.kubeletVersion")),
    _wide("Internal-IP", _address("InternalIP")),
    _wide("External-IP", _address("ExternalIP")),
    _wide("OS-Image", _value("status.nodeInfo.osImage", UNKNOWN)),
    _wide("Kernel-Version", _value("status.nodeInfo.kernelVersion", UNKNOWN)),
    _wide("Container-Runtime", _value("status.nodeInfo.containerRuntimeVersion", UNKNOWN)),
)

# --- Others -------------------------------------------------------------------------------------


def _event_last_seen(event: Object, now: float) -> str:
    series = at(event, "series.lastObservedTime")
    first = at(event, "firstTimestamp") or at(event, "eventTime")
    last = series or at(event, "lastTimestamp") or first
    shown = age(last, now) or UNKNOWN
    count = at(event, "series.count") or event.get("count") or 1
    if count > 1 and first:
        return f"{shown} (x{count} over {age(first, now)})"
    return shown


def _event_object(event: Object, _: float) -> str:
    about = event.get("involvedObject") or event.get("regarding") or {}
    return f"{str(about.get('kind', '')).lower()}/{about.get('name', '')}"


def _event_source(event: Object, _: float) -> str:
    source = event.get("source") or event.get("deprecatedSource") or {}
    component = source.get("component") or event.get("reportingComponent") or ""
    return ", ".join(filter(None, [component, source.get("host", "")]))


EVENT = (
    _shown("Last Seen", _event_last_seen),
    _shown("Type", _value("type")),
    _shown("Reason", _value("reason")),
    _shown("Object", _event_object),
    _wide("Subobject", _value("involvedObject.fieldPath")),
    _wide("Source", _event_source),
    _shown(
        "Message",
        lambda event, _: str(event.get("message") or event.get("note") or "").strip(),
    ),
    _wide("First Seen", _age("firstTimestamp")),
    _wide("Count", _value("count", 1)),
    Column("Name", _value("metadata.name"), priority=1, format="name"),
)


def _service_ports(service: Object, _: float) -> str:
    texts = []
    for port in at(service, "spec.ports") or []:
        node = f":{port['nodePort']}" if port.get("nodePort") else ""
        texts.append(f"{port.get('port')}{node}/{port.get('protocol', 'TCP')}")
    return ",".join(texts) or NONE


def _external(service: Object, _: float) -> str:
    spec = service.get("spec") or {}
    if spec.get("type") == "ExternalName":
        return str(spec.get("externalName") or "")
    given = at(service, "status.loadBalancer.ingress") or []
    addresses = [item.get("ip") or item.get("hostname") for item in given]
    addresses += spec.get("externalIPs") or []
    if not addresses and spec.get("type") == "LoadBalancer":
        return "<pending>"
    return ",".join(filter(None, addresses)) or NONE


def _endpoints(content: Object, _: float) -> str:
    texts = []
    for subset in content.get("subsets") or []:
        ports = [port.get("port") for port in subset.get("ports") or [{}]]
        for address in subset.get("addresses") or []:
            texts += [f"{address['ip']}:{port}" if port else address["ip"] for port in ports]
    return _first(texts, 3)


def _first(texts: list[str], most: int) -> str:
    if not texts:
        return NONE
    more = f" + {len(texts) - most} more..." if len(texts) > most else ""
    return ",".join(texts[:most]) + more


def _slice_ports(content: Object, _: float) -> str:
    ports = [str(port.get("port") or "*") for port in content.get("ports") or []]
    return _first(ports, 3) if ports else "<unset>"


def _slice_endpoints(content: Object, _: float) -> str:
    found = [a for end in content.get("endpoints") or [] for a in end.get("addresses") or []]
    return _first(found, 3) if found else "<unset>"


MODES = {
    "ReadWriteOnce": "RWO",
    "ReadOnlyMany": "ROX",
    "ReadWriteMany": "RWX",
    "ReadWriteOncePod": "RWOP",
}


def _modes(path: str) -> Cell:
    return lambda content, _: ",".join(MODES.get(m, m) for m in at(content, path) or [])


def _when_bound(path: str, absent: str = "") -> Cell:
    value = _value(path, absent)
    return lambda claim, now: value(claim, now) if at(claim, "spec.volumeName") else ""


def _phase(content: Object, _: float) -> str:
    if at(content, "metadata.deletionTimestamp"):
        return "Terminating"
    return str(at(content, "status.phase") or "")


def _claim_of(volume: Object, _: float) -> str:
    claim = at(volume, "spec.claimRef") or {}
    return f"{claim.get('namespace', '')}/{claim.get('name', '')}" if claim else ""


def _ratio(done: str, wanted: str, otherwise: int = 0) -> Cell:
    def cell(content: Object, _: float) -> str:
        total = at(content, wanted)
        return f"{at(content, done) or 0}/{otherwise if total is None else total}"

    return cell


def _number(path: str) -> Cell:
    return _value(path, 0)


def _template(field: str) -> Cell:
    def cell(content: Object, _: float) -> str:
        spec = content.get("spec") or {}
        template = spec.get("template") or at(spec, "jobTemplate.spec.template") or {}
        return ",".join(str(c.get(field, "")) for c in at(template, "spec.containers") or [])

    return cell


CONTAINERS = (_wide("Containers", _template("name")), _wide("Images", _template("image")))
SELECTOR = _wide("Selector", lambda content, _: labels_text(at(content, "spec.selector")))


def _job_status(job: Object, _: float) -> str:
    true = {c["type"] for c in at(job, "status.conditions") or [] if c["status"] == "True"}
    for kind in ("Complete", "Failed"):
        if kind in true:
            return kind
    if at(job, "metadata.deletionTimestamp"):
        return "Terminating"
    return "Suspended" if "Suspended" in true else "Running"


def _job_duration(job: Object, now: float) -> str:
    start, end = seconds_of(at(job, "status.startTime")), at(job, "status.completionTime")
    return "" if start is None else human_duration((seconds_of(end) or now) - start)


def _subjects(kind: str) -> Cell:
    def cell(binding: Object, _: float) -> str:
        found = [s for s in binding.get("subjects") or [] if s.get("kind") == kind]
        return ", ".join(
            f"{s['namespace']}/{s['name']}" if s.get("namespace") else str(s.get("name"))
            for s in found
        )

    return cell


def _role(binding: Object, _: float) -> str:
    return f"{at(binding, 'roleRef.kind')}/{at(binding, 'roleRef.name')}"


ROLE_COLUMNS = (
    NAME,
    Column("Created At", _value("metadata.creationTimestamp"), format="date-time"),
)
BINDING = (
    NAME,
    _shown("Role", _role),
    AGE,
    _wide("Users", _subjects("User")),
    _wide("Groups", _subjects("Group")),
    _wide("ServiceAccounts", _subjects("ServiceAccount")),
)
RBAC = "rbac.authorization.k8s.io"

COLUMNS: dict[str, tuple[Column, ...]] = {
    "pods": POD,
    "nodes": NODE,
    "events": EVENT,
    "events.events.k8s.io": EVENT,
    "namespaces": (NAME, _shown("Status", _value("status.phase")), AGE),
    "configmaps": (NAME, _shown("Data", _count("data", "binaryData")), AGE),
    "secrets": (
        NAME,
        _shown("Type", _value("type")),
        _shown("Data", _count("data"), "string"),
        AGE,
    ),
    "serviceaccounts": (NAME, _shown("Secrets", _count("secrets")), AGE),
    "services": (
        NAME,
        _shown("Type", _value("spec.type")),
        _shown("Cluster-IP", _value("spec.clusterIP", NONE)),
        _shown("External-IP", _external),
        _shown("Port(s)", _service_ports),
        AGE,
        SELECTOR,
    ),
    "endpoints": (NAME, _shown("Endpoints", _endpoints), AGE),
    "endpointslices.discovery.k8s.io": (
        NAME,
        _shown("AddressType", _value("addressType")),
        _shown("Ports", _slice_ports),
        _shown("Endpoints", _slice_endpoints),
        AGE,
    ),
    "persistentvolumeclaims": (
        NAME,
        _shown("Status", _phase),
        _shown("Volume", _value("spec.volumeName")),
        _shown("Capacity", _when_bound("status.capacity.storage")),
        _shown("Access Modes", _modes("status.accessModes")),
        _shown("StorageClass", _value("spec.storageClassName")),
        _shown("VolumeAttributesClass", _value("spec.volumeAttributesClassName", "<unset>")),
        AGE,
        _wide("VolumeMode", _value("spec.volumeMode", "<unset>")),
    ),
    "persistentvolumes": (
        NAME,
        _shown("Capacity", _value("spec.capacity.storage")),
        _shown("Access Modes", _modes("spec.accessModes")),
        _shown("Reclaim Policy", _value("spec.persistentVolumeReclaimPolicy")),
        _shown("Status", _phase),
        _shown("Claim", _claim_of),
        _shown("StorageClass", _value("spec.storageClassName")),
        _shown("VolumeAttributesClass", _value("spec.volumeAttributesClassName", "<unset>")),
        _shown("Reason", _value("status.reason")),
        AGE,
        _wide("VolumeMode", _value("spec.volumeMode", "<unset>")),
    ),
    "leases.coordination.k8s.io": (NAME, _shown("Holder", _value("spec.holderIdentity")), AGE),
    "priorityclasses.scheduling.k8s.io": (
        NAME,
        _shown("Value", _number("value"), "integer"),
        _shown("Global-Default", _value("globalDefault", False), "boolean"),
        AGE,
        _shown("PreemptionPolicy", _value("preemptionPolicy")),
    ),
    "deployments.apps": (
        NAME,
        _shown("Ready", _ratio("status.readyReplicas", "spec.replicas")),
        _shown("Up-to-date", _number("status.updatedReplicas"), "integer"),
        _shown("Available", _number("status.availableReplicas"), "integer"),
        AGE,
        *CONTAINERS,
        SELECTOR,
    ),
    "replicasets.apps": (
        NAME,
        _shown("Desired", _number("spec.replicas"), "integer"),
        _shown("Current", _number("status.replicas"), "integer"),
        _shown("Ready", _number("status.readyReplicas"), "integer"),
        AGE,
        *CONTAINERS,
        SELECTOR,
    ),
    "replicationcontrollers": (
        NAME,
        _shown("Desired", _number("spec.replicas"), "integer"),
        _shown("Current", _number("status.replicas"), "integer"),
        _shown("Ready", _number("status.readyReplicas"), "integer"),
        AGE,
        *CONTAINERS,
        SELECTOR,
    ),
    "statefulsets.apps": (
        NAME,
        _shown("Ready", _ratio("status.readyReplicas", "spec.replicas")),
        AGE,
        *CONTAINERS,
    ),
    "daemonsets.apps": (
        NAME,
        _shown("Desired", _number("status.desiredNumberScheduled"), "integer"),
        _shown("Current", _number("status.currentNumberScheduled"), "integer"),
        _shown("Ready", _number("status.numberReady"), "integer"),
        _shown("Up-to-date", _number("status.updatedNumberScheduled"), "integer"),
        _shown("Available", _number("status.numberAvailable"), "integer"),
        _shown(
            "Node Selector",
            lambda content, _: labels_text(at(content, "spec.template.spec.nodeSelector")),
        ),
        AGE,
        *CONTAINERS,
        SELECTOR,
    ),
    "jobs.batch": (
        NAME,
        _shown("Status", _job_status),
        _shown("Completions", _ratio("status.succeeded", "spec.completions", 1)),
        _shown("Duration", _job_duration),
        AGE,
        *CONTAINERS,
        SELECTOR,
    ),
    "cronjobs.batch": (
        NAME,
        _shown("Schedule", _value("spec.schedule")),
        _shown("Timezone", _value("spec.timeZone", NONE)),
        _shown("Suspend", lambda content, _: str(bool(at(content, "spec.suspend")))),
        _shown("Active", _count("status.active"), "integer"),
        _shown("Last Schedule", lambda c, now: age(at(c, "status.lastScheduleTime"), now) or NONE),
        AGE,
        *CONTAINERS,
    ),
    "networkpolicies.networking.k8s.io": (
        NAME,
        _shown("Pod-Selector", lambda content, _: labels_text(at(content, "spec.podSelector"))),
        AGE,
    ),
    "poddisruptionbudgets.policy": (
        NAME,
        _shown("Min Available", _value("spec.minAvailable", "N/A")),
        _shown("Max Unavailable", _value("spec.maxUnavailable", "N/A")),
        _shown("Allowed Disruptions", _number("status.disruptionsAllowed"), "integer"),
        AGE,
    ),
    "storageclasses.storage.k8s.io": (
        NAME,
        _shown("Provisioner", _value("provisioner")),
        _shown("ReclaimPolicy", _value("reclaimPolicy", "Delete")),
        _shown("VolumeBindingMode", _value("volumeBindingMode", "<unset>")),
        _shown("AllowVolumeExpansion", _value("allowVolumeExpansion", False)),
        AGE,
    ),
    f"roles.{RBAC}": ROLE_COLUMNS,
    f"clusterroles.{RBAC}": ROLE_COLUMNS,
    f"rolebindings.{RBAC}": BINDING,
    f"clusterrolebindings.{RBAC}": BINDING,
    "customresourcedefinitions.apiextensions.k8s.io": ROLE_COLUMNS,
}
"""By resource; other kinds show name and age."""
