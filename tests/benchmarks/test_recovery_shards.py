"""Sharded jobs of `benchmarks/recovery.py`: their settings, their table, and their checkpoints."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import recovery
from recovery_launch import Setting
from recovery_peers import TorchFt
from recovery_records import STAGES, Recovery, rate, summary

from tests.worker.forked import ranks


def parsed(monkeypatch: pytest.MonkeyPatch, *words: str) -> list[tuple[Setting, list[str]]]:
    """Return the jobs of a command line."""
    monkeypatch.setattr(sys, "argv", ["recovery.py", *words])
    return recovery.settings(recovery.parse())


def test_each_size_is_measured_with_each_sharding(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("--parameters=1M,100M", "--sharding=ddp,fsdp2,hsdp", "--faults=rank0,node")
    found = parsed(monkeypatch, *words)
    assert len(found) == 12
    assert [(one.parameters, one.sharding, faults) for one, faults in found[:4]] == [
        (1_000_000, "ddp", ["rank0"]),
        (1_000_000, "ddp", ["node"]),
        (1_000_000, "fsdp2", ["rank0"]),
        (1_000_000, "fsdp2", ["node"]),
    ]
    assert [one.has_spare for one, _ in found[:2]] == [False, True]
    told = json.loads(found[-1][0].environment(Path("place"))["UNBROKEN_BENCH"])
    assert (told["sharding"], told["nodes"], told["parameters"]) == ("hsdp", 2, 100_000_000)


def test_without_the_option_a_job_is_of_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    ((setting, faults),) = parsed(monkeypatch)
    assert (setting.sharding, faults) == ("ddp", ["worker"])


def test_an_unknown_sharding_is_an_error_that_names_the_known(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parsed(monkeypatch, "--sharding=fsdp2,zero3")
    assert "unknown: zero3 (known: ddp, fsdp2, hsdp)" in capsys.readouterr().err


def test_the_table_has_the_usual_step_and_the_time_beyond_it() -> None:
    kill = Recovery(
        "torchrun-fresh-store", 1, 100.0, stepped_at=112.0, step_seconds=2.0, lost_steps=6,
        details={"to_first_step": 9.5},
    )  # fmt: skip
    ours = Recovery(
        "in-process+snapshots", 1, 100.0, stepped_at=103.25, step_seconds=2.25, lost_steps=0
    )
    entries = [dict(summary(one.mode, [one])) for one in (kill, ours)]
    rate(entries, recovery.BASE)
    cell = {
        "shape": "2x2", "sharding": "fsdp2", "parameters": 100_000_000, "fault": "worker",
        "results": entries, "skipped": {},
    }  # fmt: skip
    title, head, first, second = recovery.table(cell).splitlines()
    assert title == "2x2, fsdp2, 100,000,000 parameters, fault: worker"
    assert head.split() == [
        "mode", "recovered", "p50", "p95", "mean", "max", "faster", "step", "beyond", "less",
        "to", "step", "lost", *STAGES,
    ]  # fmt: skip
    assert first.split()[6:12] == ["1.0x", "2.000", "10.000", "1.0x", "9.500", "6.0/6"]
    assert second.split()[6:12] == ["3.7x", "2.250", "1.000", "10.0x", "-", "0.0/0"]


def test_a_launcher_whose_script_knows_no_shards_is_left_out(tmp_path: Path) -> None:
    options = Namespace(kills=1, bound_seconds=1.0, base=tmp_path)
    (cell,) = recovery.measure([TorchFt], Setting(sharding="fsdp2"), ["worker"], options)
    assert (cell["sharding"], cell["results"]) == ("fsdp2", [])
    assert cell["skipped"] == {"torchft": "its script does not know fsdp2"}


def saved_and_loaded(_rank: int, sharding: str, place: Path) -> list[tuple[list[int], int, bool]]:
    """Train and save thrice; return the complete steps, the step loaded, and whether it is equal.

    The folder of a checkpoint that was broken off, with no `.metadata`, is the newest.
    """
    import torch
    import train_shards
    from train_step import build, learn

    model, replicas = train_shards.made(partial(build, 2_000), sharding, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    assert train_shards.load(model, place) == 0
    torch.manual_seed(1)
    assert all(0 < one.full_tensor().abs().max() < 1 for one in model.parameters())
    local = [one.to_local() for one in model.parameters()]
    if sharding == "hsdp":
        theirs: list[Any] = [None, None]
        torch.distributed.all_gather_object(theirs, [one.tolist() for one in local], replicas)
        assert theirs[0] == theirs[1]
    for step in (10, 20, 30):
        learn(model, optimizer, 4)
        train_shards.save(model, step, place)
        torch.distributed.barrier()
        (place / "step-40").mkdir(exist_ok=True)
        kept = [one.full_tensor() for one in model.parameters()]
        learn(model, optimizer, 4)
        loaded = train_shards.load(model, place)
        pairs = zip(kept, model.parameters(), strict=True)
        is_equal = all(one.equal(other.full_tensor()) for one, other in pairs)
        found.append((train_shards.complete(place), loaded, is_equal))
        torch.distributed.barrier()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["fsdp2", "hsdp"])
def test_shards_are_saved_and_loaded_by_all_ranks(sharding: str, tmp_path: Path) -> None:
    place = tmp_path / "checkpoints"
    place.mkdir()
    steps = [([10], 10, True), ([10, 20], 20, True), ([20, 30], 30, True)]
    assert ranks(4, saved_and_loaded, tmp_path / "store", sharding, place) == [steps] * 4
