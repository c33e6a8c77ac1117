"""The page: what is read is what was written, whole."""

from __future__ import annotations

import math
import struct
import zlib

import pytest

from unbroken.wire import worker
from unbroken.wire.worker import NO_STEP, PAGE_BYTES, PLACES, Page, empty, read

NOTHING_SAVED = (NO_STEP, math.nan)


def write(page: bytearray, number: int, step: int, *values: float, texts: bytes = b"") -> int:
    """Write a record; where it ends."""
    counts = (len(values), len(texts))
    fields = (number, 3, 0.75, step, number, 1.5, 2, 0.5, 3, 0.25, 1, *NOTHING_SAVED)
    body = worker.RECORDS[len(values)].pack(*fields, *counts, *values) + texts
    data, start = worker.seal(zlib.crc32(body)) + body, PLACES[number & 1]
    page[start : start + len(data)] = data
    return start + len(data)


def test_a_record_is_read_as_it_was_written() -> None:
    page = bytearray(empty())
    write(page, 1, 7, 2.5, math.inf, texts=worker.text("eval", ["loss", "Norm é"]))
    assert read(bytes(page)) == (
        1,
        Page(
            first_step=3,
            first_step_at=0.75,
            step=7,
            calls=1,
            step_at=1.5,
            phase="eval",
            visit=2,
            phase_at=0.5,
            visit_calls=3,
            longest_gap=0.25,
            metrics={"loss": 2.5, "Norm é": math.inf},
            bad_calls=1,
        ),
    )


def test_the_newest_of_two_is_read_whichever_place_it_has() -> None:
    page = bytearray(empty())
    for number in range(1, 6):
        write(page, number, 10 * number)
        found = read(bytes(page))
        assert found is not None
        assert (found[0], found[1].step) == (number, 10 * number)


@pytest.mark.parametrize("written", range(0, 96, 7))
def test_a_write_that_was_cut_short_anywhere_leaves_the_one_before(written: int) -> None:
    page = bytearray(empty())
    write(page, 1, 10, texts=b"first")
    write(page, 2, 20, texts=b"second")
    whole = bytearray(page)
    write(whole, 3, 30, texts=b"third")
    start = PLACES[1]
    page[start : start + written] = whole[start : start + written]
    found = read(bytes(page))
    assert found is not None
    assert found[1].step == 20


def test_torn_twice_is_told_apart_from_never_written() -> None:
    page = bytearray(empty())
    assert read(bytes(page)) == (0, Page())
    page[PLACES[0] + 8] = page[PLACES[1] + 8] = 1
    assert read(bytes(page)) is None


def test_any_bytes_are_no_more_than_torn() -> None:
    head = empty()[: worker.HEADER.size]
    for pattern in (b"\xff", b"\x00\x01", b"\x10\x27"):
        assert read(head + (pattern * PAGE_BYTES)[: PAGE_BYTES - len(head)]) is None


def test_a_page_of_another_version_and_what_is_no_page_is_not_read() -> None:
    other = struct.pack("=8sI", worker.MAGIC, 1).ljust(PAGE_BYTES, b"\0")
    assert (worker.version(other), read(other)) == (1, None)
    assert worker.version(bytes(PAGE_BYTES)) is None
    assert (worker.version(b""), read(empty()[:100])) == (None, None)


def test_the_largest_record_fits_into_its_place() -> None:
    page = bytearray(empty())
    names = [f"{index:02}" + "é" * 200 for index in range(40)]
    texts = worker.text("p" * 500, names)
    ends = [write(page, number, 1, *[0.5] * 16, texts=texts) for number in (2, 1)]
    assert ends[0] <= PLACES[1]
    assert ends[1] <= PAGE_BYTES
    found = read(bytes(page))
    assert found is not None
    assert len(found[1].metrics) == 16
    assert next(iter(found[1].metrics)) == "00" + "é" * 23
