"""Copies within the memory that there is: what is given up for what, and what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.agent.snapshot_clients import NAME, slot
from unbroken.agent.snapshots.copies import BuddyCopies
from unbroken.agent.snapshots.slots import SPARE_BYTES, SnapshotMemory
from unbroken.agent_http.snapshots import RequestRefused
from unbroken.wire.snapshot import digest

SIZE = len(slot(0, 0, 0))
PAGES = -(-SIZE // 4096) * 4096


class Buddy:
    """A buddy with room for so many copies, whose files count as soon as they are filled."""

    def __init__(self) -> None:
        self.rooms = 100
        self.memory = SnapshotMemory(lambda: SPARE_BYTES + self.rooms * PAGES - self.filled())
        self.copies = BuddyCopies(self.memory, digest("job"), lambda: -1)

    def filled(self) -> int:
        points = [point for points in self.copies.held().values() for point in points]
        return len(points) * PAGES

    def put(self, attempt: int, step: int) -> None:
        incoming = self.copies.receive((NAME, 0), (attempt, step), SIZE)
        assert incoming is not None
        incoming.write(slot(0, attempt, step))
        asyncio.run(incoming.finish())
        incoming.discard()

    def kept(self) -> list[tuple[int, int]]:
        return self.copies.held().get((NAME, 0), [])


@pytest.fixture
def buddy() -> Iterator[Buddy]:
    found = Buddy()
    yield found
    found.copies.close()


def test_with_room_for_three_the_newest_two_are_kept_and_one_received(buddy: Buddy) -> None:
    buddy.rooms = 3
    for step in range(5):
        buddy.put(0, step)
    assert buddy.kept() == [(0, 3), (0, 4)]


def test_without_room_a_new_one_is_refused_and_the_old_ones_stay(buddy: Buddy) -> None:
    buddy.put(0, 1)
    buddy.put(0, 2)
    buddy.rooms = 2
    with pytest.raises(RequestRefused, match="no memory") as refused:
        buddy.put(0, 3)
    assert refused.value.status == 507
    assert buddy.kept() == [(0, 1), (0, 2)]
    buddy.rooms = 3
    buddy.put(0, 3)
    assert buddy.kept() == [(0, 2), (0, 3)]


def test_the_oldest_of_an_older_attempt_is_given_for_the_new_attempts_second(buddy: Buddy) -> None:
    for point in ((0, 1), (0, 2), (1, 1)):
        buddy.put(*point)
    assert buddy.kept() == [(0, 1), (0, 2), (1, 1)]
    buddy.rooms = 3
    incoming = buddy.copies.receive((NAME, 0), (1, 2), SIZE)
    assert incoming is not None
    assert buddy.kept() == [(0, 2), (1, 1)]
    incoming.discard()
    assert buddy.kept() == [(0, 2), (1, 1)]


def test_what_is_promised_to_one_transfer_is_not_promised_to_another(buddy: Buddy) -> None:
    buddy.rooms = 1
    first = buddy.copies.receive((NAME, 0), (0, 1), SIZE)
    assert first is not None
    with pytest.raises(RequestRefused, match="no memory"):
        buddy.copies.receive((NAME, 1), (0, 1), SIZE)
    first.discard()
    second = buddy.copies.receive((NAME, 1), (0, 1), SIZE)
    assert second is not None
    second.discard()
    assert buddy.copies.held() == {}
