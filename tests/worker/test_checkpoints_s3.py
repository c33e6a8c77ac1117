"""Saves to a real S3 server that fails, beside ranks that are killed: `s3_crashes.py` breaks them.

No broken checkpoint is read, and no good one is lost. `make test-processes` takes a few requests of
a save of two ranks, ALL=1 each of about 150, and the faults of the store.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.worker.s3_stores import NEW, OLD, PYTHONPATH, RANKS

pytestmark = pytest.mark.slow
each = [pytest.mark.heavy, pytest.mark.timeout(3600)]


def crashes(kind: str, stride: int) -> list[dict[str, Any]]:
    """Return what came of each fault."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.worker.s3_crashes", kind, str(stride)],
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    told: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, f"the program has failed (its errors are above) after {told[-1:]}"
    for found in told:
        # A new attempt found a whole step, saved the next, and deleted all others.
        (step, weights), (newest, _) = found["found"], found["newest"]
        assert weights in (step + OLD, step + NEW), found
        assert newest == step + 1, found
        assert found["left"] == [f"step-{newest:08}"], found
    return told


@pytest.mark.parametrize("victim", range(RANKS))
@pytest.mark.parametrize(
    ("when", "stride"),
    [("after", 50), *(pytest.param(when, 1, marks=each) for when in ("before", "after"))],
)
def test_a_rank_is_killed_at_a_request(when: str, stride: int, victim: int) -> None:
    """Take the checkpoint before, or the new one: if all ranks have stored their parts, that."""
    told = crashes(f"killed-{when}-{victim}", stride)
    for found in told:
        possible = (2,) if len(found["confirmed"]) == RANKS else (1, 2)
        assert found["found"][0] in possible, found
    assert told[0]["found"][0] == 1
    assert told[-1]["found"][0] == 2
    assert told[-1]["is_through"]


@pytest.mark.parametrize("stride", [80, pytest.param(1, marks=each)])
def test_a_late_request_of_an_older_attempt_changes_nothing(stride: int) -> None:
    """A request is carried out after a newer attempt has saved: what that one saved is restored.

    Rank 0 may be held before it has begun its attempt. Then it is the newest, and continues.
    """
    told = crashes("held", stride)
    for found in told:
        assert found["newer"] == "saved", found
        step, weights = found["by_newer"]
        assert weights == step + NEW, found
        has_continued = sorted(found["confirmed"]) == ["0", "1"] and step == 2
        possible = [[step, weights], *([[step + 1, step + 1 + OLD]] if has_continued else [])]
        assert found["found"] in possible, found
    assert told[0]["by_newer"][0] == 2
    assert told[-1]["by_newer"][0] == 3


@pytest.mark.parametrize("stride", [150, pytest.param(2, marks=each)])
def test_a_save_outlives_an_outage_of_the_store(stride: int) -> None:
    for found in crashes("outages", stride):
        assert sorted(found["confirmed"]) == ["0", "1"], found
        assert found["found"] == [2, 2.0], found


@each[0]
@each[1]
def test_a_store_that_is_slow_away_full_or_lies() -> None:
    """Training continues, and the newest checkpoint is the last one that the store has kept."""
    told = {found["mode"]: found for found in crashes("faults", 1)}
    outcomes = {
        "slow": ["saved"] * 3,
        "flaky": ["saved"] * 3,
        "away": ["failed", "failed", "saved"],
        "full": ["failed", "failed", "saved"],
        "lie": ["failed", "failed", "saved"],
    }
    for mode, outcome in outcomes.items():
        assert told[mode]["ranks"] == [outcome] * RANKS, told[mode]
        assert told[mode]["found"] == [4, 4.0], told[mode]
