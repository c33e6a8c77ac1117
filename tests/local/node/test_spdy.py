"""Frames of SPDY as kubectl sends them, and bytes that are none."""

from __future__ import annotations

import random
import struct
import zlib

import pytest

from tests.spdy_client import RECORDED, Client, script
from unbroken.local.node.port_forwarding import (
    DICTIONARY,
    HEADERS_BYTES,
    HEADERS_MAX,
    Data,
    Opened,
    Reader,
    SpdyError,
    Writer,
)


def test_the_dictionary_is_that_of_the_protocol() -> None:
    # Each zlib stream of SPDY/3 begins with this checksum of its dictionary.
    assert (len(DICTIONARY), zlib.adler32(DICTIONARY)) == (1423, 0xE3C6A7C2)


def test_the_recorded_start_of_kubectl_is_read() -> None:
    error = {"streamtype": "error", "port": "8000", "requestid": "0"}
    found = Reader().feed(RECORDED)
    assert Opened(1, error, is_final=False) in found
    assert Opened(3, {**error, "streamtype": "data"}, is_final=False) in found
    assert found[1] == Data(1, b"", is_final=True)
    assert found[-1] == Data(3, b"hello", is_final=False)


def joined(frames: list[object]) -> list[object]:
    """Put data together that came in parts."""
    found: list[object] = []
    for frame in frames:
        last = found[-1] if found else None
        if isinstance(frame, Data) and isinstance(last, Data) and not last.is_final and frame.data:
            found[-1] = Data(frame.stream, last.data + frame.data, frame.is_final)
        else:
            found.append(frame)
    return found


@pytest.mark.parametrize("seed", range(20))
def test_frames_are_the_same_however_their_bytes_are_cut(seed: int) -> None:
    sent, frames = script()
    chance, reader, found = random.Random(seed), Reader(), list[object]()
    at = 0
    while at < len(sent):
        size = chance.randint(1, 1 + chance.randint(0, 40))
        found += reader.feed(sent[at : at + size])
        at += size
    assert joined(found) == frames


BOMB = b"\0" * (HEADERS_BYTES + 1)
REFUSED = {
    "another version": Client().control(1, b"\0" * 20, version=2),
    "too long": struct.pack(">II", 1 << 31 | 3 << 16 | 1, 1 << 20),
    "too short": Client().control(1, b"\0" * 9),
    "an even stream": Client().opened(2, {}),
    "no zlib": Client().control(1, struct.pack(">IIH", 1, 0, 0) + b"garbage"),
    "a bomb": Client().control(1, struct.pack(">IIH", 1, 0, 0) + Client().block(BOMB)),
    "too many headers": Client().opened(1, {str(n): "" for n in range(HEADERS_MAX + 1)}),
    "headers cut": Client().control(
        1, struct.pack(">IIH", 1, 0, 0) + Client().block(struct.pack(">II", 1, 900))
    ),
    "no number of headers": Client().control(1, struct.pack(">IIH", 1, 0, 0) + Client().block(b"")),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bytes_that_are_no_frames_are_refused(name: str) -> None:
    with pytest.raises(SpdyError):
        Reader().feed(REFUSED[name])


def test_a_stream_is_opened_once() -> None:
    made = Client()
    reader = Reader()
    reader.feed(made.opened(3, {}))
    with pytest.raises(SpdyError, match="must be odd and above 3"):
        reader.feed(made.opened(1, {}))


def test_a_long_data_frame_is_passed_on_as_it_comes() -> None:
    reader = Reader()
    assert reader.feed(struct.pack(">II", 1, 1 << 24 | 1000)) == []
    assert reader.feed(b"a" * 600) == [Data(1, b"a" * 600, is_final=False)]
    assert reader.feed(b"b" * 400) == [Data(1, b"b" * 400, is_final=True)]


def test_what_a_server_says() -> None:
    writer, inflate = Writer(), zlib.decompressobj(zdict=DICTIONARY)
    for stream in (1, 3):
        frame = writer.reply(stream)
        assert struct.unpack(">III", frame[:12]) == (1 << 31 | 3 << 16 | 2, len(frame) - 8, stream)
        assert inflate.decompress(frame[12:]) == struct.pack(">I", 0)
    assert writer.data(3, b"x", is_final=True) == b"\0\0\0\3\1\0\0\1x"
    assert writer.reset(3, 5) == bytes.fromhex("80030003 00000008 00000003 00000005")
    assert writer.ping(7) == bytes.fromhex("80030006 00000004 00000007")
