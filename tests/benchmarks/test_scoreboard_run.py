"""Real trials of `benchmarks/scoreboard.py`: unbroken and torchrun."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.clusters import processes
from tests.watching import PATIENCE_SECONDS

PROGRAM = Path(__file__).parents[2] / "benchmarks/scoreboard.py"


def command(*options: str) -> list[str]:
    """Run it with few trials."""
    return [sys.executable, "-W", "ignore", str(PROGRAM), "--seeds=1", *options]


@pytest.mark.slow
@pytest.mark.heavy
@pytest.mark.timeout(400)
def test_each_launcher_is_judged_alike(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    words = command("--faults=error,disk", "--launchers=unbroken,torchrun", f"--json={figures}")
    done = subprocess.run(words, capture_output=True, text=True, timeout=360)
    assert done.returncode == 0, done.stderr
    trials: list[dict[str, Any]] = json.loads(figures.read_text())["trials"]
    assert {(one["fault"], one["launcher"]) for one in trials} == {
        (fault, launcher) for fault in ("error", "disk") for launcher in ("unbroken", "torchrun")
    }
    for one in trials:
        assert one["survived"], one
        assert one["detected_seconds"] > 0
        assert one["stall_seconds"] > 0
        assert (one["restarts"], one["early"]) == (1, 0)
        assert 0 < one["lost_steps"] <= 10
        if one["launcher"] == "unbroken":
            assert one["blamed"] == one["rank"]
    page = tmp_path / "page.md"
    subprocess.run(
        command(f"--markdown={page}", f"--from={figures}"), check=True, timeout=PATIENCE_SECONDS
    )
    row = r"\| torchrun \| plain \| (quiet|busy) \| 1/1 \| 1/1 \|"
    assert re.search(row, page.read_text())


@pytest.mark.slow
@pytest.mark.heavy
@pytest.mark.timeout(400)
def test_an_interrupt_ends_all_that_was_started() -> None:
    words = command("--faults=silent", "--launchers=unbroken")
    with subprocess.Popen(words, text=True, stderr=subprocess.PIPE) as program:
        assert program.stderr is not None
        directory = program.stderr.readline().split()[1]
        assert any("steps" in line for line in program.stderr)
        assert processes(directory)
        program.send_signal(signal.SIGINT)
        _, said = program.communicate(timeout=PATIENCE_SECONDS)
    assert program.returncode == 0
    assert "interrupted" in said
    assert processes(directory) == []
    assert not Path(directory).exists()


@pytest.mark.slow
@pytest.mark.parametrize("text", ['{"trials": [{"fau', "{}", "[]", None])
def test_a_file_that_is_no_whole_file_of_figures_is_named(tmp_path: Path, text: str | None) -> None:
    figures, page = tmp_path / "figures.json", tmp_path / "page.md"
    if text is not None:
        figures.write_text(text)
    words = command(f"--markdown={page}", f"--from={figures}")
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {figures}: not a whole file of figures: ")
    assert done.stderr.count("\n") == 1
    assert not page.exists()
