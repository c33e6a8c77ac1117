"""A training state as bytes: tensors flat, and their containers as typed values.

`typed_values` lists the types that a structure may have; tensors and numpy arrays of numbers may be
anywhere in it. Reading a structure runs no code, even if another program wrote the memory. `save`
refuses a value that cannot be kept and names its place. Loading uses the parts' own
`load_state_dict`; only bare tensors and `extra` are written in place.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from unbroken.errors import SpecError
from unbroken.wire.compat import zip_equal
from unbroken.wire.snapshot import BODY_AT, aligned, digest
from unbroken.worker.typed_values import NotEncodable, decode, encode, exchanged, torch_dtype

RNG, EXTRA = "rng", "extra"
ADVICE = (
    "convert it to tensors, numpy arrays of numbers, numbers, strings, dates, or to lists, tuples, "
    "sets and dicts of these, or keep it out of the state"
)


@exchanged
@dataclass(frozen=True)
class Piece:
    """One tensor of the body: this rank's part of it."""

    at: int
    """Offset in the slot."""
    dtype: str
    shape: tuple[int, ...]
    kind: str = "tensor"
    """`tensor`, or `array` for numpy."""
    sharding: tuple[Any, ...] = ()
    """Sharding of a DTensor: shape and stride of the whole, ranks of the mesh, placements."""


@dataclass
class State:
    """Everything of one step, with its tensors still in place."""

    structure: bytes
    pieces: list[Piece]
    tensors: list[Any]
    payload_bytes: int
    layout: bytes

    @property
    def is_sharded(self) -> bool:
        """True if any tensor here is a part of one."""
        return any(piece.sharding for piece in self.pieces)

    def clear_gaps(self, memory: Any) -> None:
        """Clear the gaps between tensors, where another layout may have left data: equal states
        have equal checksums."""
        for piece, tensor in zip_equal(self.pieces, self.tensors):
            end = piece.at + tensor.nbytes
            memory[end : aligned(end)] = bytes(aligned(end) - end)


def collect(parts: Mapping[str, Any], has_rng: bool) -> State:
    """Return the present state of all parts. Raises SpecError if something in it cannot be kept."""
    result = {name: _state(part) for name, part in parts.items()}
    if has_rng:
        result[RNG] = _generators()
    try:
        return collected(result)
    except SpecError as error:
        raise SpecError(f"snapshot: {error}") from None


def collected(found: Mapping[str, Any]) -> State:
    """Return the state of parts, from their states. Raises SpecError if something in it cannot be
    kept."""
    tensors: list[Any] = []
    pieces: list[Piece] = []
    bodies = {}
    for name, state in found.items():
        try:
            bodies[name] = encode(state, _Holes(pieces, tensors))
        except NotEncodable as error:
            raise SpecError(
                f"{name}{error.path} holds {error.reason}, which cannot be kept: {ADVICE}"
            ) from None
    end = max((piece.at + tensor.nbytes for piece, tensor in zip_equal(pieces, tensors)), default=0)
    names = {name: sorted(map(str, s)) for name, s in found.items() if isinstance(s, Mapping)}
    return State(
        structure=encode((bodies, [_row(piece) for piece in pieces])),
        pieces=pieces,
        tensors=tensors,
        payload_bytes=aligned(max(0, end - BODY_AT)),
        layout=digest(repr((sorted(found), names, pieces))),
    )


def _row(piece: Piece) -> tuple[Any, ...]:
    return (piece.at, piece.dtype, piece.shape, piece.kind, piece.sharding)


def _state(part: Any) -> Any:
    if hasattr(part, "state_dict"):
        return part.state_dict()
    return part() if callable(part) else part


class _Holes:
    """Takes the tensors and arrays out of a part's state."""

    def __init__(self, pieces: list[Piece], tensors: list[Any]) -> None:
        self._pieces, self._tensors = pieces, tensors
        self._seen: dict[tuple[Any, ...], int] = {}

    def __call__(self, value: Any) -> int | None:
        """Return the number of its piece; None: it is neither."""
        torch = import_module("torch")

        if isinstance(value, torch.Tensor):
            return self._take(value, "tensor")
        numpy = sys.modules.get("numpy")
        if numpy is None or not isinstance(value, numpy.ndarray):
            return None
        if value.dtype.kind not in "biufc":
            raise NotEncodable(f"a numpy array of {value.dtype}")
        try:
            return self._take(torch.from_numpy(numpy.array(value)), "array")
        except (TypeError, ValueError) as error:
            raise NotEncodable(f"a numpy array of {value.dtype} ({error})") from None

    def _take(self, tensor: Any, kind: str) -> int:
        """Return the number of its piece; tied tensors have one."""
        local, sharding = _local(tensor)
        key = (local.data_ptr(), local.dtype, local.shape, local.stride(), str(local.device), kind)
        if key in self._seen and local.numel():
            return self._seen[key]
        last = len(self._pieces)
        at = BODY_AT
        if last:
            at = aligned(self._pieces[-1].at + self._tensors[-1].nbytes)
        dtype = str(local.dtype).removeprefix("torch.")
        self._pieces.append(Piece(at, dtype, tuple(local.shape), kind, sharding))
        self._tensors.append(local)
        self._seen[key] = last
        return last


def _local(tensor: Any) -> tuple[Any, tuple[Any, ...]]:
    torch = import_module("torch")

    sharding: tuple[Any, ...] = ()
    result = tensor.detach()
    if hasattr(tensor, "to_local") and hasattr(tensor, "placements"):
        sharding = (
            tuple(tensor.shape), tuple(tensor.stride()), mesh_name(tensor.device_mesh),
            tuple(_placement(placement) for placement in tensor.placements),
        )  # fmt: skip
        result = result.to_local()
    if result.layout is not torch.strided or result.is_quantized or result.is_meta:
        raise NotEncodable("a tensor that is sparse, quantized or has no data")
    return result, sharding


def mesh_name(mesh: Any) -> tuple[Any, ...]:
    """Return the description of a mesh in a snapshot: its shape, its ranks, and the names of its
    dimensions."""
    return (tuple(mesh.mesh.shape), tuple(mesh.mesh.flatten().tolist()), mesh.mesh_dim_names)


def _placement(found: Any) -> tuple[str, int]:
    kind = type(found).__name__
    if kind == "Shard":
        return kind, found.dim
    if kind == "Replicate":
        return kind, 0
    raise NotEncodable(f"a DTensor placed as {kind} (only Shard and Replicate can be kept)")


@dataclass
class Kept:
    """A snapshot's structure, read from a slot."""

    bodies: dict[str, bytes]
    pieces: list[Piece]
    memory: Any
    """The slot, as one buffer."""
    meshes: dict[tuple[Any, ...], Any] = field(default_factory=dict)

    @property
    def is_sharded(self) -> bool:
        """True if any tensor is a part of one."""
        return any(piece.sharding for piece in self.pieces)

    def shared(self) -> tuple[str, int]:
        """Return the state that replicas share: all but tensors as a text, and the end of the last
        of these tensors; they come first."""
        numbers: set[int] = set()

        def hole(number: int) -> str:
            numbers.add(number)
            return f"tensor {number}"

        names = sorted(self.bodies.keys() - {EXTRA, RNG})
        text = repr([(name, decode(self.bodies[name], hole)) for name in names])
        pieces = [self.pieces[one] for one in numbers]
        return text, max((piece.at + size_of(piece) for piece in pieces), default=BODY_AT)

    def state(self, part: str, copies: bool) -> Any:
        """Return a part's state; tensors lie in the slot unless copies are requested."""
        return decode(self.bodies[part], lambda one: self._tensor(one, copies))

    def _tensor(self, number: int, copies: bool) -> Any:
        piece = self.pieces[number]
        result = view(self.memory, piece)
        if copies or piece.kind == "array":
            result = result.clone()
        if piece.kind == "array":
            return result.numpy()
        return self._sharded(result, piece.sharding) if piece.sharding else result

    def _sharded(self, local: Any, sharding: tuple[Any, ...]) -> Any:
        if sharding[2] not in self.meshes:
            raise SpecError(f"no DTensor of this model has the mesh {sharding[2]} of the snapshot")
        return sharded(local, sharding, self.meshes[sharding[2]])


def sharded(local: Any, sharding: tuple[Any, ...], mesh: Any) -> Any:
    """Return this rank's part as a DTensor on a live mesh."""
    tensor = import_module("torch.distributed.tensor")

    shape, stride, _, placements = sharding
    placed = [
        tensor.Shard(dim) if kind == "Shard" else tensor.Replicate() for kind, dim in placements
    ]
    return tensor.DTensor.from_local(
        local.to(mesh.device_type), mesh, placed, run_check=False, shape=shape, stride=stride
    )


def view(memory: Any, piece: Piece) -> Any:
    """Return a piece of a slot, without a copy."""
    torch = import_module("torch")

    dtype = torch_dtype(piece.dtype)
    size = size_of(piece)
    if not size:
        return torch.empty(piece.shape, dtype=dtype)
    raw = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=piece.at)
    return raw.view(dtype).view(piece.shape)


def size_of(piece: Piece) -> int:
    """Return the size in bytes."""
    return int(math.prod(piece.shape) * torch_dtype(piece.dtype).itemsize)


def parse(structure: bytes, memory: Any, parts: Mapping[str, Any]) -> Kept:
    """Return what `collect` wrote. Raises ValueError if it is malformed."""
    try:
        bodies, rows = decode(structure)
        pieces = [_piece(row, len(memory)) for row in rows]
        if not all(type(body) is bytes for body in bodies.values()):
            raise ValueError("a part's state is not bytes")
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"its structure cannot be read: {error}") from error
    return Kept(bodies, pieces, memory, dict(_meshes(parts)))


def _piece(row: Any, end: int) -> Piece:
    """Return one row of a structure. Raises ValueError or TypeError if it describes no tensor
    within the slot."""
    at, dtype, shape, kind, sharding = row
    torch_dtype(dtype)
    if not (_are_sizes((at,)) and _are_sizes(shape) and kind in ("tensor", "array")):
        raise ValueError(f"no tensor: {row!r}"[:200])
    if sharding != ():
        whole, stride, (mesh, ranks, names), placements = sharding
        if not all(map(_are_sizes, (whole, stride, mesh, ranks))) or not all(
            kind in ("Shard", "Replicate") and _are_sizes((dim,)) for kind, dim in placements
        ):
            raise ValueError(f"no part of a tensor: {row!r}"[:200])
        if names is not None and not all(type(name) is str for name in names):
            raise ValueError(f"no names of a mesh: {names!r}"[:200])
    piece = Piece(at, dtype, shape, kind, sharding)
    if at < BODY_AT or at + size_of(piece) > end:
        raise ValueError(f"a tensor of {size_of(piece)} bytes at {at} is not within {end} bytes")
    return piece


def _are_sizes(found: Any) -> bool:
    return type(found) is tuple and all(type(item) is int and item >= 0 for item in found)


def _meshes(parts: Mapping[str, Any]) -> Sequence[tuple[tuple[Any, ...], Any]]:
    tensors = [
        parameter
        for part in parts.values()
        if hasattr(part, "parameters")
        for parameter in part.parameters()
        if hasattr(parameter, "device_mesh")
    ]
    return [(mesh_name(item.device_mesh), item.device_mesh) for item in tensors]


def difference(kept: Kept, parts: Mapping[str, Any], has_rng: bool) -> str:
    """Return why the snapshot does not fit the live parts; empty: no reason is known."""
    wanted = {*parts, *((RNG,) if has_rng else ())}
    if set(kept.bodies) != wanted:
        return f"it has the parts {sorted(kept.bodies)}, not {sorted(wanted)}"
    for name, part in parts.items():
        if name == EXTRA:
            continue
        result = _unlike(name, _state(part), kept.state(name, copies=False))
        if result:
            return result
    return ""


def _unlike(path: str, live: Any, kept: Any) -> str:
    torch = import_module("torch")

    if isinstance(live, torch.Tensor):
        ours, theirs = _described(live), _described(kept)
        return "" if ours == theirs else f"{path} is {theirs} in it, and {ours} here"
    if not isinstance(live, Mapping) or not isinstance(kept, Mapping):
        return ""
    if "param_groups" in live:
        here, there = ([len(g["params"]) for g in s["param_groups"]] for s in (live, kept))
        return "" if here == there else f"{path} has groups of {there} in it, {here} here"
    if not any(isinstance(item, torch.Tensor) for item in live.values()):
        return ""
    other = sorted(map(str, live.keys() ^ kept.keys()))
    if other:
        return f"{path} differs in {', '.join(other[:5])}"
    return next(filter(None, (_unlike(f"{path}.{k}", live[k], kept[k]) for k in live)), "")


def _described(found: Any) -> str:
    if not hasattr(found, "dtype"):
        return type(found).__name__
    placed = f" {found.placements}" if hasattr(found, "placements") else ""
    return f"{str(found.dtype).removeprefix('torch.')}{list(found.shape)}{placed}"


def load(kept: Kept, parts: Mapping[str, Any], has_rng: bool) -> Any:
    """Load every part's state; return that of `extra`."""
    torch = import_module("torch")

    extra = None
    for name, part in parts.items():
        is_module = isinstance(part, torch.nn.Module)
        # A module copies from the given tensors; other objects may keep them.
        state = kept.state(name, copies=not is_module)
        if name == EXTRA:
            extra = state
            if isinstance(part, dict):
                part.clear()
                part.update(state)
        elif isinstance(part, torch.Tensor):
            with torch.no_grad():
                part.copy_(state)
        else:
            part.load_state_dict(state)
    if has_rng:
        _set_generators(kept.state(RNG, copies=True))
    return extra


def _generators() -> dict[str, Any]:
    torch = import_module("torch")

    result: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        result["numpy"] = numpy.random.get_state()
    cuda = torch.cuda
    if cuda.is_initialized():
        result["cuda"] = cuda.get_rng_state()
    return result


def _set_generators(found: Mapping[str, Any]) -> None:
    torch = import_module("torch")

    random.setstate(found["python"])
    torch.set_rng_state(found["torch"])
    if "numpy" in found:
        import numpy as np

        np.random.set_state(found["numpy"])
    if "cuda" in found and torch.cuda.is_available():
        torch.cuda.set_rng_state(found["cuda"])
