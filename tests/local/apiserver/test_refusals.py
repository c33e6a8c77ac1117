"""The rules of built-in kinds refuse what a real API server refuses, in its words.

The tests compare them with the causes that kube-apiserver v1.20.2 gave for the requests in
`recorded/`. If later versions have other words, ours are the later ones (`REWORDED`).
"""

from __future__ import annotations

import copy
import re

import pytest

from tests.local.apiserver.recorded_cases import NAMESPACE, Case, answers, cases
from unbroken.local.apiserver.kinds.builtin import BUILTINS
from unbroken.local.apiserver.kinds.kinds import to_storage
from unbroken.local.apiserver.validation import rules
from unbroken.local.apiserver.validation.names import validate_metadata
from unbroken.local.apiserver.write.defaults import apply_defaults
from unbroken.local.apiserver.write.patch import merge_patch

KINDS = {kind.resource: kind for kind in BUILTINS}
CASES = [*cases("refusals")]
ANSWERS = answers("refusals")
REWORDED = {
    "one letter or number (a-z, 0-9)": "one letter (a-z)",
    "must be less than or equal to cpu limit": "must be less than or equal to cpu limit of 1",
    "must be equal to nvidia.com/gpu limit": "must be equal to nvidia.com/gpu limit of 1",
    "must have at most 1048576 bytes": "may not be more than 1048576 bytes",
    "must to greater or equal than 0": "must be greater than or equal to 0",
    '"ReadWriteMany", "ReadWriteOnce"': '"ReadWriteMany", "ReadWriteOnce", "ReadWriteOncePod"',
    "`spec.activeDeadlineSeconds` or `spec.tolerations` (only additions to existing tolerations)": (
        "`spec.activeDeadlineSeconds`,`spec.tolerations` (only additions to existing tolerations),"
        "`spec.terminationGracePeriodSeconds` (allow it to be set to 1 if it was previously "
        "negative)"
    ),
    "`spec.containers[*].image`, `spec.init": "`spec.containers[*].image`,`spec.init",
    "Containers[*].image`, `spec.active": "Containers[*].image`,`spec.active",
    "except resources.requests for bound": (
        "except resources.requests and volumeAttributesClassName for bound"
    ),
    "Invalid value: VALUE: must not be set for init containers": (
        "Forbidden: may not be set for init containers without restartPolicy=Always"
    ),
}
DIFFERENT = {
    ("pods", '"terminationGracePeriodSeconds": -1'): "a pod must end",
    ("pods", '"serviceAccountName": "A_B"'): "admission comes before",
    ("pods", '"priorityClassName": "A_B"'): "admission comes before",
    ("services", '"type": "NodePort"'): "all services are headless here",
    ("endpoints", '"ip": "x"'): "v1.20 said it twice",
    ("endpoints", '"ip": "127.0.0.1"'): "pods have loopback addresses here",
    ("persistentvolumes", '"storage": "-1"'): "v1.20 said it twice",
    ("jobs.batch", '"ttlSecondsAfterFinished": -1'): "behind a gate in v1.20",
}
"""Reasons for other answers of ours, by resource and part of the case as written."""


def ours(case: Case) -> list[tuple[str, str, str]]:
    """Return the causes of our rules, after the same defaults as in a request."""
    kind = KINDS[case.resource]
    content = copy.deepcopy(case.content)
    content["metadata"].setdefault("uid", "u")
    if kind.namespaced:
        content["metadata"]["namespace"] = NAMESPACE
    content, old = to_storage(kind, content), None
    apply_defaults(kind, content)
    if case.change is not None:
        old, content = content, to_storage(kind, merge_patch(copy.deepcopy(content), case.change))
        apply_defaults(kind, content)
    causes = validate_metadata(content["metadata"], kind) + rules.validate(kind, old, content)
    return sorted(
        {(cause.reason, cause.field, cause.message.split("\n", 1)[0]) for cause in causes}
    )


def expected(title: str) -> list[tuple[str, str, str]]:
    """Return the recorded causes, in later words."""
    found = set()
    causes = ANSWERS[title] or []
    if isinstance(causes, str):  # refused by admission, which gives no causes
        return [("", "", causes)]
    for reason, field, text in causes:
        for old, new in REWORDED.items():
            text = text.replace(old, new)
        field = field.replace("Term.matchExpressions.", "Term.labelSelector.")
        found.add(("FieldValueForbidden" if text[:9] == "Forbidden" else reason, field, text))
    return sorted(found)


def agree(mine: list[tuple[str, str, str]], theirs: list[tuple[str, str, str]]) -> bool:
    """Return whether the causes are the same, whatever stands for VALUE."""
    if len(mine) != len(theirs):
        return False
    return all(
        (a[0], a[1]) == (b[0], b[1])
        and re.fullmatch(re.escape(b[2]).replace("VALUE", ".*"), a[2]) is not None
        for a, b in zip(mine, theirs, strict=True)
    )


def difference(case: Case) -> str | None:
    """Return the reason why our answer differs; None if it should be the same."""
    found = [
        why
        for (kind, part), why in DIFFERENT.items()
        if kind == case.resource and part in case.title
    ]
    return found[0] if found else None


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.title[:80])
def test_a_request_is_refused_for_the_same_causes(case: Case) -> None:
    mine = ours(case)
    if difference(case) is None:
        assert agree(mine, expected(case.title)), (mine, expected(case.title))
    else:
        assert not agree(mine, expected(case.title)), "take it from DIFFERENT"


def test_every_difference_is_met() -> None:
    for kind, part in DIFFERENT:
        assert any(case.resource == kind and part in case.title for case in CASES), part
