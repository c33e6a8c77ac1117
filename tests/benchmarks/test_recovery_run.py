"""One kill of `benchmarks/recovery.py` for real: unbroken beside torchrun."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "benchmarks/recovery.py"
MODES = ("unbroken", "torchrun-fresh-store")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_one_kill_of_each_is_recovered_from_and_measured(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    command = [sys.executable, "-W", "ignore", str(PROGRAM), "--kills=1", f"--json={figures}"]
    done = subprocess.run(
        [*command, f"--modes={','.join(MODES)}"], capture_output=True, text=True, timeout=360
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(figures.read_text())
    assert found["skipped"] == {}
    assert [entry["mode"] for entry in found["results"]] == list(MODES)
    for entry in found["results"]:
        assert (entry["kills"], entry["recovered"]) == (1, 1), done.stderr
        assert list(entry["stages"]) == ["detect", "stop", "ready", "start", "first_step"]
        assert sum(entry["stages"].values()) == pytest.approx(entry["p50_seconds"], abs=0.02)
        assert entry["details"]["attempts"] == 1
        assert entry["mode"] in done.stdout
    assert found["results"][0]["details"]["incidents"] == 1
