"""The benchmark for GPUs, run on the CPU: its own code works, and it finds errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.watching import PATIENCE_SECONDS

FOLDER = Path(__file__).parents[2] / "benchmarks/gpu"
sys.path.insert(0, str(FOLDER))

from machine import Machine  # noqa: E402
from restarts import Ranks, Trial  # noqa: E402

from tests.agent.running import Operator  # noqa: E402
from unbroken.wire.agent import AgentReport, AgentState, WorkerReport  # noqa: E402


def run(*options: str, out: Path) -> subprocess.CompletedProcess[str]:
    """Run the program."""
    command = [sys.executable, str(FOLDER / "run.py"), "--out", str(out), *options]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=PATIENCE_SECONDS
    )


@pytest.mark.slow
def test_snapshots_are_measured_and_right(tmp_path: Path) -> None:
    done = run("--device=cpu", "--parts=snapshots", "--rounds=2", out=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (part,) = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert (part["name"], part["problems"]) == ("snapshots", [])
    assert part["figures"]["restored_bit_for_bit"] is True
    assert part["figures"]["bytes"] == 20_000_000
    assert (tmp_path / "gpu.txt").read_text() == done.stdout


@pytest.mark.slow
@pytest.mark.heavy
def test_a_kill_is_survived_in_each_mode(tmp_path: Path) -> None:
    done = run("--device=cpu", "--parts=restarts,hang", "--kills=1", out=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    parts = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    starts = {part["name"]: part["figures"].get("starts") for part in parts}
    assert starts == {
        "restart in-process": {"warm": 1, "kept": 1},
        "restart warm": {"warm": 2},
        "restart cold": {"cold": 2},
        "hang gloo": None,
    }


@pytest.mark.slow
def test_a_machine_without_a_gpu_is_told_so(tmp_path: Path) -> None:
    if Path("/dev/nvidia0").exists():
        pytest.skip("this machine has a GPU")
    done = run(out=tmp_path)
    assert done.returncode == 1
    assert "sees no GPU (--device cpu" in done.stderr
    assert "Traceback" not in done.stderr


def judged(mode: str, *changes: dict[str, Any], pids: tuple[int, int] = (1, 12)) -> list[str]:
    """Return the errors found in a recovery of two ranks, the second of which was killed."""
    reports = [
        {"what": what, "rank": rank, "attempt": attempt, "at": 5.0 + attempt, "step": 4 + attempt,
         "address": 7, "is_intact": True, "checksum": attempt}
        for attempt in (0, 1) for rank in (0, 1) for what in ("joined", "step")
    ]  # fmt: skip
    for one, change in zip(reversed(reports), changes, strict=False):
        one.update(change)
    workers = tuple(WorkerReport(n, n, pids[n], "running", 0.0, start="warm") for n in (0, 1))
    operator = Operator(reports=[AgentReport("a", AgentState.RUNNING, workers=workers)])
    trial = Trial(mode, Machine("cpu"), None, operator, Ranks(2, reports))  # type: ignore[arg-type]
    trial.judge(0, 5.5, {0: 1, 1: 2}, victim=1)
    assert trial.seconds == [0.5]
    return trial.outcome().problems


def test_what_is_wrong_is_found() -> None:
    nothing: dict[str, Any] = {}
    assert judged("in-process") == []
    assert judged("warm", pids=(11, 12)) == []
    assert judged("in-process", pids=(11, 12)) == ["attempt 1: rank 0 was warm"]
    assert judged("warm")[0] == "attempt 1: rank 0 was kept"
    lost = "attempt 1: rank 0 lost its device memory"
    assert judged("in-process", nothing, nothing, nothing, {"address": 8}) == [lost]
    assert judged("in-process", nothing, nothing, nothing, {"is_intact": False}) == [lost]
    assert judged("in-process", {"checksum": 9}) == ["weights differ after steps [5]"]
    apart = judged("in-process", {"step": 6})
    assert apart == ["attempt 1: ranks went on at steps [5, 6]"]
