"""The attack: an object of 1 MiB whose lists have 60,000 items, or 60,000 fields that do not exist.

Each item was compared with each other: one TrainJob took the operator 250 s at each look, and one
job 10 s at each change and each start.  Each unknown field became a problem with a list of known
names: 28 MB of text for one object, in events, statuses and answers of the webhook.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.operator.conftest import job
from tests.train_jobs import RUNTIME, patch, train_job
from unbroken.core.auto_resume import Say
from unbroken.core.train_jobs import ResultPod, TrainJobPicture, WriteResult, orders_for
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
    said = asked(review)
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
