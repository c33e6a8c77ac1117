"""The parts of an object with rules of their own: scale, binding, finalize, eviction.

PodDisruptionBudgets may refuse an eviction, as in Kubernetes v1.33,
pkg/registry/core/pod/storage/eviction.go.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from unbroken.local.apiserver.http.reads import get
from unbroken.local.apiserver.http.requests import Query, Target, WriteOptions, parse_path
from unbroken.local.apiserver.http.status import ApiError, Object, bad_request, conflict, invalid
from unbroken.local.apiserver.kinds.kinds import Catalogue
from unbroken.local.apiserver.schema.constraints import invalid_value, required_value, unsupported
from unbroken.local.apiserver.store import Entry, Store
from unbroken.local.apiserver.validation.selectors import selector_of
from unbroken.spec.job_kinds import ENDED_PHASES

from . import deletion
from .patch import json_patch, merge_patch
from .writes import JSON_PATCH, MERGE_PATCH, STRATEGIC_PATCH, Result, Writer

BUDGETS = "poddisruptionbudgets.policy"
DISRUPTED_MAX = 2000
"""Evictions that the controller has not confirmed yet."""
REFUSED = "Cannot evict pod as it would violate the pod's disruption budget."
PROCESSING_SECONDS = 10
"""Seconds after which a client may ask again while the controller has not seen the budget."""


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


def whole(target: Target) -> Target:
    """The object that a subresource belongs to."""
    return replace(target, subresource="")


def scale_object(target: Target, entry: Entry) -> Object:
    """The object's `autoscaling/v1` Scale."""
    paths, content = target.version.scale or {}, entry.decode()
    meta = content["metadata"]
    kept = ("name", "namespace", "uid", "resourceVersion", "creationTimestamp")
    status: Object = {"replicas": _at(content, paths["statusReplicasPath"]) or 0}
    selector = _at(content, paths.get("labelSelectorPath", ""))
    if isinstance(selector, dict):
        labels = selector.get("matchLabels") or {}
        selector = ",".join(f"{key}={value}" for key, value in sorted(labels.items()))
    if selector:
        status["selector"] = selector
    return {
        "apiVersion": "autoscaling/v1",
        "kind": "Scale",
        "metadata": {name: meta[name] for name in kept if name in meta},
        "spec": {"replicas": _at(content, paths["specReplicasPath"]) or 0},
        "status": status,
    }


def patched_scale(target: Target, entry: Entry, media: str, patch: Any) -> Object:
    """The object's Scale after a JSON patch or a merge patch."""
    scale = scale_object(target, entry)
    if media == JSON_PATCH:
        return json_patch(scale, patch)
    if media not in (MERGE_PATCH, STRATEGIC_PATCH) or not isinstance(patch, dict):
        raise bad_request("a Scale is patched with a JSON patch or a merge patch")
    return merge_patch(scale, patch)


def put_scale(
    writer: Writer, target: Target, entry: Entry, scale: Object, options: WriteOptions
) -> Result:
    """Write the replicas of a Scale into its object."""
    replicas = (scale.get("spec") or {}).get("replicas", 0)
    if not isinstance(replicas, int) or isinstance(replicas, bool) or replicas < 0:
        cause = invalid_value("spec.replicas", replicas, "must be greater than or equal to 0")
        raise invalid("autoscaling", "Scale", target.name, [cause])
    content = entry.decode()
    content["apiVersion"] = target.api_version
    version = (scale.get("metadata") or {}).get("resourceVersion")
    if version:
        content["metadata"]["resourceVersion"] = version
    *way, last = (target.version.scale or {})["specReplicasPath"].strip(".").split(".")
    place = content
    for part in way:
        place = place.setdefault(part, {})
    place[last] = replicas
    return writer.update(whole(target), entry, content, options)


def _at(content: Any, path: str) -> Any:
    for part in path.strip(".").split(".") if path else ():
        content = content.get(part) if isinstance(content, dict) else None
    return content if path else None


def bind(store: Store, writer: Writer, target: Target, body: Object, options: WriteOptions) -> None:
    """Give a pod its node, once (`POST pods/NAME/binding`)."""
    about = body.get("target") or {}
    node = about.get("name")
    if about.get("kind") not in (None, "", "Node"):
        cause = unsupported("target.kind", about["kind"], ["Node", "<empty>"])
        raise invalid("", "Binding", target.name, [cause])
    if not isinstance(node, str) or not node:
        raise invalid("", "Binding", target.name, [required_value("target.name")])
    entry = get(store, target)
    content = entry.decode()
    if content["spec"].get("nodeName"):
        why = f'pod {target.name} is already assigned to node "{content["spec"]["nodeName"]}"'
        raise conflict("", "pods/binding", target.name, why)
    if "deletionTimestamp" in content["metadata"]:
        why = f"pod {target.name} is being deleted, cannot be assigned to a host"
        raise conflict("", "pods/binding", target.name, why)
    uid = (body.get("metadata") or {}).get("uid")
    if uid:
        content["metadata"]["uid"] = uid
    content["spec"]["nodeName"] = node
    given = (body.get("metadata") or {}).get("annotations") or {}
    if given:
        content["metadata"].setdefault("annotations", {}).update(given)
    status = content.setdefault("status", {})
    others = [c for c in status.get("conditions") or [] if c.get("type") != "PodScheduled"]
    scheduled = {
        "type": "PodScheduled",
        "status": "True",
        "lastProbeTime": None,
        "lastTransitionTime": writer.timestamp(),
    }
    status["conditions"] = [*others, scheduled]
    writer.update(replace(target, subresource="binding"), entry, content, options)


def finalize(
    store: Store, writer: Writer, target: Target, body: Object, options: WriteOptions
) -> Result:
    """Replace a namespace's spec.finalizers (`PUT namespaces/NAME/finalize`)."""
    entry = get(store, target)
    content = entry.decode()
    version = (body.get("metadata") or {}).get("resourceVersion")
    if version:
        content["metadata"]["resourceVersion"] = version
    finalizers = (body.get("spec") or {}).get("finalizers")
    content["spec"] = {"finalizers": finalizers} if finalizers else {}
    return writer.update(target, entry, content, options)


def not_offered(target: Target) -> ApiError:
    """501 for a subresource that exists in Kubernetes and not here, with what to do instead."""
    advice = {
        "attach": "use `kubectl logs -f` or `kubectl exec`",
        "proxy": "use `kubectl port-forward`",
        "token": "the kubeconfig that `unbroken up` wrote holds a token",
        "ephemeralcontainers": "use `kubectl exec`",
        "resize": "delete the pod and create it with other resources",
    }
    hint = advice.get(target.subresource)
    title = f"{target.kind.plural}/{target.subresource}"
    if hint is None:
        return ApiError(404, "NotFound", "the server could not find the requested resource")
    return ApiError(501, "NotImplemented", f"{title} is not offered by the local cluster: {hint}")
