"""The built-in kinds that are served, as one table.

Names, short names, categories, subresources and selectable fields are those of kube-apiserver
v1.33.  Schemas are read when one is first asked for: a start needs none of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unbroken.local.apiserver.schema.schemas import Schema, builtin_definitions
from unbroken.local.apiserver.tables.columns import COLUMNS
from unbroken.spec.keys import OWN_GROUP

from .kinds import Kind, Version

_IDENTITY = ("metadata.name", "metadata.namespace")
_REFERENCE = ("kind", "namespace", "name", "uid", "apiVersion", "resourceVersion", "fieldPath")
_FIELDS: Mapping[str, tuple[str, ...]] = {
    "pods": (
        "spec.nodeName",
        "spec.restartPolicy",
        "spec.schedulerName",
        "spec.serviceAccountName",
        "spec.hostNetwork",
        "status.phase",
        "status.podIP",
        "status.podIPs",
        "status.nominatedNodeName",
    ),
    "nodes": ("spec.unschedulable",),
    "namespaces": ("status.phase",),
    "secrets": ("type",),
    "services": ("spec.clusterIP", "spec.type"),
    "jobs.batch": ("status.successful",),
    "events": (
        *(f"involvedObject.{name}" for name in _REFERENCE),
        "reason",
        "reportingComponent",
        "source",
        "type",
    ),
    "events.events.k8s.io": (
        *(f"regarding.{name}" for name in _REFERENCE),
        "reason",
        "reportingController",
        "type",
    ),
}
_PACKAGES = {
    "": "io.k8s.api.core",
    "apiextensions.k8s.io": "io.k8s.apiextensions-apiserver.pkg.apis.apiextensions",
}


class _Deferred(Schema):
    """A built-in definition that is read when it is first asked for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute not in ("raw", "_definitions"):
            raise AttributeError(attribute)
        definitions = builtin_definitions()
        super().__init__(definitions[self._name], definitions)
        return getattr(self, attribute)


def _kind(
    group: str,
    kind: str,
    plural: str,
    short: str = "",
    *,
    traits: str = "",
    stored_as: str | None = None,
) -> Kind:
    """Return a kind served as v1.

    Traits: cluster (scope), status, all (a category), question (answered, never stored).
    """
    resource = f"{plural}.{group}" if group else plural
    package = _PACKAGES.get(group) or f"io.k8s.api.{group.partition('.')[0]}"
    name = f"{package}.v1.{kind}"
    version = Version(
        "v1",
        _Deferred(name),
        name,
        columns=COLUMNS.get(resource, ()),
        has_status="status" in traits,
        selectable_fields=_IDENTITY + _FIELDS.get(resource, ()),
    )
    categories = {"customresourcedefinitions": ("api-extensions",)}.get(plural, ())
    return Kind(
        group,
        kind,
        plural,
        kind.lower(),
        namespaced="cluster" not in traits,
        versions={"v1": version},
        storage_version="v1",
        list_kind=f"{kind}List",
        short_names=tuple(short.split()),
        categories=("all",) if "all" in traits else categories,
        stored_as=stored_as,
        verbs=_verbs(plural, traits),
    )


def _verbs(plural: str, traits: str) -> tuple[str, ...]:
    if "question" in traits:
        return ("create",)
    return (
        _NAMESPACE_VERBS
        if plural == "namespaces"
        else ("create", "delete", "deletecollection", *_NAMESPACE_VERBS[2:])
    )


def _refused(group: str, kind: str, plural: str, short: str, instead: str) -> Kind:
    """Return a kind that discovery lists, so that kubectl shows the user why it is refused.

    A kind that is missing there gets kubectl's own "ensure CRDs are installed first".
    """
    name = f"{OWN_GROUP}.refused.{kind}"
    version = Version("v1", _ANYTHING, name)
    return Kind(
        group,
        kind,
        plural,
        kind.lower(),
        namespaced=True,
        versions={"v1": version},
        storage_version="v1",
        short_names=tuple(short.split()),
        verbs=("create",),
        refusal=f"the local cluster does not run kind {kind}: {instead}",
    )


_ANYTHING = Schema({"type": "object", "x-kubernetes-preserve-unknown-fields": True}, {})
_NAMESPACE_VERBS = ("create", "delete", "get", "list", "patch", "update", "watch")
_RBAC = "rbac.authorization.k8s.io"
_AUTHENTICATION = "authentication.k8s.io"
_AUTHORIZATION = "authorization.k8s.io"
_QUESTION = "cluster question"
_PODS = "create a HyperPodPyTorchJob, or Pods whose spec.restartPolicy is Always"
_CLUSTER = "it would restrict nothing here; apply it to a Kubernetes cluster"

BUILTINS: tuple[Kind, ...] = (
    _kind("", "Namespace", "namespaces", "ns", traits="cluster status"),
    _kind("", "Pod", "pods", "po", traits="status all"),
    _kind("", "Node", "nodes", "no", traits="cluster status"),
    _kind("", "Event", "events", "ev"),
    _kind("", "ConfigMap", "configmaps", "cm"),
    _kind("", "Secret", "secrets"),
    _kind("", "Service", "services", "svc", traits="status all"),
    _kind("", "Endpoints", "endpoints", "ep"),
    _kind("", "ServiceAccount", "serviceaccounts", "sa"),
    _kind("", "PersistentVolumeClaim", "persistentvolumeclaims", "pvc", traits="status"),
    _kind("", "PersistentVolume", "persistentvolumes", "pv", traits="cluster status"),
    _kind("events.k8s.io", "Event", "events", "ev", stored_as="events"),
    _kind("discovery.k8s.io", "EndpointSlice", "endpointslices"),
    _kind("coordination.k8s.io", "Lease", "leases"),
    _kind("scheduling.k8s.io", "PriorityClass", "priorityclasses", "pc", traits="cluster"),
    _kind("storage.k8s.io", "StorageClass", "storageclasses", "sc", traits="cluster"),
    _kind("policy", "PodDisruptionBudget", "poddisruptionbudgets", "pdb", traits="status"),
    _kind("batch", "Job", "jobs", traits="status all"),
    _kind(_RBAC, "Role", "roles"),
    _kind(_RBAC, "RoleBinding", "rolebindings"),
    _kind(_RBAC, "ClusterRole", "clusterroles", traits="cluster"),
    _kind(_RBAC, "ClusterRoleBinding", "clusterrolebindings", traits="cluster"),
    _kind(_AUTHENTICATION, "TokenReview", "tokenreviews", traits=_QUESTION),
    _kind(_AUTHENTICATION, "SelfSubjectReview", "selfsubjectreviews", traits=_QUESTION),
    _kind(_AUTHORIZATION, "SelfSubjectAccessReview", "selfsubjectaccessreviews", traits=_QUESTION),
    _kind(_AUTHORIZATION, "SelfSubjectRulesReview", "selfsubjectrulesreviews", traits=_QUESTION),
    _kind(_AUTHORIZATION, "SubjectAccessReview", "subjectaccessreviews", traits=_QUESTION),
    _kind(
        _AUTHORIZATION, "LocalSubjectAccessReview", "localsubjectaccessreviews", traits="question"
    ),
    _kind(
        "apiextensions.k8s.io",
        "CustomResourceDefinition",
        "customresourcedefinitions",
        "crd crds",
        traits="cluster status",
    ),
    _refused("apps", "Deployment", "deployments", "deploy", _PODS),
    _refused("apps", "ReplicaSet", "replicasets", "rs", _PODS),
    _refused("apps", "StatefulSet", "statefulsets", "sts", _PODS),
    _refused("apps", "DaemonSet", "daemonsets", "ds", _PODS),
    _refused("apps", "ControllerRevision", "controllerrevisions", "", _PODS),
    _refused("", "ReplicationController", "replicationcontrollers", "rc", _PODS),
    _refused("", "PodTemplate", "podtemplates", "", _PODS),
    _refused("batch", "CronJob", "cronjobs", "cj", "let cron of this machine create the job"),
    _refused("networking.k8s.io", "NetworkPolicy", "networkpolicies", "netpol", _CLUSTER),
    _refused("", "ResourceQuota", "resourcequotas", "quota", _CLUSTER),
    _refused("", "LimitRange", "limitranges", "limits", _CLUSTER),
)
"""Every built-in kind."""
