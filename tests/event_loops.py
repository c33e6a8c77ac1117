"""Event loops whose clock belongs to the test."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class PauseLoop(asyncio.SelectorEventLoop):
    """A real event loop that records the length of each `asyncio.sleep`."""

    def __init__(self) -> None:
        super().__init__()
        self.pauses: list[float] = []

    def call_later(self, delay: float, callback: Any, *given: Any, **options: Any) -> Any:
        """Record a timer, and set it."""
        if getattr(callback, "__name__", "") == "_set_result_unless_cancelled":  # asyncio.sleep
            self.pauses.append(delay)
        return super().call_later(delay, callback, *given, **options)


class HeldLoop(asyncio.SelectorEventLoop):
    """A real event loop whose clock can be moved ahead, as a paused process finds it."""

    _held_at: float | None = None

    def time(self) -> float:
        """Return the time, which stands still after `hold`."""
        return super().time() if self._held_at is None else self._held_at

    def hold(self, ahead: float) -> None:
        """Move the clock ahead by seconds, and let it stand there."""
        self._held_at = self.time() + ahead

    def release(self) -> None:
        """Let the clock go on from the system's."""
        self._held_at = None


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop without real time: the clock jumps to the next timer when all tasks wait.

    Only for programs without sockets and threads, whose answers would come after the jump.
    """

    def __init__(self) -> None:
        super().__init__(_Jumping(self))
        self.now = 0.0

    def time(self) -> float:
        """Return the virtual time."""
        return self.now


class _Jumping(selectors.SelectSelector):
    """A selector that moves its loop's clock instead of waiting."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        """Return what is ready now."""
        if timeout is None:
            raise AssertionError("every task waits, and no timer is set")
        self._loop.now += timeout
        return super().select(0)


def run_on(loop: asyncio.AbstractEventLoop, program: Coroutine[Any, Any, T]) -> T:
    """Run a program to its end on this loop, which is then closed."""
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(program)
