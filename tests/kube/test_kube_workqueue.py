"""The work queue handles each key once, alone, and again after a failure."""

from __future__ import annotations

import logging
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unbroken.errors import WorldError
from unbroken.kube.backoff import Backoff
from unbroken.kube.workqueue import Backlog, WorkQueue
from watching import Watcher, running


def backlog() -> Backlog[str]:
    """An empty one."""
    return Backlog(Backoff(first=1.0, limit=8.0), Random(1))


def test_key_added_twice_is_taken_once() -> None:
    """Dedupe while waiting."""
    queue = backlog()
    queue.add("a")
    queue.add("a")
    assert (queue.take(0), queue.take(0)) == ("a", None)


def test_key_added_while_worked_on_comes_after_it_is_done() -> None:
    """Never two at a time, and never lost."""
    queue = backlog()
    queue.add("a")
    queue.take(0)
    queue.add("a")
    assert queue.take(0) is None
    queue.done("a")
    assert queue.take(0) == "a"


def test_earliest_of_several_times_counts() -> None:
    """A later wish does not put off an earlier one."""
    queue = backlog()
    queue.add_at("a", 5.0)
    queue.add_at("a", 9.0)
    queue.add_at("a", 3.0)
    assert queue.deadline() == 3.0
    assert queue.take(2.9) is None
    assert queue.take(3.0) == "a"
    queue.done("a")
    assert queue.take(100.0) is None
    assert queue.deadline() is None


def test_failures_grow_the_delay_and_success_forgets_them() -> None:
    """Each delay is between half of the back-off and the whole."""
    queue = backlog()
    queue.add("a")
    now = 0.0
    for expected in (1.0, 2.0, 4.0, 8.0, 8.0):
        assert queue.take(now) == "a"
        delay = queue.failed("a", now)
        assert expected / 2 <= delay <= expected
        assert queue.deadline() == now + delay
        assert queue.take(now + delay * 0.99) is None
        now += delay
    queue.take(now)
    queue.done("a")
    queue.add("a")
    queue.take(now)
    assert queue.failed("a", now) <= 1.0


@given(st.lists(st.tuples(st.sampled_from(["add", "take", "done", "fail"]), st.integers(0, 3))))
def test_no_key_is_lost_or_worked_on_twice(steps: list[tuple[str, int]]) -> None:
    """After any steps, every key that was added is taken in the end."""
    queue: Backlog[int] = Backlog(Backoff(first=1.0, limit=8.0), Random(1))
    owed: set[int] = set()
    working: list[int] = []
    for step, key in steps:
        if step == "add":
            queue.add(key)
            owed.add(key)
        elif step == "take" and (taken := queue.take(0.0)) is not None:
            assert taken not in working
            owed.discard(taken)
            working.append(taken)
        elif working:
            finished = working.pop()
            if step == "fail":
                queue.failed(finished, 0.0)
                owed.add(finished)
            else:
                queue.done(finished)
    for key in working:
        queue.done(key)
    while (taken := queue.take(1e9)) is not None:
        owed.discard(taken)
        queue.done(taken)
    assert not owed


async def test_failed_key_is_handled_again_while_others_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Errors of the world and bugs alike; a bug is logged as an error."""
    handled: Watcher[str] = Watcher()

    async def handle(key: str) -> float | None:
        handled(key)
        if handled.seen.count(key) == 1 and key == "world":
            raise WorldError("no network")
        if handled.seen.count(key) == 1 and key == "bug":
            raise ZeroDivisionError
        return 0.01 if key == "again" and handled.seen.count(key) < 3 else None

    queue = WorkQueue("test", handle, workers=2)
    for key in ("world", "bug", "again", "plain"):
        queue.add(key)
    async with running(queue.run()):
        await handled.until(lambda seen: len(seen) == 2 + 2 + 3 + 1)
    assert sorted(handled.seen) == sorted(["world", "bug"] * 2 + ["again"] * 3 + ["plain"])
    errors = [r for r in caplog.records if r.levelno >= logging.ERROR]
    assert ["key=bug" in r.getMessage() for r in errors] == [True]
