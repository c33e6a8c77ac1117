"""The chart, rendered and installed by Helm's own engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import helm_python
import yaml

from tests.apiservers import ROOT

Object = dict[str, Any]
CHART = ROOT / "deploy/helm/unbroken"
NAMESPACE = "aws-hyperpod"
EVERYTHING: Object = {
    "clusterApi": {"enabled": True, "credentialsSecret": "keys"},
    "page": {"enabled": True, "hosts": ["page.example.com"]},
    "checkpointMemory": {"enabled": True},
    "checks": {"image": "checks:1"},
    "nodeDaemon": {"table": "version = 1\n", "metrics": {"podMonitor": {"enabled": True}}},
    "networkPolicy": {"enabled": True, "jobNamespaces": ["team-a", "team-b"]},
    "kueue": {"enabled": True},
    "trainer": {"runtime": True},
    "notifications": {"urlSecret": "webhook", "form": "slack", "pageURL": "https://page"},
    "traces": {"endpoint": "http://collector:4318", "headersSecret": "collector-key"},
    "metrics": {
        "serviceMonitor": {"enabled": True},
        "rayPodMonitor": {"enabled": True},
        "prometheusRule": {"enabled": True},
        "dashboards": {"enabled": True},
    },
}
"""Values that turn on all optional parts."""


def render(
    values: Mapping[str, Any] | None = None, name: str = "unbroken", namespace: str = NAMESPACE
) -> list[Object]:
    """Return every object that the chart renders from values."""
    with helm_python.Chart.load(CHART) as chart:
        rendered = chart.render(dict(values or {}), name=name, namespace=namespace)
    return list(objects(rendered))


def objects(rendered: Mapping[str, str]) -> Iterator[Object]:
    """Yield the objects in rendered templates."""
    for name, text in sorted(rendered.items()):
        if not name.endswith("NOTES.txt"):
            yield from (one for one in yaml.safe_load_all(text) if one)


def of_kind(found: list[Object], kind: str, name: str | None = None) -> list[Object]:
    """Return the objects of a kind, and of a name if one is given."""
    return [one for one in found if one["kind"] == kind and name in (None, one["metadata"]["name"])]


def one_of(found: list[Object], kind: str, name: str) -> Object:
    """Return the only object of a kind and a name."""
    (one,) = of_kind(found, kind, name)
    return one


def pod_of(workload: Object) -> Object:
    """Return the pod's spec of a Deployment or DaemonSet."""
    spec: Object = workload["spec"]["template"]["spec"]
    return spec


def arguments(found: list[Object], name: str = "unbroken-operator") -> list[str]:
    """Return the arguments of a Deployment's program, without its own name."""
    (container,) = pod_of(one_of(found, "Deployment", name))["containers"]
    return [*container["command"][1:], *container["args"]]
