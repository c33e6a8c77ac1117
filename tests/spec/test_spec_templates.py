"""Templates that no pod could be made of are refused before the operator makes one."""

from __future__ import annotations

from typing import Any

import pytest

from tests.job_samples import changed
from unbroken.core.job.events import CreatePod, NodeName, PodName
from unbroken.operator.jobs.pods import JobIdentity, build_pod
from unbroken.spec.job.parse import parse_job

TEMPLATE = "spec/replicaSpecs/0/template"
PATH = "spec.replicaSpecs[0].template"
ORDER = CreatePod(PodName("llm-pods-0"), "pods", 0, frozenset({NodeName("n")}))


PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
APART = "spec.affinity.podAntiAffinity"


@pytest.mark.parametrize(
    ("place", "value", "path"),
    [
        ("spec/containers/0/env", {"a": 1}, "spec.containers[0].env"),
        ("spec/containers/0/env", ["a"], "spec.containers[0].env[0]"),
        ("spec/containers/0/env", [{"value": "a"}], "spec.containers[0].env[0].name"),
        ("spec/containers/0/ports", ["a"], "spec.containers[0].ports[0]"),
        ("spec/containers/0/volumeMounts", "a", "spec.containers[0].volumeMounts"),
        ("spec/volumes", {"a": 1}, "spec.volumes"),
        ("spec/tolerations", "a", "spec.tolerations"),
        ("spec/nodeSelector", ["a"], "spec.nodeSelector"),
        ("spec/affinity", "a", "spec.affinity"),
        ("spec/affinity", {"nodeAffinity": "a"}, "spec.affinity.nodeAffinity"),
        ("spec/affinity", {"podAffinity": "a"}, "spec.affinity.podAffinity"),
        ("spec/affinity", {"podAntiAffinity": {PREFERRED: 1}}, f"{APART}.{PREFERRED}"),
        (
            "spec/affinity",
            {"podAntiAffinity": {PREFERRED: [{"podAffinityTerm": "a"}]}},
            f"{APART}.{PREFERRED}[0].podAffinityTerm",
        ),
        ("spec/topologySpreadConstraints", ["a"], "spec.topologySpreadConstraints[0]"),
        ("metadata", {"labels": ["a"]}, "metadata.labels"),
        ("metadata", {"annotations": "a"}, "metadata.annotations"),
    ],
)
def test_what_is_added_to_has_the_right_shape(place: str, value: Any, path: str) -> None:
    problems = parse_job(changed(f"{TEMPLATE}/{place}", value)).problems
    assert [problem.path for problem in problems] == [f"{PATH}.{path}"]


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("spec/containers/0/env", [{"name": "A", "value": "1"}]),
        ("spec/containers/0/env", None),
        ("spec/affinity", {"nodeAffinity": None}),
        ("spec/affinity", {"podAffinity": {PREFERRED: [{}, {"podAffinityTerm": None}]}}),
        ("spec/topologySpreadConstraints", [{"topologyKey": ["a"]}]),
        ("spec/tolerations", [{"operator": "Exists"}]),
        ("metadata", None),
    ],
)
def test_of_what_is_accepted_a_pod_is_made(place: str, value: Any) -> None:
    parsed = parse_job(changed(f"{TEMPLATE}/{place}", value))
    assert parsed.problems == ()
    pod = build_pod(
        JobIdentity("ns", "llm", "uid"),
        parsed.spec,
        ORDER,
        "llm-agent-1",
        topology_keys={"unbroken.dev/rack"},
    )
    assert pod["spec"]["containers"][0]["env"]
