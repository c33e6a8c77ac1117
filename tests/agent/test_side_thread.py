"""Calls beside the agent's work: in order, with their results, and never more than may wait."""

from __future__ import annotations

import threading

import pytest

from tests.watching import PATIENCE_SECONDS
from unbroken.agent.side_thread import SideThread


def fail() -> None:
    raise ValueError("on purpose")


def test_calls_are_made_one_after_the_other_and_answered() -> None:
    side, made = SideThread("side"), []
    futures = [side.call(lambda number=number: made.append(number)) for number in range(100)]
    assert [one.result(30) for one in futures] == [None] * 100
    assert made == list(range(100))
    with pytest.raises(ValueError, match="on purpose"):
        side.call(fail).result(30)
    assert side.call(threading.get_ident).result(30) != threading.get_ident()


def test_while_a_call_does_not_return_the_others_wait_and_the_rest_is_cancelled() -> None:
    side, begun, ends = SideThread("side", most=2), threading.Event(), threading.Event()

    def hang() -> None:
        begun.set()
        ends.wait()

    hung = side.call(hang)
    assert begun.wait(PATIENCE_SECONDS)
    waiting = [side.call(int) for _ in range(2)]
    assert side.call(int).cancelled()
    assert not any(one.done() for one in waiting)
    ends.set()
    assert [hung.result(30), *(one.result(30) for one in waiting)] == [None, 0, 0]
