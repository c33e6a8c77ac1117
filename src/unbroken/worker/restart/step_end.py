"""The end of a step, where a rank leaves before a planned move, so that no step is made again.

All ranks meet in each step. A rank that has saved step n and leaves before its next forward pass
keeps the others from ending step n + 1. They leave in the same way after they have saved step n, or
wait for this rank in step n + 1. So the newest snapshot of every rank is that of step n, whenever
the order reaches each of them.

A rank that waits in step n + 1 cannot be distinguished from a rank that works on step n. It is made
to leave once the longest of its recent steps could have been made twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from importlib import import_module
from time import monotonic  # noqa: TID251  (the usual time between two saves is measured here)
from typing import Any

SAVES = 9
"""Recent saves that are remembered: a step that is slow now and then, for an evaluation or a
checkpoint, should be among them."""
LEAST_SECONDS = 0.3
"""Least time for a step to end: a busy machine may hold up a short step for much longer than it
usually takes."""
_saves: deque[float] = deque(maxlen=SAVES)
"""Times of the newest saves of this attempt."""
_leave: Callable[[], None] | None = None
"""Leaves the function; None: there is no order to leave."""
_copying: list[Callable[[], None]] = []
"""Wait for the copies of snapshots that were saved since the order."""
_hook: Any = None


def reset() -> None:
    """Forget the saves and the order: an attempt begins, or has ended."""
    global _leave, _hook
    _leave = None
    _saves.clear()
    _copying.clear()
    if _hook is not None:
        _hook.remove()
        _hook = None


def seconds_left(limit: float) -> float:
    """Return how long to wait for the end of the step that is under way."""
    return wait_seconds(list(_saves), monotonic(), limit)


def wait_seconds(saves: Sequence[float], now: float, limit: float) -> float:
    """Return how long to wait for the next save after these; 0: there was none, or the next one
    will not come within `limit` seconds."""
    if not saves:
        return 0.0
    since = now - saves[-1]
    usual = max((later - earlier for earlier, later in zip(saves, saves[1:])), default=None)
    if usual is None:
        return limit
    if usual - since > limit:
        return 0.0
    return min(limit, max(LEAST_SECONDS, 2 * usual - since))


def request(leave: Callable[[], None]) -> None:
    """Call `leave` in the thread that trains, before the first forward pass after the next save."""
    global _leave
    _leave = leave


def saved(wait: Callable[[], None]) -> None:
    """Note that a step was saved; `wait` returns when its copies are complete."""
    global _hook
    _saves.append(monotonic())
    if _leave is None:
        return
    _copying.append(wait)
    if _hook is None:
        modules = import_module("torch.nn.modules.module")
        _hook = modules.register_module_forward_pre_hook(_before_forward)


def _before_forward(*_: object) -> None:
    leave = _leave
    if leave is not None:
        for wait in _copying:
            wait()
        leave()
