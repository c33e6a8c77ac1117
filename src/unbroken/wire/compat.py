"""Functions that Python 3.9 lacks, on which workers may run."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from itertools import zip_longest
from typing import Any, TypeVar, overload

A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
_END = object()


@overload
def zip_equal(first: Iterable[A], second: Iterable[B], /) -> Iterator[tuple[A, B]]: ...
@overload
def zip_equal(
    first: Iterable[A], second: Iterable[B], third: Iterable[C], /
) -> Iterator[tuple[A, B, C]]: ...
def zip_equal(*rows: Iterable[Any]) -> Iterator[tuple[Any, ...]]:
    """Return what `zip(*rows, strict=True)` does since Python 3.10. ValueError: lengths differ."""
    if sys.version_info < (3, 10):
        return _zip_equal(rows)
    return zip(*rows, strict=True)


def _zip_equal(rows: Iterable[Iterable[Any]]) -> Iterator[tuple[Any, ...]]:
    for items in zip_longest(*rows, fillvalue=_END):
        if any(item is _END for item in items):
            raise ValueError("the lengths differ")
        yield items
