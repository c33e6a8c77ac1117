"""Readings of all agents' watchdogs, and looks at a worker.

The truth is simple here: a worker has stalled, was stopped, or the whole gathering is quiet for a
while with one of its workers at work. Half of those that work are in one place at each look, as a
worker that waits for something and polls. Only counters distinguish these from a stall. Alarms come
late, as the real watchdog's do. Each rank reports how many samples it has had, and with each
attempt its data is shifted against the steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import zip_longest

from unbroken.core.job.record.timeline import lost_steps
from unbroken.sim.schedule import Schedule
from unbroken.spec.job.detectors import Detector
from unbroken.spec.job.incident import Incident
from unbroken.wire.observation import Activity, Alarm, Bound, RankEvidence, RankWatch, ThreadStack

from .training import Gathering, Training, Worker

WAITS = ("all_reduce (torch/distributed/distributed_c10d.py:2806)", "step (train.py:30)")
STANDS = ("clock_nanosleep (libc.so.6)", "get_batch (data.py:41)", "step (train.py:20)")
WORKS = ("forward (train.py:12)", "step (train.py:25)")
BATCH = 8
"""Samples of a step of one rank."""
POLL_SHARE, POLLS_PER_SECOND = 0.0001, 2.0
"""Cores, and times a second, that a worker uses which polls."""
LATE_SECONDS = 1.0
"""Seconds that an alarm may be late."""


@dataclass(frozen=True, slots=True)
class Rhythm:
    """Times that the watchdogs of a world learn."""

    learn_seconds: float = 3.0
    allowed_seconds: float = 5.0


class Watches:
    """The watchdogs of all agents."""

    def __init__(
        self,
        schedule: Schedule,
        training: Training,
        rhythm: Rhythm,
        publish: Callable[[Worker], None],
    ) -> None:
        self._schedule = schedule
        self._training = training
        self._rhythm = rhythm
        self._publish = publish
        """Lets the worker's agent report its watchdog."""

    def begun(self, place: Gathering) -> None:
        """All workers of an attempt train now."""
        self._schedule.after(self._rhythm.learn_seconds, self._learned, place)

    def knows(self, place: Gathering) -> bool:
        """Return whether a silence of this attempt would be found."""
        return all(w.allowed_seconds is not None for w in place.members.values())

    def silence(self, place: Gathering, seconds: float | None = None) -> None:
        """Nobody shows anything from now on; for so long, None: for ever."""
        quiet = place.quiet = place.quiet + 1
        since, usual = self._schedule.now, self._rhythm.allowed_seconds
        for worker in place.members.values():
            late = usual + self._schedule.between(0.0, LATE_SECONDS)
            self._schedule.after(late, self._fell_silent, place, worker, quiet, since)
            after = usual * self._schedule.between(0.3, 0.9)
            self._schedule.after(after, self._grew_late, place, worker, quiet, since)
        if seconds is not None:
            self._schedule.after(seconds, self._sounds, place, quiet)

    def lone_silence(self, worker: Worker, seconds: float) -> None:
        """Let one worker show nothing for a while, among others that do."""
        self._raise(worker, Detector.SILENT, self._schedule.now)
        self._schedule.after(seconds, self._speak, worker)

    def _speak(self, worker: Worker) -> None:
        # Meanwhile it may have come to stand still, or its attempt.
        if not (worker.is_stalled or worker.is_stopped or self._training.place(worker).is_broken):
            self._clear(worker, Detector.SILENT)

    def stopped(self, worker: Worker, seconds: float | None) -> None:
        """A signal stops the worker; for so long, None: for ever."""
        worker.is_stopped = True
        self._schedule.after(0.05, self._raise, worker, Detector.STOPPED, self._schedule.now)
        if seconds is not None:
            self._schedule.after(seconds, self._continue, worker)

    def look(self, worker: Worker) -> RankEvidence:
        """Return the result of a look at the worker now."""
        place = self._training.place(worker)
        frames: tuple[str, ...] = WORKS
        state, is_same = "R", False
        if worker.is_stopped:
            state, frames, is_same = "T", STANDS, True
        elif worker.is_stalled:
            state, frames, is_same = "S", STANDS, True
        elif place.is_broken or (place.is_quiet and place.at_work != worker.rank):
            state, frames, is_same = "S", WAITS, True
        elif place.is_quiet and worker.pid % 2:
            state, frames, is_same = "S", STANDS, True
        now = self._schedule.now
        runs = now if frames is STANDS and not (worker.is_stopped or worker.is_stalled) else 0.0
        active = Activity(now, runs * POLL_SHARE, int(runs * POLLS_PER_SECOND), runs * POLL_SHARE)
        return RankEvidence(
            worker.rank,
            worker.pid,
            state,
            is_same=is_same,
            cpu_share=0.0 if place.is_parted else None,
            threads=(ThreadStack("MainThread", True, frames),),
            activity_before=active,
            activity_after=active,
        )

    def _learned(self, place: Gathering) -> None:
        if place.is_broken or place.is_done:
            return
        for worker in place.members.values():
            worker.allowed_seconds = self._rhythm.allowed_seconds
        for worker in place.members.values():
            self._publish(worker)

    def _fell_silent(self, place: Gathering, worker: Worker, quiet: int, since: float) -> None:
        if place.quiet == quiet and worker.allowed_seconds is not None:
            self._raise(worker, Detector.SILENT, since)

    def _grew_late(self, place: Gathering, worker: Worker, quiet: int, since: float) -> None:
        is_watched = worker.exit is None and worker.allowed_seconds is not None
        if place.quiet == quiet and is_watched:
            worker.late_since = since
            self._publish(worker)

    def _sounds(self, place: Gathering, quiet: int) -> None:
        """The worker that was at work is done with it."""
        if place.quiet != quiet or place.is_broken:
            return
        place.quiet, place.is_quiet = quiet + 1, False
        for worker in place.members.values():
            worker.late_since = None
            self._clear(worker, Detector.SILENT)

    def _continue(self, worker: Worker) -> None:
        worker.is_stopped = False
        self._clear(worker, Detector.STOPPED)

    def _raise(self, worker: Worker, detector: Detector, since: float) -> None:
        if worker.exit is None:
            name = detector.value
            worker.alarms[name] = Alarm(name, since, self._schedule.now, f"it is {name}")
            self._publish(worker)

    def _clear(self, worker: Worker, detector: Detector) -> None:
        if worker.alarms.pop(detector.value, None) is not None and worker.exit is None:
            self._publish(worker)

    def view(self, worker: Worker) -> RankWatch:
        """The worker as its watchdog sees it."""
        now, step = self._schedule.now, self._training.step(worker)
        view = RankWatch(worker.rank, "train", step, now, 1.0, now, worker.allowed_seconds)
        if step is not None:
            samples = BATCH * (step + 1) + shift(worker.rank, worker.attempt)
            view = replace(view, metrics={"samples": float(samples)})
        usual = self._rhythm.allowed_seconds
        view = replace(view, bound=Bound.STEPS.value, look_seconds=usual / 2, act_seconds=usual / 2)
        return replace(view, alarms=tuple(worker.alarms.values()), late_since=worker.late_since)

    def judge_end(self, incidents: Iterable[Incident], newest: int, ranks: int) -> Iterator[str]:
        """Yield incidents with wrong samples."""
        result = sorted(incidents, key=lambda incident: incident.number)
        for one, after in zip_longest(result, result[1:]):
            end = newest if after is None else after.attempt
            said = one.samples_repeated, one.samples_skipped
            if said == (None, None):
                continue
            self._schedule.probes["samples"] += 1
            # If operators crashed, the incident led to several attempts: the one with reported
            # samples counts.
            later = range(one.attempt + 1, end + 1)
            if said not in [_counted(one, attempt, ranks) for attempt in later]:
                yield f"samples repeated and skipped are not {said}: {one}"


def shift(rank: int, attempt: int) -> int:
    """Return the number of samples by which the data of a rank is ahead of its steps in an
    attempt."""
    return (rank * 7 + attempt * 13) % 5 * BATCH


def _counted(incident: Incident, attempt: int, ranks: int) -> tuple[int, int]:
    """Samples repeated and skipped where an attempt followed the incident."""
    again = (lost_steps(incident) or 0) * BATCH
    ahead = [shift(rank, attempt) - shift(rank, incident.attempt) for rank in range(ranks)]
    return sum(max(again - one, 0) for one in ahead), sum(max(one, 0) for one in ahead)
