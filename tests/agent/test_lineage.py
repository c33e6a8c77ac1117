"""Descendants that are killed at once, before any of them is reaped."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.watching import PATIENCE_SECONDS

PARENT = """
import os, subprocess
from unbroken.agent.workers import lineage
lineage.adopt_orphans()  # as a keeper does
read, write = os.pipe()
script = "sleep 600 & sh -c 'sleep 600 & echo >&2; wait' & wait"
child = subprocess.Popen(["sh", "-c", script], pass_fds=[write], stderr=subprocess.PIPE)
child.stderr.readline()  # the third generation has begun
os.close(write)
lineage.kill_descendants()
os.read(read, 1)  # ends once every process that has inherited the pipe has ended
print(child.wait())
"""


@pytest.mark.slow
def test_descendants_of_all_generations_are_killed_and_nobody_else() -> None:
    with subprocess.Popen(["sleep", "600"]) as stranger:
        try:
            command = [sys.executable, "-c", PARENT]
            done = subprocess.run(
                command, check=True, capture_output=True, text=True, timeout=PATIENCE_SECONDS
            )
            assert done.stdout == "-9\n"
            assert stranger.poll() is None
        finally:
            stranger.kill()
