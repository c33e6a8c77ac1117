"""The work queue handles each key once, alone, and again after a failure."""

from __future__ import annotations

import logging
import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.watching import Watcher, running
from unbroken.errors import PeerError, SpecError, WorldError
from unbroken.kube.backoff import Backoff
from unbroken.kube.errors import Conflict, NotFound
from unbroken.kube.workqueue import RETRY, WORLD_SECONDS_MAX, Backlog, WorkQueue, retry_after


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
    """Draw each delay between half of the back-off and the whole."""
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


def test_error_that_may_pass_at_once_is_retried_at_once_and_then_backs_off() -> None:
    """A conflict is settled by a look at the new version; one that stays must not spin."""
    queue = backlog()
    queue.add("a")
    queue.take(0.0)
    assert queue.failed("a", 0.0, 0.0) == 0.0
    assert queue.take(0.0) == "a"
    assert 1.0 <= queue.failed("a", 0.0, 0.0) <= 2.0
    assert queue.take(0.9) is None


def test_error_with_a_time_is_retried_then_and_within_seconds_after_any_outage() -> None:
    """The delay grows from the given seconds to 5 s, where a plain back-off grows to 60 s."""
    queue: Backlog[str] = Backlog(RETRY, Random(1))
    queue.add("a")
    now, delays = 0.0, []
    while now < 600.0:
        assert queue.take(now) == "a"
        delays.append(queue.failed("a", now, 1.0))
        now += delays[-1]
    assert delays[:3] == [1.0, 1.0, 1.0]
    assert max(delays) <= WORLD_SECONDS_MAX
    assert queue.failed("b", now, 30.0) == 30.0


def test_error_that_no_retry_helps_waits_until_the_key_is_added() -> None:
    """Keep a key that was added during the attempt that failed, too."""
    queue = backlog()
    queue.add("a")
    queue.take(0.0)
    assert queue.failed("a", 0.0, math.inf) == math.inf
    assert queue.deadline() is None
    assert queue.take(1e9) is None
    queue.add("a")
    assert queue.take(1e9) == "a"
    queue.add("a")
    queue.failed("a", 1e9, math.inf)
    assert queue.take(1e9) == "a"


@pytest.mark.parametrize(
    ("error", "seconds"),
    [
        (WorldError("disk full for good"), math.inf),
        (WorldError("changed", 0.0), 0.0),
        (Conflict("changed", 409, "Conflict"), 0.0),
        (WorldError("no answer", 1.0), 1.0),
        (NotFound("no such kind", 404, "NotFound"), None),
        (PeerError("malformed"), None),
        (SpecError("wrong"), None),
        (ZeroDivisionError(), None),
    ],
)
def test_error_says_when_to_retry(error: Exception, seconds: float | None) -> None:
    """Errors of the world say it themselves; others leave it to the back-off."""
    assert retry_after(error) == seconds


STEPS = ("add", "take", "done", "fail", "give up")


@given(st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 3))))
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
            elif step == "give up":
                queue.failed(finished, 0.0, math.inf)
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
            raise WorldError("no network", 0.0)
        if key == "permanent":
            raise WorldError("no such disk")
        if handled.seen.count(key) == 1 and key == "bug":
            raise ZeroDivisionError
        return 0.01 if key == "again" and handled.seen.count(key) < 3 else None

    queue = WorkQueue("test", handle, workers=2)
    for key in ("permanent", "world", "bug", "again", "plain"):
        queue.add(key)
    wanted = ["world", "bug"] * 2 + ["again"] * 3 + ["plain", "permanent"]
    async with running(queue.run()):
        await handled.until(lambda seen: len(seen) == len(wanted))
        assert sorted(handled.seen) == sorted(wanted)
        assert queue.waiting == 0
        queue.add("permanent")
        await handled.until(lambda seen: seen.count("permanent") == 2)
    errors = [r for r in caplog.records if r.levelno >= logging.ERROR]
    assert ["key=bug" in r.getMessage() for r in errors] == [True]
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    text = 'work failed queue=test key=permanent failures=0 retry_seconds=inf error="no such disk"'
    assert warnings == [text] * 2
