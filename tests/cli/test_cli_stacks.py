"""`unbroken stacks` on a job whose ranks do different things."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cli_calls import Cli, read_until
from tests.watching import PATIENCE_SECONDS

pytestmark = pytest.mark.slow

SCRIPT = """
import os, signal
def busy():
    while True: pass
def idle():
    while True: signal.pause()
print("here", flush=True)
(busy if os.environ["RANK"] == "2" else idle)()
"""


@pytest.fixture
def standing(cli: Cli) -> Iterator[str]:
    """A job of two pods with two ranks each."""
    script = cli.script("standing.py", SCRIPT)
    process = cli.start(
        "run", "--nnodes", "2", "--nproc-per-node", "2", "--name", "standing", script
    )
    read_until(process, lambda line: line == "here")
    yield "standing"
    process.terminate()
    process.communicate(timeout=PATIENCE_SECONDS)
    cli.call("delete", "standing", code=None)


def test_stacks_of_all_ranks_and_of_one(cli: Cli, standing: str) -> None:
    found = cli.json("stacks", standing)
    ranks = {one["rank"]: one for one in found["ranks"]}
    assert (sorted(ranks), found["attempt"], found["silentPods"]) == ([0, 1, 2, 3], 0, [])
    for rank, one in ranks.items():
        function = "busy" if rank == 2 else "idle"
        assert any(frame.startswith(f"{function} (") for frame in one["threads"][0]["frames"])
    assert found["isWorking"] is False
    assert (found["culprits"], found["confidence"]) == ([2], "unsure"), found["why"]
    assert {one["ranks"]: one["count"] for one in found["groups"]} == {"2": 1, "0-1,3": 3}

    text = cli.call("stacks", standing).stdout
    assert text.startswith("standing, attempt 0: 4 ranks looked at\n")
    assert "\nrank 2: " in text
    assert "\nranks 0-1,3: " in text

    text = cli.call("stacks", standing, "--rank", "2").stdout
    assert text.startswith(f"rank 2, pid {ranks[2]['pid']}\n")
    assert "  processor " in text
    assert "\n    busy (standing.py:" in text
    assert cli.json("stacks", standing, "--rank", "2")["rank"] == 2
    refused = cli.call("stacks", standing, "--rank", "9", code=1)
    assert "rank 9 is not running" in refused.stderr
    assert cli.json("describe", standing)["restarts"] == 0, "nothing was stopped"


def test_a_job_that_does_not_run_has_no_stacks(cli: Cli) -> None:
    assert "no job" in cli.call("stacks", "nothing", code=1).stderr.lower()
