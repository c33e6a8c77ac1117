"""Find which rank waits for which, by the flight recorder dumps of a job's ranks."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from unbroken.wire.flight_dump import PENDING, Call, GroupCalls, RankDump

_PAIR = re.compile(r"^(send|recv) (\d{1,9})(?:->|<-)(\d{1,9})$")


@dataclass(slots=True)
class ProcessGroup:
    """A process group, from the dumps of all its members."""

    name: str
    description: str
    members: tuple[int, ...]
    """Global ranks in order; those seen in it, if no dump lists them."""
    calls: dict[int, GroupCalls] = field(default_factory=dict)
    """Calls by rank, of those that have a dump."""

    def title(self) -> str:
        """`74 (EXPERT_MODEL_PARALLEL_GROUP)`."""
        has_words = self.description not in ("", "undefined")
        return f"{self.name} ({self.description})" if has_words else self.name

    def absent(self) -> tuple[int, ...]:
        """Members without a dump."""
        return tuple(rank for rank in self.members if rank not in self.calls)

    def behind(self, sequence: int) -> tuple[int, ...]:
        """Members that have not called the collective with this number."""
        return tuple(
            rank
            for rank, call in self.calls.items()
            if call.enqueued is not None and call.enqueued < sequence
        )


@dataclass(slots=True)
class Wait:
    """An operation that some ranks have called and not completed."""

    group: ProcessGroup
    call: Call
    """The call, as the first of them has made it."""
    waiting: tuple[int, ...]
    late: tuple[int, ...]
    """Ranks that have not called it."""
    absent: tuple[int, ...]
    """Ranks of whom no dump says whether they have."""
    done: tuple[int, ...] = ()
    """Ranks for whom it has completed."""
    lasted_seconds: float | None = None

    def name(self) -> str:
        """`all_reduce 41 of group 0 (default_pg)`."""
        number = "" if self.call.is_p2p else f" {self.call.sequence}"
        return f"{self.call.operation}{number} of group {self.group.title()}"


def process_groups(dumps: Mapping[int, RankDump]) -> list[ProcessGroup]:
    """The process groups of a job.  One name may stand for several sets of ranks."""
    told: dict[tuple[str, str], set[tuple[int, ...]]] = defaultdict(set)
    for dump in dumps.values():
        for group_calls in dump.groups:
            if group_calls.ranks:
                told[group_calls.name, group_calls.description].add(group_calls.ranks)
    result: dict[tuple[str, str, tuple[int, ...]], ProcessGroup] = {}
    for rank, dump in sorted(dumps.items()):
        for group_calls in dump.groups:
            ranks = group_calls.ranks or next(
                (each for each in told[group_calls.name, group_calls.description] if rank in each),
                (),
            )
            key = group_calls.name, group_calls.description, ranks
            group = result.setdefault(
                key, ProcessGroup(group_calls.name, group_calls.description, ranks)
            )
            group.calls[rank] = group_calls
    for group in result.values():
        if not group.members:
            is_world = group.description in ("default_pg", "")
            seen = dumps if is_world and group.name in ("0", "") else group.calls
            group.members = tuple(sorted(seen))
        _add_silent(group, dumps)
    return list(result.values())


def _add_silent(group: ProcessGroup, dumps: Mapping[int, RankDump]) -> None:
    # A rank tells a group's members from its first call in it on, whatever the buffer loses.
    for rank in group.members:
        if rank in dumps and rank not in group.calls:
            tells_groups = any(group_calls.ranks for group_calls in dumps[rank].groups)
            enqueued = 0 if dumps[rank].is_whole or tells_groups else None
            group.calls[rank] = GroupCalls(group.name, group.description, (), enqueued)


def waits_of(groups: Iterable[ProcessGroup], newest_ns: int) -> list[Wait]:
    """All operations that ranks wait in, the oldest first."""
    waits = [
        collective for group in groups for collective in (*_collectives(group), *_pairs(group))
    ]
    for wait in waits:
        if wait.call.created_ns and newest_ns >= wait.call.created_ns:
            wait.lasted_seconds = (newest_ns - wait.call.created_ns) / 1e9
    return sorted(
        waits, key=lambda wait: (wait.call.created_ns, wait.group.name, wait.call.sequence)
    )


def _collectives(group: ProcessGroup) -> Iterator[Wait]:
    waiting: dict[int, list[int]] = defaultdict(list)
    first: dict[int, Call] = {}
    for rank, group_calls in group.calls.items():
        for call in group_calls.calls:
            if call.state == PENDING and rank not in waiting[call.sequence]:
                waiting[call.sequence].append(rank)
                known = first.setdefault(call.sequence, call)
                if call.created_ns < known.created_ns:
                    first[call.sequence] = call
    absent = group.absent()
    for sequence, ranks in waiting.items():
        done = tuple(
            rank for rank, group_calls in group.calls.items() if group_calls.completed >= sequence
        )
        late = group.behind(sequence)
        yield Wait(group, first[sequence], tuple(ranks), late, absent, done)


def _pairs(group: ProcessGroup) -> Iterator[Wait]:
    """Sends and receives of which the other side has not called its part."""
    for rank, group_calls in group.calls.items():
        for call in {each.operation: each for each in reversed(group_calls.pairs)}.values():
            peer, partner = _partner(group, call)
            if peer is None:
                continue
            other = group.calls.get(peer)
            if other is None:
                yield Wait(group, call, (rank,), (), (peer,))
            elif rank < peer and any(each.operation == partner for each in other.pairs):
                yield Wait(group, call, (rank, peer), (), ())
            elif group_calls.pair_counts.get(call.operation, 0) > other.pair_counts.get(partner, 0):
                yield Wait(group, call, (rank,), (peer,), ())


def _partner(group: ProcessGroup, call: Call) -> tuple[int | None, str]:
    """The global rank of the other side, and its part."""
    match = _PAIR.match(call.operation)
    if match is None:
        return None, ""
    kind, own, other = match[1], match[2], match[3]
    partner = f"recv {other}<-{own}" if kind == "send" else f"send {other}->{own}"
    place = int(other)
    return (group.members[place] if place < len(group.members) else None), partner
