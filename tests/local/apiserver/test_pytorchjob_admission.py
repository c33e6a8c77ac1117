"""Admission of PyTorchJobs by the local API server."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from tests.job_samples import MANIFESTS
from unbroken.local.job_programs import ADMISSIONS

admit = ADMISSIONS["pytorchjobs.kubeflow.org"]


def job(container: dict[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    """Return a job of one worker; `container` entries are added to its container."""
    whole = {"name": "pytorch", "image": "any", **(container or {})}
    template = {"spec": {"containers": [whole]}}
    workers = {"Worker": {"replicas": 1, "template": template}}
    return {"metadata": {"name": "lm"}, "spec": {"pytorchReplicaSpecs": workers, **spec}}


def test_a_good_job_is_taken() -> None:
    assert admit(job()).problems == ()


def test_the_manifest_that_people_use_is_taken_and_its_autoscaler_is_named() -> None:
    text = (MANIFESTS / "pytorchjob-fsdp-llama3-8b.yaml").read_text()
    for name in ("NUM_NODES", "GPU_PER_NODE", "EFA_PER_NODE"):
        text = text.replace(f"${name}", "2")
    text = text.replace("${IMAGE_URI}", "registry.example/fsdp:1")
    verdict = admit(yaml.safe_load(text))
    assert verdict.problems == ()
    assert [warning.split(":")[0] for warning in verdict.warnings] == ["spec.elasticPolicy.metrics"]


@pytest.mark.parametrize(
    ("container", "place"),
    [
        ({"imagePullPolicy": "Sometimes"}, ".imagePullPolicy"),
        ({"env": [{"value": "1"}]}, ".env[0].name"),
        ({"ports": [{"containerPort": 0}]}, ".ports[0].containerPort"),
    ],
)
def test_a_template_is_judged_as_its_pods_would_be(container: dict[str, Any], place: str) -> None:
    paths = [problem.path for problem in admit(job(container)).problems]
    start = "spec.pytorchReplicaSpecs.Worker.template.spec.containers[0]"
    assert f"{start}{place}" in paths


def test_what_is_not_a_template_is_a_problem_and_no_crash() -> None:
    for broken in (3, [], {"spec": []}, {"spec": {"containers": ["pytorch", {"name": "pytorch"}]}}):
        found = admit(job(pytorchReplicaSpecs={"Worker": {"template": broken}}))
        assert found.problems
