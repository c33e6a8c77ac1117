"""Real kills of `benchmarks/recovery.py`: unbroken's modes and torchrun."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.clusters import processes
from tests.watching import PATIENCE_SECONDS

PROGRAM = Path(__file__).parents[2] / "benchmarks/recovery.py"
MODES = ("cold", "warm", "in-process+snapshots", "torchrun-fresh-store")


@pytest.mark.slow
@pytest.mark.heavy
@pytest.mark.timeout(400)
def test_one_kill_of_each_is_recovered_from_and_measured(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    command = [sys.executable, "-W", "ignore", str(PROGRAM), "--kills=1", f"--json={figures}"]
    done = subprocess.run(
        [*command, f"--modes={','.join(MODES)}"], capture_output=True, text=True, timeout=360
    )
    assert done.returncode == 0, done.stderr
    (cell,) = json.loads(figures.read_text())["cells"]
    assert (cell["shape"], cell["fault"], cell["skipped"]) == ("2x2", "worker", {})
    found = {entry["mode"]: entry for entry in cell["results"]}
    assert set(found) == {*MODES, "warm again"}
    for mode, entry in found.items():
        assert (entry["kills"], entry["recovered"]) == (1, 1), done.stderr
        assert set(entry["stages"]) >= {"detect", "start", "first_step"}
        assert sum(entry["stages"].values()) == pytest.approx(entry["p50_seconds"], abs=0.02)
        assert entry["details"]["attempts"] == 1
        assert mode in done.stdout
    assert found["warm"]["details"]["incidents"] == 1
    made = {mode: entry["details"]["made_before"] for mode, entry in found.items()}
    assert (made["cold"], made["warm"], made["torchrun-fresh-store"]) == (0, 4, 0)
    quick = found["in-process+snapshots"]
    assert quick["remedies"] == {"in-process": 1}
    assert quick["details"]["kept"] >= 1
    assert quick["lost_steps_max"] <= 1
    assert found["torchrun-fresh-store"]["times_faster"] == 1.0


@pytest.mark.slow
@pytest.mark.heavy
@pytest.mark.timeout(400)
def test_a_kill_of_sharded_ranks_is_recovered_from_and_measured(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    command = [sys.executable, "-W", "ignore", str(PROGRAM), "--kills=1", f"--json={figures}"]
    modes = ("in-process+snapshots", "torchrun-fresh-store")
    done = subprocess.run(
        [*command, f"--modes={','.join(modes)}", "--sharding=fsdp2,hsdp"],
        capture_output=True, text=True, timeout=360,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    cells = json.loads(figures.read_text())["cells"]
    assert [cell["sharding"] for cell in cells] == ["fsdp2", "hsdp"]
    for cell in cells:
        found = {entry["mode"]: entry for entry in cell["results"]}
        assert set(found) == {*modes}
        for entry in found.values():
            assert (entry["kills"], entry["recovered"]) == (1, 1), done.stderr
            assert entry["beyond_step_p50_seconds"] < entry["p50_seconds"]
            assert entry["details"]["to_first_step"] < entry["p50_seconds"]
        quick = found["in-process+snapshots"]
        assert quick["remedies"] == {"in-process": 1}
        assert quick["lost_steps_max"] <= 1


@pytest.mark.slow
@pytest.mark.heavy
@pytest.mark.timeout(400)
def test_an_interrupt_ends_all_that_was_started() -> None:
    command = [sys.executable, "-W", "ignore", str(PROGRAM), "--kills=1", f"--modes={MODES[1]}"]
    with subprocess.Popen(command, text=True, stderr=subprocess.PIPE) as program:
        assert program.stderr is not None
        directory = program.stderr.readline().split()[1]
        assert any("job 1 steps" in line for line in program.stderr)
        assert processes(directory)
        program.send_signal(signal.SIGINT)
        _, said = program.communicate(timeout=PATIENCE_SECONDS)
    assert program.returncode == 0
    assert "interrupted" in said
    assert processes(directory) == []
    assert not Path(directory).exists()
