"""Admission of a new object because of other objects: additions and refusals.

It is a fixed list, like the default admission plugins of kube-apiserver: NamespaceLifecycle,
ServiceAccount (it must exist; pods here get no API token), Priority. Services are headless: without
a proxy no cluster address can be served, so none is assigned.

Custom kinds may have a function in place of a validating webhook.
"""

from __future__ import annotations

from collections.abc import Callable

from unbroken.local.apiserver.http.requests import Target
from unbroken.local.apiserver.http.status import ApiError, Cause, Object, not_found
from unbroken.local.apiserver.kinds.kinds import Catalogue, Kind
from unbroken.local.apiserver.store import Store
from unbroken.spec.problems import Verdict

WITH_GENERATION = {
    "jobs.batch",
    "poddisruptionbudgets.policy",
    "priorityclasses.scheduling.k8s.io",
    "customresourcedefinitions.apiextensions.k8s.io",
    "endpointslices.discovery.k8s.io",
}
KEEPS_STATUS = {"nodes", "persistentvolumes", "events", "namespaces"}
"""Built-in kinds whose status may be given at creation (kubelet registers nodes so)."""

DEFAULT_ACCOUNT = "default"
"""The service account of pods that name none."""

Admit = Callable[[Object], Verdict]
"""Judges whole objects of one kind before they are stored; their status is not looked at."""


def has_generation(kind: Kind) -> bool:
    """True if metadata.generation counts changes of the desired state."""
    return kind.is_custom or kind.resource in WITH_GENERATION


def keeps_status(kind: Kind) -> bool:
    """True if a create keeps the status that the client sent."""
    return kind.resource in KEEPS_STATUS


def check_namespace(store: Store, target: Target) -> None:
    """ApiError 404 or 403 when nothing can be created in the namespace."""
    if not target.kind.namespaced:
        return
    entry = store.collection("namespaces").entries.get(("", target.namespace))
    if entry is None:
        raise not_found("", "namespaces", target.namespace)
    if "deletionTimestamp" in entry.decode()["metadata"]:
        title = target.kind.resource
        name = target.name or "unknown"
        message = (
            f'{title} "{name}" is forbidden: unable to create new content in namespace '
            f"{target.namespace} because it is being terminated"
        )
        details = {
            "name": name,
            "kind": target.kind.plural,
            "causes": [
                {
                    "reason": "NamespaceTerminating",
                    "message": f"namespace {target.namespace} is being terminated",
                    "field": "metadata.namespace",
                }
            ],
        }
        raise ApiError(403, "Forbidden", message, details=details)


def judge(admit: Admit, old: Object | None, new: Object) -> tuple[list[Cause], tuple[str, ...]]:
    """Return the problems of `new`, and warnings.

    Problems that `old` already had refuse no update: otherwise the object could not be repaired or
    deleted.
    """
    verdict = admit(new)
    known = admit(old).problems if old is not None and verdict.problems else ()
    causes = [Cause(p.reason, p.path, p.message) for p in verdict.problems if p not in known]
    return causes, verdict.warnings


def complete_new(store: Store, catalogue: Catalogue, kind: Kind, content: Object) -> None:
    """Fill in what other objects decide; what is missing is left to validation."""
    spec = content.get("spec")
    if not isinstance(spec, dict):
        return
    if kind.resource == "pods":
        metadata = content["metadata"]
        _name_account(store, metadata.get("namespace", ""), metadata.get("name", ""), spec)
        _complete_pod(store, metadata.get("name", ""), spec)
    elif kind.resource == "customresourcedefinitions.apiextensions.k8s.io":
        plural = (spec.get("names") or {}).get("plural", "")
        if catalogue.is_builtin(spec.get("group", ""), plural):
            raise ApiError(409, "Conflict", f"the server itself serves {plural}")
    elif kind.resource == "services" and spec.get("ports") and spec["type"] != "ExternalName":
        spec.setdefault("clusterIP", "None")
        spec.setdefault("clusterIPs", [spec["clusterIP"]])


def _name_account(store: Store, namespace: str, pod: str, spec: Object) -> None:
    """Fill in the service account; ApiError 403 when the one that is named does not exist.

    The account `default` is made with its namespace, perhaps a moment later: it is not missed.
    """
    name = spec.get("serviceAccountName") or spec.get("serviceAccount") or DEFAULT_ACCOUNT
    spec["serviceAccountName"] = spec["serviceAccount"] = name
    known = store.collection("serviceaccounts").entries
    if name != DEFAULT_ACCOUNT and (namespace, name) not in known:
        # Words of kube-apiserver v1.33, plugin/pkg/admission/serviceaccount.
        message = (
            f'pods "{pod}" is forbidden: error looking up service account '
            f'{namespace}/{name}: serviceaccount "{name}" not found'
        )
        raise ApiError(403, "Forbidden", message, details={"name": pod, "kind": "pods"})


def _complete_pod(store: Store, pod: str, spec: Object) -> None:
    classes = store.collection("priorityclasses.scheduling.k8s.io").entries
    name = spec.get("priorityClassName")
    if name:
        entry = classes.get(("", name))
        if entry is None:
            message = f'pods "{pod}" is forbidden: no PriorityClass with name {name} was found'
            raise ApiError(403, "Forbidden", message, details={"name": pod, "kind": "pods"})
        chosen: Object | None = entry.decode()
    else:
        result = (entry.decode() for entry in classes.values())
        chosen = next((item for item in result if item.get("globalDefault")), None)
        if chosen is not None:
            spec["priorityClassName"] = chosen["metadata"]["name"]
    spec["priority"] = chosen["value"] if chosen is not None else 0
    policy = chosen.get("preemptionPolicy") if chosen is not None else None
    spec["preemptionPolicy"] = policy or "PreemptLowerPriority"
