"""What a valid pod spec is, in Kubernetes' words.

Source: kubernetes v1.33, pkg/apis/core/validation/validation.go.  Checked is what can go wrong on
this cluster; fields that only a container runtime or a network would use are taken as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from unbroken.kube.quantity import QuantityError, parse_quantity

from . import names
from .constraints import forbidden, invalid_value, required_value, unsupported
from .status import Cause, Object

RESTART_POLICIES = ["Always", "OnFailure", "Never"]
PROTOCOLS = ["SCTP", "TCP", "UDP"]
PULL_POLICIES = ["Always", "IfNotPresent", "Never"]
EFFECTS = ["NoSchedule", "PreferNoSchedule", "NoExecute"]
HANDLERS = ("exec", "httpGet", "tcpSocket", "grpc")
MUTABLE = (
    "activeDeadlineSeconds",
    "terminationGracePeriodSeconds",
    "tolerations",
    "schedulingGates",
    "nodeName",
)
"""Of a pod's spec: what an update may change at all; more is checked for each."""


def validate_pod(pod: Object) -> list[Cause]:
    """A new pod."""
    spec = pod.get("spec")
    if not isinstance(spec, dict):
        return [required_value("spec")]
    return validate_spec(spec, "spec")


def validate_spec(spec: Object, path: str) -> list[Cause]:
    """The spec of a pod or of a pod template."""
    volumes = [volume.get("name", "") for volume in spec.get("volumes") or []]
    causes = _volumes(spec.get("volumes") or [], f"{path}.volumes")
    if not spec.get("containers"):
        causes.append(required_value(f"{path}.containers"))
    seen: set[str] = set()
    for field in ("containers", "initContainers"):
        for index, container in enumerate(spec.get(field) or []):
            place = f"{path}.{field}[{index}]"
            causes += _container(container, place, set(volumes), is_init=field == "initContainers")
            causes += _once(container.get("name"), seen, f"{place}.name")
    if spec.get("restartPolicy") not in RESTART_POLICIES:
        causes.append(
            unsupported(f"{path}.restartPolicy", spec.get("restartPolicy"), RESTART_POLICIES)
        )
    for field, least in (("terminationGracePeriodSeconds", 0), ("activeDeadlineSeconds", 1)):
        value = spec.get(field)
        if value is not None and value < least:
            text = (
                "must be greater than or equal to 0"
                if least == 0
                else ("must be between 1 and 2147483647, inclusive")
            )
            causes.append(invalid_value(f"{path}.{field}", value, text))
    causes += names.validate_labels(spec.get("nodeSelector") or {}, f"{path}.nodeSelector")
    for field in ("nodeName", "serviceAccountName", "hostname"):
        rule = names.dns_label if field == "hostname" else names.dns_subdomain
        if spec.get(field):
            causes += names.each(rule, f"{path}.{field}", spec[field])
    for index, toleration in enumerate(spec.get("tolerations") or []):
        causes += _toleration(toleration, f"{path}.tolerations[{index}]")
    return causes


def _once(name: Any, seen: set[str], path: str) -> list[Cause]:
    if not name:
        return []
    if name in seen:
        return [Cause("FieldValueDuplicate", path, f'Duplicate value: "{name}"')]
    seen.add(name)
    return []


def _container(container: Object, path: str, volumes: set[str], *, is_init: bool) -> list[Cause]:
    causes: list[Cause] = []
    if container.get("name"):
        causes += names.each(names.dns_label, f"{path}.name", container["name"])
    else:
        causes.append(required_value(f"{path}.name"))
    if not container.get("image"):
        causes.append(required_value(f"{path}.image"))
    if container.get("imagePullPolicy") not in PULL_POLICIES:
        causes.append(
            unsupported(f"{path}.imagePullPolicy", container.get("imagePullPolicy"), PULL_POLICIES)
        )
    causes += _ports(container.get("ports") or [], f"{path}.ports")
    causes += _environment(container, path)
    causes += _mounts(container.get("volumeMounts") or [], f"{path}.volumeMounts", volumes)
    causes += _resources(container.get("resources") or {}, f"{path}.resources")
    causes += _probes(container, path)
    policy = container.get("restartPolicy")
    if policy is not None and not is_init:
        causes.append(forbidden(f"{path}.restartPolicy", "may not be set for non-init containers"))
    elif policy not in (None, "Always"):
        causes.append(unsupported(f"{path}.restartPolicy", policy, ["Always"]))
    return causes


def port_number(value: Any, path: str) -> list[Cause]:
    """A port between 1 and 65535; 0 or none is missing."""
    if not value:
        return [required_value(path)]
    if not 0 < value < 65536:
        return [invalid_value(path, value, "must be between 1 and 65535, inclusive")]
    return []


def _ports(ports: list[Object], path: str) -> list[Cause]:
    causes: list[Cause] = []
    seen: set[str] = set()
    for index, port in enumerate(ports):
        place = f"{path}[{index}]"
        if port.get("name"):
            causes += names.each(names.port_name, f"{place}.name", port["name"])
            causes += _once(port["name"], seen, f"{place}.name")
        causes += port_number(port.get("containerPort"), f"{place}.containerPort")
        if port.get("hostPort"):
            causes += port_number(port["hostPort"], f"{place}.hostPort")
        if port.get("protocol") not in PROTOCOLS:
            causes.append(unsupported(f"{place}.protocol", port.get("protocol"), PROTOCOLS))
    return causes


def _environment(container: Object, path: str) -> list[Cause]:
    causes: list[Cause] = []
    for index, variable in enumerate(container.get("env") or []):
        place = f"{path}.env[{index}]"
        if not variable.get("name"):
            causes.append(required_value(f"{place}.name"))
        else:
            causes += names.each(names.environment_name, f"{place}.name", variable["name"])
        source = variable.get("valueFrom")
        if source is None:
            continue
        if len(source) != 1:
            text = (
                "must specify one of: `fieldRef`, `resourceFieldRef`, `configMapKeyRef` or "
                "`secretKeyRef`"
                if not source
                else "may not have more than one field specified at a time"
            )
            causes.append(invalid_value(f"{place}.valueFrom", "", text))
        elif variable.get("value"):
            text = "may not be specified when `value` is not empty"
            causes.append(invalid_value(f"{place}.valueFrom", "", text))
        for kind in ("configMapKeyRef", "secretKeyRef"):
            if kind in source and not source[kind].get("key"):
                causes.append(required_value(f"{place}.valueFrom.{kind}.key"))
    return causes


def _mounts(mounts: list[Object], path: str, volumes: set[str]) -> list[Cause]:
    causes: list[Cause] = []
    points: set[str] = set()
    for index, mount in enumerate(mounts):
        place = f"{path}[{index}]"
        name, point = mount.get("name"), mount.get("mountPath")
        if not name:
            causes.append(required_value(f"{place}.name"))
        elif name not in volumes:
            causes.append(Cause("FieldValueNotFound", f"{place}.name", f'Not found: "{name}"'))
        if not point:
            causes.append(required_value(f"{place}.mountPath"))
        elif point in points:
            text = "must be unique"
            causes.append(invalid_value(f"{place}.mountPath", point, text))
        points.add(point or "")
        for field in ("subPath", "subPathExpr"):
            causes += _inner_path(mount.get(field), f"{place}.{field}")
    return causes


def _inner_path(text: str | None, path: str) -> list[Cause]:
    if not text:
        return []
    if text.startswith("/"):
        return [invalid_value(path, text, "must be a relative path")]
    if ".." in text.split("/"):
        return [invalid_value(path, text, "must not contain '..'")]
    return []


def _volumes(volumes: list[Object], path: str) -> list[Cause]:
    causes: list[Cause] = []
    seen: set[str] = set()
    for index, volume in enumerate(volumes):
        place = f"{path}[{index}]"
        if not volume.get("name"):
            causes.append(required_value(f"{place}.name"))
        else:
            causes += names.each(names.dns_label, f"{place}.name", volume["name"])
            causes += _once(volume["name"], seen, f"{place}.name")
        sources = [key for key in volume if key != "name"]
        if not sources:
            causes.append(required_value(place, "must specify a volume type"))
        causes += [
            forbidden(f"{place}.{extra}", "may not specify more than 1 volume type")
            for extra in sources[1:]
        ]
        needed = {
            "configMap": "name",
            "secret": "secretName",
            "hostPath": "path",
            "persistentVolumeClaim": "claimName",
        }
        causes += [
            required_value(f"{place}.{source}.{field}")
            for source, field in needed.items()
            if source in volume and not volume[source].get(field)
        ]
    return causes


def _resources(resources: Object, path: str) -> list[Cause]:
    causes: list[Cause] = []
    limits: Mapping[str, Any] = resources.get("limits") or {}
    requests: Mapping[str, Any] = resources.get("requests") or {}
    for field, amounts in (("limits", limits), ("requests", requests)):
        for name, amount in amounts.items():
            causes += quantity(amount, f"{path}.{field}[{name}]")
    if causes:
        return causes
    for name, amount in requests.items():
        limit = limits.get(name)
        is_extended = "/" in name
        if limit is None:
            if is_extended:
                text = "Limit must be set for non overcommitable resources"
                causes.append(Cause("FieldValueRequired", f"{path}.limits", text))
        elif parse_quantity(amount) > parse_quantity(limit):
            text = f"must be less than or equal to {name} limit of {limit}"
            causes.append(invalid_value(f"{path}.requests", str(amount), text))
        elif is_extended and parse_quantity(amount) != parse_quantity(limit):
            text = f"must be equal to {name} limit of {limit}"
            causes.append(invalid_value(f"{path}.requests", str(amount), text))
    return causes


def quantity(amount: Any, path: str) -> list[Cause]:
    """A quantity that is not negative."""
    try:
        value = parse_quantity(amount)
    except QuantityError as error:
        return [invalid_value(path, str(amount), str(error))]
    if value < 0:
        text = "must be greater than or equal to 0"
        return [invalid_value(path, str(amount), text)]
    return []


def _probes(container: Object, path: str) -> list[Cause]:
    causes: list[Cause] = []
    for field in ("livenessProbe", "readinessProbe", "startupProbe"):
        probe = container.get(field)
        if probe is None:
            continue
        causes += _handler(probe, f"{path}.{field}")
        for name in ("initialDelaySeconds", "timeoutSeconds", "periodSeconds", "failureThreshold"):
            if (probe.get(name) or 0) < 0:
                text = "must be greater than or equal to 0"
                causes.append(invalid_value(f"{path}.{field}.{name}", probe[name], text))
        if field != "readinessProbe" and probe.get("successThreshold") not in (None, 1):
            place = f"{path}.{field}.successThreshold"
            causes.append(invalid_value(place, probe["successThreshold"], "must be 1"))
    for field, handler in (container.get("lifecycle") or {}).items():
        if isinstance(handler, dict):
            causes += _handler(handler, f"{path}.lifecycle.{field}", extra=("sleep",))
    return causes


def _handler(handler: Object, path: str, extra: tuple[str, ...] = ()) -> list[Cause]:
    kinds = [name for name in (*HANDLERS, *extra) if handler.get(name) is not None]
    if not kinds:
        return [required_value(path, "must specify a handler type")]
    causes = [
        forbidden(f"{path}.{name}", "may not specify more than 1 handler type")
        for name in kinds[1:]
    ]
    if "exec" in kinds and not handler["exec"].get("command"):
        causes.append(required_value(f"{path}.exec.command"))
    for name in ("httpGet", "tcpSocket"):
        port = (handler.get(name) or {}).get("port")
        if name in kinds and isinstance(port, int | None):
            causes += port_number(port, f"{path}.{name}.port")
    return causes


def _toleration(toleration: Object, path: str) -> list[Cause]:
    causes: list[Cause] = []
    key, operator = toleration.get("key"), toleration.get("operator") or "Equal"
    if key:
        causes += names.each(names.qualified_name, f"{path}.key", key)
    elif operator != "Exists":
        text = (
            'operator must be Exists when `key` is empty, which means "match all values and '
            'all keys"'
        )
        causes.append(invalid_value(f"{path}.operator", operator, text))
    if operator not in ("Equal", "Exists"):
        causes.append(unsupported(f"{path}.operator", operator, ["Equal", "Exists"]))
    if operator == "Exists" and toleration.get("value"):
        text = "value must be empty when `operator` is 'Exists'"
        causes.append(invalid_value(f"{path}.operator", toleration["value"], text))
    effect = toleration.get("effect")
    if effect and effect not in EFFECTS:
        causes.append(unsupported(f"{path}.effect", effect, EFFECTS))
    if toleration.get("tolerationSeconds") is not None and effect != "NoExecute":
        text = "effect must be 'NoExecute' when `tolerationSeconds` is set"
        causes.append(invalid_value(f"{path}.effect", effect or "", text))
    return causes


def validate_pod_update(old: Object, new: Object) -> list[Cause]:
    """A change of a pod; the node is given by `pods/binding` only."""
    before, after = old["spec"], new.get("spec") or {}
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    causes: list[Cause] = []
    frozen = changed - set(MUTABLE) - {"containers", "initContainers"}
    for field in ("containers", "initContainers"):
        if field in changed and _without_images(before, field) != _without_images(after, field):
            frozen.add(field)
    if "nodeName" in changed and before.get("nodeName"):
        frozen.add("nodeName")
    if frozen:
        text = (
            "pod updates may not change fields other than `spec.containers[*].image`,"
            "`spec.initContainers[*].image`,`spec.activeDeadlineSeconds`,`spec.tolerations` "
            "(only additions to existing tolerations),`spec.terminationGracePeriodSeconds` "
            "(allow it to be set to 1 if it was previously negative)\nchanged: "
            + ", ".join(f"spec.{name}" for name in sorted(frozen))
        )
        causes.append(forbidden("spec", text))
    if "tolerations" in changed and not _only_added(before, after):
        text = "existing toleration can not be modified except its tolerationSeconds"
        causes.append(forbidden("spec.tolerations", text))
    deadline = (before.get("activeDeadlineSeconds"), after.get("activeDeadlineSeconds"))
    if deadline[0] is not None and (deadline[1] is None or deadline[1] > deadline[0]):
        text = "must be less than or equal to previous value"
        causes.append(invalid_value("spec.activeDeadlineSeconds", deadline[1], text))
    return causes


def _without_images(spec: Object, field: str) -> list[Object]:
    containers: Iterable[Object] = spec.get(field) or []
    return [{key: value for key, value in c.items() if key != "image"} for c in containers]


def _only_added(before: Object, after: Object) -> bool:
    def bare(tolerations: Iterable[Object]) -> list[Object]:
        return [
            {key: value for key, value in item.items() if key != "tolerationSeconds"}
            for item in tolerations
        ]

    kept = bare(after.get("tolerations") or [])
    return all(item in kept for item in bare(before.get("tolerations") or []))
