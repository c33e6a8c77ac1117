"""Rules of the kinds that make pods: their templates, selectors, replicas and strategies.

Source: kubernetes v1.33, pkg/apis/{apps,batch,core,policy}/validation.
"""

from __future__ import annotations

from typing import Any

from unbroken.local.apiserver.http.status import ApiError, Cause, Object
from unbroken.local.apiserver.schema.constraints import forbidden, invalid_value, required_value

from .fields import (
    at,
    changed_fields,
    count_or_percent,
    frozen,
    label_selector,
    not_negative,
    one_of,
    optional,
)
from .pods import validate_spec
from .selectors import selector_of

SELECTOR_TEXT = "`selector` does not match template `labels`"
COUNTERS = ("replicas", "minReadySeconds", "revisionHistoryLimit")


def template(spec: Object, path: str = "spec.template") -> list[Cause]:
    """A pod template; its pods are always started again."""
    inner = at(spec, "template.spec") or {}
    causes = validate_spec(_with_choices(inner), f"{path}.spec")
    if inner.get("containers") and inner.get("restartPolicy") in ("OnFailure", "Never"):
        causes += one_of(inner, f"{path}.spec", "restartPolicy", ("Always",))
    return causes


def _with_choices(spec: Object) -> Object:
    """A template's spec; an empty one has had no defaults, which is not the writer's fault."""
    return {"restartPolicy": "Always", "dnsPolicy": "ClusterFirst", **spec}


def _selector(spec: Object, kind: str) -> list[Cause]:
    """A selector that must find the pods of the template."""
    selector, path = spec.get("selector"), "spec.selector"
    causes = label_selector(selector, path)
    labels = at(spec, "template.metadata.labels") or {}
    if selector is None:
        # For a daemon set only the mismatch is reported (kubernetes v1.33 too).
        causes += [required_value(path)] if kind != "daemonset" else []
    elif not selector.get("matchLabels") and not selector.get("matchExpressions"):
        text = f"empty selector is invalid for {kind}"
        return [*causes, invalid_value(path, selector, text)]
    try:
        is_matching = selector_of(selector).matches(labels)
    except ApiError:
        return [*causes, invalid_value(path, selector, "invalid label selector")]
    if not is_matching:
        causes.append(invalid_value("spec.template.metadata.labels", labels, SELECTOR_TEXT))
    return causes


def deployment(content: Object) -> list[Cause]:
    """A deployment."""
    spec = content.get("spec") or {}
    causes = _selector(spec, "deployment") + template(spec) + not_negative(spec, "spec", *COUNTERS)
    strategy, path = spec.get("strategy") or {}, "spec.strategy"
    if strategy.get("type") == "Recreate" and strategy.get("rollingUpdate") is not None:
        text = "may not be specified when strategy `type` is 'Recreate'"
        causes.append(forbidden(f"{path}.rollingUpdate", text))
    causes += _strategy(strategy, path, ("Recreate", "RollingUpdate"))
    if strategy.get("type") == "RollingUpdate":
        causes += _rolling(strategy.get("rollingUpdate") or {}, f"{path}.rollingUpdate")
    deadline, least = spec.get("progressDeadlineSeconds"), spec.get("minReadySeconds") or 0
    if deadline is not None:
        causes += not_negative(spec, "spec", "progressDeadlineSeconds")
        if deadline <= least:
            text = "must be greater than minReadySeconds"
            causes.append(invalid_value("spec.progressDeadlineSeconds", deadline, text))
    return causes


def _strategy(strategy: Object, path: str, allowed: tuple[str, ...]) -> list[Cause]:
    return [
        # The real server names the whole strategy here, not its type.
        Cause(cause.reason, path, cause.message)
        for cause in optional(strategy, path, "type", allowed)
    ]


def _rolling(rolling: Object, path: str) -> list[Cause]:
    causes = count_or_percent(rolling, path, "maxUnavailable")
    surge = rolling.get("maxSurge")
    # More than all may be added at a time.
    if not (isinstance(surge, str) and surge.endswith("%")):
        causes += count_or_percent(rolling, path, "maxSurge")
    if _is_zero(rolling.get("maxUnavailable")) and _is_zero(surge):
        unavailable, text = rolling.get("maxUnavailable"), "may not be 0 when `maxSurge` is 0"
        causes.append(invalid_value(f"{path}.maxUnavailable", unavailable, text))
    return causes


def _is_zero(value: Any) -> bool:
    return value in (0, "0%")


def replica_set(content: Object) -> list[Cause]:
    """A replica set."""
    spec = content.get("spec") or {}
    causes = _selector(spec, "replicaset") + template(spec)
    return causes + not_negative(spec, "spec", *COUNTERS)


def daemon_set(content: Object) -> list[Cause]:
    """A daemon set."""
    spec = content.get("spec") or {}
    causes = _selector(spec, "daemonset") + template(spec) + not_negative(spec, "spec", *COUNTERS)
    strategy = spec.get("updateStrategy") or {}
    return causes + _strategy(strategy, "spec.updateStrategy", ("RollingUpdate", "OnDelete"))


def stateful_set(content: Object) -> list[Cause]:
    """A stateful set."""
    spec = content.get("spec") or {}
    causes = _selector(spec, "statefulset") + template(spec)
    causes += not_negative(spec, "spec", *COUNTERS)
    policy = spec.get("podManagementPolicy")
    if policy not in (None, "OrderedReady", "Parallel"):
        text = "must be 'OrderedReady' or 'Parallel'"
        causes.append(invalid_value("spec.podManagementPolicy", policy, text))
    strategy = spec.get("updateStrategy") or {}
    if strategy.get("type") not in (None, "RollingUpdate", "OnDelete"):
        text = "must be 'RollingUpdate' or 'OnDelete'"
        causes.append(invalid_value("spec.updateStrategy", strategy, text))
    return causes


def replication_controller(content: Object) -> list[Cause]:
    """A replication controller, whose selector is a plain map of labels."""
    spec = content.get("spec") or {}
    causes = not_negative(spec, "spec", "replicas", "minReadySeconds")
    causes += [
        required_value(f"spec.{name}") for name in ("selector", "template") if not spec.get(name)
    ]
    if spec.get("template"):
        labels = at(spec, "template.metadata.labels") or {}
        if not (spec.get("selector") or {}).items() <= labels.items():
            causes.append(invalid_value("spec.template.metadata.labels", labels, SELECTOR_TEXT))
        causes += template(spec)
    return causes


def pod_template(content: Object) -> list[Cause]:
    """A template on its own."""
    inner = at(content, "template.spec") or {}
    return validate_spec(_with_choices(inner), "template.spec")


def job(content: Object, path: str = "spec") -> list[Cause]:
    """A job, or what a cron job makes one of."""
    spec = content.get("spec") or {}
    counters = (
        "parallelism",
        "completions",
        "backoffLimit",
        "activeDeadlineSeconds",
        "ttlSecondsAfterFinished",
    )
    causes = not_negative(spec, path, *counters)
    causes += optional(spec, path, "completionMode", ("NonIndexed", "Indexed"))
    inner = at(spec, "template.spec") or {}
    causes += validate_spec(_with_choices(inner), f"{path}.template.spec")
    place = f"{path}.template.spec.restartPolicy"
    if inner.get("restartPolicy") in (None, "Always"):
        causes.append(required_value(place, 'valid values: "OnFailure", "Never"'))
    if spec.get("completionMode") == "Indexed" and spec.get("completions") is None:
        text = "when completion mode is Indexed"
        causes.append(required_value(f"{path}.completions", text))
    selector = spec.get("selector")
    if selector is not None and path == "spec":
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


def cron_job(content: Object) -> list[Cause]:
    """Check a cron job; the schedule's own grammar is left to its controller."""
    spec = content.get("spec") or {}
    causes = [] if spec.get("schedule") else [required_value("spec.schedule")]
    counters = (
        "startingDeadlineSeconds",
        "successfulJobsHistoryLimit",
        "failedJobsHistoryLimit",
    )
    causes += not_negative(spec, "spec", *counters)
    causes += optional(spec, "spec", "concurrencyPolicy", ("Allow", "Forbid", "Replace"))
    return causes + job(spec.get("jobTemplate") or {}, "spec.jobTemplate.spec")


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


def selector_update(old: Object, new: Object) -> list[Cause]:
    """The pods that belong to an object are chosen once."""
    return frozen(old, new, "spec.selector")


def stateful_set_update(old: Object, new: Object) -> list[Cause]:
    """Most of a stateful set is chosen once."""
    free = {
        "replicas",
        "ordinals",
        "template",
        "updateStrategy",
        "revisionHistoryLimit",
        "persistentVolumeClaimRetentionPolicy",
        "minReadySeconds",
    }
    if changed_fields(old.get("spec") or {}, new.get("spec") or {}) <= free:
        return []
    text = (
        "updates to statefulset spec for fields other than 'replicas', 'ordinals', 'template', "
        "'updateStrategy', 'revisionHistoryLimit', 'persistentVolumeClaimRetentionPolicy' and "
        "'minReadySeconds' are forbidden"
    )
    return [forbidden("spec", text)]


def job_update(old: Object, new: Object) -> list[Cause]:
    """A job's work is chosen once; a suspended job's template may still be moved elsewhere."""
    causes = frozen(old, new, "spec.completions", "spec.selector", "spec.completionMode")
    if at(old, "spec.suspend"):
        return causes
    return causes + frozen(old, new, "spec.template")
