"""JSON in an annotation or a pod's log that is nested too deep to be read: it counts as none."""

from __future__ import annotations

import json

import pytest
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.core_v1 import Node

from unbroken.operator.nodes.checks import held_by
from unbroken.operator.nodes.checks_pods import read_results
from unbroken.operator.resume.ray_views import read_state
from unbroken.operator.resume.record import read_record
from unbroken.spec import keys
from unbroken.spec.job.ledger import Ledger, read_ledger
from unbroken.spec.nodes.kinds import CheckKind, CheckResult, Outcome
from unbroken.spec.schema.fields import write_record

DEEP = ("[" * 100_000, '{"check":' * 100_000, "[" * 1_100 + "]" * 1_100)
deep = pytest.mark.parametrize("text", DEEP, ids=["lists", "objects", "whole"])


@deep
def test_a_node_with_such_an_annotation_is_held_by_no_check(text: str) -> None:
    assert held_by(Node(metadata=ObjectMeta(annotations={keys.CHECK_HOLD: text}))) == ""


@deep
def test_a_log_of_a_check_is_read_around_such_a_line(text: str) -> None:
    result = CheckResult("n", next(iter(CheckKind)), "gpu", next(iter(Outcome)), 1.0)
    line = json.dumps(write_record(result))
    assert read_results(f"{text}\n{line}", "n") == [result]


@deep
def test_a_job_with_such_an_annotation_has_no_state(text: str) -> None:
    annotations = {keys.RESUME_RAY: text, keys.RESUME_LOSSES: text}
    assert read_state(annotations) == read_state({})
    assert read_record(annotations) == read_record({})
    assert read_ledger(text) == Ledger()
