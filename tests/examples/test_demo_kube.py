"""The demo on a real Kubernetes, where there is none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "examples/demo_kube.py"


@pytest.mark.slow
def test_what_is_missing_is_said_in_one_line(tmp_path: Path) -> None:
    environment = {**os.environ, "UNBROKEN_ENVTEST": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, DEMO], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line.startswith("cannot run here: ")
    assert "apt-get install" in line
