"""In-process restart: a function that is left when another rank fails, and called again.

`RankLost` is raised by a handler of a signal, in the main thread, and not by an asynchronous
exception: a handler is run while a call such as `time.sleep` or `queue.get` is interrupted, and it
sees where the thread is, so that nothing is ever raised after the function has left.
"""

from __future__ import annotations

import functools
import logging
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import monotonic  # noqa: TID251  (how long user code does not leave)
from types import FrameType
from typing import Any, ParamSpec, TypeVar

from unbroken.errors import SpecError, WorldError
from unbroken.wire.ipc import AT_BARRIER, JOB_FAULT, JOB_START, PAST_BARRIER, STUCK_CODE
from unbroken.worker.channel import Channel, attempt_now, connect, is_whole

from . import groups

__all__ = ["RankLost", "restartable"]

P = ParamSpec("P")
R = TypeVar("R")
TOLD_SECONDS = 5.0
"""For the agent to say that a peer is lost after gloo has noticed."""
EVICT_SECONDS = 0.002
LEFT_SECONDS = 0.02
"""The same, once the function has left: what threads of its groups wait for is still ended."""
SWALLOWED_SECONDS = 1.0
"""After which `RankLost` is raised again, where somebody has caught it and stayed."""
STUCK_SECONDS = 0.3
STUCK_PASSES = 100
"""Both, asleep in torch's native code, and the process ends: nothing gets that thread out.  Gloo
forgets a message of which a part was sent or received when its connection breaks, and whoever waits
for it is told by the group's timeout only (`signalException` in gloo/transport/tcp/pair.cc)."""
STUCK_STORE_SECONDS = 1.0
"""The same while a store is made: torch sleeps for up to 0.75 s when a server dies meanwhile."""
STUCK_CPU_SHARE = 0.1
"""Of the time; signals that nobody answers take a part of it."""
STUCK_IN = ("torch.distributed", "torch.autograd", groups.__name__)
logger = logging.getLogger(__name__)


class RankLost(BaseException):
    """Another rank has failed: leave.  Not an Exception, so that `except Exception` in a training
    loop lets it pass; there is nothing to catch it for."""


def restartable(function: Callable[P, R]) -> Callable[P, R]:
    """Call the function again, with the same arguments, when another rank has failed.

    The process, what it has imported, its CUDA context and its data stay; the agent replaces only
    what failed.  Call it once, at the top level, in the main thread:

        @worker.restartable
        def train(dataset):
            dist.init_process_group("gloo")
            ...

    *In* the function: `init_process_group`, and whatever holds a process group or state of training
    (DDP and FSDP models, device meshes, optimizers); begin from a checkpoint or snapshot, and ask
    `worker.context()`, not a variable read before.  *Outside* may be data, tokenizers, compiled
    code, loaders; no reference to a group or to what holds one.

    When the agent says so, connections to the store are shut down and `RankLost` is raised in
    the main thread.  `finally` blocks run, and should take far less than a second; who is not out
    after 5 s is killed and started anew, as are those in a long call of native code.  An exception
    of the function's own is raised as ever, and makes this the rank that failed; what looks like a
    lost peer waits up to 5 s for the agent's word first.  Uses SIGURG where it is free.
    Without an agent of unbroken the function is just called.  SpecError: it is none.
    """
    if not callable(function):
        raise SpecError(f"restartable takes the function that trains, not {function!r}")

    @functools.wraps(function)
    def enter(*args: P.args, **named: P.kwargs) -> R:
        channel = connect() if _run is None and _is_main() else None
        call = functools.partial(function, *args, **named)
        number = None if channel is None else _signal()
        if channel is None or number is None:
            return call()
        outcome: R = _Run(channel, call, number).run()
        return outcome

    return enter


@dataclass(frozen=True, slots=True)
class _Returned:
    value: Any


class _Eviction:
    """Makes the main thread leave, again and again until it has: a shutdown between two operations
    and a signal just before a call that blocks are lost."""

    def __init__(self, run: _Run) -> None:
        self._run = run
        self._has_left = False
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._evict, name="unbroken-evict", daemon=True)
        self._thread.start()

    def left(self) -> None:
        """The function has; its groups are being destroyed."""
        self._has_left = True

    def end(self) -> None:
        """Nobody touches another socket from here on."""
        self._is_over.set()
        self._thread.join()

    def _evict(self) -> None:
        self._run.interrupt()
        groups.shut()
        groups.abort()
        watch = _Watch(self._run)
        while not self._is_over.wait(LEFT_SECONDS if self._has_left else EVICT_SECONDS):
            groups.shut()
            if self._has_left:
                continue
            self._run.interrupt()
            if watch.is_stuck():
                _end()


def _end() -> None:
    logger.error("torch waits for a lost rank, and nothing tells it: this worker ends")
    os._exit(STUCK_CODE)


class _Watch:
    """Of a thread that is to leave: whether it sleeps in a call of torch that does not end."""

    def __init__(self, run: _Run) -> None:
        self._run = run
        self._clock = time.pthread_getcpuclockid(run.thread)
        self._begin()

    def is_stuck(self) -> bool:
        """To be asked again and again."""
        self._passes += 1
        took = monotonic() - self._since
        is_awake = time.clock_gettime(self._clock) - self._cpu > STUCK_CPU_SHARE * max(took, 0.02)
        if is_awake or self._run.is_user_leaving() or self._run.answered_at > self._since:
            self._begin()
        bound = STUCK_STORE_SECONDS if groups.is_store_being_made() else STUCK_SECONDS
        if self._passes < STUCK_PASSES or monotonic() - self._since < bound:
            return False
        frame = sys._current_frames().get(self._run.thread)
        while frame is not None and not str(frame.f_globals.get("__name__")).startswith(STUCK_IN):
            frame = frame.f_back
        return frame is not None

    def _begin(self) -> None:
        self._since, self._passes = monotonic(), 0
        self._cpu = time.clock_gettime(self._clock)


class _Run:
    """One call of a restartable function, over all its attempts."""

    def __init__(self, channel: Channel, call: Callable[[], Any], number: int) -> None:
        self._channel = channel
        self._call = call
        self._number = number
        self.thread = threading.get_ident()
        self._lock = threading.Lock()
        self._orders: queue.SimpleQueue[Mapping[str, Any]] = queue.SimpleQueue()
        self._heard = threading.Event()
        """A fault, or the end of the agent."""
        self._must_leave = False
        self._eviction: _Eviction | None = None
        self._past: list[_Eviction] = []
        """Of attempts that have been left."""
        self._is_inside = False
        self._is_over = False
        self._raised_at: float | None = None
        self.answered_at = 0.0
        """When the thread was last seen between two instructions of Python."""

    def run(self) -> Any:
        """What the function returns at last."""
        global _run
        _run = self
        groups.watch()
        self._channel.listen({JOB_FAULT: self._faulted, JOB_START: self._orders.put}, self._ended)
        self._channel.introduce(restartable=True)
        try:
            if int(os.environ.get("RANK") or 0) < 0:
                # `--inprocess-restart`: who is started before its rank is known waits for it.
                self._return()
            outcome = self._attempt()
            while not self._is_final(outcome):
                _drop(outcome)
                outcome = _Returned(None)
                self._settle()
                self._return()
                outcome = self._attempt()
        finally:
            _run = None
            self._channel.listen({}, None)
            self._end_past()
        self._channel.introduce(restartable=False)
        if isinstance(outcome, BaseException):
            raise outcome
        groups.let_go()
        return outcome.value

    def interrupt(self) -> None:
        """Wake the thread, and have `_signalled` called in it."""
        if self._raised_at is not None and monotonic() - self._raised_at > SWALLOWED_SECONDS:
            self._raised_at = None
        if not self.is_user_leaving() and signal.getsignal(self._number) is _signalled:
            signal.pthread_kill(self.thread, self._number)

    def is_user_leaving(self) -> bool:
        """Whether `RankLost` is on its way through the function."""
        return self._is_inside and self._raised_at is not None

    def leave(self, frame: FrameType | None) -> None:
        """In the thread of the function: raise if it is to leave, and has not been told."""
        self.answered_at = monotonic()
        # In the frame below the function it may be about to leave; nobody is to clean up there.
        is_leaving = frame is None or frame.f_code is _ATTEMPT or is_whole(frame)
        if self._must_leave and self._is_inside and self._raised_at is None and not is_leaving:
            self._raised_at = monotonic()
            raise RankLost("another rank has failed")

    def _attempt(self) -> _Returned | BaseException:
        self._raised_at = None
        self._is_inside = True
        try:
            outcome: _Returned | BaseException = _Returned(self._call())
        except BaseException as error:  # noqa: BLE001  (judged by the caller)
            outcome = error
        self._is_inside = False
        return outcome

    def _is_final(self, outcome: _Returned | BaseException) -> bool:
        is_users = isinstance(outcome, SystemExit | KeyboardInterrupt)
        if isinstance(outcome, BaseException) and groups.is_lost_peer(outcome):
            # Its groups are of no use any more, whatever the agent says.
            groups.abort()
            _clear(outcome)
            groups.destroy()
            self._heard.wait(TOLD_SECONDS)
        with self._lock:
            self._is_over = is_users or not self._must_leave
        if self._is_over and self._eviction is not None:
            self._eviction.end()
        return self._is_over

    def _settle(self) -> None:
        """Leave nothing of the attempt but threads of its groups, which end by themselves."""
        groups.destroy()
        if groups.is_serving() and not groups.are_gone() and groups.is_serving():
            # Its port, and what the attempt has put down there, may be met by the next one.
            _end()

    def _return(self) -> None:
        """Through the barrier, into the next attempt.  WorldError: there will be none."""
        with self._lock:
            while not self._orders.empty():
                self._orders.get()
            self._arrive()
        # What comes from here on is answered, and kept in order: a start that is followed by a
        # fault finds the function inside, or about to be.
        while (order := self._orders.get()).get("type") != JOB_START:
            self._settle()
            with self._lock:
                self._arrive()
        self._end_past()
        groups.forget()
        os.environ.update({str(k): str(v) for k, v in order.get("worker_envs", {}).items()})
        self._channel.send({"type": PAST_BARRIER, "attempt": attempt_now()})

    def _end_past(self) -> None:
        while self._past:
            self._past.pop().end()

    def _arrive(self) -> None:
        # Who has put down an order has not let go of the lock before its eviction is known.
        if self._eviction is not None:
            self._eviction.left()
            self._past.append(self._eviction)
        self._must_leave, self._eviction = False, None
        self._heard.clear()
        if not self._channel.send({"type": AT_BARRIER, "attempt": attempt_now()}):
            raise WorldError("the agent ended while this worker waited for the next attempt")

    def _faulted(self, order: Mapping[str, Any]) -> None:
        with self._lock:
            self._orders.put(order)
            if not self._must_leave and not self._is_over:
                self._must_leave = True
                self._eviction = _Eviction(self)
            self._heard.set()

    def _ended(self) -> None:
        """Whoever trains, trains on; whoever is at the barrier ends."""
        self._orders.put({})
        self._heard.set()


_run: _Run | None = None
_ATTEMPT = _Run._attempt.__code__


def _signalled(number: int, frame: FrameType | None) -> None:
    if _run is not None:
        _run.leave(frame)


def _signal() -> int | None:
    """A signal that nobody uses, with our handler.  It stays ours: a signal that is late finds
    somebody who ignores it."""
    numbers: list[int] = [signal.SIGURG, *range(signal.SIGRTMIN + 1, signal.SIGRTMAX)]
    for number in numbers:
        if signal.getsignal(number) in (_signalled, signal.SIG_DFL, signal.SIG_IGN):
            signal.signal(number, _signalled)
            return number
    logger.warning("no signal is free: faults of others end this worker")
    return None


def _is_main() -> bool:
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main:
        logger.warning("restartable functions restart in the main thread only; this is just called")
    return is_main


def _clear(outcome: object) -> list[BaseException]:
    """Let go of what the frames of the exception hold, and of those it came from: all of them."""
    found: dict[int, BaseException] = {}
    todo = [outcome]
    while todo:
        error = todo.pop()
        if isinstance(error, BaseException) and id(error) not in found:
            found[id(error)] = error
            traceback.clear_frames(error.__traceback__)
            todo += [error.__context__, error.__cause__]
    return [*found.values()]


def _drop(outcome: object) -> None:
    """Let go of the exception's frames as well."""
    for error in _clear(outcome):
        error.__traceback__ = error.__context__ = error.__cause__ = None
