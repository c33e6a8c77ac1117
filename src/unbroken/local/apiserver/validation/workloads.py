"""Rules of jobs and of disruption budgets.

Source: kubernetes v1.33, pkg/apis/{apps,batch,core,policy}/validation.
"""

from __future__ import annotations

from unbroken.local.apiserver.http.status import ApiError, Cause, Object
from unbroken.local.apiserver.schema.constraints import invalid_value, required_value

from .fields import (
    at,
    count_or_percent,
    frozen,
    label_selector,
    not_negative,
    optional,
)
from .pods import validate_spec
from .selectors import selector_of

SELECTOR_TEXT = "`selector` does not match template `labels`"


def _with_choices(spec: Object) -> Object:
    """A template's spec; an empty one has had no defaults, which is not the writer's fault."""
    return {"restartPolicy": "Always", "dnsPolicy": "ClusterFirst", **spec}


def job(content: Object) -> list[Cause]:
    """Check a job."""
    spec = content.get("spec") or {}
    counters = (
        "parallelism",
        "completions",
        "backoffLimit",
        "activeDeadlineSeconds",
        "ttlSecondsAfterFinished",
    )
    causes = not_negative(spec, "spec", *counters)
    causes += optional(spec, "spec", "completionMode", ("NonIndexed", "Indexed"))
    inner = at(spec, "template.spec") or {}
    causes += validate_spec(_with_choices(inner), "spec.template.spec")
    place = "spec.template.spec.restartPolicy"
    if inner.get("restartPolicy") in (None, "Always"):
        causes.append(required_value(place, 'valid values: "OnFailure", "Never"'))
    if spec.get("completionMode") == "Indexed" and spec.get("completions") is None:
        text = "when completion mode is Indexed"
        causes.append(required_value("spec.completions", text))
    selector = spec.get("selector")
    if selector is not None:
        causes += label_selector(selector, "spec.selector") + _job_selector(spec, selector)
    return causes


def _job_selector(spec: Object, selector: Object) -> list[Cause]:
    labels = at(spec, "template.metadata.labels") or {}
    causes = []
    keys = set(selector.get("matchLabels") or {})
    own = {"controller-uid", "batch.kubernetes.io/controller-uid"}
    if not spec.get("manualSelector") and (not keys & own or selector.get("matchExpressions")):
        causes.append(invalid_value("spec.selector", selector, "`selector` not auto-generated"))
    try:
        is_matching = selector_of(selector).matches(labels)
    except ApiError:
        return causes
    if not is_matching:
        causes.append(invalid_value("spec.template.metadata.labels", labels, SELECTOR_TEXT))
    return causes


def disruption_budget(content: Object) -> list[Cause]:
    """A pod disruption budget."""
    spec = content.get("spec") or {}
    causes = label_selector(spec.get("selector"), "spec.selector")
    if spec.get("minAvailable") is not None and spec.get("maxUnavailable") is not None:
        text = "minAvailable and maxUnavailable cannot be both set"
        causes.append(invalid_value("spec", spec, text))
    for field in ("minAvailable", "maxUnavailable"):
        causes += count_or_percent(spec, "spec", field)
    return causes


def job_update(old: Object, new: Object) -> list[Cause]:
    """A job's work is chosen once; a suspended job's template may still be moved elsewhere."""
    causes = frozen(old, new, "spec.completions", "spec.selector", "spec.completionMode")
    if at(old, "spec.suspend"):
        return causes
    return causes + frozen(old, new, "spec.template")
