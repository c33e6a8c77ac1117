"""Validation of containers, in Kubernetes' words.

Source: kubernetes v1.33, pkg/apis/core/validation/validation.go.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from unbroken.kube.quantity import parse_quantity
from unbroken.local.apiserver.http.status import Cause, Object
from unbroken.local.apiserver.schema.constraints import forbidden, invalid_value, required_value

from . import names
from .fields import (
    PROTOCOLS,
    duplicate,
    named,
    needed,
    not_found,
    not_negative,
    one_of,
    optional,
    port,
    port_number,
    quantity,
    unique,
)

PULL_POLICIES = ("Always", "IfNotPresent", "Never")
HANDLERS = ("exec", "httpGet", "tcpSocket", "grpc")
LIFECYCLE_HANDLERS = ("exec", "httpGet", "tcpSocket", "sleep")
PROBES = ("livenessProbe", "readinessProbe", "startupProbe")
ID_MAX = 2**31 - 1
POD_FIELDS = (
    "metadata.name",
    "metadata.namespace",
    "metadata.uid",
    "spec.nodeName",
    "spec.serviceAccountName",
    "status.hostIP",
    "status.hostIPs",
    "status.podIP",
    "status.podIPs",
)
"""Fields that `fieldRef` can take into the environment, besides single labels and annotations."""
POD_LISTS = ("metadata.labels", "metadata.annotations")
CONTAINER_RESOURCES = (
    "limits.cpu",
    "limits.ephemeral-storage",
    "limits.memory",
    "requests.cpu",
    "requests.ephemeral-storage",
    "requests.memory",
)
STANDARD_RESOURCES = ("cpu", "memory", "ephemeral-storage")
_SUBSCRIPT = re.compile(r"(metadata\.(?:labels|annotations))\['(.*)'\]", re.DOTALL)
_HEADER_TEXT = (
    "a valid HTTP header must consist of alphanumeric characters or '-' "
    "(e.g. 'X-Header-Name', regex used for validation is '[-A-Za-z0-9]+')"
)


def validate_containers(spec: Object, path: str) -> list[Cause]:
    """Containers and init containers of a pod."""
    volumes = {volume.get("name") or "" for volume in spec.get("volumes") or []}
    causes: list[Cause] = []
    if not spec.get("containers"):
        causes.append(required_value(f"{path}.containers"))
    seen: set[str] = set()
    for field in ("containers", "initContainers"):
        for index, container in enumerate(spec.get(field) or []):
            place, is_init = f"{path}.{field}[{index}]", field == "initContainers"
            causes += _container(container, place, volumes, is_init=is_init)
            name = container.get("name")
            if name and name in seen:
                causes.append(duplicate(f"{place}.name", name))
            seen.add(name)
    return causes + _host_ports(spec.get("containers") or [], f"{path}.containers")


def _container(container: Object, path: str, volumes: set[str], *, is_init: bool) -> list[Cause]:
    causes = needed(container, path, "name", "image")
    causes += named(container, path, "name", names.dns_label)
    image = container.get("image") or ""
    if image != image.strip():
        text = "must not have leading or trailing whitespace"
        causes.append(invalid_value(f"{path}.image", image, text))
    causes += one_of(container, path, "imagePullPolicy", PULL_POLICIES)
    policy = container.get("terminationMessagePolicy")
    if policy not in ("File", "FallbackToLogsOnError"):
        text = "must be 'File' or 'FallbackToLogsOnError'"
        causes.append(invalid_value(f"{path}.terminationMessagePolicy", policy or "", text))
    causes += _ports(container.get("ports") or [], f"{path}.ports")
    causes += _environment(container, path)
    causes += _mounts(container.get("volumeMounts") or [], f"{path}.volumeMounts", volumes)
    causes += validate_resources(container.get("resources") or {}, f"{path}.resources")
    causes += _hooks(container, path)
    causes += _security(container.get("securityContext") or {}, f"{path}.securityContext")
    return causes + _role(container, path, is_init=is_init)


def _role(container: Object, path: str, *, is_init: bool) -> list[Cause]:
    """Check fields that only some containers can have."""
    policy = container.get("restartPolicy")
    if not is_init:
        text = "may not be set for non-init containers"
        return [forbidden(f"{path}.restartPolicy", text)] if policy is not None else []
    if policy is not None:
        return one_of(container, path, "restartPolicy", ("Always",))
    text = "may not be set for init containers without restartPolicy=Always"
    return [
        forbidden(f"{path}.{field}", text)
        for field in ("lifecycle", *PROBES)
        if container.get(field) is not None
    ]


def _ports(ports: list[Object], path: str) -> list[Cause]:
    causes: list[Cause] = []
    for index, item in enumerate(ports):
        place = f"{path}[{index}]"
        causes += named(item, place, "name", names.port_name)
        if item.get("containerPort"):
            causes += port_number(item["containerPort"], f"{place}.containerPort")
        else:
            causes.append(required_value(f"{place}.containerPort"))
        if item.get("hostPort"):
            causes += port_number(item["hostPort"], f"{place}.hostPort")
        causes += one_of(item, place, "protocol", PROTOCOLS)
    return causes + unique((item.get("name") for item in ports), path, ".name")


def _host_ports(containers: Iterable[Object], path: str) -> list[Cause]:
    causes: list[Cause] = []
    seen: set[str] = set()
    for number, container in enumerate(containers):
        for index, item in enumerate(container.get("ports") or []):
            if not item.get("hostPort"):
                continue
            text = f"{item.get('protocol')}/{item.get('hostIP') or ''}/{item['hostPort']}"
            if text in seen:
                causes.append(duplicate(f"{path}[{number}].ports[{index}].hostPort", text))
            seen.add(text)
    return causes


def _environment(container: Object, path: str) -> list[Cause]:
    causes: list[Cause] = []
    for index, variable in enumerate(container.get("env") or []):
        place = f"{path}.env[{index}]"
        causes += needed(variable, place, "name")
        causes += named(variable, place, "name", names.environment_name)
        if variable.get("valueFrom") is not None:
            causes += _value_from(variable, f"{place}.valueFrom")
    for index, source in enumerate(container.get("envFrom") or []):
        place = f"{path}.envFrom[{index}]"
        causes += named(source, place, "prefix", names.environment_name)
        kinds = [kind for kind in ("configMapRef", "secretRef") if source.get(kind) is not None]
        for kind in kinds:
            name = source[kind].get("name") or ""
            causes += names.each(names.dns_subdomain, f"{place}.{kind}.name", name)
        if not kinds:
            text = "must specify one of: `configMapRef` or `secretRef`"
            causes.append(invalid_value(f"{path}.envFrom", "", text))
        elif len(kinds) > 1:
            text = "may not have more than one field specified at a time"
            causes.append(invalid_value(f"{path}.envFrom", "", text))
    return causes


def _value_from(variable: Object, path: str) -> list[Cause]:
    source: Object = variable["valueFrom"]
    causes: list[Cause] = []
    if source.get("fieldRef") is not None:
        causes += pod_field(source["fieldRef"], f"{path}.fieldRef", POD_FIELDS)
    if source.get("resourceFieldRef") is not None:
        place = f"{path}.resourceFieldRef"
        causes += one_of(source["resourceFieldRef"], place, "resource", CONTAINER_RESOURCES)
    for kind in ("configMapKeyRef", "secretKeyRef"):
        if source.get(kind) is not None:
            place, name = f"{path}.{kind}", source[kind].get("name") or ""
            causes += names.each(names.dns_subdomain, f"{place}.name", name)
            causes += needed(source[kind], place, "key")
            causes += named(source[kind], place, "key", names.config_key)
    if len(source) > 1:
        text = "may not have more than one field specified at a time"
        causes.append(invalid_value(path, "", text))
    elif not source:
        kinds = "`fieldRef`, `resourceFieldRef`, `configMapKeyRef` or `secretKeyRef`"
        causes.append(invalid_value(path, "", f"must specify one of: {kinds}"))
    elif variable.get("value"):
        text = "may not be specified when `value` is not empty"
        causes.append(invalid_value(path, "", text))
    return causes


def pod_field(reference: Object, path: str, allowed: tuple[str, ...]) -> list[Cause]:
    """A field of the pod; of labels and annotations also single ones."""
    field = reference.get("fieldPath") or ""
    if not field:
        return [required_value(f"{path}.fieldPath")]
    subscript = _SUBSCRIPT.fullmatch(field)
    if subscript is not None:
        key = subscript[2]
        rule_key = key.lower() if subscript[1] == "metadata.annotations" else key
        return [invalid_value(path, key, text) for text in names.qualified_name(rule_key)]
    if field not in (*POD_FIELDS, *POD_LISTS):
        text = f"error converting fieldPath: field label not supported: {field}"
        return [invalid_value(f"{path}.fieldPath", field, text)]
    return one_of(reference, path, "fieldPath", allowed)


def _mounts(mounts: list[Object], path: str, volumes: set[str]) -> list[Cause]:
    causes: list[Cause] = []
    points: set[str] = set()
    for index, mount in enumerate(mounts):
        place = f"{path}[{index}]"
        causes += needed(mount, place, "name", "mountPath")
        if (mount.get("name") or "") not in volumes:
            causes.append(not_found(f"{place}.name", mount.get("name") or ""))
        point = mount.get("mountPath") or ""
        if point and point in points:
            causes.append(invalid_value(f"{place}.mountPath", point, "must be unique"))
        points.add(point)
        for field in ("subPath", "subPathExpr"):
            if mount.get(field):
                causes += inner_path(mount[field], f"{path}.{field}")
        if mount.get("subPath") and mount.get("subPathExpr"):
            text = "subPathExpr and subPath are mutually exclusive"
            causes.append(invalid_value(f"{place}.subPathExpr", mount["subPathExpr"], text))
    return causes


def inner_path(text: str, path: str) -> list[Cause]:
    """A path that stays below where it starts."""
    causes = []
    if text.startswith("/"):
        causes.append(invalid_value(path, text, "must be a relative path"))
    return causes + no_way_up(text, path)


def no_way_up(text: str, path: str) -> list[Cause]:
    """A path without `..`."""
    if ".." in text.split("/"):
        return [invalid_value(path, text, "must not contain '..'")]
    return []


def validate_resources(resources: Object, path: str) -> list[Cause]:
    """Limits and requests."""
    limits: Object = resources.get("limits") or {}
    requests: Object = resources.get("requests") or {}
    causes: list[Cause] = []
    for field, amounts in (("limits", limits), ("requests", requests)):
        for name, amount in amounts.items():
            place = f"{path}.{field}[{name}]"
            causes += _resource_name(name, place)
            wrong = quantity(amount, place)
            if not wrong and "/" in name and parse_quantity(amount) % 1:
                wrong = [invalid_value(place, str(amount), "must be an integer")]
            causes += wrong
    if not causes:
        for name, amount in requests.items():
            causes += _request(name, amount, limits, path)
    named = {*limits, *requests}
    if any(name.startswith("hugepages-") for name in named) and not named & {"cpu", "memory"}:
        causes.append(forbidden(path, "HugePages require cpu or memory"))
    return causes


def _resource_name(name: str, path: str) -> list[Cause]:
    if "/" not in name:
        if name in STANDARD_RESOURCES or name.startswith("hugepages-"):
            return []
        texts = (
            "must be a standard resource type or fully qualified",
            "must be a standard resource for containers",
        )
        return [invalid_value(path, name, text) for text in texts]
    causes = names.each(names.qualified_name, path, name)
    if causes:
        text = "doesn't follow extended resource name standard"
        causes.append(invalid_value(path, name, text))
    return causes


def _request(name: str, amount: Any, limits: Object, path: str) -> list[Cause]:
    can_be_over = "/" not in name and not name.startswith("hugepages-")
    limit = limits.get(name)
    if limit is None:
        text = "Limit must be set for non overcommitable resources"
        return [] if can_be_over else [required_value(f"{path}.limits", text)]
    wanted, most = parse_quantity(amount), parse_quantity(limit)
    if can_be_over and wanted > most:
        text = f"must be less than or equal to {name} limit of {limit}"
        return [invalid_value(f"{path}.requests", str(amount), text)]
    if not can_be_over and wanted != most:
        text = f"must be equal to {name} limit of {limit}"
        return [invalid_value(f"{path}.requests", str(amount), text)]
    return []


def _hooks(container: Object, path: str) -> list[Cause]:
    causes: list[Cause] = []
    for field in PROBES:
        probe, place = container.get(field), f"{path}.{field}"
        if probe is None:
            continue
        causes += _handler(probe, place, HANDLERS)
        causes += not_negative(
            probe,
            place,
            "initialDelaySeconds",
            "timeoutSeconds",
            "periodSeconds",
            "successThreshold",
            "failureThreshold",
        )
        if field != "readinessProbe" and probe.get("successThreshold") != 1:
            times = probe.get("successThreshold") or 0
            causes.append(invalid_value(f"{place}.successThreshold", times, "must be 1"))
    for field in ("postStart", "preStop"):
        handler = (container.get("lifecycle") or {}).get(field)
        if handler is not None:
            causes += _handler(handler, f"{path}.lifecycle.{field}", LIFECYCLE_HANDLERS)
    return causes


def _handler(handler: Object, path: str, known: tuple[str, ...]) -> list[Cause]:
    kinds = [kind for kind in known if handler.get(kind) is not None]
    if not kinds:
        return [required_value(path, "must specify a handler type")]
    text = "may not specify more than 1 handler type"
    causes = [forbidden(f"{path}.{kind}", text) for kind in kinds[1:]]
    first, place = handler[kinds[0]], f"{path}.{kinds[0]}"
    match kinds[0]:
        case "exec":
            causes += needed(first, place, "command")
        case "httpGet":
            causes += needed(first, place, "path") + port(first.get("port"), f"{place}.port")
            causes += one_of(first, place, "scheme", ("HTTP", "HTTPS"))
            for header in first.get("httpHeaders") or []:
                name = header.get("name") or ""
                if not re.fullmatch("[-A-Za-z0-9]+", name):
                    causes.append(invalid_value(f"{place}.httpHeaders", name, _HEADER_TEXT))
        case "tcpSocket" | "grpc":
            causes += port(first.get("port"), f"{place}.port")
        case _:
            causes += not_negative(first, place, "seconds")
    return causes


def identities(context: Object, path: str, *fields: str) -> list[Cause]:
    """Numbers of users and groups."""
    text = f"must be between 0 and {ID_MAX}, inclusive"
    return [
        invalid_value(f"{path}.{field}", context[field], text)
        for field in fields
        if context.get(field) is not None and not 0 <= context[field] <= ID_MAX
    ]


def _security(context: Object, path: str) -> list[Cause]:
    causes = identities(context, path, "runAsUser", "runAsGroup")
    causes += optional(context, path, "procMount", ("Default", "Unmasked"))
    if context.get("privileged") and context.get("allowPrivilegeEscalation") is False:
        text = "cannot set `allowPrivilegeEscalation` to false and `privileged` to true"
        causes.append(invalid_value(path, context, text))
    return causes
