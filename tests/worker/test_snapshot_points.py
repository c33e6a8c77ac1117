"""Workers killed before each line of a save and of a restore: what remains is whole.

`test_snapshot_kills.py` has kills between two lines, in the middle of a copy, at random. `make
test` takes some of the lines, ALL=1 each.
"""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest
import torch
from torch import nn

from tests.worker.forked import fork
from tests.worker.kill_points import kill_at
from tests.worker.snapshot_agents import Agent, agent, served
from unbroken.agent.snapshots.slots import SnapshotSlots
from unbroken.wire.ipc import SNAPSHOT_KEPT, SNAPSHOT_USED, encode
from unbroken.wire.snapshot import HEADERS_BYTES
from unbroken.worker.channel import Channel
from unbroken.worker.snapshot.snapshot import Snapshot

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("as_worker")]
storm = pytest.param(1, marks=[pytest.mark.heavy, pytest.mark.timeout(1200)])
strides = pytest.mark.parametrize("stride", [13, storm])
fewer = pytest.mark.parametrize("stride", [37, storm])
LINES_MAX = 3000


class State:
    """State that is one number throughout: its step."""

    def __init__(self, line: Channel, grows: bool = False) -> None:
        self.model, self.weights, self.step = nn.Linear(2, 2), torch.zeros(50), 0
        self.grows = grows
        self.snapshot = Snapshot(
            model=self.model, weights=self.weights, extra=self.extra, channel=line
        )

    def extra(self) -> dict[str, Any]:
        """Return a state that is larger than its slot from step 2 on, if it grows.

        Only tensors show the step, so that no checksum of other data differs between steps.
        """
        size = 40_000 if self.grows and self.step >= 2 else 5
        return {"row": torch.full((size,), self.step)}

    def fill(self, step: int) -> None:
        """Make it the state of a step."""
        self.step = step
        with torch.no_grad():
            for one in (*self.model.parameters(), self.weights):
                one.fill_(step)

    def restored(self) -> int | None:
        """Restore; return the step after a check of the whole state."""
        found = self.snapshot.restore()
        if found is None:
            return None
        rows = [*self.model.parameters(), self.weights, found.extra["row"]]
        assert {one.item() for row in rows for one in row.flatten()} == {found.step}
        return found.step


def opened(sock: socket.socket) -> Channel:
    """Return a worker's channel."""
    line = Channel(sock.dup())
    line.start()
    return line


def saving(sock: socket.socket, point: int, grows: bool, told: int) -> None:
    """Save steps 0 and 1, and then step 2 until killed."""
    kept = State(opened(sock), grows)
    for step in (0, 1):
        kept.fill(step)
        kept.snapshot.save(step)
    kept.snapshot.flush()
    kept.snapshot._sealer.close()  # a new thread is counted too; the slots stay
    kill_at(point, "snapshot/")
    kept.fill(2)
    kept.snapshot.save(2)
    os.write(told, b"2")
    kept.snapshot.close()


def restoring(sock: socket.socket, point: int) -> None:
    """Restore until killed."""
    kept = State(opened(sock))
    kill_at(point, "snapshot/")
    assert kept.restored() == 1


class Keeping(Agent):
    """An agent that keeps the other snapshots when one was restored."""

    def hear(self, sock: socket.socket, message: dict[str, Any]) -> None:
        """Answer one message."""
        if message["type"] == SNAPSHOT_USED:
            sock.sendall(encode({"type": SNAPSHOT_KEPT}))
        else:
            super().hear(sock, message)


def found_after(slots: SnapshotSlots, patch: pytest.MonkeyPatch, attempt: int) -> int | None:
    """Return the step that the next attempt restores.

    The other snapshot, if there is one, must be whole as well.
    """
    patch.setenv("JOB_RESTART_COUNT", str(attempt))
    with served(Keeping(slots)) as sock:
        kept = State(opened(sock))
        kept.fill(-1)
        newest = kept.restored()
        others = [slot for slot, _ in kept.snapshot.find()]
        for slot in others:
            header, copied = slot.header(), slot.memory[:HEADERS_BYTES]
            if header is not None and header.step == newest:
                slot.clear()
                kept.restored()
                slot.memory[:HEADERS_BYTES] = copied
        kept.snapshot.close()
    return newest


@strides
@pytest.mark.parametrize("grows", [False, True])
def test_killed_before_a_line_of_a_save(
    stride: int, grows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int | None] = []
    for point in range(1, LINES_MAX, stride):
        monkeypatch.setenv("JOB_RESTART_COUNT", "0")
        reading, writing = os.pipe()
        with agent() as slots:
            with served(slots) as sock:
                child = fork(saving, sock, point, grows, writing)
                os.close(writing)
                is_through = child.has_returned()
            has_saved = os.read(reading, 1) == b"2"
            os.close(reading)
            found.append(found_after(slots, monkeypatch, 1))
        assert found[-1] == 2 or (found[-1] == 1 and not has_saved), point
        if is_through:
            break
    assert found[0] == 1
    assert found[-1] == 2
    assert len(found) > 150 / stride, "every line of it was reached"


@fewer
def test_killed_before_a_line_of_a_restore(stride: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that no snapshot to restore from is damaged."""
    with agent() as slots:
        with served(slots) as sock:
            kept = State(opened(sock))
            for step in (0, 1):
                kept.fill(step)
                kept.snapshot.save(step)
            kept.snapshot.close()
        for point in range(1, LINES_MAX, stride):
            monkeypatch.setenv("JOB_RESTART_COUNT", str(2 * point))
            with served(slots) as sock:
                is_through = fork(restoring, sock, point).has_returned()
            if is_through:
                break
            assert found_after(slots, monkeypatch, 2 * point + 1) == 1, point
    assert point > 150, "every line of it was reached"
