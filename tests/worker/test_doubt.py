"""Results of a device after a collective was aborted, which must not become a snapshot."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.worker.snapshot_agents import agent, channel
from unbroken.worker.restart import doubt
from unbroken.worker.snapshot.snapshot import Snapshot


def test_what_arrives_after_an_abort_is_no_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNBROKEN_JOB", "job")
    monkeypatch.setenv("JOB_RESTART_COUNT", "3")
    monkeypatch.setattr(doubt, "_newest", -1)
    tensor = torch.ones(4)
    with agent() as slots, channel(slots) as line:
        snapshot = Snapshot(tensor=tensor, channel=line)
        assert snapshot.save(0)
        snapshot.flush()
        arriving: list[Any] = []
        with monkeypatch.context() as slow:
            # Simulate copies from a device, for which another thread waits.
            slow.setattr(snapshot._copies, "then", lambda work, thread: arriving.append(work))
            assert snapshot.save(1)
        doubt.begin()
        arriving[0].commit()
        arriving[0].finish()
        assert not snapshot.save(2)
        monkeypatch.setenv("JOB_RESTART_COUNT", "4")
        found = snapshot.restore()
        assert found is not None
        assert (found.step, found.attempt) == (0, 3)
        assert snapshot.save(1), "the next attempt is not doubted"
        snapshot.close()
