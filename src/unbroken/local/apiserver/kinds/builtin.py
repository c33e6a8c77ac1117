"""The built-in kinds that are served, as one table.

Names, short names, categories, subresources and selectable fields are those of kube-apiserver
v1.33.  Schemas are read when one is first asked for: a start needs none of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unbroken.local.apiserver.schema.schemas import Schema, builtin_definitions
from unbroken.local.apiserver.tables.columns import COLUMNS

from .kinds import Kind, Version

_SCALE: Mapping[str, str] = {
    "specReplicasPath": ".spec.replicas",
    "statusReplicasPath": ".status.replicas",
    "labelSelectorPath": ".spec.selector",
}
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
    "replicationcontrollers": ("status.replicas",),
    "replicasets.apps": ("status.replicas",),
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

    Traits: cluster (scope), status, scale, all (a category), question (answered, never stored).
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
        scale=_SCALE if "scale" in traits else None,
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


_NAMESPACE_VERBS = ("create", "delete", "get", "list", "patch", "update", "watch")
_RBAC = "rbac.authorization.k8s.io"
_AUTHENTICATION = "authentication.k8s.io"
_AUTHORIZATION = "authorization.k8s.io"
_QUESTION = "cluster question"

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
    _kind("", "ResourceQuota", "resourcequotas", "quota", traits="status"),
    _kind("", "LimitRange", "limitranges", "limits"),
    _kind("", "PodTemplate", "podtemplates"),
    _kind("", "ReplicationController", "replicationcontrollers", "rc", traits="status scale all"),
    _kind("events.k8s.io", "Event", "events", "ev", stored_as="events"),
    _kind("discovery.k8s.io", "EndpointSlice", "endpointslices"),
    _kind("coordination.k8s.io", "Lease", "leases"),
    _kind("scheduling.k8s.io", "PriorityClass", "priorityclasses", "pc", traits="cluster"),
    _kind("storage.k8s.io", "StorageClass", "storageclasses", "sc", traits="cluster"),
    _kind("policy", "PodDisruptionBudget", "poddisruptionbudgets", "pdb", traits="status"),
    _kind("apps", "Deployment", "deployments", "deploy", traits="status scale all"),
    _kind("apps", "ReplicaSet", "replicasets", "rs", traits="status scale all"),
    _kind("apps", "StatefulSet", "statefulsets", "sts", traits="status scale all"),
    _kind("apps", "DaemonSet", "daemonsets", "ds", traits="status all"),
    _kind("apps", "ControllerRevision", "controllerrevisions"),
    _kind("batch", "Job", "jobs", traits="status all"),
    _kind("batch", "CronJob", "cronjobs", "cj", traits="status all"),
    _kind("networking.k8s.io", "NetworkPolicy", "networkpolicies", "netpol"),
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
)
"""Every built-in kind."""
