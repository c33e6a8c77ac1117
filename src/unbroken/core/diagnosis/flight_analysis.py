"""Find the ranks that keep the others waiting, by the flight recorder dumps of a job.

A rank that waits in an operation waits for the members of its group that have not called it.  The
culprits are those at the end of such chains: they are waited for, and wait for nobody.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from unbroken.core.wording import counted
from unbroken.wire.flight_dump import COMPLETED, FAILED, Call, RankDump

from .flight_waits import ProcessGroup, Wait, process_groups, waits_of
from .stacks import CERTAIN, LIKELY, UNSURE, name_ranks

CAUSES_MAX = 16
WAITS_MAX = 64
_NO_SIZES = ("all_to_all", "coalesced", "gather", "scatter", "_oop", "_v", "send", "recv")
"""Operations whose sizes may differ between ranks; those with one tensor are below."""
_SAME_SIZES = ("_all_gather_base", "_reduce_scatter_base", "all_gather_into", "reduce_scatter_te")


@dataclass(frozen=True, slots=True)
class Cause:
    """One reason why ranks wait."""

    kind: str
    """mismatch, not-called, failed, no-dump, deadlock, stuck, behind."""
    ranks: tuple[int, ...]
    """The culprits; none: nobody can be named."""
    confidence: str
    why: str


@dataclass(frozen=True, slots=True)
class Analysis:
    """Findings from the dumps of a job."""

    ranks: tuple[int, ...]
    """Ranks with a dump."""
    absent: tuple[int, ...]
    """Ranks of the job without one."""
    groups: tuple[ProcessGroup, ...] = ()
    waits: tuple[Wait, ...] = ()
    causes: tuple[Cause, ...] = ()
    """The surest first."""

    def culprits(self) -> tuple[int, ...]:
        """Ranks of the causes that count: those of the first one's confidence."""
        sure = self.causes[0].confidence if self.causes else ""
        named = (cause.ranks for cause in self.causes if cause.confidence == sure)
        return tuple(sorted({rank for ranks in named for rank in ranks}))


def analyse(dumps: Mapping[int, RankDump]) -> Analysis:
    """Say who is to blame by the dumps, by rank."""
    groups = process_groups(dumps)
    newest = max((dump.newest_ns for dump in dumps.values()), default=0)
    waits = waits_of(groups, newest)
    world = {rank for group in groups for rank in group.members}
    absent = tuple(sorted(world - set(dumps)))
    causes = list(_causes(groups, waits, dumps))[:CAUSES_MAX]
    order = (CERTAIN, LIKELY, UNSURE)
    causes.sort(key=lambda cause: order.index(cause.confidence))
    return Analysis(tuple(sorted(dumps)), absent, tuple(groups), tuple(waits), tuple(causes))


def _causes(
    groups: Sequence[ProcessGroup], waits: Sequence[Wait], dumps: Mapping[int, RankDump]
) -> Iterator[Cause]:
    mismatches = [mismatch for group in groups for mismatch in _mismatches(group)]
    if mismatches:
        yield from mismatches
        return
    late = {rank for wait in waits for rank in wait.late}
    blocked = {rank: wait for wait in waits if wait.late for rank in wait.waiting}
    failed = {rank for rank in late if _has_failed(groups, rank)}
    in_collective = {rank for wait in waits if not wait.call.is_p2p for rank in wait.late}
    free = sorted(failed | {rank for rank in late if rank not in blocked})
    free = [rank for rank in free if rank in in_collective] or free
    in_doubt = {rank for wait in waits if wait.absent for rank in wait.waiting}
    sure = [rank for rank in free if rank in failed or rank not in in_doubt]
    if sure:
        yield _not_called(sure, waits, groups, failed)
    unsure = {rank for wait in waits for rank in wait.absent if not wait.late}
    if unsure and not sure:
        yield _no_dump(sorted(unsure), waits)
    elif late and not sure:
        yield _deadlock(late, waits)
    elif waits and not sure:
        yield _stuck(waits)
    elif not waits:
        yield from _nobody_waits(groups)


def _has_failed(groups: Sequence[ProcessGroup], rank: int) -> bool:
    calls = (group.calls[rank].calls for group in groups if rank in group.calls)
    return any(call.state == FAILED for result in calls for call in result)


def _not_called(
    ranks: Sequence[int], waits: Sequence[Wait], groups: Sequence[ProcessGroup], failed: set[int]
) -> Cause:
    named = set(ranks)
    result = [wait for wait in waits if named & set(wait.late)]
    first = max(result, key=lambda wait: (len(named & set(wait.late)), -wait.call.created_ns))
    there = tuple(rank for rank in ranks if rank in first.late)
    has = "has" if len(there) == 1 else "have"
    why = f"{name_ranks(there)} {has} not called {first.name()}"
    rest = [rank for rank in ranks if rank not in there]
    for wait in result:
        here = [rank for rank in rest if rank in wait.late]
        if here:
            why += f", {name_ranks(here)} not {wait.name()}"
            rest = [rank for rank in rest if rank not in here]
    waiting = sorted({rank for wait in waits for rank in wait.waiting} - named)
    why += f", and {name_ranks(waiting)} {'waits' if len(waiting) == 1 else 'wait'}"
    if last := last_call(groups, there[0]):
        why += f"; last call of rank {there[0]}: {last}"
    if broken := sorted(failed & named):
        why += f"; an operation of {name_ranks(broken)} ended with an error"
    is_pair = all(wait.call.is_p2p for wait in result)
    return Cause("not-called", tuple(ranks), LIKELY if is_pair else CERTAIN, why)


def last_call(groups: Sequence[ProcessGroup], rank: int) -> str:
    """The newest operation of a rank in words; empty: none is known."""
    calls = [
        (call.record, call, group)
        for group in groups
        if rank in group.calls
        for call in (*group.calls[rank].calls, *group.calls[rank].pairs)
    ]
    if not calls:
        return ""
    _, call, group = max(calls, key=lambda one: one[0])
    at = f" by {call.where}" if call.where else ""
    number = "" if call.is_p2p else f" {call.sequence}"
    return f"{call.operation}{number} of group {group.title()}{at} ({call.state})"


def _no_dump(ranks: Sequence[int], waits: Sequence[Wait]) -> Cause:
    wait = next(one for one in waits if one.absent and not one.late)
    why = (
        f"no dump of {name_ranks(ranks)}, and all others have called {wait.name()}: a process that "
        "has ended or hangs writes none"
    )
    return Cause("no-dump", tuple(ranks), LIKELY, why)


def _deadlock(late: set[int], waits: Sequence[Wait]) -> Cause:
    """All that are waited for wait themselves, in different operations."""
    first: dict[int, Wait] = {}
    for wait in waits:
        for rank in wait.waiting:
            if wait.late:
                first.setdefault(rank, wait)
    parties: dict[str, list[int]] = defaultdict(list)
    for rank in sorted(late):
        parties[first[rank].name() if rank in first else ""].append(rank)
    told = "; ".join(
        f"{name_ranks(ranks)} in {name}" for name, ranks in list(parties.items())[:4] if name
    )
    why = f"each waits for another, operations were called in different orders: {told}"
    sizes = sorted(parties.values(), key=len)
    if len(sizes) > 1 and len(sizes[0]) < len(sizes[1]):
        return Cause("deadlock", tuple(sizes[0]), LIKELY, why)
    return Cause("deadlock", tuple(sorted(late)), UNSURE, why)


def _stuck(waits: Sequence[Wait]) -> Cause:
    """All ranks have called what they wait in."""
    for wait in waits:
        if wait.done and len(wait.waiting) <= len(wait.done):
            has = "has" if len(wait.waiting) == 1 else "have"
            why = (
                f"all have called {wait.name()}, and {name_ranks(wait.waiting)} alone {has} not "
                "completed it: its GPU or network is suspected"
            )
            return Cause("stuck", wait.waiting, LIKELY, why)
        started = [rank for rank in wait.waiting if _is_started(wait, rank)]
        if 0 < len(wait.waiting) - len(started) < len(started):
            slow = tuple(rank for rank in wait.waiting if rank not in started)
            has = "has" if len(slow) == 1 else "have"
            why = (
                f"all have called {wait.name()}, and the GPU of {name_ranks(slow)} {has} not begun "
                "it: it is busy with something before, or hangs"
            )
            return Cause("stuck", slow, LIKELY, why)
    wait = next((one for one in waits if not one.call.is_p2p), waits[0])
    why = (
        f"no rank is behind: all {counted(len(wait.waiting), 'rank')} have called {wait.name()}; "
        "the network or a GPU is suspected"
    )
    return Cause("stuck", (), UNSURE, why)


def _is_started(wait: Wait, rank: int) -> bool:
    calls = wait.group.calls[rank].calls
    return any(call.sequence == wait.call.sequence and call.is_started for call in calls)


def _nobody_waits(groups: Sequence[ProcessGroup]) -> Iterator[Cause]:
    for group in groups:
        told = {rank: call.enqueued for rank, call in group.calls.items()}
        known = {rank: last for rank, last in told.items() if last is not None}
        highest = max(known.values(), default=0)
        late = tuple(rank for rank, last in known.items() if last < highest)
        if late:
            has = "is" if len(late) == 1 else "are"
            why = (
                f"no rank waits, but {name_ranks(late)} {has} behind in group {group.title()} "
                f"({known[late[0]]} of {highest} collectives): it is outside of any collective, or "
                "the dumps are of different moments"
            )
            yield Cause("behind", late, UNSURE, why)


def _mismatches(group: ProcessGroup) -> Iterator[Cause]:
    """The first collective that not all members have called in the same way."""
    by_sequence: dict[int, dict[int, list[Call]]] = defaultdict(lambda: defaultdict(list))
    for rank, group_calls in group.calls.items():
        for call in group_calls.calls:
            by_sequence[call.sequence][rank].append(call)
    for sequence in sorted(by_sequence):
        calls = by_sequence[sequence]
        if all(one.state == COMPLETED for result in calls.values() for one in result):
            continue
        for what, view in (("operations", _names), ("data types", _types), ("sizes", _sizes)):
            seen = Counter({rank: view(result) for rank, result in calls.items()}.values())
            if len(seen) > 1:
                yield _mismatch(group, sequence, what, {r: view(c) for r, c in calls.items()})
                return


def _mismatch(group: ProcessGroup, sequence: int, what: str, seen: Mapping[int, str]) -> Cause:
    parties: dict[str, list[int]] = defaultdict(list)
    for rank, said in seen.items():
        parties[said].append(rank)
    ordered = sorted(parties.items(), key=lambda one: len(one[1]))
    told = ", ".join(f"{name_ranks(ranks)}: {said}" for said, ranks in ordered[:4])
    why = f"different {what} in collective {sequence} of group {group.title()}: {told}"
    if len(ordered[0][1]) == len(ordered[-1][1]):
        why += "; both sides have as many ranks, so the culprit is unknown"
        return Cause("mismatch", tuple(sorted(seen)), UNSURE, why)
    fewer = tuple(sorted(rank for _, ranks in ordered[:-1] for rank in ranks))
    return Cause("mismatch", fewer, CERTAIN if what == "operations" else LIKELY, why)


def _names(calls: Sequence[Call]) -> str:
    return "+".join(dict.fromkeys(call.operation for call in calls))


def _types(calls: Sequence[Call]) -> str:
    return "+".join(dict.fromkeys(call.types for call in calls if _size(call)))


def _sizes(calls: Sequence[Call]) -> str:
    return "+".join(_size(call) for call in calls)


def _size(call: Call) -> str:
    name = call.operation
    if name.startswith(_SAME_SIZES) or not any(part in name for part in _NO_SIZES):
        return f"{call.inputs} to {call.outputs}"
    # Lists of tensors of different sizes are gathered, each rank knowing all of them.
    return {"all_gather": call.outputs, "reduce_scatter": call.inputs}.get(name, "")
