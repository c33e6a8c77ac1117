"""Which steps are saved: the user's, or so many that saves cost at most 3 % of training."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.worker.forked import ranks
from tests.worker.snapshot_agents import Agent, served
from unbroken.agent.snapshots.slots import SPARE_BYTES, SnapshotSlots
from unbroken.errors import SpecError
from unbroken.worker.channel import Channel
from unbroken.worker.snapshot.interval import (
    EVERY_MAX,
    MEASURED,
    SHARE,
    UNCOUNTED,
    cost_share,
    interval,
)
from unbroken.worker.snapshot.snapshot import Snapshot

FIRST = UNCOUNTED + MEASURED
STEPS = 40


def test_saves_take_at_most_their_share_of_the_time_between_them() -> None:
    assert [interval(share) for share in (0.0, SHARE, 0.031, 0.06, 0.5)] == [1, 1, 2, 2, 17]
    assert interval(1e9) == EVERY_MAX
    # Each save takes 1 s and each step 9 s, but for one that held a checkpoint.
    times = [(10.0 * n, 10.0 * n + 1) for n in range(4)] + [(100.0, 101.0), (110.0, 111.0)]
    assert cost_share(times) == pytest.approx(1 / 9)
    assert cost_share(times[:1]) == cost_share([]) == 0.0
    assert cost_share([(1.0, 2.0), (2.0, 3.0)]) > 1e6, "training that does nothing else"


def test_the_users_interval_holds_in_every_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    for attempt in ("0", "1"):
        monkeypatch.setenv("JOB_RESTART_COUNT", attempt)
        snapshot = Snapshot(weights=torch.ones(3), every=5)
        assert [step for step in range(3, 21) if snapshot.is_due(step)] == [5, 10, 15, 20]
        snapshot.close()
    assert all(Snapshot(weights=torch.ones(3), name="each").is_due(step) for step in range(20))


@pytest.mark.parametrize("every", [0, -1, EVERY_MAX + 1, True, 2.0, "auto"])
def test_an_interval_that_is_none_is_refused(every: Any) -> None:
    with pytest.raises(SpecError, match="every= is None or 1 to 10,000"):
        Snapshot(weights=torch.ones(3), every=every)


def train(rank: int, socks: Sequence[socket.socket]) -> Any:
    """Save where it is due; return these steps, the interval, and this rank's own cost."""
    line = Channel(socks[rank])
    line.start()
    snapshot = Snapshot(weights=torch.ones(100_000 * rank + 3), every=None, channel=line)
    due = []
    for step in range(STEPS):
        torch.distributed.barrier()
        if snapshot.is_due(step):
            due.append(step)
            assert snapshot.save(step)
    found = snapshot._interval
    snapshot.close()
    return due, found._chosen, cost_share(found._times[UNCOUNTED:])


@pytest.mark.slow
def test_the_dearest_rank_chooses_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNBROKEN_JOB", "job")
    with ExitStack() as stack:
        memories = [SnapshotSlots() for _ in range(3)]
        socks = [stack.enter_context(served(Agent(memory))) for memory in memories]
        found = ranks(3, train, tmp_path / "store", socks)
        for memory in memories:
            memory.close()
    chosen = interval(max(share for _, _, share in found))
    steps = [*range(FIRST), *(step for step in range(FIRST, STEPS) if step % chosen == 0)]
    assert [(due, every) for due, every, _ in found] == [(steps, chosen)] * 3


def test_refused_memory_is_asked_for_ever_less_often(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Else each step of weeks is a request and a line of the agent's log."""
    monkeypatch.setenv("JOB_RESTART_COUNT", "0")
    room = [0]
    memory = SnapshotSlots(lambda: room[0])
    asked = []
    with ExitStack() as stack:
        line = Channel(stack.enter_context(served(memory)).dup())
        line.start()
        snapshot = Snapshot(weights=torch.ones(3), channel=line)
        for step in range(100):
            before = len(caplog.records)
            assert not snapshot.save(step)
            asked += [step] if len(caplog.records) > before else []
        room[0] = SPARE_BYTES + (1 << 20)
        kept = [step for step in range(100, 200) if snapshot.save(step)]
        snapshot.close()
    memory.close()
    assert asked == [0, 1, 3, 7, 15, 31, 63]
    assert kept == list(range(127, 200))
