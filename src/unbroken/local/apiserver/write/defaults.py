"""Values that the server writes into objects of built-in kinds where the client wrote none.

Sources: kubernetes v1.33, pkg/apis/*/v1/defaults.go, and the default admission plugin
DefaultTolerationSeconds.  Everything changes the object in place.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from typing import Any

from unbroken.local.apiserver.http.status import Object
from unbroken.local.apiserver.kinds.kinds import Kind

TOLERATION_SECONDS = 300
"""DefaultTolerationSeconds: how long a pod stays on a node that is not ready or unreachable."""
PROBES = ("livenessProbe", "readinessProbe", "startupProbe")
AFFINITY_SECONDS = 3 * 3600
"""Seconds that a client stays with a pod of a service that has session affinity."""


def apply_defaults(kind: Kind, content: Object) -> None:
    """Fill in what is missing; what is malformed is left to validation."""
    complete = DEFAULTS.get(kind.resource)
    if complete is not None:
        complete(content)


def fill(target: Object, values: Object) -> None:
    """Set the keys that `target` lacks."""
    for key, value in values.items():
        if target.get(key) is None:
            target[key] = value


def _part(content: Object, name: str) -> Object:
    """The object at `name`, made if there is none."""
    if content.get(name) is None:
        content[name] = {}
    part: Object = content[name]
    return part


def _items(content: Object, *names: str) -> Iterator[Object]:
    for name in names:
        yield from content.get(name) or []


def _pod(content: Object) -> None:
    spec = content.get("spec")
    if not isinstance(spec, dict):
        return
    pod_spec(spec)
    fill(spec, {"enableServiceLinks": True})
    tolerations = spec.setdefault("tolerations", [])
    for condition in ("not-ready", "unreachable"):
        key = f"node.kubernetes.io/{condition}"
        if not any(_tolerates(toleration, key) for toleration in tolerations):
            tolerations.append(
                {
                    "key": key,
                    "operator": "Exists",
                    "effect": "NoExecute",
                    "tolerationSeconds": TOLERATION_SECONDS,
                }
            )
    status = _part(content, "status")
    fill(status, {"phase": "Pending", "qosClass": quality_of_service(spec)})


def _tolerates(toleration: Object, key: str) -> bool:
    same_key = not toleration.get("key") or toleration["key"] == key
    return same_key and toleration.get("effect") in (None, "", "NoExecute")


def pod_spec(spec: Object) -> None:
    """Complete the spec of a pod or a pod template."""
    fill(
        spec,
        {
            "restartPolicy": "Always",
            "dnsPolicy": "ClusterFirst",
            "schedulerName": "default-scheduler",
            "terminationGracePeriodSeconds": 30,
            "securityContext": {},
        },
    )
    for container in _items(spec, "containers", "initContainers"):
        _container(container)
        for port in _items(container, "ports") if spec.get("hostNetwork") else ():
            fill(port, {"hostPort": port.get("containerPort")})
    for volume in _items(spec, "volumes"):
        _volume(volume)


def _container(container: Object) -> None:
    fill(
        container,
        {
            "resources": {},
            "terminationMessagePath": "/dev/termination-log",
            "terminationMessagePolicy": "File",
            "imagePullPolicy": _pull_policy(str(container.get("image") or "")),
        },
    )
    resources = container["resources"]
    if resources.get("limits"):
        requests = resources["requests"] = resources.get("requests") or {}
        fill(requests, resources["limits"])
    for port in _items(container, "ports"):
        fill(port, {"protocol": "TCP"})
    for name in PROBES:
        if isinstance(container.get(name), dict):
            _probe(container[name])
    lifecycle = container.get("lifecycle") or {}
    for handler in lifecycle.values():
        if isinstance(handler, dict):
            _handler(handler)
    for variable in _items(container, "env"):
        source = variable.get("valueFrom") or {}
        if isinstance(source.get("fieldRef"), dict):
            fill(source["fieldRef"], {"apiVersion": "v1"})
        if isinstance(source.get("resourceFieldRef"), dict):
            fill(source["resourceFieldRef"], {"divisor": "0"})


def _pull_policy(image: str) -> str:
    """Always for the tag `latest` or none, IfNotPresent for another tag or a digest."""
    name = image.rpartition("/")[2]
    if "@" in name:
        return "IfNotPresent"
    tag = name.partition(":")[2]
    return "Always" if tag in ("", "latest") else "IfNotPresent"


def _probe(probe: Object) -> None:
    fill(
        probe,
        {"timeoutSeconds": 1, "periodSeconds": 10, "successThreshold": 1, "failureThreshold": 3},
    )
    _handler(probe)


def _handler(handler: Object) -> None:
    if isinstance(handler.get("httpGet"), dict):
        fill(handler["httpGet"], {"path": "/", "scheme": "HTTP"})


def _volume(volume: Object) -> None:
    modes = {
        "configMap": "defaultMode",
        "secret": "defaultMode",
        "downwardAPI": "defaultMode",
        "projected": "defaultMode",
    }
    if len(volume) == 1:
        volume["emptyDir"] = {}
    for name, field in modes.items():
        if isinstance(volume.get(name), dict):
            fill(volume[name], {field: 0o644})
    if isinstance(volume.get("hostPath"), dict):
        fill(volume["hostPath"], {"type": ""})
    projected = _items(volume.get("projected") or {}, "sources")
    for source in (volume, *projected):
        for item in _items(source.get("downwardAPI") or {}, "items"):
            if isinstance(item.get("fieldRef"), dict):
                fill(item["fieldRef"], {"apiVersion": "v1"})
            if isinstance(item.get("resourceFieldRef"), dict):
                fill(item["resourceFieldRef"], {"divisor": "0"})


def quality_of_service(spec: Object) -> str:
    """Guaranteed, Burstable or BestEffort, from the cpu and memory of all containers."""
    containers = [*_items(spec, "containers", "initContainers")]
    pairs = []
    for container in containers:
        resources = container.get("resources") or {}
        limits, requests = resources.get("limits") or {}, resources.get("requests") or {}
        pairs += [(limits.get(name), requests.get(name)) for name in ("cpu", "memory")]
    if not any(limit or request for limit, request in pairs):
        return "BestEffort"
    if all(limit is not None and limit == request for limit, request in pairs):
        return "Guaranteed"
    return "Burstable"


def _template(content: Object) -> Object | None:
    """The spec of a workload after its pod template has been completed."""
    spec = content.get("spec")
    if not isinstance(spec, dict):
        return None
    template = (spec.get("template") or {}).get("spec")
    if isinstance(template, dict):
        pod_spec(template)
    return spec


def _template_labels(content: Object) -> Object:
    template = (content.get("spec") or {}).get("template") or {}
    return (template.get("metadata") or {}).get("labels") or {}


def _own_labels(content: Object, labels: Object) -> None:
    if not content["metadata"].get("labels"):
        content["metadata"]["labels"] = dict(labels)


def _job(content: Object) -> None:
    """A job's pods are found by its uid, as the job controller expects."""
    spec = _template(content)
    if spec is None:
        return
    if spec.get("completions") is None and spec.get("parallelism") is None:
        spec["completions"] = 1
    fill(
        spec,
        {
            "parallelism": 1,
            "backoffLimit": 6,
            "completionMode": "NonIndexed",
            "suspend": False,
            "podReplacementPolicy": "TerminatingOrFailed",
            "manualSelector": False,
        },
    )
    uid = content["metadata"].get("uid")
    if uid and not spec.get("selector"):
        name = content["metadata"]["name"]
        labels = {
            "batch.kubernetes.io/controller-uid": uid,
            "batch.kubernetes.io/job-name": name,
            "controller-uid": uid,
            "job-name": name,
        }
        spec["selector"] = {"matchLabels": {"batch.kubernetes.io/controller-uid": uid}}
        given = _template_labels(content)
        fill(_part(_part(_part(spec, "template"), "metadata"), "labels"), labels)
        if given:
            _own_labels(content, _template_labels(content))


def _service(content: Object) -> None:
    spec = _part(content, "spec")
    fill(spec, {"type": "ClusterIP", "sessionAffinity": "None"})
    if spec["type"] != "ExternalName":
        fill(
            spec,
            {
                "ipFamilies": ["IPv4"],
                "ipFamilyPolicy": "SingleStack",
                "internalTrafficPolicy": "Cluster",
            },
        )
    for port in _items(spec, "ports"):
        fill(port, {"protocol": "TCP", "targetPort": port.get("port")})
    if spec["sessionAffinity"] == "ClientIP":
        config = _part(_part(spec, "sessionAffinityConfig"), "clientIP")
        fill(config, {"timeoutSeconds": AFFINITY_SECONDS})
    fill(_part(content, "status"), {"loadBalancer": {}})


def _endpoints(content: Object) -> None:
    for subset in _items(content, "subsets"):
        for port in _items(subset, "ports"):
            fill(port, {"protocol": "TCP"})


def _endpoint_slice(content: Object) -> None:
    for port in _items(content, "ports"):
        fill(port, {"name": "", "protocol": "TCP"})


def _secret(content: Object) -> None:
    fill(content, {"type": "Opaque"})
    texts = content.pop("stringData", None) or {}
    if texts:
        data = _part(content, "data")
        for key, text in texts.items():
            data[key] = base64.b64encode(str(text).encode()).decode()


def _namespace(content: Object) -> None:
    meta = content["metadata"]
    if meta.get("name"):
        _part(meta, "labels")["kubernetes.io/metadata.name"] = meta["name"]
    if "resourceVersion" not in meta:  # a new one: later its finalizers are the controller's
        finalizers = _part(content, "spec").setdefault("finalizers", [])
        if "kubernetes" not in finalizers:
            finalizers.append("kubernetes")
    fill(_part(content, "status"), {"phase": "Active"})


def _node(content: Object) -> None:
    """Set allocatable to all of the capacity, unless the node has set less."""
    status = _part(content, "status")
    if status.get("capacity"):
        fill(_part(status, "allocatable"), status["capacity"])


def _claim(content: Object) -> None:
    fill(_part(content, "spec"), {"volumeMode": "Filesystem"})
    fill(_part(content, "status"), {"phase": "Pending"})


def _volume_object(content: Object) -> None:
    fill(
        _part(content, "spec"),
        {"persistentVolumeReclaimPolicy": "Retain", "volumeMode": "Filesystem"},
    )
    if isinstance(content["spec"].get("hostPath"), dict):
        fill(content["spec"]["hostPath"], {"type": ""})
    fill(_part(content, "status"), {"phase": "Pending"})


def _storage_class(content: Object) -> None:
    fill(content, {"reclaimPolicy": "Delete", "volumeBindingMode": "Immediate"})


def _priority_class(content: Object) -> None:
    fill(content, {"preemptionPolicy": "PreemptLowerPriority"})


def _binding(content: Object) -> None:
    """Complete a binding of roles: the API group of what is referred to."""
    reference: Any = content.get("roleRef")
    if isinstance(reference, dict):
        fill(reference, {"apiGroup": "rbac.authorization.k8s.io"})
    for subject in _items(content, "subjects"):
        is_account = subject.get("kind") == "ServiceAccount"
        if not is_account:
            fill(subject, {"apiGroup": "rbac.authorization.k8s.io"})


def _disruption_budget(content: Object) -> None:
    counters = ("disruptionsAllowed", "currentHealthy", "desiredHealthy", "expectedPods")
    fill(_part(content, "status"), dict.fromkeys(counters, 0))


def _event(content: Object) -> None:
    """Set the reporter of an event, possibly empty: events always have one."""
    fill(content, {"reportingComponent": "", "reportingInstance": ""})


DEFAULTS: dict[str, Callable[[Object], None]] = {
    "pods": _pod,
    "jobs.batch": _job,
    "services": _service,
    "endpoints": _endpoints,
    "endpointslices.discovery.k8s.io": _endpoint_slice,
    "secrets": _secret,
    "namespaces": _namespace,
    "nodes": _node,
    "persistentvolumeclaims": _claim,
    "persistentvolumes": _volume_object,
    "storageclasses.storage.k8s.io": _storage_class,
    "priorityclasses.scheduling.k8s.io": _priority_class,
    "rolebindings.rbac.authorization.k8s.io": _binding,
    "clusterrolebindings.rbac.authorization.k8s.io": _binding,
    "poddisruptionbudgets.policy": _disruption_budget,
    "events": _event,
}
"""Functions that set defaults, by resource."""
