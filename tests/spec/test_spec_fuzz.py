"""Whatever is given, reading never raises; what we write we read back as it was."""

from __future__ import annotations

import dataclasses
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import inspect

from tests.job_samples import changed, job, published
from tests.spec.random_json import JSON
from unbroken.spec.job import codec
from unbroken.spec.job.incident import Incident
from unbroken.spec.job.parse import parse_job
from unbroken.spec.job.types import JobSpec, JobStatus
from unbroken.spec.problems import Report
from unbroken.spec.schema.fields import (
    CHOICES,
    INT_MAX,
    TIME_DIGITS,
    fields_of,
    read_record,
    scalar_of,
    write_record,
)
from unbroken.typed_fields import ValueType, value_type

PLACES = [
    *("apiVersion", "kind", "metadata", "metadata/name", "metadata/labels", "metadata/annotations"),
    *("spec", "spec/nprocPerNode", "spec/elasticPolicy"),
    *("spec/replicaSpecs", "spec/replicaSpecs/0", "spec/replicaSpecs/0/replicas"),
    *("spec/replicaSpecs/0/template", "spec/replicaSpecs/0/template/spec/containers"),
    *("spec/runPolicy", "spec/runPolicy/restartPolicy", "spec/runPolicy/suspend"),
    *("spec/runPolicy/logMonitoringConfiguration", "spec/runPolicy/cleanPodPolicy"),
    "spec/runPolicy/logMonitoringConfiguration/0/logPattern",
]
BASE = published("fsdp-llama3-8b")
WORDS = st.text(st.characters(codec="utf-8"), max_size=9)


OTHER_VALUES = {
    ("time", 0): st.integers(0, 2**32).map(float),
    ("time", 6): st.integers(0, 2**52).map(lambda at: at / 1e6),
    ("boolean", None): st.booleans(),
    ("object", None): st.dictionaries(WORDS, WORDS, max_size=2),
    ("strings", None): st.dictionaries(WORDS, WORDS, max_size=2),
}


def values(of: ValueType) -> st.SearchStrategy[Any]:
    """Values that a field of the type may hold."""
    match of.type:
        case inspect.DataclassType(cls=record):
            return records(record)
        case inspect.VarTupleType(item_type=item, min_length=least):
            return st.lists(values(value_type(item)), min_size=least or 0, max_size=2).map(tuple)
        case inspect.EnumType(cls=members):
            return st.sampled_from(list(members))
        case inspect.StrType() if CHOICES in of.extra:
            return st.sampled_from(of.extra[CHOICES])
        case inspect.StrType(min_length=least):
            return st.text(min_size=least or 0, max_size=9)
        case inspect.IntType(ge=least):
            return st.integers(-9 if least is None else least, INT_MAX)
        case inspect.FloatType(ge=least) if TIME_DIGITS not in of.extra:
            return st.floats(-9 if least is None else least, 1e9)
        case _:
            scalar = scalar_of(of)
            assert scalar is not None
            return OTHER_VALUES[scalar.name, of.extra.get(TIME_DIGITS)]


def records(record: type[Any], **fixed: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Instances of one of our dataclasses; `fixed` gives fields in the place of the general."""
    found = {}
    for field in fields_of(record):
        plain = values(field.value)
        is_optional = field.default is not None and field.default() is None
        found[field.name] = fixed.get(field.name, st.none() | plain if is_optional else plain)
    return st.builds(record, **found)


OTHERS = st.dictionaries(st.sampled_from(codec.OTHERS), st.dictionaries(WORDS, WORDS), max_size=3)
JOB = {"name": "llm", "namespace": "default", "uid": "u-1"}


@settings(deadline=None)
@given(JSON)
def test_parsing_anything_never_raises(manifest: Any) -> None:
    parsed = parse_job(manifest)
    assert parsed.problems
    assert all(str(problem) for problem in parsed.problems)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(PLACES), JSON)
def test_parsing_a_job_with_anything_in_one_place_never_raises(path: str, value: Any) -> None:
    parsed = parse_job(changed(path, value, BASE))
    assert parsed.problems == () or all(problem.path for problem in parsed.problems)
    assert isinstance(parsed.spec, JobSpec)


@settings(deadline=None)
@given(st.text(max_size=9) | st.just("restart") | st.just("agent-auth"), JSON)
def test_parsing_any_annotation_of_ours_never_raises(name: str, value: Any) -> None:
    parse_job(changed("metadata/annotations", {f"unbroken.dev/{name}": value}))


@settings(deadline=None)
@given(st.text(max_size=30))
def test_any_pattern_is_judged_without_an_error(pattern: str) -> None:
    rule = {"name": "r", "logPattern": pattern, "stopPattern": pattern}
    parse_job(job(runPolicy={"logMonitoringConfiguration": [rule]}))


def test_deeply_nested_patterns_are_judged() -> None:
    rule = {"name": "r", "logPattern": "(" * 2000 + ")" * 2000, "faultOnMatch": True}
    assert parse_job(job(runPolicy={"logMonitoringConfiguration": [rule]})).problems == ()
    rule["logPattern"] = "(" * 2000
    parsed = parse_job(job(runPolicy={"logMonitoringConfiguration": [rule]}))
    assert "not a regular expression: missing )" in str(parsed.problems[0])


@settings(deadline=None)
@given(records(JobSpec))
def test_spec_survives_the_wire(spec: JobSpec) -> None:
    report = Report()
    assert read_record(JobSpec, write_record(spec, is_minimal=True), "spec", report) == spec
    assert report.problems == []


@settings(deadline=None)
@given(records(JobStatus, other=OTHERS))
def test_status_survives_the_wire(status: JobStatus) -> None:
    assert codec.job_status_from(codec.job_status_to(status)) == (status, ())


@settings(deadline=None)
@given(records(Incident))
def test_incident_survives_the_wire(incident: Incident) -> None:
    assert codec.incident_from(codec.incident_to(incident, JOB)) == (incident, ())


@settings(deadline=None)
@given(JSON)
def test_garbled_status_and_incident_give_defaults(value: Any) -> None:
    status, _ = codec.job_status_from(value)
    incident, _ = codec.incident_from({"spec": value})
    assert isinstance(status, JobStatus)
    assert isinstance(incident, Incident)
    codec.job_status_to(dataclasses.replace(status))


@settings(deadline=None)
@given(st.sampled_from([field.key for field in fields_of(JobStatus)]), JSON)
def test_garbled_field_of_a_status_costs_no_other(key: str, value: Any) -> None:
    good = {"startTime": "2026-01-31T12:00:00Z", "restartCount": 3, "masterPort": "29500"}
    status, _ = codec.job_status_from({**good, key: value})
    if key != "restartCount":
        assert status.restart_count == 3
    if key != "startTime":
        assert status.start_time == 1769860800.0
