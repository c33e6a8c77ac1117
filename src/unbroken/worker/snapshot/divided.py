"""A state saved by a different number of ranks, divided again among the present ranks.

Model, optimizer and all objects with DTensors are one state, taken from old rank 0. Other parts (a
scheduler, a loader, `extra`) are each rank's own. If all ranks had the same value, all get it.
Otherwise each rank gets the value of its number, and a rank with a new number gets nothing.

These are refused with a reason: tensors that no mesh divides and that differ between ranks, and
meshes of some of the ranks only. So is another kind of division than that of the live model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module
from itertools import zip_longest
from typing import Any, TypeVar
from zlib import crc32

from unbroken.errors import UnbrokenError, WorldError
from unbroken.log_lines import Log
from unbroken.wire.compat import zip_equal
from unbroken.wire.snapshot import Header, digest
from unbroken.worker.checkpointing.peers import Peers, device
from unbroken.worker.checkpointing.storage import CheckpointError
from unbroken.worker.typed_values import decode, exchanged, torch_dtype

from .choice import Point
from .reading import KeptParts, structure
from .slots import Slot, faults
from .state import (
    EXTRA,
    RNG,
    Kept,
    Piece,
    difference,
    mesh_name,
    sharded,
    size_of,
    view,
)

Key = tuple[str, int]
"""A part, and the number of one of its tensors, in the order in which they are read."""
Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets in the whole tensor, and lengths."""


@dataclass(frozen=True)
class Saved:
    """A tensor as the old ranks have saved it."""

    piece: Piece
    """The piece of one rank."""
    ranks: range
    """Ranks that have shards, or the rank that provides an unsharded tensor."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the whole."""
        return self.piece.sharding[0] if self.piece.sharding else self.piece.shape

    def boxes(self) -> dict[Box, list[int]]:
        """Return all saved boxes and the ranks that have each; several if it was replicated."""
        if not self.piece.sharding:
            return {((0,) * len(self.shape), self.shape): [*self.ranks]}
        result: dict[Box, list[int]] = {}
        for rank in self.ranks:
            result.setdefault(box(self.piece.sharding, rank), []).append(rank)
        return {one: ranks for one, ranks in result.items() if math.prod(one[1])}


@exchanged
@dataclass(frozen=True)
class Want:
    """A box of an old rank's piece."""

    rank: int
    key: Key
    offsets: tuple[int, ...]
    """Offsets in that rank's piece."""
    lengths: tuple[int, ...]

    def of(self, tensor: Any) -> Any:
        """Return the box, without a copy."""
        for dim, (begin, length) in enumerate(zip_equal(self.offsets, self.lengths)):
            tensor = tensor.narrow(dim, begin, length)
        return tensor


@lru_cache(maxsize=65536)
def box(sharding: tuple[Any, ...], rank: int) -> Box:
    """Return the box of a rank in a DTensor, which is divided as torch.chunk divides.

    Raises ValueError if its mesh is not of that rank.
    """
    shape, _, (mesh, ranks, _), placements = sharding
    place, offsets, lengths = ranks.index(rank), [0] * len(shape), list(shape)
    strides = [math.prod(mesh[dim + 1 :]) for dim in range(len(mesh))]
    for count, stride, (kind, dim) in zip_equal(mesh, strides, placements):
        if kind == "Shard":
            full = -(-lengths[dim] // count)
            begin = min(full * (place // stride % count), lengths[dim])
            offsets[dim] += begin
            lengths[dim] = min(full, lengths[dim] - begin)
    return tuple(offsets), tuple(lengths)


def plan(
    tensors: Mapping[Key, Any], saved: Mapping[Key, Saved], rank: int, near: Collection[int]
) -> list[tuple[Want, Any]]:
    """Return the copies to make, with their targets; `near` are old ranks whose shares are at hand.

    Raises ValueError if they do not make up all of the tensors.
    """
    planners = import_module("torch.distributed.checkpoint.default_planner")

    names = {f"{part}.{number}": (part, number) for part, number in tensors}
    boxes = {name: saved[key].boxes() for name, key in names.items()}
    targets = {name: tensors[key] for name, key in names.items()}
    stored = {name: _stored(saved[key], boxes[name]) for name, key in names.items()}
    holders = {(name, at): ranks for name, own in boxes.items() for (at, _), ranks in own.items()}
    planner = planners.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(targets, _metadata().Metadata(stored), False)
    left = {name: local(target).numel() for name, target in targets.items()}
    result = []
    for item in planner.create_local_plan().items:
        index, lengths = item.storage_index, tuple(item.lengths)
        having = holders[index.fqn, tuple(index.offset)]
        source = next((one for one in having if one in near), having[rank % len(having)])
        want = Want(source, names[index.fqn], tuple(item.storage_offsets), lengths)
        result.append((want, planner.resolve_tensor(item).detach()))
        left[index.fqn] -= math.prod(lengths)
    if any(left.values()):
        raise ValueError(f"{next(one for one in left if left[one])} is not there in full")
    return result


def _stored(saved: Saved, boxes: Mapping[Box, list[int]]) -> Any:
    torch, metadata = import_module("torch"), _metadata()

    chunks = [
        metadata.ChunkStorageMetadata(torch.Size(offsets), torch.Size(lengths))
        for offsets, lengths in boxes
    ]
    properties = metadata.TensorProperties(dtype=getattr(torch, saved.piece.dtype))
    return metadata.TensorStorageMetadata(properties, torch.Size(saved.shape), chunks)


def _metadata() -> Any:
    return import_module("torch.distributed.checkpoint.metadata")


def local(tensor: Any) -> Any:
    """Return this rank's part."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


BATCH_BYTES = 64 * 1024 * 1024
"""Bytes of one message, unless a single tensor is larger."""
_SUM_BYTES = 4


def exchange(world: Peers, gives: Sequence[Sequence[Any]], takes: Sequence[Sequence[Any]]) -> None:
    """Send tensors to each rank, and receive into tensors from each; both sides know all of them,
    in this order.

    Raises WorldError if some were changed on their way; the others have come all the same.
    """
    rank, size, is_whole = world.rank, world.world_size, True
    with import_module("torch").no_grad():
        for source, target in zip_equal(gives[rank], takes[rank]):
            target.copy_(source)
        for shift in range(1, size):
            to, sender = (rank + shift) % size, (rank - shift) % size
            for giving, taking in zip_longest(_batches(gives[to]), _batches(takes[sender])):
                is_whole &= _swapped(giving, to, taking, sender)
    if not is_whole:
        raise WorldError("what another rank has sent does not fit its checksum")


def _swapped(giving: list[Any] | None, to: int, taking: list[Any] | None, sender: int) -> bool:
    """Exchange a message each way, of which one may be None; return whether it arrived as sent."""
    torch, dist = import_module("torch"), import_module("torch.distributed")

    operations, came = [], bytearray(_size(taking or []))
    arriving = torch.frombuffer(came, dtype=torch.uint8).to(device())
    if giving is not None:
        operations.append(dist.P2POp(dist.isend, packed(giving).to(device()), to))
    if taking is not None:
        operations.append(dist.P2POp(dist.irecv, arriving, sender))
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    if arriving.is_cuda:
        torch.frombuffer(came, dtype=torch.uint8).copy_(arriving)
    if taking is None:
        return True
    return unpacked(came, taking)


def _size(tensors: Sequence[Any]) -> int:
    return _SUM_BYTES + sum(int(item.nbytes) for item in tensors)


def packed(tensors: Sequence[Any]) -> Any:
    """Return a message: the bytes of the tensors, and their checksum."""
    torch = import_module("torch")

    message = bytearray(_size(tensors))
    body, begin = torch.frombuffer(message, dtype=torch.uint8), 0
    for item in tensors:
        body[begin : begin + item.nbytes] = _bytes(item)
        begin += item.nbytes
    message[begin:] = crc32(memoryview(message)[:begin]).to_bytes(_SUM_BYTES, "little")
    return body


def unpacked(message: bytearray, tensors: Sequence[Any]) -> bool:
    """Fill the tensors from a message; return False, with nothing filled, if it is not what was
    sent."""
    torch = import_module("torch")

    body, begin = torch.frombuffer(message, dtype=torch.uint8), 0
    end = len(message) - _SUM_BYTES
    if crc32(memoryview(message)[:end]).to_bytes(_SUM_BYTES, "little") != bytes(message[end:]):
        return False
    for item in tensors:
        # A copy of its own begins at an address that suits any dtype.
        part = body[begin : begin + item.nbytes].clone()
        item.copy_(part.view(item.dtype).view(item.shape))
        begin += item.nbytes
    return True


def summed(tensor: Any, before: int) -> int:
    """Return the CRC-32 of earlier data and a tensor."""
    torch = import_module("torch")

    for part in torch.split(_bytes(tensor), BATCH_BYTES) if tensor.numel() else ():
        data = bytearray(len(part))
        torch.frombuffer(data, dtype=torch.uint8).copy_(part)
        before = crc32(data, before)
    return before


def _bytes(tensor: Any) -> Any:
    return tensor.contiguous().view(-1).view(import_module("torch").uint8)


def _batches(tensors: Sequence[Any]) -> Iterator[list[Any]]:
    batch: list[Any] = []
    size = 0
    for item in tensors:
        batch.append(item)
        size += item.nbytes
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


T = TypeVar("T")
log = Log(__name__, "unbroken.worker: ")


@exchanged
@dataclass(frozen=True)
class Outline:
    """A part of an old rank's state, without the bytes of its tensors."""

    body: bytes
    pieces: tuple[Piece, ...]
    """Pieces in the order in which they are read."""

    def filled(self, fill: Callable[[int, Piece], Any]) -> Any:
        """Return the state, with a replacement for each tensor."""
        numbered = iter(enumerate(self.pieces))
        return decode(self.body, lambda _: fill(*next(numbered)))

    @property
    def is_sharded(self) -> bool:
        """True if it has parts of tensors."""
        return any(piece.sharding for piece in self.pieces)

    def text(self) -> str:
        """Return a text that is equal for all ranks with shards of one state."""
        return repr(
            self.filled(
                lambda _, piece: repr((piece.dtype, piece.kind, piece.sharding or piece.shape))
            )
        )


@dataclass(frozen=True)
class Share:
    """A share that an old rank has saved, on the rank that sends it."""

    header: Header
    slot: Slot
    pieces: Sequence[Piece]
    outlines: Mapping[str, Outline]

    def summary(self, name: str) -> tuple[bytes, bool]:
        """Return a summary, equal if ranks had the same apart from shards; and whether there are
        shards."""
        outline, memory = self.outlines[name], memoryview(self.slot.memory)
        whole = [piece for piece in outline.pieces if not piece.sharding]
        sums = [crc32(memory[piece.at : piece.at + size_of(piece)]) for piece in whole]
        for piece in outline.pieces:
            if piece.sharding and box(piece.sharding, self.header.rank)[1] != piece.shape:
                raise ValueError(f"{name} is divided in another way than torch.chunk does it")
        return digest(f"{outline.text()} {sums}"), outline.is_sharded

    def box(self, want: Want) -> Any:
        """Return the piece of it that another rank wants."""
        name, number = want.key
        return want.of(view(self.slot.memory, self.outlines[name].pieces[number]))


def opened(snapshot: KeptParts, rank: int, point: Point, world_size: int) -> Share:
    """Open the share of an old rank that this rank's agent has, checked in full."""
    slot = snapshot.other(rank, point)
    header = None if slot is None else slot.header()
    if slot is None or header is None:
        raise WorldError("it is gone")
    try:
        kept = structure(snapshot, header, slot.memory, rank)
        problems = faults(slot.memory, header)
        if problems or header.world_size != world_size:
            raise ValueError("; ".join(problems[:3]) or f"it is one of {header.world_size} ranks'")
    except ValueError:
        slot.clear()
        raise
    names = kept.bodies.keys() - {RNG}
    return Share(header, slot, kept.pieces, {name: _outline(kept, name) for name in names})


def _outline(kept: Kept, name: str) -> Outline:
    pieces: list[Piece] = []
    decode(kept.bodies[name], lambda number: pieces.append(kept.pieces[number]))
    return Outline(kept.bodies[name], tuple(pieces))


@dataclass
class Anew(Kept):
    """A state for this rank, in memory of its own."""

    outlines: dict[str, Outline] = field(default_factory=dict)
    tensors: dict[Key, Any] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    """Parts that are not available for this rank."""

    def state(self, part: str, copies: bool) -> Any:
        """Return the state; its tensors are its own, whether or not copies are requested."""
        return self.outlines[part].filled(lambda number, _: self._given(part, number))

    def checksum(self) -> str:
        """Return the checksum of all but each rank's own values, and of this rank's shards."""
        result = 0
        for name in sorted(self.outlines.keys() - {EXTRA}):
            result = crc32(self.outlines[name].text().encode(), result)
        for key, item in sorted(self.tensors.items()):
            if key[0] != EXTRA:
                result = summed(local(item), result)
        return f"{result:08x}"

    def _given(self, part: str, number: int) -> Any:
        is_array = self.outlines[part].pieces[number].kind == "array"
        result = self.tensors[part, number]
        return result.numpy() if is_array else result


class Division:
    """Division of one point; all ranks call every method together."""

    def __init__(
        self, snapshot: KeptParts, world: Peers, point: Point, givers: Mapping[int, int]
    ) -> None:
        self._snapshot, self._world, self._point, self._givers = snapshot, world, point, givers
        self._mine: dict[int, Share] = {}
        self._targets: list[Any] = []
        self._gives: list[list[Any]] = []
        """Pieces to send, by rank."""
        self._takes: list[list[Any]] = []
        """Pieces to receive, by rank."""

    def open(self) -> dict[int, str]:
        """Open the shares that this rank is to send; return the faults by old rank."""
        problems = {}
        for rank, giver in self._givers.items():
            if giver == self._world.rank:
                try:
                    share = opened(self._snapshot, rank, self._point, len(self._givers))
                    self._mine[rank] = share
                except (UnbrokenError, ValueError) as error:
                    problems[rank] = str(error)
        return problems

    def carry_out(self) -> Anew:
        """Bring all pieces here. Raises CheckpointError, on all ranks, if the state cannot be
        divided, with the reason."""
        summaries = self._gathered(lambda: self._of_mine(Share.summary))
        alike = self._together(lambda: _alike(self._snapshot.parts, summaries))[0]
        own = {name for name, is_alike in alike.items() if not is_alike}

        def told() -> Mapping[int, Mapping[str, Outline]]:
            result = self._of_mine(lambda share, name: share.outlines[name])
            return {
                rank: {name: part for name, part in parts.items() if rank == 0 or name in own}
                for rank, parts in result.items()
                if rank < self._world.world_size
            }

        outlines = self._gathered(told)
        anew = Anew({}, [], None)
        plans = self._together(lambda: self._planned(anew, alike, outlines))
        self._together(lambda: self._prepare(plans))
        torn = ""
        try:
            # Any other error here ends this process: the others wait for its messages.
            exchange(self._world, self._gives, self._takes)
        except WorldError as error:
            torn = str(error)
        self._together(lambda: self._check(torn))
        return anew

    def _planned(
        self,
        anew: Anew,
        alike: Mapping[str, bool],
        outlines: Mapping[int, Mapping[str, Outline]],
    ) -> list[Want]:
        """Make the tensors; return the pieces to be brought into them."""
        snapshot, size, rank = self._snapshot, len(self._givers), self._world.rank
        saved: dict[Key, Saved] = {}
        for name, is_alike in alike.items():
            source = 0 if is_alike else rank
            if source >= size:
                anew.missing += (name,)
                continue
            anew.outlines[name] = outline = outlines[source][name]
            anew.bodies[name] = outline.body
            for number, piece in enumerate(outline.pieces):
                ranks = range(size) if piece.sharding else range(source, source + 1)
                saved[name, number] = Saved(piece, ranks)
        parts = {name: part for name, part in snapshot.parts.items() if name not in anew.missing}
        meshes = _meshes(parts, anew.outlines, size)
        for key, one in saved.items():
            anew.tensors[key] = _empty(one.piece, meshes)
        if reason := difference(anew, parts, has_rng=False):
            raise ValueError(reason)
        planned = plan(anew.tensors, saved, rank, self._mine)
        self._targets = [target for _, target in planned]
        return [want for want, _ in planned]

    def _prepare(self, plans: Sequence[Sequence[Want]]) -> None:
        self._gives = [
            [self._mine[want.rank].box(want) for want in wants if want.rank in self._mine]
            for wants in plans
        ]
        self._takes = [[] for _ in plans]
        for want, target in zip_equal(plans[self._world.rank], self._targets):
            self._takes[self._givers[want.rank]].append(target)

    def _check(self, torn: str) -> None:
        """Check that the received bytes are those sent, and that those had not changed since they
        were checked."""
        if torn:
            raise WorldError(torn)
        for rank, share in self._mine.items():
            if share.slot.header() != share.header:
                raise WorldError(f"the share of rank {rank} was overwritten while it was read")

    def _of_mine(self, look: Callable[[Share, str], T]) -> dict[int, dict[str, T]]:
        return {
            rank: {name: look(share, name) for name in share.outlines}
            for rank, share in self._mine.items()
        }

    def _gathered(self, act: Callable[[], Mapping[int, T]]) -> dict[int, T]:
        """Return all senders' values, by old rank."""
        return {rank: one for result in self._together(act) for rank, one in result.items()}

    def _together(self, act: Callable[[], T]) -> list[T]:
        def told() -> T:
            try:
                return act()
            except Exception as error:
                log.debug("state cannot be divided again", exc_info=True)
                raise CheckpointError(str(error) or repr(error)) from error

        return self._world.together(told)


def _alike(
    parts: Mapping[str, Any], summaries: Mapping[int, Mapping[str, tuple[bytes, bool]]]
) -> dict[str, bool]:
    """Return, for each part, whether all old ranks had the same. Raises ValueError if they had to
    and had not."""
    torch = import_module("torch")
    found = {}
    for name, (first, is_sharded) in summaries[0].items():
        others = [summary.get(name, (b"", False))[0] for summary in summaries.values()]
        found[name] = all(other == first for other in others)
        is_one = is_sharded or isinstance(parts.get(name), torch.nn.Module | torch.optim.Optimizer)
        if is_one and not found[name]:
            raise ValueError(
                f"{name} cannot be divided anew: ranks had tensors of other names or meshes, or"
                " other values in what no mesh divides"
            )
    return found


def _meshes(
    parts: Mapping[str, Any], outlines: Mapping[str, Outline], size: int
) -> dict[tuple[Any, ...], Any]:
    """Return the live mesh in place of each saved one, by the tensors of modules.

    Raises ValueError if it cannot be derived, or is a mesh of some ranks only.
    """
    nn = import_module("torch.nn")
    result: dict[tuple[Any, ...], dict[tuple[Any, ...], Any]] = {}
    for name, outline in outlines.items():
        for piece in outline.pieces:
            if piece.sharding:
                result.setdefault(piece.sharding[2], {})
        if isinstance(parts.get(name), nn.Module):
            live = parts[name].state_dict()
            for key, saved in outline.filled(lambda _, piece: piece).items():
                mesh = getattr(live.get(key), "device_mesh", None)
                if isinstance(saved, Piece) and saved.sharding and mesh is not None:
                    result[saved.sharding[2]][mesh_name(mesh)] = mesh
    for old, new in result.items():
        if sorted(old[1]) != list(range(size)):
            raise ValueError(f"it has a mesh of ranks {list(old[1])} only, of {size}")
        if len(new) != 1:
            raise ValueError(f"the model has {len(new)} meshes in place of {old}")
    return {old: mesh for old, new in result.items() for mesh in new.values()}


def _empty(piece: Piece, meshes: Mapping[tuple[Any, ...], Any]) -> Any:
    """Return a tensor for this rank's part of it."""
    torch = import_module("torch")

    dtype = torch_dtype(piece.dtype)
    if not piece.sharding:
        return torch.empty(piece.shape, dtype=dtype)
    mesh = meshes[piece.sharding[2]]
    here = (*piece.sharding[:2], mesh_name(mesh), piece.sharding[3])
    _, lengths = box(here, mesh.get_rank())
    return sharded(torch.empty(lengths, dtype=dtype, device=mesh.device_type), here, mesh)
