"""Admission of KubeRay's kinds by the local API server."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from tests.job_samples import MANIFESTS
from tests.local.ray.test_raycluster import sample
from unbroken.local.job_programs import ADMISSIONS
from unbroken.spec.keys import AUTO_RESUME, LOG_MONITORING, MAX_RETRIES
from unbroken.spec.problems import Verdict

Object = dict[str, Any]
admit = ADMISSIONS["rayclusters.ray.io"]
LINES = [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
BOMB = "\n".join(["a0: &a0 [1, 2, 3, 4, 5, 6, 7, 8, 9]", *LINES])
"""Aliases of aliases: 9 to the 12th values."""


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("sample", []),
        ("complete", []),
        ("autoscaler", []),
        ("embedded-gcs-ft", ["spec.gcsFaultToleranceOptions"]),
    ],
)
def test_kuberays_samples_are_taken_and_what_is_not_offered_is_named(
    name: str, fields: list[str]
) -> None:
    verdict = admit(sample(name))
    assert verdict.problems == ()
    assert [one.partition(":")[0] for one in verdict.warnings] == fields


def test_what_kuberay_refuses_is_refused() -> None:
    given = sample()
    given["metadata"]["name"] = "a" * 55
    (group,) = given["spec"]["workerGroupSpecs"]
    given["spec"]["workerGroupSpecs"] = [{**group, "minReplicas": 9}, group]
    given["spec"]["headGroupSpec"]["template"]["spec"]["containers"] = []
    paths = {problem.path for problem in admit(given).problems}
    assert {
        "metadata.name",
        "spec.workerGroupSpecs[0].minReplicas",
        "spec.workerGroupSpecs[1].groupName",
        "spec.headGroupSpec.template.spec.containers",
    } <= paths


def test_a_template_is_judged_as_its_pods_would_be() -> None:
    given = sample()
    (group,) = given["spec"]["workerGroupSpecs"]
    group["template"]["spec"]["containers"][0]["ports"] = [{"containerPort": 0}]
    start = "spec.workerGroupSpecs[0].template.spec.containers[0]"
    assert f"{start}.ports[0].containerPort" in {one.path for one in admit(given).problems}


@pytest.mark.parametrize(
    ("variable", "said"),
    [
        ({"name": "RAY_AUTH_MODE", "value": "disabled"}, "every user of this machine"),
        ({"name": "RAY_AUTH_MODE", "valueFrom": {}}, "every user of this machine"),
        ({"name": "RAY_AUTH_TOKEN", "value": "own"}, "does not know this token"),
        ({"name": "RAY_AUTH_TOKEN_PATH", "value": "/own"}, "does not know this token"),
        ({"name": "RAY_AUTH_MODE", "value": "token"}, ""),
        ({"name": "OTHER"}, ""),
    ],
)
def test_a_variable_that_replaces_the_token_is_named(variable: Object, said: str) -> None:
    given = sample()
    given["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]["env"] = [variable]
    warnings = admit(given).warnings
    assert len(warnings) == bool(said)
    if said:
        place = "spec.headGroupSpec.template.spec.containers[0].env"
        assert warnings[0].startswith(f"{place}: {variable['name']}: ")
        assert said in warnings[0]


def test_a_kind_that_nothing_runs_says_so() -> None:
    verdict = ADMISSIONS["rayservices.ray.io"]({"kind": "RayService", "metadata": {}, "spec": {}})
    assert verdict.problems == ()
    assert [one.partition(":")[0] for one in verdict.warnings] == ["RayService"]


def job(**spec: Any) -> Object:
    """Return KubeRay's sample of a RayJob; `spec` adds to its spec."""
    found: Object = next(yaml.safe_load_all((MANIFESTS / "rayjob-shutdown.yaml").read_text()))
    return {**found, "spec": {**found["spec"], **spec}}


@pytest.mark.parametrize("name", ["1digit", "dot.ted", "1", "a.b-c", "0" * 80])
def test_a_name_of_which_no_service_can_be_named_is_refused(name: str) -> None:
    metadata = {"name": name}
    for resource, given in (("rayclusters.ray.io", sample()), ("rayjobs.ray.io", job())):
        problems = ADMISSIONS[resource]({**given, "metadata": metadata}).problems
        texts = [one.message for one in problems if one.path == "metadata.name"]
        assert any("DNS-1035 label" in text for text in texts), resource
        assert ADMISSIONS[resource]({**given, "metadata": {"generateName": "1-"}}) == Verdict()


def test_kuberays_job_is_taken() -> None:
    assert ADMISSIONS["rayjobs.ray.io"](job()) == Verdict()


@pytest.mark.parametrize(
    ("spec", "path"),
    [
        ({"entrypoint": ""}, "spec.entrypoint"),
        ({"clusterSelector": {"ray.io/cluster": "a"}}, "spec.clusterSelector"),
        ({"submissionMode": "InteractiveMode"}, "spec.submissionMode"),
        ({"runtimeEnvYAML": "a: [b"}, "spec.runtimeEnvYAML"),
        ({"runtimeEnvYAML": "a: " + "[" * 50_000}, "spec.runtimeEnvYAML"),
        ({"runtimeEnvYAML": BOMB}, "spec.runtimeEnvYAML"),
        ({"runtimeEnvYAML": "? [a]\n: b"}, "spec.runtimeEnvYAML"),
        ({"entrypointResources": "\ud800: 1"}, "spec.entrypointResources"),
        ({"entrypointResources": "5"}, "spec.entrypointResources"),
        ({"rayClusterSpec": None}, "spec.rayClusterSpec"),
        (
            {"rayClusterSpec": {"headGroupSpec": {"template": {"spec": {}}}}},
            "spec.rayClusterSpec.headGroupSpec.template.spec.containers",
        ),
    ],
)
def test_a_job_that_could_not_run_is_refused(spec: Object, path: str) -> None:
    assert [one.path for one in ADMISSIONS["rayjobs.ray.io"](job(**spec)).problems] == [path]


def test_bad_log_rules_are_refused_and_those_without_auto_resume_told() -> None:
    given = sample()
    rule = {"name": "Steps", "logPattern": ".*step=", "expectedStartCutOffInSeconds": 60}
    annotations = {LOG_MONITORING: json.dumps([{**rule, "logPattern": "(?=x)"}])}
    given["metadata"]["annotations"] = annotations
    (problem,) = admit(given).problems
    assert problem.path.endswith("logMonitoringConfiguration[0].logPattern")
    annotations[LOG_MONITORING] = json.dumps([rule])
    verdict = admit(given)
    assert verdict.problems == ()
    (warning,) = verdict.warnings
    assert f"has no effect without {AUTO_RESUME}" in warning
    annotations |= {AUTO_RESUME: "true", MAX_RETRIES: "2"}
    assert admit(given) == Verdict()
