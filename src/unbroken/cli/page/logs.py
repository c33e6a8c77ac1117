"""A job's logs for the live page: the newest lines of a time, of every rank, in bounded size.

The page names an end in time, and gets lines before it with the place where older ones begin. Logs
are read in windows before the end that grow until enough lines are found. So a page of a long log
does not read all of it, and a search does.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from unbroken.cli.connection import Cluster, Object
from unbroken.cli.job.logs import PodRanks, pod_lines, split
from unbroken.cli.terminal import visible
from unbroken.core.wording import counted
from unbroken.errors import SpecError, UnbrokenError, WorldError
from unbroken.foreign_numbers import INT32_MAX, whole_number
from unbroken.spec.patterns import Pattern
from unbroken.spec.times import time_seconds

LINES_MAX = 500
"""Lines of an answer."""
CHARACTERS_MAX = 2000
"""Characters of a line that are shown."""
LINE_BYTES_MAX = 64 * 1024
"""Bytes of a line that are kept and searched."""
BYTES_MAX = 16 * 1024 * 1024
"""Bytes that are read for a window; a second or two of work."""
PODS_MAX = 64
"""Pods whose logs are read for an answer."""
READERS_MAX = 8
"""Logs that are read at once."""
IDLE_SECONDS = 10.0
"""Seconds without a byte after which a log is given up: a kubelet that hangs never answers."""
FIRST_SECONDS, GROWTH, LEAST_SECONDS = 60.0, 16.0, 0.5
"""The first window, the factor to the next one, and the smallest window of a fast log."""
CLOCKS_APART = 60.0
"""Seconds by which clocks of nodes may differ."""
FIND_MAX = 200
"""Characters of a text or pattern that is searched."""
NOTES_MAX = 5
"""Pods whose logs could not be read and that are named."""


@dataclass(frozen=True, slots=True)
class LogQuery:
    """The lines to show."""

    rank: int | None = None
    """None: of all ranks, and of agents."""
    pod: str = ""
    """Empty: of all pods."""
    find: str = ""
    """Text, or pattern, that lines contain."""
    is_pattern: bool = False
    """`find` is a pattern of RE2."""
    since: float | None = None
    """Seconds since the epoch of the first line; None: from the start of the job."""
    before: float | None = None
    """Seconds since the epoch before which all lines are; None: up to now."""


def read_query(values: Mapping[str, str]) -> LogQuery:
    """Read the parameters of a request.  Raises SpecError."""
    unknown = values.keys() - {"rank", "pod", "find", "pattern", "since", "before"}
    if unknown:
        raise SpecError(f"unknown parameter {min(unknown)[:50]}")
    rank = None
    if "rank" in values:
        rank = whole_number(values["rank"], 0, INT32_MAX)
        if rank is None:
            raise SpecError(f"rank must be a number from 0 to {INT32_MAX}")
    find = values.get("find", "")
    if len(find) > FIND_MAX:
        raise SpecError(f"a search has at most {FIND_MAX} characters")
    return LogQuery(
        rank=rank,
        pod=values.get("pod", "")[:FIND_MAX],
        find=find,
        is_pattern=values.get("pattern") == "1",
        since=_seconds(values, "since"),
        before=_seconds(values, "before"),
    )


def _seconds(values: Mapping[str, str], name: str) -> float | None:
    if name not in values:
        return None
    whole, _, fraction = values[name].partition(".")
    seconds = whole_number(whole, 0, INT32_MAX * 2)
    part = whole_number(fraction[:9] or "0")
    if seconds is None or part is None:
        raise SpecError(f"{name} must be seconds since the epoch, such as 1796000000.25")
    return float(f"{seconds}.{fraction[:9] or 0}")


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line with its origin."""

    at: float
    rank: int | None
    """None: an agent wrote it, or the rank is not known."""
    pod: str
    text: str


@dataclass(slots=True)
class _Budget:
    """Bytes that may still be read in a window."""

    left: int = BYTES_MAX

    def spend(self, count: int) -> bool:
        """Take bytes; False if there are none left."""
        self.left -= count
        return self.left >= 0


@dataclass(slots=True)
class _Window:
    """Lines of a part of the time, the oldest first."""

    since: float
    before: float | None
    lines: list[LogLine] = field(default_factory=list)
    budget: _Budget = field(default_factory=_Budget)

    @property
    def is_whole(self) -> bool:
        """True if all of the time was read."""
        return self.budget.left >= 0


async def log_page(cluster: Cluster, name: str, query: LogQuery, now: float) -> dict[str, Any]:
    """The newest lines that a query finds; SpecError if the job or the pattern is not there."""
    reader = _Reader(cluster, await cluster.job(name), query)
    found, notes = await reader.search(now)
    lines, older = newest(found, reader.begin)
    return {
        "lines": [line_value(one) for one in lines],
        "older": older,
        "until": now,
        "notes": [*notes, *reader.notes()],
    }


def newest(window: _Window, begin: float) -> tuple[list[LogLine], float | None]:
    """The lines to show, and the time before which older ones are; None: there are none.

    Lines that were written at once have one time: they are shown together, or not at all.
    """
    if len(window.lines) <= LINES_MAX:
        return window.lines, window.since if window.since > begin else None
    cut = window.lines[-LINES_MAX - 1].at
    kept = [one for one in window.lines[-LINES_MAX:] if one.at > cut]
    if kept:
        return kept, kept[0].at
    return window.lines[-LINES_MAX:], cut


def line_value(line: LogLine) -> dict[str, Any]:
    """A line as the page shows it."""
    return {
        "at": line.at,
        "rank": line.rank,
        "pod": line.pod,
        "text": visible(line.text[:CHARACTERS_MAX]),
        "cut": max(0, len(line.text) - CHARACTERS_MAX),
    }


class _Reader:
    """Reads the logs of a job's pods."""

    def __init__(self, cluster: Cluster, job: Object, query: LogQuery) -> None:
        self._cluster = cluster
        self._job = job
        self._query = query
        self._matches = _matcher(query)
        self._ranks = PodRanks(cluster, job)
        self._problems: dict[str, str] = {}
        self._silent: set[str] = set()
        """Pods whose logs do not come: a larger window does not wait for them again."""
        created = time_seconds(job["metadata"]["creationTimestamp"]) - CLOCKS_APART
        self.begin = max(created, query.since or created)
        """Time before which there is no line to show."""

    async def search(self, now: float) -> tuple[_Window, list[str]]:
        """Read windows until one has enough lines, begins with the job, or is too long to read."""
        pods, notes = await self._pods()
        end = now + CLOCKS_APART if self._query.before is None else self._query.before
        seconds, best, is_long = FIRST_SECONDS, _Window(end, end), False
        while True:
            window = await self._read(pods, max(self.begin, end - seconds))
            is_long = is_long or not window.is_whole
            if window.is_whole or seconds <= LEAST_SECONDS:
                best = window
            is_read = len(best.lines) > LINES_MAX or best.since <= self.begin
            if is_read or (is_long and best.since < end):
                break
            seconds *= GROWTH if window.is_whole else 1 / GROWTH
        if is_long:
            mebibytes = BYTES_MAX // 2**20
            notes.append(
                f"The log is long: {mebibytes} MiB at most are searched at once. Load older lines, "
                "or choose a rank, to search the rest."
            )
        return best, notes

    async def _pods(self) -> tuple[list[Object], list[str]]:
        """The pods to read, and sentences about the others."""
        every = await self._cluster.pods(self._job["metadata"]["name"])
        every.sort(key=lambda one: str(one["metadata"]["name"]))
        if not every:
            none = "The job has no pods now. Logs are deleted with the pods."
            return [], self._cluster.missing() or [none]
        query, pods = self._query, list[Object]()
        for pod in every:
            is_chosen = not query.pod or pod["metadata"]["name"] == query.pod
            if is_chosen and await self._may_have_rank(pod):
                pods.append(pod)
        if len(pods) <= PODS_MAX:
            return pods, []
        note = f"Only the first {PODS_MAX} of {len(pods)} pods are read: choose a rank or a pod."
        return pods[:PODS_MAX], [note]

    async def _may_have_rank(self, pod: Object) -> bool:
        if self._query.rank is None:
            return True
        ranks = await self._ranks.all_of(pod)
        return ranks is not None and self._query.rank in ranks

    async def _read(self, pods: Sequence[Object], since: float) -> _Window:
        window, free = _Window(since, self._query.before), asyncio.Semaphore(READERS_MAX)

        async def read(pod: Object, previous: bool) -> list[LogLine]:
            async with free:
                return await self._lines(pod, window, previous=previous)

        found = await asyncio.gather(
            *(read(pod, previous) for pod in pods for previous in _containers(pod))
        )
        window.lines = sorted((one for lines in found for one in lines), key=lambda one: one.at)
        return window

    async def _lines(self, pod: Object, window: _Window, *, previous: bool) -> list[LogLine]:
        """Lines of a container in the window that match: the newest, one more than are shown."""
        found, name = deque[LogLine](maxlen=LINES_MAX + 1), pod["metadata"]["name"]
        if name in self._silent:
            return []
        at, ranks = window.since, await self._ranks.all_of(pod)
        try:
            async for line in pod_lines(
                self._cluster,
                pod,
                previous=previous,
                since=window.since,
                longest=LINE_BYTES_MAX,
                idle_seconds=IDLE_SECONDS,
            ):
                if not window.budget.spend(len(line) + 1):
                    break
                at, text = stamped(line, at)
                if window.before is not None and at >= window.before:
                    break
                local_rank, text = split(text)
                rank = None
                if local_rank is not None and ranks is not None:
                    rank = ranks.start + local_rank
                is_wanted = self._query.rank in (None, rank) and at >= window.since
                if is_wanted and self._matches(text):
                    found.append(LogLine(at, rank, name, text))
        except UnbrokenError as error:
            self._problems[name] = str(error)
            if isinstance(error, WorldError):
                self._silent.add(name)
        return list(found)

    def notes(self) -> list[str]:
        """Sentences about logs that could not be read."""
        shown = [f"{pod}: {text[:300]}" for pod, text in sorted(self._problems.items())]
        more = len(shown) - NOTES_MAX
        rest = [f"{counted(more, 'other log')} could not be read."] if more > 0 else []
        return [*shown[:NOTES_MAX], *rest]


def _containers(pod: Object) -> tuple[bool, ...]:
    """The logs of a pod: that of the containers now, and that before their last restart."""
    statuses = (pod.get("status") or {}).get("containerStatuses") or ()
    has_previous = any(int(one.get("restartCount") or 0) > 0 for one in statuses)
    return (True, False) if has_previous else (False,)


def _matcher(query: LogQuery) -> Callable[[str], bool]:
    if not query.find:
        return lambda text: True
    if query.is_pattern:
        try:
            pattern = Pattern(query.find)
        except SpecError as error:
            raise SpecError(f"the pattern cannot be used: {error}") from error
        return lambda text: pattern.is_found(text.encode(errors="replace"))
    wanted = query.find.casefold()
    return lambda text: wanted in text.casefold()


def stamped(line: str, before: float) -> tuple[float, str]:
    """The time of a line and its text; `before`: the time for a line without one."""
    stamp, _, text = line.partition(" ")
    try:
        at = time_seconds(stamp[:40])
    except (ValueError, OverflowError):
        return before, line
    # A line about lines that are gone is of the year 1970 (local/node/logs).
    return (at, text) if at > 0 else (before, text)
