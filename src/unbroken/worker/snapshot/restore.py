"""Return to the newest step that all ranks can produce.

Restoring proceeds in rounds. Each rank reports what it has. The owners check the chosen step. A
rank without it receives the whole slot from a replica and checks it as its own. All load. A step
found bad on one rank is dropped there, and the next choice is made. No state is changed before
everything has been checked everywhere. The buddies are asked only if memory and replicas do not
have the newest step.
"""

from __future__ import annotations

import mmap
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar
from zlib import crc32

from unbroken.errors import UnbrokenError, WorldError
from unbroken.log_lines import Log
from unbroken.wire.ipc import RECEIPT
from unbroken.wire.snapshot import (
    BODY_AT,
    CHUNK_BYTES,
    COPIED_AT,
    HEADERS_BYTES,
    SEALED_AT,
    Header,
    chunk,
    read,
    write,
)
from unbroken.worker.checkpointing.peers import ALONE, Peers, bytes_of, device, world
from unbroken.worker.checkpointing.storage import CheckpointError, Superseded

from .choice import (
    Offer,
    Point,
    Shares,
    asking,
    choose,
    differing,
    givers,
    is_divided_otherwise,
    lacking,
    ranges,
    transfers,
)
from .divided import Division
from .reading import KeptParts, complain_of_version, fitting
from .slots import Offered, Slot, faults, table
from .state import EXTRA, RNG, Kept, load


def replicas(world: Peers, group: Any) -> tuple[int, ...]:
    """Return the ranks of a group; None: all."""
    if world.world_size == 1 or group is None:
        return world.members
    return tuple(import_module("torch.distributed").get_process_group_ranks(group))


def send(header: Header, memory: Any, receiver: int) -> None:
    """Send a whole slot."""
    torch = import_module("torch")
    dist = import_module("torch.distributed")

    told = bytearray(HEADERS_BYTES)
    data = write(header)
    at = COPIED_AT if header.table_checksum is None else SEALED_AT
    told[at : at + len(data)] = data
    dist.send(torch.frombuffer(told, dtype=torch.uint8).to(device()), dst=receiver)
    body = torch.frombuffer(memory, dtype=torch.uint8)
    for begin, end in _spans(header):
        dist.send(body[begin:end].to(device()), dst=receiver)


def receive(sender: int) -> tuple[Header, mmap.mmap]:
    """Receive a slot as it lies there.

    Raises WorldError if there is no memory for it; it was received all the same, so that the sender
    can continue.
    """
    torch = import_module("torch")
    dist = import_module("torch.distributed")

    told = torch.empty(HEADERS_BYTES, dtype=torch.uint8, device=device())
    dist.recv(told, src=sender)
    header = read(bytes_of(told), sys.maxsize)
    if header is None:
        raise WorldError("its header is malformed")
    memory, failure = None, ""
    try:
        memory = mmap.mmap(-1, header.table_at + 4 * header.chunks)
    except OSError as error:
        failure = f"no memory for a snapshot of {header.body_bytes} bytes: {error.strerror}"
    for begin, end in _spans(header):
        part = torch.empty(end - begin, dtype=torch.uint8, device=device())
        dist.recv(part, src=sender)
        if memory is not None:
            torch.frombuffer(memory, dtype=torch.uint8)[begin:end].copy_(part)
    if memory is None:
        raise WorldError(failure)
    return header, memory


def _spans(header: Header) -> list[tuple[int, int]]:
    """Yield the body in chunks, then the table."""
    body = [chunk(one, header.body_bytes) for one in range(header.chunks)]
    return [*body, (header.table_at, header.table_at + 4 * header.chunks)]


TRIES = 2
"""Attempts to read a share: memory may have it twice, as its own and as a buddy's copy."""
T = TypeVar("T")
log = Log(__name__, "unbroken.worker: ")


@dataclass(frozen=True)
class Restored:
    """State that has been restored on this rank."""

    step: int
    source: str
    """`memory`, `replica rank 3`, `buddy 1` (its node rank), `memory of 4 ranks, divided anew`, or
    `disk`, or the scheme of a URL, such as `s3`."""
    seconds: float
    checksum: str
    """Checksum of the state that replicas share: all but `extra` and `rng`.

    From disk it is that of the checkpoint's files, and empty if each node has its own.
    """
    attempt: int | None
    """Attempt that saved it; None: from disk."""
    extra: Any = None
    missing: tuple[str, ...] = ()
    """Parts that are not available: each rank's own values, such as `rng`, which stay as they
    are."""


def restore(snapshot: KeptParts) -> Restored | None:
    """Carry out `Snapshot.restore`."""
    search = _Search(snapshot)
    snapshot.replica_ranks = ranges(search.replicas)
    is_touched = False
    while True:
        point = search.choice()
        restored = search.from_disk(point)
        if restored is None and point is not None:
            copy = search.obtained(point)
            if copy is None:
                continue
            is_touched = True
            restored = search.loaded(copy, point)
            if restored is None:
                continue
        if restored is not None:
            _tell(snapshot, restored)
            return restored
        if is_touched:
            raise WorldError(
                "a snapshot could not be loaded in full, and the state is a mixture "
                "now: start from a checkpoint on disk"
            )
        return None


@dataclass(frozen=True)
class _Copy:
    """A snapshot that has been checked."""

    header: Header
    kept: Kept
    source: str
    slot: Slot | None
    """Its slot, where it may still change."""

    def ready(self) -> _Ready:
        """Return the state, ready to be loaded."""
        return _Ready(self.kept, self.source, lambda: _checksum(self), self.slot)


@dataclass(frozen=True)
class _Ready:
    """A state that fits this rank and has been checked."""

    kept: Kept
    source: str
    checksum: Callable[[], str]
    slot: Slot | None = None
    """Slot of this rank, where it may still change."""
    missing: tuple[str, ...] = ()


class _Search:
    """The state that this rank and all others have; all of them call every method together."""

    def __init__(self, snapshot: KeptParts) -> None:
        self._snapshot, self._world, self._began = snapshot, world() or ALONE, perf_counter()
        self._bad: set[Point] = set()
        self._own: dict[Point, _Copy] = {}
        self._elsewhere: set[Point] = set()
        """Points that buddies have."""
        self._spoilt: set[Point] = set()
        self._has_asked = False
        self._offers: Sequence[Offer] = ()
        self._shares: Mapping[Point, Shares] = {}
        """Shares of divided state, of any rank, that this rank's agent has."""
        self._failed: Counter[tuple[int, Point]] = Counter()
        if _is_sharded(snapshot.parts):
            self._find_offers()
        self._take(snapshot.find)
        self.replicas = self._replicas()

    def choice(self) -> Point | None:
        """Return the newest step that all can produce; the buddies have been asked, if that may
        help."""
        self._offer()
        while ranks := asking(self._offers, self._bad):
            if self._world.rank in ranks:
                self._ask()
            self._offer()
        point = choose(self._offers, self._bad)
        self._regret(point)
        return point

    def obtained(self, point: Point) -> _Ready | None:
        """Return the choice for this rank, checked in full; None: some rank found it bad."""
        if is_divided_otherwise(self._offers, point):
            return self._divided(point)
        had = point in self._own or point in self._elsewhere
        if point not in self._own and point in self._elsewhere:
            self._elsewhere.remove(point)
            self._take(lambda: self._snapshot.fetch(*point))
        mine = self._own.get(point)
        if mine is not None and (result := faults(mine.kept.memory, mine.header)):
            self._complain(point, "; ".join(result[:3]))
            self._give_up(point)
        if not all(self._world.gather((point in self._own) == had)):
            return None
        for sender, receiver in transfers(self._offers, point):
            if self._world.rank == sender and mine is not None:
                send(mine.header, mine.kept.memory, receiver)
            elif self._world.rank == receiver:
                mine = self._received(sender)
        return self._agreed(None if mine is None else mine.ready(), point)

    def loaded(self, copy: _Ready, point: Point) -> Restored | None:
        """Load it; None: it changed meanwhile, on some rank."""
        return self._agreed(self._loaded(copy, point), point)

    def from_disk(self, point: Point | None) -> Restored | None:
        """Return the newest checkpoint on disk, if it is newer than the choice."""
        saved, parts = self._snapshot.checkpoints, self._snapshot.parts
        if saved is None:
            return None
        objects = {name: part for name, part in parts.items() if name != EXTRA}
        try:
            result = saved.restore_newer(-1 if point is None else point[1], objects)
        except CheckpointError as error:
            if point is None or isinstance(error, Superseded):
                raise
            self._snapshot.complain(f"{error}; memory is taken")
            return None
        if result is None:
            return None
        extra = parts.get(EXTRA)
        if isinstance(extra, dict):
            extra.clear()
            extra.update(result.extra)
        return Restored(
            step=result.step,
            source="disk" if isinstance(result.path, Path) else result.path.partition(":")[0],
            seconds=perf_counter() - self._began,
            checksum=result.checksum,
            attempt=None,
            extra=result.extra if EXTRA in parts else None,
        )

    def _offer(self) -> None:
        points = tuple(self._own.keys() | self._elsewhere)
        is_declared = self._snapshot.replicas is not None
        sums = {} if is_declared else {at: _known_checksum(own) for at, own in self._own.items()}
        own = Offer(points, self.replicas, self._has_asked, self._shares, is_declared, sums)
        self._offers = self._world.gather(own)

    def _find_offers(self) -> None:
        """Ask the agent for the state of all ranks; points that have failed twice are left out."""
        result: Mapping[Point, Shares] = {}
        try:
            result = self._snapshot.everyone()
        except UnbrokenError as error:
            self._snapshot.complain(f"nothing can be divided anew: {error}")
        self._shares = {
            point: Shares(
                shares.world_size,
                tuple(rank for rank in shares.ranks if self._failed[rank, point] < TRIES),
            )
            for point, shares in result.items()
        }

    def _regret(self, choice: Point | None) -> None:
        """Log the shares that are missing of newer steps that other ranks have divided."""
        known = {point for offer in self._offers for point in offer.shares} - self._bad
        for point in known:
            if is_divided_otherwise(self._offers, point) and (choice is None or point > choice):
                size, ranks = lacking(self._offers, point)
                text = ranges(ranks) or "".join(map(str, ranks))
                self._complain(
                    point,
                    f"it was saved by {size} ranks, and what rank {text} had is in no memory: an "
                    "older step is taken, or a checkpoint on disk (checkpoints=...)",
                )
        for point in {point for offer in self._offers for point in offer.checksums} - self._bad:
            others = differing(self._offers, range(len(self._offers)), point)
            if others and (choice is None or point > choice):
                self._complain(
                    point,
                    "the ranks have different states, so that none can replace a lost one: an "
                    "older step is taken, or a checkpoint on disk (if they are replicas, say so: "
                    "replicas=...)",
                )

    def _divided(self, point: Point) -> _Ready | None:
        """Return state saved by a different number of ranks, as this rank needs it."""
        sharing = givers(self._offers, point)
        division = Division(self._snapshot, self._world, point, sharing)
        failed = division.open()
        for rank, why in failed.items():
            self._failed[rank, point] += 1
            self._complain(point, f"the share of rank {rank}: {why}")
        if any(self._world.gather(bool(failed))):
            self._find_offers()
            return None
        try:
            anew = division.carry_out()
        except CheckpointError as error:
            self._bad.add(point)
            self._complain(point, str(error))
            return None
        source = f"memory of {len(sharing)} ranks, divided anew"
        return _Ready(anew, source, anew.checksum, missing=anew.missing)

    def _ask(self) -> None:
        self._has_asked = True
        try:
            self._elsewhere = set(self._snapshot.copies()) - self._own.keys()
        except UnbrokenError as error:
            self._snapshot.complain(f"buddies cannot be asked: {error}")

    def _take(self, look: Callable[[], list[Offered]]) -> None:
        """Add the slots found, as far as their headers and structures can be read."""
        try:
            result = look()
        except UnbrokenError as error:
            self._snapshot.complain(f"nothing can be restored: {error}")
            return
        for slot, source in result:
            header = slot.header()
            if header is None:
                complain_of_version(self._snapshot, slot)
                continue
            point = header.attempt, header.step
            if point in self._shares and header.world_size != self._world.world_size:
                continue
            try:
                kept = fitting(self._snapshot, header, slot.memory, self._snapshot.context.rank)
            except ValueError as error:
                self._complain(point, f"it is left: {error}")
                continue
            self._own.setdefault(point, _Copy(header, kept, source, slot))

    def _replicas(self) -> tuple[int, ...]:
        """Return the replicas; sharded state has replicas only if they are declared."""
        if self._snapshot.replicas is not None:
            return replicas(self._world, self._snapshot.replicas)
        kept = any(one.is_sharded for one in (copy.kept for copy in self._own.values()))
        if kept or _is_sharded(self._snapshot.parts):
            return (self._world.rank,)
        return self._world.members

    def _agreed(self, mine: T | None, point: Point) -> T | None:
        """Return it, if every rank has succeeded; otherwise no rank takes this step any more."""
        if all(self._world.gather(mine is not None)):
            return mine
        self._bad.add(point)
        self._complain(point, "it cannot be restored by all ranks")
        return None

    def _give_up(self, point: Point) -> None:
        """Drop this rank's copy; a buddy may have a better one, which the agent brings if it finds
        none here."""
        slot = self._own.pop(point).slot
        if slot is not None:
            slot.clear()
        self._has_asked = self._has_asked and point in self._spoilt
        self._spoilt.add(point)

    def _received(self, sender: int) -> _Copy | None:
        try:
            header, memory = receive(sender)
            result = faults(memory, header)
            if result:
                raise WorldError("; ".join(result[:3]))
            kept = fitting(self._snapshot, header, memory, sender)
        except (WorldError, ValueError) as error:
            self._snapshot.complain(f"what rank {sender} has sent cannot be used: {error}")
            return None
        return _Copy(header, kept, f"replica rank {sender}", None)

    def _loaded(self, copy: _Ready, point: Point) -> Restored | None:
        snapshot, is_own = self._snapshot, copy.slot is not None
        try:
            parts = {
                name: part for name, part in snapshot.parts.items() if name not in copy.missing
            }
            extra = load(copy.kept, parts, snapshot.has_rng and is_own)
        except Exception:
            # A user's load_state_dict may raise anything: the other ranks wait for the result.
            log.exception("snapshot cannot be loaded", snapshot=snapshot.name)
            return None
        now = None if copy.slot is None else copy.slot.header()
        if is_own and (now is None or (now.attempt, now.step) != point):
            self._complain(point, "it was overwritten while it was read")
            return None
        missing = copy.missing + ((RNG,) if snapshot.has_rng and not is_own else ())
        if missing:
            lost = ", ".join(missing)
            snapshot.complain(f"this rank's own {lost} cannot be had, and stays as it is")
        return Restored(
            step=point[1],
            source=copy.source,
            seconds=perf_counter() - self._began,
            checksum=copy.checksum(),
            attempt=point[0],
            extra=extra if EXTRA in snapshot.parts else None,
            missing=missing,
        )

    def _complain(self, point: Point, why: str) -> None:
        self._snapshot.complain(f"step {point[1]} of attempt {point[0]}: {why}")


def _is_sharded(parts: Mapping[str, Any]) -> bool:
    return any(
        hasattr(parameter, "device_mesh")
        for part in parts.values()
        if hasattr(part, "parameters")
        for parameter in part.parameters()
    )


def _known_checksum(copy: _Copy) -> str:
    """Return the same where it takes no reading of the whole state; else an empty text."""
    return "" if copy.header.table_checksum is None else _checksum(copy)


def _checksum(copy: _Copy) -> str:
    """Return the checksum of the parts before `extra` and the generators, which are each rank's
    own."""
    header, memory = copy.header, copy.kept.memory
    text, end = copy.kept.shared()
    size = 4 * header.chunks
    is_summed = header.table_checksum is not None
    sums = (
        bytes(memory[header.table_at : header.table_at + size])
        if is_summed
        else table(memory, header)
    )
    full = (end - BODY_AT) // CHUNK_BYTES
    result = crc32(sums[: 4 * full], crc32(text.encode()))
    return f"{crc32(memoryview(memory)[BODY_AT + full * CHUNK_BYTES : end], result):08x}"


def _tell(snapshot: KeptParts, restored: Restored) -> None:
    log.info(
        "snapshot restored",
        snapshot=snapshot.name,
        step=restored.step,
        source=restored.source,
        seconds=restored.seconds,
    )
    if restored.attempt is not None:
        try:
            snapshot.used(restored.attempt, restored.step)
        except UnbrokenError as error:
            snapshot.complain(str(error))
    tell = getattr(snapshot.channel, "send", None)
    if tell is not None:
        tell({
            "type": RECEIPT, "name": snapshot.name, "rank": snapshot.context.rank,
            "attempt": snapshot.context.attempt, "step": restored.step, "source": restored.source,
            "seconds": restored.seconds, "checksum": restored.checksum,
            "saved_attempt": restored.attempt, "replicas": snapshot.replica_ranks,
        })  # fmt: skip
