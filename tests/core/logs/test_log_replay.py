"""Recorded logs: the times in lines, who wrote them, and what the rules make of them."""

from __future__ import annotations

import heapq
from typing import Any

import pytest

from unbroken.core.logs.origins import BareLine, FileOrigin, Prefix, origin_of, rank_of, take_off
from unbroken.core.logs.recorded import Reading, Recorded, numbered
from unbroken.core.logs.replay import Replay
from unbroken.core.logs.rule_sets import RuleSet
from unbroken.core.logs.times import Times
from unbroken.errors import SpecError
from unbroken.spec.job.types import read_watch

AT = 1750139489.0
"""2025-06-17 05:51:29 UTC."""
YEARLESS = AT - 1750139489 + 961221089.0
"""The same day and time in 2000, as a log without years means it."""


@pytest.mark.parametrize(
    ("line", "at"),
    [
        ("2025-06-17T05:51:29Z x", AT),
        ("2025-06-17T07:51:29.5+02:00 x", AT + 0.5),
        ("2025-06-17 00:51:29 -0500 x", AT),
        ("2025-06-17 05:51:29,300 [INFO] __main__: x", AT + 0.3),
        ("INFO [2025-06-17 05:51:29] iteration 1", AT),
        ("2025/06/17 05:51:29 x", AT),
        ("Jun 17 05:51:29 host train[1]: x", YEARLESS),
        ("Jun  7 05:51:29 host x", YEARLESS - 10 * 86400),
        ("Tue Jun 17 05:51:29 2025 x", AT),
        ("[rank3]:[E617 05:51:29.000000000 ProcessGroupNCCL.cpp:616] x", YEARLESS),
        ("[rank3]:[E0617 05:51:29.250000 Process.cpp:616] x", YEARLESS + 0.25),
        ("1750139489.25 x", AT + 0.25),
        ("[1750139489250] x", AT + 0.25),
        ('{"level": "info", "ts": 1750139489.5}', AT + 0.5),
        ("step 17501394890 done", None),
        ("2025-06-31 25:61:29 x", None),
        ("x" * 400 + "2025-06-17 05:51:29", None),
    ],
)
def test_the_time_in_a_line(line: str, at: float | None) -> None:
    assert Times().read(line.encode()) == at


def test_times_without_a_year_or_a_day_go_on_past_its_end() -> None:
    times = Times()
    assert times.read(b"Dec 31 23:59:59 x") is not None
    before, after = times.read(b"Dec 31 23:59:59 x"), times.read(b"Jan  1 00:00:01 x")
    assert after - before == 2  # type: ignore[operator]
    clock = Times("%H:%M:%S")
    before, after = clock.read(b"at 23:59:58 x"), clock.read(b"at 00:00:01 x")
    assert after - before == 3  # type: ignore[operator]


def test_a_time_format_of_ones_own() -> None:
    assert Times("%d.%m.%Y %H:%M:%S").read(b"on 17.06.2025 05:51:29 x") == AT
    with pytest.raises(SpecError, match="none of auto, iso"):
        Times("german")
    with pytest.raises(SpecError, match="%Q is not known"):
        Times("%Q")


@pytest.mark.parametrize(
    ("path", "origin"),
    [
        ("logs/none_x/attempt_2/3/stdout.log", FileOrigin(attempt=2, local_rank=3)),
        ("a/attempt_0/1/stderr.log.gz", FileOrigin(local_rank=1, stream="stderr")),
        ("node1/attempt_0/1/stdout.log", FileOrigin(node=1, local_rank=1)),
        ("rank3.log", FileOrigin(rank=3)),
        ("log_rank_12.txt", FileOrigin(rank=12)),
        ("job-pods-2.log", FileOrigin(node=2)),
        ("var/log/pods/ns_job-pods-4_1a-2b/pytorch/0.log", FileOrigin(node=4)),
        ("train.log", FileOrigin()),
    ],
)
def test_who_wrote_a_file(path: str, origin: FileOrigin) -> None:
    assert origin_of(path) == origin


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (b"[default0]:x", BareLine(b"x", prefixes=((Prefix.LOCAL_RANK, 0),))),
        (b"[trainer1]: x", BareLine(b" x", prefixes=((Prefix.LOCAL_RANK, 1),))),
        (b"[13]: x", BareLine(b"x", prefixes=((Prefix.RANK, 13),))),
        (b"[rank3]: E", BareLine(b"[rank3]: E", prefixes=((Prefix.RANK, 3),))),
        (b"[job-pods-0]: a", BareLine(b"[job-pods-0]: a", prefixes=((Prefix.AGENT, 0),))),
        (b"[2025-06-17 05:51:29] x", BareLine(b"[2025-06-17 05:51:29] x")),
        (
            b"[pod/j-pods-1/main] 2025-06-17T05:51:29.123456789Z [default2]:x",
            BareLine(
                b"x",
                b"2025-06-17T05:51:29.123456789Z ",
                None,
                ((Prefix.NODE, 1), (Prefix.LOCAL_RANK, 2)),
            ),
        ),
        (
            b"2025-06-17T05:51:29.123456789Z stderr F x",
            BareLine(b"x", b"2025-06-17T05:51:29.123456789Z stderr F ", "stderr"),
        ),
        (b"2025-06-17 05:51:29,300 x", BareLine(b"2025-06-17 05:51:29,300 x")),
    ],
)
def test_what_tools_put_before_a_line(line: bytes, told: BareLine) -> None:
    assert take_off(line) == told


def test_ranks_of_other_nodes_need_their_number() -> None:
    told = take_off(b"[default1]:x")
    assert rank_of(FileOrigin(node=2), told, 8) == 17
    assert rank_of(FileOrigin(), told, None) == 1
    assert rank_of(FileOrigin(rank=5), BareLine(b"x"), None) == 5
    with pytest.raises(SpecError, match="--nproc-per-node"):
        rank_of(FileOrigin(node=2), told, None)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 10_000])
def test_lines_keep_their_numbers_however_they_are_cut(size: int) -> None:
    data = b"a\r\n\n\x1b[31mb\x1b[0m\n 1%\r 2%\r 3%\n" + b"x" * 200_000 + b"\nlast"
    chunks = [data[i : i + size] for i in range(0, len(data), size)]
    found = [(number, is_first, line[:9]) for number, is_first, line in numbered(chunks)]
    assert found == [
        (1, True, b"a"),
        (3, True, b"b"),
        (4, True, b" 1%"),
        (4, False, b" 2%"),
        (4, False, b" 3%"),
        (5, True, b"x" * 9),
        *[(5, False, b"x" * 9)] * 3,
        (6, True, b"last"),
    ]


def recorded(name: str, text: str, nproc: int | None = None) -> Recorded:
    found = Recorded(Reading(name, origin_of(name), nproc), [text.encode()])
    found.open()
    return found


def log(seconds: range, text: str = "loss=1") -> str:
    return "".join(f"2025-06-17 05:{51 + s // 60}:{s % 60:02} {text}\n" for s in seconds)


def replayed(rule: dict[str, Any], watch: str, *files: Recorded, nproc: int = 1) -> Replay:
    entry = {"name": "r", "logPattern": ".*loss=(.+)", **rule}
    rules = RuleSet("", "", (entry,), watches={"r": read_watch(watch)}).compiled()
    ranks = {line.rank for one in files for line in one.head}
    replay = Replay(rules, ranks, nproc)
    lines = list(heapq.merge(*files, key=lambda line: line.at))
    replay.start(lines[0].at)
    for line in lines:
        replay.read(line)
    replay.end(lines[-1].at)
    return replay


OFTEN = {"expectedRecurringFrequencyInSeconds": 10}


@pytest.mark.parametrize(
    ("watch", "found"), [("some", []), ("every", [(19, 1)]), ("node", [(19, 1)]), ("0", [])]
)
def test_who_must_log(watch: str, found: list[tuple[float, int]]) -> None:
    files = (recorded("rank0.log", log(range(60))), recorded("rank1.log", log(range(10))))
    replay = replayed(OFTEN, watch, *files)
    start = AT - 29
    assert [(f.violation.at - start, f.violation.rank) for f in replay.found] == found
    if found:
        newest = replay.found[0].newest
        assert newest
        assert (newest.place.file, newest.place.number) == ("rank1.log", 10)


def test_a_silence_is_found_where_it_was_and_told_to_have_ended() -> None:
    text = log(range(5)) + "Traceback\n" + log(range(40, 45))
    replay = replayed(OFTEN, "some", recorded("train.log", text))
    (found,) = replay.found
    assert (found.violation.at, found.over_at) == (AT - 29 + 14, AT - 29 + 40)
    ((heard, view),) = replay.views()
    assert (heard.matches, heard.gap_seconds, view.last_line[20:]) == (10, 36.0, "loss=1")
    assert heard.gap_place
    assert heard.gap_place.number == 7
    assert [one.at for one in replay.would_follow()] == [AT - 29 + 54]


def test_lines_without_a_time_take_the_one_before() -> None:
    text = "first\n" + log(range(3)) + "loss=9\n" + log(range(1)) + log(range(5, 6))
    one = recorded("train.log", text)
    ats = [line.at - AT + 29 for line in one]
    assert ats == [0, 0, 1, 2, 2, 2, 5]
    assert one.was_backward == 1
    assert not recorded("train.log", "a\nb\n").has_times
