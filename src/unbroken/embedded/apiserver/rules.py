"""Rules of the built-in kinds beyond their schemas; pods have theirs in `podrules`.

Source: kubernetes v1.33, pkg/apis/*/validation.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Iterable
from typing import Any

from . import names
from .constraints import forbidden, invalid_value, required_value, unsupported
from .kinds import Kind
from .podrules import (
    EFFECTS,
    PROTOCOLS,
    port_number,
    quantity,
    validate_pod,
    validate_pod_update,
    validate_spec,
)
from .status import Cause, Object

DATA_BYTES_MAX = 1024 * 1024
"""Largest config map or secret (kubernetes v1.33, core.MaxSecretSize)."""
PRIORITY_MAX = 1_000_000_000
"""Largest value of a priority class that is not the system's."""


def validate(kind: Kind, old: Object | None, new: Object) -> list[Cause]:
    """Everything wrong with a new object, or with changing `old` into `new`."""
    check, check_update = RULES.get(kind.resource, (None, None))
    causes = check(new) if check is not None else []
    if old is not None and check_update is not None:
        causes += check_update(old, new)
    return causes


def _frozen(old: Object, new: Object, *paths: str) -> list[Cause]:
    """FieldValueInvalid for each of the paths that changed."""
    return [
        invalid_value(path, _at(new, path), "field is immutable")
        for path in paths
        if _at(old, path) != _at(new, path)
    ]


def _at(content: Any, path: str) -> Any:
    for part in path.split("."):
        content = content.get(part) if isinstance(content, dict) else None
    return content


def _data(content: Object) -> list[Cause]:
    """Keys and size of a config map or a secret."""
    causes: list[Cause] = []
    size = 0
    for field in ("data", "binaryData"):
        for key, value in (content.get(field) or {}).items():
            causes += names.each(names.config_key, f"{field}[{key}]", key)
            size += len(value)
    if size > DATA_BYTES_MAX:
        text = f"Too long: may not be more than {DATA_BYTES_MAX} bytes"
        causes.append(Cause("FieldValueTooLong", "", text))
    return causes


def _secret(content: Object) -> list[Cause]:
    causes = _data(content)
    for key, value in (content.get("data") or {}).items():
        try:
            base64.b64decode(value, validate=True)
        except (binascii.Error, ValueError):
            causes.append(invalid_value(f"data[{key}]", "", "illegal base64 data"))
    return causes


def _data_update(old: Object, new: Object) -> list[Cause]:
    causes = []
    if old.get("immutable"):
        fields = [
            name for name in ("data", "binaryData", "immutable") if old.get(name) != new.get(name)
        ]
        text = "field is immutable when `immutable` is set"
        causes = [forbidden(name, text) for name in fields]
    if old.get("type") != new.get("type"):
        causes.append(invalid_value("type", new.get("type"), "field is immutable"))
    return causes


def _service(content: Object) -> list[Cause]:
    spec = content.get("spec")
    if not isinstance(spec, dict):
        return [required_value("spec")]
    causes: list[Cause] = []
    kinds = ["ClusterIP", "ExternalName", "LoadBalancer", "NodePort"]
    if spec.get("type") not in kinds:
        causes.append(unsupported("spec.type", spec.get("type"), kinds))
    if spec.get("type") == "ExternalName" and not spec.get("externalName"):
        causes.append(required_value("spec.externalName"))
    ports = spec.get("ports") or []
    if not ports and spec.get("type") != "ExternalName" and spec.get("clusterIP") != "None":
        causes.append(required_value("spec.ports"))
    for index, port in enumerate(ports):
        path = f"spec.ports[{index}]"
        if len(ports) > 1 and not port.get("name"):
            causes.append(required_value(f"{path}.name"))
        causes += port_number(port.get("port"), f"{path}.port")
        if port.get("protocol") not in PROTOCOLS:
            causes.append(unsupported(f"{path}.protocol", port.get("protocol"), PROTOCOLS))
    return causes + names.validate_labels(spec.get("selector") or {}, "spec.selector")


def _service_update(old: Object, new: Object) -> list[Cause]:
    before, after = old["spec"], new.get("spec") or {}
    if before.get("type") == "ExternalName" or after.get("type") == "ExternalName":
        return []
    if before.get("clusterIPs") == after.get("clusterIPs"):
        return []
    text = "may not change once set"
    return [invalid_value("spec.clusterIPs[0]", after.get("clusterIPs"), text)]


def _node(content: Object) -> list[Cause]:
    causes: list[Cause] = []
    for index, taint in enumerate((content.get("spec") or {}).get("taints") or []):
        path = f"spec.taints[{index}]"
        if not taint.get("key"):
            causes.append(required_value(f"{path}.key"))
        else:
            causes += names.each(names.qualified_name, f"{path}.key", taint["key"])
        if taint.get("effect") not in EFFECTS:
            causes.append(unsupported(f"{path}.effect", taint.get("effect"), EFFECTS))
    status = content.get("status") or {}
    for field in ("capacity", "allocatable"):
        for name, amount in (status.get(field) or {}).items():
            causes += quantity(amount, f"status.{field}[{name}]")
    return causes


def _claim(content: Object) -> list[Cause]:
    spec = content.get("spec") or {}
    causes: list[Cause] = []
    if not spec.get("accessModes"):
        causes.append(required_value("spec.accessModes", "at least 1 access mode is required"))
    storage = ((spec.get("resources") or {}).get("requests") or {}).get("storage")
    if storage is None:
        causes.append(required_value("spec.resources[storage]"))
        return causes
    return causes + quantity(storage, "spec.resources[storage]")


def _claim_update(old: Object, new: Object) -> list[Cause]:
    before, after = dict(old["spec"]), dict(new.get("spec") or {})
    for spec in (before, after):
        spec.pop("resources", None)
    bound = before.pop("volumeName", None)
    if bound is None:
        after.pop("volumeName", None)
    else:
        before["volumeName"] = bound
    if before == after:
        return []
    text = (
        "spec is immutable after creation except resources.requests and "
        "volumeAttributesClassName for bound claims"
    )
    return [forbidden("spec", text)]


def _volume(content: Object) -> list[Cause]:
    spec = content.get("spec") or {}
    causes: list[Cause] = []
    if not spec.get("accessModes"):
        causes.append(required_value("spec.accessModes"))
    storage = (spec.get("capacity") or {}).get("storage")
    if storage is None:
        causes.append(required_value("spec.capacity"))
    else:
        causes += quantity(storage, "spec.capacity[storage]")
    known = {"hostPath", "local", "nfs", "csi", "iscsi", "fc"}
    if not known & spec.keys():
        causes.append(required_value("spec", "must specify a volume type"))
    return causes


def _priority_class(content: Object) -> list[Cause]:
    value = content.get("value", 0)
    if value > PRIORITY_MAX and not content["metadata"]["name"].startswith("system-"):
        text = f"maximum allowed value of a user defined priority is {PRIORITY_MAX}"
        return [Cause("FieldValueForbidden", "value", f"Forbidden: {text}")]
    return []


def _priority_class_update(old: Object, new: Object) -> list[Cause]:
    return [
        forbidden(field, "may not be changed in an update.")
        for field in ("value", "preemptionPolicy")
        if old.get(field) != new.get(field)
    ]


def _event(content: Object) -> list[Cause]:
    about = (content.get("involvedObject") or {}).get("namespace") or "default"
    namespace = content["metadata"].get("namespace")
    if namespace == about:
        return []
    return [invalid_value("involvedObject.namespace", about, "does not match event.namespace")]


def _new_event(content: Object) -> list[Cause]:
    """Of events.k8s.io/v1, in the form in which events are stored."""
    stored = {"reportingController": "reportingComponent"}
    needed = ("eventTime", "reportingController", "reportingInstance", "action", "reason", "type")
    causes = [required_value(name) for name in needed if not content.get(stored.get(name, name))]
    return causes + _event(content)


def _lease(content: Object) -> list[Cause]:
    spec = content.get("spec") or {}
    return [
        invalid_value(f"spec.{field}", spec[field], "must be greater than 0")
        for field in ("leaseDurationSeconds",)
        if spec.get(field) is not None and spec[field] <= 0
    ]


def _selected(content: Object) -> list[Cause]:
    """A workload whose selector must find the pods of its template."""
    spec = content.get("spec")
    if not isinstance(spec, dict):
        return [required_value("spec")]
    causes: list[Cause] = []
    if (spec.get("replicas") or 0) < 0:
        text = "must be greater than or equal to 0"
        causes.append(invalid_value("spec.replicas", spec["replicas"], text))
    selector, template = spec.get("selector"), spec.get("template") or {}
    labels = (template.get("metadata") or {}).get("labels") or {}
    if not selector:
        causes.append(required_value("spec.selector"))
    else:
        wanted = selector.get("matchLabels") or {}
        causes += names.validate_labels(wanted, "spec.selector.matchLabels")
        if any(labels.get(key) != value for key, value in wanted.items()):
            text = "`selector` does not match template `labels`"
            causes.append(invalid_value("spec.template.metadata.labels", labels, text))
    return causes + _template(spec, ["Always"])


def _template(spec: Object, policies: Iterable[str]) -> list[Cause]:
    inner = (spec.get("template") or {}).get("spec")
    if not isinstance(inner, dict):
        return [required_value("spec.template.spec.containers")]
    causes = validate_spec(inner, "spec.template.spec")
    allowed = list(policies)
    if inner.get("restartPolicy") not in allowed:
        path = "spec.template.spec.restartPolicy"
        causes.append(unsupported(path, inner.get("restartPolicy"), allowed))
    return causes


def _job(content: Object) -> list[Cause]:
    spec = content.get("spec")
    if not isinstance(spec, dict):
        return [required_value("spec")]
    causes = [
        invalid_value(f"spec.{field}", spec[field], "must be greater than or equal to 0")
        for field in ("parallelism", "completions", "backoffLimit", "activeDeadlineSeconds")
        if (spec.get(field) or 0) < 0
    ]
    return causes + _template(spec, ["OnFailure", "Never"])


def _selector_update(old: Object, new: Object) -> list[Cause]:
    return _frozen(old, new, "spec.selector")


def _stateful_set_update(old: Object, new: Object) -> list[Cause]:
    free = {
        "replicas",
        "ordinals",
        "template",
        "updateStrategy",
        "revisionHistoryLimit",
        "persistentVolumeClaimRetentionPolicy",
        "minReadySeconds",
    }
    before, after = old["spec"], new["spec"]
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    if changed <= free:
        return []
    text = (
        "updates to statefulset spec for fields other than 'replicas', 'ordinals', 'template',"
        " 'updateStrategy', 'revisionHistoryLimit', 'persistentVolumeClaimRetentionPolicy' and "
        "'minReadySeconds' are forbidden"
    )
    return [forbidden("spec", text)]


def _job_update(old: Object, new: Object) -> list[Cause]:
    return _frozen(old, new, "spec.completions", "spec.selector", "spec.completionMode")


def _role(content: Object) -> list[Cause]:
    causes: list[Cause] = []
    for index, rule in enumerate(content.get("rules") or []):
        if not rule.get("verbs"):
            text = "verbs must contain at least one value"
            causes.append(required_value(f"rules[{index}].verbs", text))
    return causes


def _role_binding(content: Object) -> list[Cause]:
    reference = content.get("roleRef") or {}
    causes = [] if reference.get("name") else [required_value("roleRef.name")]
    if reference.get("kind") not in ("Role", "ClusterRole"):
        causes.append(unsupported("roleRef.kind", reference.get("kind"), ["ClusterRole", "Role"]))
    return causes


def _role_binding_update(old: Object, new: Object) -> list[Cause]:
    if old.get("roleRef") == new.get("roleRef"):
        return []
    return [invalid_value("roleRef", new.get("roleRef"), "cannot change roleRef")]


Check = Callable[[Object], list[Cause]]
CheckUpdate = Callable[[Object, Object], list[Cause]]
_RBAC = "rbac.authorization.k8s.io"

RULES: dict[str, tuple[Check | None, CheckUpdate | None]] = {
    "pods": (validate_pod, validate_pod_update),
    "configmaps": (_data, _data_update),
    "secrets": (_secret, _data_update),
    "services": (_service, _service_update),
    "nodes": (_node, None),
    "persistentvolumeclaims": (_claim, _claim_update),
    "persistentvolumes": (_volume, None),
    "priorityclasses.scheduling.k8s.io": (_priority_class, _priority_class_update),
    "leases.coordination.k8s.io": (_lease, None),
    "events": (_event, None),
    "events.events.k8s.io": (_new_event, None),
    "deployments.apps": (_selected, _selector_update),
    "replicasets.apps": (_selected, _selector_update),
    "daemonsets.apps": (_selected, _selector_update),
    "statefulsets.apps": (_selected, _stateful_set_update),
    "jobs.batch": (_job, _job_update),
    f"roles.{_RBAC}": (_role, None),
    f"clusterroles.{_RBAC}": (_role, None),
    f"rolebindings.{_RBAC}": (_role_binding, _role_binding_update),
    f"clusterrolebindings.{_RBAC}": (_role_binding, _role_binding_update),
}
"""Checks of the object alone, and of a change, by resource."""
