"""The running informers and queues of this program, for its health checks."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, TypeVar

T = TypeVar("T")
Run = Callable[[T], Coroutine[Any, Any, None]]

_FOUND: ContextVar[set[Any] | None] = ContextVar("observed", default=None)


@contextmanager
def observing() -> Iterator[set[Any]]:
    """Yield the set of objects that run in tasks made within the block; the set is kept current."""
    result: set[Any] = set()
    token = _FOUND.set(result)
    try:
        yield result
    finally:
        _FOUND.reset(token)


def observed(run: Run[T]) -> Run[T]:
    """Make a method `run` whose object is found by `observing` for as long as it runs."""

    @wraps(run)
    async def listed(self: T) -> None:
        result = _FOUND.get()
        if result is None:
            await run(self)
            return
        result.add(self)
        try:
            await run(self)
        finally:
            result.discard(self)

    return listed
