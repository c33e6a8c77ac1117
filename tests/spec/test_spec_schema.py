"""The definitions: made from the dataclasses, installed in both API servers."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.apiclient import Api, Object
from tests.apiservers import Cluster
from tests.job_samples import changed, job, published
from tests.samples import CUSTOM_RESOURCES, define_missing
from tests.tools import tool
from unbroken.core.job.recovery.incidents import UNKNOWN, writable
from unbroken.spec.job import codec
from unbroken.spec.job.incident import Incident, Remedy, Restored, StackGroup, Symptom
from unbroken.spec.job.parse import load_job
from unbroken.spec.job.types import (
    Condition,
    FaultyPods,
    JobSpec,
    JobStatus,
    LogRule,
    ReplicaSpec,
    RestartPolicy,
    RestartStatus,
    RunPolicy,
)
from unbroken.spec.nodes.kinds import (
    OWN_KINDS,
    BlameEntry,
    CheckResult,
    LifeCycle,
    MachineTaint,
    RepairRecord,
)
from unbroken.spec.schema.crd import definitions, incident_definition, job_definition
from unbroken.spec.schema.descriptions import DESCRIPTIONS, NODE_DESCRIPTIONS
from unbroken.spec.schema.fields import fields_of

ROOT = Path(__file__).parents[2]
JOBS = "sagemaker.amazonaws.com/v1:hyperpodpytorchjobs"
INCIDENTS = "unbroken.dev/v1:incidents"
NUMBERS = itertools.count(1)
TABLE = "application/json;as=Table;v=v1;g=meta.k8s.io"
STATUS_KEYS = {
    *("startTime", "completionTime", "conditions", "restartCount", "restartStatus", "masterAddr"),
    *("masterPort", "jobPods", "managerPods", "podManagerStatuses", "podSetInfos", "podSets"),
    *("latestFaultyPodInstanceList", "elasticScalingStatus", "elasticWorkloadRef"),
}
"""Keys of a status that sagemaker-hyperpod 3.12 accepts."""


@cache
def crds() -> Any:
    """Import tools/crds.py."""
    return tool("crds")


def schema(definition: Object, *path: str) -> Any:
    """Return a part of a definition's schema, by names of fields."""
    found = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    for name in path:
        found = found["properties"][name] if name != "[]" else found["items"]
    return found


@pytest.fixture
def here(cluster: Cluster) -> Iterator[Api]:
    """Provide a namespace of its own in a cluster that has our kinds."""
    with closing(Api(cluster)) as api:
        define_missing(api, *definitions())
        name = f"spec-{next(NUMBERS)}"
        if cluster.has_built_in_kinds:
            api.post("namespaces", {"metadata": {"name": name}}).done()
        yield api.within(name)


def made(api: Api, manifest: Object) -> Object:
    """Create a job; return it as stored."""
    manifest = {**manifest, "metadata": {**manifest["metadata"]}}
    manifest["metadata"].pop("namespace", None)
    return api.post(JOBS, manifest).made


def row(api: Api, what: str) -> dict[str, object]:
    """Return the row that `kubectl get` prints of one object."""
    table = api.send("GET", what, headers={"Accept": TABLE}).made
    names = [column["name"] for column in table["columnDefinitions"]]
    return dict(zip(names, table["rows"][0]["cells"], strict=True))


def test_files_are_what_the_tool_writes() -> None:
    for path, text in crds().files().items():
        assert path.read_text() == text, f"run {sys.executable} tools/crds.py"
        assert yaml.safe_load(text) in definitions()
    assert len(list((ROOT / "deploy/crds").iterdir())) == len(definitions())


def test_every_field_is_described_and_nothing_else() -> None:
    classes = (JobSpec, ReplicaSpec, RunPolicy, RestartPolicy, LogRule, JobStatus, Condition)
    for record in (*classes, RestartStatus, FaultyPods, Incident, Symptom):
        fields = {field.name for field in fields_of(record)} - {"other"}
        assert set(DESCRIPTIONS[record.__name__]) == fields, record.__name__
    kinds = [kind.spec for kind in OWN_KINDS] + [kind.status for kind in OWN_KINDS if kind.status]
    for record in (*kinds, MachineTaint, LifeCycle, CheckResult, BlameEntry, RepairRecord):
        fields = {field.name for field in fields_of(record)}
        assert set(NODE_DESCRIPTIONS[record.__name__]) == fields, record.__name__


def test_status_has_the_keys_of_the_stock_client_and_no_others() -> None:
    assert set(schema(job_definition(), "status")["properties"]) == STATUS_KEYS
    condition = schema(job_definition(), "status", "conditions", "[]")
    assert set(condition["properties"]) == {
        *("type", "status", "reason", "message", "lastTransitionTime", "lastProbeTime")
    }


def test_fault_on_match_has_no_default_that_stock_clients_would_trip_over() -> None:
    rule = schema(job_definition(), "spec", "runPolicy", "logMonitoringConfiguration", "[]")
    assert rule["properties"]["faultOnMatch"]["type"] == "boolean"
    assert "default" not in rule["properties"]["faultOnMatch"]


def test_what_a_schema_cannot_say_is_said_in_cel() -> None:
    spec = schema(job_definition(), "spec")
    assert "!has(self.elasticPolicy)" in [r["rule"] for r in spec["x-kubernetes-validations"]]
    elastic = spec["properties"]["elasticPolicy"]
    assert "replicaIncrementStep" in elastic["x-kubernetes-validations"][0]["rule"]


@CUSTOM_RESOURCES
def test_defaults_are_applied(here: Api) -> None:
    spec = made(here, job(runPolicy={"restartPolicy": {"evalPeriodSeconds": 60}}))["spec"]
    assert spec["nprocPerNode"] == "auto"
    assert spec["replicaSpecs"][0]["spares"] == 0
    assert spec["runPolicy"] == {
        "cleanPodPolicy": "All",
        "suspend": False,
        "ttlSecondsAfterFinished": -1,
        "restartPolicy": {"evalPeriodSeconds": 60, "scaleUpSnoozeTimeInSeconds": 0},
    }


@CUSTOM_RESOURCES
@pytest.mark.parametrize("name", ["fsdp-llama3-8b", "log-monitoring", "spares"])
def test_published_manifest_is_stored_without_loss(here: Api, name: str) -> None:
    manifest = published(name)
    stored = made(here, manifest)
    assert load_job(stored).spec == load_job(manifest).spec
    given = [replica["template"] for replica in manifest["spec"]["replicaSpecs"]]
    assert [replica["template"] for replica in stored["spec"]["replicaSpecs"]] == given


REFUSED = [
    ("spec/replicaSpecs", [], "spec.replicaSpecs"),
    ("spec/replicaSpecs/0/replicas", -1, "spec.replicaSpecs[0].replicas"),
    ("spec/replicaSpecs/0/replicas", "2", "spec.replicaSpecs[0].replicas"),
    ("spec/replicaSpecs/0/template", ..., "spec.replicaSpecs[0].template"),
    (
        "spec/replicaSpecs/0/template/spec/containers",
        [],
        "spec.replicaSpecs[0].template.spec.containers",
    ),
    ("spec/runPolicy/cleanPodPolicy", "all", "spec.runPolicy.cleanPodPolicy"),
    ("spec/runPolicy/restartPolicy", {}, "spec.runPolicy.restartPolicy.evalPeriodSeconds"),
    ("spec/runPolicy/activeDeadlineSeconds", 0, "spec.runPolicy.activeDeadlineSeconds"),
    (
        "spec/runPolicy/logMonitoringConfiguration",
        [{"name": "r", "logPattern": "x", "operator": "less"}],
        "spec.runPolicy.logMonitoringConfiguration[0].operator",
    ),
]


@CUSTOM_RESOURCES
@pytest.mark.parametrize(("path", "value", "field"), REFUSED, ids=[case[2] for case in REFUSED])
def test_schema_refuses(here: Api, path: str, value: Any, field: str) -> None:
    manifest = changed(path, value)
    del manifest["metadata"]["namespace"]
    answer = here.post(JOBS, manifest)
    assert answer.failure == (422, "Invalid")
    if here.cluster.is_real:
        # kube-apiserver v1.20 leaves out the place in a list.
        field = re.sub(r"\[\d+\]", "", field)
        assert field in re.sub(r"\[\d+\]", "", answer.message)
    else:
        assert {where for _, where in answer.causes} == {field}


@CUSTOM_RESOURCES
def test_two_replica_specs_of_one_name_are_refused(here: Api) -> None:
    manifest = job()
    del manifest["metadata"]["namespace"]
    manifest["spec"]["replicaSpecs"] *= 2
    answer = here.post(JOBS, manifest)
    assert answer.failure == (422, "Invalid")
    assert "spec.replicaSpecs[1]" in answer.message


def status() -> JobStatus:
    """Return the status of a job that has recovered."""
    return JobStatus(
        start_time=1769860800.0,
        conditions=(
            Condition("Created", "True", "Created", "created", 1769860800.0),
            Condition("PodsRunning", "False", "PodsRunning", "2/2", 1769860801.0),
            Condition("Faulted", "False", "SegmentationFault", "rank 1: ...", 1769860802.0),
            Condition("Running", "True", "Running", "recovered", 1769860803.0),
        ),
        restart_count=1,
        restart_status=RestartStatus(0, 0, 1),
        master_addr="10.0.0.1",
        master_port="29500",
        job_pods=({"kind": "Pod", "name": "llm-pods-0"},),
        latest_faulty=FaultyPods("PLR", ("node-1",), ("llm-pods-1",), ("1",)),
        other={"elasticWorkloadRef": {"name": "w"}, "managerPods": {"kind": "Pod", "name": "m"}},
    )


@CUSTOM_RESOURCES
def test_status_survives_the_api(here: Api) -> None:
    made(here, job())
    sent = {"status": codec.job_status_to(status())}
    stored = here.patch("merge", f"{JOBS}/llm/status", sent).made["status"]
    assert codec.job_status_from(stored) == (status(), ())
    assert stored["masterPort"] == "29500"
    assert stored["startTime"] == "2026-01-31T12:00:00Z"


@CUSTOM_RESOURCES
def test_get_shows_the_columns_of_a_job(here: Api) -> None:
    made(here, changed("spec/replicaSpecs/0/spares", 3))
    new = row(here, f"{JOBS}/llm")
    assert list(new) == ["Name", "State", "Ready", "Spares", "Restarts", "Last fault", "Age"]
    assert (new["Spares"], new["State"], new["Ready"], new["Last fault"]) == (3, None, None, None)
    here.patch("merge", f"{JOBS}/llm/status", {"status": {"conditions": []}}).done()
    assert row(here, f"{JOBS}/llm")["State"] is None
    sent = {"status": codec.job_status_to(status())}
    here.patch("merge", f"{JOBS}/llm/status", sent).done()
    shown = row(here, f"{JOBS}/llm")
    assert str(shown.pop("Age")).endswith("s")
    assert shown == {
        "Name": "llm",
        "State": "Running",
        "Ready": "2/2",
        "Spares": 3,
        "Restarts": 1,
        "Last fault": "SegmentationFault",
    }


def incident(**changes: Any) -> Incident:
    """Return the incident of a segmentation fault that was recovered from."""
    culprit = Symptom(1769860800.25, "SegmentationFault", "rank 1 died", "llm-pods-1", "node-1", 1)
    whole = {
        "number": 1,
        "attempt": 0,
        "culprit": culprit,
        "signals": (culprit,),
        "remedy": Remedy.PROCESS,
        "reason": "the node is well",
        "detected_at": 1769860800.25,
        "fault": "SegmentationFault",
        "progress_at": 1769860802.5,
        "outcome": "recovered",
    }
    return Incident(**{**whole, **changes})


@CUSTOM_RESOURCES
def test_incident_survives_the_api_and_shows_its_columns(here: Api) -> None:
    owner = made(here, job())["metadata"]
    stored = here.post(INCIDENTS, codec.incident_to(incident(), owner)).made
    assert codec.incident_from(stored) == (incident(), ())
    assert stored["metadata"]["name"] == "llm-1"
    assert stored["metadata"]["ownerReferences"][0]["uid"] == owner["uid"]
    shown = row(here, f"{INCIDENTS}/llm-1")
    assert str(shown.pop("Age")).endswith("s")
    assert shown == {
        "Name": "llm-1",
        "Fault": "SegmentationFault",
        "Pod": "llm-pods-1",
        "Rank": 1,
        "Remedy": "process",
        "Seconds": 2.25,
        "Outcome": "recovered",
    }


@CUSTOM_RESOURCES
def test_open_incident_is_stored_too(here: Api) -> None:
    owner = made(here, job())["metadata"]
    found = incident(progress_at=None, outcome="")
    stored = here.post(INCIDENTS, codec.incident_to(found, owner)).made
    assert codec.incident_from(stored) == (found, ())
    assert row(here, f"{INCIDENTS}/llm-1")["Seconds"] is None
    assert incident_definition()["spec"]["names"]["kind"] == stored["kind"]


@CUSTOM_RESOURCES
def test_an_incident_with_empty_texts_is_stored(here: Api) -> None:
    """Store an incident with empty texts, as the operator writes it.

    Server-side apply of Kubernetes 1.20 makes null of an empty text, and refuses null where the
    definition has a string.
    """
    sign = Symptom(5.0, "", "", evidence=("", "ValueError", ""))
    group, restored = StackGroup("", 1, "", ("", "f (x.py:1)")), Restored("", 1, 2, "", 0.1, 0)
    found = Incident(1, 0, sign, (sign,), Remedy.PROCESS, "", 5.0, groups=(group,))
    found = writable(replace(found, restored=(restored,), slowest={"ready": ""}))
    job = {"name": "j", "namespace": here.namespace, "uid": "8f6a1f2e-0000-4000-8000-000000000000"}
    body = codec.incident_to(found, job)
    for _ in range(2):
        stored = here.apply(f"{INCIDENTS}/j-1", body, force=True).made
        assert codec.incident_from(stored) == (found, ())
    assert (found.reason, found.culprit.text) == (UNKNOWN, UNKNOWN)
    assert found.culprit.evidence[1] == "ValueError"
