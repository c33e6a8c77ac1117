"""Times since when things last."""

from __future__ import annotations

from unbroken.core.job.deadlines import Timers


def test_things_expire_at_their_deadline_the_oldest_first() -> None:
    timers: Timers[str] = Timers()
    assert timers.deadline(5.0) is None
    assert timers.expire(100.0, 0.0) == []
    timers.update(a=1.0, b=2.0, c=7.5)
    due = timers.deadline(5.0)
    assert due == 6.0
    assert timers.expire(5.9, 5.0) == []
    assert timers.expire(due, 5.0) == ["a"], "a tick at the deadline is in time"
    assert timers.expire(12.0, 5.0) == ["b"]
    assert dict(timers) == {"c": 7.5}


def test_a_thing_that_begins_again_is_the_last() -> None:
    timers = Timers({"a": 1.0, "b": 2.0})
    timers.restart("a", 3.0)
    timers.restart("c", 3.0)
    assert list(timers) == ["b", "a", "c"]
    timers.setdefault("b", 4.0)
    assert timers.deadline(5.0) == 7.0, "it has lasted all the time"
