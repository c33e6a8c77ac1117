"""The simulated worker processes: they train together, fail, end, and are killed.

Processes of one attempt with the same master meet in one store. Once all have met they work until
the job's work is done. Their work is kept when one is lost (a checkpoint of every moment). Peers of
a lost process fail soon, or hang until their watchdog ends them; restartable ones wait for the
agent's order first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from unbroken.core.agent.faults import SIGKILL, WorkerEnd
from unbroken.core.job.events import PodUid
from unbroken.sim.schedule import Schedule
from unbroken.wire.observation import Alarm

SUCCESS = WorkerEnd(0)
KILLED = WorkerEnd(None, SIGKILL)
WENT_ON = WorkerEnd(None)
"""No end: the process trains in a later attempt, as another `Worker`."""
TOLD_SECONDS = 5.0
"""Seconds for the agent to report a lost peer (worker/restart/restartable.py)."""


def raised(error: str) -> WorkerEnd:
    """The end of a script by an exception."""
    frame = '  File "train.py", line 7, in step'
    return WorkerEnd(1, None, ("Traceback (most recent call last):", frame, error))


PEER_LOST = raised("torch.distributed.DistBackendError: gloo: Connection closed by peer")
PORT_TAKEN = raised("torch.distributed.DistNetworkError: EADDRINUSE, address already in use")
CONFUSED = raised("RuntimeError: got nothing")
"""Error of a peer that lost another, if the library hides the reason."""


@dataclass(eq=False, slots=True)
class Worker:
    """One worker process."""

    pid: int
    pod: PodUid
    agent: str
    attempt: int
    rank: int
    node_rank: int
    world_size: int
    master: tuple[str, int]
    started_at: float
    on_exit: Callable[[Worker, WorkerEnd], None]
    exit: WorkerEnd | None = None
    """None: it lives."""
    ended_at: float = 0.0
    allowed_seconds: float | None = None
    """Silence that its watchdog has learned to be usual; None: it is still learning."""
    alarms: dict[str, Alarm] = field(default_factory=dict)
    late_since: float | None = None
    """Last sign of life, as its watchdog sees it, while it is late."""
    is_stalled: bool = False
    """True if it makes no more progress, and never will."""
    is_stopped: bool = False
    is_member: bool = False
    """True if it can leave its training on request."""
    is_at_barrier: bool = False
    """True if it has left it, and waits."""
    is_lease_over: bool = False
    """True if it was sent SIGKILL because its lease has run out: whatever still holds it in the
    kernel, its program does nothing any more."""


class Watcher(Protocol):
    """Receives the true events."""

    def worker_started(self, worker: Worker) -> None:
        """A process was born; it is already among the living."""

    def worker_ended(self, worker: Worker) -> None:
        """A process ended; it is no longer among the living."""

    def progressed(self, worker: Worker) -> None:
        """Its attempt has something to show."""


@dataclass(eq=False, slots=True)
class Gathering:
    """Processes that meet at one master."""

    members: dict[int, Worker] = field(default_factory=dict)
    trains_since: float | None = None
    stands_at: int | None = None
    """The step at which it broke."""
    is_broken: bool = False
    is_done: bool = False
    is_parted: bool = False
    """Its workers do not reach each other, and wait."""
    is_quiet: bool = False
    """Its workers wait for the one that is at work."""
    at_work: int = -1
    """Rank that works while the others wait, and shows nothing of it."""
    quiet: int = 0
    """Number of times that it fell silent or wrote again."""


@dataclass(frozen=True, slots=True)
class Habits:
    """Behaviour of a world's workers."""

    work_seconds: float = 30.0
    peers_hang: bool = False
    watchdog_seconds: float = 20.0
    finish_seconds: float = 0.5
    """Seconds in which the workers end, once the work is done."""
    is_doomed: bool = False
    """The script fails soon in every attempt: a bug of its user."""
    are_confused: bool = False
    """Errors of peers do not show that they lost another one."""


class Training:
    """All worker processes of the job; the only place where they are born and die."""

    def __init__(self, schedule: Schedule, habits: Habits, watcher: Watcher) -> None:
        self._schedule = schedule
        self._habits = habits
        self._watcher = watcher
        self._work_left = habits.work_seconds
        self._gatherings: dict[tuple[int, tuple[str, int]], Gathering] = {}
        self._pids = 0
        self.live: dict[int, Worker] = {}
        self.ended: list[Worker] = []
        self.is_work_done = False
        self.is_port_taken = False
        """The next process of rank 0 cannot open its store."""
        self.finishing: Callable[[], None] = lambda: None
        """Called when the work is done, before any process ends."""
        self.noted: Callable[[str, Worker], None] = lambda kind, worker: None
        self.begun: Callable[[Gathering], None] = lambda place: None
        self.meets: Callable[[Gathering], bool] = lambda place: True
        """Called when all are there: returns whether they reach each other."""
        self.steps = 0
        """Made in earlier attempts, one in each second."""
        self.reached: dict[int, int] = {}
        """Steps that were made by the end of each attempt."""

    def place(self, worker: Worker) -> Gathering:
        """Return the gathering of a worker's attempt."""
        return self._gatherings[worker.attempt, worker.master]

    def trains(self, worker: Worker) -> bool:
        """Return whether its attempt makes progress."""
        place = self.place(worker)
        return place.trains_since is not None and not place.is_broken and not place.is_done

    def step(self, worker: Worker) -> int | None:
        """The newest step of its attempt; None: it makes none yet."""
        place = self.place(worker)
        if place.trains_since is None:
            return None
        if place.stands_at is not None:
            return place.stands_at
        return self.steps + int(self._schedule.now - place.trains_since)

    def new_pid(self) -> int:
        """A process id, used once in the life of a world."""
        self._pids += 1
        return self._pids

    def start(self, worker: Worker) -> None:
        """Let a process live, and train once all others are there."""
        self.live[worker.pid] = worker
        self._watcher.worker_started(worker)
        place = self._enter(worker)
        if self.is_port_taken and worker.rank == 0:
            self.is_port_taken = False
            self.noted("port_taken", worker)
            self._schedule.after(0.1, self._fail, worker, PORT_TAKEN)
        if place.is_broken:
            self._lose(place, worker)
        elif len(place.members) == worker.world_size and not self.meets(place):
            self.part(place)
        elif len(place.members) == worker.world_size:
            place.trains_since = self._schedule.now
            self._watcher.progressed(worker)
            self.begun(place)
            if not self._habits.is_doomed:
                self._schedule.after(self._work_left, self._finish, place)
            else:
                self._schedule.after(self._schedule.between(0.5, 3.0), self._doom, place)

    def _enter(self, worker: Worker) -> Gathering:
        """Join the workers that meet at this master.

        If they broke and have all ended, their store is gone too, and the worker is the first of a
        new gathering.
        """
        key = worker.attempt, worker.master
        place = self._gatherings.setdefault(key, Gathering())
        others = (other for other in self.live.values() if other is not worker)
        if place.is_broken and all((other.attempt, other.master) != key for other in others):
            place = self._gatherings[key] = Gathering()
            seconds = self._habits.watchdog_seconds * self._schedule.between(0.9, 1.1)
            self._schedule.after(seconds, self._give_up, place)
        place.members[worker.rank] = worker
        return place

    def _give_up(self, place: Gathering) -> None:
        """End workers whose peers have not come in time."""
        for worker in list(place.members.values()):
            if place.trains_since is None:
                self._fail(worker, PEER_LOST)

    def end(self, worker: Worker, how: WorkerEnd) -> None:
        """End a process, for any reason; its peers notice unless they caused it."""
        if worker.exit is not None:
            return
        worker.exit = how
        worker.ended_at = self._schedule.now
        del self.live[worker.pid]
        self.ended.append(worker)
        self._watcher.worker_ended(worker)
        self._break(self._gatherings[worker.attempt, worker.master])
        worker.on_exit(worker, how)

    def _fail(self, worker: Worker, how: WorkerEnd) -> None:
        """Its training ends it, unless it has left that."""
        if not worker.is_at_barrier:
            self.end(worker, how)

    def wrote(self, worker: Worker) -> None:
        """It has written something."""
        self._watcher.progressed(worker)

    def arrive(self, worker: Worker) -> None:
        """It leaves its training, and waits at the barrier."""
        worker.is_at_barrier = True
        self._break(self.place(worker))

    def restart_in_place(self, worker: Worker, later: Worker) -> None:
        """Let the process leave the barrier, as a worker of a later attempt."""
        worker.exit = WENT_ON
        del self.live[worker.pid]
        self.start(later)

    def exit_early(self, worker: Worker) -> None:
        """End with 0 before the work is done."""
        self.end(worker, SUCCESS)

    def hang(self, worker: Worker) -> bool:
        """Make no more progress, which the watchdogs of its peers notice; False: none would."""
        place = self._gatherings[worker.attempt, worker.master]
        if place.trains_since is None or place.is_broken or place.is_done:
            return False
        if worker.world_size == 1:
            return False
        del place.members[worker.rank]
        self._break(place)
        # Its own watchdog ends it last of all, should its peers no longer be there to complain.
        self._schedule.after(self._habits.watchdog_seconds * 1.2, self._fail, worker, PEER_LOST)
        return True

    def stall(self, worker: Worker) -> None:
        """Make no more progress: the others wait, until their own timeouts end them."""
        place, seconds = self.place(worker), self._habits.watchdog_seconds
        worker.is_stalled = True
        self._keep(place)
        for peer in place.members.values():
            if peer is not worker and peer.exit is None:
                after = seconds * self._schedule.between(0.9, 1.1)
                self._schedule.after(after, self._fail, peer, PEER_LOST)
        self._schedule.after(seconds * 1.2, self._fail, worker, PEER_LOST)

    def part(self, place: Gathering) -> None:
        """Let nothing pass between the workers: all wait, until their own timeouts end them."""
        self._keep(place)
        place.is_parted = True
        for worker in place.members.values():
            seconds = self._habits.watchdog_seconds * self._schedule.between(0.9, 1.1)
            self._schedule.after(seconds, self._fail, worker, PEER_LOST)

    def pause(self, worker: Worker) -> None:
        """Do nothing, as the machine does not."""
        place = self.place(worker)
        if not (place.is_broken or place.is_done):
            self.stall(worker)

    def _keep(self, place: Gathering) -> None:
        """Nothing is done from now on; what was done is kept."""
        place.is_broken = True
        if place.trains_since is not None:
            spent = self._schedule.now - place.trains_since
            self.steps += int(spent)
            self._work_left = max(1.0, self._work_left - spent)
        place.stands_at = self.steps
        self.reached |= {member.attempt: self.steps for member in place.members.values()}

    def _break(self, place: Gathering) -> None:
        if place.is_broken or place.is_done:
            return
        self._keep(place)
        for peer in place.members.values():
            if peer.exit is None:
                self._lose(place, peer)

    def _lose(self, place: Gathering, peer: Worker) -> None:
        """A living process has lost a peer."""
        habits, schedule = self._habits, self._schedule
        if habits.peers_hang or place.trains_since is None:
            seconds = habits.watchdog_seconds * schedule.between(0.9, 1.1)
        else:
            seconds = schedule.between(0.001, schedule.random.choice([0.02, 0.2, 2.0]))
        if peer.is_member:
            seconds += TOLD_SECONDS
        schedule.after(seconds, self._fail, peer, CONFUSED if habits.are_confused else PEER_LOST)

    def _doom(self, place: Gathering) -> None:
        """One process runs into the bug."""
        living = [worker for worker in place.members.values() if worker.exit is None]
        if not place.is_broken and not place.is_done and living:
            worker = self._schedule.random.choice(living)
            self.noted("doomed", worker)
            self.end(worker, raised("ValueError: loss is nan"))

    def _finish(self, place: Gathering) -> None:
        if place.is_broken:
            return
        if place.is_quiet:
            # Silent steps of a worker are added.
            self._schedule.after(1.0, self._finish, place)
            return
        self.is_work_done = place.is_done = True
        for worker in place.members.values():
            self.reached[worker.attempt] = self.step(worker) or 0
            seconds = self._schedule.between(0.0, self._habits.finish_seconds)
            self._schedule.after(seconds, self._fail, worker, SUCCESS)
        self.finishing()
