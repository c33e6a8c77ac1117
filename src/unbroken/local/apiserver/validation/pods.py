"""Validation of pods and of their changes, in Kubernetes' words.

Source: kubernetes v1.33, pkg/apis/core/validation/validation.go. It checks mistakes that matter on
this cluster; fields that only a container runtime or a network would use are accepted unchecked.
"""

from __future__ import annotations

from collections.abc import Iterable

from unbroken.local.apiserver.http.status import Cause, Object
from unbroken.local.apiserver.schema.constraints import forbidden, invalid_value

from . import names
from .containers import ID_MAX, identities, validate_containers
from .fields import changed_fields, is_address, named, not_negative, one_of
from .placement import validate_placement
from .volumes import validate_volumes

RESTART_POLICIES = ("Always", "OnFailure", "Never")
DNS_POLICIES = ("ClusterFirstWithHostNet", "ClusterFirst", "Default", "None")
MUTABLE = ("activeDeadlineSeconds", "tolerations", "schedulingGates")
"""Fields of a pod's spec that an update may change at all; more is checked for each."""


def validate_pod(pod: Object) -> list[Cause]:
    """A new pod."""
    return validate_spec(pod.get("spec") or {}, "spec")


def validate_spec(spec: Object, path: str) -> list[Cause]:
    """The spec of a pod or of a pod template."""
    causes = validate_volumes(spec.get("volumes") or [], f"{path}.volumes")
    causes += validate_containers(spec, path)
    causes += one_of(spec, path, "restartPolicy", RESTART_POLICIES)
    causes += one_of(spec, path, "dnsPolicy", DNS_POLICIES)
    causes += not_negative(spec, path, "terminationGracePeriodSeconds")
    deadline = spec.get("activeDeadlineSeconds")
    if deadline is not None and not 1 <= deadline <= ID_MAX:
        text = f"must be between 1 and {ID_MAX}, inclusive"
        causes.append(invalid_value(f"{path}.activeDeadlineSeconds", deadline, text))
    for field in ("nodeName", "serviceAccountName", "priorityClassName"):
        causes += named(spec, path, field, names.dns_subdomain)
    for field in ("hostname", "subdomain"):
        causes += named(spec, path, field, names.dns_label)
    for index, gate in enumerate(spec.get("readinessGates") or []):
        place = f"{path}.readinessGates[{index}].conditionType"
        causes += names.each(names.qualified_name, place, gate.get("conditionType") or "")
    for alias in spec.get("hostAliases") or []:
        causes += _host_alias(alias, f"{path}.hostAliases")
    context, place = spec.get("securityContext") or {}, f"{path}.securityContext"
    causes += identities(context, place, "fsGroup", "runAsUser", "runAsGroup")
    return causes + validate_placement(spec, path)


def _host_alias(alias: Object, path: str) -> list[Cause]:
    causes = []
    if not is_address(alias.get("ip")):
        text = "must be valid IP address"
        causes.append(invalid_value(f"{path}.ip", alias.get("ip") or "", text))
    for name in alias.get("hostnames") or []:
        causes += names.each(names.dns_subdomain, f"{path}.hostnames", name)
    return causes


def validate_pod_update(old: Object, new: Object) -> list[Cause]:
    """A change of a pod by anything but a binding, which gives it its node."""
    before, after = old.get("spec") or {}, new.get("spec") or {}
    changed = changed_fields(before, after)
    causes: list[Cause] = []
    fixed = changed - set(MUTABLE) - {"containers", "initContainers"}
    for field in ("containers", "initContainers"):
        if field in changed and _without_images(before, field) != _without_images(after, field):
            fixed.add(field)
    if fixed:
        text = (
            "pod updates may not change fields other than `spec.containers[*].image`,"
            "`spec.initContainers[*].image`,`spec.activeDeadlineSeconds`,`spec.tolerations` "
            "(only additions to existing tolerations),`spec.terminationGracePeriodSeconds` "
            "(allow it to be set to 1 if it was previously negative)\nchanged: "
            + ", ".join(f"spec.{name}" for name in sorted(fixed))
        )
        causes.append(forbidden("spec", text))
    if "tolerations" in changed and not _only_added(before, after):
        text = "existing toleration can not be modified except its tolerationSeconds"
        causes.append(forbidden("spec.tolerations", text))
    return causes + _deadline_update(before, after)


def _deadline_update(before: Object, after: Object) -> list[Cause]:
    was, is_now = before.get("activeDeadlineSeconds"), after.get("activeDeadlineSeconds")
    if was is None or (is_now is not None and is_now <= was):
        return []
    text = (
        "must not update from a positive integer to nil value"
        if is_now is None
        else "must be less than or equal to previous value"
    )
    return [invalid_value("spec.activeDeadlineSeconds", is_now, text)]


def _without_images(spec: Object, field: str) -> list[Object]:
    containers: Iterable[Object] = spec.get(field) or []
    return [{key: value for key, value in c.items() if key != "image"} for c in containers]


def _only_added(before: Object, after: Object) -> bool:
    def bare(tolerations: Iterable[Object]) -> list[Object]:
        return [
            {key: value for key, value in item.items() if key != "tolerationSeconds"}
            for item in tolerations
        ]

    kept = bare(after.get("tolerations") or [])
    return all(item in kept for item in bare(before.get("tolerations") or []))
