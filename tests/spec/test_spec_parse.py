"""Manifests: values that are accepted, refused, or accepted with a warning."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from tests.job_samples import MANIFESTS, changed, job, published, rule, template
from unbroken.errors import SpecError
from unbroken.spec.job.log_rule_ranks import Scope, Watch
from unbroken.spec.job.parse import admit_job, load_job, normalized, parse_job
from unbroken.spec.job.types import (
    AgentAuth,
    CleanPodPolicy,
    FenceBy,
    JobOptions,
    SameError,
    Switch,
)
from unbroken.spec.problems import ManifestError

REPLICA = "spec/replicaSpecs/0"
CONTAINERS = f"{REPLICA}/template/spec/containers"
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


REFUSED = [
    (
        changed("kind", "PyTorchJob"),
        ('kind: Unsupported value: "PyTorchJob": supported values: "HyperPodPyTorchJob"'),
    ),
    (changed("kind", ...), "kind: Required value: must be HyperPodPyTorchJob"),
    (
        changed("apiVersion", "sagemaker.amazonaws.com.golang.a2z.com/v1"),
        (
            'apiVersion: Unsupported value: "sagemaker.amazonaws.com.golang.a2z.com/v1": '
            'supported values: "sagemaker.amazonaws.com/v1"'
        ),
    ),
    (changed("spec", ...), "spec: Required value"),
    (changed("spec", "x"), 'spec: Invalid value: "x": must be an object'),
    (changed("specs", {}), "specs: Forbidden: unknown field; did you mean spec?"),
    (
        changed("metadata/name", ...),
        ("metadata.name: Required value: name or generateName is required"),
    ),
    (changed("metadata", 3), "metadata: Invalid value: 3: must be an object"),
    (
        changed("metadata/name", "a.b"),
        (
            'metadata.name: Invalid value: "a.b": must be lower case '
            "letters, digits and '-', and start and end with a letter or digit"
        ),
    ),
    (
        changed("metadata/name", "a" * 57),
        (
            f'metadata.name: Invalid value: "{"a" * 57}": pods would '
            f"be called {'a' * 57}-pods-1, 1 characters more than the 63 that there may be"
        ),
    ),
    (
        changed("spec/nProcPerNode", 2),
        ("spec.nProcPerNode: Forbidden: unknown field; did you mean nprocPerNode?"),
    ),
    (
        changed("spec/nprocPerNode", "many"),
        (
            'spec.nprocPerNode: Invalid value: "many": must be '
            "auto, cpu, gpu or a whole number of at least 1"
        ),
    ),
    (
        changed("spec/nprocPerNode", 0),
        (
            'spec.nprocPerNode: Invalid value: "0": must be '
            "auto, cpu, gpu or a whole number of at least 1"
        ),
    ),
    (changed("spec/nprocPerNode", [2]), 'spec.nprocPerNode: Invalid value: "array": must be text'),
    (changed("spec/replicaSpecs", ...), "spec.replicaSpecs: Required value"),
    (changed("spec/replicaSpecs", []), "spec.replicaSpecs: Required value: at least 1 needed"),
    (
        changed("spec/replicaSpecs", ["x"]),
        ('spec.replicaSpecs[0]: Invalid value: "x": must be an object'),
    ),
    (
        changed(f"{REPLICA}/replicas", 0),
        ("spec.replicaSpecs: Invalid value: 0: at least one replica must train: set replicas"),
    ),
    (
        changed(f"{REPLICA}/replicas", ...),
        ("spec.replicaSpecs: Invalid value: 0: at least one replica must train: set replicas"),
    ),
    (
        changed(f"{REPLICA}/replicas", 50_001),
        ("spec.replicaSpecs: Invalid value: 50001: a job has at most 50000 pods, spares included"),
    ),
    (
        changed(f"{REPLICA}/replicas", -1),
        ("spec.replicaSpecs[0].replicas: Invalid value: -1: must be greater than or equal to 0"),
    ),
    (
        changed(f"{REPLICA}/replicas", 1.5),
        ("spec.replicaSpecs[0].replicas: Invalid value: 1.5: must be a whole number"),
    ),
    (
        changed(f"{REPLICA}/replicas", True),
        ("spec.replicaSpecs[0].replicas: Invalid value: true: must be a whole number"),
    ),
    (
        changed(f"{REPLICA}/replicas", 1 << 31),
        (
            "spec.replicaSpecs[0].replicas: Invalid value: "
            "2147483648: must be less than or equal to 2147483647"
        ),
    ),
    (
        changed(f"{REPLICA}/spares", -1),
        ("spec.replicaSpecs[0].spares: Invalid value: -1: must be greater than or equal to 0"),
    ),
    (
        changed(f"{REPLICA}/maxReplicas", 8),
        (
            f"spec.replicaSpecs[0].maxReplicas: Forbidden: {NOT_YET}"
            " maxReplicas, or set it to replicas, 2"
        ),
    ),
    (
        changed(f"{REPLICA}/maxReplicas", 1),
        ("spec.replicaSpecs[0].maxReplicas: Invalid value: 1: must be at least replicas, 2"),
    ),
    (changed(f"{REPLICA}/name", ...), "spec.replicaSpecs[0].name: Required value"),
    (
        changed(f"{REPLICA}/name", "My_Pods"),
        (
            'spec.replicaSpecs[0].name: Invalid value: "My_Pods": '
            "must be lower case letters, digits and '-', and start and end with a letter or digit"
        ),
    ),
    (changed(f"{REPLICA}/template", ...), "spec.replicaSpecs[0].template: Required value"),
    (changed(f"{REPLICA}/template", {}), "spec.replicaSpecs[0].template.spec: Required value"),
    (
        changed(f"{REPLICA}/template/spec", {}),
        ("spec.replicaSpecs[0].template.spec.containers: Required value"),
    ),
    (
        changed(f"{REPLICA}/template/spec/containers", []),
        "spec.replicaSpecs[0].template.spec.containers: Required value",
    ),
    (
        changed(f"{REPLICA}/template/spec/containers", [{"image": "x"}]),
        "spec.replicaSpecs[0].template.spec.containers[0].name: Required value",
    ),
    (
        changed(f"{REPLICA}/template/spec/containers/0/name", "Main"),
        (
            'spec.replicaSpecs[0].template.spec.containers[0].name: Invalid value: "Main": must be '
            "lower case letters, digits and '-', and start and end with a letter or digit"
        ),
    ),
    (
        changed(f"{REPLICA}/template/spec/restartPolicy", "Sometimes"),
        (
            "spec.replicaSpecs[0].template.spec.restartPolicy: Unsupported value: "
            '"Sometimes": supported values: "Always", "OnFailure", "Never"'
        ),
    ),
    (
        changed("spec/runPolicy/cleanPodPolicy", "all"),
        (
            f"{RUN}.cleanPodPolicy: Unsupported value: "
            '"all": supported values: "All", "OnlyComplete", "None"'
        ),
    ),
    (
        changed("spec/runPolicy/jobMaxRetryCount", -1),
        (f"{RUN}.jobMaxRetryCount: Invalid value: -1: must be greater than or equal to 0"),
    ),
    (
        changed("spec/runPolicy/activeDeadlineSeconds", 0),
        (f"{RUN}.activeDeadlineSeconds: Invalid value: 0: must be greater than or equal to 1"),
    ),
    (
        changed("spec/runPolicy/suspend", "maybe"),
        (f'{RUN}.suspend: Invalid value: "maybe": must be true or false'),
    ),
    (
        changed("spec/runPolicy/ttlSecondsAfterFinished", -2),
        (f"{RUN}.ttlSecondsAfterFinished: Invalid value: -2: must be greater than or equal to -1"),
    ),
    (
        changed("spec/runPolicy/workloadMode", "Deployment"),
        (f"{RUN}.workloadMode: Forbidden: {NOT_YET} workloadMode"),
    ),
    (
        changed("spec/runPolicy/restartPolicy", {}),
        (f"{RUN}.restartPolicy.evalPeriodSeconds: Required value"),
    ),
    (
        changed("spec/runPolicy/restartPolicy", 3),
        (f"{RUN}.restartPolicy: Invalid value: 3: must be an object"),
    ),
    (rule(name=None), f"{RULE}.name: Required value"),
    (rule(logPattern=None), f"{RULE}.logPattern: Required value"),
    (
        rule(logPattern="loss=("),
        (f'{RULE}.logPattern: Invalid value: "loss=(": not a regular expression: missing )'),
    ),
    (
        rule(stopPattern="*"),
        (
            f'{RULE}.stopPattern: Invalid value: "*": * at character 1: no argument for '
            "repetition operator"
        ),
    ),
    (
        rule(metricThreshold=1),
        f"{RULE}.operator: Required value: a metricThreshold needs an operator",
    ),
    (
        rule(operator="lt"),
        f"{RULE}.metricThreshold: Required value: an operator needs a metricThreshold",
    ),
    (
        rule(metricThreshold=1, operator="less"),
        (
            f'{RULE}.operator: Unsupported value: "less": '
            'supported values: "gt", "gteq", "lt", "lteq", "eq"'
        ),
    ),
    (
        rule(metricThreshold="high", operator="lt"),
        (f'{RULE}.metricThreshold: Invalid value: "high": must be a number'),
    ),
    (
        rule(logPattern="loss", metricThreshold=1, operator="lt"),
        (
            f"{RULE}.logPattern: Invalid "
            'value: "loss": a metricThreshold needs a group in parentheses that holds the number'
        ),
    ),
    (
        rule(metricEvaluationDataPoints=5),
        (
            f"{RULE}.metricThreshold: Required value: metricEvaluationDataPoints needs a "
            "metricThreshold"
        ),
    ),
    (
        rule(expectedStartCutOffInSeconds=-1),
        (
            f"{RULE}.expectedStartCutOffInSeconds: Invalid value: "
            "-1: must be greater than or equal to 0"
        ),
    ),
    (
        annotated(agent_auth="open"),
        (
            "metadata.annotations[unbroken.dev/agent-auth]: Unsupported "
            'value: "open": supported values: "token", "none"'
        ),
    ),
    (
        annotated(restart="now"),
        (
            "metadata.annotations[unbroken.dev/restart]: Invalid value: "
            '"now": must be an RFC 3339 time with a zone, such as 2026-01-31T12:00:00Z'
        ),
    ),
    (
        annotated(restart="2026-01-31T12:00:00"),
        (
            "metadata.annotations[unbroken.dev/restart]: "
            'Invalid value: "2026-01-31T12:00:00": must be an RFC 3339 time with a zone, such as '
            "2026-01-31T12:00:00Z"
        ),
    ),
    (
        annotated(prority="high"),
        (
            "metadata.annotations[unbroken.dev/prority]: Forbidden: unknown; "
            "known annotations are unbroken.dev/agent, unbroken.dev/agent-auth, "
            "unbroken.dev/buddy, unbroken.dev/detectors, unbroken.dev/fence-by, "
            "unbroken.dev/in-process, "
            "unbroken.dev/lease-seconds, unbroken.dev/log-rule-ranks, "
            "unbroken.dev/packing, "
            "unbroken.dev/planned-moves, unbroken.dev/preload, unbroken.dev/restart, "
            "unbroken.dev/same-error, unbroken.dev/warm"
        ),
    ),
    (
        annotated(warm="no"),
        (
            "metadata.annotations[unbroken.dev/warm]: Unsupported "
            'value: "no": supported values: "on", "off"'
        ),
    ),
    (
        annotated(preload="torch, my-module"),
        (
            "metadata.annotations[unbroken.dev/preload]: Invalid value: "
            "\"torch, my-module\": 'my-module' is no name of a module; write them like torch,numpy"
        ),
    ),
    (
        annotated(detectors="nan=loud"),
        (
            "metadata.annotations[unbroken.dev/detectors]: Invalid value: "
            "\"nan=loud\": 'nan=loud': the mode is one of off, shadow, warn, act"
        ),
    ),
    (
        annotated(log_rule_ranks="loss"),
        f"{RANKS}: Invalid value: \"loss\": 'loss' is not RULE=RANKS",
    ),
    (
        annotated(log_rule_ranks="*=first"),
        (
            f"{RANKS}: Invalid value: \"*=first\": 'first' is none of some, node, every, or ranks "
            "such as 0,8"
        ),
    ),
    (
        {**rule(), "metadata": annotated(log_rule_ranks="loss=every")["metadata"]},
        f'{RANKS}: Invalid value: "loss": no log rule has this name; there are: r',
    ),
    (
        changed("spec/nprocPerNode", "2", annotated(log_rule_ranks="*=0,4,5")),
        f"{RANKS}: Invalid value: 4: the job's ranks end at 3",
    ),
    ("a job", 'Invalid value: "a job": must be an object of kind HyperPodPyTorchJob'),
]


T = "spec.replicaSpecs[0].template"
REFUSED += [
    (
        changed(f"{REPLICA}/template/spc", {}),
        f"{T}.spc: Forbidden: unknown field; did you mean spec?",
    ),
    (
        changed(f"{REPLICA}/template/metadata", 3),
        f"{T}.metadata: Invalid value: 3: must be an object",
    ),
    (changed(f"{REPLICA}/template/spec", 3), f"{T}.spec: Invalid value: 3: must be an object"),
    (changed(f"{CONTAINERS}", 3), f"{T}.spec.containers: Invalid value: 3: must be a list"),
    (changed(f"{CONTAINERS}/0", 3), f"{T}.spec.containers[0]: Invalid value: 3: must be an object"),
    (
        changed(CONTAINERS, [{"name": "a"}] * 2),
        f'{T}.spec.containers[1].name: Duplicate value: "a"',
    ),
    (changed("apiVersion", ...), "apiVersion: Required value: must be sagemaker.amazonaws.com/v1"),
    (changed("metadata/namespace", 3), "metadata.namespace: Invalid value: 3: must be text"),
    (changed("spec/replicaSpecs/0", None), "spec.replicaSpecs[0]: Required value"),
    (rule(name=""), f"{RULE}.name: Required value"),
    (
        rule(name="r" * 254),
        f'{RULE}.name: Invalid value: "{"r" * 80}...": must be no longer than 253',
    ),
    (
        job(runPolicy={"logMonitoringConfiguration": [{}] * 65}),
        f'{RULE[:-3]}: Invalid value: "array": must have at most 64 items',
    ),
]


@pytest.mark.parametrize(("manifest", "problem"), REFUSED, ids=[text[:70] for _, text in REFUSED])
def test_refused_with_place_and_reason(manifest: Any, problem: str) -> None:
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
    assert ranks == {"*": Watch(Scope.RANK)}
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


WARNED = [
    (
        rule(faultOnMatch=True),
        (f"{RULE}.faultOnMatch: sagemaker-hyperpod 3.12 cannot list jobs that have it"),
    ),
    (
        rule(expectedStartCutOffInSeconds=0.5),
        (
            f"{RULE}.expectedStartCutOffInSeconds: the stock "
            "agent and client know whole numbers only"
        ),
    ),
    (
        rule(expectedStartCutOffInSeconds=None),
        (f"{RULE}: finds nothing: it has no time limit, threshold or faultOnMatch"),
    ),
    (
        changed(
            "spec/runPolicy/restartPolicy",
            {"evalPeriodSeconds": 60, "scaleUpSnoozeTimeInSeconds": 5},
        ),
        f"{RUN}.restartPolicy.scaleUpSnoozeTimeInSeconds: jobs do not grow yet: it has no effect",
    ),
    (
        changed(f"{REPLICA}/template/metadata", {"creationTimestamp": None}),
        (
            "spec.replicaSpecs[0].template.metadata.creationTimestamp: sagemaker-hyperpod 3.12 "
            "cannot list jobs that have it; remove it"
        ),
    ),
    (
        changed("spec/nprocPerNode", 8),
        (
            "spec.nprocPerNode: sagemaker-hyperpod 3.12 cannot list jobs "
            'with a number here; write "8"'
        ),
    ),
]


@pytest.mark.parametrize(("manifest", "warning"), WARNED, ids=[text[:60] for _, text in WARNED])
def test_warned_of_and_accepted(manifest: Any, warning: str) -> None:
    parsed = load_job(manifest)
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
