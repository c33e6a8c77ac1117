"""The page on troubleshooting has every reason that a job fails or waits with."""

from __future__ import annotations

import re
from pathlib import Path

from unbroken.core.job import deadlines, machine, obstacles
from unbroken.core.job.recovery import decision
from unbroken.operator.jobs.operator import INVALID
from unbroken.spec.job.types import RunPolicy

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/troubleshooting.md").read_text()
FAILS = re.compile(r"JobEnd\(ConditionType\.FAILED, ([^,]+),")
"""A place of the source where a job fails, with the reason or what holds it."""


def limits() -> set[str]:
    """Return the reasons of the three deadlines."""
    began = deadlines.Since(active=0.0, starting=0.0, faulted=0.0)
    policies = (
        RunPolicy(active_deadline_seconds=1),
        RunPolicy(startup_deadline_seconds=1),
        RunPolicy(fault_deadline_seconds=1),
    )
    found = (deadlines.limit(policy, began) for policy in policies)
    return {one.reason for one in found if one is not None}


def test_each_reason_of_a_failed_job_is_in_the_page() -> None:
    source = "\n".join(path.read_text() for path in (ROOT / "src/unbroken/core/job").rglob("*.py"))
    places = set(FAILS.findall(source))
    named = {one.strip('"') for one in places if one.startswith('"')}
    assert places - {f'"{one}"' for one in named} == {"AGENTS_TOO_LARGE", "failure", "reached[1]"}
    reasons = named | limits() | {machine.AGENTS_TOO_LARGE, decision.SAME_ERROR}
    reasons |= {"RetriesExhausted", INVALID}
    failed = "\n".join(line for line in PAGE.splitlines() if line.startswith("| `Failed`"))
    assert set(re.findall(r"`(\w+)`", failed.replace("`Failed`", ""))) >= reasons
    assert len(reasons) == 9


def test_each_reason_of_a_job_that_waits_has_its_advice() -> None:
    section = PAGE[PAGE.index("## A job does not start") : PAGE.index("## A job restarts")]
    assert {one for one in obstacles._ADVICE if f"`{one}`" not in section} == set()
