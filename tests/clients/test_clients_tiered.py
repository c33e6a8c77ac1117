"""AWS's tiered checkpointing, unchanged, on the local cluster's checkpoint memory.

No checkpoint is ever lost to a killed worker, killed servers or a lost node: the script resumes at
the newest step that both of its ranks have saved.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from shutil import disk_usage
from typing import Any

import pytest

from tests.cli_forks import run_unbroken
from tests.clients.packages import NotInstalledError
from tests.clients.tiered_program import SCRIPT, installed
from tests.e2e.clusters import Cluster, find_kubectl, kill, processes
from tests.watching import wait_until
from unbroken.local.checkpoint_memory import TMPFS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
RANKS = 2


class Training:
    """A training that runs, and the notes of its ranks."""

    def __init__(self, cluster: Cluster, folder: Path, packages: Path) -> None:
        self.cluster = cluster
        self.folder = folder
        script = folder / "train.py"
        script.write_text(SCRIPT)
        words = [
            *(sys.executable, "-m", "unbroken.cli.main", "run", "--dir", str(cluster.directory)),
            *("--nnodes", str(RANKS), "--nproc-per-node", "1", "--name", "tiered"),
            *("--max-restarts", "20"),
            *(str(script), str(folder)),
        ]
        self.output = folder / "output"
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                words,
                cwd=folder,
                env={**os.environ, "PYTHONPATH": str(packages)},
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def notes(self, rank: int) -> list[dict[str, Any]]:
        """Return the notes of a rank."""
        path = self.folder / f"rank-{rank}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def saved(self) -> int:
        """Return the newest step that all ranks have saved."""
        steps = [
            max((note["saved"] for note in self.notes(rank) if "saved" in note), default=0)
            for rank in range(RANKS)
        ]
        return min(steps)

    def loads(self) -> list[list[int]]:
        """Return the steps that each rank has loaded, one for each attempt."""
        return [
            [note["loaded"] for note in self.notes(rank) if "loaded" in note]
            for rank in range(RANKS)
        ]

    def wait_saved(self, more: int = 3) -> int:
        """Return the newest saved step, once there are some more."""
        wanted = self.saved() + more
        return wait_until(self.saved, lambda step: step >= wanted, logs=self.output)

    def wait_loaded(self, after: int) -> int:
        """Return the step at which the next attempt begins, the same for all ranks.

        `after`: attempts that had begun before.
        """
        found = wait_until(
            self.loads, lambda loads: all(len(one) > after for one in loads), logs=self.output
        )
        assert len({one[after] for one in found}) == 1, found
        return found[0][after]

    def break_off(self, kind: str, rank: int) -> None:
        """Break a part of the job: it must resume where it was."""
        saved = self.wait_saved()
        attempts = max(len(one) for one in self.loads())
        place = ("--dir", str(self.cluster.directory))
        words = ["chaos", kind, *place, "tiered", "--rank", str(rank)]
        done = run_unbroken(words, Path.cwd(), os.environ)
        assert done.returncode == 0, done.stdout + done.stderr
        loaded = self.wait_loaded(attempts)
        assert loaded >= saved, f"{self.loads()}\n{self.story()}"

    def story(self) -> str:
        """Return the last lines of the script and of the servers, and the space that they share."""
        files = (self.output, self.cluster.directory / "up.log")
        return "\n".join([*(path.read_text()[-20_000:] for path in files), str(disk_usage(TMPFS))])


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Three nodes with a checkpoint memory."""
    one = Cluster(tmp_path / "cluster", find_kubectl())
    one.unbroken("up", "--nodes", "3", "--checkpoint-memory", "5", "--detach")
    yield one
    one.take_away()


@pytest.fixture
def training(cluster: Cluster, tmp_path: Path) -> Iterator[Training]:
    """A training on two of them, until the end of the test."""
    try:
        packages = installed()
    except NotInstalledError as error:
        pytest.fail(str(error))
    one = Training(cluster, tmp_path, packages)
    yield one
    one.process.kill()
    one.process.wait()


def members(cluster: Cluster) -> list[str]:
    """Return the addresses of the servers."""
    return sorted(path.name for path in (cluster.directory / "checkpoint-memory").iterdir())


def latest(address: str) -> list[int]:
    """Return the steps that a server lists; none while it does not answer."""
    url = f"http://{address}/v1/cp/checkpoints/llama/latest"
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            found: list[int] = json.load(answer)
            return found
    except OSError:
        return []


def test_no_checkpoint_is_lost_to_a_killed_worker_killed_servers_and_a_lost_node(
    training: Training,
) -> None:
    cluster = training.cluster
    assert training.wait_loaded(0) == 0
    training.break_off("kill-worker", rank=1)

    saved = training.wait_saved()
    servers = members(cluster)
    pids = processes(f"{cluster.directory}/checkpoint-memory")
    assert len(pids) == len(servers) == 3
    for pid in pids:
        kill(pid)
    for address in servers:
        wait_until(partial(latest, address), lambda steps: steps and steps[0] >= saved)
    training.break_off("kill-worker", rank=0)

    training.break_off("kill-node", rank=1)
    assert len(members(cluster)) == 2

    training.wait_saved()
    (training.folder / "end").touch()
    assert training.process.wait(timeout=120) == 0, training.output.read_text()
