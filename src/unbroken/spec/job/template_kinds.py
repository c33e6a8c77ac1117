"""Values in a pod template that are not of their field's kind: quantities, numbers, booleans.

The API server refuses such a pod while it decodes it, in a message that does not name the field.
Fields are known by their names in PodSpec of Kubernetes v1; other fields are left to the API.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from unbroken.spec.problems import VARIABLE, Report, shown, unsubstituted

DEPTH_MAX = 40
"""Levels of a template that are checked; PodSpec has about 15."""
QUANTITY_LENGTH = 100
QUANTITY = re.compile(
    r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3}|[numkMGTPE]|[KMGTPE]i)?"
)
"""Kubernetes' quantities (apimachinery, pkg/api/resource/quantity.go)."""
QUANTITY_TEXT = "must be a quantity, such as 8, 500m or 64Gi"
RESOURCES = ("limits", "requests", "overhead")
"""Objects whose values are all quantities."""
QUANTITIES = ("sizeLimit", "divisor")
INTEGERS = frozenset(
    [
        "activeDeadlineSeconds",
        "containerPort",
        "defaultMode",
        "expirationSeconds",
        "failureThreshold",
        "fsGroup",
        "hostPort",
        "initialDelaySeconds",
        "maxSkew",
        "minDomains",
        "mode",
        "periodSeconds",
        "priority",
        "runAsGroup",
        "runAsUser",
        "successThreshold",
        "terminationGracePeriodSeconds",
        "timeoutSeconds",
        "tolerationSeconds",
        "ttlSecondsAfterFinished",
        "weight",
    ]
)
BOOLEANS = frozenset(
    [
        "allowPrivilegeEscalation",
        "automountServiceAccountToken",
        "enableServiceLinks",
        "hostIPC",
        "hostNetwork",
        "hostPID",
        "hostUsers",
        "optional",
        "privileged",
        "readOnly",
        "readOnlyRootFilesystem",
        "runAsNonRoot",
        "setHostnameAsFQDN",
        "shareProcessNamespace",
        "stdin",
        "stdinOnce",
        "tty",
    ]
)
FREE = frozenset(
    [
        "annotations",
        "args",
        "attributes",
        "command",
        "env",
        "labels",
        "matchLabels",
        "metadata",
        "nodeSelector",
        "options",
        "volumeAttributes",
    ]
)
"""Fields whose content is the user's own: keys there have no meaning here, and `${NAME}` may be
intended."""


def check_kinds(pod: Mapping[str, Any], path: str, report: Report) -> None:
    """Report each value of a PodSpec that is not of its field's kind."""
    _check_object(pod, path, report, DEPTH_MAX)


def _check_object(found: Mapping[str, Any], path: str, report: Report, depth: int) -> None:
    for key, value in found.items():
        name = str(key)
        place = f"{path}.{name}"
        if value is None or name in FREE:
            _check_sources(value if name == "env" else None, place, report, depth)
        elif name in RESOURCES and isinstance(value, Mapping):
            for resource, amount in value.items():
                _check_quantity(amount, f'{place}["{str(resource)[:80]}"]', report)
        elif name in QUANTITIES:
            _check_quantity(value, place, report)
        elif name in INTEGERS and not _is_integer(value):
            report.invalid(place, value, "must be a whole number")
        elif name in BOOLEANS and not isinstance(value, bool):
            report.invalid(place, value, "must be true or false")
        elif name == "image" and unsubstituted(value):
            report.invalid(place, value, "must be the name of an image")
        else:
            _check(value, place, report, depth - 1)


def _check(value: Any, path: str, report: Report, depth: int) -> None:
    if depth <= 0:
        return
    if isinstance(value, Mapping):
        _check_object(value, path, report, depth)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check(item, f"{path}[{index}]", report, depth - 1)
    elif isinstance(value, str) and VARIABLE.search(value):
        report.warn(f"{path}: {shown(value)}{unsubstituted(value)}")


def _check_sources(env: Any, path: str, report: Report, depth: int) -> None:
    """Check the sources of variables; their values are the user's own."""
    for index, entry in enumerate(env if isinstance(env, list | tuple) else ()):
        source = entry.get("valueFrom") if isinstance(entry, Mapping) else None
        if isinstance(source, Mapping):
            _check_object(source, f"{path}[{index}].valueFrom", report, depth - 1)


def _is_integer(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < 2**63 and value == int(value)


def _check_quantity(value: Any, path: str, report: Report) -> None:
    if (
        isinstance(value, bool)
        or not isinstance(value, str | int | float)
        or (isinstance(value, str) and not is_quantity(value))
    ):
        report.invalid(path, value, QUANTITY_TEXT)


def is_quantity(text: str) -> bool:
    """True for text that Kubernetes reads as a quantity."""
    return len(text) <= QUANTITY_LENGTH and QUANTITY.fullmatch(text) is not None
