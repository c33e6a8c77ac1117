"""Every job that the guide shows in full is one that would be accepted."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.train_jobs import RUNTIME
from unbroken.local.job_programs import ADMISSIONS
from unbroken.spec.job_kinds import names_our_runtime
from unbroken.spec.kubeflow.trainjob import map_train_job, read_runtime

GUIDE = Path(__file__).parents[2] / "docs/guide"
KINDS = {
    "HyperPodPyTorchJob": "hyperpodpytorchjobs.sagemaker.amazonaws.com",
    "PyTorchJob": "pytorchjobs.kubeflow.org",
}


def manifests() -> Iterator[tuple[str, dict[str, Any]]]:
    """Page and number of each, and its manifest."""
    for page in sorted(GUIDE.glob("*.md")):
        for number, text in enumerate(re.findall(r"```yaml\n(.*?)```", page.read_text(), re.S)):
            for found in yaml.safe_load_all(text):
                if isinstance(found, dict) and "spec" in found:
                    yield f"{page.stem}-{number}", found


def jobs() -> Iterator[tuple[str, dict[str, Any]]]:
    """Manifests of the kinds that the local cluster checks."""
    return ((name, found) for name, found in manifests() if found.get("kind") in KINDS)


def test_the_guide_has_jobs_of_both_kinds() -> None:
    assert {found["kind"] for _, found in jobs()} == set(KINDS)


@pytest.mark.parametrize("found", [pytest.param(found, id=name) for name, found in jobs()])
def test_a_job_of_the_guide_is_accepted(found: dict[str, Any]) -> None:
    verdict = ADMISSIONS[KINDS[found["kind"]]](found)
    assert [str(problem) for problem in verdict.problems] == []


def test_train_jobs_of_the_guide_run_under_the_agent() -> None:
    trains = [found for _, found in manifests() if names_our_runtime(found)]
    assert len(trains) == 1
    for found in trains:
        mapped = map_train_job(found, read_runtime(RUNTIME))
        assert [str(problem) for problem in mapped.problems] == []
        verdict = ADMISSIONS[KINDS["HyperPodPyTorchJob"]](mapped.body)
        assert [str(problem) for problem in verdict.problems] == []
