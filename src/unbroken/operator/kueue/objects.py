"""Kueue's objects: a job's Workload as it is written and read, in both versions of the API.  Pure.

Fields and constants are those of kueue v0.16 (apis/kueue/v1beta1 and v1beta2, workload_types.go,
resourceflavor_types.go, topology_types.go).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from unbroken.core.job.kueue import (
    Admission,
    Domain,
    GiveBack,
    Placement,
    Report,
    Workload,
    WorkloadCondition,
    with_conditions,
)
from unbroken.core.job.record.conditions import MESSAGE_CHARACTERS
from unbroken.foreign_numbers import INT32_MAX, whole_number
from unbroken.kube.clock import parse_time, rfc3339
from unbroken.operator.jobs.pods import JobIdentity
from unbroken.spec import keys
from unbroken.spec.job.types import KIND, JobSpec, ReplicaSpec, queue_of

Object = dict[str, Any]

VERSIONS = ("v1beta2", "v1beta1")
"""Supported versions, the newest first."""
WORKLOADS, FLAVORS, PRIORITIES = "workloads", "resourceflavors", "workloadpriorityclasses"
TOPOLOGY_REQUESTS = {
    "podset-required-topology": "required",
    "podset-preferred-topology": "preferred",
    "podset-unconstrained-topology": "unconstrained",
    "podset-slice-required-topology": "podSetSliceRequiredTopology",
    "podset-slice-size": "podSetSliceSize",
    "podset-group-name": "podSetGroupName",
}
"""Annotations (after the prefix) and the fields of a topology request that they fill."""
OF_KUEUE, OF_PODS = f"{keys.KUEUE_GROUP}/workloadpriorityclass", "scheduling.k8s.io/priorityclass"
"""Kinds of priority classes, as v1beta1 writes them."""
NAME_CHARACTERS = 253
DOMAINS_MAX = 100_000
"""Domains of an assignment that are read; a job has at most this many pods."""


@dataclass(frozen=True, slots=True)
class Priority:
    """Priority in the queue; `kind` is OF_KUEUE or OF_PODS, empty if no class gives the value."""

    value: int = 0
    name: str = ""
    kind: str = ""


def workload_name(job: JobIdentity) -> str:
    """Return the name of the job's Workload; always the same."""
    digest = hashlib.sha256(job.uid.encode()).hexdigest()[:5]
    return f"{f'{KIND.lower()}-{job.name}'[: NAME_CHARACTERS - 6]}-{digest}"


def shape_of(job: Mapping[str, Any], spec: JobSpec) -> str:
    """Return a digest of the job's request to its queue; another request has another digest."""
    asked = [
        [replica.name, pods_of(replica), replica.template, _topology_request(job, replica)]
        for replica in spec.replica_specs
    ]
    text = json.dumps(asked, sort_keys=True, separators=(",", ":"), default=dict)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def pods_of(replica: ReplicaSpec) -> int:
    """Return the pods that take quota: those that train and the spares."""
    return replica.replicas + replica.spares


def workload_body(
    job: Mapping[str, Any], identity: JobIdentity, spec: JobSpec, version: str, priority: Priority
) -> Object:
    """Return the Workload of a job, to be created."""
    metadata: Object = {
        "name": workload_name(identity),
        "namespace": identity.namespace,
        "labels": {keys.JOB_LABEL: identity.name, keys.JOB_UID: identity.uid},
        "annotations": {keys.WORKLOAD_SHAPE: shape_of(job, spec)},
        "ownerReferences": [identity.owner_reference()],
    }
    asked = [replica for replica in spec.replica_specs if pods_of(replica)]
    body: Object = {
        "queueName": queue_of(job),
        "podSets": [_pod_set(job, replica) for replica in asked],
        "priority": priority.value,
        **_priority_class(priority, version),
    }
    limit = str((job["metadata"].get("labels") or {}).get(keys.TIME_LIMIT) or "")
    if seconds := whole_number(limit, 1, INT32_MAX):
        body["maximumExecutionTimeSeconds"] = seconds
    head = {"apiVersion": f"{keys.KUEUE_GROUP}/{version}", "kind": "Workload"}
    return {**head, "metadata": metadata, "spec": body}


def _priority_class(priority: Priority, version: str) -> Object:
    if not priority.name:
        return {}
    if version == "v1beta1":
        return {"priorityClassName": priority.name, "priorityClassSource": priority.kind}
    group = priority.kind.partition("/")[0]
    kind = "WorkloadPriorityClass" if priority.kind == OF_KUEUE else "PriorityClass"
    return {"priorityClassRef": {"group": group, "kind": kind, "name": priority.name}}


def _pod_set(job: Mapping[str, Any], replica: ReplicaSpec) -> Object:
    given = replica.template.get("metadata") or {}
    kept = {key: given[key] for key in ("labels", "annotations") if given.get(key)}
    template = {"metadata": kept, "spec": replica.template.get("spec") or {}}
    result: Object = {"name": replica.name, "count": pods_of(replica), "template": template}
    request = _topology_request(job, replica)
    if request:
        result["topologyRequest"] = {**request, "podIndexLabel": keys.INDEX_LABEL}
    return result


def _topology_request(job: Mapping[str, Any], replica: ReplicaSpec) -> Object:
    """Return the topology that the template's annotations request, else the job's."""
    own = (replica.template.get("metadata") or {}).get("annotations") or {}
    annotations = {**(job["metadata"].get("annotations") or {}), **own}
    result: Object = {}
    for suffix, field in TOPOLOGY_REQUESTS.items():
        value = str(annotations.get(f"{keys.KUEUE_PREFIX}{suffix}") or "")
        if field == "unconstrained" and value:
            result[field] = value == "true"
        elif field == "podSetSliceSize":
            size = whole_number(value, 0, INT32_MAX)
            result |= {} if size is None else {field: size}
        elif field != "unconstrained" and value:
            result[field] = value
    return result


# --- from Kueue


def workload_view(
    found: Mapping[str, Any], spec: JobSpec, flavors: Mapping[str, Mapping[str, Any]]
) -> Workload:
    """Return the view of a Workload from the API; `flavors` are the ResourceFlavors by name."""
    metadata, body = found["metadata"], found.get("spec") or {}
    status = found.get("status") or {}
    return Workload(
        name=metadata["name"],
        queue=body.get("queueName") or "",
        shape=(metadata.get("annotations") or {}).get(keys.WORKLOAD_SHAPE, ""),
        is_active=body.get("active") is not False,
        is_deleting=bool(metadata.get("deletionTimestamp")),
        conditions=_conditions(status),
        has_admission=bool(status.get("admission")),
        waits_until=bool((status.get("requeueState") or {}).get("requeueAt")),
        admission=_admission(found, spec, flavors),
    )


def _conditions(status: Mapping[str, Any]) -> dict[str, WorkloadCondition]:
    return {
        item["type"]: WorkloadCondition(
            item["status"] == "True", item.get("reason", ""), item.get("message", "")
        )
        for item in status.get("conditions") or ()
    }


def _admission(
    found: Mapping[str, Any], spec: JobSpec, flavors: Mapping[str, Mapping[str, Any]]
) -> Admission | str:
    status = found.get("status") or {}
    assigned = (status.get("admission") or {}).get("podSetAssignments") or ()
    placements = {}
    for item in assigned:
        updates = [
            update
            for check in status.get("admissionChecks") or ()
            for update in check.get("podSetUpdates") or ()
            if update.get("name") == item["name"]
        ]
        names = sorted(set((item.get("flavors") or {}).values()))
        missing = [name for name in names if name not in flavors]
        if missing:
            return f"there is no ResourceFlavor {missing[0]}"
        placements[item["name"]] = _placement(item, [flavors[name] for name in names], updates)
    for replica in spec.replica_specs:
        conflict = _conflict(replica, placements.get(replica.name, Placement()))
        if conflict:
            return conflict
    return Admission(found["metadata"]["name"], placements)


def _placement(
    assigned: Mapping[str, Any], flavors: list[Mapping[str, Any]], updates: list[Mapping[str, Any]]
) -> Placement:
    selector: dict[str, str] = {}
    tolerations: list[Mapping[str, Any]] = []
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    for flavor in flavors:
        body = flavor.get("spec") or {}
        selector |= body.get("nodeLabels") or {}
        tolerations += body.get("tolerations") or ()
    for update in updates:
        selector |= update.get("nodeSelector") or {}
        tolerations += update.get("tolerations") or ()
        labels |= update.get("labels") or {}
        annotations |= update.get("annotations") or {}
    domains = tuple(_domains(assigned.get("topologyAssignment") or {}))
    return Placement(selector, tuple(tolerations), labels, annotations, domains)


def _conflict(replica: ReplicaSpec, placement: Placement) -> str:
    """Return the contradiction of the template's node selector and Kueue's placement; empty:
    none."""
    asked = (replica.template.get("spec") or {}).get("nodeSelector") or {}
    for key, value in placement.node_selector.items():
        if asked.get(key, value) != value:
            return (
                f"the nodes that it was given have {key}={value}, and the template of "
                f"{replica.name} wants {key}={asked[key]}"
            )
    return ""


def _domains(assignment: Mapping[str, Any]) -> Iterator[Domain]:
    levels = assignment.get("levels") or ()
    for domain in assignment.get("domains") or ():  # v1beta1
        yield Domain(dict(zip(levels, domain["values"], strict=False)), int(domain["count"]))
    for part in assignment.get("slices") or ():  # v1beta2
        for index in range(min(int(part["domainCount"]), DOMAINS_MAX)):
            values = [_value(item, index) for item in part["valuesPerLevel"]]
            counts = part.get("podCounts")
            count = counts[index] if counts else part["universalPodCount"]
            yield Domain(dict(zip(levels, values, strict=False)), int(count))


def _value(level: Mapping[str, Any], index: int) -> str:
    """Return the value of the domain with this index; v1beta2 writes a value that all domains share
    once."""
    if "universalValue" in level:
        return str(level["universalValue"])
    return f"{level.get('prefix') or ''}{level['roots'][index]}{level.get('suffix') or ''}"


def status_after(found: Mapping[str, Any], order: GiveBack | Report, now: float) -> Object:
    """Return the status of a Workload after the order."""
    status: Object = dict(found.get("status") or {})
    listed = list(status.get("conditions") or ())
    before = {item["type"]: item for item in listed}
    if isinstance(order, GiveBack):
        status.pop("admission", None)
        spent = _admitted_seconds(before.get("Admitted"), now)
        if spent:
            key = "accumulatedPastExecutionTimeSeconds"
            status[key] = int(status.get(key) or 0) + spent
    for type, said in with_conditions(_conditions(status), order).items():
        old = before.get(type, {})
        if (
            old
            and WorkloadCondition(old["status"] == "True", old["reason"], old["message"]) == said
        ):
            continue
        text = "True" if said.is_true else "False"
        since = old["lastTransitionTime"] if old.get("status") == text else rfc3339(now)
        before[type] = {
            "type": type,
            "status": text,
            "reason": said.reason or "Unknown",
            "message": said.message[:MESSAGE_CHARACTERS],
            "lastTransitionTime": since,
            "observedGeneration": found["metadata"].get("generation", 0),
        }
    status["conditions"] = list(before.values())
    return status


def _admitted_seconds(admitted: Mapping[str, Any] | None, now: float) -> int:
    """Return the seconds that the Workload was admitted, for its limit of time (kueue,
    SyncAdmittedCondition)."""
    if admitted is None or admitted["status"] != "True":
        return 0
    return max(0, int(now - parse_time(admitted["lastTransitionTime"])))


# --- the job's pods


def place_pod(pod: Object, admission: Admission, replica_spec: str, index: int) -> Object:
    """Return the pod with Kueue's placement."""
    placement = admission.placements.get(replica_spec, Placement())
    body, metadata = pod["spec"], pod["metadata"]
    labels = {
        **metadata["labels"],
        **placement.labels,
        keys.JOB_LABEL: metadata["labels"][keys.JOB_LABEL],
        keys.POD_SET: replica_spec,
    }
    # A pod with a queue of its own would be requested twice.
    labels.pop(keys.QUEUE, None)
    if placement.domains:
        labels[keys.TOPOLOGY] = "true"
    metadata["labels"] = labels
    metadata["annotations"] = {
        **metadata["annotations"],
        **placement.annotations,
        keys.WORKLOAD: admission.workload,
    }
    selector = {**(body.get("nodeSelector") or {}), **placement.of_pod(index)}
    if selector:
        body["nodeSelector"] = selector
    if placement.tolerations:
        body["tolerations"] = [*(body.get("tolerations") or ()), *placement.tolerations]
    return pod
