"""Waiting for what a program under test does, without sleeping."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any, Generic, TypeVar

T = TypeVar("T")

PATIENCE_SECONDS = 40.0
"""Seconds that no event of a test takes, except on a very busy machine."""


class Watcher(Generic[T]):
    """Collects what a callback is given and lets a test wait for it."""

    def __init__(self) -> None:
        self.seen: list[T] = []
        self._changed = asyncio.Event()

    def __call__(self, item: T) -> None:
        self.seen.append(item)
        self._changed.set()

    def change(self, old: object, new: object) -> None:
        """Collect names as an informer's callback: `+a`, `~a` or `-a`."""
        item: Any = new if new is not None else old
        sign = "+" if old is None else "-" if new is None else "~"
        self(f"{sign}{item.metadata.name}")  # type: ignore[arg-type]

    async def until(self, holds: Callable[[list[T]], bool]) -> None:
        """Return once `holds` is true of what was seen."""
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                while not holds(self.seen):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise AssertionError(f"not in time; seen: {self.seen}") from None


@asynccontextmanager
async def running(*programs: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run programs that never end while the block runs; cancel them at its end."""
    async with asyncio.TaskGroup() as tasks:
        started = [tasks.create_task(program) for program in programs]
        try:
            yield
        finally:
            for task in started:
                task.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.gather(*started, return_exceptions=True)
