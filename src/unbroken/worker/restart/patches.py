"""Every change that `restartable` makes to its process, in one table.

All are made when a restartable function is entered, and undone when it has returned or raised. None
is made if `UNBROKEN_IN_PROCESS` is `off` or the version of torch was never tried. A fault then
gives the worker a new process. docs/reference/in-process.md has the same table for users.
"""

from __future__ import annotations

import functools
import gc
import importlib
import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any

from unbroken.wire.warm import IN_PROCESS_VARIABLE
from unbroken.worker.boot import rendezvous
from unbroken.worker.boot.keepers import C10D

from . import groups

__all__ = ["PATCHES", "Interrupt", "Patch", "applied", "free_signal", "is_switched_off", "refusal"]

SLICE = timedelta(seconds=0.01)
"""Time that a wait for a collective spends in native code before Python runs again."""
SLICE_OVER = "Operation timed out!"
"""Message of `Work::wait` at a timeout, and of nothing else (torch 2.6 to 2.13)."""
COLLECTIVES = {*range(12), 15, 16}
"""Values of `OpType` (torch 2.6 to 2.13), without operations between two ranks: a wait for one of
those that times out ends the operation."""
ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
Undo = Callable[[], object]


@dataclass(frozen=True)
class Interrupt:
    """A signal, and what the main thread does then."""

    number: int
    handler: Callable[[int, FrameType | None], None]


@dataclass(frozen=True)
class Patch:
    """One change to the process."""

    target: str
    change: str
    why: str
    since: str
    """First version of torch that needs it; empty: not about torch."""
    undone: str
    apply: Callable[[Any, Interrupt], Undo]
    """Make the change in `torch.distributed`; return how to undo it."""


def refusal() -> str | None:
    """Return why nothing in this process may be changed; None if it may."""
    switch = os.environ.get(IN_PROCESS_VARIABLE, "")
    reason = rendezvous.refusal(switch, "")
    if reason is None and _torch() is not None:
        reason = rendezvous.refusal(switch, str(sys.modules["torch"].__version__))
    return reason


def is_switched_off() -> bool:
    """Return whether the user wants no change."""
    return os.environ.get(IN_PROCESS_VARIABLE) == rendezvous.OFF


def free_signal(handler: Callable[[int, FrameType | None], None]) -> int | None:
    """Find a signal that nothing handles but `handler`."""
    numbers: list[int] = [signal.SIGURG, *range(signal.SIGRTMIN + 1, signal.SIGRTMAX)]
    free = (handler, signal.SIG_DFL, signal.SIG_IGN)
    return next((number for number in numbers if signal.getsignal(number) in free), None)


@contextmanager
def applied(interrupt: Interrupt) -> Iterator[None]:
    """Make all changes, those to torch if it is installed, and undo them in reverse order."""
    dist = _torch()
    with ExitStack() as undo:
        for patch in PATCHES:
            if dist is not None or not patch.since:
                undo.callback(patch.apply(dist, interrupt))
        yield


def _torch() -> Any:
    """Import `torch.distributed`; None: it is not installed."""
    if C10D not in sys.modules and importlib.util.find_spec("torch") is None:
        return None
    dist = importlib.import_module("torch.distributed")
    return dist if dist.is_available() else None


def _handle(_dist: Any, interrupt: Interrupt) -> Undo:
    before = signal.signal(interrupt.number, interrupt.handler)
    return lambda: signal.signal(interrupt.number, before)


def _set_aside(_dist: Any, _interrupt: Interrupt) -> Undo:
    # Garbage that is set aside would stay for ever.
    gc.collect()
    gc.freeze()
    return gc.unfreeze


def _replace(owner: Any, name: str, value: Any) -> Undo:
    before = vars(owner)[name]
    setattr(owner, name, value)

    def undo() -> None:
        if vars(owner)[name] is value:  # else the script has replaced it meanwhile
            setattr(owner, name, before)

    return undo


def _ask_for_no_names(dist: Any, _interrupt: Interrupt) -> Undo:
    if _rendezvous().TCPStore is dist.TCPStore:  # else the template of warm workers has done it
        rendezvous.ask_for_no_names()
    return lambda: None


def _follow_stores(dist: Any, _interrupt: Interrupt) -> Undo:
    function = dist.TCPStore.__init__

    def construct(store: Any, **given: Any) -> None:
        is_server = bool(given.get("is_master"))
        host, port = str(given.get("host_name")), int(given.get("port") or 0)
        with groups.sockets.store(host, port, is_server=is_server):
            function(store, **given)

    return _replace(_rendezvous(), "TCPStore", rendezvous.patient(dist.TCPStore, construct))


def _rendezvous() -> Any:
    return importlib.import_module("torch.distributed.rendezvous")


def _hold_groups(dist: Any, _interrupt: Interrupt) -> Undo:
    c10d = dist.distributed_c10d
    function = c10d._new_process_group_helper

    @functools.wraps(function)
    def make(group_size: int, *args: Any, **named: Any) -> Any:
        with groups.sockets.group(group_size):
            made = function(group_size, *args, **named)
        if isinstance(made[0], dist.ProcessGroup):
            groups.hold(made[0])
        return made

    return _replace(c10d, "_new_process_group_helper", make)


def _slice_waits(dist: Any, _interrupt: Interrupt) -> Undo:
    function = dist.Work.wait

    @functools.wraps(function)
    def wait(self: Any, *args: Any, **named: Any) -> Any:
        if args or named or not _is_gloos(self):
            return function(self, *args, **named)
        while True:
            try:
                return function(self, SLICE)
            except RuntimeError as error:
                if not str(error).startswith(SLICE_OVER):
                    raise

    return _replace(dist.Work, "wait", wait)


def _is_gloos(work: Any) -> bool:
    backends = sys.modules[C10D]._world.pg_backend_config.values()
    is_gloo = all(
        item.rpartition(":")[2] == "gloo" for all_ in backends for item in all_.split(",")
    )
    return is_gloo and int(work._get_op_type()) in COLLECTIVES


def _let_errors_pass(_dist: Any, _interrupt: Interrupt) -> Undo:
    before = os.environ.get(ERROR_HANDLING)
    if before not in (None, "1"):
        return lambda: None
    os.environ[ERROR_HANDLING] = "0"
    if before is None:
        return lambda: os.environ.pop(ERROR_HANDLING, None)
    return lambda: os.environ.update({ERROR_HANDLING: before})


PATCHES = (
    Patch(
        "signal SIGURG",
        "a handler that raises `RankLost` in the main thread; the first free real-time signal if "
        "the script handles SIGURG",
        "interrupts Python and calls such as `time.sleep`",
        "",
        "the former handler",
        _handle,
    ),
    Patch(
        "garbage collector",
        "it leaves out the objects that exist then, such as all modules (`gc.freeze`)",
        "a restart collects what the function made, and would look through all modules for 0.15 s",
        "",
        "it collects all objects again",
        _set_aside,
    ),
    Patch(
        "names of hosts in torch's log",
        "torch looks up no names of addresses; its warnings about stores show wrong addresses",
        "a lost DNS query holds up all ranks for 5 s",
        "2.9",
        "not undone",
        _ask_for_no_names,
    ),
    Patch(
        "torch.distributed.rendezvous.TCPStore",
        "a subclass, for the store of `init_process_group` only: a client connects when its server "
        "listens, in short attempts; the server waits for no client",
        "torch's client pauses for 0.5 s after a refused connection, and nothing interrupts it",
        "2.6",
        "the former class; stores that exist keep theirs",
        _follow_stores,
    ),
    Patch(
        "torch.distributed.distributed_c10d._new_process_group_helper",
        "a wrapper that keeps each new group until the attempt ends, and notes the time in which "
        "it is made",
        "a DDP model that holds the last reference to a group deadlocks; gloo waits for ranks that "
        "died before they connected",
        "2.6",
        "the former function",
        _hold_groups,
    ),
    Patch(
        "torch.distributed.Work.wait",
        "waits for a collective of gloo return to Python every 10 ms",
        "gloo may lose a message when a connection breaks: the wait then ends for no signal",
        "2.6",
        "the former method",
        _slice_waits,
    ),
    Patch(
        f"environment variable {ERROR_HANDLING}",
        "`0` where it is unset or `1`",
        "NCCL's watchdog ends the process within 0.1 s of the loss of a peer otherwise",
        "2.6",
        "the former value",
        _let_errors_pass,
    ),
)
"""All changes, in the order in which they are applied."""
