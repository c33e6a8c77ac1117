"""An event loop whose clock stands still while anything happens, and jumps to the next timer then.

Programs that talk over sockets of this process run in it for hours of their time within a second,
and no busy machine makes them late. Sockets and threads of the executor are real.
"""

from __future__ import annotations

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec

P = ParamSpec("P")
BEGIN_SECONDS = 1_000_000.0
"""Time at which each loop begins: later than any timeout, as a real machine's clock."""
LOOK_SECONDS = 0.001
"""Seconds in which the kernel passes on what was written to a socket of this machine."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """The event loop of one test."""

    def __init__(self) -> None:
        self._virtual_seconds = BEGIN_SECONDS
        self._in_threads: set[asyncio.Future[Any]] = set()
        super().__init__(_Selector(self._idle))
        # Larger than a rounding error at this time, or a timer would need two jumps.
        self._clock_resolution = 1e-6

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self._virtual_seconds

    def advance(self, seconds: float) -> None:
        """Let this time pass at once, as if the process had been stopped meanwhile."""
        self._virtual_seconds += seconds

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> asyncio.Future[Any]:
        """Call a function in a thread; no time passes until it has returned."""
        future = super().run_in_executor(executor, func, *args)
        self._in_threads.add(future)
        future.add_done_callback(self._in_threads.discard)
        return future

    def _idle(self, seconds: float | None) -> bool:
        """Jump over the time to the next timer; return False if a thread has to be waited for."""
        if seconds is None or self._in_threads:
            return False
        self._virtual_seconds += seconds
        return True


class _Selector(selectors.DefaultSelector):
    """Looks for news of sockets, and lets the loop jump where there are none."""

    def __init__(self, idle: Callable[[float | None], bool]) -> None:
        super().__init__()
        self._idle = idle

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return the sockets with news; none: time has passed."""
        if timeout is not None and timeout <= 0:
            return super().select(0)
        found = super().select(LOOK_SECONDS)
        return found if found or self._idle(timeout) else super().select(None)


def in_virtual_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run an `async def test_*` in a `VirtualLoop`."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(test(*args, **kwargs))

    return run


def advance(seconds: float) -> None:
    """Let this time pass at once for the running test, without a turn of its loop."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    loop.advance(seconds)
