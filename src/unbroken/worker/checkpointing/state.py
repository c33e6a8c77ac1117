"""The state of training as torch.distributed.checkpoint plans, writes and loads it.

Torch's planner decides which rank writes which tensor (replicas once, shards where they are) and
reads them back on any number of ranks. Its file format is used, so that its tools read these
checkpoints. This module adds plans without a collective in the writing thread, and files that are
fsynced and read back. Everything else (schedulers, generators, extras) is each rank's own file.
"""

from __future__ import annotations

import hashlib
import io
import random
import struct
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from unbroken.errors import SpecError
from unbroken.wire.compat import zip_equal
from unbroken.wire.snapshot import BODY_AT
from unbroken.worker.snapshot.state import collected, parse, view
from unbroken.worker.typed_values import decode, encode

from .dcp import (
    checkpoint_module,
    complain_of_odd,
    dcp_forms,
    load_plain,
    planner,
    reader,
    write_items,
    write_metadata,
    writer,
)
from .storage import CheckpointError, File, Storage

PARTS = "parts"
"""Folder of what is needed to complete a checkpoint."""
_MAGIC, _HEADER = b"unbrokst", struct.Struct("<8sQQ")


class Staged:
    """A copy in host memory of what this rank writes, and the plan of all ranks."""

    def __init__(self, is_alone: bool) -> None:
        self._is_alone = is_alone
        self._members = 0
        self._digest = b""
        self._plans: list[Any] = []
        self._metadata: Any = None
        self._buffers: dict[Any, Any] = {}
        self._planner: Any = None
        self._values: dict[Any, Any] = {}

    def plan(self, state: Mapping[str, Any]) -> tuple[bytes, Any]:
        """Return the plan of this rank's state, and its digest: equal digests have equal plans."""
        self._planner = checkpoint_module("default_planner").DefaultSavePlanner(
            dedup_save_to_lowest_rank=self._is_alone
        )
        self._planner.set_up_planner(dict(state))
        plan = self._planner.create_local_plan()
        data = encode(plan, forms=dcp_forms())
        return hashlib.blake2b(data, digest_size=16).digest(), plan

    def has(self, digest: bytes) -> bool:
        """True if the plans of all ranks are known for this digest of all digests."""
        return digest == self._digest

    def agree(self, digest: bytes, plans: list[Any], members: int) -> None:
        """Divide the work, alike on all ranks; the given number of first plans is written here."""
        self._members = members
        self._plans, self._metadata = self._planner.create_global_plan(plans)
        self._digest, self._buffers = digest, {}

    def copy(self, member: int) -> None:
        """Copy to memory that training does not touch; with GPUs it is pinned."""
        torch = import_module("torch")
        has_gpu = torch.cuda.is_available()
        self._values = {}
        for item in self._plans[member].items:
            result = self._planner.resolve_data(item)
            if isinstance(result, torch.Tensor):
                buffer = self._buffers.get(item.index)
                if buffer is None:
                    like = torch.empty_like(result, device="cpu")
                    buffer = self._buffers[item.index] = like.pin_memory() if has_gpu else like
                result = buffer.copy_(result, non_blocking=True)
            self._values[item.index] = result
        if has_gpu:
            torch.cuda.synchronize()

    def write(self, storage: Storage, folder: str, member: int) -> list[File]:
        """Write this rank's part. Leaves there what `finish` needs to know."""
        plan = writer(storage, folder, []).prepare_global_plan(self._plans)[member]
        results, files = write_items(storage, folder, plan, self)
        storage.write(_results(folder, member), encode(results, forms=dcp_forms()))
        return files

    def finish(self, storage: Storage, folder: str) -> list[File]:
        """Write the file that reads all parts together; call it when all are written."""
        parts = [storage.read(_results(folder, member)) for member in range(self._members)]
        results = [decode(part, forms=dcp_forms()) for part in parts]

        return write_metadata(storage, folder, self._metadata, results)

    def resolve_data(self, item: Any) -> Any:
        """Return the data to write, as a planner of torch."""
        return self._values[item.index]


def _results(folder: str, member: int) -> str:
    return f"{folder}/{PARTS}/results-{member}"


@dataclass(frozen=True)
class Objects:
    """Objects that the user gave to save or restore."""

    given: Mapping[str, Any]

    def sharded(self) -> dict[str, Any]:
        """Return the state of modules and optimizers, named as a single process would name it."""
        state = checkpoint_module("state_dict")
        result = {
            name: state.get_model_state_dict(item)
            if self._is(item, "nn", "Module")
            else state.get_optimizer_state_dict(self._owner(name, item), item)
            for name, item in self._tensors().items()
        }
        complain_of_odd(result)
        return result

    def load_sharded(self, storage: Storage, folder: str) -> None:
        """Load the state in place."""
        result, state = self.sharded(), checkpoint_module("state_dict")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            try:
                # Each rank reads what it needs; whether all could is agreed afterwards.
                checkpoint_module("state_dict_loader").load(
                    result,
                    storage_reader=reader(storage, folder),
                    planner=planner(),
                    no_dist=True,
                )
            except checkpoint_module("api").CheckpointException as error:
                # Torch's class is no Exception, and its text is a traceback.
                raise CheckpointError(_reason(error)) from error
        for name, item in self._tensors().items():
            if self._is(item, "nn", "Module"):
                state.set_model_state_dict(item, result[name])
            else:
                state.set_optimizer_state_dict(self._owner(name, item), item, result[name])

    def own(self, rng: bool, extra: Mapping[str, Any] | None) -> bytes:
        """Return the state that only this rank has."""
        return packed({
            "objects": {name: other.state_dict() for name, other in self._others().items()},
            "rng": generators() if rng else None,
            "extra": dict(extra or {}),
        })  # fmt: skip

    def load_own(self, storage: Storage, folder: str, rank: int) -> dict[str, Any]:
        """Load the rank's own state and return the extras; generators continue as they were
        saved."""
        older = f"rank-{rank:05}.pt"
        names = storage.names(folder)
        if older in names and own_name(rank) not in names:
            path = f"{storage.path}/{folder}/{older}"  # of a release before 0.3
            content = load_plain(io.BytesIO(storage.read(f"{folder}/{older}")), path)
        else:
            path = f"{storage.path}/{folder}/{own_name(rank)}"
            content = unpacked(storage, f"{folder}/{own_name(rank)}", self.given)
        for name, other in self._others().items():
            if name not in content["objects"]:
                raise CheckpointError(f"{path} has no {name!r}")
            other.load_state_dict(content["objects"][name])
        if content["rng"] is not None:
            seed(content["rng"])
        extra: dict[str, Any] = content["extra"]
        return extra

    def _tensors(self) -> dict[str, Any]:
        return {
            name: item
            for name, item in self.given.items()
            if self._is(item, "nn", "Module") or self._is(item, "optim", "Optimizer")
        }

    def _others(self) -> dict[str, Any]:
        tensors = self._tensors()
        others = {name: item for name, item in self.given.items() if name not in tensors}
        for name, other in others.items():
            if not (hasattr(other, "state_dict") and hasattr(other, "load_state_dict")):
                raise CheckpointError(
                    f"{name} is a {type(other).__name__}, without state_dict() and"
                    " load_state_dict(): give plain values as `extra`"
                )
        return others

    def _owner(self, name: str, optimizer: Any) -> Any:
        """Return the module whose parameters the optimizer changes."""
        wanted = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for item in self.given.values():
            if self._is(item, "nn", "Module") and wanted <= {id(p) for p in item.parameters()}:
                return item
        raise CheckpointError(f"{name}: no module given beside it holds all of its parameters")

    @staticmethod
    def _is(one: object, module: str, kind: str) -> bool:
        result = getattr(import_module(f"torch.{module}"), kind)
        return isinstance(one, result)


def generators() -> dict[str, Any]:
    """Return the states of random number generators: Python's, numpy's if it is used, torch's."""
    torch, numpy = import_module("torch"), sys.modules.get("numpy")
    has_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
    return {
        "python": random.getstate(),
        "numpy": numpy.random.get_state() if numpy else None,
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if has_gpu else None,
    }


def seed(states: Mapping[str, Any]) -> None:
    """Restore the states from `generators`."""
    torch = import_module("torch")
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if states["numpy"] is not None:
        import_module("numpy").random.set_state(states["numpy"])
    if states["cuda"] is not None:
        torch.cuda.set_rng_state(states["cuda"])


def _reason(error: Any) -> str:
    return "; ".join(f"{failure[0]}" for failure in error.failures.values())


def own_name(rank: int) -> str:
    """Return the name of the file with a rank's own state."""
    return f"rank-{rank:05}.state"


def packed(content: Mapping[str, Any]) -> bytes:
    """Return typed values and the bytes of their tensors. Raises CheckpointError if some cannot be
    kept."""
    try:
        state = collected(content)
    except SpecError as error:
        raise CheckpointError(str(error)) from None
    body = bytearray(BODY_AT + state.payload_bytes)
    _HEADER.pack_into(body, 0, _MAGIC, state.payload_bytes, len(state.structure))
    with import_module("torch").no_grad():
        for piece, tensor in zip_equal(state.pieces, state.tensors):
            if tensor.numel():
                view(body, piece).copy_(tensor)
    return bytes(body) + state.structure


def unpacked(storage: Storage, name: str, live: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state that `packed` wrote. Raises CheckpointError if the file holds something
    else."""
    try:
        data = bytearray(storage.read(name))
        magic, payload, length = _HEADER.unpack_from(data)
        at = BODY_AT + payload
        if magic != _MAGIC or len(data) != at + length:
            raise ValueError("it is no file of this library, or is cut short")
        kept = parse(bytes(data[at:]), data, live)
        return {name: kept.state(name, copies=True) for name in ("objects", "rng", "extra")}
    except (LookupError, OSError, SpecError, ValueError, struct.error) as error:
        raise CheckpointError(f"{storage.path}/{name} cannot be read: {error}") from error
