"""Validation of a pod's volumes, in Kubernetes' words.

Source: kubernetes v1.33, pkg/apis/core/validation/validation.go. Sources of volumes that nothing
here can mount are known by name and otherwise accepted unchecked.
"""

from __future__ import annotations

from unbroken.kube.quantity import parse_quantity
from unbroken.local.apiserver.http.status import Cause, Object
from unbroken.local.apiserver.schema.constraints import forbidden, invalid_value, required_value

from . import names
from .containers import inner_path, no_way_up, pod_field
from .fields import named, needed, optional, unique

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
