"""In-process restart: leave a function when another rank fails, and call it again.

A signal handler raises `RankLost` in the main thread. An asynchronous exception would not do. A
handler also runs while a call such as `time.sleep` or `queue.get` is interrupted. It also sees
where the thread is, so that it raises nothing after the function has returned.
"""

from __future__ import annotations

import functools
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
from typing import TYPE_CHECKING, Any, TypeVar

from unbroken.errors import SpecError, WorldError
from unbroken.log_lines import Log
from unbroken.wire.ipc import AT_BARRIER, JOB_FAULT, JOB_START, PAST_BARRIER, STUCK_CODE
from unbroken.worker import begin_attempt
from unbroken.worker.channel import Channel, attempt_now, connect, is_whole

from . import groups, patches, step_end

if TYPE_CHECKING:
    from typing import ParamSpec

    P = ParamSpec("P")

__all__ = ["RankLost", "restartable"]

R = TypeVar("R")
ORDER_SECONDS = 5.0
"""Time for the agent to report a lost peer after gloo has noticed it."""
EVICT_SECONDS = 0.002
"""Pause between two attempts to make the main thread leave."""
LEFT_SECONDS = 0.02
"""The same pause after the function has left: threads of its groups may still wait."""
SWALLOWED_SECONDS = 1.0
"""Time after which `RankLost` is raised again, if the function caught it and stayed."""
STUCK_SECONDS = 0.3
STUCK_PASSES = 100
"""Time and attempts after which a main thread that sleeps in native code of torch ends the process:
nothing interrupts it.

Gloo loses a message that was partly sent or received when its connection breaks. A wait for it ends
only by the group's timeout (`signalException` in gloo/transport/tcp/pair.cc).
"""
STUCK_STORE_SECONDS = 1.0
"""The same time while a store is made: torch sleeps for up to 0.75 s if a server dies meanwhile."""
STUCK_CPU_SHARE = 0.1
"""Share of CPU time below which a thread sleeps; signals that it does not answer take some."""
STUCK_IN = ("torch.distributed", "torch.autograd", patches.__name__)
log = Log(__name__, "unbroken.worker: ")


class RankLost(BaseException):
    """Another rank has failed: leave.

    Do not catch it; it is no Exception, so that `except Exception` in a training loop lets it pass.
    """


def restartable(function: Callable[P, R]) -> Callable[P, R]:
    """Call the function again, with the same arguments, when another rank has failed.

    The process stays, with what it has imported, its CUDA context and its data.  The agent replaces
    only what failed.  Call it once, at the top level, in the main thread:

        @worker.restartable
        def train(dataset):
            dist.init_process_group("gloo")
            ...

    *In* the function: call `init_process_group`, and make whatever holds a process group or state
    of training (DDP and FSDP models, device meshes, optimizers).  Begin from a checkpoint or
    snapshot.  Ask `worker.context()`, not a variable read before.  *Outside* may be data,
    tokenizers, compiled code and loaders, but no reference to a group or to what holds one.

    At a fault the connections to the store are shut down and `RankLost` is raised in the main
    thread. `finally` blocks run, and should take far less than a second. A worker that has not left
    after 5 s is replaced, also if it is in a long call of native code. An exception of the function
    itself is raised as usual, and makes this the rank that failed. If a lost peer may have caused
    it, the worker first waits up to 5 s for the agent's order.

    `patches.PATCHES` lists what is changed in the process meanwhile.  Without an agent of unbroken,
    with `UNBROKEN_IN_PROCESS=off` and with an untried torch the function is called once.
    SpecError: `function` cannot be called.
    """
    if not callable(function):
        raise SpecError(f"restartable takes the function that trains, not {function!r}")

    @functools.wraps(function)
    def enter(*args: P.args, **named: P.kwargs) -> R:
        channel = connect() if _run is None and _is_main() else None
        call = functools.partial(function, *args, **named)
        if channel is None:
            return call()
        number = patches.free_signal(_signalled)
        reason = "the script handles every free signal" if number is None else patches.refusal()
        run = _Run(channel, call, patches.Interrupt(number or 0, _signalled))
        outcome: R = run.run() if reason is None else run.run_once(reason)
        return outcome

    return enter


def ends_attempt_alone(error: BaseException | None) -> bool:
    """Return whether an error may end this attempt of a restartable function, and not training."""
    return isinstance(error, RankLost) or (
        _run is not None and error is not None and groups.is_lost_peer(error)
    )


@dataclass(frozen=True)
class _Returned:
    value: Any


class _Eviction:
    """A thread that makes the main thread leave the function.

    It repeats every attempt: a shutdown between two operations is lost, and so is a signal just
    before a call that blocks. It begins after `seconds`, or once the function has left by itself.
    """

    def __init__(self, run: _Run, seconds: float) -> None:
        self._run, self._seconds = run, seconds
        self._has_left = False
        self._is_due = threading.Event()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._evict, name="unbroken-evict", daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """Wait no longer: the function is leaving."""
        self._is_due.set()

    def left(self) -> None:
        """Stop interrupting: the function has left, and its groups are being destroyed."""
        self._has_left = True
        self.begin()

    def end(self) -> None:
        """Stop shutting down sockets, and wait until that has stopped."""
        self._is_over.set()
        self.begin()
        self._thread.join()

    def _evict(self) -> None:
        self._is_due.wait(self._seconds)
        if self._is_over.is_set():
            return
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
    log.error(
        "in-process restart failed: the main thread is blocked in native code of torch, waiting "
        "for a lost rank; exiting so that the agent replaces this worker",
        exit_code=STUCK_CODE,
    )
    os._exit(STUCK_CODE)


def _replace(_order: Mapping[str, Any]) -> None:
    os._exit(STUCK_CODE)


class _Watch:
    """Detects a thread that must leave and sleeps in a call of torch that does not end."""

    def __init__(self, run: _Run) -> None:
        self._run = run
        self._clock = time.pthread_getcpuclockid(run.thread)
        self._begin()

    def is_stuck(self) -> bool:
        """Look once; to be called repeatedly."""
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

    def __init__(
        self, channel: Channel, call: Callable[[], Any], interrupt: patches.Interrupt
    ) -> None:
        self._channel = channel
        self._call = call
        self._signal = interrupt
        self.thread = threading.get_ident()
        self._lock = threading.Lock()
        self._orders: queue.SimpleQueue[Mapping[str, Any]] = queue.SimpleQueue()
        self._interrupted = threading.Event()
        """Set at a fault, and when the agent has ended."""
        self._must_leave = False
        self._eviction: _Eviction | None = None
        self._past: list[_Eviction] = []
        """Evictions of attempts that the function has left."""
        self._is_inside = False
        self._is_over = False
        self._raised_at: float | None = None
        self.answered_at = 0.0
        """Time at which the thread last ran Python."""

    def run(self) -> Any:
        """Call the function until no fault ends it; return what it returns."""
        global _run
        _run = self
        try:
            with patches.applied(self._signal):
                outcome = self._repeat()
        finally:
            _run = None
        self._channel.introduce(restartable=False)
        if isinstance(outcome, BaseException):
            raise outcome
        groups.let_go()
        return outcome.value

    def run_once(self, reason: str) -> Any:
        """Call the function in an unchanged process, which ends at a fault."""
        if not patches.is_switched_off() and os.environ.get("LOCAL_RANK", "0") == "0":
            log.warning("in-process restart is off", reason=reason)
        if _waits_for_rank():
            self._channel.listen({JOB_FAULT: _replace, JOB_START: self._orders.put}, self._ended)
            self._channel.introduce(restartable=True)
            self._return()
        return self._call()

    def _repeat(self) -> _Returned | BaseException:
        self._channel.listen({JOB_FAULT: self._faulted, JOB_START: self._orders.put}, self._ended)
        self._channel.introduce(restartable=True)
        try:
            if _waits_for_rank():
                self._return()
            outcome = self._attempt()
            while not self._is_final(outcome):
                _drop(outcome)
                outcome = _Returned(None)
                self._settle()
                self._return()
                begin_attempt()
                outcome = self._attempt()
            return outcome
        finally:
            self._channel.listen({}, None)
            if self._eviction is not None:
                self._eviction.end()
            self._end_past()

    def interrupt(self) -> None:
        """Wake the thread, and make it call `_signalled`."""
        if self._raised_at is not None and monotonic() - self._raised_at > SWALLOWED_SECONDS:
            self._raised_at = None
        number = self._signal.number
        if not self.is_user_leaving() and signal.getsignal(number) is _signalled:
            signal.pthread_kill(self.thread, number)

    def is_user_leaving(self) -> bool:
        """Return whether `RankLost` is passing through the function."""
        return self._is_inside and self._raised_at is not None

    def leave(self, frame: FrameType | None) -> None:
        """Raise `RankLost` if the function must leave; runs in its thread."""
        self.answered_at = monotonic()
        # In the frame below the function, the function may have returned.
        is_leaving = frame is None or frame.f_code is _ATTEMPT or is_whole(frame)
        if self._must_leave and self._is_inside and self._raised_at is None and not is_leaving:
            self._raised_at = monotonic()
            raise RankLost("another rank has failed")

    def leave_after_save(self) -> None:
        """Raise `RankLost` between two steps if the function must leave; runs in its thread."""
        is_ours = threading.get_ident() == self.thread
        if is_ours and self._must_leave and self._is_inside and self._raised_at is None:
            self._raised_at = monotonic()
            if self._eviction is not None:
                self._eviction.begin()
            raise RankLost("another rank moves to another node")

    def _attempt(self) -> _Returned | BaseException:
        step_end.reset()
        self._raised_at = None
        self._is_inside = True
        try:
            outcome: _Returned | BaseException = _Returned(self._call())
        except BaseException as error:  # noqa: BLE001  (judged by the caller)
            outcome = error
        self._is_inside = False
        step_end.reset()
        if self._eviction is not None:
            self._eviction.begin()
        return outcome

    def _is_final(self, outcome: _Returned | BaseException) -> bool:
        is_users = isinstance(outcome, (SystemExit, KeyboardInterrupt))
        if isinstance(outcome, BaseException) and groups.is_lost_peer(outcome):
            # Its groups are useless, whatever the agent orders.
            groups.abort()
            _clear(outcome)
            groups.destroy()
            self._interrupted.wait(ORDER_SECONDS)
        with self._lock:
            self._is_over = is_users or not self._must_leave
        if self._is_over and self._eviction is not None:
            self._eviction.end()
        return self._is_over

    def _settle(self) -> None:
        """Destroy what is left of the attempt; threads of its groups end by themselves."""
        groups.destroy()
        if not groups.has_freed_port():
            # The next attempt could meet its port, and the keys of this attempt there.
            _end()

    def _return(self) -> None:
        """Wait at the barrier for the next attempt. Raises WorldError if there is none."""
        with self._lock:
            while not self._orders.empty():
                self._orders.get()
            self._arrive()
        # From here on orders are answered in order: a fault that follows a start finds the
        # function running, or about to run.
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
        # `_faulted` holds the lock until the eviction of its order is set.
        if self._eviction is not None:
            self._eviction.left()
            self._past.append(self._eviction)
        self._must_leave, self._eviction = False, None
        self._interrupted.clear()
        if not self._channel.send({"type": AT_BARRIER, "attempt": attempt_now()}):
            raise WorldError("the agent ended while this worker waited for the next attempt")

    def _faulted(self, order: Mapping[str, Any]) -> None:
        with self._lock:
            self._orders.put(order)
            if not self._must_leave and not self._is_over:
                limit = float(order.get("save_seconds") or 0.0)
                seconds = step_end.seconds_left(limit) if limit and self._is_inside else 0.0
                if seconds:
                    step_end.request(self.leave_after_save)
                self._must_leave = True
                self._eviction = _Eviction(self, seconds)
            self._interrupted.set()

    def _ended(self) -> None:
        """Continue training without an agent; a worker at the barrier ends."""
        self._orders.put({})
        self._interrupted.set()


_run: _Run | None = None
_ATTEMPT = _Run._attempt.__code__


def _signalled(number: int, frame: FrameType | None) -> None:
    if _run is not None:
        _run.leave(frame)


def _waits_for_rank() -> bool:
    """Return whether this worker gets its rank at the barrier (`--inprocess-restart`)."""
    return int(os.environ.get("RANK") or 0) < 0


def _is_main() -> bool:
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main:
        log.warning(
            "in-process restart is off: a restartable function was called outside the main thread"
        )
    return is_main


def _clear(outcome: object) -> list[BaseException]:
    """Clear the frames of an exception and of all its causes; return these exceptions."""
    result: dict[int, BaseException] = {}
    todo = [outcome]
    while todo:
        error = todo.pop()
        if isinstance(error, BaseException) and id(error) not in result:
            result[id(error)] = error
            traceback.clear_frames(error.__traceback__)
            todo += [error.__context__, error.__cause__]
    return [*result.values()]


def _drop(outcome: object) -> None:
    """Clear the frames of an exception, and drop them."""
    for error in _clear(outcome):
        error.__traceback__ = error.__context__ = error.__cause__ = None
