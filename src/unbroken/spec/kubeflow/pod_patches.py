"""Changes of a pod template, merged as Kubeflow Trainer merges the `runtimePatches` of a TrainJob.

Trainer uses Kubernetes' strategic merge (kubeflow/trainer 2.3, pkg/runtime/core/trainingruntime.go,
`mergeRuntimePatches`): objects are merged, and lists by the keys below. All other lists are
replaced. A variable or a volume is replaced as a whole, so that it never has two sources.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Object = Mapping[str, Any]
LIST_KEYS = {
    "containers": "name",
    "env": "name",
    "imagePullSecrets": "name",
    "initContainers": "name",
    "schedulingGates": "name",
    "volumeMounts": "mountPath",
    "volumes": "name",
}
"""Keys of the items of lists that are merged (`patchMergeKey` in Kubernetes' core/v1 types.go)."""
REPLACED = ("env", "volumes")
"""Lists whose items are replaced as a whole."""
DEPTH_MAX = 40
"""Levels that are merged; a pod template has about 15. Deeper values are replaced."""


def merged(base: Object, patch: Object, depth: int = DEPTH_MAX) -> dict[str, Any]:
    """Return an object with the changes of a patch; both stay as they are."""
    result = dict(base)
    for key, value in patch.items():
        old = result.get(key)
        if depth <= 0 or value is None:
            result[key] = value if value is not None else old
        elif isinstance(old, Mapping) and isinstance(value, Mapping):
            result[key] = merged(old, value, depth - 1)
        elif key in LIST_KEYS and isinstance(old, list | tuple) and isinstance(value, list | tuple):
            result[key] = merged_list(str(key), old, value, depth - 1)
        else:
            result[key] = value
    return result


def merged_list(
    field: str,
    base: list[Any] | tuple[Any, ...],
    patch: list[Any] | tuple[Any, ...],
    depth: int = DEPTH_MAX,
) -> list[Any]:
    """Return a list of LIST_KEYS with the changes of a patch: known items in their places, new ones
    at the end."""
    key, result = LIST_KEYS[field], list(base)
    places: dict[str, int] = {}
    for number, item in enumerate(result):
        if (name := _named(item, key)) is not None:
            places.setdefault(name, number)
    for item in patch:
        name = _named(item, key)
        place = None if name is None else places.setdefault(name, len(result))
        if place is None or place == len(result):
            result.append(item)
        elif field in REPLACED:
            result[place] = item
        else:
            result[place] = merged(result[place], item, depth)
    return result


def _named(item: Any, key: str) -> str | None:
    """Return the text by which an item of a list is found; None: it has none."""
    name = item.get(key) if isinstance(item, Mapping) else None
    return name if isinstance(name, str) else None
