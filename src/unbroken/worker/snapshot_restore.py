"""Back to the newest step that all ranks can produce.

All ranks decide alike, because all decide by what all have said.  Rounds: each says what it has;
the choice is checked by its owners; who has nothing receives the whole slot from a replica and
checks it as its own; all load.  What fails on one rank is taken out on all, and the next choice is
made.  Nothing is touched before everything has been checked everywhere.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from time import perf_counter
from typing import TYPE_CHECKING, Any
from zlib import crc32

from unbroken.errors import PeerError, UnbrokenError, WorldError
from unbroken.wire.ipc import RECEIPT
from unbroken.wire.snapshot import Header, chunk

from .snapshot_slots import Slot, faults, table
from .snapshot_state import EXTRA, RNG, Kept, difference, load, parse

if TYPE_CHECKING:
    from .snapshot import Snapshot

logger = logging.getLogger(__name__)

Point = tuple[int, int]
"""Attempt and step.  A newer attempt comes first: it went on from what it could restore."""


@dataclass(frozen=True)
class Restored:
    """What has been restored on this rank."""

    step: int
    source: str
    """`memory`, or `replica rank 3`."""
    seconds: float
    checksum: str
    """Of the state's bytes; equal where all of it is."""
    attempt: int
    """In which it was saved."""
    extra: Any = None
    missing: tuple[str, ...] = ()
    """Parts that a replica cannot give: `rng` is each rank's own and stays as it is."""


@dataclass(frozen=True)
class Offer:
    """What a rank says of itself."""

    points: tuple[Point, ...]
    replicas: tuple[int, ...]
    """Ranks that hold the same state as it, itself among them."""


def choose(offers: Sequence[Offer], bad: Collection[Point] = ()) -> Point | None:
    """The newest that every rank has, or a replica of it."""
    points = {point for offer in offers for point in offer.points} - set(bad)
    for point in sorted(points, reverse=True):
        if all(sources(offers, rank, point) for rank in range(len(offers))):
            return point
    return None


def sources(offers: Sequence[Offer], rank: int, point: Point) -> list[int]:
    """Who can give it to a rank: itself, if it has it."""
    if point in offers[rank].points:
        return [rank]
    # Both must say so: a rank that is declared on one side alone may hold something else.
    return [
        other
        for other in offers[rank].replicas
        if rank in offers[other].replicas and point in offers[other].points
    ]


def transfers(offers: Sequence[Offer], point: Point) -> list[tuple[int, int]]:
    """Who sends to whom, in the order in which all carry it out; senders take turns."""
    found: list[tuple[int, int]] = []
    for rank in range(len(offers)):
        givers = sources(offers, rank, point)
        if givers != [rank]:
            found.append((givers[len(found) % len(givers)], rank))
    return found


def restore(snapshot: Snapshot) -> Restored | None:
    """What `Snapshot.restore` does."""
    began = perf_counter()
    world = _World()
    own = _offered(snapshot)
    offers: list[Offer] = world.gather(Offer(tuple(own), _replicas(snapshot, own, world)))
    bad: set[Point] = set()
    is_touched = False
    while (point := choose(offers, bad)) is not None:
        kept = _obtained(snapshot, world, offers, own, point)
        if all(world.gather(kept is not None)) and kept is not None:
            is_touched = True
            restored = _loaded(snapshot, kept, point, began)
            if all(world.gather(restored is not None)) and restored is not None:
                _tell(snapshot, restored, point)
                return restored
        bad.add(point)
        snapshot.complain(f"step {point[1]} of attempt {point[0]} cannot be restored by all ranks")
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
    """Where it may still change."""


class _World:
    """All ranks: the default process group, or this process alone."""

    def __init__(self) -> None:
        dist = import_module("torch.distributed")

        self.is_one = not (dist.is_available() and dist.is_initialized())
        self.rank = 0 if self.is_one else dist.get_rank()
        self.size = 1 if self.is_one else dist.get_world_size()

    def gather(self, own: Any) -> list[Any]:
        """What every rank says, by rank."""
        dist = import_module("torch.distributed")

        if self.is_one:
            return [own]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, own)
        return found

    def replicas(self, group: Any) -> tuple[int, ...]:
        """Ranks of a group; None: all."""
        dist = import_module("torch.distributed")

        if self.is_one or group is None:
            return tuple(range(self.size))
        return tuple(dist.get_process_group_ranks(group))


def _offered(snapshot: Snapshot) -> dict[Point, _Copy]:
    """What this rank's own memory has, as far as headers and structures tell."""
    found: dict[Point, _Copy] = {}
    try:
        slots = snapshot.find()
    except UnbrokenError as error:
        snapshot.complain(f"nothing can be restored: {error}")
        return found
    for slot in slots:
        header = slot.header()
        if header is None:
            continue
        try:
            kept = _fitting(snapshot, header, slot.memory, snapshot.context.rank)
        except ValueError as error:
            snapshot.complain(f"step {header.step} of attempt {header.attempt} is left: {error}")
            continue
        found[header.attempt, header.step] = _Copy(header, kept, "memory", slot)
    return found


def _fitting(snapshot: Snapshot, header: Header, memory: Any, rank: int) -> Kept:
    """The structure of a snapshot that this rank may load; ValueError: why it may not."""
    from .snapshot import job_digest

    here = snapshot.context
    if header.job != job_digest(here) or header.name != snapshot.name:
        raise ValueError(f"it is another job's, or has another name ({header.name!r})")
    if (header.rank, header.world_size) != (rank, here.world_size) or rank >= here.world_size:
        raise ValueError(
            f"it is of rank {header.rank} of {header.world_size}, this is {here.rank} of "
            f"{here.world_size}; a changed world needs a checkpoint"
        )
    structure = memory[header.structure_at : header.structure_at + header.structure_bytes]
    if crc32(structure) != header.structure_checksum:
        raise ValueError("its structure does not fit its checksum")
    kept = parse(bytes(structure), memory, snapshot.parts)
    try:
        reason = difference(kept, snapshot.parts, snapshot.has_rng)
    except UnbrokenError as error:
        reason = str(error)
    if reason:
        raise ValueError(reason)
    return kept


def _replicas(snapshot: Snapshot, own: Mapping[Point, _Copy], world: _World) -> tuple[int, ...]:
    """Sharded state has replicas only where they are declared."""
    if snapshot.replicas is not None:
        return world.replicas(snapshot.replicas)
    kept = [one for copy in own.values() for one in copy.kept.pieces]
    if any(one.sharding for one in kept) or _is_sharded(snapshot.parts):
        return (world.rank,)
    return world.replicas(None)


def _is_sharded(parts: Mapping[str, Any]) -> bool:
    return any(
        hasattr(one, "device_mesh")
        for part in parts.values()
        if hasattr(part, "parameters")
        for one in part.parameters()
    )


def _obtained(
    snapshot: Snapshot,
    world: _World,
    offers: Sequence[Offer],
    own: Mapping[Point, _Copy],
    point: Point,
) -> _Copy | None:
    """This rank's copy of the choice, checked in full; None: it has turned out to be bad."""
    mine = own.get(point)
    try:
        if mine is not None:
            _check(mine.kept.memory, mine.header)
    except WorldError as error:
        snapshot.complain(f"step {point[1]} of attempt {point[0]}: {error}")
        mine = None
    if not all(world.gather(mine is not None or point not in own)):
        return None
    for sender, receiver in transfers(offers, point):
        if world.rank == sender and mine is not None:
            _send(mine, receiver)
        elif world.rank == receiver:
            mine = _received(snapshot, sender)
    return mine


def _check(memory: Any, header: Header) -> None:
    found = faults(memory, header)
    if found:
        raise WorldError("; ".join(found[:3]))


def _send(copy: _Copy, receiver: int) -> None:
    torch = import_module("torch")
    dist = import_module("torch.distributed")

    dist.send_object_list([copy.header], dst=receiver)
    body = torch.frombuffer(copy.kept.memory, dtype=torch.uint8)
    for begin, end in _spans(copy.header):
        dist.send(body[begin:end].to(_device()), dst=receiver)


def _received(snapshot: Snapshot, sender: int) -> _Copy | None:
    """A slot of another rank, as it lies there; checked as if it were this rank's own."""
    torch = import_module("torch")
    dist = import_module("torch.distributed")

    told: list[Any] = [None]
    dist.recv_object_list(told, src=sender)
    header: Header = told[0]
    memory = mmap.mmap(-1, header.table_at + 4 * header.chunks)
    body = torch.frombuffer(memory, dtype=torch.uint8)
    for begin, end in _spans(header):
        part = torch.empty(end - begin, dtype=torch.uint8, device=_device())
        dist.recv(part, src=sender)
        body[begin:end].copy_(part)
    try:
        _check(memory, header)
        kept = _fitting(snapshot, header, memory, sender)
    except (WorldError, ValueError) as error:
        snapshot.complain(f"what rank {sender} has sent cannot be used: {error}")
        return None
    return _Copy(header, kept, f"replica rank {sender}", None)


def _spans(header: Header) -> list[tuple[int, int]]:
    """The body in chunks, then the table."""
    body = [chunk(one, header.body_bytes) for one in range(header.chunks)]
    return [*body, (header.table_at, header.table_at + 4 * header.chunks)]


def _device() -> str:
    dist = import_module("torch.distributed")

    return "cuda" if dist.get_backend() == "nccl" else "cpu"


def _loaded(snapshot: Snapshot, copy: _Copy, point: Point, began: float) -> Restored | None:
    """Load it; None: it changed meanwhile."""
    is_own = copy.slot is not None
    try:
        extra = load(copy.kept, snapshot.parts, snapshot.has_rng and is_own)
    except Exception:
        # Whatever a user's load_state_dict raises: the other ranks wait to hear of it.
        logger.exception("unbroken.worker: snapshot %r: it cannot be loaded", snapshot.name)
        return None
    now = copy.slot.header() if copy.slot is not None else copy.header
    if now is None or (now.attempt, now.step) != point:
        snapshot.complain(
            f"step {point[1]} of attempt {point[0]} was overwritten while it was read"
        )
        return None
    missing = (RNG,) if snapshot.has_rng and not is_own else ()
    if missing:
        snapshot.complain("the random generators of this rank are lost, and stay as they are")
    return Restored(
        step=point[1],
        source=copy.source,
        seconds=perf_counter() - began,
        checksum=_checksum(copy),
        attempt=point[0],
        extra=extra if EXTRA in snapshot.parts else None,
        missing=missing,
    )


def _checksum(copy: _Copy) -> str:
    found = copy.header.table_checksum
    if found is None:
        found = crc32(table(copy.kept.memory, copy.header))
    return f"{found:08x}"


def _tell(snapshot: Snapshot, restored: Restored, point: Point) -> None:
    logger.info(
        "unbroken.worker: snapshot %r: step %d from %s in %.3f s",
        *(snapshot.name, restored.step, restored.source, restored.seconds),
    )
    try:
        snapshot.used(*point)
    except (WorldError, PeerError) as error:
        snapshot.complain(str(error))
    send = getattr(snapshot.channel, "send", None)
    if send is not None:
        send({
            "type": RECEIPT, "rank": snapshot.context.rank, "attempt": snapshot.context.attempt,
            "step": restored.step, "source": restored.source, "seconds": restored.seconds,
            "checksum": restored.checksum,
        })  # fmt: skip
