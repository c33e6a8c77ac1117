"""Find the ranks to blame for a job that hangs, by what its ranks are doing.

What counts, the surest first:

1. A process that is stopped or has ended.
2. A process that is stuck in the kernel.
3. Ranks that are behind by the sequence of collectives.
4. Ranks that are elsewhere while others wait in a collective.
5. Ranks that have made fewer steps.
6. The smallest group that differs from the others.

If none of it applies, nobody is blamed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from unbroken.core.wording import counted, plural
from unbroken.spec.job.incident import StackGroup
from unbroken.wire.observation import FRAME_CHARACTERS, Collective, RankEvidence

from .rank_activity import (
    BUSY_SHARE,
    COLLECTIVE,
    GPU,
    LISTENING,
    WAITING,
    Kind,
    RankActivity,
    activities_of,
    branches,
    explaining_frames,
    pending,
    place,
)

CERTAIN, LIKELY, UNSURE = "certain", "likely", "unsure"
GROUPS_MAX = 8
STACK_FRAMES_MAX = 16
RANGES_CHARACTERS = 300
WHY_CHARACTERS = 500
IO_NOISE_BYTES = 64 * 1024
"""Bytes between two looks; less is a line of output, or a heartbeat."""
WORK_SHARE, WOKEN_SHARE = 0.1, 0.02
"""Cores: work of a rank or its child processes; more than threads use that wait with a timeout."""
_WAITS_FOR_CHILDREN = (Kind.DATA, Kind.CHILD, Kind.LOCK, Kind.SLEEP, Kind.NETWORK, Kind.OTHER)


@dataclass(frozen=True, slots=True)
class Blame:
    """Findings from the evidence."""

    ranks: tuple[int, ...] = ()
    """The culprits; none: nobody can be named."""
    why: str = ""
    confidence: str = ""
    """certain, likely, unsure; empty: there is no evidence."""
    groups: tuple[StackGroup, ...] = ()
    """The outliers first."""
    is_working: bool = False
    """A rank that waits for no peer gets on: this is no hang."""
    is_spinning: bool = False
    """A rank that waits for no peer computes, and stays where it is."""


@dataclass(frozen=True, slots=True)
class _Verdict:
    ranks: Sequence[int]
    why: str
    confidence: str


class _Scene:
    """The ranks and what each of them does."""

    def __init__(self, evidence: Sequence[RankEvidence]) -> None:
        self.ranks = {
            rank_evidence.rank: rank_evidence for rank_evidence in sorted(evidence, key=_order)
        }
        self.activities = activities_of(self.ranks)
        if len(set(self.activities.values())) == 1:
            self.activities = branches(self.activities, self.ranks)
        self.groups: dict[RankActivity, list[int]] = defaultdict(list)
        for rank, what in self.activities.items():
            self.groups[what].append(rank)

    def of(self, *kinds: Kind) -> list[int]:
        return [rank for rank, what in self.activities.items() if what.kind in kinds]

    def describe(self, what: RankActivity) -> str:
        """In words, with the place where its first rank is."""
        first = self.ranks[self.groups[what][0]]
        via = f", called by {what.via}" if what.via else ""
        if not what.where:
            return f"{what.words}{via}"
        at = place(explaining_frames(first)) or what.where
        called = ", called" if what.kind is Kind.STUCK else ""
        return f"{what.words}{called} in {at}{via}"

    def summary(self, ranks: Iterable[int]) -> str:
        """`rank 3 sleeps in get_batch (data.py:41)`, of at most two groups."""
        wanted = set(ranks)
        said = []
        for what, members in self.groups.items():
            named = [rank for rank in members if rank in wanted]
            if named:
                does = self.describe(what)
                said.append(f"{name_ranks(named)} {plural(does) if len(named) > 1 else does}")
        more = f", {len(said) - 2} groups more" if len(said) > 2 else ""
        return " and ".join(said[:2]) + more


def blame(evidence: Sequence[RankEvidence], now: float, world: int | None = None) -> Blame:
    """Say who is to blame by the evidence of the ranks that could be asked, of `world` ranks."""
    scene = _Scene(evidence)
    if not scene.ranks:
        return Blame(why="no rank could be looked at")
    size = max(world or 0, max(scene.ranks) + 1)
    verdict = _judge(scene, size, now)
    why = verdict.why
    if len(scene.ranks) < size:
        missing = [rank for rank in range(size) if rank not in scene.ranks]
        why = f"{why}; {name_ranks(missing)} could not be examined"
    return Blame(
        tuple(verdict.ranks),
        why[:WHY_CHARACTERS],
        verdict.confidence,
        _groups(scene, frozenset(verdict.ranks)),
        is_working=any(
            works(rank_evidence, scene.activities[rank])
            for rank, rank_evidence in scene.ranks.items()
        ),
        is_spinning=any(
            spins(rank_evidence, scene.activities[rank])
            for rank, rank_evidence in scene.ranks.items()
        ),
    )


def ranges(ranks: Iterable[int]) -> str:
    """Sorted ranks as `0-2,5`, cut where there are too many."""
    parts: list[str] = []
    length, first, last = 0, None, -2
    for rank in sorted(ranks):
        if rank == last + 1 and first is not None:
            last = rank
            continue
        if first is not None:
            parts.append(_range(first, last))
            length += len(parts[-1]) + 1
        if length > RANGES_CHARACTERS:
            return ",".join([*parts, "..."])
        first = last = rank
    return ",".join([*parts, _range(first, last)]) if first is not None else ""


def name_ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0-2,5`."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {ranges(ranks)}"


def _range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _order(rank_evidence: RankEvidence) -> tuple[int, int]:
    # Of a rank that is told twice the last counts, which must not depend on the order of arrival.
    return rank_evidence.rank, rank_evidence.pid


def _judge(scene: _Scene, size: int, now: float) -> _Verdict:
    verdict = _by_process(scene) or _by_sequence(scene)
    verdict = verdict or _by_place(scene) or _by_collective(scene) or _by_step(scene, now)
    verdict = verdict or _by_size(scene)
    if verdict is not None:
        return verdict
    if size == 1:
        return _Verdict((0,), f"{scene.summary([0])}, and is the only rank", CERTAIN)
    if all(what.kind in WAITING for what in scene.activities.values()):
        said = f"no rank is behind: the network or a GPU is suspected; {scene.summary(scene.ranks)}"
        return _Verdict((), said, UNSURE)
    return _Verdict((), f"no rank differs from the others: {scene.summary(scene.ranks)}", UNSURE)


def _by_process(scene: _Scene) -> _Verdict | None:
    """A process that does not run."""
    for kind in (Kind.STOPPED, Kind.GONE):
        ranks = scene.of(kind)
        if ranks:
            # A debugger may be the very one that looks.
            is_traced = any(scene.ranks[rank].state == "t" for rank in ranks)
            return _Verdict(ranks, scene.summary(ranks), LIKELY if is_traced else CERTAIN)
    stuck = [rank for rank in scene.of(Kind.STUCK) if not works(scene.ranks[rank], None)]
    if len(stuck) == len(scene.ranks) > 1:
        return _Verdict((), f"every rank is stuck in the kernel: {scene.summary(stuck)}", UNSURE)
    return _Verdict(stuck, scene.summary(stuck), LIKELY) if stuck else None


def _by_sequence(scene: _Scene) -> _Verdict | None:
    """Ranks that have begun fewer collectives than others of the same process group."""
    newest: dict[str, dict[int, Collective]] = defaultdict(dict)
    for rank, rank_evidence in scene.ranks.items():
        for collective in rank_evidence.collectives:
            # Sends and receives are counted by pairs of ranks.
            if not {"send", "recv"} & set(collective.operation.replace(":", " ").split()):
                newest[collective.group][rank] = collective
    behind, least = set[int](), ""
    for group, by_rank in newest.items():
        highest = max(one.sequence for one in by_rank.values())
        late = {rank for rank, one in by_rank.items() if one.sequence < highest}
        if late and len(late) * 2 <= len(by_rank):
            behind |= late
            low = min(by_rank[rank].sequence for rank in late)
            least = least or f"at collective {low} of {highest} in group {group}"
    # One that waits in another group is kept by somebody else there.
    first = {rank for rank in behind if not pending(scene.ranks[rank])} or behind
    if not first:
        return None
    ranks = sorted(first)
    is_sure = all(scene.activities[rank].kind not in WAITING for rank in ranks)
    sure = CERTAIN if is_sure else LIKELY if first != behind or len(newest) == 1 else UNSURE
    return _Verdict(ranks, f"{name_ranks(ranks)} behind, {least}: {scene.summary(ranks)}", sure)


def _by_place(scene: _Scene) -> _Verdict | None:
    """Ranks that do something else while others wait in a collective."""
    for kinds in ((Kind.COLLECTIVE,), (Kind.STORE,)):
        waiting = scene.of(*kinds)
        others = [rank for rank, what in scene.activities.items() if what.kind not in WAITING]
        known = [rank for rank in others if scene.activities[rank].kind is not Kind.UNKNOWN]
        if not waiting or not others:
            continue
        ranks = known or others
        sure = LIKELY
        if len(ranks) * 2 > len(scene.ranks):
            sure = UNSURE
        elif known and len({scene.activities[rank] for rank in ranks}) == 1 and len(ranks) == 1:
            sure = CERTAIN if scene.ranks[ranks[0]].is_same else LIKELY
        return _Verdict(ranks, f"{scene.summary(ranks)}, while {scene.summary(waiting)}", sure)
    return None


def _by_collective(scene: _Scene) -> _Verdict | None:
    """All wait for peers, but not in the same collective."""
    if any(what.kind not in WAITING for what in scene.activities.values()):
        return None
    names = Counter(
        {what: len(members) for what, members in scene.groups.items() if _is_named(what)}
    )
    if len(names) < 2:
        return None
    said = f"different collectives were called: {scene.summary(scene.ranks)}"
    most = max(names.values())
    fewer = sorted(rank for what in names if names[what] < most for rank in scene.groups[what])
    if not fewer or list(names.values()).count(most) > 1:
        return _Verdict(sorted(r for what in names for r in scene.groups[what]), said, UNSURE)
    is_clear = len(fewer) * 4 <= len(scene.ranks)
    return _Verdict(fewer, said, LIKELY if is_clear else UNSURE)


def _is_named(what: RankActivity) -> bool:
    """True if it can be distinguished from other collectives."""
    return what.words not in (COLLECTIVE, GPU)


def _by_step(scene: _Scene, now: float) -> _Verdict | None:
    """Ranks that have made fewer steps."""
    steps = {
        rank: rank_evidence.step
        for rank, rank_evidence in scene.ranks.items()
        if rank_evidence.step is not None
    }
    highest = max(steps.values(), default=0)
    behind = sorted(rank for rank, step in steps.items() if step < highest)
    if not behind or len(behind) * 2 > len(steps):
        return None
    slowest = scene.ranks[min(behind, key=lambda rank: steps[rank])]
    ago = "" if slowest.step_at is None else f", made {max(0.0, now - slowest.step_at):.0f} s ago"
    said = f"{name_ranks(behind)} at step {slowest.step}{ago}, others at {highest}"
    return _Verdict(behind, said, UNSURE)


def _by_size(scene: _Scene) -> _Verdict | None:
    """The smallest group, where nobody waits for anybody in a collective."""
    groups = {w: m for w, m in scene.groups.items() if w.kind is not Kind.UNKNOWN}
    waits = any(what.kind in WAITING for what in groups)
    # Who all listen may listen in different places: one collects what the others send.
    listens = all(what.kind in LISTENING for what in groups)
    if waits or listens or len(groups) < 2:
        return None
    smallest = min(groups.values(), key=len)
    is_only = sum(len(members) == len(smallest) for members in groups.values()) == 1
    if not is_only or len(smallest) * 2 >= len(scene.ranks):
        return None
    said = f"{scene.summary(smallest)}, unlike the others"
    return _Verdict(smallest, said, UNSURE)


def works(rank_evidence: RankEvidence, what: RankActivity | None) -> bool:
    """True if the rank gets on with something that is not waiting for peers."""
    if what is not None and what.kind in (*WAITING, Kind.STOPPED, Kind.GONE, Kind.UNKNOWN):
        return False
    is_fed = what is not None and what.kind in _WAITS_FOR_CHILDREN and _computes(rank_evidence)
    return (
        rank_evidence.is_same is False or (rank_evidence.io_bytes or 0) > IO_NOISE_BYTES or is_fed
    )


def _computes(rank_evidence: RankEvidence) -> bool:
    """True if the rank or a process below it computes: on a busy machine they get a small part of
    the processor time that they are ready to use, and almost none at the lowest priority."""
    used, waited = rank_evidence.cpu_share or 0.0, rank_evidence.waited_share or 0.0
    if used >= WORK_SHARE or waited >= BUSY_SHARE:
        return True
    return used >= WOKEN_SHARE and used + waited >= BUSY_SHARE


def spins(rank_evidence: RankEvidence, what: RankActivity) -> bool:
    """True if the rank computes, and stays where it is."""
    # On a machine that is busy with other work it does not get all that it would use.
    is_busy = what.kind is Kind.COMPUTE and (
        rank_evidence.state == "R"
        or (rank_evidence.cpu_share or 0.0) >= BUSY_SHARE
        or what.holds_gil
    )
    return is_busy and rank_evidence.is_same is True and not works(rank_evidence, what)


def _groups(scene: _Scene, culprits: frozenset[int]) -> tuple[StackGroup, ...]:
    """Ranks that do the same, the culprits first, then the largest; the last may be a mixture."""
    found: list[tuple[bool, RankActivity, list[int]]] = []
    for what, members in scene.groups.items():
        for is_outlier in (True, False):
            chosen = [rank for rank in members if (rank in culprits) is is_outlier]
            if chosen:
                found.append((is_outlier, what, chosen))
    found.sort(key=lambda one: (not one[0], -len(one[2]), one[2]))
    kept = found if len(found) <= GROUPS_MAX else found[: GROUPS_MAX - 1]
    groups = [_group(scene, *one) for one in kept]
    rest = [rank for _, _, members in found[len(kept) :] for rank in members]
    if rest:
        doing_else = f"do {counted(len(found) - len(kept), 'other thing')}"
        groups.append(StackGroup(ranges(rest), len(rest), doing_else))
    return tuple(groups)


def _group(
    scene: _Scene, is_outlier: bool, what: RankActivity, members: Sequence[int]
) -> StackGroup:
    frames = explaining_frames(scene.ranks[members[0]])[:STACK_FRAMES_MAX]
    stack = tuple(frame[:FRAME_CHARACTERS] for frame in frames)
    return StackGroup(ranges(members), len(members), scene.describe(what), stack, is_outlier)
