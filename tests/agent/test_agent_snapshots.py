"""The agent's memory of snapshots: the fence, what is offered, what is given up, and its bound."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from unbroken.agent.snapshots.slots import (
    NAMES_MAX,
    SPARE_BYTES,
    SavedState,
    SnapshotSlots,
    available_bytes,
    middle,
)
from unbroken.errors import WorldError
from unbroken.wire.agent import RECEIPT_CHARACTERS, AgentReport, AgentState, SnapshotReport
from unbroken.wire.agent_codec import decode_report, encode_report
from unbroken.wire.ipc import SNAPSHOT_FIND, SNAPSHOT_OPEN, SNAPSHOT_SAVED, SNAPSHOT_USED
from unbroken.wire.snapshot import ABSENT, Header, digest, slot_bytes, write

ROOM = 1 << 20


class Memory:
    """An agent with a worker that only speaks."""

    def __init__(self) -> None:
        self.room = SPARE_BYTES + ROOM
        self.agent = SnapshotSlots(lambda: self.room)

    def ask(self, kind: str, **keys: Any) -> dict[str, Any]:
        base = {"type": kind, "name": "training", "rank": 0, "attempt": 0}
        return self.agent.answer(base | keys).message

    def open(self, attempt: int, slot: int, **keys: Any) -> int:
        message = {"name": "training", "rank": 0, "attempt": attempt, "slot": slot}
        wanted = {"type": SNAPSHOT_OPEN, "bytes": slot_bytes(100)} | message | keys
        answer = self.agent.answer(wanted)
        assert "error" not in answer.message
        (fd,) = answer.fds
        return fd

    def save(self, fd: int, attempt: int, slot: int, step: int, rank: int = 0) -> dict[str, Any]:
        header = Header(
            digest("job"), "training", attempt, step, rank, 2, digest("layout"), 100, 0, 10, 0
        )
        os.pwrite(fd, ABSENT, 0)
        os.pwrite(fd, write(header), 0)
        return self.ask(SNAPSHOT_SAVED, attempt=attempt, slot=slot, step=step, rank=rank)

    def found(self, attempt: int, rank: int = 0) -> list[tuple[int, int]]:
        answer = self.ask(SNAPSHOT_FIND, attempt=attempt, rank=rank)
        return [(one["attempt"], one["step"]) for one in answer["steps"]]


@pytest.fixture
def memory() -> Iterator[Memory]:
    found = Memory()
    yield found
    found.agent.close()


def test_slots_are_kept_for_the_next_attempt(memory: Memory) -> None:
    first, second = memory.open(0, 0), memory.open(0, 1)
    assert "error" not in memory.save(first, 0, 0, 7)
    memory.save(second, 0, 1, 8)
    assert memory.found(1) == [(0, 7), (0, 8)]
    assert memory.found(1, rank=1) == []


def test_size_and_cost_of_saves_are_kept_for_people(memory: Memory) -> None:
    fd = memory.open(0, 0)
    memory.save(fd, 0, 0, 7)
    key = ("training", 0)
    assert memory.agent.states[key] == SavedState(7, 10, "")
    for step, seconds in enumerate((0.5, 0.1, 0.3), 8):
        memory.ask(SNAPSHOT_SAVED, slot=0, step=step, seconds=seconds, replicas="0-3")
    state = memory.agent.states[key]
    assert (state.step, state.replicas, middle(state.seconds)) == (10, "0-3", 0.3)
    assert memory.agent.memory.taken_bytes() == slot_bytes(100)
    memory.agent.begin(1)
    assert memory.agent.states == {}, "steps of another attempt"


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf"), "0.1", None, True, 1e300])
def test_what_a_worker_says_of_a_save_is_bounded(memory: Memory, seconds: object) -> None:
    memory.save(memory.open(0, 0), 0, 0, 7)
    memory.ask(SNAPSHOT_SAVED, slot=0, step=8, seconds=seconds, replicas="x" * 9999)
    state = memory.agent.states["training", 0]
    assert (list(state.seconds), len(state.replicas)) == ([], RECEIPT_CHARACTERS)
    memory.ask(SNAPSHOT_SAVED, slot=0, step=9, replicas=["0-3"])
    assert (state.step, state.replicas) == (9, "")


def test_a_late_writer_of_an_older_attempt_changes_nothing(memory: Memory) -> None:
    first, second = memory.open(0, 0), memory.open(0, 1)
    memory.save(first, 0, 0, 7)
    memory.agent.begin(1)
    assert "attempt 0 is over" in memory.save(second, 0, 1, 8)["error"]
    assert "attempt 0 is over" in memory.ask(SNAPSHOT_OPEN, slot=0, bytes=5000)["error"]
    assert "attempt 0 is over" in memory.ask(SNAPSHOT_FIND)["error"]
    assert memory.found(1) == [(0, 7)]
    memory.save(first, 0, 0, 9)
    assert memory.found(1) == []
    assert memory.found(2) == [], "the second slot was empty when its attempt ended"
    assert os.fstat(memory.open(2, 0)).st_ino != os.fstat(first).st_ino


def test_older_attempts_are_given_up_when_all_ranks_must_have_saved(memory: Memory) -> None:
    old = memory.open(0, 0)
    memory.save(old, 0, 0, 7)
    elsewhere = memory.open(0, 0, rank=1)
    memory.save(elsewhere, 0, 0, 7, rank=1)
    new = memory.open(1, 0)
    memory.save(new, 1, 0, 8)
    assert memory.found(1) == [(0, 7), (1, 8)]
    memory.save(memory.open(1, 1), 1, 1, 9)
    assert memory.found(1) == [(1, 8), (1, 9)]
    assert memory.found(1, rank=1) == []


def test_what_was_restored_lets_the_rest_go(memory: Memory) -> None:
    for slot in (0, 1):
        memory.save(memory.open(0, slot), 0, slot, 7 + slot)
    memory.ask(SNAPSHOT_USED, attempt=1, from_attempt=0, step=7)
    assert memory.found(1) == [(0, 7)]


def test_memory_is_promised_once(memory: Memory) -> None:
    size = ROOM // 3
    memory.open(0, 0, bytes=size)
    memory.room -= ROOM // 2  # training has taken it since
    refused = memory.ask(SNAPSHOT_OPEN, slot=1, bytes=size)["error"]
    assert "raise the pod's memory limit" in refused
    memory.room += ROOM
    memory.open(0, 1, bytes=size)
    # A new request for the same slot gives the old one back first.
    memory.room = SPARE_BYTES + 2 * size
    memory.open(0, 1, bytes=size)


def test_without_room_for_three_states_of_each_rank_none_is_kept() -> None:
    """Two states have room, the third of a restart has none: then its first save was the last."""
    size, memory = slot_bytes(100), Memory()
    memory.agent = SnapshotSlots(lambda: memory.room, nproc=4)
    memory.room = SPARE_BYTES + 12 * size - 5000
    for rank in range(4):
        refused = memory.ask(SNAPSHOT_OPEN, rank=rank, slot=0, bytes=size)["error"]
        assert "3 states of each rank, and 5 kB are missing" in refused
    assert memory.agent.missing == 5000
    memory.room += 5000
    for rank in range(4):
        for slot in (0, 1):
            memory.open(0, slot, rank=rank, bytes=size)
    assert memory.agent.missing == 0
    memory.agent.close()


def test_a_worker_that_asks_for_too_much_leaves_the_report_readable(memory: Memory) -> None:
    assert "are missing" in memory.ask(SNAPSHOT_OPEN, slot=0, bytes=1 << 61)["error"]
    found = SnapshotReport(missing_bytes=memory.agent.missing)
    report = AgentReport("agent", AgentState.RUNNING, snapshots=found)
    assert decode_report(encode_report(report)).snapshots == found


def test_a_job_with_room_for_three_states_saves_in_each_of_its_attempts(memory: Memory) -> None:
    size = slot_bytes(100)
    memory.room = SPARE_BYTES + 3 * size
    for attempt in range(4):
        for slot in (0, 1):
            fd = memory.open(attempt, slot)
            os.posix_fallocate(fd, 0, size)
            memory.room -= size  # as the kernel says it
            memory.save(fd, attempt, slot, 10 * attempt + slot)
            if attempt and slot:
                memory.room += size  # that of the attempt before
        memory.ask(SNAPSHOT_USED, attempt=attempt + 1, from_attempt=attempt, step=10 * attempt)
        memory.room += size
        assert memory.found(attempt + 1) == [(attempt, 10 * attempt)]


def test_copies_take_no_memory_of_planned_slots() -> None:
    size, memory = slot_bytes(100), Memory()
    memory.agent.has_buddy = True
    memory.room = SPARE_BYTES + 7 * size
    memory.open(0, 0, bytes=size)
    held = [memory.agent.memory.take_copy("copy", size) for _ in range(4)]
    with pytest.raises(WorldError, match="beside the snapshots"):
        memory.agent.memory.take_copy("copy", size)
    memory.open(0, 1, bytes=size)
    with pytest.raises(WorldError, match="beside the snapshots"):
        memory.agent.memory.take_copy("copy", size)
    for file in held:
        memory.agent.memory.give_back(file)
    memory.room -= 2000
    memory.agent.begin(1)
    memory.open(1, 0, bytes=size)
    with pytest.raises(WorldError, match="copies of snapshots: 2 kB are missing"):
        memory.agent.memory.take_copy("copy", size)
    memory.agent.close()


@pytest.mark.parametrize(
    "keys",
    [
        {"rank": -1}, {"rank": "0"}, {"rank": None}, {"attempt": 2.5}, {"slot": 2}, {"bytes": []},
        {"name": ""}, {"name": "n" * 65}, {"name": 3}, {"bytes": 1 << 61},
    ],
)  # fmt: skip
def test_nonsense_is_refused(keys: dict[str, Any], memory: Memory) -> None:
    assert "error" in memory.ask(SNAPSHOT_OPEN, **({"slot": 0, "bytes": 100} | keys))
    assert memory.found(0) == []


def test_names_are_bounded_and_slots_must_be_opened(memory: Memory) -> None:
    for number in range(NAMES_MAX):
        memory.open(0, 0, name=f"name {number}")
    assert "names" in memory.ask(SNAPSHOT_OPEN, slot=0, bytes=100)["error"]
    assert "never opened" in memory.ask(SNAPSHOT_SAVED, slot=0, step=1)["error"]


def test_a_slot_can_neither_shrink_nor_grow(memory: Memory) -> None:
    fd = memory.open(0, 0)
    for size in (0, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)


def test_the_memory_group_bounds_what_is_available(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  9000 kB\nMemAvailable:    8000 kB\n")
    assert available_bytes(tmp_path, meminfo) == 8000 * 1024
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("5000\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 2000\n")
    assert available_bytes(tmp_path, meminfo) == 8000 * 1024
    (tmp_path / "memory.max").write_text("10000\n")
    assert available_bytes(tmp_path, meminfo) == 7000
