"""Values of a template that are not of their field's kind are refused with the field's name."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.job_samples import changed, job
from tests.tables import cases
from unbroken.kube.quantity import QuantityError, parse_quantity
from unbroken.operator.webhook.review import JobReview, judged
from unbroken.spec.job.parse import load_job, parse_job
from unbroken.spec.job.rules import is_quantity
from unbroken.spec.kubeflow.pytorchjob import parse_pytorchjob
from unbroken.spec.problems import ManifestError

POD = "spec/replicaSpecs/0/template/spec"
PATH = "spec.replicaSpecs[0].template.spec"
MAIN = "containers[0]"
WHOLE, LOGICAL = "must be a whole number", "must be true or false"
HINT = "was left unsubstituted: fill it in, as envsubst does"


@cases
def test_a_variable_that_was_left_is_refused_by_its_field(
    place: str, value: Any, path: str, why: str
) -> None:
    manifest = changed(f"{POD}/{place}", value)
    (problem,) = parse_job(manifest).problems
    assert problem.path == f"{PATH}.{path}"
    assert problem.message.startswith("Invalid value: ")
    assert why in problem.message
    assert HINT in problem.message
    # `unbroken run` and the webhook say the same.
    with pytest.raises(ManifestError) as caught:
        load_job(manifest)
    assert str(problem) in str(caught.value)
    verdict, _ = judged(JobReview("u", "default", manifest))
    assert verdict.problems == (problem,)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("spec/replicaSpecs/0/replicas", "${NUM_NODES}"),
        ("spec/nprocPerNode", "$GPU_PER_NODE"),
        ("spec/runPolicy/jobMaxRetryCount", "${RETRIES}"),
        ("spec/runPolicy/suspend", "${SUSPEND}"),
        ("spec/runPolicy/cleanPodPolicy", "${POLICY}"),
    ],
)
def test_the_jobs_own_fields_have_the_hint_too(path: str, value: str) -> None:
    problems = parse_job(changed(path, value)).problems
    named = path.replace("/0/", "[0].").replace("/", ".")
    (found,) = [one for one in problems if one.path == named]
    assert f"{value} {HINT}" in found.message


@pytest.mark.parametrize(
    ("amount", "is_good"),
    [
        ("8", True),
        (8, True),
        (0.5, True),
        ("64Gi", True),
        ("many", False),
        (True, False),
        ([], False),
    ],
)
def test_quantities_are_text_or_numbers(amount: Any, is_good: bool) -> None:
    limits = {"limits": {"cpu": amount}}
    problems = parse_job(changed(f"{POD}/containers/0/resources", limits)).problems
    assert (problems == ()) is is_good
    for problem in problems:
        assert problem.path == f'{PATH}.{MAIN}.resources.limits["cpu"]'
        assert "unsubstituted" not in problem.message


def test_what_a_program_or_a_selector_may_mean_is_not_refused() -> None:
    manifest = changed(f"{POD}/containers/0/args", ["-c", "echo ${HOME} $PATH"])
    manifest = changed(f"{POD}/containers/0/env", [{"name": "A", "value": "${B}"}], manifest)
    manifest = changed(f"{POD}/nodeSelector", {"priority": "high", "tty": "no"}, manifest)
    parsed = parse_job(manifest)
    assert (parsed.problems, parsed.warnings) == ((), ())
    terms = {"matchExpressions": [{"key": "k", "operator": "In", "values": ["${TYPE}"]}]}
    affinity = {"nodeAffinity": {"x": [terms]}}
    parsed = parse_job(changed(f"{POD}/affinity", affinity))
    assert parsed.problems == ()
    place = f"{PATH}.affinity.nodeAffinity.x[0].matchExpressions[0].values[0]"
    assert parsed.warnings == (f'{place}: "${{TYPE}}"; ${{TYPE}} {HINT}',)


def test_a_pytorchjobs_template_is_read_alike() -> None:
    limits = {"limits": {"nvidia.com/gpu": "${GPUS}"}}
    container = {"name": "pytorch", "image": "any", "resources": limits}
    worker = {"replicas": 1, "template": {"spec": {"containers": [container]}}}
    content = {"metadata": {"name": "a"}, "spec": {"pytorchReplicaSpecs": {"Worker": worker}}}
    (problem,) = parse_pytorchjob(content).problems
    place = "spec.pytorchReplicaSpecs.Worker.template.spec.containers[0]"
    assert problem.path == f'{place}.resources.limits["nvidia.com/gpu"]'


def test_templates_without_end_are_looked_at_to_a_depth() -> None:
    deep: Any = {"x": "${A}"}
    for _ in range(500):
        deep = {"y": [deep]}
    assert parse_job(changed(f"{POD}/deep", deep)).problems == ()
    assert parse_job(job()).problems == ()


@given(st.text("0123456789.+-eEinumkKMGTP ${}", max_size=12))
def test_quantities_are_those_that_the_api_reads(text: str) -> None:
    try:
        parse_quantity(text)
        is_read = True
    except QuantityError:
        is_read = False
    assert is_quantity(text) is is_read
