"""The attack: an object of 1 MiB whose lists have 60,000 items, or 60,000 fields that do not exist.

Each item was compared with each other: one TrainJob took the operator 250 s at each look, and one
job 10 s at each change and each start.  Each unknown field became a problem with a list of known
names: 28 MB of text for one object, in events, statuses and answers of the webhook.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.attack.hostile_objects import nested
from tests.operator.conftest import job
from tests.train_jobs import RUNTIME, patch, train_job
from unbroken.core.auto_resume import Say
from unbroken.core.train_jobs import ResultPod, TrainJobPicture, WriteResult, orders_for
from unbroken.kube.bounds import COMMAS_MAX, DEPTH_MAX, OBJECT_BYTES_MAX, excess
from unbroken.local.admissions import admit_job
from unbroken.operator.webhook.review import answered, asked, judged
from unbroken.spec.job.parse import parse_job
from unbroken.spec.problems import PROBLEMS_MAX, Report

Object = dict[str, Any]
ITEMS = 2_000
COMPARISONS_MAX = 10 * ITEMS
"""A comparison of all with all would be 2,000,000."""
TEXT_MAX = 128 * 1024
"""Characters of all problems of one object."""


class Counted(str):
    """A text that counts how often it is compared."""

    __slots__ = ()
    comparisons = 0

    def __eq__(self, other: object) -> bool:
        Counted.comparisons += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def wide(**more: str) -> list[Object]:
    """Many items with names."""
    return [{"name": Counted(f"a{number}"), **more} for number in range(ITEMS)]


def mounts() -> list[Object]:
    """Many mounts."""
    return [{"name": "v", "mountPath": Counted(f"/a{number}")} for number in range(ITEMS)]


def looked_at(train: Object) -> list[Any]:
    """Look at a TrainJob as the operator does."""
    pod = ResultPod("p", "u", "")
    return orders_for(TrainJobPicture(train, RUNTIME, None, (pod,)))


TRAINS = {
    "env": lambda: train_job(
        trainer={"image": "i", "command": ["torchrun", "t.py"], "env": wide()}
    ),
    "env-of-both": lambda: train_job(
        trainer={"image": "i", "command": ["torchrun", "t.py"], "env": wide()},
        runtimePatches=[patch({"containers": [{"name": "node", "env": wide()}]})] * 2,
    ),
    "containers": lambda: train_job(runtimePatches=[patch({"containers": wide(image="i")})] * 2),
    "init": lambda: train_job(runtimePatches=[patch({"initContainers": wide()})] * 2),
    "volumes": lambda: train_job(runtimePatches=[patch({"volumes": wide()})] * 2),
    "mounts": lambda: train_job(
        runtimePatches=[patch({"containers": [{"name": "node", "volumeMounts": mounts()}]})] * 2
    ),
}


@pytest.mark.parametrize("kind", TRAINS)
def test_items_of_a_train_job_are_not_compared_with_each_other(kind: str) -> None:
    train = TRAINS[kind]()
    Counted.comparisons = 0
    assert looked_at(train)
    assert Counted.comparisons < COMPARISONS_MAX


@pytest.mark.parametrize("field", ["containers", "initContainers", "volumes", "env"])
def test_items_of_a_job_are_not_compared_with_each_other(field: str) -> None:
    made = job()
    pod = made["spec"]["replicaSpecs"][0]["template"]["spec"]
    (pod["containers"][0] if field == "env" else pod)[field] = wide(image="i")
    Counted.comparisons = 0
    parse_job(made)
    assert Counted.comparisons < COMPARISONS_MAX


def many(key: str = "numNode{}") -> Object:
    """Many fields that do not exist."""
    return {key.format(number): 1 for number in range(ITEMS)}


BAD_TRAINS: dict[str, Callable[[], Object]] = {
    "spec": lambda: train_job(**many()),
    "trainer": lambda: train_job(trainer=many()),
    "template": lambda: train_job(runtimePatches=[{**patch({}), **many()}] * 3),
    "containers": lambda: train_job(runtimePatches=[patch({"containers": wide()})]),
    "annotations": lambda: train_job(metadata={"annotations": many("unbroken.dev/a{}")}),
}


@pytest.mark.parametrize("kind", BAD_TRAINS)
def test_the_problems_of_a_train_job_are_told_in_bounded_text(kind: str) -> None:
    train = BAD_TRAINS[kind]()
    said = [one for one in looked_at(train) if isinstance(one, Say | WriteResult)]
    assert said
    assert sum(len(str(one)) for one in said) < TEXT_MAX


@pytest.mark.parametrize("place", ["spec", "runPolicy", "replica"])
def test_the_answer_about_a_bad_job_is_bounded(place: str) -> None:
    made = job()
    if place == "spec":
        made["spec"] |= many()
    elif place == "runPolicy":
        made["spec"]["runPolicy"] = many()
    else:
        made["spec"]["replicaSpecs"] = [many()] * 3
    review = {"request": {"uid": "u", "operation": "CREATE", "object": made, "userInfo": {}}}
    said = asked(json.dumps(review).encode())
    verdict, _ = judged(said)
    assert verdict.problems
    assert len(json.dumps(answered(said, verdict))) < TEXT_MAX


def test_a_report_keeps_the_first_problems_and_knows_the_places_of_all() -> None:
    report = Report()
    for number in range(10 * PROBLEMS_MAX):
        report.unknown("spec", f"key{number}", ("other",))
        report.warn(f"warning {number}")
    assert [one.path for one in report.problems] == [f"spec.key{n}" for n in range(PROBLEMS_MAX)]
    assert report.has(f"spec.key{10 * PROBLEMS_MAX - 1}")
    assert len(report.warnings) == PROBLEMS_MAX


BEYOND: dict[str, Callable[[], Any]] = {
    "bytes": lambda: "x" * OBJECT_BYTES_MAX,
    "commas": lambda: [[]] * (COMMAS_MAX + 2),
    "levels": lambda: json.loads("[" * DEPTH_MAX + "]" * DEPTH_MAX),
}


def with_annotations(made: Object, **more: Any) -> Object:
    """Return the job with other annotations."""
    changed = copy.deepcopy(made)
    changed["metadata"]["annotations"] = more
    return changed


def reviewed(made: Object, old: Object | None = None) -> Any:
    """Return the webhook's verdict on a job, or on a change of one."""
    request = {"uid": "u", "name": "lm", "object": made, "oldObject": old, "userInfo": {}}
    question = asked(json.dumps({"request": request}).encode())
    verdict, _ = judged(question)
    return answered(question, verdict)["response"]


@pytest.mark.parametrize("bound", BEYOND)
def test_no_job_is_admitted_that_the_operator_would_not_read(bound: str) -> None:
    beyond = with_annotations(job(), other=BEYOND[bound]())
    why = excess(json.dumps(beyond).encode())
    assert why
    for before in (None, job()):
        response = reviewed(beyond, before)
        assert response["allowed"] is False
        assert why in response["status"]["message"]
        assert response["status"]["details"]["name"] == "lm"
    assert [one.message for one in admit_job(beyond).problems] == [why]


@pytest.mark.parametrize("bound", BEYOND)
def test_a_job_that_was_stored_beyond_the_bounds_can_be_changed_and_made_smaller(
    bound: str,
) -> None:
    beyond = with_annotations(job(), other=BEYOND[bound]())
    assert reviewed(with_annotations(job(), more="1", **beyond["metadata"]["annotations"]), beyond)[
        "allowed"
    ]
    assert reviewed(job(), beyond)["allowed"]


@pytest.mark.parametrize("levels", [500, 2_000, 10_000])
def test_a_job_too_deep_for_any_decoder_is_refused_and_can_be_deleted(levels: int) -> None:
    deep = f'{{"metadata":{{"name":"lm"}},"spec":{nested(levels)}}}'
    for old, is_allowed in (("null", False), (json.dumps(job()), False), (deep, True)):
        text = f'{{"request":{{"uid":"u","name":"lm","object":{deep},"oldObject":{old}}}}}'
        verdict, _ = judged(asked(text.encode()))
        assert (not verdict.problems) is is_allowed
