"""The checks of the job tests find violations: two attempts at once, a rank twice."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.job_events import Event, Events, check
from tests.e2e.jobs import GANG


def start(attempt: int, rank: int, at: float, **more: object) -> Event:
    """Return the start report of a worker; a pod has two of the four workers."""
    environment = {"GROUP_RANK": str(rank // 2), "LOCAL_RANK": str(rank % 2), "WORLD_SIZE": "4"}
    master = str(more.pop("master", f"10.0.0.1:{attempt}"))
    whole = {"environment": environment, **more}
    return Event("start", attempt, master, rank, 100 + rank, at, whole)


GOOD = [start(attempt, rank, attempt + rank / 10) for attempt in (0, 1) for rank in range(4)]


@pytest.mark.parametrize(
    ("event", "said"),
    [
        (start(1, 2, 1.5, others=["attempt-0: 17"]), "another attempt lives"),
        (start(1, 2, 1.5)._replace(what="stranger"), "of another attempt came"),
        (start(1, 2, 1.5), "started twice"),
        (start(0, 2, 1.5)._replace(what="step"), "went on beside the next"),
        (start(2, 2, 2.5, master="10.0.0.1:1"), "share an address"),
    ],
)
def test_a_broken_rule_is_noticed(event: Event, said: str) -> None:
    check(GOOD, 4, 2)
    with pytest.raises(AssertionError, match=said):
        check([*GOOD, event], 4, 2)


@contextmanager
def worker(directory: Path, events: Events, attempt: int, plan: str = "[]") -> Iterator[None]:
    """Run the only rank of an attempt."""
    environment = {
        **{"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"},
        **{"TORCHELASTIC_RESTART_COUNT": str(attempt), "EVENTS": events.name, "PLAN": plan},
    }
    command = [sys.executable, str(GANG), str(directory)]
    process = subprocess.Popen(command, env={**os.environ, **environment})
    events.until(lambda all_: any((e.what, e.attempt) == ("step", attempt) for e in all_))
    try:
        yield
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_workers_notice_what_lives_beside_them(tmp_path: Path) -> None:
    events = Events()
    with worker(tmp_path, events, 0):
        with worker(tmp_path, events, 1):
            pass
        first, second = (event for event in events.all if event.what == "start")
        assert first.more["others"] == []
        assert second.more["others"] == [f"attempt-0-127.0.0.1-0: {first.pid}"]
    with worker(tmp_path, events, 2, '[{"step": 1, "do": "daemon"}]'):
        daemon = events.until(lambda all_: [event for event in all_ if event.what == "daemon"])[0]
    try:
        with worker(tmp_path, events, 3):
            assert events.all[-1].attempt == 3
        last = [event for event in events.all if event.what == "start"][-1]
        assert last.more["others"] == [f"attempt-2-127.0.0.1-0: {daemon.pid}"]
    finally:
        os.kill(daemon.pid, 2)
        events.close()
