"""Bytes into lines: whole, clean and bounded, however they arrive."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from unbroken.core.logs.lines import LINE_BYTES_MAX, LineAssembler

CASES = {
    "lines end at newlines": ([b"one\ntwo\n"], [b"one", b"two"]),
    "half a line waits for its end": ([b"loss: 12", b"3.5\n"], [b"loss: 123.5"]),
    "an unfinished line is not handed out": ([b"one\ntwo"], [b"one"]),
    "windows endings are one end": ([b"one\r", b"\ntwo\r\n"], [b"one", b"two"]),
    "blank lines are none": ([b"\n\n \n\r\n"], [b" "]),
    "a bar that ends with a return is a line each": ([b"1%\r2%\r"], [b"1%", b"2%"]),
    "the newest state of a bar counts before its end": ([b"\r 1%", b"\r 2%"], [b" 1%", b" 2%"]),
    "a bar that was handed out is not repeated at its end": ([b"\r 1%", b"\n"], [b" 1%"]),
    "a bar that grew after it was handed out comes again": (
        [b"\r 1%", b" done\n"],
        [b" 1%", b" 1% done"],
    ),
    "a newline ends the bar's privilege": ([b"\r 1%\nepo", b"ch\n"], [b" 1%", b"epoch"]),
    "colours are stripped": ([b"\x1b[1;32mINFO\x1b[0m loss\n"], [b"INFO loss"]),
    "a colour split over reads is stripped": ([b"\x1b[3", b"2mok\n"], [b"ok"]),
    "cursor movement of nested bars leaves nothing": ([b"\x1b[A\x1b[A\n"], []),
    "hyperlinks leave their text": (
        [b"\x1b]8;;http://x\x1b\\text\x1b]8;;\x07 end\n"],
        [b"text end"],
    ),
    "a bell is no text": ([b"\adone\n"], [b"done"]),
    "control bytes are dropped": ([b"\x00lo\x08ss\x7f=1\x0b\n"], [b"loss=1"]),
    "invalid UTF-8 is replaced": ([b"\xff\xfeloss=1\n"], ["\ufffd\ufffdloss=1".encode()]),
    "a character split over reads is whole": (
        ["é=1\n".encode()[:1], "é=1\n".encode()[1:]],
        ["é=1".encode()],
    ),
    "tabs stay": ([b"a\tb\n"], [b"a\tb"]),
}


@pytest.mark.parametrize(("chunks", "lines"), CASES.values(), ids=CASES)
def test_lines(chunks: list[bytes], lines: list[bytes]) -> None:
    assembler = LineAssembler()
    assert [line for chunk in chunks for line in assembler.feed(chunk)] == lines


def test_a_bar_read_in_part_waits_for_the_rest() -> None:
    assembler = LineAssembler()
    assert assembler.feed(b"\r 1", is_drained=False) == []
    assert assembler.feed(b"0%") == [b" 10%"]


def test_the_end_of_the_stream_ends_the_last_line_once() -> None:
    assembler = LineAssembler()
    assert assembler.feed(b"Segmentation fault") == []
    assert assembler.close() == [b"Segmentation fault"]
    assert assembler.close() == []


def test_the_end_of_the_stream_does_not_repeat_a_bar() -> None:
    assembler = LineAssembler()
    assert assembler.feed(b"\r100%") == [b"100%"]
    assert assembler.close() == []


def test_a_10_mb_line_comes_in_bounded_pieces_with_nothing_lost() -> None:
    assembler = LineAssembler()
    chunk, found, held = b"x" * 65_536, [], 0
    for _ in range(160):
        found += assembler.feed(chunk)
        held = max(held, len(assembler._pending))
    assert held < LINE_BYTES_MAX
    found += assembler.feed(b"rest\nnext\n")
    assert max(map(len, found)) == LINE_BYTES_MAX
    assert (b"".join(found[:-1]), found[-1]) == (chunk * 160 + b"rest", b"next")
    assert LineAssembler().feed(chunk * 160 + b"rest\nnext\n") == found


def test_a_long_line_is_cut_before_a_space() -> None:
    line = b"y" * LINE_BYTES_MAX + b" loss=1" * 20_000
    first, *pieces = LineAssembler().feed(line + b"\n")
    assert len(pieces) == 3
    assert first + b"".join(pieces) == line
    for piece in pieces:
        assert piece.startswith(b" loss=1 ")
        assert piece.endswith(b" loss=1")


def test_what_a_pending_line_has_got_is_shown_once() -> None:
    assembler = LineAssembler(20)
    seen = []
    for chunk in (b"a\nstep=1", b"", b" step=2", b" step=3", b" \x1b[1mend", b"\nb", b"\n"):
        assembler.feed(chunk)
        seen.append(b"".join(assembler.unfinished()))
    assert seen == [b"step=1", b"", b" step=2", b" step=3", b" end", b"b", b""]


def test_a_bar_that_was_handed_out_is_not_unfinished() -> None:
    assembler = LineAssembler()
    assert assembler.feed(b"\r 1%") == [b" 1%"]
    assert assembler.unfinished() == []


PIECES = st.sampled_from(
    b"a|loss=1|\n|\r|\r\n|\x1b[31m|\x1b|[0m|\x07|\xff|\xc3|\xa9|\x00| |xxxxxxxxx|\x1b]0;t".split(
        b"|"
    )
)
DATA = st.lists(PIECES, max_size=40).map(b"".join) | st.binary(max_size=200)


@given(DATA, st.lists(st.integers(0, 200)))
def test_reads_may_split_anywhere(data: bytes, cuts: list[int]) -> None:
    whole, split = LineAssembler(20), LineAssembler(20)
    places = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    pieces = [data[a:b] for a, b in pairwise(places)]
    expected = whole.feed(data, is_drained=False) + whole.close()
    found = [line for piece in pieces for line in split.feed(piece, is_drained=False)]
    assert found + split.close() == expected


@example([b"\raaloss=1xxxxxxxxx \xff", b"!"], True)
@example([b"\raaloss=1xxxxxxxxx \x1b", b"!"], True)
@given(st.lists(DATA), st.booleans())
def test_lines_are_clean_and_bounded_whatever_comes(chunks: list[bytes], is_drained: bool) -> None:
    assembler = LineAssembler(20)
    lines = [line for chunk in chunks for line in assembler.feed(chunk, is_drained)]
    for line in lines + assembler.close():
        text = line.decode()
        assert 0 < len(text) <= 20
        assert not set(text) & set("\x00\x07\n\r\x1b\x7f")
