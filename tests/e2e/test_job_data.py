"""Samples that a job has trained on, counted by its model: each of an epoch once."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.clusters import Cluster
from tests.tiers import FRAMEWORKS_ENV

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).parent / "programs/epochs.py"
MODES = ["snapshot", "in-process", "disk"]
OWN = ["map", "stream"]
LIBRARIES = ["stateful", "hugging-face", "stateful-stream", "hugging-face-stream", "webdataset"]
"""Kinds of loaders that need packages which `make setup` does not install."""


def run(cluster: Cluster, folder: Path, name: str, ranks: int, *words: str) -> list[dict[str, Any]]:
    """Run a job to its end on one or two pods, as a person does; return what its ranks wrote."""
    nodes = 2 if ranks % 2 == 0 else 1
    command = [
        *(sys.executable, "-m", "unbroken.cli.main", "run", "--dir", str(cluster.directory)),
        *("--nnodes", str(nodes), "--nproc-per-node", str(ranks // nodes), "--name", name, *words),
    ]
    variables = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    if any(kind in words for kind in LIBRARIES):
        variables["VIRTUAL_ENV"] = str(FRAMEWORKS_ENV)
    done = subprocess.run(
        command, cwd=folder, env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads((folder / f"end-{rank}.json").read_text()) for rank in range(ranks)]


def epochs(cluster: Cluster, folder: Path, name: str, ranks: int, *words: str) -> Any:
    """Run the program; return the counts, which all ranks must have, and the last attempt."""
    found = run(cluster, folder, name, ranks, str(PROGRAM), str(folder), *words)
    seen = found[0]["seen"]
    assert all(one["seen"] == seen for one in found)
    assert sum(one["samples"] for one in found) == sum(map(sum, seen))
    return seen, found[0]["attempt"]


def once(size: int) -> list[list[int]]:
    """Return the counts of two epochs in which each sample was seen once."""
    return [[1] * size] * 2


@pytest.mark.parametrize("kind", OWN)
def test_a_killed_worker_makes_no_sample_repeated_or_skipped(
    cluster: Cluster, tmp_path: Path, kind: str
) -> None:
    name = f"killed-{kind}"
    words = ("--mode", "in-process", "--kind", kind, "--size", "103", "--kills", "1")
    seen, attempt = epochs(cluster, tmp_path, name, 2, *words)
    assert seen == once(103)
    assert attempt >= 1
    # An incident counts no samples if the fault came with the first step.
    assert not re.search(r"samples? skipped", cluster.unbroken("explain", name).stdout)


@pytest.mark.heavy
@pytest.mark.parametrize("kind", OWN)
@pytest.mark.parametrize("mode", MODES)
def test_ten_kills_make_no_sample_repeated_or_skipped(
    cluster: Cluster, tmp_path: Path, mode: str, kind: str
) -> None:
    words = ("--mode", mode, "--kind", kind, "--size", "1003", "--kills", "10")
    seen, attempt = epochs(cluster, tmp_path, f"ten-{mode}-{kind}", 4, *words)
    assert seen == once(1003)
    assert attempt >= 10


def changed(cluster: Cluster, folder: Path, name: str, *words: str) -> Any:
    """Train with 4, then 3, then 4 ranks from the checkpoint of those before."""
    for ranks, stop in ((4, 5), (3, 11)):
        made = (*words, "--size", "203", "--mode", "disk", "--stop", str(stop))
        epochs(cluster, folder, f"{name}-{stop}", ranks, *made)
    return epochs(cluster, folder, f"{name}-end", 4, *words, "--size", "203", "--mode", "disk")[0]


@pytest.mark.heavy
@pytest.mark.parametrize("kind", OWN)
def test_other_ranks_take_the_rest_of_an_epoch_from_a_checkpoint(
    cluster: Cluster, tmp_path: Path, kind: str
) -> None:
    assert changed(cluster, tmp_path, f"changed-{kind}", "--kind", kind) == once(203)


@pytest.mark.frameworks
@pytest.mark.parametrize("kind", LIBRARIES)
def test_loaders_of_other_libraries_repeat_and_skip_no_sample(
    cluster: Cluster, tmp_path: Path, kind: str
) -> None:
    words = ("--kind", kind, "--size", "403", "--kills", "3")
    seen, attempt = epochs(cluster, tmp_path, f"killed-{kind}", 2, *words)
    assert seen == once(403)
    assert attempt >= 3
    (tmp_path / "other").mkdir()
    assert changed(cluster, tmp_path / "other", f"changed-{kind}", "--kind", kind) == once(203)


def test_the_program_of_the_guide_trains(cluster: Cluster, tmp_path: Path) -> None:
    page = (ROOT / "docs/guide/data.md").read_text()
    program = tmp_path / "guide.py"
    program.write_text(page.split("```python\n")[1].split("```")[0])
    program.write_text(
        f"{program.read_text()}"
        f"from pathlib import Path\n"
        f"rank = dict(samples=data.samples, epoch=data.epoch)\n"
        f"Path(f'end-{{worker.context().rank}}.json').write_text(__import__('json').dumps(rank))\n"
    )
    assert (
        run(cluster, tmp_path, "guide-data", 2, str(program)) == [{"samples": 1000, "epoch": 2}] * 2
    )
