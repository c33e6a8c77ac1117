"""Dumps of torch's flight recorder, as pickle or as JSON (torch 2.5 to 2.13).

Only plain values are read. A dump of thousands of entries is reduced to the operations that each
process group of the rank waits for and has called last.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from unbroken.errors import PeerError

from . import pickled

DUMP_BYTES_MAX = 256 * 1024 * 1024
"""Bytes of a dump at most; one of 200,000 entries with stacks has about 200 MB, and torch keeps
2,000 by default."""
ENTRIES_MAX = 1_000_000
GROUPS_MAX = 4096
OPEN_MAX = 32
"""Operations kept of those that a group has not completed: the oldest and the newest."""
NEWEST_KEPT = 8
"""Operations kept of each group, completed or not."""
TEXT_CHARACTERS = 120
RANKS_MAX = 1_000_000
PENDING, COMPLETED, FAILED = "pending", "completed", "failed"
UNTRACKED = ("gloo", "ucc", "mpi")
"""Backends whose entries stay `scheduled`: an entry that is retired has completed."""
_NUMBER = re.compile(r"\d{1,9}")
_SEQUENCE_MAX = 1 << 63
_LIBRARY = re.compile(r"(?:^|/)(?:site-packages|dist-packages|torch|python3(?:\.\d+)?)/|^<|^\?\?")


@dataclass(frozen=True, slots=True)
class Call:
    """An operation that a rank has called in a process group."""

    sequence: int
    operation: str
    """Name such as `all_reduce`; for a send or receive with its ranks in the group: `send 0->1`."""
    state: str
    """pending, completed; failed: ended with an error, or never left the host."""
    is_p2p: bool = False
    is_started: bool = False
    """True if the GPU has begun it, if the job records that."""
    inputs: str = ""
    outputs: str = ""
    types: str = ""
    created_ns: int = 0
    timeout_ms: int = 0
    where: str = ""
    """The user's function that called it."""
    record: int = 0


@dataclass(slots=True)
class GroupCalls:
    """Calls of a rank in one process group."""

    name: str
    description: str
    ranks: tuple[int, ...] = ()
    """Members by global rank; empty: the dump does not list them."""
    enqueued: int | None = 0
    """Sequence number of the last collective; None: not known, the buffer has lost it."""
    completed: int = 0
    calls: tuple[Call, ...] = ()
    """Collectives by sequence: those not completed, and the newest."""
    pairs: tuple[Call, ...] = ()
    """Sends and receives that have not completed."""
    pair_counts: Mapping[str, int] = field(default_factory=dict)
    """Number of calls of each `send 0->1`, as far as the buffer reaches."""


@dataclass(slots=True)
class RankDump:
    """The dump of one rank."""

    version: str
    groups: list[GroupCalls]
    entries: int = 0
    is_whole: bool = False
    """True if nothing was overwritten: the buffer begins with the first operation."""
    newest_ns: int = 0
    """The latest time in it, in nanoseconds."""
    rank: int | None = None
    """Rank in the dump; None: the dump has none."""


@dataclass(slots=True)
class _Gathered:
    enqueued: int = 0
    completed: int = 0
    open: list[Any] = field(default_factory=list)
    newest: deque[Any] = field(default_factory=lambda: deque(maxlen=NEWEST_KEPT))
    pairs: list[Any] = field(default_factory=list)
    pair_counts: dict[str, int] = field(default_factory=dict)
    done_pairs: int = 0
    pg_id: int | None = None


def read(data: bytes) -> RankDump:
    """Read a dump. Raises PeerError with the reason."""
    try:
        return _dump(_value(data))
    except (AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise PeerError(f"no flight recorder dump: {error}"[:200]) from error


def _value(data: bytes) -> Any:
    if data[:1] != b"\x80":
        return msgspec.json.decode(data)
    return pickled.load(data, opcodes=50_000_000, is_lazy=True)


def _dump(found: Any) -> RankDump:
    if not isinstance(found, (dict, pickled.Flat)):
        raise ValueError(f"a {type(found).__name__} in place of a dict")
    if found.get("pg_config") is None and found.get("entries") is None:
        raise ValueError("neither `entries` nor `pg_config` in it")
    entries = found.get("entries") or []
    if not isinstance(entries, list) or len(entries) > ENTRIES_MAX:
        raise ValueError(f"`entries` is no list of at most {ENTRIES_MAX}")
    gathered: dict[tuple[str, str], _Gathered] = {}
    for entry in entries:
        _gather(gathered, entry)
    members = dict(_members(found.get("pg_config")))
    is_whole = not entries or (
        _whole(entries[0].get("record_id")) == 0
        and _whole(entries[-1].get("record_id")) == len(entries) - 1
    )
    groups = [_group(*one, members, found.get("pg_status")) for one in gathered.items()]
    known = {group.name for group in groups}
    for (name, description), ranks in members.items():
        if name not in known:
            enqueued = 0 if is_whole else None
            groups.append(GroupCalls(name, description, ranks, enqueued))
    newest = max((_newest(item) for item in entries[-64:]), default=0)
    version = _text(found.get("version", ""))
    dump = RankDump(version, groups[:GROUPS_MAX], len(entries), is_whole, newest)
    dump.rank = _rank(dump, found.get("nccl_comm_state"))
    return dump


def _gather(gathered: dict[tuple[str, str], _Gathered], entry: Any) -> None:
    name, description = entry.get("process_group")
    key = _text(name), _text(description)
    one = gathered.get(key)
    if one is None:
        if len(gathered) >= GROUPS_MAX:
            raise ValueError(f"more than {GROUPS_MAX} process groups")
        one = gathered[key] = _Gathered()
    one.pg_id = entry.get("pg_id")
    is_done = _state(entry) == COMPLETED
    if entry.get("is_p2p"):
        _gather_pair(one, entry, is_done)
        return
    sequence = _whole(entry.get("collective_seq_id"))
    one.newest.append(entry)
    one.enqueued = max(one.enqueued, sequence)
    if is_done:
        one.completed = max(one.completed, sequence)
    else:
        one.open.append(entry)


def _gather_pair(gathered: _Gathered, entry: Any, is_done: bool) -> None:
    operation = _operation(entry)
    sequence = _whole(entry.get("p2p_seq_id"))
    if "coalesced" in operation:
        # The parts of a batch have no state of their own: it is that of the batch.
        parts = [each for each in gathered.pairs if _whole(each.get("p2p_seq_id")) == sequence]
        if is_done:
            gathered.pairs = [each for each in gathered.pairs if each not in parts]
        return
    if len(gathered.pair_counts) < RANKS_MAX:
        gathered.pair_counts[operation] = gathered.pair_counts.get(operation, 0) + 1
    if not is_done:
        gathered.pairs.append(entry)
    elif gathered.pairs:
        gathered.pairs = [each for each in gathered.pairs if _operation(each) != operation]


def _group(
    key: tuple[str, str], gathered: _Gathered, members: Mapping[tuple[str, str], tuple[int, ...]],
    status: Any,
) -> GroupCalls:  # fmt: skip
    # Operations of one group run in order: those called before a completed one have completed.
    opened = [
        item for item in gathered.open if _whole(item.get("collective_seq_id")) > gathered.completed
    ]
    if len(opened) > OPEN_MAX:
        opened = opened[: OPEN_MAX // 2] + opened[-OPEN_MAX // 2 :]
    newest = list(gathered.newest)
    if len(newest) == NEWEST_KEPT:
        # The oldest may be a part of a batch.
        cut = _whole(newest[0].get("collective_seq_id"))
        newest = [item for item in newest if _whole(item.get("collective_seq_id")) != cut]
    enqueued = _enqueued(gathered, status)
    kept = {id(item): item for item in opened + newest}
    calls = sorted(
        (_call(item, gathered.completed, enqueued) for item in kept.values()),
        key=lambda call: (call.sequence, call.record),
    )
    ranks = members.get(key) or next(
        (ranks for (name, _), ranks in members.items() if name == key[0]), ()
    )
    pairs = tuple(_call(pair, -1, None) for pair in gathered.pairs[:OPEN_MAX])
    return GroupCalls(
        *key, ranks, enqueued, gathered.completed, tuple(calls), pairs, gathered.pair_counts
    )


def _enqueued(gathered: _Gathered, status: Any) -> int:
    """Return the last collective that has left the host: one that fails is recorded before it
    does."""
    if status is None or gathered.pair_counts:
        return gathered.enqueued
    item = status.get(str(gathered.pg_id))
    told = None if item is None else item.get("last_enqueued_collective")
    before = gathered.enqueued - 1
    is_behind = told is not None and str(told) == str(before) and gathered.completed <= before
    return before if is_behind else gathered.enqueued


def _call(entry: Any, completed: int, enqueued: int | None) -> Call:
    is_p2p = bool(entry.get("is_p2p"))
    sequence = _whole(entry.get("p2p_seq_id" if is_p2p else "collective_seq_id"))
    state = COMPLETED if sequence <= completed else _state(entry)
    if enqueued is not None and sequence > enqueued:
        state = FAILED
    types = f"{_plain(entry.get('input_dtypes'))}{_plain(entry.get('output_dtypes'))}"
    return Call(
        sequence, _operation(entry), state, is_p2p,
        entry.get("state") == "started" or bool(entry.get("time_discovered_started_ns")),
        _plain(entry.get("input_sizes")), _plain(entry.get("output_sizes")), types,
        _whole(entry.get("time_created_ns", 0)), _whole(entry.get("timeout_ms", 0)),
        _where(entry.get("frames")), _whole(entry.get("record_id", 0)),
    )  # fmt: skip


def _state(entry: Any) -> str:
    if entry.get("state") == "completed" or entry.get("time_discovered_completed_ns"):
        return COMPLETED
    if not entry.get("retired"):
        return PENDING
    backend = _text(entry.get("profiling_name")).partition(":")[0]
    return COMPLETED if backend in UNTRACKED else FAILED


def _operation(entry: Any) -> str:
    return _text(entry.get("profiling_name")).rpartition(":")[2]


def _members(config: Any) -> Iterator[tuple[tuple[str, str], tuple[int, ...]]]:
    if not isinstance(config, dict) or len(config) > GROUPS_MAX:
        return
    for name, item in config.items():
        ranks = item.get("ranks")
        if isinstance(ranks, str):
            ranks = [int(result) for result in _NUMBER.findall(ranks[: RANKS_MAX * 8])]
        if not isinstance(ranks, list):
            raise ValueError("`ranks` of a process group are no list")
        if ranks:
            result = {each for each in map(_whole, ranks) if each < RANKS_MAX}
            yield (_text(name), _text(item.get("desc", ""))), tuple(sorted(result))


def _rank(dump: RankDump, communicators: Any) -> int | None:
    """Return the one rank that all groups of the process have in common, or that NCCL records."""
    sets = [set(group.ranks) for group in dump.groups if group.ranks]
    common = set.intersection(*sets) if sets else set[int]()
    if len(common) == 1:
        return common.pop()
    world = max(map(len, sets), default=0)
    if isinstance(communicators, dict):
        for communicator in communicators.values():
            told, size = (
                communicator.get("rank"),
                communicator.get("nRanks", communicator.get("n_ranks")),
            )
            if world and str(size) == str(world) and str(told).isdecimal() and len(str(told)) < 9:
                return int(told)
    return None


def _newest(entry: Any) -> int:
    names = ("time_created_ns", "time_discovered_started_ns", "time_discovered_completed_ns")
    return max(_whole(entry.get(name) or 0) for name in names)


def _where(frames: Any) -> str:
    """Return the user's innermost function, as `train (train.py:57)`."""
    if not isinstance(frames, list):
        return ""
    for frame in frames[:64]:
        file = _text(frame.get("filename", ""))
        if file and not _LIBRARY.search(file):
            name = _text(frame.get("name", ""))
            return f"{name} ({file.rpartition('/')[2]}:{_whole(frame.get('line', 0))})"
    return ""


def _plain(value: Any) -> str:
    """Return lists of numbers and texts as `[2,3][4]`."""
    if not isinstance(value, (list, tuple)):
        return ""
    parts = []
    for item in value[:64]:
        if isinstance(item, (list, tuple)):
            parts.append("[" + ",".join(str(_whole(each)) for each in item[:16]) + "]")
        else:
            parts.append(_text(item) + " ")
    return "".join(parts)[: TEXT_CHARACTERS * 4]


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _SEQUENCE_MAX:
        raise ValueError("something else in place of a number")
    return value


def _text(value: Any) -> str:
    if type(value) not in (str, int):
        raise ValueError(f"a {type(value).__name__} in place of a text")
    return value[:TEXT_CHARACTERS] if isinstance(value, str) else str(value)[:TEXT_CHARACTERS]
