"""Ctrl-C in a benchmark leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from recovery_launch import run_to_end

from tests.watching import PATIENCE_SECONDS, wait_until

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CHILD = """
import os, pathlib, time
pathlib.Path("started").touch()
while not pathlib.Path("go").exists():
    time.sleep(0.01)
time.sleep(1)  # Longer than Popen itself waits after an interrupt.
pathlib.Path("done").touch()
"""
PROGRAM = f"""
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.insert(0, {str(BENCHMARKS)!r})
from pathlib import Path
from recovery_launch import run_to_end
try:
    run_to_end([sys.executable, "-c", {CHILD!r}])
except KeyboardInterrupt:
    sys.exit(3 if Path("done").exists() else 4)
"""


@pytest.mark.slow
def test_an_interrupt_waits_for_the_start_of_a_cluster(tmp_path: Path) -> None:
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, start_new_session=True
    )
    try:
        wait_until((tmp_path / "started").exists)
        os.killpg(program.pid, signal.SIGINT)
    finally:
        (tmp_path / "go").touch()
    assert program.wait(PATIENCE_SECONDS) == 3


@pytest.mark.slow
def test_why_a_command_failed_is_returned() -> None:
    assert run_to_end([sys.executable, "-c", ""]) == ""
    assert run_to_end([sys.executable, "-c", "import sys; sys.exit('no room')"]) == "no room"
    assert run_to_end([sys.executable, "-c", "raise SystemExit(2)"]) == "exit code 2"
