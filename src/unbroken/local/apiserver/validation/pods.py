"""Validation of pods, of their changes and of their requirements of nodes, in Kubernetes' words.

Source: kubernetes v1.33, pkg/apis/core/validation/validation.go. It checks mistakes that matter on
this cluster; fields that only a container runtime or a network would use are accepted unchecked.
"""

from __future__ import annotations

from collections.abc import Iterable

from unbroken.local.apiserver.http.status import Cause, Object
from unbroken.local.apiserver.schema.constraints import forbidden, invalid_value, required_value

from . import names
from .containers import ID_MAX, identities, validate_containers
from .fields import (
    EFFECTS,
    changed_fields,
    is_address,
    label_selector,
    named,
    node_expression,
    not_negative,
    one_of,
    optional,
)
from .volumes import validate_volumes

_HARD = "requiredDuringSchedulingIgnoredDuringExecution"
_SOFT = "preferredDuringSchedulingIgnoredDuringExecution"


def validate_placement(spec: Object, path: str) -> list[Cause]:
    """Everything in a pod's spec that chooses nodes."""
    causes = names.validate_labels(spec.get("nodeSelector") or {}, f"{path}.nodeSelector")
    for index, toleration in enumerate(spec.get("tolerations") or []):
        causes += _toleration(toleration, f"{path}.tolerations[{index}]")
    affinity = spec.get("affinity") or {}
    if affinity.get("nodeAffinity"):
        causes += _node_affinity(affinity["nodeAffinity"], f"{path}.affinity.nodeAffinity")
    for field in ("podAffinity", "podAntiAffinity"):
        if affinity.get(field):
            causes += _pod_affinity(affinity[field], f"{path}.affinity.{field}")
    for index, spread in enumerate(spec.get("topologySpreadConstraints") or []):
        causes += _spread(spread, f"{path}.topologySpreadConstraints[{index}]")
    return causes


def _toleration(toleration: Object, path: str) -> list[Cause]:
    causes = named(toleration, path, "key", names.qualified_name)
    operator, value = toleration.get("operator") or "Equal", toleration.get("value") or ""
    if not toleration.get("key") and operator != "Exists":
        text = (
            'operator must be Exists when `key` is empty, which means "match all values and '
            'all keys"'
        )
        causes.append(invalid_value(f"{path}.operator", operator, text))
    if operator == "Equal":
        causes += names.each(names.label_value, f"{path}.operator", value)
    elif operator == "Exists" and value:
        text = "value must be empty when `operator` is 'Exists'"
        causes.append(invalid_value(f"{path}.operator", toleration, text))
    causes += optional(toleration, path, "operator", ("Equal", "Exists"))
    effect = toleration.get("effect") or ""
    if toleration.get("tolerationSeconds") is not None and effect != "NoExecute":
        text = "effect must be 'NoExecute' when `tolerationSeconds` is set"
        causes.append(invalid_value(f"{path}.effect", effect, text))
    return causes + optional(toleration, path, "effect", EFFECTS)


def _weight(item: Object, path: str) -> list[Cause]:
    weight = item.get("weight") or 0
    if 1 <= weight <= 100:
        return []
    return [invalid_value(f"{path}.weight", weight, "must be in the range 1-100")]


def _node_term(term: Object, path: str) -> list[Cause]:
    causes: list[Cause] = []
    for index, item in enumerate(term.get("matchExpressions") or []):
        causes += node_expression(item, f"{path}.matchExpressions[{index}]")
    for index, item in enumerate(term.get("matchFields") or []):
        place = f"{path}.matchFields[{index}]"
        if item.get("operator") not in ("In", "NotIn"):
            text = "not a valid selector operator"
            causes.append(invalid_value(f"{place}.operator", item.get("operator") or "", text))
        elif len(item.get("values") or []) != 1:
            text = (
                "must be only one value when `operator` is 'In' or 'NotIn' for node field selector"
            )
            causes.append(required_value(f"{place}.values", text))
        if item.get("key") != "metadata.name":
            text = "not a valid field selector key"
            causes.append(invalid_value(f"{place}.key", item.get("key") or "", text))
    return causes


def _node_affinity(affinity: Object, path: str) -> list[Cause]:
    causes: list[Cause] = []
    if affinity.get(_HARD) is not None:
        place, terms = f"{path}.{_HARD}.nodeSelectorTerms", affinity[_HARD].get("nodeSelectorTerms")
        if not terms:
            causes.append(required_value(place, "must have at least one node selector term"))
        for index, term in enumerate(terms or []):
            causes += _node_term(term, f"{place}[{index}]")
    for index, item in enumerate(affinity.get(_SOFT) or []):
        place = f"{path}.{_SOFT}[{index}]"
        causes += _weight(item, place)
        causes += _node_term(item.get("preference") or {}, f"{place}.preference")
    return causes


def _pod_affinity(affinity: Object, path: str) -> list[Cause]:
    causes: list[Cause] = []
    for index, term in enumerate(affinity.get(_HARD) or []):
        causes += _pod_term(term, f"{path}.{_HARD}[{index}]")
    for index, item in enumerate(affinity.get(_SOFT) or []):
        place = f"{path}.{_SOFT}[{index}]"
        causes += _weight(item, place)
        causes += _pod_term(item.get("podAffinityTerm") or {}, f"{place}.podAffinityTerm")
    return causes


def _pod_term(term: Object, path: str) -> list[Cause]:
    causes = label_selector(term.get("labelSelector"), f"{path}.labelSelector")
    for namespace in term.get("namespaces") or []:
        causes += names.each(names.dns_label, f"{path}.namespace", namespace)
    key, place = term.get("topologyKey") or "", f"{path}.topologyKey"
    if not key:
        causes.append(required_value(place, "can not be empty"))
    return causes + names.each(names.qualified_name, place, key)


def _spread(spread: Object, path: str) -> list[Cause]:
    causes = label_selector(spread.get("labelSelector"), f"{path}.labelSelector")
    if (spread.get("maxSkew") or 0) <= 0:
        text = "must be greater than zero"
        causes.append(invalid_value(f"{path}.maxSkew", spread.get("maxSkew") or 0, text))
    if not spread.get("topologyKey"):
        causes.append(required_value(f"{path}.topologyKey", "can not be empty"))
    return causes + one_of(spread, path, "whenUnsatisfiable", ("DoNotSchedule", "ScheduleAnyway"))


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
