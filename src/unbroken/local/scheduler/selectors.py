"""Matching of labels, nodes and taints with a pod's selectors and tolerations. Pure.

Rules: apimachinery v1.33 pkg/labels and component-helpers v1.33 scheduling/corev1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from lightkube.models.core_v1 import NodeSelectorRequirement, NodeSelectorTerm, Taint, Toleration
from lightkube.models.meta_v1 import LabelSelector

from unbroken.foreign_numbers import INT64_MIN, whole_number

Labels = Mapping[str, str]


def matches_labels(selector: LabelSelector | None, labels: Labels) -> bool:
    """No selector matches nothing, an empty one everything."""
    if selector is None:
        return False
    for key, value in (selector.matchLabels or {}).items():
        if labels.get(key) != value:
            return False
    return all(
        _holds(rule.operator, labels.get(rule.key), rule.values or ())
        for rule in selector.matchExpressions or ()
    )


def matches_node(terms: Sequence[NodeSelectorTerm], labels: Labels, name: str) -> bool:
    """A node matches if one term does; a term without rules matches nothing."""
    return any(matches_term(term, labels, name) for term in terms)


def matches_term(term: NodeSelectorTerm, labels: Labels, name: str) -> bool:
    """Every rule of the term holds; metadata.name is the only field there is."""
    expressions, fields = term.matchExpressions or (), term.matchFields or ()
    if not expressions and not fields:
        return False
    return all(_matches(rule, labels) for rule in expressions) and all(
        rule.key == "metadata.name" and _holds(rule.operator, name, rule.values or ())
        for rule in fields
    )


def _matches(rule: NodeSelectorRequirement, labels: Labels) -> bool:
    return _holds(rule.operator, labels.get(rule.key), rule.values or ())


def _holds(operator: str, value: str | None, values: Sequence[str]) -> bool:
    match operator:
        case "In":
            return value is not None and value in values
        case "NotIn":
            return value is None or value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt" | "Lt":
            return _compares(operator, value, values)
        case _:
            return False


def _compares(operator: str, value: str | None, values: Sequence[str]) -> bool:
    present = whole_number(value or "", INT64_MIN)
    bound = whole_number(values[0], INT64_MIN) if values else None
    if present is None or bound is None:
        return False
    return present > bound if operator == "Gt" else present < bound


def tolerates(toleration: Toleration, taint: Taint) -> bool:
    """Empty effect: all effects; empty key with Exists: all keys."""
    if toleration.effect and toleration.effect != taint.effect:
        return False
    if toleration.key and toleration.key != taint.key:
        return False
    if toleration.operator == "Exists":
        return True
    # Equal, which is also what no operator means; it needs a key.
    return bool(toleration.key) and (toleration.value or "") == (taint.value or "")


def untolerated(
    taints: Iterable[Taint], tolerations: Sequence[Toleration], effects: Iterable[str]
) -> Taint | None:
    """The first taint with one of the effects that nothing tolerates."""
    for taint in taints:
        if taint.effect in effects and not any(
            tolerates(toleration, taint) for toleration in tolerations
        ):
            return taint
    return None
