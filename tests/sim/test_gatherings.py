"""Gatherings of simulated workers: a second run of an attempt meets nothing of the first one."""

from __future__ import annotations

from unbroken.core.job.events import PodUid
from unbroken.sim.actors.training import KILLED, PEER_LOST, SUCCESS, Habits, Training, Worker
from unbroken.sim.schedule import Schedule


class Silent:
    """A watcher that judges nothing."""

    def worker_started(self, worker: Worker) -> None:
        pass

    def worker_ended(self, worker: Worker) -> None:
        pass

    def progressed(self, worker: Worker) -> None:
        pass


def begun(training: Training, rank: int) -> Worker:
    """A worker of attempt 2, of two nodes."""
    pid, master = training.new_pid(), ("10.0.0.2", 19586)
    pod = PodUid(f"uid-{rank}")
    worker = Worker(pid, pod, "a", 2, rank, rank, 2, master, 0.0, lambda *_: None)
    training.start(worker)
    return worker


def test_a_number_and_address_that_are_used_again_begin_anew() -> None:
    schedule = Schedule(1)
    training = Training(schedule, Habits(work_seconds=60.0), Silent())
    training.end(begun(training, 0), KILLED)
    workers = [begun(training, rank) for rank in (1, 0)]
    schedule.run(schedule.now + 120.0)
    assert [worker.exit for worker in workers] == [SUCCESS, SUCCESS]


def test_a_worker_whose_peers_have_ended_and_do_not_come_back_gives_up() -> None:
    schedule = Schedule(1)
    training = Training(schedule, Habits(watchdog_seconds=20.0), Silent())
    training.end(begun(training, 0), KILLED)
    worker = begun(training, 1)
    schedule.run(schedule.now + 60.0)
    assert worker.exit == PEER_LOST
