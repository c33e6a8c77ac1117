"""Reading a log of the kernel that grows, is cut, replaced, full of garbage, or not there yet."""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.watching import Watcher, running
from unbroken.nodes.kernel_reader import KMSG, FileReader, KmsgReader, Read


@asynccontextmanager
async def followed(path: Path, cursor: str = "") -> AsyncIterator[Watcher[str]]:
    """Texts of the lines of a file, as they come."""
    seen: Watcher[str] = Watcher()

    async def follow() -> None:
        async for line, _ in FileReader(path, cursor).lines():
            seen(line.text)

    async with running(follow()):
        yield seen


def has(*texts: str) -> Callable[[list[str]], bool]:
    return lambda seen: seen == list(texts)


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def read(path: Path, cursor: str = "") -> list[Read]:
    reader = FileReader(path, cursor)
    try:
        return list(reader.read())
    finally:
        reader.close()


async def test_lines_are_told_when_they_are_whole(tmp_path: Path) -> None:
    log = tmp_path / "kernel.log"
    log.write_text("one\ntw")
    async with followed(log) as seen:
        await seen.until(has("one"))
        append(log, "o\nthree\n")
        await seen.until(has("one", "two", "three"))


async def test_a_file_that_comes_later_is_found(tmp_path: Path) -> None:
    async with followed(tmp_path / "kernel.log") as seen:
        (tmp_path / "other").write_text("x\n")
        append(tmp_path / "kernel.log", "one\n")
        await seen.until(has("one"))


async def test_a_file_that_is_cut_or_replaced_is_read_on(tmp_path: Path) -> None:
    log = tmp_path / "kernel.log"
    log.write_text("one is long\n")
    async with followed(log) as seen:
        await seen.until(has("one is long"))
        os.truncate(log, 0)
        append(log, "two\n")
        await seen.until(has("one is long", "two"))
        append(log, "three\n")
        log.rename(tmp_path / "kernel.log.1")
        log.write_text("four\n")
        await seen.until(has("one is long", "two", "three", "four"))


def test_who_comes_back_goes_on_behind_the_cursor(tmp_path: Path) -> None:
    log = tmp_path / "kernel.log"
    log.write_text("one\ntwo\n")
    (_, first), (_, second) = read(log)
    assert [line.text for line, _ in read(log, first)] == ["two"]
    assert read(log, second) == []
    append(log, "three\n")
    os.utime(log, (1.0, 1.0))
    assert [line.text for line, _ in read(log, second)] == ["three"]


def test_without_a_cursor_an_old_file_is_history(tmp_path: Path) -> None:
    log = tmp_path / "kernel.log"
    log.write_text("one\n")
    assert len(read(log)) == 1
    os.utime(log, (1.0, 1.0))
    assert read(log) == []
    assert read(log, "file:1:1") == read(log, "kmsg:x:1") == read(log, "what") == []


def test_of_a_large_file_only_the_end_is_read(tmp_path: Path) -> None:
    log = tmp_path / "kernel.log"
    log.write_text("".join(f"line {number} {'x' * 90}\n" for number in range(20_000)))
    texts = [line.text for line, _ in read(log)]
    assert texts[-1].startswith("line 19999 ")
    assert texts[0].startswith("line ")
    assert 2000 < len(texts) < 3000


def test_garbage_is_passed_over(tmp_path: Path) -> None:
    log = tmp_path / "kernel.log"
    garbage = random.Random(1).randbytes(300_000).replace(b"\n", b" ")
    log.write_bytes(garbage + b"\n\0\0\n\xff\xfe\n\n" + b"last\n")
    assert read(log)[-1][0].text == "last"


def test_a_line_without_an_end_fills_no_memory(tmp_path: Path) -> None:
    log = tmp_path / "kernel.log"
    log.write_text("")
    reader = FileReader(log, "")
    assert list(reader.read()) == []
    with log.open("ab") as file:
        file.write(b"x" * 1_000_000)
    assert list(reader.read()) == []
    append(log, "y\nnext\n")
    assert [line.text for line, _ in reader.read()][-1] == "next"
    reader.close()


@pytest.mark.slow
def test_the_kernel_s_own_log_is_read_behind_the_cursor() -> None:
    reader = KmsgReader(Path("/"), "")
    try:
        reader.open()
    except OSError as error:
        pytest.skip(f"{KMSG} cannot be read here: {error}")
    reader._uptime_seconds = 0.0  # however long ago the last message was
    records = list(reader.read())
    reader.close()
    if len(records) < 2:
        pytest.skip("the kernel has said nothing here")
    again = KmsgReader(Path("/"), records[-2][1])
    again.open()
    assert next(iter(again.read())) == records[-1]
    again.close()
