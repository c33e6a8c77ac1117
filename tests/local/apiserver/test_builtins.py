"""The table of built-in kinds, and the two forms of events."""

from __future__ import annotations

import subprocess
import sys

import pytest

from unbroken.local.apiserver.kinds.builtin import BUILTINS
from unbroken.local.apiserver.kinds.kinds import from_storage, to_storage
from unbroken.local.apiserver.schema.schemas import builtin

KINDS = {kind.resource: kind for kind in BUILTINS}


def test_no_two_kinds_share_a_resource_or_a_short_name() -> None:
    assert len(KINDS) == len(BUILTINS)
    short = [name for kind in BUILTINS if not kind.stored_as for name in kind.short_names]
    assert len(short) == len({*short})


@pytest.mark.parametrize(
    "kind", [kind for kind in BUILTINS if not kind.refusal], ids=lambda kind: kind.resource
)
def test_each_kind_has_the_schema_of_its_name(kind: object) -> None:
    for version in KINDS[kind.resource].versions.values():  # type: ignore[attr-defined]
        assert version.schema.raw == builtin(version.schema_name).raw
        assert version.schema.properties.keys() >= {"apiVersion", "kind", "metadata"}
        assert version.has_status <= ("status" in version.schema.properties)


def test_a_start_reads_no_schema() -> None:
    program = (
        "from unbroken.local.apiserver.kinds import builtin;"
        "from unbroken.local.apiserver.schema import schemas;"
        "print(schemas.builtin_definitions.cache_info().misses)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert done.stdout.strip() == b"0"


@pytest.mark.parametrize(
    ("resource", "expected"),
    [
        ("pods", (True, True, ("po",), ("all",))),
        ("nodes", (False, True, ("no",), ())),
        ("configmaps", (True, False, ("cm",), ())),
        ("jobs.batch", (True, True, (), ("all",))),
        ("leases.coordination.k8s.io", (True, False, (), ())),
        ("priorityclasses.scheduling.k8s.io", (False, False, ("pc",), ())),
        (
            "customresourcedefinitions.apiextensions.k8s.io",
            (False, True, ("crd", "crds"), ("api-extensions",)),
        ),
    ],
)
def test_a_kind_is_served_as_kubernetes_serves_it(
    resource: str, expected: tuple[bool, bool, tuple[str, ...], tuple[str, ...]]
) -> None:
    kind = KINDS[resource]
    version = kind.versions["v1"]
    assert (
        kind.namespaced,
        version.has_status,
        kind.short_names,
        kind.categories,
    ) == expected


@pytest.mark.parametrize(
    ("resource", "path"),
    [
        ("pods", "spec.nodeName"),
        ("pods", "status.phase"),
        ("nodes", "spec.unschedulable"),
        ("events", "involvedObject.name"),
        ("events.events.k8s.io", "regarding.name"),
        ("secrets", "type"),
        ("configmaps", "metadata.namespace"),
    ],
)
def test_fields_can_be_selected(resource: str, path: str) -> None:
    assert path in KINDS[resource].versions["v1"].selectable_fields


def test_both_kinds_of_events_are_one_collection() -> None:
    core, new = KINDS["events"], KINDS["events.events.k8s.io"]
    assert new.storage == core.storage == "events"
    event = {
        "metadata": {"name": "a"},
        "note": "it went",
        "regarding": {"name": "p"},
        "reportingController": "c",
        "deprecatedCount": 2,
        "reason": "Gone",
    }
    stored = to_storage(new, event)
    assert stored == {
        "metadata": {"name": "a"},
        "message": "it went",
        "involvedObject": {"name": "p"},
        "reportingComponent": "c",
        "count": 2,
        "reason": "Gone",
    }
    assert from_storage(new, stored) == event
    assert to_storage(core, stored) is stored
    assert from_storage(core, stored) is stored
