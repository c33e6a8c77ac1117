"""Environment and command line of a container, computed from values.

References are resolved against objects that the caller has at hand. An unresolved reference is a
ConfigProblem, which becomes the reason a container waits (kubelet v1.33, kubelet_pods.go
makeEnvironmentVariables; expansion as in third_party/forked/golang/expansion).
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import ROUND_CEILING

from unbroken.errors import UnbrokenError
from unbroken.kube.quantity import parse_quantity

from .events import Object

NO_IMAGE = "unbroken runs no images: give the container a command"
_REFERENCE = re.compile(r"\$(\$|\(([^)]*)\)|)")
_SUBSCRIPT = re.compile(r"metadata\.(labels|annotations)\['([^']*)'\]\Z")
_VARIABLE = re.compile(r"[-._a-zA-Z][-._a-zA-Z0-9]*\Z")


class ConfigProblem(UnbrokenError):
    """A container cannot be made from what is there; `reason` is shown as its waiting reason."""

    def __init__(self, message: str, reason: str = "CreateContainerConfigError") -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class EnvironmentSources:
    """Sources of a container's environment."""

    pod: Object
    pod_ip: str
    host_ip: str
    node_name: str
    allocatable: Mapping[str, str]
    """Allocatable resources of the node: what a container without limits may use."""
    config_maps: Mapping[str, Object | None] = field(default_factory=dict)
    """ConfigMaps of the namespace by name; None: does not exist."""
    secrets: Mapping[str, Object | None] = field(default_factory=dict)
    base: Mapping[str, str] = field(default_factory=dict)
    """Variables of the host that every container gets, as an image would give them."""
    api_host: str = ""
    api_port: str = ""


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Replace `$(NAME)` where NAME is known; `$$` is a dollar sign, all else stays."""

    def replaced(match: re.Match[str]) -> str:
        if match[1] == "$":
            return "$"
        if match[2] is None:
            return match[0]
        return variables.get(match[2], match[0])

    return _REFERENCE.sub(replaced, text)


def command_line(container: Object, variables: Mapping[str, str]) -> list[str]:
    """Return the program and its arguments. Raises ConfigProblem if there is nothing to run.

    Arguments alone are taken as the whole line. They have this meaning for an image without an
    entry point, such as busybox, python or most that people build for training.
    """
    parts = [*(container.get("command") or ()), *(container.get("args") or ())]
    if not parts:
        raise ConfigProblem(NO_IMAGE, "CreateContainerError")
    return [expand(part, variables) for part in parts]


def references(spec: Object) -> tuple[set[str], set[str]]:
    """Names of the (ConfigMaps, Secrets) that containers and volumes of a pod refer to."""
    maps: set[str] = set()
    secrets: set[str] = set()
    for container in (*(spec.get("initContainers") or ()), *(spec.get("containers") or ())):
        for source in container.get("envFrom") or ():
            _note(maps, source.get("configMapRef"))
            _note(secrets, source.get("secretRef"))
        for entry in container.get("env") or ():
            source = entry.get("valueFrom") or {}
            _note(maps, source.get("configMapKeyRef"))
            _note(secrets, source.get("secretKeyRef"))
    for volume in spec.get("volumes") or ():
        for part in (volume, *((volume.get("projected") or {}).get("sources") or ())):
            _note(maps, part.get("configMap"))
            _note(secrets, part.get("secret"))
    return maps, secrets


def _note(names: set[str], reference: Object | None) -> None:
    if reference:
        name = reference.get("name") or reference.get("secretName")
        if name:
            names.add(name)


def environment(container: Object, around: EnvironmentSources) -> dict[str, str]:
    """All variables of a container, in the order in which later ones override."""
    name = around.pod["metadata"]["name"]
    result = dict(around.base)
    result["HOSTNAME"] = around.pod["spec"].get("hostname") or name
    if around.api_host:
        result |= {
            "KUBERNETES_SERVICE_HOST": around.api_host,
            "KUBERNETES_SERVICE_PORT": around.api_port,
            "KUBERNETES_SERVICE_PORT_HTTPS": around.api_port,
            "KUBERNETES_PORT": f"tcp://{around.api_host}:{around.api_port}",
        }
    for source in container.get("envFrom") or ():
        prefix = source.get("prefix") or ""
        for key, value in _all_of(source, around).items():
            if _VARIABLE.match(prefix + key):
                result[prefix + key] = value
    for entry in container.get("env") or ():
        given = _value(entry, container, around, result)
        if given is not None:
            result[entry["name"]] = given
    return result


def _all_of(source: Object, around: EnvironmentSources) -> dict[str, str]:
    if reference := source.get("configMapRef"):
        result = _lookup("configmap", around.config_maps, reference, around)
        return {} if result is None else dict(result.get("data") or {})
    if reference := source.get("secretRef"):
        result = _lookup("secret", around.secrets, reference, around)
        data = {} if result is None else result.get("data") or {}
        return {key: _decoded(value, key) for key, value in data.items()}
    return {}


def _value(
    entry: Object, container: Object, around: EnvironmentSources, known: Mapping[str, str]
) -> str | None:
    source = entry.get("valueFrom")
    if not source:
        return expand(entry.get("value") or "", known)
    if reference := source.get("fieldRef"):
        return field_value(reference["fieldPath"], around)
    if reference := source.get("resourceFieldRef"):
        return resource_value(reference, container, around)
    if reference := source.get("configMapKeyRef"):
        result = _lookup("configmap", around.config_maps, reference, around)
        return _key("ConfigMap", result, reference, around)
    if reference := source.get("secretKeyRef"):
        result = _lookup("secret", around.secrets, reference, around)
        value = _key("Secret", result, reference, around)
        return None if value is None else _decoded(value, reference["key"])
    raise ConfigProblem(f"the source of variable {entry['name']} is not supported")


def _lookup(
    kind: str, objects: Mapping[str, Object | None], reference: Object, around: EnvironmentSources
) -> Object | None:
    result = objects.get(reference.get("name", ""))
    if result is None and not reference.get("optional"):
        raise ConfigProblem(f'{kind} "{reference.get("name", "")}" not found')
    return result


def _key(
    kind: str, found: Object | None, reference: Object, around: EnvironmentSources
) -> str | None:
    data = {} if found is None else found.get("data") or {}
    if reference["key"] in data:
        return str(data[reference["key"]])
    if reference.get("optional"):
        return None
    where = f"{around.pod['metadata'].get('namespace', 'default')}/{reference['name']}"
    raise ConfigProblem(f"couldn't find key {reference['key']} in {kind} {where}")


def _decoded(value: str, key: str) -> str:
    try:
        return base64.b64decode(value, validate=True).decode()
    except ValueError as error:
        raise ConfigProblem(f"the value of key {key} cannot be a variable: {error}") from error


# --- the downward API


def field_value(path: str, around: EnvironmentSources) -> str:
    """A field of the pod, as fieldRef names it; ConfigProblem for one that is not offered."""
    metadata, spec = around.pod["metadata"], around.pod["spec"]
    if match := _SUBSCRIPT.match(path):
        return str((metadata.get(match[1]) or {}).get(match[2], ""))
    if path in ("metadata.labels", "metadata.annotations"):
        entries = metadata.get(path.rpartition(".")[2]) or {}
        return "\n".join(f"{key}={_quoted(value)}" for key, value in sorted(entries.items()))
    fields = {
        "metadata.name": metadata["name"],
        "metadata.namespace": metadata.get("namespace", "default"),
        "metadata.uid": metadata["uid"],
        "spec.nodeName": around.node_name,
        "spec.serviceAccountName": spec.get("serviceAccountName", "default"),
        "spec.restartPolicy": spec.get("restartPolicy", "Always"),
        "status.hostIP": around.host_ip,
        "status.hostIPs": around.host_ip,
        "status.podIP": around.pod_ip,
        "status.podIPs": around.pod_ip,
    }
    if path not in fields:
        raise ConfigProblem(f"fieldPath {path} is not supported")
    return str(fields[path])


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def resource_value(reference: Object, container: Object, around: EnvironmentSources) -> str:
    """A request or limit of a container in units of its divisor, rounded up."""
    wanted = reference.get("containerName")
    if wanted:
        spec = around.pod["spec"]
        every = (*(spec.get("initContainers") or ()), *spec["containers"])
        container = next((c for c in every if c["name"] == wanted), container)
    kind, _, resource = reference["resource"].partition(".")
    resources = container.get("resources") or {}
    amount = (resources.get(kind) or {}).get(resource)
    if amount is None:
        amount = "0"
        if kind == "limits":
            amount = around.allocatable.get(resource, "0")
    divisor = parse_quantity(reference.get("divisor") or 0)
    count = parse_quantity(amount) / (divisor or 1)
    return str(int(count.to_integral_value(rounding=ROUND_CEILING)))
