"""`torchrun --rdzv-backend=unbroken`: plain torchrun takes its ranks from the operator.

Inside torchrun's process a thread serves the agent's API on AGENT_HOST:AGENT_PORT. A rendezvous
waits for `/start`. torchrun keeps its workers, so this is only as quick and as exact as its hooks:

- A stop makes torchrun restart its workers at its next look (`--monitor-interval`, 0.1 s): SIGTERM,
  then SIGKILL after torchrun's own time. A graceful stop is a stop.
- A failed worker is reported at once, and restarted in its pod only while `--max-restarts` lasts.
  Without restarts left, torchrun ends and its container starts again.
- Its workers have no lease: a torchrun that is frozen or slow would not end them in time.
- After success torchrun waits until the job releases it.
- Workers inherit JOB_RESTART_COUNT; TORCHELASTIC_RESTART_COUNT counts torchrun's own restarts.

This file is loaded by every torchrun in the environment, so it imports little at first.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unbroken.agent.options import LaunchOptions
    from unbroken.core.agent.events import AgentEvent, ProgramStage
    from unbroken.core.agent.faults import WorkerEnd
    from unbroken.wire.agent import StartCommand

BACKEND = "unbroken"
LOOK_SECONDS = 0.02
"""Seconds between two looks for workers that torchrun is about to start; it does not report the
start."""


def creator() -> Callable[[Any], Rendezvous]:
    """Create the rendezvous, for the entry point group `torchrun.handlers`."""
    return Rendezvous


class Rendezvous:
    """Implements torch's `RendezvousHandler` by its methods: the base class would require an import
    of torch."""

    use_agent_store = False

    def __init__(self, parameters: Any) -> None:
        from unbroken.agent.main import KEY_VARIABLE, read_key

        self._run_id = str(parameters.run_id)
        self._torch = importlib.import_module("torch.distributed.elastic.rendezvous.api")
        key = read_key(os.environ)
        # Variables set here are inherited by the workers.
        os.environ.pop(KEY_VARIABLE, None)
        # Ranks follow from node ranks, without a store between the nodes.
        os.environ["TORCH_ELASTIC_WORKER_IDENTICAL"] = "1"
        lineage = importlib.import_module("unbroken.agent.workers.lineage")
        lineage.adopt_orphans()
        self._workers = TorchWorkers()
        self._thread = threading.Thread(target=self._serve, args=(key,), daemon=True)
        self._thread.start()

    def _serve(self, key: bytes | None) -> None:
        import asyncio

        from unbroken.agent.driver import Driver
        from unbroken.errors import UnbrokenError

        async def main() -> None:
            driver = Driver(torchrun_options(), key, self._workers.join, has_keeper=False)
            await driver.run(None)

        try:
            asyncio.run(main())
        except UnbrokenError as error:
            self._workers.starts.put(str(error))
        else:
            self._workers.starts.put("")

    def get_backend(self) -> str:
        """Return the name that torchrun was given."""
        return BACKEND

    def get_run_id(self) -> str:
        """Return `--rdzv-id`."""
        return self._run_id

    def next_rendezvous(self) -> Any:
        """Wait for the operator's start; torchrun has ended its workers when it asks."""
        result = self._workers.next_start()
        if isinstance(result, str):
            # Not RendezvousGracefulExitError: torch 2.13's launcher fails on its result.
            sys.exit(f"unbroken: {result}" if result else 0)
        os.environ["JOB_RESTART_COUNT"] = str(result.attempt)
        return self._torch.RendezvousInfo(
            Barrier(self._workers),
            result.rank,
            result.nnodes,
            self._torch.RendezvousStoreInfo(result.master_addr, result.master_port),
        )

    def num_nodes_waiting(self) -> int:
        """Return 1 to make torchrun restart its workers, which is how they are stopped."""
        return int(self._workers.is_stop_wanted)

    def is_closed(self) -> bool:
        """Return False: the operator decides."""
        return False

    def set_closed(self) -> None:
        """Do nothing: one node's torchrun does not end the job."""

    def shutdown(self) -> bool:
        """Do nothing: the thread ends with the process."""
        return True


class Barrier:
    """The store as torchrun uses it: only to wait for the other nodes after success."""

    def __init__(self, workers: TorchWorkers) -> None:
        self._workers = workers
        self._counts: dict[str, int] = {}
        self.timeout: object = None

    def set_timeout(self, timeout: object) -> None:
        """Ignore the timeout: the operator ends the wait."""

    def add(self, key: str, amount: int) -> int:
        """Count, for this node alone."""
        self._counts[key] = self._counts.get(key, 0) + amount
        return self._counts[key]

    def set(self, key: str, value: object) -> None:
        """Do nothing: the value is never read."""

    def get(self, key: str) -> bytes:
        """Wait, as `wait` does."""
        self._workers.wait_for_release()
        return b""

    def wait(self, keys: object, timeout: object = None) -> None:
        """Return when the job no longer needs this node."""
        self._workers.wait_for_release()


@dataclass(slots=True, eq=False)
class _Seen:
    """A worker of torchrun's that was found."""

    local_rank: int
    pidfd: int
    directory: str


@dataclass(slots=True, eq=False)
class TorchWorkers:
    """The owner of processes for the driver; methods that torchrun's main thread calls are marked
    so."""

    note: str = "under torchrun"
    keeps: bool = False
    starts: queue.SimpleQueue[StartCommand | str] = field(default_factory=queue.SimpleQueue)
    """Commands to start; a text ends torchrun, with an error unless it is empty."""
    is_stop_wanted: bool = False
    _options: Any = None
    _feed: Any = None
    _loop: Any = None
    _attempt: int | None = None
    """Running attempt; None: torchrun waits for a start."""
    _seen: dict[int, _Seen] = field(default_factory=dict)
    _released: threading.Event = field(default_factory=threading.Event)
    _is_done: bool = False
    """True if torchrun waits after success."""
    _given: int | None = None
    """The newest attempt that torchrun was given; only its own thread reads and writes it."""
    _found: int | None = None
    """The newest attempt whose workers were found."""

    def join(
        self, options: LaunchOptions, feed: Callable[[AgentEvent], None], clock: Callable[[], float]
    ) -> TorchWorkers:
        """Attach to the driver."""
        import asyncio

        self._options, self._feed = options, feed
        self._loop = asyncio.get_running_loop()
        return self

    def start(self, imports_changed: Callable[[], None]) -> None:
        """Do nothing: torchrun has the processes already."""

    async def warm_up(self) -> None:
        """Return at once: no worker starts warm."""

    def imports(self) -> None:
        """Return None: torchrun starts every worker cold."""

    def warm(self) -> None:
        """Return None: no worker starts warm."""

    def import_beforehand(self, names: Sequence[str]) -> None:
        """Do nothing: no worker starts warm."""

    def close(self) -> None:
        """Do nothing: torchrun writes the output."""

    def next_start(self) -> StartCommand | str:
        """Wait for the next start, in torchrun's thread; nothing of the last attempt is alive.

        At the first call there was no attempt, but a start may be waiting already. The operator may
        find the agent ready before torchrun comes here.
        """
        if self._given is not None:
            self._call_in_loop(self._stopped)
        start = self.starts.get()
        self._given = None if isinstance(start, str) else start.attempt
        return start

    def wait_for_release(self) -> None:
        """Wait for the release, in torchrun's thread; every worker has succeeded."""
        self._call_in_loop(self._succeeded)
        self._released.wait()

    def spawn(self, stage: ProgramStage, command: StartCommand, kept: tuple[int, ...] = ()) -> None:
        """Let the rendezvous return; workers are found when torchrun has started them."""
        if command.log_rules:
            text = "unbroken: torchrun reads the output, so log rules are not evaluated"
            print(f"{text}; hyperpodrun evaluates them", file=sys.stderr, flush=True)  # noqa: T201
        if any(mode not in ("off", "shadow") for mode in command.detectors.values()):
            text = "unbroken: torchrun has the workers, so no detector watches them"
            print(f"{text}; hyperpodrun's are watched", file=sys.stderr, flush=True)  # noqa: T201
        self._attempt = command.attempt
        self.starts.put(command)
        self._look(command.attempt)

    def last_output(self, pid: int) -> tuple[float | None, str]:
        """Return None: torchrun reads the output."""
        return None, ""

    def signal(self, number: int) -> None:
        """Stop the workers: torchrun has only one way to end them."""
        self.is_stop_wanted = True

    def local_ranks(self) -> Mapping[int, int]:
        """Return none: torchrun restarts processes, so none is kept."""
        return {}

    def kill_all(self, kept: tuple[int, ...] = ()) -> None:
        """Have torchrun end its workers; it answers with its next rendezvous."""
        from unbroken.core.agent.events import NothingLives

        if self._is_done:
            self._released.set()
        elif self._attempt is None:
            self._feed(NothingLives())
        else:
            self.is_stop_wanted = True

    def _call_in_loop(self, callback: Callable[[], None]) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(callback)

    def _look(self, attempt: int) -> None:
        """Find the workers of an attempt by the environment that torchrun has given them."""
        from unbroken.core.agent.events import ProgramStage, StageStarted

        if self._attempt != attempt or self._seen:
            return
        result = dict(filter(None, map(_worker, _children())))
        if len(result) < self._options.nproc:
            self._loop.call_later(LOOK_SECONDS, self._look, attempt)
            return
        pids = []
        for local_rank, (pid, directory) in sorted(result.items()):
            seen = _Seen(local_rank, os.pidfd_open(pid), directory)
            self._seen[pid] = seen
            self._loop.add_reader(seen.pidfd, self._ended, attempt, pid)
            pids.append(pid)
        self._found = attempt
        self._feed(StageStarted(attempt, ProgramStage.TRAIN, tuple(pids)))

    def _ended(self, attempt: int, pid: int, end: WorkerEnd | None = None) -> None:
        from unbroken.core.agent.events import ProgramStage, WorkerEnded
        from unbroken.core.agent.faults import SIGKILL, WorkerEnd

        seen = self._seen.pop(pid)
        self._loop.remove_reader(seen.pidfd)
        worker_end = end or _end(pid, seen)
        os.close(seen.pidfd)
        if self.is_stop_wanted and worker_end.exit_code != 0:
            # torchrun has already ended it.
            worker_end = WorkerEnd(signal=SIGKILL)
        self._feed(WorkerEnded(attempt, ProgramStage.TRAIN, seen.local_rank, worker_end))

    def _finish(self, end: WorkerEnd | None = None) -> int | None:
        """Report the end of each worker of the attempt that is not reported yet."""
        for pid in list(self._seen):
            assert self._attempt is not None
            self._ended(self._attempt, pid, end)
        return self._attempt

    def _stopped(self) -> None:
        """Handle a rendezvous: torchrun has no workers and waits for its next order."""
        from unbroken.core.agent.events import NothingLives, ProgramStage, SpawnFailed

        attempt = self._finish()
        _end_orphans()
        self._attempt, was_wanted, self.is_stop_wanted = None, self.is_stop_wanted, False
        if attempt is not None and not was_wanted:
            text = "a worker failed before it was seen; the log of torchrun says how"
            self._feed(SpawnFailed(attempt, ProgramStage.TRAIN, 0, text))
        self._feed(NothingLives())

    def _succeeded(self) -> None:
        from unbroken.core.agent.events import ProgramStage, StageStarted, WorkerEnded
        from unbroken.core.agent.faults import WorkerEnd

        self._is_done = True
        attempt = self._finish(WorkerEnd(exit_code=0))
        if attempt is not None and attempt != self._found:
            # They were over before this thread had looked; without a report the job would never
            # end.
            self._found, nproc = attempt, self._options.nproc
            self._feed(StageStarted(attempt, ProgramStage.TRAIN, (0,) * nproc))
            for local_rank in range(nproc):
                end = WorkerEnd(exit_code=0)
                self._feed(WorkerEnded(attempt, ProgramStage.TRAIN, local_rank, end))
        if self.is_stop_wanted:
            self._released.set()


def _children() -> list[int]:
    from .workers import lineage

    return lineage.children()


def _worker(pid: int) -> tuple[int, tuple[int, str]] | None:
    """Return the local rank, number and directory of a process that is a worker."""
    from unbroken.foreign_numbers import whole_number

    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            pairs = (entry.partition(b"=") for entry in file.read().split(b"\0"))
            result = {name: value.decode(errors="replace") for name, _, value in pairs}
    except OSError:
        return None
    local_rank = whole_number(result.get(b"LOCAL_RANK", ""))
    if local_rank is None:
        return None
    return local_rank, (pid, os.path.dirname(result.get(b"TORCHELASTIC_ERROR_FILE", "")))


def _end(pid: int, seen: _Seen) -> WorkerEnd:
    """Return how a worker ended; torchrun reaps it."""
    from unbroken.core.agent.faults import WorkerEnd

    from .workers import facts

    flags = os.WEXITED | os.WNOWAIT | os.WNOHANG
    try:
        result = os.waitid(os.P_PIDFD, seen.pidfd, flags)
    except ChildProcessError:
        code = _reaped(pid)
    else:
        code = None if result is None else _exit_code(result.si_code, result.si_status)
    if code is None:
        return WorkerEnd()
    if code >= 0:
        return WorkerEnd(exit_code=code, error_file=facts.error_file(seen.directory))
    return WorkerEnd(signal=-code)


def _exit_code(how: int, status: int) -> int:
    """Return the exit code as `subprocess` counts it: negative for a signal."""
    return status if how == os.CLD_EXITED else -status


def _reaped(pid: int) -> int | None:
    """Return the exit code of a worker that torchrun has reaped, negative for a signal; None: it
    keeps none.

    Only its `Popen` has the code then, which nothing of torch's leads to from a rendezvous.
    """
    import gc
    import subprocess

    for found in gc.get_objects():
        if type(found) is subprocess.Popen and found.pid == pid:
            with contextlib.suppress(subprocess.TimeoutExpired):
                # The thread that reaps it may not have noted the code yet.
                return found.wait(timeout=1.0)
    return None


def _end_orphans() -> None:
    """End processes that workers have left behind: they are children of this process by now."""
    while result := [pid for pid in _children() if _worker(pid) is not None]:
        for pid in result:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def torchrun_options() -> LaunchOptions:
    """Return the agent's options from torchrun's command line and the pod's environment. Raises
    SpecError.

    torchrun itself carries out its options, so this reads only the sizes.
    """
    from unbroken.agent.options import WORKERS_MAX, LaunchOptions, Script, torchrun_sizes
    from unbroken.errors import SpecError
    from unbroken.foreign_numbers import PORT_MAX, whole_number

    try:
        nproc, nnodes = torchrun_sizes(sys.argv[1:], os.environ)
    except SpecError as error:
        given = whole_number(os.environ.get("NPROC_PER_NODE", ""), 1, WORKERS_MAX)
        nproc, nnodes = given or 1, 1
        print(  # noqa: T201
            f"unbroken: cannot read torchrun's command line ({error}); "
            f"takes the number of workers per node from NPROC_PER_NODE: {nproc}",
            file=sys.stderr,
            flush=True,
        )
    host = os.environ.get("AGENT_HOST", "0.0.0.0")
    port = whole_number(os.environ.get("AGENT_PORT", ""), 0, PORT_MAX)
    return LaunchOptions(Script(""), nproc, nnodes, host, 8080 if port is None else port)
