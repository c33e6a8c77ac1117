"""Tensors into a slot.

From the CPU by plain copies.  From CUDA by a stream of its own into the slot, which is pinned for
it: the device's own later work waits for these copies (it may write what is being read), the host
does not.  The header is then written by the thread, when the copies have arrived.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from .snapshot_state import State, view

if TYPE_CHECKING:
    import mmap


class Work(Protocol):
    """After the copies."""

    def commit(self) -> None:
        """The body is whole."""

    def finish(self) -> None:
        """What may take its time."""


class Thread(Protocol):
    """Does what may take its time."""

    def put(self, work: Callable[[], None]) -> None:
        """In order."""


class Copies:
    """Of one snapshot; one save at a time."""

    def __init__(self) -> None:
        self._stream: Any = None
        self._event: Any = None
        """Set when the newest copies from a device are in."""
        self._pinned: dict[int, Any] = {}
        self._committed = threading.Event()
        self._committed.set()

    def copy(self, state: State, memory: mmap.mmap) -> None:
        """Begin; what comes from the CPU is copied at the end."""
        torch = import_module("torch")

        remote = [one for one in zip(state.pieces, state.tensors, strict=True) if one[1].is_cuda]
        with torch.no_grad():
            if remote:
                self._copy_remote(remote, memory)
            for piece, tensor in zip(state.pieces, state.tensors, strict=True):
                if not tensor.is_cuda and tensor.numel():
                    view(memory, piece).copy_(tensor)

    def then(self, work: Work, thread: Thread) -> None:
        """Commit when the copies are in, and finish in the thread."""
        event, self._event = self._event, None
        if event is None:
            work.commit()
            thread.put(work.finish)
            return
        self._committed.clear()

        def arrived() -> None:
            try:
                event.synchronize()
                work.commit()
            finally:
                self._committed.set()
            thread.put(work.finish)

        thread.put(arrived)

    def wait(self) -> None:
        """Until the former save is whole: the next one must not begin while it is the only one."""
        self._committed.wait()

    def _copy_remote(self, remote: list[Any], memory: mmap.mmap) -> None:
        torch = import_module("torch")

        cuda = torch.cuda
        device = remote[0][1].device
        if self._stream is None:
            self._stream = cuda.Stream(device)
        self._pin(memory)
        now = cuda.current_stream(device)
        self._stream.wait_stream(now)
        with cuda.stream(self._stream):
            for piece, tensor in remote:
                if tensor.numel():
                    view(memory, piece).copy_(tensor, non_blocking=True)
                    tensor.record_stream(self._stream)
            self._event = self._stream.record_event()
        now.wait_event(self._event)

    def _pin(self, memory: mmap.mmap) -> None:
        """Let the device write there by itself; where it is refused copies are only slower."""
        torch = import_module("torch")

        whole = torch.frombuffer(memory, dtype=torch.uint8)
        at = whole.data_ptr()
        if at not in self._pinned:
            # The mapping must outlive the pinning, so both are kept until the process ends.
            cuda = torch.cuda
            cuda.cudart().cudaHostRegister(at, whole.numel(), 0)
            self._pinned[at] = whole
