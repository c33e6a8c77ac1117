"""Reports of a job's workers about themselves, and invariants of every job."""

from __future__ import annotations

import itertools
import json
import os
import select
import socket
import threading
import uuid
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

Object = dict[str, Any]
PATIENCE_SECONDS = 120.0
"""Seconds that no event of a test takes, except on a very busy machine."""


class Event(NamedTuple):
    """A report of a worker."""

    what: str
    attempt: int
    master: str
    """Address of the attempt's store."""
    rank: int
    pid: int
    at: float
    """Seconds since boot, from the only clock of the machine."""
    more: Object


class Events:
    """Receives the reports of a job's workers in a thread."""

    def __init__(self) -> None:
        self.name = f"unbroken-e2e-{uuid.uuid4().hex}"
        self.all: list[Event] = []
        self.news = threading.Condition()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("\0" + self.name)
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def until(self, holds: Callable[[list[Event]], Any], seconds: float = PATIENCE_SECONDS) -> Any:
        """Wait until `holds` is true of all events; return its result."""
        with self.news:
            found = self.news.wait_for(lambda: holds(self.all), seconds)
        assert found, f"not in {seconds} s: {self.story()}"
        return found

    def more(self, count: int, seconds: float) -> None:
        """Wait for `count` more events, or until none has come for `seconds`."""
        with self.news:
            wanted = len(self.all) + count
            self.news.wait_for(lambda: len(self.all) >= wanted, seconds)

    def story(self) -> str:
        """Return the events received, with the last steps only, for people."""
        last: dict[tuple[int, int, str], Event] = {}
        for event in self.all:
            last[(event.attempt, event.rank, event.what)] = event
        return "\n".join(map(str, sorted(last.values(), key=lambda event: event.at)))

    def close(self) -> None:
        """Stop listening."""
        self._socket.shutdown(socket.SHUT_RD)
        self._thread.join()
        self._socket.close()

    def _listen(self) -> None:
        while text := self._socket.recv(1 << 16):
            found = json.loads(text)
            event = Event(*(found.pop(key) for key in Event._fields[:-1]), found)
            with self.news:
                self.all.append(event)
                self.news.notify_all()


def check(all_events: Sequence[Event], world: int, nproc: int) -> None:
    """Check that attempts never overlap, and that every rank of an attempt got the same command."""
    attempts: dict[tuple[int, str], list[Event]] = defaultdict(list)
    for event in all_events:
        assert not event.more.get("others"), f"another attempt lives beside {event}"
        assert event.what != "stranger", f"a worker of another attempt came: {event}"
        attempts[(event.attempt, event.master)].append(event)
    masters = [master for _, master in attempts]
    assert len(set(masters)) == len(masters), f"two attempts share an address: {masters}"
    ordered = sorted(attempts.values(), key=lambda events: events[0].at)
    numbers = [events[0].attempt for events in ordered]
    assert numbers == sorted(numbers)
    for earlier, later in itertools.pairwise(ordered):
        last, first = max(e.at for e in earlier), min(e.at for e in later)
        assert last < first, f"attempt {earlier[0].attempt} went on beside the next"
    for events in ordered:
        check_ranks([event for event in events if event.what == "start"], world, nproc)


def check_ranks(starts: Sequence[Event], world: int, nproc: int) -> None:
    """Check that each rank of an attempt exists once, on the pod of its node rank."""
    found = [event.rank for event in starts]
    assert len(set(found)) == len(found), f"a rank was started twice: {starts}"
    assert set(found) <= set(range(world))
    for event in starts:
        env = event.more["environment"]
        assert int(env["WORLD_SIZE"]) == world
        assert event.rank == int(env["GROUP_RANK"]) * nproc + int(env["LOCAL_RANK"])


def places(starts: dict[int, Event]) -> dict[int, str]:
    """Return the pod of each rank."""
    return {rank: e.more["environment"]["UNBROKEN_POD"] for rank, e in starts.items()}


def parent(pid: int) -> int:
    """Return the parent of a process."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def await_end(pid: int, seconds: float = PATIENCE_SECONDS) -> None:
    """Wait for the end of a process that is not a child."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([handle], [], [], seconds)[0], f"process {pid} lives"
    finally:
        os.close(handle)
