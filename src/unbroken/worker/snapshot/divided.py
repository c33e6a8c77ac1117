"""A state saved by a different number of ranks, divided again among the present ranks.

Model, optimizer and all objects with DTensors are one state, taken from old rank 0. Other parts (a
scheduler, a loader, `extra`) are each rank's own. If all ranks had the same value, all get it.
Otherwise each rank gets the value of its number, and a rank with a new number gets nothing.

These are refused with a reason: tensors that no mesh divides and that differ between ranks, and
meshes of some of the ranks only. So is another kind of division than that of the live model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar
from zlib import crc32

from unbroken.errors import UnbrokenError, WorldError
from unbroken.log_lines import Log
from unbroken.wire.compat import zip_equal
from unbroken.wire.snapshot import Header, digest
from unbroken.worker.checkpointing.peers import Peers
from unbroken.worker.checkpointing.storage import CheckpointError
from unbroken.worker.typed_values import decode, exchanged, torch_dtype

from .choice import Point
from .division import Key, Saved, Want, box, local, plan
from .exchange import exchange, summed
from .reading import structure
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

if TYPE_CHECKING:
    from .snapshot import Snapshot

T = TypeVar("T")
log = Log(__name__, "unbroken.worker: ")


@exchanged
@dataclass(frozen=True)
class Outline:
    """A part of an old rank's state, without the bytes of its tensors."""

    body: bytes
    pieces: tuple[Piece, ...]
    """In the order in which they are read."""

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


def opened(snapshot: Snapshot, rank: int, point: Point, world_size: int) -> Share:
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
        self, snapshot: Snapshot, world: Peers, point: Point, givers: Mapping[int, int]
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
