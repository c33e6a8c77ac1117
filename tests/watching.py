"""Waiting for a state that a program under test reaches.

A test never waits for a time: it reads a state until the state holds. The limit is so generous that
it says something is wrong, and not that the machine is busy. What was seen last is then shown.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Generic, TypeVar

T = TypeVar("T")
Logs = Path | Callable[[], str] | None
"""A log, a directory of logs, or a function that returns them."""

PATIENCE_SECONDS = 120.0
"""Seconds that no event of a test takes, even beside other busy processes."""
POLL_SECONDS = 0.02
"""Seconds between two looks at a state that no event reports."""
SHOWN_CHARACTERS = 8_000
"""Characters shown of the last state, and of each log, from its end."""


async def until(
    read: Callable[[], T | Awaitable[T]],
    holds: Callable[[T], object] = bool,
    *,
    news: asyncio.Event | None = None,
    logs: Logs = None,
) -> T:
    """Read a state until it holds, and return it; `read` may be a coroutine function.

    With `news`, look again after this event only. Otherwise poll.
    """
    state: Any = "none could be read"
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                if news is not None:
                    news.clear()
                found = read()
                state = await found if inspect.isawaitable(found) else found
                if holds(state):
                    return state  # type: ignore[no-any-return]
                await (asyncio.sleep(POLL_SECONDS) if news is None else news.wait())
    except TimeoutError:
        raise AssertionError(_given_up(state, logs)) from None


def wait_until(
    read: Callable[[], T],
    holds: Callable[[T], object] = bool,
    *,
    logs: Logs = None,
    patience: float = PATIENCE_SECONDS,
) -> T:
    """Poll a state until it holds, and return it, in tests without an event loop."""
    end = time.monotonic() + patience
    while not holds(state := read()):
        if time.monotonic() > end:
            raise AssertionError(_given_up(state, logs, patience))
        time.sleep(POLL_SECONDS)
    return state


def _given_up(state: object, logs: Logs, patience: float = PATIENCE_SECONDS) -> str:
    """Return the message of a wait that ended without its state."""
    lines = [f"not within {patience:.0f} s; last state: {str(state)[-SHOWN_CHARACTERS:]}"]
    if isinstance(logs, Path):
        files = sorted(path for path in [logs, *logs.rglob("*")] if path.is_file())
        for path in files:
            text = path.read_text(errors="replace")
            lines += [f"--- {path}", text[-SHOWN_CHARACTERS:]]
    elif logs is not None:
        lines += ["--- logs", logs()[-SHOWN_CHARACTERS:]]
    return "\n".join(lines)


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
        await until(lambda: self.seen, holds, news=self._changed)


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
