"""Rules of pods, their containers and their volumes, in Kubernetes' words.

Source: kubernetes v1.33, pkg/apis/core/validation/validation.go. They check mistakes that matter on
this cluster. Fields that only a container runtime or a network would use are accepted unchecked, as
are sources of volumes that nothing here can mount.
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
    EFFECTS,
    PROTOCOLS,
    changed_fields,
    duplicate,
    is_address,
    label_selector,
    named,
    needed,
    node_expression,
    not_found,
    not_negative,
    one_of,
    optional,
    port,
    port_number,
    quantity,
    unique,
)

_HARD = "requiredDuringSchedulingIgnoredDuringExecution"
_SOFT = "preferredDuringSchedulingIgnoredDuringExecution"


def validate_placement(spec: Object, path: str) -> list[Cause]:
    """Everything in a pod's spec that chooses nodes."""
    causes = names.validate_labels(spec.get("nodeSelector") or {}, f"{path}.nodeSelector")
    for index, toleration in enumerate(spec.get("tolerations") or []):
        causes += _toleration(toleration, f"{path}.tolerations[{index}]")
    affinity = spec.get("affinity") or {}
    if affinity.get("nodeAffinity"):
        causes += _node_affinity(affinity["nodeAffinity"], f"{path}.affinity.nodeAffinity")
    for field in ("podAffinity", "podAntiAffinity"):
        if affinity.get(field):
            causes += _pod_affinity(affinity[field], f"{path}.affinity.{field}")
    for index, spread in enumerate(spec.get("topologySpreadConstraints") or []):
        causes += _spread(spread, f"{path}.topologySpreadConstraints[{index}]")
    return causes


def _toleration(toleration: Object, path: str) -> list[Cause]:
    causes = named(toleration, path, "key", names.qualified_name)
    operator, value = toleration.get("operator") or "Equal", toleration.get("value") or ""
    if not toleration.get("key") and operator != "Exists":
        text = (
            'operator must be Exists when `key` is empty, which means "match all values and '
            'all keys"'
        )
        causes.append(invalid_value(f"{path}.operator", operator, text))
    if operator == "Equal":
        causes += names.each(names.label_value, f"{path}.operator", value)
    elif operator == "Exists" and value:
        text = "value must be empty when `operator` is 'Exists'"
        causes.append(invalid_value(f"{path}.operator", toleration, text))
    causes += optional(toleration, path, "operator", ("Equal", "Exists"))
    effect = toleration.get("effect") or ""
    if toleration.get("tolerationSeconds") is not None and effect != "NoExecute":
        text = "effect must be 'NoExecute' when `tolerationSeconds` is set"
        causes.append(invalid_value(f"{path}.effect", effect, text))
    return causes + optional(toleration, path, "effect", EFFECTS)


def _weight(item: Object, path: str) -> list[Cause]:
    weight = item.get("weight") or 0
    if 1 <= weight <= 100:
        return []
    return [invalid_value(f"{path}.weight", weight, "must be in the range 1-100")]


def _node_term(term: Object, path: str) -> list[Cause]:
    causes: list[Cause] = []
    for index, item in enumerate(term.get("matchExpressions") or []):
        causes += node_expression(item, f"{path}.matchExpressions[{index}]")
    for index, item in enumerate(term.get("matchFields") or []):
        place = f"{path}.matchFields[{index}]"
        if item.get("operator") not in ("In", "NotIn"):
            text = "not a valid selector operator"
            causes.append(invalid_value(f"{place}.operator", item.get("operator") or "", text))
        elif len(item.get("values") or []) != 1:
            text = (
                "must be only one value when `operator` is 'In' or 'NotIn' for node field selector"
            )
            causes.append(required_value(f"{place}.values", text))
        if item.get("key") != "metadata.name":
            text = "not a valid field selector key"
            causes.append(invalid_value(f"{place}.key", item.get("key") or "", text))
    return causes


def _node_affinity(affinity: Object, path: str) -> list[Cause]:
    causes: list[Cause] = []
    if affinity.get(_HARD) is not None:
        place, terms = f"{path}.{_HARD}.nodeSelectorTerms", affinity[_HARD].get("nodeSelectorTerms")
        if not terms:
            causes.append(required_value(place, "must have at least one node selector term"))
        for index, term in enumerate(terms or []):
            causes += _node_term(term, f"{place}[{index}]")
    for index, item in enumerate(affinity.get(_SOFT) or []):
        place = f"{path}.{_SOFT}[{index}]"
        causes += _weight(item, place)
        causes += _node_term(item.get("preference") or {}, f"{place}.preference")
    return causes


def _pod_affinity(affinity: Object, path: str) -> list[Cause]:
    causes: list[Cause] = []
    for index, term in enumerate(affinity.get(_HARD) or []):
        causes += _pod_term(term, f"{path}.{_HARD}[{index}]")
    for index, item in enumerate(affinity.get(_SOFT) or []):
        place = f"{path}.{_SOFT}[{index}]"
        causes += _weight(item, place)
        causes += _pod_term(item.get("podAffinityTerm") or {}, f"{place}.podAffinityTerm")
    return causes


def _pod_term(term: Object, path: str) -> list[Cause]:
    causes = label_selector(term.get("labelSelector"), f"{path}.labelSelector")
    for namespace in term.get("namespaces") or []:
        causes += names.each(names.dns_label, f"{path}.namespace", namespace)
    key, place = term.get("topologyKey") or "", f"{path}.topologyKey"
    if not key:
        causes.append(required_value(place, "can not be empty"))
    return causes + names.each(names.qualified_name, place, key)


def _spread(spread: Object, path: str) -> list[Cause]:
    causes = label_selector(spread.get("labelSelector"), f"{path}.labelSelector")
    if (spread.get("maxSkew") or 0) <= 0:
        text = "must be greater than zero"
        causes.append(invalid_value(f"{path}.maxSkew", spread.get("maxSkew") or 0, text))
    if not spread.get("topologyKey"):
        causes.append(required_value(f"{path}.topologyKey", "can not be empty"))
    return causes + one_of(spread, path, "whenUnsatisfiable", ("DoNotSchedule", "ScheduleAnyway"))


RESTART_POLICIES = ("Always", "OnFailure", "Never")
DNS_POLICIES = ("ClusterFirstWithHostNet", "ClusterFirst", "Default", "None")
MUTABLE = ("activeDeadlineSeconds", "tolerations", "schedulingGates")
"""Fields of a pod's spec that an update may change at all; more is checked for each."""


def validate_pod(pod: Object) -> list[Cause]:
    """A new pod."""
    return validate_spec(pod.get("spec") or {}, "spec")


def validate_spec(spec: Object, path: str) -> list[Cause]:
    """The spec of a pod or of a pod template."""
    causes = validate_volumes(spec.get("volumes") or [], f"{path}.volumes")
    causes += validate_containers(spec, path)
    causes += one_of(spec, path, "restartPolicy", RESTART_POLICIES)
    causes += one_of(spec, path, "dnsPolicy", DNS_POLICIES)
    causes += not_negative(spec, path, "terminationGracePeriodSeconds")
    deadline = spec.get("activeDeadlineSeconds")
    if deadline is not None and not 1 <= deadline <= ID_MAX:
        text = f"must be between 1 and {ID_MAX}, inclusive"
        causes.append(invalid_value(f"{path}.activeDeadlineSeconds", deadline, text))
    for field in ("nodeName", "serviceAccountName", "priorityClassName"):
        causes += named(spec, path, field, names.dns_subdomain)
    for field in ("hostname", "subdomain"):
        causes += named(spec, path, field, names.dns_label)
    for index, gate in enumerate(spec.get("readinessGates") or []):
        place = f"{path}.readinessGates[{index}].conditionType"
        causes += names.each(names.qualified_name, place, gate.get("conditionType") or "")
    for alias in spec.get("hostAliases") or []:
        causes += _host_alias(alias, f"{path}.hostAliases")
    context, place = spec.get("securityContext") or {}, f"{path}.securityContext"
    causes += identities(context, place, "fsGroup", "runAsUser", "runAsGroup")
    return causes + validate_placement(spec, path)


def _host_alias(alias: Object, path: str) -> list[Cause]:
    causes = []
    if not is_address(alias.get("ip")):
        text = "must be valid IP address"
        causes.append(invalid_value(f"{path}.ip", alias.get("ip") or "", text))
    for name in alias.get("hostnames") or []:
        causes += names.each(names.dns_subdomain, f"{path}.hostnames", name)
    return causes


def validate_pod_update(old: Object, new: Object) -> list[Cause]:
    """A change of a pod by anything but a binding, which gives it its node."""
    before, after = old.get("spec") or {}, new.get("spec") or {}
    changed = changed_fields(before, after)
    causes: list[Cause] = []
    fixed = changed - set(MUTABLE) - {"containers", "initContainers"}
    for field in ("containers", "initContainers"):
        if field in changed and _without_images(before, field) != _without_images(after, field):
            fixed.add(field)
    if fixed:
        text = (
            "pod updates may not change fields other than `spec.containers[*].image`,"
            "`spec.initContainers[*].image`,`spec.activeDeadlineSeconds`,`spec.tolerations` "
            "(only additions to existing tolerations),`spec.terminationGracePeriodSeconds` "
            "(allow it to be set to 1 if it was previously negative)\nchanged: "
            + ", ".join(f"spec.{name}" for name in sorted(fixed))
        )
        causes.append(forbidden("spec", text))
    if "tolerations" in changed and not _only_added(before, after):
        text = "existing toleration can not be modified except its tolerationSeconds"
        causes.append(forbidden("spec.tolerations", text))
    return causes + _deadline_update(before, after)


def _deadline_update(before: Object, after: Object) -> list[Cause]:
    was, is_now = before.get("activeDeadlineSeconds"), after.get("activeDeadlineSeconds")
    if was is None or (is_now is not None and is_now <= was):
        return []
    text = (
        "must not update from a positive integer to nil value"
        if is_now is None
        else "must be less than or equal to previous value"
    )
    return [invalid_value("spec.activeDeadlineSeconds", is_now, text)]


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


HOST_PATHS = (
    "",
    "BlockDevice",
    "CharDevice",
    "Directory",
    "DirectoryOrCreate",
    "File",
    "FileOrCreate",
    "Socket",
)
FILE_FIELDS = (
    "metadata.annotations",
    "metadata.labels",
    "metadata.name",
    "metadata.namespace",
    "metadata.uid",
)
"""Fields of the pod that a file of a downward API volume can hold."""
MODE_MAX = 0o777


def validate_volumes(volumes: list[Object], path: str) -> list[Cause]:
    """Volumes of a pod."""
    causes: list[Cause] = []
    for index, volume in enumerate(volumes):
        place = f"{path}[{index}]"
        causes += needed(volume, place, "name") + named(volume, place, "name", names.dns_label)
        causes += single_source(volume, place, {"name"})
        causes += _known_source(volume, place)
    return causes + unique((volume.get("name") for volume in volumes), path, ".name")


def single_source(volume: Object, path: str, others: set[str]) -> list[Cause]:
    """Exactly one of the fields that are not `others`."""
    sources = [key for key in volume if key not in others]
    if not sources:
        return [required_value(path, "must specify a volume type")]
    text = "may not specify more than 1 volume type"
    return [forbidden(f"{path}.{extra}", text) for extra in sources[1:]]


def host_path(source: Object, path: str) -> list[Cause]:
    """A directory or file of the node."""
    causes = needed(source, path, "path") + no_way_up(source.get("path") or "", f"{path}.path")
    return causes + optional(source, path, "type", HOST_PATHS)


def _known_source(volume: Object, place: str) -> list[Cause]:
    causes: list[Cause] = []
    if volume.get("hostPath") is not None:
        causes += host_path(volume["hostPath"], f"{place}.hostPath")
    if volume.get("persistentVolumeClaim") is not None:
        source = volume["persistentVolumeClaim"]
        causes += needed(source, f"{place}.persistentVolumeClaim", "claimName")
    limit = (volume.get("emptyDir") or {}).get("sizeLimit")
    if limit is not None and parse_quantity(limit) < 0:
        text = "SizeLimit field must be a valid resource quantity"
        causes.append(forbidden(f"{place}.emptyDir.sizeLimit", text))
    for kind, name in (("configMap", "name"), ("secret", "secretName")):
        if volume.get(kind) is not None:
            causes += needed(volume[kind], f"{place}.{kind}", name)
            causes += _files(volume[kind], f"{place}.{kind}")
    if volume.get("downwardAPI") is not None:
        causes += _downward(volume["downwardAPI"], f"{place}.downwardAPI")
    if volume.get("projected") is not None:
        causes += _projected(volume["projected"], f"{place}.projected")
    return causes


def _mode(content: Object, path: str, field: str) -> list[Cause]:
    value = content.get(field)
    if value is None or 0 <= value <= MODE_MAX:
        return []
    text = "must be a number between 0 and 0777 (octal), both inclusive"
    return [invalid_value(f"{path}.{field}", value, text)]


def _files(source: Object, path: str) -> list[Cause]:
    """Keys and the files that they become."""
    causes = _mode(source, path, "defaultMode")
    for index, item in enumerate(source.get("items") or []):
        place = f"{path}.items[{index}]"
        causes += needed(item, place, "key", "path") + _mode(item, place, "mode")
        causes += _file_name(item, place)
    return causes


def _file_name(item: Object, path: str) -> list[Cause]:
    text = item.get("path") or ""
    causes = inner_path(text, f"{path}.path")
    if text.startswith("..") and not causes:
        causes.append(invalid_value(f"{path}.path", text, "must not start with '..'"))
    return causes


def _downward(source: Object, path: str) -> list[Cause]:
    causes = _mode(source, path, "defaultMode")
    for item in source.get("items") or []:
        causes += needed(item, path, "path") + _file_name(item, path) + _mode(item, path, "mode")
        field, resource = item.get("fieldRef"), item.get("resourceFieldRef")
        if field is not None:
            causes += pod_field(field, f"{path}.fieldRef", FILE_FIELDS)
            if resource is not None:
                text = "fieldRef and resourceFieldRef can not be specified simultaneously"
                causes.append(invalid_value(path, "resource", text))
        elif resource is not None:
            causes += needed(resource, f"{path}.resourceFieldRef", "containerName", "resource")
        else:
            text = "one of fieldRef and resourceFieldRef is required"
            causes.append(required_value(path, text))
    return causes


def _projected(source: Object, path: str) -> list[Cause]:
    causes = _mode(source, path, "defaultMode")
    for index, part in enumerate(source.get("sources") or []):
        place = f"{path}.sources[{index}]"
        causes += [
            forbidden(f"{place}.{extra}", "may not specify more than 1 volume type")
            for extra in list(part)[1:]
        ]
        for kind in ("configMap", "secret"):
            if part.get(kind) is not None:
                causes += needed(part[kind], f"{place}.{kind}", "name")
                causes += _files(part[kind], f"{place}.{kind}")
        if part.get("downwardAPI") is not None:
            causes += _downward(part["downwardAPI"], f"{place}.downwardAPI")
        if part.get("serviceAccountToken") is not None:
            causes += needed(part["serviceAccountToken"], f"{place}.serviceAccountToken", "path")
    return causes
