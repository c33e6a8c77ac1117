"""Evictions of pods, which PodDisruptionBudgets may refuse.

After Kubernetes v1.33, pkg/registry/core/pod/storage/eviction.go.
"""

from __future__ import annotations

from unbroken.local.apiserver.http.reads import get
from unbroken.local.apiserver.http.requests import Query, Target, WriteOptions, parse_path
from unbroken.local.apiserver.http.status import ApiError, Object, bad_request
from unbroken.local.apiserver.kinds.catalogue import Catalogue
from unbroken.local.apiserver.store import Entry, Store
from unbroken.local.apiserver.validation.selectors import selector_of
from unbroken.spec.job_kinds import ENDED_PHASES

from . import deletion
from .subresources import whole
from .writes import Writer

BUDGETS = "poddisruptionbudgets.policy"
DISRUPTED_MAX = 2000
"""Evictions that the controller has not confirmed yet."""
REFUSED = "Cannot evict pod as it would violate the pod's disruption budget."
PROCESSING_SECONDS = 10
"""After which a client may ask again while the controller has not seen the budget."""


def evict(store: Store, writer: Writer, catalogue: Catalogue, target: Target, body: Object) -> None:
    """Delete a pod with the options inside an Eviction; ApiError 429 where its budget refuses."""
    if not isinstance(body.get("deleteOptions", {}), dict | None):
        raise bad_request("Eviction: deleteOptions must be an object")
    entry = get(store, target)
    options = deletion.delete_options(Query({}), body.get("deleteOptions"))
    budget = _budget_of(store, entry)
    if budget is not None and not _may_be_ignored(entry.decode(), budget.decode()):
        charged = charge(budget.decode(), target.name, writer.timestamp())
        if not options.is_dry_run:
            namespace, name = budget.key
            path = f"/apis/policy/v1/namespaces/{namespace}/poddisruptionbudgets/{name}/status"
            by = WriteOptions("kube-apiserver")
            writer.update(parse_path(path, catalogue), budget, charged, by)
    writer.delete(whole(target), entry, options)


def _budget_of(store: Store, pod: Entry) -> Entry | None:
    """The budget that selects the pod; ApiError 500 where several do."""
    entries = [
        entry
        for (namespace, _), entry in store.collection(BUDGETS).entries.items()
        if namespace == pod.key[0]
        and selector_of((entry.decode().get("spec") or {}).get("selector")).matches(pod.labels)
    ]
    if len(entries) > 1:
        text = (
            "This pod has more than one PodDisruptionBudget, "
            "which the eviction subresource does not support."
        )
        raise ApiError(500, "InternalError", text)
    return entries[0] if entries else None


def _may_be_ignored(pod: Object, budget: Object) -> bool:
    """True if the pod's end disrupts nothing, so that its budget does not count."""
    status = pod.get("status") or {}
    is_over = status.get("phase", "Pending") in {*ENDED_PHASES, "Pending"}
    if is_over or "deletionTimestamp" in pod["metadata"]:
        return True
    conditions = {item.get("type"): item.get("status") for item in status.get("conditions") or ()}
    if conditions.get("Ready") == "True":
        return False
    if (budget.get("spec") or {}).get("unhealthyPodEvictionPolicy") == "AlwaysAllow":
        return True
    known = budget.get("status") or {}
    desired: int = known.get("desiredHealthy", 0)
    return desired > 0 and bool(known.get("currentHealthy", 0) >= desired)


def charge(budget: Object, pod: str, now: str) -> Object:
    """The budget with one disruption more; ApiError 429 where it allows none."""
    metadata, status = budget["metadata"], dict(budget.get("status") or {})
    name = metadata["name"]
    if status.get("observedGeneration", 0) < metadata.get("generation", 0):
        cause = f"The disruption budget {name} is still being processed by the server."
        raise _refusal(cause, retryAfterSeconds=PROCESSING_SECONDS)
    disrupted = dict(status.get("disruptedPods") or {})
    if len(disrupted) > DISRUPTED_MAX:
        text = "DisruptedPods map too big - too many evictions not confirmed by PDB controller"
        full = f'poddisruptionbudgets.policy "{name}" is forbidden: {text}'
        raise ApiError(403, "Forbidden", full)
    allowed = status.get("disruptionsAllowed", 0)
    if allowed <= 0:
        desired, healthy = status.get("desiredHealthy", 0), status.get("currentHealthy", 0)
        needs = f"needs {desired} healthy pods and has {healthy} currently"
        raise _refusal(f"The disruption budget {name} {needs}")
    disrupted[pod] = now
    status |= {"disruptionsAllowed": allowed - 1, "disruptedPods": disrupted}
    return {**budget, "status": status}


def _refusal(cause: str, **details: int) -> ApiError:
    causes = [{"reason": "DisruptionBudget", "message": cause}]
    return ApiError(429, "TooManyRequests", REFUSED, details={"causes": causes, **details})
