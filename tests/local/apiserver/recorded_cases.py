"""Requests with recorded answers of a real API server, under `recorded/`.

The YAML files hold the requests, the JSON files of the same name the answers of kube-apiserver
v1.20.2. `record_answers.py` asks a server again.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

Object = dict[str, Any]
FOLDER = Path(__file__).parent / "recorded"
NAMESPACE = "recorded"
BASE: Object = {"containers": [{"name": "a", "image": "b"}]}
BIG = "x" * (1024 * 1024)


@dataclass(frozen=True)
class Case:
    """One request: create `content`; with `change`, update it by that merge patch."""

    title: str
    """Resource, and the case as it is written."""
    resource: str
    content: Object
    change: Object | None
    status: Object | None


def cases(file: str) -> Iterator[Case]:
    """Yield every case of `recorded/FILE.yaml`."""
    given = yaml.safe_load((FOLDER / f"{file}.yaml").read_text())
    for resource, items in given.items():
        for item in items:
            title = f"{resource} {json.dumps(item)}"
            content = _content(resource, copy.deepcopy(item))
            yield Case(title, resource, content, item.get("change"), item.get("status"))


def answers(file: str) -> dict[str, Any]:
    """Recorded answers, by title of the case."""
    loaded: dict[str, Any] = json.loads((FOLDER / f"{file}.json").read_text())
    return loaded


def _content(resource: str, item: Object) -> Object:
    content = _replaced(item.get("object") or {})
    if resource == "pods" and "object" not in item:
        spec = {**copy.deepcopy(BASE), **item.get("spec", {})}
        if "container" in item:
            spec["containers"][0] |= item["container"]
        if "volumes" in item:
            spec["volumes"] = item["volumes"]
        content = {"spec": spec, "metadata": item.get("metadata", {})}
    if "big" in item:
        content[item["big"]] = {"a": BIG, "b": "x"}
    content["metadata"] = {"name": "x", **(content.get("metadata") or {})}
    return content


def _replaced(value: Any) -> Any:
    """`BASE` and `ONCE` are pod templates, `NS` the namespace of the objects."""
    if isinstance(value, dict):
        return {key: _replaced(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_replaced(inner) for inner in value]
    if value in ("BASE", "ONCE"):
        spec = {**copy.deepcopy(BASE), **({"restartPolicy": "Never"} if value == "ONCE" else {})}
        return {"metadata": {"labels": {"a": "b"}}, "spec": spec}
    return NAMESPACE if value == "NS" else value
