"""A wait that gives up says what it saw last, and shows the logs."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from tests import watching
from tests.watching import Watcher, until, wait_until


async def test_a_state_is_waited_for_and_returned() -> None:
    states = [0, 1, 2]

    async def read() -> int:
        return states.pop(0)

    assert await until(read, lambda state: state == 1) == 1
    assert wait_until(lambda: states.pop(0)) == 2


async def test_an_event_wakes_every_waiter() -> None:
    seen: Watcher[int] = Watcher()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(seen.until(lambda items: items == [1, 2]))
        tasks.create_task(seen.until(lambda items: len(items) == 1))
        for item in (1, 2):
            await asyncio.sleep(0)
            seen(item)
            await asyncio.sleep(0)


async def test_the_last_state_and_the_logs_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "PATIENCE_SECONDS", 0.0)
    (tmp_path / "pod").mkdir()
    (tmp_path / "pod/stderr.log").write_text("no such file: train.py")
    wanted = "(?s)last state: Pending.*stderr.log\nno such file: train.py"
    with pytest.raises(AssertionError, match=wanted):
        await until(lambda: "Pending", "Running".__eq__, logs=tmp_path)
    with pytest.raises(AssertionError, match=wanted):
        wait_until(lambda: "Pending", "Running".__eq__, logs=tmp_path, patience=0.0)
    with pytest.raises(AssertionError, match=re.escape("last state: []\n--- logs\nno pod")):
        await until(list, news=asyncio.Event(), logs=lambda: "no pod")


async def test_a_read_that_hangs_ends_with_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "PATIENCE_SECONDS", 0.0)
    with pytest.raises(AssertionError, match="none could be read"):
        await until(asyncio.Event().wait)
