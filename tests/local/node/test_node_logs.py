"""Log files: framed, rotated, read back, followed."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from unbroken.core.logs.origins import DROPPED_LINES
from unbroken.errors import SpecError
from unbroken.local.node.logs import LogOptions, log_options, stream
from unbroken.local.node.processes import cri_log
from unbroken.local.node.processes.cri_log import MAX_LINE, Entry, LogFile, framed, parsed, stamp

WHEN = "2026-01-02T03:04:05.000000006Z"
NANOSECONDS = 1_767_323_045_000_000_006


def test_stamps_have_nine_digits() -> None:
    assert stamp(NANOSECONDS) == WHEN


@pytest.mark.parametrize(
    ("data", "texts", "rest"),
    [
        (b"", [], b""),
        (b"a\n", ["F a"], b""),
        (b"a\nb\nc", ["F a", "F b"], b"c"),
        (b"\n\n", ["F ", "F "], b""),
        (b"x" * MAX_LINE + b"yz", ["P " + "x" * MAX_LINE], b"yz"),
        (b"x" * MAX_LINE + b"yz\n", ["P " + "x" * MAX_LINE, "F yz"], b""),
        (b"a\r\n", ["F a\r"], b""),
    ],
)
def test_framing(data: bytes, texts: list[str], rest: bytes) -> None:
    entries, left = framed("stdout", data, WHEN)
    assert entries.decode() == "".join(f"{WHEN} stdout {text}\n" for text in texts)
    assert left == rest


@pytest.mark.parametrize("line", [b"", b"x", b"t stdout X a", b"t stdout"])
def test_what_is_no_entry_is_left_out(line: bytes) -> None:
    assert parsed(line) is None


def test_entries_are_read_as_they_were_written() -> None:
    assert parsed(f"{WHEN} stderr P a b".encode()) == Entry(WHEN, "stderr", True, b"a b")


def written(path: Path, *lines: bytes) -> LogFile:
    """A log with these lines, one a second."""
    log = LogFile(str(path))
    log.open()
    for number, line in enumerate(lines):
        log.write("stdout", line, (1000 + number) * 1_000_000_000)
    return log


async def read(path: Path, options: LogOptions) -> bytes:
    """Return the whole log of a container that has ended."""
    ended = asyncio.Event()
    ended.set()
    return b"".join([data async for data in stream(path, options, ended)])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (LogOptions(), b"one\ntwo\nthree"),
        (LogOptions(tail_lines=2), b"two\nthree"),
        (LogOptions(tail_lines=0), b""),
        (LogOptions(tail_lines=9), b"one\ntwo\nthree"),
        (LogOptions(limit_bytes=5), b"one\nt"),
        (LogOptions(since=stamp(1001 * 1_000_000_000)), b"two\nthree"),
        (
            LogOptions(timestamps=True, tail_lines=2),
            b"1970-01-01T00:16:41.000000000Z two\n1970-01-01T00:16:42.000000000Z three",
        ),
    ],
)
async def test_options_of_a_reader(tmp_path: Path, options: LogOptions, expected: bytes) -> None:
    log = written(tmp_path / "log", b"one\n", b"two\n", b"three")
    log.finish(1002 * 1_000_000_000)
    assert await read(tmp_path / "log", options) == expected


async def test_a_long_line_has_one_time(tmp_path: Path) -> None:
    written(tmp_path / "log", b"x" * (2 * MAX_LINE + 5) + b"\n", b"next\n")
    found = (await read(tmp_path / "log", LogOptions(timestamps=True))).decode().splitlines()
    assert [len(line.partition(" ")[2]) for line in found] == [2 * MAX_LINE + 5, 4]


async def test_a_reader_of_one_stream_sees_no_other(tmp_path: Path) -> None:
    log = written(tmp_path / "log", b"one\n", b"two\n")
    log.write("stderr", b"odd\n", NANOSECONDS)
    for name, expected in {
        "Stdout": b"one\ntwo\n",
        "Stderr": b"odd\n",
        "All": b"one\ntwo\nodd\n",
    }.items():
        assert await read(tmp_path / "log", log_options({"stream": name}, 0.0)) == expected


async def test_rotation_keeps_the_newest_files_and_the_reader_joins_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cri_log, "MAX_BYTES", 400)
    written(tmp_path / "log", *(f"line {number}\n".encode() for number in range(100)))
    assert len(os.listdir(tmp_path)) == cri_log.MAX_FILES + 1
    note, *found = (await read(tmp_path / "log", LogOptions())).decode().splitlines()
    numbers = [int(line.split()[1]) for line in found]
    assert numbers == list(range(numbers[0], 100))
    assert 20 < len(numbers) < 60
    match = DROPPED_LINES.match(note)
    assert match is not None
    assert int(match[1]) == numbers[0]
    assert await read(tmp_path / "log", LogOptions(tail_lines=1)) == b"line 99\n"


@pytest.mark.parametrize("burst", [1, 7, 30, 60, 100, 400])
async def test_a_follower_sees_each_line_or_how_many_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, burst: int
) -> None:
    monkeypatch.setattr(cri_log, "MAX_BYTES", 400)
    log, ended, written_lines, seen = written(tmp_path / "log"), asyncio.Event(), 0, b""
    log.write("stdout", b"begin\n", NANOSECONDS)
    async for data in stream(tmp_path / "log", LogOptions(follow=True), ended):
        seen += data
        if written_lines >= 1000:
            ended.set()
            continue
        for _ in range(burst):
            log.write("stdout", f"line {written_lines}\n".encode(), NANOSECONDS)
            written_lines += 1
    first, *lines = seen.decode().splitlines()
    assert first == "begin"
    expected = 0
    for line in lines:
        if match := DROPPED_LINES.match(line):
            assert burst > 20
            expected += int(match[1])
        else:
            assert line == f"line {expected}"
            expected += 1
    assert expected == written_lines


async def test_a_follower_sees_each_line_through_a_rotation_and_ends_with_the_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cri_log, "MAX_BYTES", 400)
    log = written(tmp_path / "log", b"first\n")
    ended = asyncio.Event()

    async def follow() -> bytes:
        seen = b""
        async for data in stream(tmp_path / "log", LogOptions(follow=True), ended):
            count = seen.count(b"\n")
            seen += data
            if count < 50:
                log.write("stdout", f"line {count}\n".encode(), NANOSECONDS)
            else:
                ended.set()
        return seen

    seen = (await follow()).decode().splitlines()
    assert seen == ["first", *(f"line {number}" for number in range(50))]


@pytest.mark.parametrize(
    "query",
    [
        {"tailLines": "-1"},
        {"tailLines": "x"},
        {"limitBytes": "0"},
        {"sinceSeconds": "1", "sinceTime": "2026-01-01T00:00:00Z"},
        {"sinceTime": "yesterday"},
        {"stream": "stdout"},
        {"stream": "Stdout", "tailLines": "1"},
    ],
)
def test_bad_options_are_refused(query: dict[str, str]) -> None:
    with pytest.raises(SpecError):
        log_options(query, 0.0)


def test_since_seconds_count_from_now() -> None:
    assert log_options({"sinceSeconds": "10"}, 1010.0).since == stamp(1000 * 1_000_000_000)
