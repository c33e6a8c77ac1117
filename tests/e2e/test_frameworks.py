"""What is kept and lost when a worker of a real framework is killed: docs/guide/frameworks.md.

Each program trains 24 steps on two ranks, with a checkpoint of the framework's own each 5 steps.
Rank 1 is killed after step 13.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.clusters import Cluster
from tests.tiers import FRAMEWORKS_ENV

pytestmark = [pytest.mark.slow, pytest.mark.frameworks, pytest.mark.timeout(3600)]
ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "programs/frameworks"
PAGE = ROOT / "docs/guide/frameworks.md"
KILLED_AFTER = 13
NAMES = {
    "hf_trainer": "Hugging Face Trainer",
    "lightning_trainer": "Lightning",
    "accelerate_loop": "Accelerate",
}


@dataclass(frozen=True)
class Run:
    """A training that has ended."""

    name: str
    folder: Path

    def lines(self, rank: int) -> list[dict[str, Any]]:
        """Return what a rank has noted."""
        text = (self.folder / f"rank-{rank}.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    def samples(self, rank: int, attempt: int) -> dict[int, str]:
        """Return the samples of an attempt by step."""
        return {
            line["step"]: line["sample"]
            for line in self.lines(rank)
            if line["attempt"] == attempt and "step" in line
        }

    @property
    def weights(self) -> str:
        """Return the digest of the weights at the end."""
        (found,) = [line["weights"] for line in self.lines(0) if "weights" in line]
        return str(found)


@pytest.fixture(scope="module")
def whole(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    """Return a training without a fault, made once for each program."""

    @cache
    def made(program: str) -> Run:
        name = f"{program}-whole".replace("_", "-")
        return train(cluster, tmp_path_factory.mktemp(program), program, name)

    return made


def train(cluster: Cluster, folder: Path, program: str, name: str, *options: str) -> Run:
    """Run a program to its end as a person does, with the environment of the frameworks active."""
    words = [
        *(sys.executable, "-m", "unbroken.cli.main", "run", "--dir", str(cluster.directory)),
        *("--nnodes", "1", "--nproc-per-node", "2", "--name", name),
        *(str(PROGRAMS / f"{program}.py"), str(folder), *options),
    ]
    variables = {
        **os.environ,
        "VIRTUAL_ENV": str(FRAMEWORKS_ENV),
        "PYTHONPATH": str(ROOT / "src"),
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        words, cwd=folder, env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return Run(name, folder)


def row(name: str, is_kept: bool) -> list[str]:
    """Return the cells of a row of the guide's table."""
    wanted = "with `keep_steps`" if is_kept else "alone"
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[:2] == [NAMES[name], wanted]:
            return cells[2:]
    raise AssertionError(f"{PAGE.name} has no row for {NAMES[name]} {wanted}")


@pytest.mark.parametrize("is_kept", [False, True], ids=["alone", "kept"])
@pytest.mark.parametrize("program", NAMES)
def test_a_row_of_the_table_is_what_a_killed_worker_costs(
    cluster: Cluster, tmp_path: Path, whole: Callable[[str], Run], program: str, is_kept: bool
) -> None:
    name = f"{program}-{'kept' if is_kept else 'alone'}".replace("_", "-")
    options = ["--kill", str(KILLED_AFTER), *(["--keep"] if is_kept else [])]
    run = train(cluster, tmp_path, program, name, *options)
    after = run.samples(0, 1)
    repeated = KILLED_AFTER + 1 - min(after)
    undisturbed = whole(program).samples(0, 0)
    same = all(undisturbed[step] == sample for step, sample in after.items())
    exact = run.weights == whole(program).weights
    shown = [str(repeated), "yes" if same else "no", "yes" if exact else "no"]
    assert shown == row(program, is_kept)
    if is_kept:
        told = cluster.unbroken("explain", name).stdout
        assert re.search(rf"resumed after step {KILLED_AFTER} from memory .*no step lost", told)


PREPARED = """
import torch
from accelerate import Accelerator
one = Accelerator(cpu=True)
one.prepare(torch.nn.Linear(1, 1))
"""
TWICE = """
from unbroken.errors import SpecError
from unbroken.worker.integrations.{adapter} import keep_steps
{imports}
for name in ("first", "second"):
    keep_steps({object}, name=name)
try:
    keep_steps({object}, name="second")
except SpecError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("adapter", "imports", "made"),
    [
        (
            "transformers",
            "import torch; from transformers import Trainer, TrainingArguments",
            "Trainer(torch.nn.Linear(1, 1), TrainingArguments('x', use_cpu=True))",
        ),
        ("lightning", "from lightning.pytorch import Trainer", "Trainer(accelerator='cpu')"),
        (
            "accelerate",
            PREPARED,
            "one",
        ),
    ],
    ids=["transformers", "lightning", "accelerate"],
)
def test_each_training_of_a_script_has_the_name_that_it_is_given(
    adapter: str, imports: str, made: str, tmp_path: Path
) -> None:
    text = TWICE.format(adapter=adapter, imports=imports, object=made)
    managed = {"UNBROKEN_JOB": "twice", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    managed |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = subprocess.run(
        [FRAMEWORKS_ENV / "bin/python", "-c", text],
        cwd=tmp_path,
        env={**os.environ, **managed, "PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "called it with the name 'second' before" in done.stdout
