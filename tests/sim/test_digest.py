"""A world does exactly the same each time, whatever order Python gives to sets of strings."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
REGRESSIONS = Path(__file__).parent / "regressions.jsonl"


def digest(hash_seed: int, *options: str) -> str:
    """Return the digest of all that happens in these worlds."""
    words = [sys.executable, "-m", "unbroken.sim", "--digest", "--processes", "1", *options]
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed)}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    found = re.search(r"^digest ([0-9a-f]{64})$", done.stdout, re.MULTILINE)
    assert found, done.stdout
    return found[1]


def test_the_order_of_sets_changes_nothing_in_a_world(tmp_path: Path) -> None:
    lines = [line for line in REGRESSIONS.read_text().splitlines() if "order of a set" in line]
    assert len(lines) == 3
    worlds = tmp_path / "worlds.jsonl"
    worlds.write_text("\n".join(lines))
    assert digest(1, "--worlds", str(worlds)) == digest(3, "--worlds", str(worlds))


def test_other_worlds_have_another_digest() -> None:
    assert digest(1, "--seeds", "2") != digest(1, "--seeds", "2", "--first", "1")
