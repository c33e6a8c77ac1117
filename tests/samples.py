"""Objects that many cases start from."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tests.apiclient import Answer, Api, Object

CUSTOM_RESOURCES = pytest.mark.parametrize(
    "cluster",
    [*(pytest.param(name, marks=pytest.mark.realkube) for name in ("real", "crds")), "embedded"],
    indirect=True,
)
"""Mark of cases that need no kind but those that they define, which three servers must hold."""
CRDS = "apiextensions.k8s.io/v1:customresourcedefinitions"


def config_map(name: str, **data: str) -> Object:
    """A config map with `data`."""
    filled = {"data": data} if data else {}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, **filled}


def pod(name: str, labels: dict[str, str] | None = None, **spec: Any) -> Object:
    """A pod of one container; `spec` adds to its spec or replaces what is there."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": labels or {}},
        "spec": {"containers": [{"name": "main", "image": "busybox"}], **spec},
    }


def service(name: str, **targets: int) -> Object:
    """A service with a port for each of `targets`: its name (a to z) and its target port."""
    ports = [
        {"name": key, "port": ord(key), "protocol": "TCP", "targetPort": target}
        for key, target in targets.items()
    ]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {"ports": ports},
    }


def definition(group: str, schema: Object, **version: Any) -> Object:
    """A definition of Widgets in `group`; `version` adds to its only version, v1."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"widgets.{group}"},
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {"plural": "widgets", "singular": "widget", "kind": "Widget"},
            "versions": [
                {
                    "name": "v1",
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": schema},
                    **version,
                }
            ],
        },
    }


def widget(group: str, name: str, **fields: Any) -> Object:
    """A Widget of `definition`."""
    return {
        "apiVersion": f"{group}/v1",
        "kind": "Widget",
        "metadata": {"name": name},
        **fields,
    }


def is_established(found: Object) -> bool:
    """True when the server serves what the definition defines."""
    conditions = found.get("status", {}).get("conditions") or []
    return any(c["type"] == "Established" and c["status"] == "True" for c in conditions)


def define_missing(api: Api, *definitions: Object) -> None:
    """Create those definitions that the server does not have."""
    for definition in definitions:
        if api.get(f"{CRDS}/{definition['metadata']['name']}").code == 404:
            define(api, definition)


def define(api: Api, body: Object) -> Object:
    """Create a definition where there is none, and wait until its objects are served."""
    everywhere = api.within("")
    answer = everywhere.post(CRDS, body)
    assert answer.code in (201, 409), answer
    found = everywhere.until(CRDS, body["metadata"]["name"], is_established)
    if answer.code == 201 and not api.cluster.has_built_in_kinds:
        _date_back(everywhere, found)
    spec = found["spec"]
    plural = spec["names"]["plural"]
    for version in (each["name"] for each in spec["versions"] if each["served"]):
        path = f"/apis/{spec['group']}/{version}"

        def lists_it(answer: Answer) -> bool:
            return answer.code == 200 and plural in {r["name"] for r in answer.object["resources"]}

        everywhere.settled(partial(everywhere.get, path), lambda answer: not lists_it(answer))
        everywhere.settled(partial(everywhere.get, f"{path}/{plural}"), is_not_found)
    return found


def _date_back(everywhere: Api, found: Object) -> None:
    """Have a definition look as if it had been established long ago.

    v1.36 lets creates of a new kind wait until 2 s after that, so that all API servers of a control
    plane know the kind.  There is one here, and some thirty cases would wait.
    """
    types = [condition["type"] for condition in found["status"]["conditions"]]
    path = f"/status/conditions/{types.index('Established')}/lastTransitionTime"
    change = [{"op": "replace", "path": path, "value": "2020-01-01T00:00:00Z"}]
    everywhere.patch("json", f"{CRDS}/{found['metadata']['name']}/status", change).done()


def is_not_found(answer: Answer) -> bool:
    """True while a path is not served."""
    return answer.code == 404


def open_schema(**properties: Any) -> Object:
    """Schema of an object whose `spec` has `properties`."""
    return {
        "type": "object",
        "properties": {
            "spec": {"type": "object", "properties": properties},
            "status": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
        },
    }


def warned(answer: Answer) -> list[str]:
    """Texts of the Warning headers."""
    found = answer.headers.get_all("Warning") or []
    return [text.removeprefix("299 - ")[1:-1].replace('\\"', '"') for text in found]


STRICT = [
    ("Strict", 400, None),
    ("Warn", 201, 'unknown field "spec.more"'),
    ("Ignore", 201, None),
]
