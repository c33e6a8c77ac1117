"""Read the contents of a slot by its header and structure, and compare them with the live parts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from zlib import crc32

from unbroken.errors import UnbrokenError
from unbroken.wire.snapshot import VERSION, Header

from .slots import Slot
from .state import Kept, difference, parse

if TYPE_CHECKING:
    from .snapshot import Snapshot


def complain_of_version(snapshot: Snapshot, slot: Slot) -> None:
    """Log a complaint if a slot holds a format that this version cannot read."""
    version = slot.version()
    if version not in (None, VERSION):
        snapshot.complain(
            f"a snapshot is of format {version}, and this library reads {VERSION}: give agent and "
            "worker the same version of unbroken"
        )


def structure(snapshot: Snapshot, header: Header, memory: Any, rank: int) -> Kept:
    """Return the structure that a rank has saved. Raises ValueError if it is malformed."""
    from .snapshot import job_digest

    if header.job != job_digest(snapshot.context) or header.name != snapshot.name:
        raise ValueError(f"it is another job's, or has another name ({header.name!r})")
    if header.rank != rank:
        raise ValueError(f"it is of rank {header.rank}, not {rank}")
    result = memory[header.structure_at : header.structure_at + header.structure_bytes]
    if crc32(result) != header.structure_checksum:
        raise ValueError("its structure does not fit its checksum")
    return parse(bytes(result), memory, snapshot.parts)


def fitting(snapshot: Snapshot, header: Header, memory: Any, rank: int) -> Kept:
    """Return the state that this rank may load as it is. Raises ValueError with the reason if it
    may not."""
    kept = structure(snapshot, header, memory, rank)
    here = snapshot.context.world_size
    if header.world_size != here and (kept.is_sharded or snapshot.replicas is not None):
        raise ValueError(
            f"its state is divided among {header.world_size} ranks, and these are {here}: only the"
            " DTensors of a model, or a checkpoint on disk (checkpoints=...), can be divided anew"
        )
    try:
        reason = difference(kept, snapshot.parts, snapshot.has_rng)
    except UnbrokenError as error:
        reason = str(error)
    except (AttributeError, LookupError, TypeError) as error:
        reason = f"its structure is not that of these parts: {error!r}"
    if reason:
        raise ValueError(reason)
    return kept
