"""Every constraint of the service model is held, and said in the service's words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cluster_api.shape_samples import NO_MATCH, broken, good
from unbroken.cluster_api.errors import ClusterApiError
from unbroken.cluster_api.shapes import check, schema, violations

SCHEMA = schema()
OPERATIONS = sorted(SCHEMA.operations)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_full_input_is_accepted(operation: str) -> None:
    check(SCHEMA, operation, good(SCHEMA, SCHEMA.operations[operation].input))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_each_constraint_is_held(operation: str) -> None:
    cases = list(broken(SCHEMA, operation))
    assert cases
    for case in cases:
        found = list(violations(SCHEMA, SCHEMA.operations[operation].input, case.value))
        wanted = f"at '{case.path}' failed to satisfy constraint: Member must {case.constraint}"
        assert any(wanted in one for one in found), (case, found)


def test_the_words_are_those_of_the_service() -> None:
    with pytest.raises(ClusterApiError) as refused:
        check(SCHEMA, "DescribeCluster", {"ClusterName": "not/a name"})
    error = refused.value
    assert error.code == "ValidationException"
    assert error.message.startswith(
        "1 validation error detected: Value 'not/a name' at 'clusterName' failed to satisfy "
        "constraint: Member must satisfy regular expression pattern: ((arn:aws"
    )


def test_all_that_is_wrong_is_said_with_its_place() -> None:
    group = {"InstanceGroupName": "-", "InstanceCount": 7000, "InstanceType": "ml.none"}
    with pytest.raises(ClusterApiError) as refused:
        check(SCHEMA, "CreateCluster", {"ClusterName": "a", "InstanceGroups": [group]})
    text = refused.value.message
    assert text.startswith("4 validation errors detected: ")
    for part in (
        (
            "Value null at 'instanceGroups.1.member.executionRole' failed to satisfy constraint: "
            "Member must not be null"
        ),
        (
            "Value '7000' at 'instanceGroups.1.member.instanceCount' failed to satisfy constraint: "
            "Member must have value less than or equal to 6758"
        ),
        (
            "Value 'ml.none' at 'instanceGroups.1.member.instanceType' failed to satisfy "
            "constraint: Member must satisfy enum value set: [ml.p4d.24xlarge, "
        ),
        "Value '-' at 'instanceGroups.1.member.instanceGroupName'",
    ):
        assert part in text


def test_a_thousand_mistakes_make_a_short_text() -> None:
    ids = [NO_MATCH * 500] * 3000
    with pytest.raises(ClusterApiError) as refused:
        check(SCHEMA, "BatchDeleteClusterNodes", {"ClusterName": "a", "NodeIds": ids})
    assert len(refused.value.message) < 20_000
    assert refused.value.message.endswith(" more")


def test_null_is_absent() -> None:
    check(SCHEMA, "ListClusters", {"SortBy": None, "NextToken": None})


def test_times_may_be_numbers_or_text() -> None:
    for good_time in (1700000000, 1700000000.25, "2026-01-31T12:00:00Z"):
        check(SCHEMA, "ListClusters", {"CreationTimeAfter": good_time})
    for bad_time in ("yesterday", "2026-01-31T12:00:00", True, float("inf")):
        with pytest.raises(ClusterApiError):
            check(SCHEMA, "ListClusters", {"CreationTimeAfter": bad_time})


def test_a_hostile_text_costs_no_time() -> None:
    # Back-tracking engines take exponential time for this name.
    with pytest.raises(ClusterApiError):
        check(SCHEMA, "DescribeCluster", {"ClusterName": "a-" * 100_000 + "!"})


def test_the_file_is_what_the_tool_writes() -> None:
    """The shapes are sorted and one a line, so that changes can be read."""
    path = Path(__file__).parents[2] / "src/unbroken/cluster_api/data/shapes.json"
    lines = path.read_text().splitlines()
    assert len(json.loads(path.read_text())["shapes"]) == len(SCHEMA.shapes)
    names = [line.split('"')[1] for line in lines if line.startswith('  "')]
    assert names == sorted(SCHEMA.operations) + sorted(SCHEMA.shapes)
