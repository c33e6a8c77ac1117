"""Objects that every cluster has from its first moment."""

from __future__ import annotations

import copy

from unbroken.local.apiserver.http.requests import Target, WriteOptions
from unbroken.local.apiserver.http.status import Object
from unbroken.local.apiserver.kinds.catalogue import Catalogue
from unbroken.local.apiserver.write.writes import WriteContext, Writer

from .store import Store

NAMESPACES = ("default", "kube-system", "kube-public", "kube-node-lease", "kubeflow")
"""Namespaces of every cluster, and the one in which HyperPod's documents start PyTorchJobs."""
PRIORITIES = {"system-cluster-critical": 2_000_000_000, "system-node-critical": 2_000_001_000}
"""kubernetes v1.33, pkg/apis/scheduling/helpers.go."""

RBAC = "rbac.authorization.k8s.io"
ADMIN_ROLE: Object = {
    "apiVersion": f"{RBAC}/v1",
    "kind": "ClusterRole",
    "metadata": {"name": "cluster-admin"},
    "rules": [
        {"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]},
        {"nonResourceURLs": ["*"], "verbs": ["*"]},
    ],
}
ADMIN_BINDING: Object = {
    "apiVersion": f"{RBAC}/v1",
    "kind": "ClusterRoleBinding",
    "metadata": {"name": "cluster-admin"},
    "roleRef": {"apiGroup": RBAC, "kind": "ClusterRole", "name": "cluster-admin"},
    "subjects": [{"apiGroup": RBAC, "kind": "Group", "name": "system:masters"}],
}


def create_defaults(store: Store, catalogue: Catalogue, around: WriteContext) -> None:
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
    for content in (ADMIN_ROLE, ADMIN_BINDING):
        plural = f"{content['kind'].lower()}s"
        _create(store, catalogue, writer, copy.deepcopy(content), RBAC, plural)


def _create(
    store: Store, catalogue: Catalogue, writer: Writer, content: Object, group: str, plural: str
) -> None:
    kind, version = catalogue.find(group, "v1", plural)
    name = content["metadata"]["name"]
    if ("", name) not in store.collection(kind.storage).entries:
        writer.create(Target(kind, version), content, WriteOptions("kube-apiserver"))
