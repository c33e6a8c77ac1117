"""Follows a job to its end: prints its output and incidents on the screen, stops it on Ctrl-C."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self, TextIO

from unbroken.agent.shell import NOT_TAKEN
from unbroken.cli.connection import JOBS, Cluster, Object
from unbroken.cli.job.agents import reports
from unbroken.cli.job.logs import LogReaders, split
from unbroken.cli.job.views import (
    ENDED,
    advised,
    condition,
    exit_code,
    first_line,
    incident_lines,
    pod_summary,
    restarts_text,
    state,
    wait_lines,
)
from unbroken.cli.terminal import coloured, raw, visible, worker_line
from unbroken.cli.watch import WatchedJob
from unbroken.core.job.obstacles import split_wait
from unbroken.core.job.recovery.symptoms import BY_DETECTOR
from unbroken.core.logs.origins import DROPPED_LINES
from unbroken.errors import UnbrokenError, WorldError
from unbroken.kube.clock import monotonic, pause
from unbroken.spec.job.codec import lost_until
from unbroken.spec.job.incident import Incident, Remedy
from unbroken.spec.job_kinds import HYPERPOD_JOB
from unbroken.wire.agent import AgentReport

if TYPE_CHECKING:
    from rich.console import Console


class Screen(Protocol):
    """The display of a job that is followed."""

    is_live: bool
    """True if the screen shows the state."""

    def output(self, line: str, *, is_error: bool = False) -> None:
        """Print a line of the job's output; `is_error`: of its standard error."""

    def note(self, text: str) -> None:
        """Print a note of the command."""

    def state(self, lines: Sequence[str]) -> None:
        """Show the state of the job."""

    def __enter__(self) -> Self:
        """Start to use the screen."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """Release the screen."""


class PlainScreen:
    """Plain lines: the job's output on a stream, notes on standard error."""

    is_live = False

    def __init__(self, output: TextIO) -> None:
        self._output = output
        self._is_read = True

    def output(self, line: str, *, is_error: bool = False) -> None:
        """Print a line of the job's output; `is_error`: of its standard error."""
        if self._is_read or is_error:
            stream = sys.stderr if is_error else self._output
            try:
                print(worker_line(line, stream), file=stream, flush=True)
            except BrokenPipeError:
                self._is_read = False
                self.note("the reader of the output is gone; the job continues")

    def note(self, text: str) -> None:
        """Print a note of the command."""
        print(f"unbroken: {text}", file=sys.stderr, flush=True)

    def state(self, lines: Sequence[str]) -> None:
        """Ignore the state: plain lines cannot be updated."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return


class LiveScreen:
    """A terminal: the output scrolls above the state."""

    is_live = True

    def __init__(self, console: Console) -> None:
        from rich.live import Live

        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def output(self, line: str, *, is_error: bool = False) -> None:
        """Print a line of the job's output; the terminal shows both streams."""
        from rich.text import Text

        self._console.print(Text.from_ansi(coloured(line)), soft_wrap=True, highlight=False)

    def note(self, text: str) -> None:
        """Print a note of the command."""
        shown = f"unbroken: {visible(text)}"
        self._console.print(shown, style="bold yellow", markup=False, soft_wrap=True)

    def state(self, lines: Sequence[str]) -> None:
        """Show the state of the job: a summary and lines of details."""
        from rich.text import Text

        first, *rest = map(visible, lines)
        text = Text(first, style="bold", no_wrap=True, overflow="ellipsis")
        for line in rest:
            text.append(f"\n  {line}", style="dim not bold")
        self._live.update(text, refresh=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()


def is_one_place() -> bool:
    """True if standard output and standard error end at one file, pipe or terminal."""
    try:
        return os.path.sameopenfile(1, 2)
    except OSError:
        return True


def open_screen(*, is_data: bool) -> Screen:
    """The screen for standard output; with `is_data`, lines go to standard error."""
    if is_data:
        return PlainScreen(sys.stderr)
    if sys.stdout.isatty():
        from rich.console import Console

        return LiveScreen(Console(file=raw(sys.stdout)))
    return PlainScreen(sys.stdout)


ASK_SECONDS = 10.0
"""A second Ctrl-C within this time stops the job."""
LAST_SECONDS = 3.0
"""Time to wait for the last incident of a job that has ended."""
SHOWN_AFTER_SECONDS = 2.0
"""A fault that lasts longer is reported before its recovery."""
REFRESH_SECONDS = 1.0
INTERRUPTED, TERMINATED = 130, 143
DETECTED = frozenset(BY_DETECTOR.values())
"""Reasons of the events of detectors."""


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """The result of following a job."""

    exit_code: int
    state: str
    job: Object
    incidents: list[Incident]


class Follower:
    """Follows one job; `run` once."""

    def __init__(self, cluster: Cluster, job: Object, watched: WatchedJob, screen: Screen) -> None:
        self._cluster = cluster
        self._job = job
        self._name: str = job["metadata"]["name"]
        self._watched = watched
        self._screen = screen
        self._shown_state = ""
        self._faulted_at: float | None = None
        self._waiting: tuple[str, ...] = ()
        """The reasons why pods are pending; printed after SHOWN_AFTER_SECONDS."""
        self._waiting_at: float | None = None
        """Time since when these reasons hold; None after they were printed."""
        self._shown: set[int] = set()
        self._warned: set[tuple[str, str]] = set()
        self._agents: dict[str, AgentReport] = {}
        self._trouble = ""
        """The reason why the agents' state is out of date."""
        self._prompted_at: float | None = None
        self._stopped_by = 0
        """Exit code after a request to stop the job; 0: no request."""
        self._tasks = asyncio.TaskGroup()
        self._logs = [
            LogReaders(cluster, self._tasks, on_line, screen.note, stream)
            for stream, on_line in self._outputs().items()
        ]
        """Logs of each container that has had rank 0."""

    async def run(self) -> JobOutcome:
        """Return when the job has ended, was stopped, or is gone."""
        async with AsyncExitStack() as stack:
            stack.enter_context(self._signals())
            await stack.enter_async_context(self._tasks)
            if self._screen.is_live:
                refreshing = self._tasks.create_task(self._refresh())
                stack.callback(refreshing.cancel)
            while not self._has_ended():
                self._report()
                await self._change()
            await self._last_incidents()
            self._report()
            for logs in self._logs:
                await logs.finish()
            if self._stopped_by and state(self._job) == "Suspended":
                self._screen.note(f"to continue it: unbroken resume {self._name}")
        return self._outcome()

    # --- changes

    def _has_ended(self) -> bool:
        if not self._watched.has_job(self._job["metadata"]["uid"]):
            return True
        self._job = self._watched.job() or self._job
        now = state(self._job)
        is_stopped = now == "Suspended" and not self._watched.pods()
        return now in ENDED or (bool(self._stopped_by) and is_stopped)

    def _report(self) -> None:
        for incident in self._watched.incidents():
            if incident.number not in self._shown and lost_until(incident) is not None:
                self._shown.add(incident.number)
                for line in incident_lines(incident):
                    self._screen.note(line)
        self._report_warnings()
        self._report_state()
        self._report_waiting()
        self._read_rank_zero()
        self._show()

    def _report_warnings(self) -> None:
        """Print each warning of a detector once."""
        for event in self._watched.warnings():
            shown = (str(event.get("reason")), first_line(str(event.get("message"))))
            if shown[0] in DETECTED and shown not in self._warned:
                self._warned.add(shown)
                self._screen.note(f"warning: {shown[0]}: {shown[1]}")

    def _report_state(self) -> None:
        """Print a new state.  A short fault is left to the line of its incident."""
        now = state(self._job)
        if now == "Faulted":
            self._faulted_at = self._faulted_at or monotonic()
            if monotonic() - self._faulted_at < SHOWN_AFTER_SECONDS:
                return
        elif now == "Running" and self._faulted_at is not None:
            self._shown_state, self._faulted_at = now, None
        if now not in (self._shown_state, "Pending") and not _is_released(self._job):
            self._shown_state = now
            text = first_line(split_wait(condition(self._job).get("message", ""))[0])
            shown = [
                incident for incident in self._watched.incidents() if incident.number in self._shown
            ]
            if now == "Created" or (now == "Failed" and shown and shown[-1].remedy is Remedy.FAIL):
                text = ""  # says no more, or the line of the incident has the reason
            self._screen.note(f"{self._name}: {now}" + (f" ({text})" if text else ""))
            if now == "Failed" and shown:
                self._screen.note(f"for details: unbroken explain {self._name}")

    def _report_waiting(self) -> None:
        """Print the reasons why pods are pending, after SHOWN_AFTER_SECONDS."""
        waiting = tuple(wait_lines(self._job, map(pod_summary, self._watched.pods())))
        if waiting != self._waiting:
            self._waiting, self._waiting_at = waiting, monotonic() if waiting else None
        if self._waiting_at is None or monotonic() - self._waiting_at < SHOWN_AFTER_SECONDS:
            return
        self._waiting_at = None
        for line in waiting:
            self._screen.note(f"  {line}" if line.startswith("| ") else f"waits: {line}")
        if self._cluster.place.paths is not None and (advice := advised(waiting)):
            self._screen.note(advice)

    async def _change(self) -> None:
        """Return when an object has changed, or a fault or wait has lasted SHOWN_AFTER_SECONDS."""
        is_news = self._faulted_at is not None and self._shown_state != "Faulted"
        is_news |= self._waiting_at is not None
        try:
            async with asyncio.timeout(SHOWN_AFTER_SECONDS if is_news else None):
                await self._watched.change()
        except TimeoutError:
            return

    def _read_rank_zero(self) -> None:
        address = (self._job.get("status") or {}).get("masterAddr")
        pods = self._watched.pods() if address else []
        first = [pod for pod in pods if (pod.get("status") or {}).get("podIP") == address]
        for logs in self._logs:
            logs.read(first)

    def _outputs(self) -> dict[str, Callable[[Object, str], Awaitable[None]]]:
        """The streams of containers to follow, and who takes their lines.

        Where this command's own streams end at one place, both are read as one, in order. Clusters
        before Kubernetes 1.32 have no streams.
        """
        if self._cluster.place.paths is None or self._screen.is_live or is_one_place():
            return {"": self._output}
        return {"Stdout": self._output, "Stderr": self._error}

    async def _error(self, _: Object, line: str) -> None:
        await self._output(_, line, is_error=True)

    async def _output(self, _: Object, line: str, *, is_error: bool = False) -> None:
        local_rank, text = split(line)
        if local_rank == 0:
            self._screen.output(text, is_error=is_error)
        elif local_rank is None and (NOT_TAKEN in text or DROPPED_LINES.match(text)):
            where = " (of both streams, while standard error was read)" if is_error else ""
            shown = text.removeprefix("unbrokenrun: ").removeprefix("unbroken: ")
            self._screen.note(shown + where)

    async def _last_incidents(self) -> None:
        """Wait for incidents that are written after the job's last status."""

        def are_written() -> bool:
            incidents = self._watched.incidents()
            has_failed = state(self._job) == "Failed"
            is_there = not has_failed or any(
                incident.remedy is Remedy.FAIL for incident in incidents
            )
            return is_there and all(lost_until(incident) is not None for incident in incidents)

        try:
            async with asyncio.timeout(LAST_SECONDS):
                await self._watched.until(are_written)
        except TimeoutError:
            return  # a job may fail without an incident, as at a deadline

    def _outcome(self) -> JobOutcome:
        incidents, now = self._watched.incidents(), state(self._job)
        is_gone = not self._watched.has_job(self._job["metadata"]["uid"])
        if is_gone and not self._stopped_by:
            raise WorldError(f"job {self._name} was deleted")
        code = exit_code(self._job, incidents) if now in ENDED else self._stopped_by
        return JobOutcome(code, now, self._job, incidents)

    # --- the state below the output

    async def _refresh(self) -> None:
        while True:
            try:
                pods = self._watched.pods()
                self._agents = await reports(self._cluster, pods)
                self._trouble = ""
            except UnbrokenError as error:
                self._trouble = f"; {error}"
            self._show()
            await pause(REFRESH_SECONDS)

    def _show(self) -> None:
        if self._screen.is_live:
            head = f"{self._name}: {state(self._job)}, {restarts_text(self._job)}{self._trouble}"
            self._screen.state([head, *map(self._pod_line, self._watched.pods())])

    def _pod_line(self, pod: Object) -> str:
        result: dict[str, Any] = pod_summary(pod)
        report = self._agents.get(result["name"])
        ranks = " ".join(f"{w.rank}:{w.state}" for w in report.workers) if report else ""
        agent = report.state.value if report else "-"
        phase = f"{result['phase']} {result['reason']}".strip()
        return (
            f"{result['name']}  {result['node'] or '-'}  {phase}  agent {agent}  {ranks}".rstrip()
        )

    # --- being interrupted

    @contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._on_interrupt)
        loop.add_signal_handler(signal.SIGTERM, self._stop, TERMINATED)
        try:
            yield
        finally:
            loop.remove_signal_handler(signal.SIGINT)
            loop.remove_signal_handler(signal.SIGTERM)

    def _on_interrupt(self) -> None:
        now = monotonic()
        if self._stopped_by:
            raise KeyboardInterrupt
        is_sure = self._prompted_at is not None and now - self._prompted_at < ASK_SECONDS
        # Without a terminal there is no prompt.
        if is_sure or not self._screen.is_live:
            self._stop(INTERRUPTED)
            return
        self._prompted_at = now
        self._screen.note(f"stop the job? Press Ctrl-C again within {ASK_SECONDS:.0f} s to stop it")

    def _stop(self, code: int) -> None:
        if not self._stopped_by:
            self._stopped_by = code
            self._screen.note(f"stopping {self._name}; Ctrl-C exits at once")
            self._tasks.create_task(self._suspend())

    async def _suspend(self) -> None:
        patch = HYPERPOD_JOB.suspension(True)
        try:
            await self._cluster.patch(JOBS, self._name, patch)
        except UnbrokenError as error:
            self._screen.note(f"{self._name} could not be stopped: {error}")
            self._stopped_by = 0
        self._watched.wake()


def _is_released(job: Object) -> bool:
    """True for a job that was created suspended and may start: its status is out of date."""
    is_suspended = (job["spec"].get("runPolicy") or {}).get("suspend")
    return condition(job).get("reason") == "JobInitiallySuspended" and not is_suspended
