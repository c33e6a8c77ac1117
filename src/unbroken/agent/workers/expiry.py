"""The end of the lease on the workers, as the keeper and the kernel know it.

The agent ends the workers itself. If it does not, its keeper ends everything (`keeper`), and a
timer of the kernel ends the agent, and with it the workers (`spawn`). On a machine that was stopped
or suspended, the timer does so before any of them runs on: it needs no process that is awake.
"""

from __future__ import annotations

import ctypes
import math
import os
import signal
import time
from collections.abc import Callable

from unbroken.log_lines import Log

from .keeper import LATE_SECONDS, send_lease

log = Log(__name__)

TIMER_ABSTIME = 1  # linux/time.h
SIGEV_SIGNAL = 0  # asm-generic/siginfo.h
SIGEVENT_BYTES = 64
"""Size of `struct sigevent`, on all architectures."""


class Expiry:
    """Says when the lease ends."""

    def __init__(self, pipe: int | None, booted_at: float) -> None:
        """`pipe`: the way to the keeper; None: there is none, and no lease. `booted_at`: the time
        on the agent's clock at which the machine was booted."""
        self._pipe, self._booted_at = pipe, booted_at
        self._timer: _KillTimer | None = None
        try:
            self._timer = _KillTimer() if pipe is not None else None
        except OSError as error:
            log.warning("no timer for the lease: the keeper alone ends workers", error=error)

    def hold(self, until: float | None) -> None:
        """Have the workers end at this time on the agent's clock; None: there are none."""
        if self._pipe is None:
            return
        at = None if until is None else until - self._booted_at
        if self._timer is not None:
            self._timer.set(None if at is None else at + LATE_SECONDS)
        try:
            send_lease(self._pipe, at)
        except OSError as error:
            log.warning("lease not passed to the keeper", pid=os.getppid(), error=error)


class _Event(ctypes.Structure):
    """`struct sigevent`."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("padding", ctypes.c_byte * SIGEVENT_BYTES),
    )


class _Time(ctypes.Structure):
    """`struct timespec`."""

    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Setting(ctypes.Structure):
    """`struct itimerspec`."""

    _fields_ = (("interval", _Time), ("value", _Time))


class _KillTimer:
    """A POSIX timer that kills this process, stopped or not (timer_create(2)).

    Raises OSError where there is none.
    """

    def __init__(self) -> None:
        self._set = _function("timer_settime")
        self._id = ctypes.c_void_p()
        event = _Event(signal=signal.SIGKILL, notify=SIGEV_SIGNAL)
        _call(
            _function("timer_create"),
            time.CLOCK_BOOTTIME,
            ctypes.byref(event),
            ctypes.byref(self._id),
        )

    def set(self, at: float | None) -> None:
        """Kill this process at this time, by `boot_seconds`; None: at no time."""
        part, whole = math.modf(at or 0.0)
        value = _Time(int(whole), int(part * 1e9))
        setting = _Setting(_Time(0, 0), value)
        _call(self._set, self._id, TIMER_ABSTIME, ctypes.byref(setting), None)


def _function(name: str) -> Callable[..., int]:
    """Return a function of the C library. Before glibc 2.34 it is in a library of its own."""
    for library in (None, "librt.so.1"):
        try:
            found: Callable[..., int] = getattr(ctypes.CDLL(library, use_errno=True), name)
        except (OSError, AttributeError):
            continue
        return found
    raise OSError(f"the C library has no {name}")


def _call(function: Callable[..., int], *arguments: object) -> None:
    if function(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
