"""Built-in objects are completed, and shown in tables, as by a real API server.

The tests compare them with the objects in `recorded/`, which kube-apiserver v1.20.2 stored and
showed. Lists name the differences of later versions, and of a cluster without a proxy.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.local.apiserver.recorded_cases import NAMESPACE, Case, Object, answers, cases
from unbroken.local.apiserver.kinds.builtin import BUILTINS
from unbroken.local.apiserver.kinds.kinds import from_storage, to_storage
from unbroken.local.apiserver.schema.structural import prune, without_nulls
from unbroken.local.apiserver.tables.columns import table
from unbroken.local.apiserver.write.defaults import apply_defaults
from unbroken.local.apiserver.write.patch import merge_patch

KINDS = {kind.resource: kind for kind in BUILTINS}
CASES = [*cases("objects")]
ANSWERS = answers("objects")
NOW = 1_800_000_000.0

BY_OTHERS = {
    "pods": {
        *("spec.priority", "spec.preemptionPolicy", "spec.serviceAccount"),
        *("spec.serviceAccountName", "spec.hostNetwork"),
    },
    "nodes": {"spec", "spec.taints", "status.daemonEndpoints", "status.nodeInfo"},
    "services": {"spec.clusterIPs"},
}
"""Fields that admission, the node itself or Go's zero values add."""
SINCE = {
    "namespaces": {"labels", "labels.kubernetes.io/metadata.name"},
    "services": {"spec.ipFamilies", "spec.ipFamilyPolicy", "spec.internalTrafficPolicy"},
    "jobs.batch": {
        *("spec.completionMode", "spec.manualSelector", "spec.podReplacementPolicy"),
        *("spec.suspend", "spec.selector.matchLabels.controller-uid"),
        "spec.selector.matchLabels.batch.kubernetes.io/controller-uid",
        "spec.template.metadata.labels.batch.kubernetes.io/controller-uid",
        "spec.template.metadata.labels.batch.kubernetes.io/job-name",
        *("labels.batch.kubernetes.io/controller-uid", "labels.batch.kubernetes.io/job-name"),
    },
}
"""Fields that came after v1.20."""
NEW_COLUMNS = {
    "persistentvolumeclaims": {"VolumeAttributesClass"},
    "persistentvolumes": {"VolumeAttributesClass"},
    "priorityclasses.scheduling.k8s.io": {"PreemptionPolicy"},
    "jobs.batch": {"Status"},
}


def complete(case: Case) -> Object:
    """Return the object as a create completes it, in the form of its kind."""
    kind = KINDS[case.resource]
    content = copy.deepcopy(case.content)
    content["metadata"] |= {"uid": "UID", "creationTimestamp": "2026-01-01T00:00:00Z"}
    if kind.namespaced:
        content["metadata"]["namespace"] = NAMESPACE
    schema = kind.versions["v1"].schema
    content, dropped = prune(without_nulls(content, schema), schema)
    assert not dropped
    apply_defaults(kind, content)
    return content


def differing(mine: Any, theirs: Any, path: str = "") -> Iterator[str]:
    """Yield the paths of differences; an empty value equals an absent one."""
    if isinstance(mine, dict) and isinstance(theirs, dict):
        for key in mine.keys() | theirs.keys():
            yield from differing(mine.get(key), theirs.get(key), f"{path}.{key}")
    elif isinstance(mine, list) and isinstance(theirs, list) and len(mine) == len(theirs):
        for index, pair in enumerate(zip(mine, theirs, strict=True)):
            yield from differing(*pair, f"{path}[{index}]")
    elif mine != theirs and (mine not in (None, {}, []) or theirs not in (None, {}, [])):
        yield path.strip(".")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.title[:80])
def test_an_object_is_completed_as_by_the_real_server(case: Case) -> None:
    mine, theirs = complete(case), ANSWERS[case.title]
    meta = mine.pop("metadata")
    found = {*differing(mine, theirs["stored"])}
    found |= {*differing(meta.get("labels"), theirs["labels"], "labels")}
    known = BY_OTHERS.get(case.resource, set()) | SINCE.get(case.resource, set())
    assert found <= known


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.title[:80])
def test_completing_again_changes_nothing(case: Case) -> None:
    once = complete(case)
    again = copy.deepcopy(once)
    apply_defaults(KINDS[case.resource], again)
    assert again == once


@pytest.mark.parametrize("table_name", [*BY_OTHERS, *SINCE])
def test_every_known_difference_is_met(table_name: str) -> None:
    known = BY_OTHERS.get(table_name, set()) | SINCE.get(table_name, set())
    found: set[str] = set()
    for case in CASES:
        if case.resource == table_name:
            mine, theirs = complete(case), ANSWERS[case.title]
            labels = mine.pop("metadata").get("labels")
            found |= {*differing(mine, theirs["stored"])}
            found |= {*differing(labels, theirs["labels"], "labels")}
    assert found == known


def shown(case: Case) -> Object:
    """Return our cells, by column."""
    kind = KINDS[case.resource]
    content = to_storage(kind, complete(case))
    if case.status is not None:
        content = merge_patch(content, {"status": case.status})
    content = from_storage(kind, content)
    made = table(kind, kind.versions["v1"], [content], NOW, "None", {})
    titles = [column["name"] for column in made["columnDefinitions"]]
    return dict(zip(titles, made["rows"][0]["cells"], strict=True))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.title[:80])
def test_a_row_shows_what_the_real_server_shows(case: Case) -> None:
    mine, theirs = shown(case), ANSWERS[case.title]["cells"]
    passing = {"Age", "Created At"} | NEW_COLUMNS.get(case.resource, set())
    assert mine.keys() - passing == theirs.keys()
    for name, cell in theirs.items():
        text = mine[name]
        if case.resource == "pods" and name == "Restarts":
            text = int(text.partition(" ")[0])  # later versions say when, too
        if isinstance(text, str):
            text = re.sub("^[0-9]+y([0-9]+d)?$", "YEARS", text)
            text = text.replace("batch.kubernetes.io/controller-uid", "controller-uid")
        assert (name, type(text), text) == (name, type(cell), cell)
