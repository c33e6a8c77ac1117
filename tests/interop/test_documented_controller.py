"""Our agent under a controller that speaks the documented protocol and nothing else."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.agent.running import Running, running
from tests.interop.documented_controller import DocumentedController
from tests.watching import PATIENCE_SECONDS, wait_until

pytestmark = pytest.mark.slow
WORKER = str(Path(__file__).parent / "programs/documented_worker.py")
RULE = {"name": "gpu", "logPattern": "CUDA error", "faultOnMatch": True}
RANKS = range(4)


@contextmanager
def agents(directory: Path) -> Iterator[tuple[list[Running], DocumentedController]]:
    """Run two agents with two workers each, and their controller."""
    with ExitStack() as stack:
        found = []
        for number in (0, 1):
            place = directory / f"pod-{number}"
            place.mkdir()
            arguments = ("--tee=3", WORKER, str(directory))
            asked = {"HYPERPOD_SIGNAL_COORDINATION": "distributed"}
            agent = running(place, *arguments, UNBROKEN_AGENT_AUTH="none", **asked)
            found.append(stack.enter_context(agent))
        yield found, DocumentedController([one.port for one in found])


def workers(directory: Path, attempt: int) -> dict[int, dict[str, Any]]:
    """Wait for the files of all workers of an attempt; return their contents."""
    paths = {rank: directory / f"attempt-{attempt}-{rank}" for rank in RANKS}
    names = {path.name for path in paths.values()}
    wait_until(lambda: os.listdir(directory), names.issubset)
    return {rank: json.loads(path.read_text()) for rank, path in paths.items()}


def test_faults_are_overcome_to_the_end(tmp_path: Path) -> None:
    """Kill a worker, then print a line that a rule waits for, then let all complete."""
    (tmp_path / "say-1").write_text("CUDA error: lost\n")
    with agents(tmp_path) as (found, controller), ThreadPoolExecutor(1) as threads:
        controller.rules = [RULE]
        ending = threads.submit(controller.run)
        first = workers(tmp_path, 0)
        os.kill(first[3]["pid"], signal.SIGKILL)
        last = workers(tmp_path, 2)
        (tmp_path / "finish").touch()
        ending.result(PATIENCE_SECONDS)
        assert [one.wait() for one in found] == [0, 0]
    for rank, told in last.items():
        told.pop("pid")
        place = {"GROUP_RANK": str(rank // 2), "LOCAL_RANK": str(rank % 2)}
        assert told == {"RANK": str(rank), "WORLD_SIZE": "4", **place}
    killed, said = controller.faults
    assert (killed["reason"], killed["assigned_rank"]) == ("WorkerCrash", "1")
    assert "local rank 1 (exit code -9): killed by SIGKILL" in killed["message"]
    assert (said["reason"], said["assigned_rank"]) == ("LogFault_gpu", "1"), said
    assert "CUDA error: lost" in said["message"]


def test_a_graceful_stop_asks_the_workers_first(tmp_path: Path) -> None:
    with agents(tmp_path) as (found, controller):
        controller.start()
        pids = [told["pid"] for told in workers(tmp_path, 0).values()]
        controller.stop(is_graceful=True, timeout=1)
        assert sorted(path.name for path in tmp_path.glob("asked-*")) == [
            f"asked-{rank}" for rank in RANKS
        ]
        assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []
        status = controller.status(found[1].port)
        assert (status["restartMode"], status["spare"]) == ("process_level_restart", "False")
        assert "reason" not in status
