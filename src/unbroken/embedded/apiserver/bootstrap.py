"""Objects that every cluster has from its first moment."""

from __future__ import annotations

from .catalogue import Catalogue
from .requests import Target, WriteOptions
from .status import Object
from .store import Store
from .writes import Surroundings, Writer

NAMESPACES = ("default", "kube-system", "kube-public", "kube-node-lease")
PRIORITIES = {"system-cluster-critical": 2_000_000_000, "system-node-critical": 2_000_001_000}
"""kubernetes v1.33, pkg/apis/scheduling/helpers.go."""


def create_defaults(store: Store, catalogue: Catalogue, around: Surroundings) -> None:
    """Create what is missing."""
    writer = Writer(store, catalogue, around)
    for name in NAMESPACES:
        content: Object = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
        _create(store, catalogue, writer, content, "", "namespaces")
    for name, value in PRIORITIES.items():
        content = {
            "apiVersion": "scheduling.k8s.io/v1",
            "kind": "PriorityClass",
            "metadata": {"name": name},
            "value": value,
        }
        _create(store, catalogue, writer, content, "scheduling.k8s.io", "priorityclasses")


def _create(
    store: Store, catalogue: Catalogue, writer: Writer, content: Object, group: str, plural: str
) -> None:
    kind, version = catalogue.find(group, "v1", plural)
    name = content["metadata"]["name"]
    if ("", name) not in store.collection(kind.storage).entries:
        writer.create(Target(kind, version), content, WriteOptions("kube-apiserver"))
