"""Objects of one namespace that are changed without end, and cost much each time.

In the attack, the jobs of a tenant were changed 40 times a second. Each change took 10 to 340 ms of
the operator's processor: patterns to compile, 20,000 values, a megabyte of empty lists.
"""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path

import pytest

from tests.attack.test_unreadable_objects import Server, item, odd
from tests.virtual_time import in_virtual_time
from tests.watching import Watcher, running, until
from unbroken.kube.bounds import (
    COMMAS_MAX,
    NAMESPACE,
    ObjectBudgets,
    Postponed,
    excess,
    is_too_deep,
)
from unbroken.kube.informer import Informer
from unbroken.kube.refusals import Refusals, head_of
from unbroken.operator.kinds import JobObject

CHANGES = 100
WORK_SECONDS = 0.1


class Clock:
    """Seconds of work, which each change that is taken adds to."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.taken: Watcher[str] = Watcher()

    def change(self, name: str) -> None:
        """Take a change."""
        self.seconds += WORK_SECONDS
        self.taken(name)


def postponed(clock: Clock) -> Postponed:
    """Nothing that waits, and full budgets."""
    loop = asyncio.get_running_loop()
    return Postponed(ObjectBudgets(loop.time, lambda: clock.seconds))


@in_virtual_time
async def test_a_namespace_over_its_budget_waits_alone_and_its_newest_change_is_taken() -> None:
    clock = Clock()
    changes = postponed(clock)
    for number in range(CHANGES):
        changes.take("bad", number % 2, lambda number=number: clock.change(f"bad{number}"))
    at_once = list(clock.taken.seen)
    assert at_once == [f"bad{number}" for number in range(len(at_once))]
    assert NAMESPACE.work.at_once <= len(at_once) * WORK_SECONDS <= NAMESPACE.work.at_once + 0.2
    changes.take("good", 0, lambda: clock.change("good"))
    changes.take("", 0, lambda: clock.change("a node"))
    assert clock.taken.seen[len(at_once) :] == ["good", "a node"]
    await clock.taken.until(lambda seen: len(seen) == len(at_once) + 4)
    assert clock.taken.seen[-2:] == ["bad99", "bad98"]
    await until(lambda: not changes)
    changes.take("bad", 0, lambda: clock.change("later"))
    assert clock.taken.seen[-1] == "later", "the debt is paid"


@in_virtual_time
async def test_a_turn_of_the_loop_takes_one_change_of_all_namespaces() -> None:
    clock, loop = Clock(), asyncio.get_running_loop()
    changes, order = postponed(clock), list[str]()

    def change() -> None:
        order.append("change")
        loop.call_soon(order.append, "turn")
        clock.change("")

    for number in range(2 * CHANGES):
        changes.take(f"bad{number % CHANGES}", number, change)
    at_once = len(order)
    assert at_once < 2 * CHANGES, "the longest waits are over at the same time"
    await clock.taken.until(lambda seen: len(seen) == 2 * CHANGES)
    later = order[2 * at_once :]
    assert later[:-1:2] == ["change"] * len(later[:-1:2])
    assert later[1::2] == ["turn"] * len(later[1::2])


async def test_a_new_callback_hears_of_the_jobs_of_others_before_many_costly_ones(
    tmp_path: Path,
) -> None:
    bad = [item(f"bad{number}", 3) for number in range(CHANGES)]
    server, clock = Server([*bad, item("good", 3).replace("ns", "other")], []), Clock()
    async with server.client(tmp_path) as client:
        client.objects = ObjectBudgets(asyncio.get_running_loop().time, lambda: clock.seconds)
        informer: Informer[JobObject] = Informer(client, JobObject)
        async with running(informer.run()):
            await informer.synced.wait()
            informer.subscribe_in_turn(lambda _, new: clock.change((new or {})["metadata"]["name"]))
            assert "good" in clock.taken.seen
            assert len(clock.taken.seen) < CHANGES / 2


@in_virtual_time
async def test_a_change_that_fails_loses_no_other() -> None:
    clock = Clock()
    changes = postponed(clock)
    for number in range(CHANGES):
        changes.take("bad", number, lambda number=number: clock.change(str(number)))
    waiting = len(clock.taken.seen)

    def fail() -> None:
        raise ValueError("odd")

    errors: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    changes.take("bad", waiting, fail)
    await clock.taken.until(lambda seen: len(seen) == CHANGES - 1)
    assert clock.taken.seen == [str(one) for one in range(CHANGES) if one != waiting]
    assert len(errors) == 1


@in_virtual_time
async def test_cheap_changes_have_no_bound() -> None:
    taken = list[int]()
    changes = Postponed(ObjectBudgets(asyncio.get_running_loop().time, lambda: 0.0))
    for number in range(20_000):
        changes.take("large", number, lambda number=number: taken.append(number))
    assert len(taken) == 20_000


@in_virtual_time
async def test_a_collection_of_garbage_is_charged_to_nobody() -> None:
    work = iter([0.0, 60.0, 60.0, 60.0])
    changes = Postponed(ObjectBudgets(asyncio.get_running_loop().time, work.__next__))
    taken = list[int]()
    changes.take("large", 0, lambda: taken.append(0))
    changes.take("large", 1, lambda: taken.append(1))
    assert taken == [0, 1]


@in_virtual_time
async def test_an_informer_follows_another_namespace_while_one_waits(tmp_path: Path) -> None:
    """The version is that of the newest change, taken or not, and a deletion is no lost change."""
    told = [("MODIFIED", item("bad", version)) for version in range(10, 10 + CHANGES)]
    told += [("DELETED", item("gone", 998)), ("ADDED", item("good", 999).replace("ns", "other"))]
    server = Server([item("bad", 3), item("gone", 3)], told)
    clock = Clock()
    async with server.client(tmp_path) as client:
        client.objects = ObjectBudgets(asyncio.get_running_loop().time, lambda: clock.seconds)
        informer: Informer[JobObject] = Informer(client, JobObject)
        seen = Watcher[str]()

        def changed(old: JobObject | None, new: JobObject | None) -> None:
            clock.seconds += WORK_SECONDS
            found = (new or old or {})["metadata"]
            seen(f"{found['name']}{found['resourceVersion']}{'' if new else ' gone'}")

        informer.subscribe(changed)
        async with running(informer.run()):
            await seen.until(lambda all: "good999" in all)
            assert informer._version == "999"
            assert len(seen.seen) < CHANGES
            assert "gone998 gone" not in seen.seen
            await seen.until(lambda all: all[-2:] == ["bad109", "gone998 gone"])


def test_an_object_of_too_many_values_is_not_decoded() -> None:
    lists = ",".join(["[]"] * (COMMAS_MAX + 2))
    wide = item("wide", 1, spec=f'{{"x":[{lists}]}}').encode()
    assert excess(wide) == "has more than 65536 commas"


@pytest.mark.parametrize("form", ["too long", "5,000 digits", "no number"])
def test_the_identity_of_an_odd_object_is_read(form: str) -> None:
    head = head_of(odd("bad", 7)[form].encode())
    assert (head.key, head.uid, head.version) == (("ns", "bad"), "bad", "7")


def test_refusals_of_one_namespace_write_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    refusals = Refusals(JobObject, ObjectBudgets(clock=lambda: 0.0))
    with caplog.at_level(logging.WARNING):
        for number in range(1000):
            refusals.unreadable(head_of(item("a", 1).encode()), ValueError(f"odd {number}"))
        other = json.dumps({"metadata": {"name": "b", "namespace": "other"}}).encode()
        refusals.unreadable(head_of(other), ValueError("odd"))
    assert len(caplog.records) == NAMESPACE.lines_a_minute + 1


def test_a_text_of_strings_that_do_not_end_is_read_once() -> None:
    """Each of 200,000 quotes was taken for the begin of a string, and read to the end: 140 s."""
    assert is_too_deep(b"[" * 65 + b"]" * 65 + b'"\\' * 200_000)
    assert not is_too_deep(b"[" * 9 + b'"\\' * 200_000 + b"[" * 99)
