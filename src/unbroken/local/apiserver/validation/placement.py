"""Validation of a pod's requirements of its node, in Kubernetes' words: tolerations, affinity,
spread.

Source: kubernetes v1.33, pkg/apis/core/validation/validation.go.
"""

from __future__ import annotations

from unbroken.local.apiserver.http.status import Cause, Object
from unbroken.local.apiserver.schema.constraints import invalid_value, required_value

from . import names
from .fields import (
    EFFECTS,
    label_selector,
    named,
    node_expression,
    one_of,
    optional,
)

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
