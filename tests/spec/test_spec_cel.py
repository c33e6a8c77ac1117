"""Rules in CEL: the server of Kubernetes 1.36 refuses by them what the webhook refuses."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.apiclient import Answer, Api, Object
from tests.apiservers import Cluster
from tests.job_samples import changed, job, published, rule, template
from tests.samples import CRDS, CUSTOM_RESOURCES, define, define_missing, warned
from unbroken.operator.webhook.review import asked, judged
from unbroken.spec.schema.crd import definitions, job_definition

FILES = sorted((Path(__file__).parents[2] / "deploy/crds").iterdir())
JOBS = "sagemaker.amazonaws.com/v1:hyperpodpytorchjobs"
RULES = "x-kubernetes-validations"
REPLICA = "spec/replicaSpecs/0"
ELASTIC = {"replicaIncrementStep": 1, "replicaDiscreteValues": [1]}

TWINS: list[tuple[str, Object]] = [
    ("elastic jobs are not supported yet; remove spec.elasticPolicy", job(elasticPolicy={})),
    ("exclude each other", job(elasticPolicy=ELASTIC)),
    ("or set it to replicas", changed(f"{REPLICA}/maxReplicas", 3)),
    ("remove workloadMode", job(runPolicy={"workloadMode": "elastic"})),
    ("must be auto, cpu, gpu or", changed("spec/nprocPerNode", "many")),
    ("must be auto, cpu, gpu or", changed("spec/nprocPerNode", 0)),
    ("at least one replica must train", changed(f"{REPLICA}/replicas", 0)),
    ("a job has at most 50000 pods", changed(f"{REPLICA}/spares", 49_999)),
    ("must be lower case letters", changed(f"{REPLICA}/name", "My_Pods")),
    ("a metricThreshold needs an operator", rule(metricThreshold=1)),
    ("an operator needs a metricThreshold", rule(operator="gt")),
    ("metricEvaluationDataPoints needs", rule(metricEvaluationDataPoints=2)),
]
"""A part of each rule's message, and a job that the rule refuses."""
EDGES: list[tuple[str, list[Any]]] = [
    (
        "spec/nprocPerNode",
        [
            *("auto", "cpu", "gpu", "CPU", "1", "08", "0", "-1", "1.0", "1e1", " 1", "٣", "x1"),
            *("2147483647", "2147483648", "99999999999999999999", 1, 0, -1, 2147483647, 2147483648),
        ],
    ),
    (f"{REPLICA}/name", ["a", "0", "a-b", "a-", "-a", "A", "a_b", "a.b", "a b", "é", "a\n"]),
    (f"{REPLICA}/replicas", [0, 1, 50_000, 50_001, 2147483647]),
    (f"{REPLICA}/maxReplicas", [0, 1, 2, 3]),
    ("spec/runPolicy", [{"workloadMode": mode} for mode in ("", "x")]),
]
"""Values at the edges of what the rules accept, by their place in a job."""


def schema_rules(schema: Any) -> Iterator[str]:
    """Messages of all rules of a schema."""
    if isinstance(schema, dict):
        yield from (one["message"] for one in schema.get(RULES, ()))
        for value in schema.values():
            yield from schema_rules(value)


def refused_by_webhook(manifest: Object) -> str:
    """Return the problems that the webhook names; empty if it accepts the job."""
    verdict, _ = judged(asked(json.dumps({"request": {"uid": "u", "object": manifest}}).encode()))
    return "\n".join(map(str, verdict.problems))


@pytest.fixture
def api(cluster: Cluster) -> Iterator[Api]:
    """A client of a server that has our definitions."""
    with closing(Api(cluster)) as api:
        define_missing(api, *definitions())
        yield api.within("default")


@pytest.fixture
def newest(
    clusters: Callable[[str], Cluster],
) -> Iterator[Callable[[Object], Answer]]:
    """Tries to create a job on the server of Kubernetes 1.36, as a dry run."""
    with closing(Api(clusters("crds"))) as api:
        define(api, job_definition())
        here = api.within("default")
        yield lambda manifest: here.post(JOBS, manifest, dryRun="All")


@CUSTOM_RESOURCES
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_definition_is_accepted(api: Api, file: Path) -> None:
    """Accept each definition without a warning.

    Kubernetes before 1.25 leaves the rules out, and the local cluster warns that it does not
    evaluate them.
    """
    found = yaml.safe_load(file.read_text())
    path = f"{CRDS}/{found['metadata']['name']}"
    everywhere = api.within("")
    stored = everywhere.get(path).made
    found["metadata"]["resourceVersion"] = stored["metadata"]["resourceVersion"]
    strict = {"fieldValidation": "Strict"} if api.minor >= 25 else {}
    answer = everywhere.put(path, found, dryRun="All", **strict)
    rules = list(schema_rules(answer.made["spec"]["versions"][0]["schema"]["openAPIV3Schema"]))
    wanted = list(schema_rules(found["spec"]["versions"][0]["schema"]["openAPIV3Schema"]))
    assert sorted(rules) == (sorted(wanted) if api.minor >= 25 else [])
    if api.cluster.is_real:
        assert warned(answer) == []
    else:
        assert all("rules in CEL are not evaluated" in text for text in warned(answer))


def test_every_rule_has_a_twin() -> None:
    told = set(schema_rules(job_definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]))
    for message in told:
        assert any(part in message for part, _ in TWINS), message
    assert not list(itertools.chain.from_iterable(map(schema_rules, definitions()[1:])))


@pytest.mark.realkube
@pytest.mark.parametrize(("part", "manifest"), TWINS, ids=[part for part, _ in TWINS])
def test_webhook_and_cel_refuse_the_same(
    newest: Callable[[Object], Answer], part: str, manifest: Object
) -> None:
    assert refused_by_webhook(manifest)
    answer = newest(manifest)
    assert answer.failure == (422, "Invalid")
    assert part in answer.message


@pytest.mark.realkube
@pytest.mark.parametrize(("path", "values"), EDGES, ids=[path for path, _ in EDGES])
def test_webhook_and_cel_draw_the_same_line(
    newest: Callable[[Object], Answer], path: str, values: list[Any]
) -> None:
    for value in values:
        manifest = changed(path, value)
        problems = refused_by_webhook(manifest)
        answer = newest(manifest)
        assert answer.code == (422 if problems else 201), (value, problems, answer)


@pytest.mark.realkube
def test_the_largest_jobs_are_accepted(newest: Callable[[Object], Answer]) -> None:
    replicas = [
        {"name": f"{'b' * 40}{number:02}", "replicas": 700, "spares": 81, "template": template()}
        for number in range(64)
    ]
    manifests = [published(name) for name in ("fsdp-llama3-8b", "log-monitoring", "spares")]
    for manifest in (*manifests, job("a" * 16, replicaSpecs=replicas)):
        manifest["metadata"]["namespace"] = "default"
        assert not refused_by_webhook(manifest)
        assert newest(manifest).code == 201


@pytest.mark.realkube
def test_a_job_stored_before_the_rules_can_be_changed_and_freed(
    clusters: Callable[[str], Cluster],
) -> None:
    """Change a job whose broken field stays as it is; 1.30 and later check only changed fields."""
    group = "before.example.com"
    body = job_definition()
    body["metadata"]["name"] = f"{body['spec']['names']['plural']}.{group}"
    body["spec"]["group"] = group
    with closing(Api(clusters("crds"))) as api:
        define(api, {**body, "spec": {**body["spec"], "versions": [without(body)]}})
        here = api.within("default")
        jobs = f"{group}/v1:{body['spec']['names']['plural']}"
        bad = changed("spec/nprocPerNode", "many") | {"apiVersion": f"{group}/v1"}
        bad["metadata"]["finalizers"] = ["example.com/kept"]
        here.post(jobs, bad).done()
        path = f"{CRDS}/{body['metadata']['name']}"
        api.patch("merge", path, {"spec": body["spec"]}).done()
        other = changed("metadata/name", "other", bad)
        answer = here.settled(lambda: here.post(jobs, other, dryRun="All"), is_accepted)
        assert answer.code == 422
        here.patch("merge", f"{jobs}/llm/status", {"status": {"restartCount": 1}}).done()
        here.delete(f"{jobs}/llm").done()
        here.patch("merge", f"{jobs}/llm", {"metadata": {"finalizers": []}}).done()
        assert here.get(f"{jobs}/llm").code == 404


def without(definition: Object) -> Object:
    """The version of a definition without its rules."""

    def cut(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: cut(one) for key, one in value.items() if key != RULES}
        return [cut(one) for one in value] if isinstance(value, list) else value

    found: Object = cut(definition["spec"]["versions"][0])
    return found


def is_accepted(answer: Answer) -> bool:
    """True while the server does not know the rules yet."""
    return answer.code == 201
