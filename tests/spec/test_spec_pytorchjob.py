"""Fields of a PyTorchJob that are read, and problems that are reported."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tables import cases
from unbroken.spec.auto_resume import Resume, resume_of, resume_problems
from unbroken.spec.keys import AUTO_RESUME, MAX_RETRIES
from unbroken.spec.kubeflow.pytorchjob import (
    KubeflowCleanPodPolicy,
    KubeflowRestartPolicy,
    Replica,
    parse_pytorchjob,
)

Object = dict[str, Any]


def job(**spec: Any) -> Object:
    """Return a job of one worker; `spec` overrides its fields."""
    template = {"spec": {"containers": [{"name": "pytorch", "image": "any"}]}}
    workers = {"Worker": {"replicas": 2, "template": template}}
    return {"metadata": {"name": "lm"}, "spec": {"pytorchReplicaSpecs": workers, **spec}}


def test_defaults_are_those_of_the_training_operator() -> None:
    parsed = parse_pytorchjob(job())
    assert not parsed.problems
    assert not parsed.warnings
    workers = parsed.spec.replicas()[Replica.WORKER]
    assert (workers.replicas, workers.restart_policy) == (2, KubeflowRestartPolicy.ON_FAILURE)
    assert parsed.spec.run_policy.clean_pod_policy is KubeflowCleanPodPolicy.NONE
    assert list(parsed.spec.replicas()) == [Replica.WORKER]


TEMPLATE = {"spec": {"containers": [{"name": "pytorch"}]}}


@cases
def test_problems_have_their_places(spec: Object, problem: str) -> None:
    problems = [str(one) for one in parse_pytorchjob(job(**spec)).problems]
    assert any(one.startswith(problem) for one in problems), problems


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("lm", ""),
        ("3b", "must be small letters"),
        ("a.b", "must be small letters"),
        ("x" * 54, ""),
        ("x" * 55, "must be 1 letters shorter"),
    ],
)
def test_services_can_have_the_names_of_the_pods(name: str, problem: str) -> None:
    said = [str(one) for one in parse_pytorchjob({**job(), "metadata": {"name": name}}).problems]
    assert all(one.startswith("metadata.name: Invalid value") for one in said)
    assert problem in " ".join(said)
    assert bool(said) == bool(problem)


def test_a_restart_policy_in_the_template_is_said_not_to_count() -> None:
    template = {"spec": {**TEMPLATE["spec"], "restartPolicy": "Never"}}
    parsed = parse_pytorchjob(job(pytorchReplicaSpecs={"Worker": {"template": template}}))
    assert not parsed.problems
    assert "template.spec.restartPolicy: not used" in parsed.warnings[0]


@pytest.mark.parametrize(
    ("annotations", "resume", "word"),
    [
        ({}, Resume(), ""),
        ({AUTO_RESUME: "true", MAX_RETRIES: "2"}, Resume(True, 2), ""),
        ({AUTO_RESUME: "True", MAX_RETRIES: "0"}, Resume(True, 0), ""),
        ({AUTO_RESUME: "false"}, Resume(), ""),
        ({AUTO_RESUME: "true"}, Resume(), "needs"),
        ({AUTO_RESUME: "yes", MAX_RETRIES: "2"}, Resume(), 'must be "true" or "false"'),
        ({AUTO_RESUME: "true", MAX_RETRIES: "-1"}, Resume(), "whole number"),
        ({AUTO_RESUME: "true", MAX_RETRIES: "two"}, Resume(), "whole number"),
        ({MAX_RETRIES: "2"}, Resume(), "counts only with"),
    ],
)
def test_both_annotations_are_needed(
    annotations: dict[str, str], resume: Resume, word: str
) -> None:
    assert resume_of(annotations) == resume
    said = " ".join(resume_problems(annotations))
    assert word in said
    assert bool(said) == bool(word)


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=10,
)


@given(ANY, ANY, ANY)
def test_nothing_makes_it_raise(workers: Any, policy: Any, whole: Any) -> None:
    parse_pytorchjob(whole)
    parse_pytorchjob({"spec": whole, "metadata": policy})
    spec = {"pytorchReplicaSpecs": {"Worker": workers, "Master": policy}, "runPolicy": whole}
    assert parse_pytorchjob({"spec": {**spec, "elasticPolicy": policy}}) is not None
