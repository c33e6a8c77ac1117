"""Ranks that come seconds apart after a restart meet in one attempt, never in two.

torchrun 2.13 keeps one store over restarts: a fast rank finds the dead attempt's addresses in it,
and fails or hangs (the same script shows it).  Here every attempt has a store of its own.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import pytest

from e2e.clusters import Cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SCRIPT = Path(__file__).with_name("skewed_train.py")
COMMAND = "exec hyperpodrun --nnodes=$NNODES --nproc-per-node=$NPROC_PER_NODE"
KIND = "hyperpodpytorchjob/skewed"
RANKS, KILLS = 4, 2


def job(environment: dict[str, str]) -> dict[str, Any]:
    """Two pods of two ranks."""
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
        "spec": {"nprocPerNode": "2", "replicaSpecs": [replica]},
    }


def meeting(events: IO[str], attempt: int) -> list[dict[str, Any]]:
    """What each rank of the attempt reports, which must be the next that anybody reports."""
    found = [json.loads(events.readline()) for _ in range(RANKS)]
    assert [one for one in found if "failed" in one] == []
    assert sorted(one["rank"] for one in found) == list(range(RANKS))
    assert {one["attempt"] for one in found} == {attempt}
    return found


@pytest.mark.parametrize("slow_rank", [0, 3])
def test_a_fast_rank_never_meets_the_dead_attempt(
    make_cluster: Callable[..., Cluster], tmp_path: Path, slow_rank: int
) -> None:
    pipe = tmp_path / "events"
    os.mkfifo(pipe)
    cluster = make_cluster("--nodes", "2")
    masters = []
    # Open for writing too: it must not end when no worker has it open.
    with os.fdopen(os.open(pipe, os.O_RDWR), "r") as events:
        environment = {"EVENTS": str(pipe), "SLOW_RANK": str(slow_rank)}
        cluster.apply(job({**environment, "LAST_ATTEMPT": str(KILLS)}))
        for attempt in range(KILLS + 1):
            found = meeting(events, attempt)
            # Every rank has summed the same four processes, all of this attempt.
            assert {one["attempts"] for one in found} == {RANKS * attempt}
            assert {one["pids"] for one in found} == {sum(one["pid"] for one in found)}
            assert len({one["master"] for one in found}) == 1
            masters.append(found[0]["master"])
            if attempt < KILLS:
                os.kill(found[attempt]["pid"], signal.SIGKILL)
        cluster.wait(KIND, "condition=Completed", seconds=60)
    assert len(set(masters)) == KILLS + 1
    assert cluster.get(KIND)["status"]["restartCount"] == KILLS
