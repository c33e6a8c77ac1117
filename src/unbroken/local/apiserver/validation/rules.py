"""Rules of the built-in kinds beyond their schemas, and the table of rules by kind.

Source: kubernetes v1.33, pkg/apis/*/validation. Rules of pods are in `pods`. Where a cluster
without a proxy differs, a comment says so.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Iterable
from typing import Any

from unbroken.kube.quantity import QuantityError, parse_quantity
from unbroken.local.apiserver.http.status import ApiError, Cause, Object
from unbroken.local.apiserver.kinds.kinds import Kind, stored_form
from unbroken.local.apiserver.schema.constraints import forbidden, invalid_value, required_value

from . import names
from .fields import (
    ACCESS_MODES,
    EFFECTS,
    IMMUTABLE,
    PROTOCOLS,
    at,
    changed_fields,
    count_or_percent,
    frozen,
    is_address,
    label_selector,
    named,
    needed,
    not_negative,
    one_of,
    optional,
    port,
    port_number,
    quantity,
    too_long,
    unique,
)
from .pods import host_path, single_source, validate_pod, validate_pod_update, validate_spec
from .selectors import selector_of

SELECTOR_TEXT = "`selector` does not match template `labels`"


def _with_choices(spec: Object) -> Object:
    """A template's spec; an empty one has had no defaults, which is not the writer's fault."""
    return {"restartPolicy": "Always", "dnsPolicy": "ClusterFirst", **spec}


def job(content: Object) -> list[Cause]:
    """Check a job."""
    spec = content.get("spec") or {}
    counters = (
        "parallelism",
        "completions",
        "backoffLimit",
        "activeDeadlineSeconds",
        "ttlSecondsAfterFinished",
    )
    causes = not_negative(spec, "spec", *counters)
    causes += optional(spec, "spec", "completionMode", ("NonIndexed", "Indexed"))
    inner = at(spec, "template.spec") or {}
    causes += validate_spec(_with_choices(inner), "spec.template.spec")
    place = "spec.template.spec.restartPolicy"
    if inner.get("restartPolicy") in (None, "Always"):
        causes.append(required_value(place, 'valid values: "OnFailure", "Never"'))
    if spec.get("completionMode") == "Indexed" and spec.get("completions") is None:
        text = "when completion mode is Indexed"
        causes.append(required_value("spec.completions", text))
    selector = spec.get("selector")
    if selector is not None:
        causes += label_selector(selector, "spec.selector") + _job_selector(spec, selector)
    return causes


def _job_selector(spec: Object, selector: Object) -> list[Cause]:
    labels = at(spec, "template.metadata.labels") or {}
    causes = []
    keys = set(selector.get("matchLabels") or {})
    own = {"controller-uid", "batch.kubernetes.io/controller-uid"}
    if not spec.get("manualSelector") and (not keys & own or selector.get("matchExpressions")):
        causes.append(invalid_value("spec.selector", selector, "`selector` not auto-generated"))
    try:
        is_matching = selector_of(selector).matches(labels)
    except ApiError:
        return causes
    if not is_matching:
        causes.append(invalid_value("spec.template.metadata.labels", labels, SELECTOR_TEXT))
    return causes


def disruption_budget(content: Object) -> list[Cause]:
    """A pod disruption budget."""
    spec = content.get("spec") or {}
    causes = label_selector(spec.get("selector"), "spec.selector")
    if spec.get("minAvailable") is not None and spec.get("maxUnavailable") is not None:
        text = "minAvailable and maxUnavailable cannot be both set"
        causes.append(invalid_value("spec", spec, text))
    for field in ("minAvailable", "maxUnavailable"):
        causes += count_or_percent(spec, "spec", field)
    return causes


def job_update(old: Object, new: Object) -> list[Cause]:
    """A job's work is chosen once; a suspended job's template may still be moved elsewhere."""
    causes = frozen(old, new, "spec.completions", "spec.selector", "spec.completionMode")
    if at(old, "spec.suspend"):
        return causes
    return causes + frozen(old, new, "spec.template")


DATA_BYTES_MAX = 1024 * 1024
"""Largest config map or secret (kubernetes v1.33, core.MaxSecretSize)."""
PRIORITY_MAX = 1_000_000_000
"""Largest value of a priority class that is not the system's."""
SYSTEM_PRIORITIES = ("system-cluster-critical", "system-node-critical")
WHOLE = "[]"
"""Name of the object as a whole in Kubernetes' errors."""
ADDRESS_TEXT = "must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)"


def validate(kind: Kind, old: Object | None, new: Object) -> list[Cause]:
    """Everything wrong with a new object, or with changing `old` into `new`."""
    check, check_update = RULES.get(kind.resource, (None, None))
    causes = check(new) if check is not None else []
    if old is not None and check_update is not None:
        causes += check_update(old, new)
    return causes


# --- Data ---------------------------------------------------------------------------------------


def _keys(content: Object, *fields: str) -> list[Cause]:
    return [
        cause
        for field in fields
        for key in content.get(field) or {}
        for cause in names.each(names.config_key, f"{field}[{key}]", key)
    ]


def _config_map(content: Object) -> list[Cause]:
    causes = _keys(content, "data", "binaryData")
    texts, blobs = content.get("data") or {}, content.get("binaryData") or {}
    text = "duplicate of key present in binaryData"
    causes += [invalid_value(f"data[{key}]", key, text) for key in texts if key in blobs]
    size = sum(len(value.encode()) for value in texts.values())
    size += sum(len(value) * 3 // 4 for value in blobs.values())
    return causes + ([too_long(WHOLE, DATA_BYTES_MAX)] if size > DATA_BYTES_MAX else [])


def _secret(content: Object) -> list[Cause]:
    causes = _keys(content, "data")
    data: dict[str, bytes] = {}
    for key, value in (content.get("data") or {}).items():
        try:
            data[key] = base64.b64decode(value, validate=True)
        except (binascii.Error, ValueError):
            causes.append(invalid_value(f"data[{key}]", "", "illegal base64 data"))
    if sum(map(len, data.values())) > DATA_BYTES_MAX:
        causes.append(too_long("data", DATA_BYTES_MAX))
    return causes + _typed_secret(content, data)


def _typed_secret(content: Object, data: dict[str, bytes]) -> list[Cause]:
    """Check the contents of secrets of Kubernetes' own types."""
    kind = str(content.get("type") or "").removeprefix("kubernetes.io/")
    if kind in ("dockerconfigjson", "dockercfg"):
        return _credentials(data, f".{kind}")
    if kind == "service-account-token":
        mark = "kubernetes.io/service-account.name"
        given = (content["metadata"].get("annotations") or {}).get(mark)
        return [] if given else [required_value(f"metadata.annotations[{mark}]")]
    if kind == "tls":
        pair = ("tls.crt", "tls.key")
        return [required_value(f"data[{field}]") for field in pair if field not in data]
    # The real server's paths hold this `%s`; one of the keys is enough.
    keys = {"basic-auth": ("username", "password"), "ssh-auth": ("ssh-privatekey",)}.get(kind, ())
    if any(data.get(key) is not None for key in keys):
        return []
    return [required_value(f"data[%s][{key}]") for key in keys]


def _credentials(data: dict[str, bytes], key: str) -> list[Cause]:
    if key not in data:
        return [required_value(f"data[{key}]")]
    try:
        json.loads(data[key])
    except (ValueError, RecursionError):
        text = 'Invalid value: "<secret contents redacted>": unexpected end of JSON input'
        return [Cause("FieldValueInvalid", f"data[{key}]", text)]
    return []


def _data_update(old: Object, new: Object) -> list[Cause]:
    causes = frozen(old, new, "type")
    if old.get("immutable"):
        fields = changed_fields(old, new) & {"data", "binaryData"}
        fields |= set() if new.get("immutable") else {"immutable"}
        text = "field is immutable when `immutable` is set"
        causes += [forbidden(name, text) for name in sorted(fields)]
    return causes


# --- Services -----------------------------------------------------------------------------------


def _service(content: Object) -> list[Cause]:
    spec = content.get("spec") or {}
    kinds = ("ClusterIP", "ExternalName", "LoadBalancer", "NodePort")
    causes = one_of(spec, "spec", "type", kinds)
    is_external = spec.get("type") == "ExternalName"
    if is_external:
        causes += needed(spec, "spec", "externalName")
        causes += named(spec, "spec", "externalName", names.dns_subdomain)
    ports = spec.get("ports") or []
    if not ports and not is_external and spec.get("clusterIP") != "None":
        causes.append(required_value("spec.ports"))
    causes += _service_ports(spec, ports)
    causes += optional(spec, "spec", "sessionAffinity", ("ClientIP", "None"))
    address = spec.get("clusterIP")
    if address and address != "None" and not is_address(address):
        causes.append(invalid_value("spec.clusterIPs[0]", address, ADDRESS_TEXT))
    causes += [
        invalid_value(f"spec.externalIPs[{index}]", given, ADDRESS_TEXT)
        for index, given in enumerate(spec.get("externalIPs") or [])
        if not is_address(given)
    ]
    return causes + names.validate_labels(spec.get("selector") or {}, "spec.selector")


def _service_ports(spec: Object, ports: list[Object]) -> list[Cause]:
    causes: list[Cause] = []
    for index, item in enumerate(ports):
        path = f"spec.ports[{index}]"
        if len(ports) > 1:
            causes += needed(item, path, "name")
        causes += named(item, path, "name", names.dns_label)
        causes += port_number(item.get("port"), f"{path}.port")
        causes += port(item.get("targetPort"), f"{path}.targetPort")
        causes += one_of(item, path, "protocol", PROTOCOLS)
        if item.get("nodePort") and spec.get("type") == "ClusterIP":
            text = "may not be used when `type` is 'ClusterIP'"
            causes.append(forbidden(f"{path}.nodePort", text))
    causes += unique((item.get("name") for item in ports), "spec.ports", ".name")
    return causes + unique(_short(ports, "protocol", "port"), "spec.ports")


def _short(items: Iterable[Object], *fields: str) -> list[Object]:
    return [{field: item.get(field) for field in fields} for item in items]


def _service_update(old: Object, new: Object) -> list[Cause]:
    before, after = old.get("spec") or {}, new.get("spec") or {}
    if "ExternalName" in (before.get("type"), after.get("type")):
        return []
    if before.get("clusterIP") == after.get("clusterIP"):
        return []
    text = "may not change once set"
    return [invalid_value("spec.clusterIPs[0]", after.get("clusterIPs"), text)]


def _endpoints(content: Object) -> list[Cause]:
    """Loopback addresses, which Kubernetes refuses, are what pods have here."""
    causes: list[Cause] = []
    for number, subset in enumerate(content.get("subsets") or []):
        path, ports = f"subsets[{number}]", subset.get("ports") or []
        if not subset.get("addresses") and not subset.get("notReadyAddresses"):
            text = "must specify `addresses` or `notReadyAddresses`"
            causes.append(required_value(path, text))
        for field in ("addresses", "notReadyAddresses"):
            for index, address in enumerate(subset.get(field) or []):
                if not is_address(address.get("ip")):
                    place = f"{path}.{field}[{index}].ip"
                    causes.append(invalid_value(place, address.get("ip") or "", ADDRESS_TEXT))
        for index, item in enumerate(ports):
            place = f"{path}.ports[{index}]"
            causes += needed(item, place, "name") if len(ports) > 1 else []
            causes += named(item, place, "name", names.dns_label)
            causes += port_number(item.get("port"), f"{place}.port")
            causes += one_of(item, place, "protocol", PROTOCOLS)
    return causes


# --- Nodes and namespaces -----------------------------------------------------------------------


def _namespace(content: Object) -> list[Cause]:
    text = "name is neither a standard finalizer name nor is it fully qualified"
    return [
        invalid_value("spec.finalizers", name, text)
        for name in at(content, "spec.finalizers") or []
        if "/" not in name and name not in names.STANDARD_FINALIZERS
    ]


def _node(content: Object) -> list[Cause]:
    causes: list[Cause] = []
    taints, place = at(content, "spec.taints") or [], "metadata.taints"
    for index, taint in enumerate(taints):
        path = f"{place}[{index}]"
        causes += names.each(names.qualified_name, f"{path}.key", taint.get("key") or "")
        causes += named(taint, path, "value", names.label_value)
        causes += needed(taint, path, "effect") + optional(taint, path, "effect", EFFECTS)
    causes += [
        Cause(
            cause.reason,
            cause.field,
            f"{cause.message}: taints must be unique by key and effect pair",
        )
        for cause in unique(_short(taints, "key", "effect"), place)
    ]
    for field in ("capacity", "allocatable"):
        for name, amount in (at(content, f"status.{field}") or {}).items():
            causes += quantity(amount, f"status.{field}[{name}]")
    return causes


def _node_update(old: Object, new: Object) -> list[Cause]:
    before, after = old.get("spec") or {}, new.get("spec") or {}
    causes = []
    fixed = changed_fields(before, after) - {"taints", "unschedulable", "configSource"}
    if "providerID" in fixed and before.get("providerID"):
        text = 'node updates may not change providerID except from "" to valid'
        causes.append(forbidden("spec.providerID", text))
    if any(before.get(name) for name in fixed) or fixed - {"providerID", "podCIDR", "podCIDRs"}:
        text = (
            "node updates may only change labels, taints, or capacity (or configSource, if the "
            "DynamicKubeletConfig feature gate is enabled)"
        )
        causes.append(forbidden(WHOLE, text))
    return causes


# --- Volumes ------------------------------------------------------------------------------------


def _modes(spec: Object) -> list[Cause]:
    return [
        cause
        for mode in spec.get("accessModes") or []
        for cause in one_of({"accessModes": mode}, "spec", "accessModes", ACCESS_MODES)
    ]


def _storage(amount: Any, path: str) -> list[Cause]:
    try:
        is_positive = parse_quantity(amount) > 0
    except QuantityError as error:
        return [invalid_value(path, str(amount), str(error))]
    return [] if is_positive else [invalid_value(path, str(amount), "must be greater than zero")]


def _claim(content: Object) -> list[Cause]:
    spec = content.get("spec") or {}
    causes = _modes(spec)
    if not spec.get("accessModes"):
        causes.append(required_value("spec.accessModes", "at least 1 access mode is required"))
    storage = at(spec, "resources.requests.storage")
    if storage is None:
        causes.append(required_value("spec.resources[storage]"))
    else:
        causes += _storage(storage, "spec.resources[storage]")
    causes += named(spec, "spec", "storageClassName", names.dns_subdomain)
    causes += optional(spec, "spec", "volumeMode", ("Block", "Filesystem"))
    return causes + label_selector(spec.get("selector"), "spec.selector")


def _claim_update(old: Object, new: Object) -> list[Cause]:
    before, after = dict(old.get("spec") or {}), dict(new.get("spec") or {})
    if not before.get("volumeName"):
        after.pop("volumeName", None)
        before.pop("volumeName", None)
    sizes = [at(spec, "resources.requests.storage") or 0 for spec in (before, after)]
    if at(old, "status.phase") == "Bound":
        before.pop("resources", None)
        after.pop("resources", None)
    if changed_fields(before, after):
        text = (
            "spec is immutable after creation except resources.requests and "
            "volumeAttributesClassName for bound claims"
        )
        return [forbidden("spec", text)]
    if parse_quantity(sizes[1]) < parse_quantity(sizes[0]):
        text = "field can not be less than status.capacity"
        return [forbidden("spec.resources.requests.storage", text)]
    return []


CLAIMABLE = {
    "accessModes",
    "capacity",
    "claimRef",
    "mountOptions",
    "nodeAffinity",
    "persistentVolumeReclaimPolicy",
    "storageClassName",
    "volumeAttributesClassName",
    "volumeMode",
}
"""Fields of a persistent volume that are not its source."""


def _volume(content: Object) -> list[Cause]:
    spec = content.get("spec") or {}
    causes = _modes(spec) + needed(spec, "spec", "accessModes", "capacity")
    capacity = spec.get("capacity") or {}
    if [*capacity] != ["storage"]:
        text = f'Unsupported value: {json.dumps(capacity)}: supported values: "storage"'
        causes.append(Cause("FieldValueNotSupported", "spec.capacity", text))
    for name, amount in capacity.items():
        causes += _storage(amount, f"spec.capacity[{name}]")
    causes += single_source(spec, "spec", CLAIMABLE)
    if spec.get("hostPath") is not None:
        causes += host_path(spec["hostPath"], "spec.hostPath")
    policies = ("Delete", "Recycle", "Retain")
    causes += optional(spec, "spec", "persistentVolumeReclaimPolicy", policies)
    causes += optional(spec, "spec", "volumeMode", ("Block", "Filesystem"))
    return causes + named(spec, "spec", "storageClassName", names.dns_subdomain)


def _volume_update(old: Object, new: Object) -> list[Cause]:
    before, after = old.get("spec") or {}, new.get("spec") or {}
    causes = []
    if changed_fields(before, after) - CLAIMABLE:
        text = "spec.persistentvolumesource is immutable after creation"
        causes.append(forbidden("spec.persistentvolumesource", text))
    if before.get("volumeMode") != after.get("volumeMode"):
        causes.append(invalid_value("volumeMode", after.get("volumeMode"), IMMUTABLE))
    return causes


def _storage_class(content: Object) -> list[Cause]:
    causes = needed(content, "", "provisioner")
    if content.get("provisioner"):
        provisioner = content["provisioner"].lower()
        causes += names.each(names.qualified_name, "provisioner", provisioner)
    causes += optional(content, "", "reclaimPolicy", ("Delete", "Retain"))
    modes = ("Immediate", "WaitForFirstConsumer")
    return causes + optional(content, "", "volumeBindingMode", modes)


def _storage_class_update(old: Object, new: Object) -> list[Cause]:
    fixed = ("parameters", "provisioner", "reclaimPolicy", "volumeBindingMode")
    changed = changed_fields(old, new)
    return [
        forbidden(name, f"updates to {name} are forbidden.") for name in fixed if name in changed
    ]


# --- Scheduling, leases, events -----------------------------------------------------------------


def _priority_class(content: Object) -> list[Cause]:
    name, value = content["metadata"].get("name") or "", content.get("value") or 0
    policies = ("PreemptLowerPriority", "Never")
    causes = optional(content, "", "preemptionPolicy", policies)
    if name.startswith("system-"):
        if name not in SYSTEM_PRIORITIES:
            text = (
                "priority class names with 'system-' prefix are reserved for system use only. "
                f"error: {name} is not a known system priority class"
            )
            causes.append(forbidden("metadata.name", text))
    elif value > PRIORITY_MAX:
        text = f"maximum allowed value of a user defined priority is {PRIORITY_MAX}"
        causes.append(forbidden("value", text))
    return causes


def _priority_class_update(old: Object, new: Object) -> list[Cause]:
    causes = frozen(old, new, "preemptionPolicy")
    if (old.get("value") or 0) != (new.get("value") or 0):
        causes.append(forbidden("Value", "may not be changed in an update."))
    return causes


def _lease(content: Object) -> list[Cause]:
    spec = content.get("spec") or {}
    causes = not_negative(spec, "spec", "leaseTransitions")
    length = spec.get("leaseDurationSeconds")
    if length is not None and length <= 0:
        causes.append(invalid_value("spec.leaseDurationSeconds", length, "must be greater than 0"))
    return causes


def _event(content: Object) -> list[Cause]:
    """Check an event of core/v1, where only events with an eventTime need what those of
    events.k8s.io do."""
    causes = _event_place(content)
    if content.get("eventTime"):
        causes += _event_origin(content)
    return causes


def _event_place(content: Object) -> list[Cause]:
    about = at(content, "involvedObject.namespace") or ""
    namespace = content["metadata"].get("namespace")
    if namespace == (about or "default"):
        return []
    return [invalid_value("involvedObject.namespace", about, "does not match event.namespace")]


def _event_origin(content: Object) -> list[Cause]:
    controller = content.get("reportingComponent") or ""
    causes = [] if controller else [required_value("reportingController")]
    causes += names.each(names.qualified_name, "reportingController", controller)
    return causes + needed(content, "", "reportingInstance", "action", "reason")


def _new_event(content: Object) -> list[Cause]:
    """Check an event of events.k8s.io/v1; a new one comes in the form in which events are
    stored."""
    content = stored_form(content)
    causes = _event_place(content)
    if content.get("eventTime"):
        causes += _event_origin(content)
    else:
        causes.append(required_value("eventTime"))
    if content.get("type") not in ("Normal", "Warning"):
        text = f"has invalid value: {content.get('type') or ''}"
        causes.append(invalid_value("type", "", text))
    unset = ("count", "firstTimestamp", "lastTimestamp", "source")
    causes += [invalid_value(name, "", "needs to be unset") for name in unset if content.get(name)]
    return causes


# --- Access -------------------------------------------------------------------------------------


def _role(content: Object) -> list[Cause]:
    return _access_rules(content, is_namespaced=True)


def _cluster_role(content: Object) -> list[Cause]:
    return _access_rules(content, is_namespaced=False)


def _access_rules(content: Object, *, is_namespaced: bool) -> list[Cause]:
    causes: list[Cause] = []
    for index, rule in enumerate(content.get("rules") or []):
        path, pages = f"rules[{index}]", rule.get("nonResourceURLs") or []
        if not rule.get("verbs"):
            text = "verbs must contain at least one value"
            causes.append(required_value(f"{path}.verbs", text))
        if pages:
            text = "rules cannot apply to both regular resources and non-resource URLs"
            if is_namespaced:
                text = "namespaced rules cannot apply to non-resource URLs"
            if is_namespaced or rule.get("apiGroups") or rule.get("resources"):
                causes.append(invalid_value(f"{path}.nonResourceURLs", pages, text))
            continue
        for field, what in (("apiGroups", "api group"), ("resources", "resource")):
            if not rule.get(field):
                text = f"resource rules must supply at least one {what}"
                causes.append(required_value(f"{path}.{field}", text))
    return causes


def _role_binding(content: Object) -> list[Cause]:
    return _access_binding(content, ("Role", "ClusterRole"))


def _cluster_role_binding(content: Object) -> list[Cause]:
    return _access_binding(content, ("ClusterRole",))


def _access_binding(content: Object, roles: tuple[str, ...]) -> list[Cause]:
    reference = content.get("roleRef") or {}
    causes = one_of(reference, "roleRef", "apiGroup", (_RBAC,))
    causes += one_of(reference, "roleRef", "kind", roles) + needed(reference, "roleRef", "name")
    for index, subject in enumerate(content.get("subjects") or []):
        path, kind = f"subjects[{index}]", subject.get("kind")
        causes += needed(subject, path, "name")
        causes += one_of(subject, path, "kind", ("ServiceAccount", "User", "Group"))
        if kind == "ServiceAccount":
            causes += named(subject, path, "name", names.dns_subdomain)
            causes += optional(subject, path, "apiGroup", ("",))
            if "ClusterRole" in roles and "Role" not in roles:
                causes += needed(subject, path, "namespace")
        elif kind in ("User", "Group"):
            causes += one_of(subject, path, "apiGroup", (_RBAC,))
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
    "configmaps": (_config_map, _data_update),
    "secrets": (_secret, _data_update),
    "namespaces": (_namespace, None),
    "services": (_service, _service_update),
    "endpoints": (_endpoints, None),
    "nodes": (_node, _node_update),
    "persistentvolumeclaims": (_claim, _claim_update),
    "persistentvolumes": (_volume, _volume_update),
    "storageclasses.storage.k8s.io": (_storage_class, _storage_class_update),
    "priorityclasses.scheduling.k8s.io": (_priority_class, _priority_class_update),
    "leases.coordination.k8s.io": (_lease, None),
    "events": (_event, None),
    "events.events.k8s.io": (_new_event, None),
    "jobs.batch": (job, job_update),
    "poddisruptionbudgets.policy": (disruption_budget, None),
    f"roles.{_RBAC}": (_role, None),
    f"clusterroles.{_RBAC}": (_cluster_role, None),
    f"rolebindings.{_RBAC}": (_role_binding, _role_binding_update),
    f"clusterrolebindings.{_RBAC}": (_cluster_role_binding, _role_binding_update),
}
"""Checks of the object alone, and of a change, by resource."""
