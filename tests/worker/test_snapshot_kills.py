"""Workers killed at any moment of saving, stopped ones that resume late, and lost ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.worker.snapshot_ranks import main

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent


def environment(**variables: str) -> dict[str, str]:
    """Return the environment of a worker."""
    base = {"UNBROKEN_JOB": "job", "RANK": "0", "WORLD_SIZE": "1", "JOB_RESTART_COUNT": "0"}
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[1])}
    return dict(os.environ) | own | base | variables


def test_a_kill_at_any_moment_leaves_the_newest_step_whole() -> None:
    command = [sys.executable, str(HERE / "snapshot_kills.py"), "1", "40"]
    output = subprocess.check_output(command, env=environment(), text=True)
    found = json.loads(output)
    assert found["wrong"] == []
    # A save may be complete before the worker could report it; no step that it has reported is
    # lost.
    assert set(found["ages"]) <= {"0", "1"}


def test_a_worker_that_wakes_up_late_changes_nothing() -> None:
    command = [sys.executable, str(HERE / "snapshot_kills.py"), "late"]
    output = subprocess.check_output(command, env=environment(), text=True)
    before, between, after, (newest, lies) = json.loads(output)
    assert 1 <= len(before) <= 2
    assert all(attempt == 0 for attempt, _ in before)
    # It has written over its own slots, and what it wrote there late is nobody's.
    assert between == []
    assert after == [[1, 5]]
    assert (newest, lies) == (5, [])


def trained(mode: str) -> dict[str, list[dict[str, Any]]]:
    """Return the reports of every rank of every attempt; all are forked from this process."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment(WORLD_SIZE="2").items():
            patch.setenv(name, value)
        threads = torch.get_num_threads()
        try:
            return main(mode)
        finally:
            torch.set_num_threads(threads)


def check_continued(found: dict[str, list[dict[str, Any]]]) -> None:
    """Check that the second start continued as if there had been no fault."""
    for rank in (0, 1):
        first, second, unbroken = (found[one][rank] for one in ("first", "second", "unbroken"))
        assert second["found"] == [2, "memory", []]
        assert first["losses"] + second["losses"] == unbroken["losses"]
        assert second["weights"] == unbroken["weights"]
        assert second["moments"] == unbroken["moments"]


def test_replicas_go_on_bit_for_bit_and_give_their_state_to_a_lost_rank() -> None:
    found = trained("ddp")
    check_continued(found)
    assert found["lost"][0]["found"] == [4, "memory", []]
    assert found["lost"][1]["found"] == [4, "replica rank 0", ["rng"]]
    for rank in (0, 1):
        for key in ("weights", "moments"):
            assert found["lost"][rank][key] == found["unbroken"][rank][key]


def test_shards_go_on_bit_for_bit_and_a_lost_one_comes_from_nobody() -> None:
    found = trained("fsdp")
    check_continued(found)
    assert [one["found"] for one in found["lost"]] == [None, None]
    assert [one["losses"] for one in found["lost"]] == [one["losses"] for one in found["unbroken"]]
