"""Snapshots of one process: what is kept, what is refused, and that nothing comes back wrong."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.worker.snapshot_agents import Agent, agent, channel
from unbroken.agent.snapshots.slots import SnapshotSlots
from unbroken.errors import SpecError
from unbroken.wire.ipc import SNAPSHOT_FIND, SNAPSHOT_KEPT, SNAPSHOT_SAVED, encode
from unbroken.wire.snapshot import BODY_AT, HEADERS_BYTES, MAGIC, SEALED_AT, read
from unbroken.worker.channel import Channel
from unbroken.worker.snapshot.snapshot import Snapshot


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def slots() -> Iterator[SnapshotSlots]:
    with agent() as found:
        yield found


@pytest.fixture
def line(slots: SnapshotSlots) -> Iterator[Channel]:
    with channel(slots) as found:
        yield found


def environment(patch: pytest.MonkeyPatch, **variables: object) -> None:
    """Be this worker."""
    base = {"UNBROKEN_JOB": "job", "RANK": 0, "WORLD_SIZE": 1, "JOB_RESTART_COUNT": 0}
    for name, value in (base | variables).items():
        patch.setenv(name, str(value))


class Training:
    """A small training whose every step depends on all that a snapshot has to keep."""

    def __init__(self, seed: int = 7) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        self.model = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 1)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.7)
        self.extra: dict[str, Any] = {
            "order": random.sample(range(100), 100),
            "seen": np.zeros(3),
            "losses": [],
        }

    def snapshot(self, line: Channel | None, **more: Any) -> Snapshot:
        parts: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
        }
        return Snapshot(**parts, rng=True, extra=self.extra, channel=line, **more)

    def step(self, number: int) -> None:
        rows = [self.extra["order"][number * 4 + one] for one in range(4)]
        data = torch.tensor(rows).float()[:, None] / 100 + torch.randn(4, 8)
        loss = self.model(data * random.random() + float(np.random.rand())).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.extra["seen"] = self.extra["seen"] + 1
        self.extra["losses"].append(loss.item())


def unbroken_losses(steps: int) -> list[float]:
    training = Training()
    for number in range(steps):
        training.step(number)
    found: list[float] = training.extra["losses"]
    return found


def test_a_restored_training_goes_on_bit_for_bit(
    line: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment(monkeypatch)
    first = Training()
    snapshot = first.snapshot(line)
    assert snapshot.restore() is None
    for number in range(5):
        first.step(number)
        assert snapshot.save(number)
    first.step(5)
    snapshot.close()
    environment(monkeypatch, JOB_RESTART_COUNT=1)
    second = Training(seed=99)
    found = second.snapshot(line).restore()
    assert found is not None
    assert (found.step, found.attempt, found.source, found.missing) == (4, 0, "memory", ())
    for number in range(5, 12):
        second.step(number)
    assert second.extra["losses"] == unbroken_losses(12)
    assert isinstance(second.extra["seen"], np.ndarray)


def test_the_agent_learns_size_and_cost_of_a_save(
    slots: SnapshotSlots, line: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment(monkeypatch)
    snapshot = Snapshot(weights=torch.ones(1000), channel=line)
    for step in range(3):
        assert snapshot.save(step)
        snapshot.flush()
    state = slots.states["training", 0]
    assert (state.step, state.replicas) == (2, "")
    assert 4000 < state.state_bytes < 5000
    assert len(state.seconds) == 3
    assert min(state.seconds) > 0
    snapshot.close()


def test_what_is_restored_does_not_live_in_the_slot(
    line: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment(monkeypatch)
    first = Training()
    snapshot = first.snapshot(line)
    first.step(0)
    snapshot.save(0)
    snapshot.close()
    again = Training().snapshot(line)
    one = again.restore()
    training = again.parts["optimizer"]
    training.state_dict()["state"][0]["exp_avg"].fill_(5)
    two = again.restore()
    assert one is not None
    assert two is not None
    assert one.checksum == two.checksum
    assert not (training.state_dict()["state"][0]["exp_avg"] == 5).any()


def test_the_first_optimizer_step_outgrows_the_slot(
    line: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment(monkeypatch)
    model = nn.Linear(300, 300)
    optimizer = torch.optim.AdamW(model.parameters())
    snapshot = Snapshot(model=model, optimizer=optimizer, channel=line)
    for number in range(4):
        assert snapshot.save(number)
        model(torch.ones(300)).sum().backward()
        optimizer.step()
    snapshot.close()
    found = Snapshot(model=model, optimizer=optimizer, channel=line).restore()
    assert found is not None
    assert found.step == 3
    assert float(optimizer.state_dict()["state"][0]["step"]) == 3


@pytest.mark.parametrize(
    ("changes", "other", "words"),
    [
        ({"UNBROKEN_JOB": "another"}, {}, "it is another job's"),
        ({"RANK": 1, "WORLD_SIZE": 2}, {}, ""),
        ({}, {"name": "other"}, ""),
        ({}, {"model": nn.Linear(3, 3)}, "model.weight is float32[2, 2] in it, and float32[3, 3]"),
        ({}, {"model": nn.Linear(2, 2, bias=False)}, "model differs in bias"),
        ({}, {"model": nn.Linear(2, 2).double()}, "float32[2, 2] in it, and float64[2, 2] here"),
        ({}, {"rng": True}, "it has the parts ['model'], not ['model', 'rng']"),
        ({"WORLD_SIZE": 2}, {"replicas": "all"}, "is divided among 1 ranks, and these are 2"),
    ],
)
def test_what_does_not_fit_is_not_taken_and_why_is_told(
    changes: dict[str, Any],
    other: dict[str, Any],
    words: str,
    line: Channel,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    environment(monkeypatch)
    parts: dict[str, Any] = {"model": nn.Linear(2, 2)}
    snapshot = Snapshot(**parts, channel=line)
    snapshot.save(3)
    snapshot.close()
    environment(monkeypatch, **changes)
    before = {name: value.clone() for name, value in parts["model"].state_dict().items()}
    assert Snapshot(**(parts | other), channel=line).restore() is None
    assert all(value.equal(before[name]) for name, value in parts["model"].state_dict().items())
    assert words in caplog.text


class Older(Agent):
    """An agent of a release whose snapshots had format 0, which it offers."""

    def hear(self, sock: socket.socket, message: dict[str, Any]) -> None:
        if message["type"] != SNAPSHOT_FIND:
            return super().hear(sock, message)
        answer = self.memory.answer(message)
        for fd in answer.fds:
            os.pwrite(fd, bytes(2), len(MAGIC))
            os.pwrite(fd, bytes(HEADERS_BYTES - SEALED_AT), SEALED_AT)
        socket.send_fds(sock, [encode(answer.message)], answer.fds)
        return None


def test_another_format_is_told_by_worker_and_agent(
    slots: SnapshotSlots, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    environment(monkeypatch)
    with channel(Older(slots)) as line:
        snapshot = Snapshot(weights=torch.ones(3), channel=line)
        snapshot.save(0)
        snapshot.flush()
        assert snapshot.restore() is None
        assert "of format 0, and this library reads 2: give agent and worker" in caplog.text
        told = {"name": "training", "rank": 0, "attempt": 0, "slot": 0, "step": 0}
        answer, _ = line.request({"type": SNAPSHOT_SAVED, **told}, SNAPSHOT_KEPT)
        assert "of format 0, and this agent reads 2" in answer["error"]


def test_a_flipped_bit_is_found_and_the_older_step_taken(
    line: Channel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    environment(monkeypatch)
    weights = torch.zeros(1000)
    snapshot = Snapshot(weights=weights, channel=line)
    for step in (1, 2):
        weights.fill_(step)
        snapshot.save(step)
    snapshot.flush()
    for slot, expected in ((snapshot.find()[1][0], 1), (snapshot.find()[0][0], None)):
        slot.memory[BODY_AT + 77] ^= 4
        found = snapshot.restore()
        assert (found.step if found else None) == expected
    assert "does not fit its checksum" in caplog.text


def test_a_flipped_bit_of_a_header_is_no_snapshot(
    line: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment(monkeypatch)
    snapshot = Snapshot(weights=torch.ones(3), channel=line)
    snapshot.save(0)
    snapshot.flush()
    ((slot, _),) = snapshot.find()
    headers = slot.memory[:1024]
    copied, sealed = headers[:512].rstrip(b"\0"), headers[512:].rstrip(b"\0")
    assert read(headers, len(slot.memory)) is not None
    for bit in range(8 * len(copied)):
        bad = bytearray(copied)
        bad[bit // 8] ^= 1 << bit % 8
        both = bytes(bad).ljust(512, b"\0") + bytes(512)
        assert read(both, len(slot.memory)) is None
    assert read(bytes(512) + sealed.ljust(512, b"\0"), len(slot.memory)) is not None
    assert read(headers, len(slot.memory) - 1) is None


def test_refusals_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    environment(monkeypatch)
    model = nn.Linear(2, 2)
    with pytest.raises(SpecError, match="extra="):
        Snapshot(model=model, counter={"a": 1})
    with pytest.raises(SpecError, match="nothing"):
        Snapshot()
    with pytest.raises(SpecError, match="64 bytes"):
        Snapshot(model=model, name="n" * 65)
    first = Snapshot(model=model)
    with pytest.raises(SpecError, match="exists already"):
        Snapshot(model=model)
    with pytest.raises(SpecError, match="from 0"):
        first.save(-1)
    with pytest.raises(SpecError, match="a whole number, not 'last'"):
        first.save("last")  # type: ignore[arg-type]
    first.close()
    with pytest.raises(SpecError, match=r"worker.checkpoints\(...\), not 'directory'"):
        Snapshot(model=model, checkpoints="directory")  # type: ignore[arg-type]
    keeps = Snapshot(model=model, extra={"odd": Training})
    with pytest.raises(SpecError, match=r"extra\['odd'\] holds a .*Training"):
        keeps.save(0)


def test_without_an_agent_nothing_outlives_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    environment(monkeypatch)
    snapshot = Snapshot(weights=torch.ones(3))
    assert snapshot.save(0)
    snapshot.close()
    assert Snapshot(weights=torch.ones(3)).restore() is None


def test_no_memory_is_said_and_training_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    environment(monkeypatch)
    with channel(SnapshotSlots(lambda: 1 << 20)) as line:
        snapshot = Snapshot(weights=torch.ones(3), channel=line)
        assert not snapshot.save(0)
        assert "raise the pod's memory limit" in caplog.text
        assert snapshot.restore() is None


def test_every_kind_of_value_comes_back(line: Channel, monkeypatch: pytest.MonkeyPatch) -> None:
    environment(monkeypatch)
    tied = torch.arange(6.0).reshape(2, 3)
    extra: dict[str, Any] = {
        "bf16": torch.ones(3, dtype=torch.bfloat16), "bool": torch.tensor([True, False]),
        "empty": torch.empty(0, 4), "scalar": torch.tensor(2.5), "view": tied.t(), "tied": tied,
        "array": np.arange(4, dtype=np.uint32), "number": np.float32(1.5), "dtype": torch.float16,
        "nested": [{"a": (1, 2.5, None, "x", b"y")}, {3}], "size": torch.Size([1, 2]),
    }  # fmt: skip
    snapshot = Snapshot(extra=lambda: extra, channel=line)
    snapshot.save(0)
    found = snapshot.restore()
    assert found is not None
    assert list(found.extra) == list(extra)
    for name, value in extra.items():
        back = found.extra[name]
        assert type(back) is type(value)
        same = back.equal(value) if isinstance(value, torch.Tensor) else np.array_equal(back, value)
        assert same if not isinstance(value, list) else back == value


ENDS = """
import atexit, threading

atexit.register(lambda: print(*sorted(thread.name for thread in threading.enumerate())))

from torch import nn
from unbroken.worker import Snapshot

snapshot = Snapshot(model=nn.Linear(2, 2))
assert snapshot.save(1)
"""
"""Prints the threads that still run after all other work at the end of a process."""


@pytest.mark.slow
def test_no_thread_of_a_snapshot_runs_while_python_ends() -> None:
    """A thread that frees a tensor then aborts the process, which is a fault of a healthy job."""
    done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["MainThread"]
