"""Report progress of training to the agent: optional for training scripts.

    from unbroken import worker

    for step, batch in enumerate(batches):
        loss = train(batch)
        worker.progress(step, loss=loss_on_the_host)
        if step % 1000 == 0:
            with worker.phase("eval"):
                evaluate()

Nothing here raises, waits, or costs more than a microsecond or two.  Where no agent of unbroken has
started the process, and in processes forked from the one that trains, everything does nothing.
Standard library only, Python 3.9 or newer. Warm starts need 3.10.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from math import nan
from time import monotonic  # noqa: TID251  (the caller's clock is read here)
from types import TracebackType
from typing import TYPE_CHECKING, Any, SupportsFloat, SupportsInt
from zlib import crc32

from unbroken.wire.worker import (
    METRICS_MAX,
    NO_STEP,
    PAGE_BYTES,
    PLACES,
    RECORDS,
    SAMPLES,
    VARIABLE,
    VERSION,
    Page,
    read,
    seal,
    text,
    version,
)

if TYPE_CHECKING:
    from unbroken.worker.checkpointing.checkpoints import checkpoints
    from unbroken.worker.checkpointing.torch_storage import StorageReader, StorageWriter
    from unbroken.worker.loading.data import data
    from unbroken.worker.replicas import replicas_agree
    from unbroken.worker.restart.restartable import RankLost, restartable
    from unbroken.worker.snapshot.snapshot import Snapshot
    from unbroken.worker.tracking.run import track

__all__ = [
    "Context",
    "Phase",
    "RankLost",
    "Snapshot",
    "StorageReader",
    "StorageWriter",
    "checkpoint",
    "checkpoints",
    "context",
    "data",
    "phase",
    "progress",
    "replicas_agree",
    "restartable",
    "track",
]

_ELSEWHERE = {
    "checkpoints": "checkpointing.checkpoints",
    "data": "loading.data",
    "RankLost": "restart.restartable",
    "replicas_agree": "replicas",
    "restartable": "restart.restartable",
    "Snapshot": "snapshot.snapshot",
    "StorageReader": "checkpointing.torch_storage",
    "StorageWriter": "checkpointing.torch_storage",
    "track": "tracking.run",
}
"""Names that are imported when they are used first, so that the rest costs no more than it did."""


def __getattr__(name: str) -> Any:
    if name not in _ELSEWHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    result = globals()[name] = getattr(import_module(f".{_ELSEWHERE[name]}", __name__), name)
    return result


def progress(step: SupportsInt, **metrics: SupportsFloat) -> None:
    """Report a finished step, and up to 16 metrics of it; call it once per step on every rank.

    Give plain numbers: a tensor on a GPU has to be fetched, which makes the step wait for the
    device. A metric keeps its value until it is reported again. Values that are not numbers are
    ignored, with one warning. The detector `nan` looks for NaN and infinities.

    `samples=` is the number of samples that this rank's data has given since training began, this
    step's included, counted on over restarts. It holds for this call alone. Incidents then report
    how many samples were repeated or skipped.
    """
    try:
        _writer.progress(step, metrics)
    except Exception as error:  # noqa: BLE001  (training goes on, whatever a user's float() does)
        _warn(f"progress is not told: {error!r}")


def phase(name: str) -> Phase:
    """Report the phase that begins now, such as "train", "eval" or "checkpoint".

    Each phase has its own usual length of silence. As a context manager it returns to the phase
    before.
    """
    try:
        return Phase(_writer.enter(str(name)))
    except Exception as error:  # noqa: BLE001
        _warn(f"the phase is not told: {error!r}")
        return Phase(None)


def checkpoint(step: SupportsInt) -> None:
    """Report that a checkpoint is complete, with everything up to this step."""
    try:
        _writer.checkpoint(int(step))
    except Exception as error:  # noqa: BLE001
        _warn(f"the checkpoint is not told: {error!r}")


@dataclass(frozen=True)
class Context:
    """Rank, world size and attempt of this process; outside of unbroken, torchrun's values, or a
    world of one."""

    is_managed: bool
    """True if an agent of unbroken has started the process."""
    job: str
    """Name of the job; empty outside of unbroken."""
    pod: str
    """Name of this process's pod; empty outside of unbroken."""
    rank: int
    """Rank of this process in the job, from 0."""
    world_size: int
    """Number of ranks of the job."""
    local_rank: int
    """Rank of this process in its pod, from 0."""
    node_rank: int
    """Rank of this pod in the job, from 0."""
    attempt: int
    """Attempt of the job, from 0; each recovery starts the next."""
    restart_count: int
    """Number of restarts, as torchrun counts; with unbroken's own agent the same as `attempt`."""


def context() -> Context:
    """Return the context, read from the environment variables."""
    job, restarts = os.environ.get("UNBROKEN_JOB", ""), _number("TORCHELASTIC_RESTART_COUNT", 0)
    return Context(
        is_managed="RANK" in os.environ and bool(job or VARIABLE in os.environ),
        job=job,
        pod=os.environ.get("UNBROKEN_POD", ""),
        rank=_number("RANK", 0),
        world_size=_number("WORLD_SIZE", 1),
        local_rank=_number("LOCAL_RANK", 0),
        node_rank=_number("GROUP_RANK", 0),
        attempt=_number("JOB_RESTART_COUNT", restarts),
        restart_count=restarts,
    )


class Phase:
    """A phase that has begun."""

    __slots__ = ("_before",)

    def __init__(self, before: str | None) -> None:
        self._before = before

    def __enter__(self) -> None:
        """Do nothing: the phase began with the call."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Return to the phase before."""
        if self._before is not None:
            phase(self._before)


class _Nowhere:
    """The writer if there is no page, or it is another process's."""

    def progress(self, step: SupportsInt, metrics: Mapping[str, SupportsFloat]) -> None:
        """Do nothing."""

    def enter(self, phase: str) -> str | None:
        """Do nothing."""
        return None

    def checkpoint(self, step: int) -> None:
        """Do nothing."""

    def begin_anew(self) -> None:
        """Do nothing."""


class _Unclaimed(_Nowhere):
    """The writer before its first report, which looks for the page."""

    def progress(self, step: SupportsInt, metrics: Mapping[str, SupportsFloat]) -> None:
        _claim().progress(step, metrics)

    def enter(self, phase: str) -> str | None:
        return _claim().enter(phase)

    def checkpoint(self, step: int) -> None:
        _claim().checkpoint(step)


class _Writer(_Nowhere):
    """Writes the page; reports of an earlier process of this worker still count.

    Threads and signal handlers may report at the same time. A lock would cost as much as all the
    rest, and is not needed: a record is written by one store that Python does not interrupt. What a
    lost race leaves out is in the next record.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        number, page = read(memory[:]) or (0, Page())
        self._memory = memory
        self._number = number
        self._first = NO_STEP if page.first_step is None else page.first_step
        self._first_at = nan if page.first_step_at is None else page.first_step_at
        self._step = NO_STEP
        self._calls, self._step_at = page.calls, page.step_at
        self._visit = _Visit("", page.visit + (number > 0), monotonic())
        self._metrics: dict[str, float] = {}
        self._text, self._named = text(""), 0
        self._bad_calls = page.bad_calls
        self._saved, self._saved_at = NO_STEP, nan

    def progress(self, step: SupportsInt, metrics: Mapping[str, SupportsFloat]) -> None:
        now, visit = monotonic(), self._visit
        if visit.calls and now - self._step_at > visit.longest_gap:
            visit.longest_gap = now - self._step_at
        visit.calls += 1
        self._calls += 1
        self._step_at = now
        try:
            self._step = int(step)
            if self._first == NO_STEP:
                self._first, self._first_at = _whole(step), now
            if metrics or SAMPLES in self._metrics:
                self._take(metrics)
            self._write()
        except Exception:  # noqa: BLE001  (a user's objects)
            self._salvage(step, metrics)

    def enter(self, phase: str) -> str | None:
        before = self._visit
        if phase != before.phase:
            self._visit = _Visit(phase, before.number + 1, monotonic())
            self._name()
            self._write()
        return before.phase

    def checkpoint(self, step: int) -> None:
        self._saved, self._saved_at = _whole(step), monotonic()
        self._write()

    def begin_anew(self) -> None:
        """Take the next step for the first of an attempt."""
        self._first = NO_STEP

    def _take(self, told: Mapping[str, SupportsFloat]) -> None:
        known, is_bad = self._metrics, False
        for name, value in told.items():
            known[name] = number = float(value)
            # 0 for finite numbers, NaN for all others.
            if number - number:
                is_bad = True
        self._bad_calls += is_bad
        if SAMPLES in known and SAMPLES not in told:
            # The value belongs to its step.
            del known[SAMPLES]
            self._named = -1
        if len(known) != self._named:
            self._name()

    def _name(self) -> None:
        while len(self._metrics) > METRICS_MAX:
            self._metrics.popitem()
            _warn(f"more than {METRICS_MAX} metrics: the last are ignored")
        self._text, self._named = text(self._visit.phase, [*self._metrics]), len(self._metrics)

    def _salvage(self, step: SupportsInt, metrics: Mapping[str, SupportsFloat]) -> None:
        """Keep the valid values."""
        try:
            self._step = _whole(step)
        except Exception:  # noqa: BLE001
            self._step = NO_STEP
            _warn(f"the step is no whole number: {type(step).__name__}")
        told = {}
        for name, value in metrics.items():
            try:
                told[name] = float(value)
            except Exception:  # noqa: BLE001
                _warn(f"metric {name!r} is no number: {type(value).__name__}")
        self._take(told)
        self._write()

    def _write(self) -> None:
        self._number = number = self._number + 1
        # Another thread may add a metric meanwhile.
        values = tuple(self._metrics.values())[:METRICS_MAX]
        visit, texts, count = self._visit, self._text, len(values)
        body = RECORDS[count].pack(
            number, self._first, self._first_at, self._step, self._calls, self._step_at,
            visit.number, visit.at, visit.calls, visit.longest_gap,
            self._bad_calls, self._saved, self._saved_at, count, len(texts), *values,
        )  # fmt: skip
        body += texts
        data = seal(crc32(body)) + body
        start = PLACES[number & 1]
        self._memory[start : start + len(data)] = data


class _Visit:
    """One stay in a phase."""

    __slots__ = ("at", "calls", "longest_gap", "number", "phase")

    def __init__(self, phase: str, number: int, at: float) -> None:
        self.phase, self.number, self.at = phase, number, at
        self.calls, self.longest_gap = 0, 0.0


_lock = threading.Lock()
_NOWHERE, _UNCLAIMED = _Nowhere(), _Unclaimed()
_writer: _Nowhere = _UNCLAIMED
_warned: set[str] = set()


def begin_attempt() -> None:
    """Take the next step that is reported for the first of an attempt; for `restartable`."""
    _writer.begin_anew()


def _claim() -> _Nowhere:
    global _writer
    with _lock:
        if _writer is _UNCLAIMED:
            _writer = _found() or _NOWHERE
        return _writer


def _found() -> _Writer | None:
    """Return the page, if this process has inherited it and is the first of its worker to write."""
    try:
        fd = int(os.environ[VARIABLE])
        status = os.fstat(fd)
        # The variable may outlive the descriptor, whose number may be another file's by now.
        if not stat.S_ISREG(status.st_mode) or status.st_size != PAGE_BYTES:
            return None
        result = version(os.pread(fd, PAGE_BYTES, 0))
    except (KeyError, ValueError, OSError):
        return None
    if result != VERSION:
        if result is not None:
            _warn(f"the agent's page has version {result}, not {VERSION}: nothing is told")
        return None
    try:
        # Held until this process ends: processes that it starts inherit the page as well.
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return _Writer(mmap.mmap(fd, PAGE_BYTES))
    except (BlockingIOError, PermissionError):
        return None
    except OSError as error:
        _warn(f"the agent's page cannot be used: {error.strerror}")
        return None


def _forget() -> None:
    """Drop the page in a forked child: it is the parent's, and so may be the lock.

    A template of warm workers has no page; its forks get their own.
    """
    global _writer, _lock
    is_template = _writer is _UNCLAIMED and VARIABLE not in os.environ
    _writer, _lock = _UNCLAIMED if is_template else _NOWHERE, threading.Lock()


def _whole(step: SupportsInt) -> int:
    result = int(step)
    if not NO_STEP < result < -NO_STEP:
        raise OverflowError(result)
    return result


def _number(name: str, default: int) -> int:
    try:
        return int(os.environ[name])
    except (KeyError, ValueError):
        return default


def _warn(what: str) -> None:
    if what not in _warned and len(_warned) < METRICS_MAX:
        _warned.add(what)
        from unbroken.log_lines import Log

        Log(__name__, "unbroken.worker: ").warning(what)


os.register_at_fork(after_in_child=_forget)
