"""Snapshots and checkpoints where numpy, which torch does not need, is not installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
TESTS = (
    "test_checkpoints_ranks.py::test_shards_come_back_on_another_number_of_ranks",
    "test_snapshot_sources.py::test_a_lost_shard_comes_from_its_buddy",
    "test_snapshot_sources.py::test_what_is_damaged_on_one_rank_is_given_by_a_replica",
)
MISSING = 'raise ModuleNotFoundError("No module named numpy", name="numpy")\n'


def test_ranks_exchange_their_state(tmp_path: Path) -> None:
    (tmp_path / "numpy.py").write_text(MISSING)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    found = [str(HERE / one) for one in TESTS]
    # Torch warns that there is no numpy.
    options = ("-p", "no:cacheprovider", "-W", "ignore::UserWarning", "-m", "slow")
    command = (sys.executable, "-m", "pytest", *options, *found)
    done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
