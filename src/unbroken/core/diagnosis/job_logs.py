"""Find the rank that broke a job first, by the logs of its ranks: errors, NCCL's watchdog,
torchrun's table."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from unbroken.core.agent.fault_texts import is_peer_lost

from .flight_analysis import Cause
from .stacks import CERTAIN, LIKELY, name_ranks

LINE_CHARACTERS = 4000
ERRORS_MAX = 10_000
RANKS_MAX = 1_000_000
SHOWN_CHARACTERS = 200
_RANK = re.compile(r"\[(?:[Rr]ank ?|default)(\d{1,7})\]|\bRank (\d{1,7})\]")
_PREFIX = re.compile(r"^(?:\[[^\]]{0,80}\]:? ?)+")
_TIME = re.compile(r"\b(\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,6})?)")
_ERROR = re.compile(r"^(?:[\w.]{0,200}\.)?\w{0,100}(?:Error|Exception|Interrupt|Timeout|Exit)\b:?")
_TRACEBACK = "Traceback (most recent call last)"
_WATCHDOG = re.compile(
    r"Watchdog caught collective operation timeout: \w{1,40}\(SeqNum=(\d{1,18}), "
    r"OpType=(\w{1,40})[^)]{0,200}Timeout\(ms\)=(\d{1,18})"
)
_LAST_WORK = re.compile(
    r"last enqueued (?:NCCL )?work: (-?\d{1,18}), last completed (?:NCCL )?work: (-?\d{1,18})"
)
_GROUP = re.compile(r"PG (?:ID \d{1,9} PG )?GUID ([^\s\](]{1,80}(?:\([^)\s]{0,80}\))?)")
_ROOT_CAUSE = "Root Cause (first observed failure)"
_TABLE = re.compile(r"^\s{0,8}(time|host|rank|exitcode|traceback)\s{0,8}: (.{0,300})")


@dataclass(frozen=True, slots=True)
class LoggedError:
    """An error of a rank, from its log."""

    rank: int
    time: str
    """The time as it is written; empty: the line has none."""
    order: int
    text: str
    is_consequence: bool
    """True if it says that a peer, or the connection to it, has gone."""


@dataclass(slots=True)
class JobLogs:
    """Findings from the logs of a job so far."""

    errors: list[LoggedError] = field(default_factory=list)
    timeouts: dict[int, str] = field(default_factory=dict)
    """The collective that NCCL's watchdog gave up, by rank."""
    enqueued: dict[str, dict[int, int]] = field(default_factory=dict)
    """Last collective that each rank has called, by process group."""
    roots: list[tuple[int, str]] = field(default_factory=list)
    """Ranks that torchrun names as the first to fail, and how they ended."""
    lines: int = 0
    ranks: set[int] = field(default_factory=set)


class LogReader:
    """Reads the lines of one log."""

    def __init__(self, logs: JobLogs, rank: int | None) -> None:
        self._logs, self._rank = logs, rank
        self._tracebacks: set[int | None] = set()
        self._table: dict[str, str] | None = None
        self._time = ""
        self._group: dict[int | None, str] = {}

    def read(self, line: str) -> None:
        """Take one line."""
        logs, line = self._logs, line[:LINE_CHARACTERS]
        logs.lines += 1
        match = _RANK.search(line[:200])
        rank = int(match[1] or match[2]) if match else self._rank
        if time := _TIME.search(line[:100]):
            self._time = time[1]
        if rank is not None and len(logs.ranks) < RANKS_MAX:
            logs.ranks.add(rank)
        self._read_table(line)
        if rank is not None:
            self._read_watchdog(rank, line)
            self._read_error(rank, line)

    def _read_table(self, line: str) -> None:
        if _ROOT_CAUSE in line:
            self._table = {}
        elif self._table is not None and (match := _TABLE.match(_PREFIX.sub("", line))):
            self._table[match[1]] = match[2].strip()
            if match[1] == "exitcode":
                rank = re.match(r"\d{1,7}", self._table.get("rank", ""))
                if rank and len(self._logs.roots) < ERRORS_MAX:
                    self._logs.roots.append((int(rank[0]), f"exit code {match[2].strip()}"))
                self._table = None

    def _read_watchdog(self, rank: int, line: str) -> None:
        if group := _GROUP.search(line):
            self._group[rank] = group[1]
        if match := _WATCHDOG.search(line):
            self._logs.timeouts.setdefault(rank, f"{match[2]} {match[1]}")
        if match := _LAST_WORK.search(line):
            name = self._group.get(rank, "")
            self._logs.enqueued.setdefault(name, {}).setdefault(rank, int(match[1]))

    def _read_error(self, rank: int, line: str) -> None:
        said = _PREFIX.sub("", line).rstrip()
        if said.startswith(_TRACEBACK):
            self._tracebacks.add(rank)
        elif rank in self._tracebacks and _ERROR.match(said):
            self._tracebacks.discard(rank)
            if len(self._logs.errors) < ERRORS_MAX:
                lost = is_peer_lost(said, said)
                order = len(self._logs.errors)
                text = said[:SHOWN_CHARACTERS]
                self._logs.errors.append(LoggedError(rank, self._time, order, text, lost))


def judge_logs(logs: JobLogs) -> Iterator[Cause]:
    """Say who is to blame by the logs."""
    yield from _by_error(logs)
    for group, by_rank in logs.enqueued.items():
        yield from _by_watchdog(group, by_rank)
    silent = sorted(logs.ranks - set(logs.timeouts))
    if not logs.enqueued and logs.timeouts and silent and len(silent) < len(logs.timeouts):
        waiting = sorted(logs.timeouts)
        why = (
            f"NCCL's watchdog gave up {logs.timeouts[waiting[0]]} in {name_ranks(waiting)}, and "
            f"nothing in {name_ranks(silent)}"
        )
        yield Cause("not-called", tuple(silent), LIKELY, why)


def _by_error(logs: JobLogs) -> Iterator[Cause]:
    own = [error for error in logs.errors if not error.is_consequence]
    lost = {error.rank for error in logs.errors if error.is_consequence}
    if own:
        # A rank without times is compared by the order in which its log was read.
        timed = (
            [logged_error for logged_error in own if logged_error.time]
            if all(logged_error.time for logged_error in own)
            else []
        )
        first = min(timed or own, key=lambda logged_error: (logged_error.time, logged_error.order))
        is_alone = len({logged_error.rank for logged_error in own}) == 1
        others = sorted(lost - {first.rank})
        why = f"rank {first.rank} failed first: {first.text}" + _consequences(others)
        yield Cause("error", (first.rank,), CERTAIN if is_alone else LIKELY, why)
    for rank, how in logs.roots[:1]:
        if not own and rank not in lost:
            why = f"torchrun saw rank {rank} fail first: {how}" + _consequences(sorted(lost))
            yield Cause("error", (rank,), LIKELY, why)


def _consequences(ranks: Sequence[int]) -> str:
    return f"; {name_ranks(ranks)} lost a peer afterwards" if ranks else ""


def _by_watchdog(group: str, by_rank: dict[int, int]) -> Iterator[Cause]:
    highest = max(by_rank.values())
    late = sorted(rank for rank, last in by_rank.items() if last < highest)
    if late:
        has = "has" if len(late) == 1 else "have"
        why = (
            f"{name_ranks(late)} {has} called {by_rank[late[0]]} collectives"
            f"{f' of group {group}' if group else ''}, others {highest}, by NCCL's watchdog"
        )
        yield Cause("not-called", tuple(late), LIKELY, why)
