"""Keep one run of MLflow or Weights & Biases over all restarts of a job.

    import mlflow

    with worker.track(mlflow, project="llama") as run:
        for step, batch in enumerate(batches):
            loss = train(batch)
            run.log(step, loss=loss_on_the_host)

Every rank calls it; rank 0 alone has a run. The run's identity follows from the job's, so that
every attempt finds it, wherever rank 0 runs. Without an agent of unbroken, each start of the script
is a run of its own.

A thread writes. Training never waits for the tracker and never ends because of it: what the tracker
does not take in time is dropped, the oldest first, and counted.
"""

from __future__ import annotations

import atexit
import collections
import itertools
import os
import re
import sys
import threading
from collections.abc import Callable, Mapping
from functools import partial
from time import monotonic, time  # noqa: TID251  (metrics have the time of day)
from types import ModuleType, TracebackType
from typing import Any, SupportsFloat, SupportsInt

from unbroken.errors import SpecError, WorldError
from unbroken.log_lines import Log
from unbroken.wire.ipc import HISTORY
from unbroken.wire.snapshot import job_of
from unbroken.worker import context
from unbroken.worker.channel import attempt_now, connect, whole
from unbroken.worker.restart.restartable import ends_attempt_alone

from .entries import PREFIX, Entry, Refused, RunPlan, Tracker, shown
from .history import Story, is_behind, story
from .mlflow import MlflowRun
from .wandb import WandbRun

ENTRIES_MAX = 10_000
"""Calls of `log` that wait for the tracker: a step of 0.1 s for a quarter of an hour."""
BATCH_ENTRIES = 200
"""Calls of `log` in one request; MLflow takes 1,000 metrics."""
PAUSE_SECONDS = 1.0
"""Seconds between two requests, so that one has the steps of a second."""
RETRY_SECONDS_MAX = 30.0
HISTORY_SECONDS = 2.0
"""Seconds between two questions for incidents to the agent, on this machine."""
LAST_SECONDS = 5.0
"""Seconds that the end of a script waits for the newest incident: heartbeats take a second."""
EXIT_SECONDS = 30.0
"""Seconds that the end of a script waits for the tracker."""
TRACKERS: Mapping[str, type[Tracker]] = {"mlflow": MlflowRun, "wandb": WandbRun}
"""Trackers by the name of their module."""
log = Log(__name__, "unbroken.worker: ")


@whole
def track(
    library: ModuleType, *, project: str = "", name: str = "", params: Mapping[str, Any] = {}
) -> Run:
    """Return the job's run in the tracker whose module is given: `mlflow` or `wandb`.

    `project` is MLflow's experiment or the project of Weights & Biases; without it, the one that
    the tracker is configured with. `name` is for scripts that keep several runs, and is shown.
    `params` are written when the run begins. Returns at once, on every rank; raises SpecError for
    another module.
    """
    kind = getattr(library, "__name__", "")
    if kind not in TRACKERS:
        raise SpecError(f"worker.track takes the module mlflow or wandb, not {library!r}")
    found = _runs.get((kind, name))
    if found is None:
        make = partial(_tracker, library, kind, project, name, params)
        found = _runs[kind, name] = Run(make)
    return found


def _tracker(
    library: ModuleType, kind: str, project: str, name: str, params: Mapping[str, Any]
) -> Tracker | None:
    here = context()
    if here.rank != 0:
        return None
    job = job_of(os.environ) if here.is_managed else ""
    key = re.sub(r"[^\w.-]", "-", f"{job}-{name}" if job and name else job)
    tags = {f"{PREFIX}job": here.job, f"{PREFIX}key": key} if job else {}
    return TRACKERS[kind](RunPlan(library, key, project, name or here.job, dict(params), tags))


class Run:
    """The run of one tracker, on rank 0; on other ranks its methods do nothing."""

    def __init__(self, make: Callable[[], Tracker | None]) -> None:
        self._make: Callable[[], Tracker | None] | None = make
        """Makes the tracker, on rank 0; None: the run has ended here."""
        self._tried: int | None = None
        """Attempt in which this was tried: a parked worker gets its rank later."""
        self._tracker: Tracker | None = None
        self._writer: Writer | None = None
        self._begin()

    @whole
    def _begin(self) -> Writer | None:
        """Return the writer, which is made once this process is rank 0."""
        if self._make is not None and self._tried != attempt_now():
            self._tried, self._tracker = attempt_now(), self._make()
            if self._tracker is not None:
                self._writer = Writer(self._tracker)
                self._writer.start()
        return self._writer

    @property
    def id(self) -> str | None:
        """ID of the run in the tracker; None: the tracker has not answered yet, or this rank has
        no run."""
        return None if self._writer is None else self._writer.id

    def log(self, step: SupportsInt, **metrics: SupportsFloat) -> None:
        """Write metrics of a step; never waits. Give plain numbers, as to `worker.progress`.

        A value that is no number is left out, with one warning. A step that is repeated after a
        restart is written again.
        """
        writer = self._writer or self._begin()
        if writer is not None:
            writer.add(step, metrics)

    def activate(self, seconds: float = 60.0) -> bool:
        """Wait for the tracker, and make this the run of its own functions: `mlflow.log_artifact`,
        `wandb.log`, or a Trainer's `report_to`.

        False: the tracker has not answered, or this rank has no run. Those functions wait for the
        tracker as they do without unbroken.
        """
        writer = self._writer or self._begin()
        if writer is None or self._tracker is None or not writer.wait(seconds):
            return False
        self._tracker.activate()
        return True

    def finish(self, *, has_failed: bool = False, seconds: float = EXIT_SECONDS) -> None:
        """End the run; wait at most this long for the tracker. The end of the script does the
        same. The next attempt continues a run that has ended."""
        for key in [key for key, run in _runs.items() if run is self]:
            del _runs[key]
        writer, tracker, self._writer, self._make = self._writer, self._tracker, None, None
        if writer is not None and tracker is not None:
            writer.end(has_failed, seconds)
            tracker.deactivate(has_failed)

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the run, as failed if there is an exception; keep it over an in-process restart."""
        if not ends_attempt_alone(error):
            is_exit = isinstance(error, SystemExit) and not error.code
            self.finish(has_failed=error is not None and not is_exit)

    def forget(self) -> None:
        """Do nothing in a forked child: the run is its parent's."""
        self._make = self._tracker = self._writer = None


def _ask() -> Mapping[str, Any] | None:
    """Return what the agent knows of the job's incidents; None: there is no agent, or no answer."""
    channel = connect()
    if channel is None:
        return None
    try:
        answer, fds = channel.request({"type": HISTORY}, HISTORY)
    except WorldError as error:
        log.debug("no incidents for the tracker", error=error)
        return None
    for fd in fds:
        os.close(fd)
    return answer


class Writer:
    """Entries of a run, and the thread that writes them."""

    def __init__(
        self, tracker: Tracker, ask: Callable[[], Mapping[str, Any] | None] = _ask
    ) -> None:
        self.id: str | None = None
        self._tracker, self._ask = tracker, ask
        self._entries: collections.deque[Entry] = collections.deque(maxlen=ENTRIES_MAX)
        self._numbers = itertools.count()
        self._batch: list[Entry] = []
        self._next = 0
        """Number of the entry after the newest that was taken; a gap is what was dropped."""
        self._lost = self._reported = 0
        self._attempt = -1
        self._step = 0
        self._version = 0
        """Version of the history that was written."""
        self._asked_at = -HISTORY_SECONDS
        self._failures = 0
        self._is_open, self._is_over = threading.Event(), threading.Event()
        self._wake = threading.Event()
        self._has_failed: bool | None = None
        """How the run is to end; None: it goes on."""
        self._warned: set[str] = set()

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._work, name="unbroken-tracker", daemon=True).start()

    def add(self, step: SupportsInt, metrics: Mapping[str, SupportsFloat]) -> None:
        """Keep an entry for the thread."""
        try:
            number, values = int(step), {}
        except Exception:  # noqa: BLE001  (a user's objects)
            self._warn(f"the step is no whole number: {type(step).__name__}")
            return
        for name, value in metrics.items():
            try:
                values[name] = float(value)
            except Exception:  # noqa: BLE001
                self._warn(f"metric {name!r} is no number: {type(value).__name__}")
        self._entries.append(Entry(next(self._numbers), number, time(), attempt_now(), values))

    def wait(self, seconds: float) -> bool:
        """Wait until the tracker has answered; False: it has not."""
        return self._is_open.wait(seconds)

    @whole
    def end(self, has_failed: bool, seconds: float) -> None:
        """Write what is left, at most for this long."""
        self._has_failed = has_failed
        self._wake.set()
        if not self._is_over.wait(seconds):
            left = self._lost + len(self._batch) + len(self._entries)
            log.warning("metrics lost: the tracker does not answer", count=left, seconds=seconds)

    def _work(self) -> None:
        while not self._is_over.is_set():
            self._wake.wait(self._pause())
            is_last = self._has_failed is not None
            try:
                self.flush(is_last)
                self._failures = 0
            except Exception as error:  # noqa: BLE001  (a tracker's errors are of any kind)
                self._failed(error)
                # At the end the main thread waits: try again, but not without a pause.
                self._wake.clear()

    def _pause(self) -> float:
        return min(PAUSE_SECONDS * 2.0 ** min(self._failures, 10), RETRY_SECONDS_MAX)

    def _failed(self, error: Exception) -> None:
        self._failures += 1
        if self._failures == 1:
            log.warning("tracker does not take the run; trying again", error=shown(error))

    def flush(self, is_last: bool = False) -> None:
        """Write all that is there, or raise what the tracker raises; what is left stays."""
        if self.id is None:
            self.id = self._tracker.open()
            self._is_open.set()
        while self._take():
            self._write_batch()
        self._write_history(is_last)
        self._write_losses(is_last)
        if is_last:
            self._tell(lambda: self._tracker.close(bool(self._has_failed)))
            self._is_over.set()

    def _take(self) -> bool:
        """Take entries, unless some are left that the tracker has not taken."""
        while not self._batch or len(self._batch) < BATCH_ENTRIES:
            try:
                entry = self._entries.popleft()
            except IndexError:
                break
            self._lost += entry.number - self._next
            self._next = entry.number + 1
            if entry.attempt != self._attempt:
                self._attempt = entry.attempt
                entry.metrics[f"{PREFIX}attempt"] = float(entry.attempt)
            self._batch.append(entry)
        return bool(self._batch)

    def _write_batch(self) -> None:
        try:
            self._tracker.write(self._batch)
        except Refused:
            # One entry must not cost the others.
            for entry in self._batch:
                self._write_one(entry)
        self._step = self._batch[-1].step
        self._batch = []

    def _write_one(self, entry: Entry) -> None:
        if not self._tell(lambda: self._tracker.write([entry])):
            self._lost += 1

    def _write_history(self, is_last: bool) -> None:
        """Write the incidents that the agent has told since."""
        if not is_last and monotonic() - self._asked_at < HISTORY_SECONDS:
            return
        self._asked_at = monotonic()
        told = self._ask_last() if is_last else self._ask()
        found: Story | None = None if told is None else story(told)
        if found is None or found.version == self._version:
            return
        tags, entry = found.tags, Entry(-1, self._step, time(), self._attempt, dict(found.metrics))
        self._tell(lambda: self._tracker.describe(tags))
        self._tell(lambda: self._tracker.write([entry]))
        self._version = found.version

    def _ask_last(self) -> Mapping[str, Any] | None:
        """Ask until the agent knows the incident that led to this attempt, or it takes too long."""
        until, pause = monotonic() + LAST_SECONDS, threading.Event()
        while True:
            told = self._ask()
            if told is None or not is_behind(told, attempt_now()) or monotonic() > until:
                return told
            pause.wait(LAST_SECONDS / 20)

    def _write_losses(self, is_last: bool) -> None:
        tags = {f"{PREFIX}steps_not_written": str(self._lost)}
        is_new = self._lost > self._reported
        if is_new and (self._tell(lambda: self._tracker.describe(tags)) or is_last):
            log.warning("metrics lost: the tracker was away, slow, or refused", count=self._lost)
            self._reported = self._lost

    def _tell(self, request: Callable[[], None]) -> bool:
        """Send a request; False: the tracker refuses it, now and later."""
        try:
            request()
        except Refused as error:
            self._warn(f"the tracker refuses them: {shown(error)}")
            return False
        return True

    def _warn(self, what: str) -> None:
        if what not in self._warned and len(self._warned) < 16:
            self._warned.add(what)
            log.warning("metrics or tags left out", error=what)


_runs: dict[tuple[str, str], Run] = {}
"""Runs of this process, by module and name."""


def _end_all() -> None:
    has_failed = hasattr(sys, "last_value")
    for run in [*_runs.values()]:
        run.finish(has_failed=has_failed)


def _forget() -> None:
    for run in _runs.values():
        run.forget()
    _runs.clear()


atexit.register(_end_all)
os.register_at_fork(after_in_child=_forget)
