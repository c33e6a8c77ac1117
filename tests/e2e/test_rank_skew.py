"""Ranks that start seconds apart after a restart meet in one attempt, never in two.

torchrun 2.13 keeps one store over restarts. A fast rank finds the dead attempt's addresses in it,
and fails or hangs (the same script shows it). Here every attempt has its own store.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import pytest

from tests.e2e.clusters import Cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SCRIPT = Path(__file__).with_name("skewed_train.py")
COMMAND = "exec hyperpodrun --nnodes=$NNODES --nproc-per-node=$NPROC_PER_NODE"
KIND = "hyperpodpytorchjob/skewed"
RANKS = 2
SLOW_RANKS = (-1, 0, 1)
"""Slow rank of each attempt: none, the rank with the store, one that only connects to it."""


def job(environment: dict[str, str]) -> dict[str, Any]:
    """Return a job of two pods of one rank."""
    whole = {"OMP_NUM_THREADS": "1", **environment}
    container = {
        "name": "train",
        "image": "none",
        "command": ["/bin/sh", "-c", f"{COMMAND} {SCRIPT}"],
        "env": [{"name": name, "value": value} for name, value in whole.items()],
    }
    replica = {"name": "pods", "replicas": 2, "template": {"spec": {"containers": [container]}}}
    return {
        "apiVersion": "sagemaker.amazonaws.com/v1",
        "kind": "HyperPodPyTorchJob",
        "metadata": {"name": "skewed"},
        "spec": {"nprocPerNode": "1", "replicaSpecs": [replica]},
    }


def meeting(events: IO[str], attempt: int) -> list[dict[str, Any]]:
    """Return the report of each rank of the attempt; assert that no other report comes first."""
    found = [json.loads(events.readline()) for _ in range(RANKS)]
    assert [one for one in found if "failed" in one] == []
    assert sorted(one["rank"] for one in found) == list(range(RANKS))
    assert {one["attempt"] for one in found} == {attempt}
    return found


@pytest.mark.heavy
def test_a_fast_rank_never_meets_the_dead_attempt(
    make_cluster: Callable[..., Cluster], tmp_path: Path
) -> None:
    pipe = tmp_path / "events"
    os.mkfifo(pipe)
    cluster = make_cluster("--nodes", "2")
    masters = []
    # Open for writing too: it must not end when no worker has it open.
    with os.fdopen(os.open(pipe, os.O_RDWR), "r") as events:
        slow = ",".join(map(str, SLOW_RANKS))
        cluster.apply(job({"EVENTS": str(pipe), "SLOW_RANKS": slow}))
        for attempt in range(len(SLOW_RANKS)):
            found = meeting(events, attempt)
            # Every rank has summed the same processes, all of this attempt.
            assert {one["attempts"] for one in found} == {RANKS * attempt}
            assert {one["pids"] for one in found} == {sum(one["pid"] for one in found)}
            assert len({one["master"] for one in found}) == 1
            masters.append(found[0]["master"])
            if attempt < len(SLOW_RANKS) - 1:
                os.kill(found[attempt]["pid"], signal.SIGKILL)
        cluster.wait(KIND, "condition=Completed", seconds=60)
    assert len(set(masters)) == len(SLOW_RANKS)
    assert cluster.get(KIND)["status"]["restartCount"] == len(SLOW_RANKS) - 1
