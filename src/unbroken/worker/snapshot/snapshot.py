"""Snapshots of a training state in memory, each step if need be.

    snapshot = worker.Snapshot(model=model, optimizer=optimizer, rng=True, extra=state)
    found = snapshot.restore()      # after init_process_group; None: there is none
    for step in range(found.step + 1 if found else 0, steps):
        ...
        snapshot.save(step)

The memory is the agent's where there is one, and outlives this process.  `save` blocks for the copy
alone: checksums are made by a thread, and one that is not ready when its slot is due again is given
up.  Two slots are enough as long as all ranks meet once between two saves, as training in step
does: no rank can be more than one save ahead of another.

Tensors of the CPU are copied plainly into the slot. Each CUDA device copies by a stream of its own
into the slot, which is pinned for it. Later work of the current stream waits for these copies (it
may write what is being read), the host does not. The thread writes the header when the copies have
arrived.
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple, SupportsInt
from zlib import crc32

from unbroken.errors import SpecError, UnbrokenError
from unbroken.log_lines import Log
from unbroken.wire.compat import zip_equal
from unbroken.wire.snapshot import BODY_AT, NAME_BYTES_MAX, Header, aligned
from unbroken.worker import context
from unbroken.worker.restart import step_end
from unbroken.worker.restart.doubt import is_doubted

from .interval import Interval
from .reading import KeptParts, job_digest
from .restore import Restored, restore
from .slots import Slot, Slots
from .state import EXTRA, RNG, State, collect, view

if TYPE_CHECKING:
    import mmap

    from unbroken.worker.channel import Channel
    from unbroken.worker.checkpointing.checkpoints import Checkpoints


log = Log(__name__, "unbroken.worker: ")
SLOTS = 2
CALLS_LEFT_MAX = 1023
"""Calls of `save` after which memory that was refused is asked for again, at most."""
EXIT_SECONDS = 10.0
"""Longest wait of a process that ends for its last snapshot: a device that hangs never answers."""
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

    def then(self, work: _Sealing, thread: _Sealer) -> None:
        """Commit when the copies are in, and finish in the thread."""
        events, self._events = self._events, []
        if not events:
            work.commit()
            thread.put(work.finish)
            return
        self._committed.clear()
        device_of = import_module("torch").cuda.device

        def arrived() -> None:
            try:
                for device, event in events:
                    # Without a chosen device, the thread would make a context on the first one.
                    with device_of(device):
                        event.synchronize()
                work.commit()
            finally:
                self._committed.set()
            thread.put(work.finish)

        thread.put(arrived)

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


_named: weakref.WeakValueDictionary[str, Snapshot] = weakref.WeakValueDictionary()
ROOM_BYTES = 64 * 1024
"""Bytes beyond what the first save needs, so that a structure that grows a little needs no new
slot."""


class Snapshot(KeptParts):
    """The state of some parts, kept from step to step under a name.

    A part has `state_dict` and `load_state_dict`, or is a tensor. `extra` is a dict, filled again
    by `restore`, or a function whose result is kept and comes back as `Restored.extra`. `rng` keeps
    Python's, numpy's (if it is loaded) and torch's generators. Each rank keeps its part of
    DTensors; a different number of ranks divides them again.

    `replicas` is the group of ranks that hold the same state as this one: any of them can send it
    to a rank that has lost it. By default it is the whole world if nothing is sharded.

    `every` is what `is_due` answers: every so many steps. None: chosen in each attempt, after its
    first nine saves, so that a save takes at most 3 % of the time until the next.

    `checkpoints` are `worker.checkpoints` of the same parts, by the same names. `restore` takes the
    newest verified one if memory, replicas and buddies have no step that is as new. The script
    decides when they are saved.
    """

    def __init__(
        self,
        *,
        rng: bool = False,
        extra: dict[str, Any] | Callable[[], Any] | None = None,
        name: str = "training",
        replicas: Any = None,
        checkpoints: Checkpoints | None = None,
        every: int | None = 1,
        channel: Channel | None = None,
        **parts: Any,
    ) -> None:
        kept = dict(parts) | ({} if extra is None else {EXTRA: extra})
        _check(name, kept)
        if checkpoints is not None:
            _check_disk(checkpoints, parts)
        super().__init__(name, kept, rng, replicas, checkpoints, channel)
        self.restored: Restored | None = None
        self._open: list[Slot | None] = [None, None]
        self._next = 0
        self._pid = os.getpid()
        self._interval = Interval(every)
        self._calls_left = self._refusals = 0
        """Calls until memory is asked for again, and refusals in a row."""
        self._sealer = _Sealer()
        self._copies = Copies()
        before = _named.get(name)
        if before is not None and before.context.attempt == self.context.attempt:
            raise SpecError(f"a snapshot {name!r} exists already: close() it, or give a name=")
        _named[name] = self

    def is_due(self, step: SupportsInt) -> bool:
        """True if this step is to be saved, by `every`; all ranks get the same answer.

        Every rank calls it, after the same steps: where the interval is chosen, the tenth call of
        an attempt is a collective. Raises SpecError if the step is no number.
        """
        if context().attempt != self.context.attempt:
            self.rebind()
        return self._interval.is_due(_number(step))

    def save(self, step: SupportsInt) -> bool:
        """Copy the state as it is after this step; call it on every rank after the same steps.

        False: it was not kept, and the log has the reason (no memory; a newer attempt runs). The
        more often in a row memory was refused, the more calls pass until it is asked for again,
        1,023 at most. Raises SpecError if the state holds something that cannot be kept.
        """
        number = _number(step)
        if number < 0 or os.getpid() != self._pid:
            raise SpecError("snapshot: steps count from 0, and the process that made it saves")
        if context().attempt != self.context.attempt:
            self.rebind()
        if self._calls_left:
            self._calls_left -= 1
            return False
        began = perf_counter()
        state = collect(self.parts, self.has_rng)
        try:
            slot = self._slot(self._next, state)
        except UnbrokenError as error:
            self.complain(str(error), f"from step {number} on nothing is kept: ")
            self._calls_left = min(2**self._refusals - 1, CALLS_LEFT_MAX)
            self._refusals += 1
            return False
        self._refusals = 0
        self._copies.wait()
        if is_doubted(self.context.attempt):
            self.complain(f"step {number} is not kept: a collective of this attempt was aborted")
            return False
        slot.clear()
        if slot.layout not in (b"", state.layout):
            state.clear_gaps(slot.memory)
        slot.layout = state.layout
        self._copies.copy(state, slot.memory)
        header = self._header(state, slot, number)
        at = header.structure_at
        slot.memory[at : at + header.structure_bytes] = state.structure
        ended = perf_counter()
        self._interval.saved(began, ended)
        cost = _Cost(ended - began, self.replica_ranks)
        self._copies.then(
            _Sealing(slot, header, self._next, self._slots, self.complain, cost), self._sealer
        )
        self._next = 1 - self._next
        step_end.saved(self._copies.wait)
        return True

    def restore(self) -> Restored | None:
        """Restore the newest step that all ranks can produce; None: there is none, and nothing was
        changed.

        Every rank calls it, after `init_process_group` if there is a group.

        Raises CheckpointError if memory has none, and none of the checkpoints can be loaded. Raises
        WorldError if memory turned out to be bad while it was read, and no other step is left.
        """
        self.rebind()
        self.restored = restore(self)
        return self.restored

    def flush(self) -> None:
        """Wait until all saved data have checksums, and are known to the agent."""
        self._copies.wait()
        self._sealer.flush()

    def close(self) -> None:
        """Keep the saved data, and save no more."""
        self.flush()
        self._sealer.close()
        self._open = [None, None]
        if _named.get(self.name) is self:
            del _named[self.name]

    def rebind(self) -> None:
        """Take the rank and attempt from the environment; the former rank's memory is released."""
        self.flush()
        before, self.context = self.context, context()
        if before == self.context:
            return
        self._slots, self._open = self._bind(), [None, None]
        self._calls_left = self._refusals = 0
        self._interval.begin()

    def _slot(self, index: int, state: State) -> Slot:
        """Return a slot with enough room; a new one if the state has outgrown it."""
        slot = self._open[index]
        need = aligned(state.payload_bytes + len(state.structure))
        if slot is None or len(slot.memory) < BODY_AT + need + ROOM_BYTES // 2:
            self._open[index] = None
            capacity = need + ROOM_BYTES + len(state.structure)
            slot = self._open[index] = self._slots.open(index, capacity)
            slot.capacity = capacity
        return slot

    def _header(self, state: State, slot: Slot, step: int) -> Header:
        return Header(
            job=job_digest(self.context),
            name=self.name,
            attempt=self.context.attempt,
            step=step,
            rank=self.context.rank,
            world_size=self.context.world_size,
            layout=state.layout,
            capacity=slot.capacity,
            payload_bytes=state.payload_bytes,
            structure_bytes=len(state.structure),
            structure_checksum=crc32(state.structure),
        )


def _check(name: str, parts: Mapping[str, Any]) -> None:
    if not 0 < len(name.encode()) <= NAME_BYTES_MAX:
        raise SpecError(f"a snapshot's name has 1 to {NAME_BYTES_MAX} bytes: {name!r}")
    torch = import_module("torch")

    for key, part in parts.items():
        if key == RNG or (key != EXTRA and not isinstance(part, torch.Tensor) and not _loads(part)):
            raise SpecError(
                f"snapshot: {key} has no state_dict and load_state_dict: give it in extra={{...}}"
            )
    if not parts:
        raise SpecError("a snapshot of nothing: give model=, optimizer=, extra=...")


def _number(step: SupportsInt) -> int:
    try:
        return int(step)
    except (TypeError, ValueError) as error:
        raise SpecError(f"snapshot: a step is a whole number, not {step!r}") from error


def _check_disk(checkpoints: Any, parts: Mapping[str, Any]) -> None:
    if not hasattr(checkpoints, "restore_newer"):
        raise SpecError(f"snapshot: give checkpoints=worker.checkpoints(...), not {checkpoints!r}")
    for key, part in parts.items():
        if not _loads(part):
            raise SpecError(f"snapshot: {key} is a tensor, which checkpoints do not keep by itself")


def _loads(part: Any) -> bool:
    return hasattr(part, "state_dict") and hasattr(part, "load_state_dict")


class _Cost(NamedTuple):
    """Facts about a save for people, which the agent reports."""

    seconds: float
    """Seconds for which training waited."""
    replicas: str
    """Ranks that hold the same state, as ranges; empty: no others."""


class _Sealing:
    """Remaining work for a snapshot whose body has been copied."""

    def __init__(
        self,
        slot: Slot,
        header: Header,
        index: int,
        slots: Slots,
        complain: Callable[[str], None],
        cost: _Cost,
    ) -> None:
        self._slot, self._header, self._index = slot, header, index
        self._slots, self._complain, self._cost = slots, complain, cost
        self._number = 0

    def commit(self) -> None:
        """Make the snapshot restorable, unless a collective before it was aborted meanwhile."""
        if not is_doubted(self._header.attempt):
            self._number = self._slot.commit(self._header)

    def finish(self) -> None:
        """Compute its checksum, and report it to the agent."""
        if self._slot.seal(self._header, self._number):
            try:
                self._slots.saved(self._index, self._header.step, *self._cost)
            except UnbrokenError as error:
                self._complain(str(error))


class _Sealer:
    """A thread for this work, started on first use."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, work: Callable[[], None]) -> None:
        """Queue the work, in order."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="unbroken-snapshot", daemon=True)
            self._thread.start()
            _sealers.add(self)
        self._queue.put(work)

    def flush(self) -> None:
        """Wait until no work is left."""
        if self._thread is not None:
            done = threading.Event()
            self._queue.put(done.set)
            done.wait()

    def close(self, seconds: float | None = None) -> None:
        """Finish the work and end the thread; wait for it no longer than `seconds`, if given."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(seconds)
            self._thread = None
            _sealers.discard(self)

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                work()
            except Exception:
                log.exception("checksum of a snapshot failed")
            # A reference would keep the snapshot, and with it the model, while the thread waits for
            # the next.
            del work


_sealers: set[_Sealer] = set()
"""Those whose thread runs."""


def _end_all() -> None:
    """End the threads: one that frees a tensor while Python ends aborts the process."""
    for sealer in [*_sealers]:
        sealer.close(EXIT_SECONDS)


atexit.register(_end_all)
