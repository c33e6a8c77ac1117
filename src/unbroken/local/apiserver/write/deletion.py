"""Rules for the end of a deleted object: preconditions, grace, finalizers, propagation. Pure.

Sources: kube-apiserver v1.33 registry/generic/registry/store.go (finalizers by policy) and
registry/core/pod/strategy.go (grace of pods).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from unbroken.local.apiserver.http.requests import Query, Target
from unbroken.local.apiserver.http.status import (
    ApiError,
    Cause,
    Object,
    bad_request,
    conflict,
    invalid,
)
from unbroken.local.apiserver.kinds.kinds import Kind

ORPHAN = "orphan"
FOREGROUND = "foregroundDeletion"
POLICIES = ("Orphan", "Background", "Foreground")
CRD_CLEANUP = "customresourcecleanup.apiextensions.k8s.io"

PROTECTED_NAMESPACES = ("default", "kube-system", "kube-public")
"""Never deleted (admission plugin NamespaceLifecycle)."""
RETURNS_OBJECT = {
    "pods",
    "persistentvolumes",
    "persistentvolumeclaims",
    "serviceaccounts",
    "services",
}
"""Resources whose last state is the answer to their deletion; others answer a Status."""


@dataclass(frozen=True, slots=True)
class DeleteOptions:
    """`metav1.DeleteOptions`."""

    grace_seconds: int | None = None
    """Grace in seconds; None: as in the object."""
    propagation: str = ""
    uid: str = ""
    version: str = ""
    is_dry_run: bool = False


def delete_options(query: Query, body: Object | None) -> DeleteOptions:
    """Return the options of the body if there is one, else of the query. Raises ApiError 400 or
    422."""
    source: dict[str, Any] = dict(body or {})
    grace = source.get("gracePeriodSeconds", query.integer("gracePeriodSeconds"))
    propagation = source.get("propagationPolicy") or query.text("propagationPolicy")
    preconditions = source.get("preconditions") or {}
    dry_run = source.get("dryRun") or [value for value in [query.text("dryRun")] if value]
    orphans = source.get("orphanDependents")
    if not isinstance(preconditions, dict) or not isinstance(dry_run, list):
        raise bad_request("preconditions must be an object and dryRun a list")
    if grace is not None and (not isinstance(grace, int) or isinstance(grace, bool)):
        raise bad_request("gracePeriodSeconds must be an integer")
    causes = []
    if orphans is not None and propagation:
        text = "Invalid value: orphanDependents and deletionPropagation cannot be both set"
        causes.append(Cause("FieldValueInvalid", "propagationPolicy", text))
    elif orphans is not None:
        propagation = "Orphan" if orphans else "Background"
    if propagation not in ("", *POLICIES):
        listed = ", ".join(f'"{policy}"' for policy in ("Foreground", "Background", "Orphan"))
        text = f'Unsupported value: "{propagation!s:.100}": supported values: {listed}'
        causes.append(Cause("FieldValueNotSupported", "propagationPolicy", text))
    if any(value != "All" for value in dry_run):
        text = f'Unsupported value: "{dry_run[0]!s:.100}": supported values: "All"'
        causes.append(Cause("FieldValueNotSupported", "dryRun", text))
    if causes:
        raise invalid("meta.k8s.io", "DeleteOptions", "", causes)
    return DeleteOptions(
        grace,
        propagation,
        preconditions.get("uid") or "",
        preconditions.get("resourceVersion") or "",
        bool(dry_run),
    )


def check_preconditions(target: Target, content: Object, options: DeleteOptions) -> None:
    """ApiError 409 when the object is not the one that the client means, 403 if it must stay."""
    meta = content["metadata"]
    if target.kind.resource == "namespaces" and meta["name"] in PROTECTED_NAMESPACES:
        name = meta["name"]
        message = f'namespaces "{name}" is forbidden: this namespace may not be deleted'
        raise ApiError(403, "Forbidden", message, details={"name": name, "kind": "namespaces"})
    pairs = (
        ("UID", options.uid, meta["uid"]),
        ("ResourceVersion", options.version, meta["resourceVersion"]),
    )
    for title, wanted, actual in pairs:
        if wanted and wanted != actual:
            raise conflict(
                target.kind.group,
                target.kind.plural,
                meta["name"],
                f"the {title} in the precondition ({wanted}) does not match the {title} in record "
                f"({actual}). The object might have been deleted and then recreated",
            )


def mark(
    kind: Kind,
    content: Object,
    options: DeleteOptions,
    now: float,
    timestamp: Callable[[float], str],
) -> bool:
    """Write into `content` that it is being deleted; True when it can go at once."""
    meta = content["metadata"]
    finalizers = _finalizers(meta.get("finalizers") or [], options.propagation)
    grace = _grace(kind, content, options.grace_seconds)
    already = meta.get("deletionGracePeriodSeconds")
    is_marked = "deletionTimestamp" in meta
    if grace == 0 and not finalizers and not _has_holders(kind, content):
        return True
    if is_marked and already is not None and grace >= already:
        # A repeated deletion never prolongs the first one, but may change the policy.
        if options.propagation:
            _set_finalizers(meta, finalizers)
        return False
    _set_finalizers(meta, finalizers)
    if not is_marked and "generation" in meta:
        meta["generation"] += 1
    meta["deletionTimestamp"] = timestamp(now + grace)
    meta["deletionGracePeriodSeconds"] = grace
    if kind.resource == "namespaces":
        content.setdefault("status", {})["phase"] = "Terminating"
    return False


def is_finished(kind: Kind, content: Object) -> bool:
    """True for a deleted object without finalizers or grace."""
    meta = content["metadata"]
    return (
        "deletionTimestamp" in meta
        and not meta.get("finalizers")
        and not meta.get("deletionGracePeriodSeconds")
        and not _has_holders(kind, content)
    )


def _finalizers(present: list[str], propagation: str) -> list[str]:
    if not propagation:
        return present
    kept = [name for name in present if name not in (ORPHAN, FOREGROUND)]
    extra = {"Orphan": [ORPHAN], "Foreground": [FOREGROUND]}.get(propagation, [])
    return [*kept, *extra]


def _set_finalizers(meta: Object, finalizers: list[str]) -> None:
    if finalizers:
        meta["finalizers"] = finalizers
    else:
        meta.pop("finalizers", None)


def _has_holders(kind: Kind, content: Object) -> bool:
    """A namespace is held by spec.finalizers too."""
    return kind.resource == "namespaces" and bool((content.get("spec") or {}).get("finalizers"))


def _grace(kind: Kind, content: Object, wanted: int | None) -> int:
    """Seconds that the object is given; only a pod that may run on a node gets any."""
    if kind.resource != "pods":
        return 0
    spec, phase = content.get("spec") or {}, (content.get("status") or {}).get("phase")
    if not spec.get("nodeName") or phase in ("Succeeded", "Failed"):
        return 0
    if wanted is None:
        wanted = spec.get("terminationGracePeriodSeconds", 30)
    return 1 if wanted < 0 else int(wanted)


def success(kind: Kind, content: Object) -> Object:
    """Return the Status of a finished deletion."""
    meta = content["metadata"]
    details = {"name": meta["name"], "group": kind.group, "kind": kind.plural, "uid": meta["uid"]}
    if not kind.group:
        del details["group"]
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Success",
        "details": details,
    }
