"""The reader of SPDY frames is fed garbage and changed frames of kubectl.

Only SpdyError may come out, in little time and memory.
"""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.attack.listeners import fuzzed
from tests.spdy_client import RECORDED, Client, script
from unbroken.local.node.port_forwarding import Reader, SpdyError

HELD_MAX = 1 << 20
"""Bytes that a reader may hold at most: a control frame and what it decompresses to."""


def read(data: bytes, size: int) -> None:
    """Read the bytes in parts of this size."""
    reader = Reader()
    try:
        for at in range(0, len(data), size):
            reader.feed(data[at : at + size])
    except SpdyError:
        return


@fuzzed
@given(st.binary(max_size=2000), st.integers(1, 300))
def test_garbage(data: bytes, size: int) -> None:
    read(data, size)


@fuzzed
@given(
    st.sampled_from([RECORDED, script()[0]]),
    st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=5),
    st.integers(1, 300),
)
def test_changed_frames(data: bytes, changes: list[tuple[int, int]], size: int) -> None:
    changed = bytearray(data)
    for at, byte in changes:
        changed[at % len(changed)] = byte
    read(bytes(changed), size)


@fuzzed
@given(st.binary(max_size=500), st.sampled_from([1, 2, 3, 4, 6, 7, 8, 9, 10]), st.integers(0, 255))
def test_control_frames_of_garbage(body: bytes, kind: int, flags: int) -> None:
    client = Client()
    read(client.control(kind, body, flags=flags), 1 << 20)
    read(client.control(kind, b"\0\0\0\1\0\0\0\0\0\0" + client.block(body), flags=flags), 1 << 20)


@pytest.mark.parametrize("kind", [1, 2, 8])
def test_header_blocks_that_expand_take_little_memory(kind: int) -> None:
    client = Client()
    bomb = client.control(kind, b"\0\0\0\1\0\0\0\0\0\0" + client.block(b"\0" * 10_000_000))
    assert len(bomb) < 16_000
    tracemalloc.start()
    try:
        with pytest.raises(SpdyError):
            Reader().feed(bomb)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < HELD_MAX
