"""Decisions of one member of the checkpoint memory: shards to keep, refuse and copy.  Pure.

The memory tier of HyperPod's tiered checkpointing keeps shards: the bytes of one rank at one step,
in a namespace, which belongs to one job. Two members hold the shards of a rank, chosen by hashes of
their addresses. So any member knows where to look, and a lost member moves no shard but its own.

The newest save of a step wins, by the time at which its request began: bytes that a dead attempt
sent never replace those of a later one. An incomplete shard never replaces a whole one.

When the memory is full, a new shard takes the place of, in this order: shards of namespaces that
nobody has used for an hour; shards of namespaces above their equal share, if its own stays within
it; older saves of its own rank. If that is not enough, it is refused. A save is older by its time,
not by its step: a job that goes back to an earlier checkpoint counts its steps anew. No shard takes
the place of a newer one.
"""

from __future__ import annotations

import hashlib
import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from unbroken.foreign_numbers import INT64_MAX, whole_number

SERVICE = "ai-toolkit-gossip-headless.aws-hyperpod.svc.cluster.local"
"""Name that AWS's client asks by default, as documented."""
PORT = 9200
"""Port of each member, as documented."""
COPIES = 2
"""Members that hold each shard."""
RANKS_MAX = 100_000
STEPS_RETAINED, STEPS_RETAINED_MAX = 3, 100
"""Steps of each rank that are kept: by default, and at most."""
NAMESPACES_MAX = 256
META_CHARACTERS_MAX = 120
"""Characters of `Shard-Meta`, which becomes a part of a file's name; the client's has 73."""
IDLE_SECONDS = 3600.0
"""Seconds without a request after which a namespace yields to others: its job has ended, or waits
so long that it can read its checkpoint from the next tier."""
CONFIG_RANK = -1
"""Rank that stands for the settings of a namespace when members are chosen."""
_NAMESPACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_FILE_SUFFIX = ".shard"


@dataclass(frozen=True, slots=True, order=True)
class ShardKey:
    """The name of a shard."""

    namespace: str
    rank: int
    step: int


@dataclass(frozen=True, slots=True)
class Shard:
    """A shard that is whole."""

    key: ShardKey
    size: int
    stamp: int
    """Nanoseconds since the epoch at which the request of its client began."""
    meta: str
    """Header `Shard-Meta` of the client: the checksum that it verifies."""

    @property
    def file_name(self) -> str:
        """Name of its file, from which the next process learns all but the size."""
        meta = urlsafe_b64encode(self.meta.encode()).decode()
        return f"{self.key.rank}.{self.key.step}.{self.stamp}.{meta}{_FILE_SUFFIX}"


def shard_of_file(namespace: str, name: str, size: int) -> Shard | None:
    """Return the shard whose file has this name; None: no shard has it."""
    parts = name.removesuffix(_FILE_SUFFIX).split(".")
    if not name.endswith(_FILE_SUFFIX) or len(parts) != 4:
        return None
    rank, step, stamp = (whole_number(part) for part in parts[:3])
    if rank is None or step is None or stamp is None:
        return None
    try:
        meta = urlsafe_b64decode(parts[3]).decode()
    except ValueError:
        return None
    shard = Shard(ShardKey(namespace, rank, step), size, stamp, meta)
    return shard if shard.file_name == name else None


@dataclass(frozen=True, slots=True)
class NamespaceSettings:
    """Settings of a namespace, given when it is created."""

    num_ranks: int
    """Ranks that save, and one for the metadata, which has the highest number."""
    steps_retained: int
    stamp: int
    """Nanoseconds since the epoch at which the client's request began, as for a shard."""

    @property
    def file_name(self) -> str:
        """Name of the empty file that records them."""
        return f"{self.num_ranks}.{self.steps_retained}.{self.stamp}.settings"


def settings_of_file(name: str) -> NamespaceSettings | None:
    """Return the settings that a file's name records; None: no settings have it."""
    *numbers, kind = name.split(".")
    values = [whole_number(text) for text in numbers]
    if kind != "settings" or len(values) != 3:
        return None
    ranks, steps, stamp = values
    if ranks is None or steps is None or stamp is None:
        return None
    settings = NamespaceSettings(ranks, steps, stamp)
    return settings if settings.file_name == name else None


@dataclass(frozen=True, slots=True)
class CheckpointRefusal:
    """An answer that is an error."""

    status: int
    """Status code of HTTP."""
    reason: str


def is_namespace(name: str) -> bool:
    """True for a name that a namespace may have: it is the name of a folder, too."""
    return _NAMESPACE.fullmatch(name) is not None


def key_of(namespace: str, rank: str, step: str) -> ShardKey | CheckpointRefusal:
    """Return the key that the parts of a path name."""
    if not is_namespace(namespace):
        return CheckpointRefusal(400, wrong_namespace(namespace))
    number = whole_number(rank, most=RANKS_MAX)
    if number is None:
        return CheckpointRefusal(
            400, f"rank {rank[:40]!r} is not a whole number from 0 to {RANKS_MAX}"
        )
    at = whole_number(step)
    if at is None:
        return CheckpointRefusal(
            400, f"step {step[:40]!r} is not a whole number from 0 to {INT64_MAX}"
        )
    return ShardKey(namespace, number, at)


def wrong_namespace(name: str) -> str:
    """Return the reason why a namespace cannot have this name."""
    return (
        f"namespace {name[:40]!r}: expected 1 to 128 letters, digits, '.', '_' and '-', with a "
        "letter or digit first"
    )


def in_order(members: Iterable[str], namespace: str, rank: int) -> list[str]:
    """Return the members in their order for a rank; the first `COPIES` hold its shards."""

    def weight(member: str) -> bytes:
        return hashlib.sha256(f"{namespace}/{rank}/{member}".encode()).digest()

    return sorted(members, key=weight)


def whole_steps(held: Mapping[tuple[int, int], int], limit: int) -> list[int]:
    """Return the newest steps that are whole, from the stamps of all members by rank and step.

    A save of k ranks leaves the ranks 0 to k, as its metadata is rank k and is written last. A gap
    is a shard that was lost or is not written yet. Metadata that is older than another rank
    describes an earlier save. The client itself notices metadata that is missing.
    """
    steps: dict[int, dict[int, int]] = {}
    for (rank, step), stamp in held.items():
        steps.setdefault(step, {})[rank] = stamp
    whole = (
        step
        for step, stamps in steps.items()
        if len(stamps) == max(stamps) + 1 and _has_newest_metadata(stamps)
    )
    return sorted(whole, reverse=True)[:limit]


def is_stale_metadata(key: ShardKey, held: Mapping[tuple[int, int], int]) -> bool:
    """True for the metadata of an earlier save of a step, from the stamps of all members."""
    stamps = {rank: stamp for (rank, step), stamp in held.items() if step == key.step}
    return max(stamps, default=None) == key.rank and not _has_newest_metadata(stamps)


def _has_newest_metadata(stamps: Mapping[int, int]) -> bool:
    """True if the highest rank of a step, its metadata, is as new as each other rank."""
    return stamps[max(stamps)] == max(stamps.values())


@dataclass(slots=True)
class _Namespace:
    used_at: float
    settings: NamespaceSettings | None = None
    shards: dict[tuple[int, int], Shard] = field(default_factory=dict)
    """By rank and step."""
    incoming: int = 0
    """Bytes of shards that are being received."""

    def bytes(self) -> int:
        return self.incoming + sum(shard.size for shard in self.shards.values())

    def oldest(self) -> Iterator[Shard]:
        yield from sorted(self.shards.values(), key=_age)


def _age(shard: Shard) -> tuple[int, int]:
    return shard.stamp, shard.key.step


class CheckpointMemory:
    """The contents of one member.  Times are seconds since the epoch."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        """Bytes of all shards."""
        self._namespaces: dict[str, _Namespace] = {}

    # --- contents

    def settings(self, namespace: str) -> NamespaceSettings | None:
        """Return the settings of a namespace; None: unknown here."""
        found = self._namespaces.get(namespace)
        return None if found is None else found.settings

    def all_settings(self) -> dict[str, NamespaceSettings]:
        """Return the settings of all namespaces."""
        return {
            name: found.settings
            for name, found in self._namespaces.items()
            if found.settings is not None
        }

    def find(self, key: ShardKey) -> Shard | None:
        """Return a shard; None: it is not here."""
        found = self._namespaces.get(key.namespace)
        return None if found is None else found.shards.get((key.rank, key.step))

    def shards(self, namespace: str | None = None) -> Iterator[Shard]:
        """Yield the shards of a namespace, or of all."""
        for name, found in self._namespaces.items():
            if namespace in (None, name):
                yield from found.shards.values()

    def used(self) -> int:
        """Return the bytes of all shards, with those that are being received."""
        return sum(one.bytes() for one in self._namespaces.values())

    # --- changes

    def resize(self, capacity: int) -> list[Shard]:
        """Set the capacity; returns the shards that no longer fit, the oldest saves first."""
        self.capacity = capacity
        excess = self.used() - capacity
        dropped: list[Shard] = []
        for shard in sorted(self.shards(), key=_age):
            if excess <= 0:
                break
            self.remove(shard.key)
            dropped.append(shard)
            excess -= shard.size
        return dropped

    def use(self, namespace: str, now: float) -> None:
        """Note that a client has asked for a namespace, if it is here."""
        found = self._namespaces.get(namespace)
        if found is not None:
            found.used_at = now

    def configure(
        self, namespace: str, settings: NamespaceSettings, now: float
    ) -> CheckpointRefusal | None:
        """Create a namespace, or take over settings that are newer."""
        if settings.num_ranks > RANKS_MAX + 1 or settings.num_ranks < 1:
            return CheckpointRefusal(
                400, f"num_ranks must be 1 to {RANKS_MAX + 1}, not {settings.num_ranks}"
            )
        if not 1 <= settings.steps_retained <= STEPS_RETAINED_MAX:
            return CheckpointRefusal(
                400,
                f"steps_retained must be 1 to {STEPS_RETAINED_MAX}, not {settings.steps_retained}",
            )
        found = self._open(namespace, now)
        if isinstance(found, CheckpointRefusal):
            return found
        if found.settings is None or found.settings.stamp < settings.stamp:
            found.settings = settings
        return None

    def yielding(self, namespace: str, now: float) -> str | None:
        """Return the namespace to forget for a new one: the one that was idle for longest.

        None: no room is needed, or no namespace was idle for an hour.
        """
        if namespace in self._namespaces or len(self._namespaces) < NAMESPACES_MAX:
            return None
        idle = [
            (one.used_at, name)
            for name, one in self._namespaces.items()
            if not one.incoming and now - one.used_at > IDLE_SECONDS
        ]
        return min(idle)[1] if idle else None

    def _open(self, namespace: str, now: float) -> _Namespace | CheckpointRefusal:
        """Return a namespace, new if there is none."""
        found = self._namespaces.get(namespace)
        if found is not None:
            return found
        if len(self._namespaces) >= NAMESPACES_MAX:
            return CheckpointRefusal(
                507,
                f"{NAMESPACES_MAX} namespaces exist and are in use; delete one, or wait until one "
                "was not used for an hour",
            )
        made = self._namespaces[namespace] = _Namespace(now)
        return made

    def restore(self, shard: Shard, now: float) -> Shard | None:
        """Take a shard of an earlier process; returns the older one of two with one key.

        Two shards with one file name are one shard: the later file has replaced the other.
        """
        found = self._namespaces.setdefault(shard.key.namespace, _Namespace(now))
        place = (shard.key.rank, shard.key.step)
        other = found.shards.get(place)
        if other is not None and other.file_name == shard.file_name:
            other = None
        elif other is not None and other.stamp >= shard.stamp:
            return shard
        found.shards[place] = shard
        return other

    def admit(self, shard: Shard, now: float) -> list[Shard] | CheckpointRefusal:
        """Reserve memory for a shard; returns the shards to drop for it.

        `accept` or `release` must follow.
        """
        present = self.find(shard.key)
        if present is not None and (present.stamp > shard.stamp or present == shard):
            return CheckpointRefusal(
                409, f"this save of step {shard.key.step}, or a newer one, is here already"
            )
        found = self._open(shard.key.namespace, now)
        if isinstance(found, CheckpointRefusal):
            return found
        found.used_at = now
        needed = shard.size - (self.capacity - self.used())
        victims: list[Shard] = []
        for victim in self._victims(shard, now):
            if needed <= 0:
                break
            if victim.stamp <= shard.stamp:
                victims.append(victim)
                needed -= victim.size
        if needed > 0:
            return CheckpointRefusal(507, self._is_full(shard))
        for victim in victims:
            self.remove(victim.key)
        found.incoming += shard.size
        return victims

    def _is_full(self, shard: Shard) -> str:
        return (
            f"no memory for {shard.size} bytes of rank {shard.key.rank} at step {shard.key.step}: "
            f"{self.used()} of {self.capacity} bytes are used on this node; raise the share of "
            "memory for checkpoints, or retain fewer steps"
        )

    def _victims(self, shard: Shard, now: float) -> Iterator[Shard]:
        """Yield shards that may be dropped for another, in the order of the module's docstring."""
        own = shard.key.namespace
        others = {name: one for name, one in self._namespaces.items() if name != own}
        idle = sorted(
            (one for one in others.values() if now - one.used_at > IDLE_SECONDS),
            key=lambda one: one.used_at,
        )
        for one in idle:
            yield from one.oldest()
        in_use = [one for one in others.values() if one not in idle and one.bytes()]
        share = self.capacity // (len(in_use) + 1)
        if self._namespaces[own].bytes() + shard.size <= share:
            for one in sorted(in_use, key=lambda one: one.bytes(), reverse=True):
                excess = one.bytes() - share
                for victim in one.oldest():
                    if victim.size <= excess:
                        excess -= victim.size
                        yield victim
        steps = [one for one in self._namespaces[own].oldest() if one.key.rank == shard.key.rank]
        yield from steps[:-1]

    def release(self, shard: Shard) -> None:
        """Give up a shard that was admitted: not all of it came, or it was only passed on."""
        found = self._namespaces.get(shard.key.namespace)
        if found is not None:
            found.incoming = max(0, found.incoming - shard.size)

    def accept(self, shard: Shard, steps_retained: int) -> list[Shard]:
        """Keep an admitted shard that has come whole; returns the shards that it replaces.

        Among them is the shard itself if a newer one has come in the meantime.
        """
        self.release(shard)
        found = self._namespaces.get(shard.key.namespace)
        if found is None:  # deleted in the meantime
            return [shard]
        older = self.restore(shard, found.used_at)
        if older is shard:
            return [shard]
        saves = [one for one in found.oldest() if one.key.rank == shard.key.rank]
        # The client is told that this one is kept.
        beyond = [one for one in saves[:-steps_retained] if one.key != shard.key]
        for one in beyond:
            self.remove(one.key)
        return [*([] if older is None else [older]), *beyond]

    def remove(self, key: ShardKey, before: int | None = None) -> Shard | None:
        """Forget a shard, if its stamp is below `before`; returns it."""
        shard = self.find(key)
        if shard is None or (before is not None and shard.stamp >= before):
            return None
        return self._namespaces[key.namespace].shards.pop((key.rank, key.step))

    def forget(self, namespace: str) -> bool:
        """Forget a namespace with all of its shards; False: there is none."""
        return self._namespaces.pop(namespace, None) is not None


def repairs(
    own: str,
    members: Collection[str],
    shards: Iterable[Shard],
    held: Mapping[str, Mapping[ShardKey, int]],
) -> tuple[list[tuple[Shard, str]], list[Shard]]:
    """Return which shards of a member to copy to which other one, and which to drop.

    `held`: the stamps of the shards of each other member that has answered. A shard is dropped
    where it does not belong once both members where it does have it.
    """
    copies: list[tuple[Shard, str]] = []
    surplus: list[Shard] = []
    for shard in shards:
        holders: Sequence[str] = in_order(members, shard.key.namespace, shard.key.rank)[:COPIES]
        others = [member for member in holders if member != own]
        lacking = [
            member
            for member in others
            if member not in held or held[member].get(shard.key, -1) < shard.stamp
        ]
        copies += [(shard, member) for member in lacking if member in held]
        if own not in holders and not lacking:
            surplus.append(shard)
    return copies, surplus
