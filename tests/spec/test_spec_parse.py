"""Manifests: values that are accepted, refused, or accepted with a warning."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from tests.job_samples import MANIFESTS, changed, job, published, rule, template
from tests.tables import cases
from unbroken.errors import SpecError
from unbroken.spec.job.parse import admit_job, load_job, normalized, parse_job
from unbroken.spec.job.types import (
    AgentAuth,
    CleanPodPolicy,
    FenceBy,
    JobOptions,
    RuleScope,
    RuleWatch,
    SameError,
    Switch,
)
from unbroken.spec.problems import ManifestError

REPLICA = "spec/replicaSpecs/0"
RUN = "spec.runPolicy"
RULE = f"{RUN}.logMonitoringConfiguration[0]"
RANKS = "metadata.annotations[unbroken.dev/log-rule-ranks]"
NOT_YET = "elastic jobs are not supported yet; remove"


def problems(manifest: Any) -> list[str]:
    """Return the texts of all problems of a manifest."""
    return [str(problem) for problem in parse_job(manifest).problems]


def annotated(**annotations: Any) -> Any:
    """Return a job with annotations unbroken.dev/..."""
    named = {f"unbroken.dev/{key.replace('_', '-')}": text for key, text in annotations.items()}
    return changed("metadata/annotations", named)


@pytest.mark.parametrize("name", ["fsdp-llama3-8b", "log-monitoring", "spares"])
def test_published_manifest_is_accepted(name: str) -> None:
    assert problems(published(name)) == []


def test_published_main_example_is_understood() -> None:
    parsed = load_job(published("fsdp-llama3-8b"))
    policy = parsed.spec.run_policy
    assert (parsed.name, parsed.spec.nnodes, parsed.spec.nproc_per_node) == (
        "llama3-1-8b-fsdp-hpto",
        2,
        "8",
    )
    assert policy.job_max_retry_count == 10
    assert policy.clean_pod_policy is CleanPodPolicy.ALL
    assert policy.restart_policy is not None
    assert policy.restart_policy.eval_period_seconds == 21600
    assert [found.name for found in policy.log_monitoring_configuration] == [
        "JobStart",
        "JobHangingDetection",
    ]


def test_published_log_rules_are_accepted() -> None:
    text = (MANIFESTS / "log-rule-fragments.yaml").read_text()
    fragments = [fragment for fragment in yaml.safe_load_all(text) if fragment]
    assert len(fragments) == 4
    for fragment in fragments:
        assert problems(job(**fragment)) == [], fragment


def test_published_elastic_job_is_refused_in_one_clear_line() -> None:
    assert problems(published("elastic")) == [
        f"spec.elasticPolicy: Forbidden: {NOT_YET} spec.elasticPolicy and maxReplicas"
    ]


def test_job_of_the_stock_client_is_accepted() -> None:
    """Accept the job of `hyp create hyp-pytorch-job --max-retry 3` (sagemaker-hyperpod 3.12)."""
    container = {
        "name": "pytorch-job-container",
        "image": "train",
        "resources": {"requests": {"nvidia.com/gpu": "0"}, "limits": {"nvidia.com/gpu": "0"}},
    }
    pod = {"metadata": {"name": "hyp", "namespace": "ns"}, "spec": {"containers": [container]}}
    manifest = job(
        nprocPerNode="auto",
        replicaSpecs=[{"name": "pod", "replicas": 1, "spares": 0, "template": pod}],
        runPolicy={
            "cleanPodPolicy": "None",
            "jobMaxRetryCount": 3,
            "ttlSecondsAfterFinished": 0,
            "restartPolicy": {"evalPeriodSeconds": 3600, "scaleUpSnoozeTimeInSeconds": 0},
        },
    )
    parsed = load_job(manifest)
    assert parsed.spec.run_policy.job_max_retry_count == 3
    assert parsed.spec.run_policy.ttl_seconds_after_finished == -1


ODD = [
    (
        {**rule(), "metadata": annotated(log_rule_ranks="loss=every")["metadata"]},
        f'{RANKS}: Invalid value: "loss": no log rule has this name; there are: r',
    ),
    (
        changed("spec/nprocPerNode", "2", annotated(log_rule_ranks="*=0,4,5")),
        f"{RANKS}: Invalid value: 4: the job's ranks end at 3",
    ),
    ("a job", 'Invalid value: "a job": must be an object of kind HyperPodPyTorchJob'),
    (
        job(runPolicy={"logMonitoringConfiguration": [{}] * 65}),
        f'{RULE[:-3]}: Invalid value: "array": must have at most 64 items',
    ),
]


def made(manifest: dict[str, Any]) -> Any:
    """Return the job that a row describes: `set`, `remove`, `rule` or `annotations`."""
    [(how, given)] = manifest.items()
    match how:
        case "set":
            [(path, value)] = given.items()
            return changed(path, value)
        case "remove":
            return changed(given, ...)
        case "rule":
            return rule(**given)
        case _:
            return annotated(**given)


@cases
def test_refused_with_place_and_reason(manifest: dict[str, Any], problem: str) -> None:
    assert problems(made(manifest)) == [problem]


@pytest.mark.parametrize(("manifest", "problem"), ODD)
def test_refused_whatever_it_is(manifest: Any, problem: str) -> None:
    assert problems(manifest) == [problem]


def test_names_of_replica_specs_are_unique() -> None:
    twice = [{"name": "pods", "replicas": 1, "template": template()}] * 2
    assert problems(job(replicaSpecs=twice)) == [
        'spec.replicaSpecs[1].name: Duplicate value: "pods"'
    ]


def test_elastic_policy_is_validated_before_it_is_refused() -> None:
    policy = {
        "minReplicas": 4,
        "maxReplicas": 2,
        "replicaIncrementStep": 2,
        "replicaDiscreteValues": [2, 0],
    }
    assert problems(job(elasticPolicy=policy)) == [
        (
            "spec.elasticPolicy.replicaDiscreteValues[1]: Invalid value: 0: must be greater than "
            "or equal to 1"
        ),
        (
            "spec.elasticPolicy.replicaDiscreteValues: Forbidden: replicaIncrementStep and "
            "replicaDiscreteValues exclude each other"
        ),
        "spec.elasticPolicy.maxReplicas: Invalid value: 2: must be at least minReplicas, 4",
        (
            "spec.elasticPolicy.replicaDiscreteValues[0]: Invalid value: 2: must be between "
            "minReplicas and maxReplicas"
        ),
        f"spec.elasticPolicy: Forbidden: {NOT_YET} spec.elasticPolicy and maxReplicas",
    ]


def test_every_problem_is_reported_at_once() -> None:
    manifest = job("Bad_Name", nprocPerNode="x", runPolicy={"cleanPodPolicy": 1, "suspnd": True})
    manifest["spec"]["replicaSpecs"] = [{"replicas": -1}, 7]
    paths = [problem.path for problem in parse_job(manifest).problems]
    assert paths == [
        "spec.replicaSpecs[0].name",
        "spec.replicaSpecs[0].template",
        "spec.replicaSpecs[0].replicas",
        "spec.replicaSpecs[1]",
        "spec.runPolicy.suspnd",
        "spec.runPolicy.cleanPodPolicy",
        "spec.nprocPerNode",
        "metadata.name",
    ]


def test_problems_say_their_reason_as_the_api_does() -> None:
    manifest = changed("spec/replicaSpecs/0/template", ...)
    assert [found.reason for found in admit_job(manifest).problems] == ["FieldValueRequired"]


LENIENT = [
    ("spec/nprocPerNode", 8, "8"),
    ("spec/nprocPerNode", 8.0, "8"),
    ("spec/nprocPerNode", None, "auto"),
    (f"{REPLICA}/replicas", "2", 2),
    (f"{REPLICA}/replicas", 2.0, 2),
    (f"{REPLICA}/maxReplicas", 2, 2),
    (f"{REPLICA}/spares", None, 0),
    ("spec/runPolicy", None, None),
    ("spec/elasticPolicy", None, None),
    ("spec/runPolicy/suspend", "true", True),
    ("spec/runPolicy/jobMaxRetryCount", "10", 10),
]


@pytest.mark.parametrize(("path", "given", "meant"), LENIENT)
def test_form_is_lenient(path: str, given: Any, meant: Any) -> None:
    parsed = load_job(changed(path, given))
    assert parsed.spec == load_job(changed(path, meant)).spec


def test_kind_in_the_older_spelling_is_the_same() -> None:
    manifest = changed("kind", "HyperPodPytorchJob")
    assert load_job(manifest).spec == load_job(job()).spec
    assert normalized(manifest) == job()


def test_name_that_the_api_makes() -> None:
    generated = changed("metadata", {"generateName": "llm-"})
    assert load_job(generated).name == ""
    assert "metadata.name" in problems(changed("metadata", {"generateName": "l" * 53}))[0]


def test_options_are_annotations() -> None:
    parsed = load_job(annotated(agent_auth="none", restart="2026-01-31T12:00:00.5+01:00"))
    assert parsed.options == JobOptions(AgentAuth.NONE, 1769857200.5)
    assert load_job(job()).options == JobOptions(AgentAuth.TOKEN, None)
    ranks = load_job(annotated(log_rule_ranks="*=every")).options.log_rule_ranks
    assert ranks == {"*": RuleWatch(RuleScope.RANK)}
    assert load_job(annotated(same_error="restart")).options.same_error is SameError.RESTART
    assert problems(annotated(same_error="never"))[0].startswith(
        "metadata.annotations[unbroken.dev/same-error]: Unsupported value"
    )
    assert load_job(annotated()).options.in_process is Switch.ON
    assert load_job(annotated(in_process="off")).options.in_process is Switch.OFF
    assert load_job(annotated()).options.buddy is Switch.ON
    assert load_job(annotated(buddy="off")).options.buddy is Switch.OFF
    assert "unbroken.dev/buddy" in problems(annotated(buddy="rack"))[0]
    assert load_job(annotated(preload="torch, numpy")).options.preload == ("torch", "numpy")
    found = problems(annotated(in_process="no"))
    assert found[0].startswith("metadata.annotations[unbroken.dev/in-process]: Unsupported value")
    assert found[0].endswith('supported values: "on", "off"')


def test_a_lease_is_asked_for_by_annotation() -> None:
    options = load_job(annotated()).options
    assert (options.fence_by, options.lease_seconds) == (FenceBy.LEASE, 8.0)
    asked = annotated(fence_by="provider", lease_seconds="12.5")
    assert load_job(asked).options.fence_by is FenceBy.PROVIDER
    assert load_job(asked).options.lease_seconds == 12.5
    for wrong in ("1", "nan", "4000", "8s", "", "9" * 5000):
        assert "[unbroken.dev/lease-seconds]" in problems(annotated(lease_seconds=wrong))[0]
    assert "[unbroken.dev/fence-by]" in problems(annotated(fence_by="hope"))[0]


def test_finished_job_is_kept_unless_told_otherwise() -> None:
    kept = load_job(changed("spec/runPolicy/ttlSecondsAfterFinished", 0))
    assert kept.spec.run_policy.ttl_seconds_after_finished == -1
    assert len(kept.warnings) == 1
    gone = load_job(changed("spec/runPolicy/ttlSecondsAfterFinished", 1))
    assert (gone.spec.run_policy.ttl_seconds_after_finished, gone.warnings) == (1, ())


@cases
def test_warned_of_and_accepted(manifest: dict[str, Any], warning: str) -> None:
    parsed = load_job(made(manifest))
    assert warning in parsed.warnings


def test_plain_job_is_accepted_without_a_warning() -> None:
    assert load_job(job()).warnings == ()
    assert load_job(changed(f"{REPLICA}/spares", 2)).warnings == ()


def test_load_tells_everything_in_one_error() -> None:
    with pytest.raises(ManifestError) as caught:
        load_job(job("Bad", nprocPerNode="x"))
    assert isinstance(caught.value, SpecError)
    assert str(caught.value).splitlines()[0] == 'HyperPodPyTorchJob "Bad" is invalid:'
    assert [problem.path for problem in caught.value.problems] == [
        "spec.nprocPerNode",
        "metadata.name",
    ]
