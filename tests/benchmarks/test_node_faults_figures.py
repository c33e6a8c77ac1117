"""The figures of `benchmarks/node_faults.py` from trials as they were recorded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from node_faults import table
from node_faults_trials import Expected, Trial, figures

from unbroken.spec.nodes.values import Action

MOVED = Trial(
    "xid79", "replace", "node-0", "moved", {"told": 0.04, "running": 0.58, "in service": 23.1}, 0
)
LATER = Trial(
    "xid79", "replace", "node-2", "moved", {"told": 0.06, "running": 0.98, "in service": 25.1}, 2
)
WRONG = Trial("xid79", "replace", "node-1", "untouched", why_wrong="the node never showed it")
PROGRAM = Path(__file__).parents[2] / "benchmarks/node_faults.py"


def test_trials_that_went_wrong_are_in_no_figure_and_told() -> None:
    cell = figures([MOVED, WRONG, LATER])
    assert (cell["trials"], cell["right"], cell["lost_steps_max"]) == (3, 2, 2)
    assert cell["p50"]["running"] == pytest.approx(0.78)
    assert cell["p95"]["running"] == pytest.approx(0.96)
    assert cell["wrong"] == ["the node never showed it"]
    shown = table([cell])
    assert "| xid79 | replace | moved | 2/3 | 2 | 0.05 |" in shown
    assert shown.endswith("xid79: the node never showed it")


@pytest.mark.parametrize(
    ("action", "job"),
    [
        (Action.NONE, "untouched"),
        (Action.RESTART_JOB, "in place"),
        (Action.RESET_GPU, "moved"),
        (Action.REPLACE, "moved"),
    ],
)
def test_the_action_says_what_is_to_become_of_the_job(action: Action, job: str) -> None:
    assert Expected("Xid1", action).job == job


@pytest.mark.slow
@pytest.mark.heavy
@pytest.mark.timeout(600)
def test_a_fault_of_each_kind_is_followed_to_its_end(tmp_path: Path) -> None:
    written = tmp_path / "figures.json"
    command = [sys.executable, "-W", "ignore", str(PROGRAM), "--quick", f"--json={written}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=560)
    assert done.returncode == 0, done.stderr + done.stdout
    cells = {cell["fault"]: cell for cell in json.loads(written.read_text())["faults"]}
    actions = {name: (cell["action"], cell["job"]) for name, cell in cells.items()}
    assert actions == {
        "xid79": ("replace", "moved"),
        "xid31": ("restart-job", "in place"),
        "read-only": ("reboot", "moved"),
    }
    for name in ("xid79", "read-only"):
        marks = cells[name]["p50"]
        assert marks["told"] < marks["running"]
        assert marks["ordered"] < marks["back"] < marks["in service"]
