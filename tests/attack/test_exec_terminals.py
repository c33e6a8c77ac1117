"""Sizes of a terminal that end no session: deep, infinite, long or of another type."""

from __future__ import annotations

import os
import pty
from collections.abc import Iterator

import pytest

from unbroken.local.node.processes.exec_session import _resize


@pytest.fixture
def terminal() -> Iterator[int]:
    """A terminal of 40 lines and 120 columns."""
    ours, theirs = pty.openpty()
    _resize(ours, b'{"Height": 40, "Width": 120}')
    assert os.get_terminal_size(theirs) == (120, 40)
    yield ours
    os.close(ours)
    os.close(theirs)


@pytest.mark.parametrize(
    "size",
    [
        *(b"", b"null", b"7", b"[]", b"{}", b"[" * 200_000, b'{"a":' * 200_000),
        *(b'{"Height": %s, "Width": 1}' % one for one in (b"Infinity", b"NaN", b"1e999", b'"1"')),
        *(b'{"Height": %s, "Width": 1}' % one for one in (b"-1", b"65536", b"1.5", b"9" * 5_000)),
    ],
)
def test_a_size_that_cannot_be_read_changes_nothing(terminal: int, size: bytes) -> None:
    _resize(terminal, size)
    assert os.get_terminal_size(terminal) == (120, 40)
