"""Checkpoints of one process: a saved state is restored, and a broken one never used."""

from __future__ import annotations

import logging
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.worker import forked
from unbroken import worker
from unbroken.errors import UnbrokenError
from unbroken.worker.checkpointing.checkpoints import CheckpointError, Checkpoints, Superseded
from unbroken.worker.checkpointing.names import parse

pytestmark = pytest.mark.slow


class Trained:
    """A model that learns a little in each step, from random numbers."""

    def __init__(self) -> None:
        self.model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3)

    def step(self) -> float:
        """Make a step; return the loss."""
        self.optimizer.zero_grad()
        loss = (self.model(torch.randn(4, 6)) - 1).square().mean()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        return loss.item()

    @property
    def objects(self) -> dict[str, Any]:
        """Objects that a checkpoint saves."""
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}


def save(saved: Checkpoints, step: int, value: float | None = None) -> None:
    """Save a model all of whose weights are the same number."""
    model = torch.nn.Linear(4, 4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(step if value is None else value)
    assert saved.save(step, model=model)
    saved.wait()


def restore(directory: Path) -> tuple[int, float] | None:
    """Restore; return the step, and the number that all weights are."""
    model = torch.nn.Linear(4, 4)
    found = worker.checkpoints(directory).restore(model=model)
    if found is None:
        return None
    values = {value.item() for parameter in model.parameters() for value in parameter.flatten()}
    assert len(values) == 1, "the state is of more than one step"
    return found.step, values.pop()


def steps(directory: Path) -> list[int]:
    """Return the steps of complete checkpoints."""
    found = [parsed for name in os.listdir(directory) if (parsed := parse(name))]
    return sorted(name.step for name, suffix in found if not suffix)


def flip(file: Path) -> None:
    """Flip one bit in the middle of a file."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)


def test_training_goes_on_bit_for_bit(tmp_path: Path) -> None:
    torch.manual_seed(1)
    first = Trained()
    saved = worker.checkpoints(tmp_path, every=5)
    assert saved.restore(**first.objects) is None
    losses = []
    for step in range(12):
        losses.append(first.step())
        if saved.is_due(step):
            assert saved.save(step, **first.objects, rng=True, extra={"losses": len(losses)})
            saved.wait()
    torch.manual_seed(2)
    second = Trained()
    second.step()
    found = worker.checkpoints(tmp_path).restore(**second.objects)
    assert found is not None
    assert (found.step, found.extra, found.world_size) == (10, {"losses": 11}, 1)
    assert [second.step()] == losses[11:]
    assert second.scheduler.last_epoch == first.scheduler.last_epoch
    for one, other in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_training_does_not_change_what_is_being_written(tmp_path: Path) -> None:
    model = torch.nn.Linear(1000, 1000)
    before = model.weight.detach().clone()
    saved = worker.checkpoints(tmp_path)
    assert saved.save(1, model=model)
    with torch.no_grad():
        model.weight.zero_()
    saved.wait()
    assert worker.checkpoints(tmp_path).restore(model=model)
    assert torch.equal(model.weight, before)


def test_other_tools_read_a_checkpoint(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    save(worker.checkpoints(tmp_path), 3)
    dcp_to_torch_save(tmp_path / "step-00000003.attempt-0", tmp_path / "all.pt")
    content = torch.load(tmp_path / "all.pt")
    assert torch.equal(content["model"]["bias"], torch.full((4,), 3.0))


@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata", "rank-00000.state", "complete.json"])
@pytest.mark.parametrize("how", [flip, os.remove, lambda path: os.truncate(path, 10)])
def test_a_damaged_one_is_named_and_the_older_taken(
    file: str, how: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved = worker.checkpoints(tmp_path)
    save(saved, 1)
    save(saved, 2)
    if how is flip and file == "complete.json":
        place = tmp_path / "step-00000002.attempt-0" / file
        place.write_text(place.read_text().replace('"crc32": ', '"crc32": 1'))
    else:
        how(tmp_path / "step-00000002.attempt-0" / file)
    assert restore(tmp_path) == (1, 1.0)
    assert "step-00000002.attempt-0" in caplog.text
    assert file in caplog.text or file == "complete.json"
    assert (tmp_path / "step-00000002.attempt-0.bad").is_dir()
    assert restore(tmp_path) == (1, 1.0)


def test_none_is_left_when_all_are_damaged(tmp_path: Path) -> None:
    save(worker.checkpoints(tmp_path), 1)
    flip(tmp_path / "step-00000001.attempt-0" / "__0_0.distcp")
    assert restore(tmp_path) is None


def test_another_model_is_refused(tmp_path: Path) -> None:
    save(worker.checkpoints(tmp_path), 1)
    with pytest.raises(CheckpointError, match=r"step-00000001.attempt-0 cannot be loaded"):
        worker.checkpoints(tmp_path).restore(model=torch.nn.Linear(3, 3))
    assert steps(tmp_path) == [1]


def test_the_newest_two_and_every_tenth_are_kept(tmp_path: Path) -> None:
    for name in ("step-1", "step-00000005.attempt-0.mine", "notes.txt"):
        (tmp_path / name).mkdir()
    saved = worker.checkpoints(tmp_path, keep_every=10)
    for step in range(5, 40, 5):
        save(saved, step)
    assert steps(tmp_path) == [10, 20, 30, 35]
    ours = {name for name in os.listdir(tmp_path) if parse(name)}
    left = {"step-1", "step-00000005.attempt-0.mine", "notes.txt", ".unbroken"}
    assert set(os.listdir(tmp_path)) - ours == left


def test_what_was_not_restored_is_left_alone(tmp_path: Path) -> None:
    first = worker.checkpoints(tmp_path)
    save(first, 70)
    save(first, 80)
    anew = worker.checkpoints(tmp_path, keep=1)
    for step in (1, 2, 3):
        save(anew, step)
    assert steps(tmp_path) == [3, 70, 80]
    going_on = worker.checkpoints(tmp_path, keep=1)
    assert going_on.restore() is not None
    save(going_on, 4)
    assert steps(tmp_path) == [4]


def test_a_step_is_saved_once(tmp_path: Path) -> None:
    saved = worker.checkpoints(tmp_path)
    save(saved, 1)
    assert not saved.save(1, model=torch.nn.Linear(4, 4))
    assert restore(tmp_path) == (1, 1.0)


def test_a_save_in_flight_is_not_waited_for(tmp_path: Path) -> None:
    """Use a pipe without a reader as a file of this rank: the saving thread blocks in it."""
    saved = worker.checkpoints(tmp_path, seconds=1e-9)
    assert saved.is_due(0)
    place = tmp_path / "step-00000001.attempt-0.tmp"
    (place / "parts").mkdir(parents=True)
    os.mkfifo(place / "parts" / "0.draft")
    assert saved.save(1, model=torch.nn.Linear(4, 4))
    assert not saved.is_due(1)
    assert not saved.save(2, model=torch.nn.Linear(4, 4))
    assert saved.skipped == 1
    (place / "parts" / "0.draft").read_bytes()
    saved.wait()
    assert saved.failed == 1
    save(saved, 3)
    assert restore(tmp_path) == (3, 3.0)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """Mount a disk of 256 KiB."""
    place = tmp_path / "small"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no disk of its own for this test: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_stops_no_training(small: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved = worker.checkpoints(small)
    save(saved, 1)
    used = {path for path in small.rglob("*") if path.is_file()}
    assert saved.save(2, model=torch.nn.Linear(500, 500))
    saved.wait()
    assert saved.failed == 1
    assert (
        'checkpoint not saved; training continues step=2 error="[Errno 28] No space left'
        in caplog.text
    )
    assert {path for path in small.rglob("*") if path.is_file()} == used
    save(saved, 3)
    assert steps(small) == [1, 3]
    assert restore(small) == (3, 3.0)


def test_a_read_only_disk_is_told_at_once(small: Path) -> None:
    remount = ["mount", "-o", "remount,ro", str(small)]
    subprocess.run(remount, check=True)
    with pytest.raises(UnbrokenError, match="cannot be written: Read-only file system"):
        worker.checkpoints(small)


def test_a_missing_directory_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(UnbrokenError, match="is no directory: make it, or mount it"):
        worker.checkpoints(tmp_path / "absent")
    assert not (tmp_path / "absent").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_users_directory_is_told_at_once() -> None:
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        save(worker.checkpoints(place), 1)

        def as_nobody() -> str:
            os.setgid(65534)
            os.setuid(65534)
            with pytest.raises(CheckpointError) as caught:
                worker.checkpoints(place)
            return str(caught.value)

        message = forked.fork(as_nobody).answer()
    assert "cannot be written by user 65534: it belongs to user 0" in message


@pytest.mark.parametrize("wrong", [{"keep": 0}, {"every": 0}, {"seconds": -1}, {"keep_every": 0}])
def test_numbers_that_make_no_sense_are_refused(wrong: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="positive"):
        worker.checkpoints(tmp_path, **wrong)
    with pytest.raises(CheckpointError, match="not both"):
        worker.checkpoints(tmp_path, every=1, seconds=1)


def test_what_cannot_be_saved_is_refused_by_name(tmp_path: Path) -> None:
    saved = worker.checkpoints(tmp_path)
    model = torch.nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match="lessons is a list, without state_dict"):
        saved.save(1, model=model, lessons=[1])
    with pytest.raises(CheckpointError, match="optimizer: no module given"):
        saved.save(1, optimizer=torch.optim.SGD(model.parameters()))
    with pytest.raises(CheckpointError, match="of nothing"):
        saved.save(1)
    with pytest.raises(CheckpointError, match="negative"):
        saved.save(-1, model=model)


def test_a_second_in_the_same_place_takes_over(tmp_path: Path) -> None:
    first = worker.checkpoints(tmp_path)
    save(first, 1)
    second = worker.checkpoints(tmp_path)
    assert second.restore() is not None
    with pytest.raises(Superseded, match="attempt 1 has taken"):
        first.save(2, model=torch.nn.Linear(4, 4))


def test_advice_is_told_and_learns_from_failures(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    first = worker.checkpoints(tmp_path, seconds=1e-9)
    save(first, 1)
    assert first.is_due(2)
    assert 'advice message="a checkpoint every' in caplog.text
    assert first.advice.cost_seconds > 0
    assert first.advice.write_seconds > 0
    mtbf = first.advice.mtbf_seconds
    for failures in (1, 2):
        again = worker.checkpoints(tmp_path)
        again.restore()
        assert again.advice.mtbf_seconds == pytest.approx(mtbf / (1 + failures), rel=0.01)
