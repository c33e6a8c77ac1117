"""Parts of a training state that are kept under a name, with the memory of their snapshots.

The contents of a slot are read by its header and structure, and compared with the live parts.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from zlib import crc32

from unbroken.errors import UnbrokenError
from unbroken.log_lines import Log
from unbroken.wire.snapshot import VERSION, Header, digest, job_of
from unbroken.worker import Context, context
from unbroken.worker.channel import Channel, connect

from .choice import Point, Shares
from .slots import AgentSlots, Identity, Offered, OwnSlots, Slot, Slots
from .state import Kept, difference, parse

if TYPE_CHECKING:
    from unbroken.worker.checkpointing.checkpoints import Checkpoints

log = Log(__name__, "unbroken.worker: ")


class KeptParts:
    """Parts of this rank's state under a name, and the memory that has their snapshots."""

    def __init__(
        self,
        name: str,
        parts: Mapping[str, Any],
        has_rng: bool,
        replicas: Any,
        checkpoints: Checkpoints | None,
        channel: Channel | None,
    ) -> None:
        self.name, self.has_rng, self.replicas = name, has_rng, replicas
        self.checkpoints = checkpoints
        self.parts = parts
        self.context = context()
        self._given = channel
        self._slots: Slots = self._bind()
        self.replica_ranks = ""
        """Ranks that hold the same state as this one, as ranges; empty: none, or not known."""
        self._complained: set[str] = set()

    def find(self) -> list[Offered]:
        """Return the snapshots in this rank's own memory, of this attempt and older ones."""
        return self._slots.find()

    def everyone(self) -> dict[Point, Shares]:
        """Return the shares that this rank's agent holds of any rank."""
        return self._slots.everyone()

    def other(self, rank: int, point: Point) -> Slot | None:
        """Return one of these."""
        return self._slots.other(rank, point)

    def copies(self) -> list[Point]:
        """Return the points that its buddies keep."""
        return self._slots.copies()

    def fetch(self, attempt: int, step: int) -> list[Offered]:
        """Return the same as `find`, with one of these."""
        return self._slots.fetch(attempt, step)

    def used(self, attempt: int, step: int) -> None:
        """Note that all ranks continue from there."""
        self._slots.used(attempt, step)

    @property
    def channel(self) -> Channel | None:
        """Return the channel to the agent."""
        if self._given is not None:
            return self._given
        return connect()

    def complain(self, why: str, what: str = "") -> None:
        """Log a reason, once, and its consequence."""
        if why not in self._complained and len(self._complained) < 100:
            self._complained.add(why)
            log.warning("problem with a snapshot", snapshot=self.name, problem=f"{what}{why}")

    def _bind(self) -> Slots:
        channel = self.channel
        if channel is None:
            log.info("no agent: the snapshot ends with this process", snapshot=self.name)
            return OwnSlots()
        return AgentSlots(channel, Identity(self.name, self.context.rank, self.context.attempt))


def job_digest(found: Context) -> bytes:
    """Return the digest of the job's identity."""
    return digest(job_of(os.environ) or found.job)


def complain_of_version(snapshot: KeptParts, slot: Slot) -> None:
    """Log a complaint if a slot holds a format that this version cannot read."""
    version = slot.version()
    if version not in (None, VERSION):
        snapshot.complain(
            f"a snapshot is of format {version}, and this library reads {VERSION}: give agent and "
            "worker the same version of unbroken"
        )


def structure(snapshot: KeptParts, header: Header, memory: Any, rank: int) -> Kept:
    """Return the structure that a rank has saved. Raises ValueError if it is malformed."""
    if header.job != job_digest(snapshot.context) or header.name != snapshot.name:
        raise ValueError(f"it is another job's, or has another name ({header.name!r})")
    if header.rank != rank:
        raise ValueError(f"it is of rank {header.rank}, not {rank}")
    result = memory[header.structure_at : header.structure_at + header.structure_bytes]
    if crc32(result) != header.structure_checksum:
        raise ValueError("its structure does not fit its checksum")
    return parse(bytes(result), memory, snapshot.parts)


def fitting(snapshot: KeptParts, header: Header, memory: Any, rank: int) -> Kept:
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
