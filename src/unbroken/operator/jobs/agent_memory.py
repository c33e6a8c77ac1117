"""Memory of the operator that one job's agents may take: their reports, evidence, and the inbox.

The inbox never exceeds its bound: links wait unread until the job has handled their messages.
Reports and evidence that the job keeps count against a budget. A job over its budget fails, and
from then on only the bare state of its agents is kept.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from itertools import islice
from typing import NamedTuple

from unbroken.core.job.events import PodUid
from unbroken.foreign_numbers import whole_number
from unbroken.spec.job.types import JobSpec
from unbroken.wire.agent import AgentReport
from unbroken.wire.observation import Evidence, ThreadStack

BUDGET_BYTES = 16 * 1024 * 1024
BUDGET_BYTES_PER_AGENT, BUDGET_BYTES_PER_WORKER = 32 * 1024, 8 * 1024
"""Bytes that a job may take for each agent, and for each worker.

A report of 8 workers that train takes 10 to 20 KiB, one of 8 workers that died of an exception 60
KiB.
"""
WORKERS_UNKNOWN = 16
"""Workers of a node if `nprocPerNode` is no number."""
INBOX_BYTES, INBOX_BYTES_PER_AGENT = 16 * 1024 * 1024, 32 * 1024
"""Bytes of reports and evidence that wait for the job, and the addition per agent: all agents may
have news at once."""
INBOX_REPORTS, INBOX_REPORTS_PER_AGENT = 1000, 2
"""Number of reports that wait for the job, and the addition per agent; heartbeats too, which take
nearly no memory."""
SMALL_BYTES = 16 * 1024
"""Bytes up to which a report is weighed by a formula; longer ones are weighed exactly."""


class _Limits(NamedTuple):
    agents: int
    budget: int
    """Bytes of reports and evidence that are kept."""
    inbox_reports: int
    inbox_bytes: int


class AgentMemory:
    """The account of one job; `spec` None: not known yet."""

    def __init__(self, spec: Callable[[], JobSpec | None]) -> None:
        self.room = asyncio.Event()
        """Set while the inbox takes more."""
        self.room.set()
        self.heavy = asyncio.Lock()
        """Held while a long message of the job's agents is read."""
        self.is_bare = False
        """The job was over its budget: only the bare state of agents is kept."""
        self.bytes = 0
        self._spec = spec
        self._limited: JobSpec | None = None
        """The spec that the limits were computed for: they are needed at each report."""
        self._known_limits = _limits_of(None)
        self._reports: dict[PodUid, int] = {}
        self._evidence: dict[PodUid, int] = {}
        self._texts: dict[str, str] = {}
        """Frames in the evidence that is kept."""
        self._waiting: deque[int] = deque()
        self._waiting_bytes = 0

    @property
    def agents(self) -> int:
        """Return the number of agents that the job has, or will have."""
        return self._limits().agents

    @property
    def budget(self) -> int:
        """Return the bytes that reports and evidence may take."""
        return self._limits().budget

    def _limits(self) -> _Limits:
        spec = self._spec()
        if spec is not self._limited:
            self._limited, self._known_limits = spec, _limits_of(spec)
        return self._known_limits

    def largest(self) -> PodUid | None:
        """Return the pod whose agent takes most."""
        return max(self._reports, key=self._of, default=None)

    def report(self, uid: PodUid, weight: int) -> bool:
        """Keep a report instead of the last; return False if the job is now over its budget."""
        self.bytes += weight - self._reports.get(uid, 0)
        self._reports[uid] = weight
        return self.bytes <= self.budget

    def evidence(self, uid: PodUid, weight: int) -> bool:
        """Keep evidence instead of the last; return False if the job is now over its budget."""
        self.bytes += weight - self._evidence.get(uid, 0)
        self._evidence[uid] = weight
        return self.bytes <= self.budget

    def share(self, evidence: Evidence) -> tuple[Evidence, int]:
        """Return the evidence with one copy of each frame for the whole job, and the bytes that it
        adds.

        Most ranks of a job are at the same places: 100,000 ranks would otherwise take gigabytes.
        """
        known = len(self._texts)
        ranks = tuple(replace(rank, threads=self._shared(rank.threads)) for rank in evidence.ranks)
        new = islice(self._texts, known, None)
        without = replace(evidence, ranks=tuple(replace(rank, threads=()) for rank in ranks))
        frames = sum(len(thread.frames) for rank in ranks for thread in rank.threads)
        threads = sum(len(rank.threads) for rank in ranks)
        weight = weigh(without) + 256 * threads + 8 * frames + sum(map(sys.getsizeof, new))
        return replace(evidence, ranks=ranks), weight

    def _shared(self, threads: tuple[ThreadStack, ...]) -> tuple[ThreadStack, ...]:
        texts = self._texts
        return tuple(
            replace(thread, frames=tuple(texts.setdefault(text, text) for text in thread.frames))
            for thread in threads
        )

    def drop_evidence(self, uid: PodUid) -> None:
        """Drop an agent's evidence: the job has used it."""
        self.bytes -= self._evidence.pop(uid, 0)
        if not self._evidence:
            self._texts.clear()

    def drop(self, uid: PodUid) -> None:
        """Drop all of a pod that is gone."""
        self.bytes -= self._reports.pop(uid, 0)
        self.drop_evidence(uid)

    def queued(self, weight: int) -> None:
        """Count a report or evidence that is put into the inbox; 0: it is kept already."""
        self._waiting.append(weight)
        self._waiting_bytes += weight
        limits = self._known_limits  # needed at each report with news
        if len(self._waiting) > limits.inbox_reports or self._waiting_bytes > limits.inbox_bytes:
            self.room.clear()

    def taken(self) -> None:
        """Count the oldest entry out of the inbox: it has been handled."""
        if not self._waiting:
            return
        self._waiting_bytes -= self._waiting.popleft()
        if self.room.is_set():
            return
        limits, waiting = self._limits(), 2 * len(self._waiting)
        # Thousands of links may wait: they are not woken for each report that is taken.
        if waiting < limits.inbox_reports and 2 * self._waiting_bytes < limits.inbox_bytes:
            self.room.set()

    def _of(self, uid: PodUid) -> int:
        return self._reports[uid] + self._evidence.get(uid, 0)


def _limits_of(spec: JobSpec | None) -> _Limits:
    agents, nproc = (spec.nnodes, spec.nproc_per_node) if spec else (0, "")
    workers = whole_number(nproc, 0, 9999)
    workers = WORKERS_UNKNOWN if workers is None else workers
    each = BUDGET_BYTES_PER_AGENT + BUDGET_BYTES_PER_WORKER * workers
    return _Limits(
        agents,
        BUDGET_BYTES + each * agents,
        INBOX_REPORTS + INBOX_REPORTS_PER_AGENT * agents,
        INBOX_BYTES + INBOX_BYTES_PER_AGENT * agents,
    )


def weigh_report(report: AgentReport, length: int) -> int:
    """Return the bytes of memory that a report takes at most; `length`: as received."""
    if length > SMALL_BYTES or report.faults or report.log_rules or report.receipts:
        return weigh(report)
    metrics = sum(len(rank_watch.metrics) for rank_watch in report.watch)
    parts = len(report.workers) + len(report.watch) + len(report.kept) + len(report.copies)
    # Texts take up to four bytes a character; the rest is Python's objects.
    return 1024 + 4 * length + 256 * parts + 192 * metrics


def weigh(value: object) -> int:
    """Return the bytes of memory of a value of the wire, with everything in it."""
    if isinstance(value, Enum):
        return 0
    size = sys.getsizeof(value)
    if isinstance(value, tuple):
        size += sum(map(weigh, value))
    elif isinstance(value, Mapping):
        size += sum(weigh(key) + weigh(item) for key, item in value.items())
    elif is_dataclass(value):
        size += sum(weigh(getattr(value, field.name)) for field in fields(value))
    return size


def bare(report: AgentReport) -> AgentReport:
    """Return the state of an agent without its workers, faults, rules and receipts."""
    return replace(
        report, workers=(), faults=report.faults[:1], log_rules=(), watch=(), receipts=(),
        reason=report.reason[:200], message=report.message[:200],
    )  # fmt: skip
