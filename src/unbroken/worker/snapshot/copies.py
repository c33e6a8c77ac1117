"""Copies of tensors into a slot.

Tensors of the CPU are copied plainly. Each CUDA device copies by a stream of its own into the slot,
which is pinned for it. Later work of the current stream waits for these copies (it may write what
is being read), the host does not. The thread writes the header when the copies have arrived.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

from unbroken.log_lines import Log
from unbroken.wire.compat import zip_equal

from .state import State, view

if TYPE_CHECKING:
    import mmap

log = Log(__name__, "unbroken.worker: ")
SLOTS = 2
PORTABLE = 1
"""cudaHostRegisterPortable of the CUDA runtime: pinned for every device."""


class Copies:
    """Copies of one snapshot; one save at a time."""

    def __init__(self) -> None:
        self._streams: dict[Any, Any] = {}
        """Streams by device."""
        self._events: list[tuple[Any, Any]] = []
        """Events by device, set when its newest copies are in."""
        self._pinned: dict[int, Any] = {}
        """Slots by address, the most recently used at the end."""
        self._committed = threading.Event()
        self._committed.set()
        # The pages of memory that is unmapped while pinned are lost. A later slot at its address
        # would be mistaken for it, and the device would write into pages that no mapping shows.
        release = weakref.finalize(self, _release, self._pinned, self._streams)
        release.atexit = False

    def copy(self, state: State, memory: mmap.mmap) -> None:
        """Begin the copies; those of the CPU are made at the end."""
        torch = import_module("torch")

        remote = [one for one in zip_equal(state.pieces, state.tensors) if one[1].is_cuda]
        self._events = []
        with torch.no_grad():
            if remote:
                self._pin(memory, remote[0][1].device)
            for device in {tensor.device: None for _, tensor in remote}:
                there = [one for one in remote if one[1].device == device]
                self._events.append((device, self._copy_remote(there, memory, device)))
            for piece, tensor in zip_equal(state.pieces, state.tensors):
                if not tensor.is_cuda and tensor.numel():
                    view(memory, piece).copy_(tensor)

    def then(
        self,
        commit: Callable[[], None],
        finish: Callable[[], None],
        put: Callable[[Callable[[], None]], None],
    ) -> None:
        """Call `commit` when the copies are in, and then `finish` in the thread of `put`."""
        events, self._events = self._events, []
        if not events:
            commit()
            put(finish)
            return
        self._committed.clear()
        device_of = import_module("torch").cuda.device

        def arrived() -> None:
            try:
                for device, event in events:
                    # Without a chosen device, the thread would make a context on the first one.
                    with device_of(device):
                        event.synchronize()
                commit()
            finally:
                self._committed.set()
            put(finish)

        put(arrived)

    def wait(self) -> None:
        """Wait until the former save is whole: the next one must not begin while it is the only
        one."""
        self._committed.wait()

    def _copy_remote(self, remote: list[Any], memory: mmap.mmap, device: Any) -> Any:
        """Copy from one device; return its event."""
        torch = import_module("torch")

        cuda = torch.cuda
        if device not in self._streams:
            self._streams[device] = cuda.Stream(device)
        stream, now = self._streams[device], cuda.current_stream(device)
        stream.wait_stream(now)
        with cuda.stream(stream):
            for piece, tensor in remote:
                if tensor.numel():
                    # Otherwise the host would conjugate data that have not arrived.
                    result = tensor.resolve_conj().resolve_neg()
                    view(memory, piece).copy_(result, non_blocking=True)
                    tensor.record_stream(stream)
            # The thread that waits for it must sleep, not spin.
            event = cuda.Event(blocking=True)
            event.record(stream)
        now.wait_event(event)
        return event

    def _pin(self, memory: mmap.mmap, device: Any) -> None:
        """Let the device write directly into the slot; if that is refused, copies are only
        slower."""
        torch = import_module("torch")

        whole = torch.frombuffer(memory, dtype=torch.uint8)
        at = whole.data_ptr()
        if at in self._pinned:
            self._pinned[at] = self._pinned.pop(at)
            return
        if not _is_done(torch.cuda.cudart().cudaHostRegister(at, whole.numel(), PORTABLE), device):
            log.warning("memory of a snapshot cannot be pinned: saving is slow")
        # The mapping must outlive the pinning.
        self._pinned[at] = whole
        while len(self._pinned) > SLOTS:
            _unpin(self._pinned, next(iter(self._pinned)), device)


def _is_done(code: Any, device: Any) -> bool:
    """True if the CUDA runtime succeeded; an error is not left for the next kernel to find."""
    torch = import_module("torch")

    if code == torch.cuda.cudart().cudaError.success:
        return True
    with suppress(RuntimeError):
        torch.ones(1, device=device)
    return False


_lost: list[Any] = []
"""Slots that stay pinned, and so mapped."""


def _unpin(pinned: dict[int, Any], at: int, device: Any) -> None:
    whole = pinned.pop(at)
    cuda = import_module("torch").cuda
    with cuda.device(device):
        if whole.is_pinned() and not _is_done(cuda.cudart().cudaHostUnregister(at), device):
            _lost.append(whole)


def _release(pinned: dict[int, Any], streams: dict[Any, Any]) -> None:
    """Release everything; copies under way complete first."""
    try:
        for stream in streams.values():
            stream.synchronize()
        for at in list(pinned):
            _unpin(pinned, at, next(iter(streams)))
    except Exception as error:  # noqa: BLE001  (the device is broken)
        log.warning("snapshots stay pinned", error=error)
        _lost.extend(pinned.values())
