"""The agent's machine with workers that survive a stop: the barrier, the fence, late ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.agent.drive_workers import (
    AGAIN,
    CRASHED,
    DONE,
    FAULTED,
    KILLED,
    READY,
    RUNNING,
    SETTINGS,
    THEIRS,
    Step,
    check,
    ended,
    keep,
    short,
    start,
    started,
    stop,
)
from unbroken.core.agent.events import (
    AgentEffect,
    AgentEvent,
    Arrived,
    Commanded,
    Disconnected,
    FaultReported,
    KillAll,
    NothingLives,
    Passed,
    Prepared,
    ProgramStage,
    Recall,
    Registered,
    ReleaseWorkers,
    Settings,
    Spawn,
    StageStarted,
    Terminated,
    WorkerEnded,
)
from unbroken.core.agent.faults import WorkerEnd
from unbroken.core.agent.machine import Workers
from unbroken.core.tick import Tick
from unbroken.wire.agent import (
    AgentState,
    FaultKind,
    ShutdownCommand,
)


def test_who_is_at_the_barrier_keeps_its_process_and_only_the_other_is_started() -> None:
    machine = check(*READY)
    assert machine.report().kept == (1,)
    assert machine.deadline() is None
    machine = check(*AGAIN, (Passed(1, 101), "running"))
    first, second = machine.report().workers
    assert (first.pid, first.started_at) == (102, 12.0)
    assert (second.pid, second.rank, second.started_at, second.first_output_at) == (
        *(101, 1, 11.0, 13.0),
    )
    assert machine.report().faults == ()
    assert machine.report().kept == ()


def test_all_may_be_kept_and_the_attempt_is_told_of_all_the_same() -> None:
    check(
        *RUNNING,
        (keep(), "recall 0 1 of 0, kill but 0 1, stopping"),
        (Arrived(1, 101), "stopping"),
        (NothingLives((0, 1)), "stopping"),
        (Arrived(0, 100), "ready"),
        (start(1), "spawn train 1 but 0 1, release 0 1 into 1, port, running"),
        (started(1), "running"),
        (ended(0, 100, DONE, attempt=1), "running"),
        (ended(1, 101, DONE, attempt=1), "completed"),
    )


@pytest.mark.parametrize(("arrive_seconds", "save_seconds"), [(60.0, 2), (5.0, 2), (1.0, 0.5)])
def test_before_a_planned_move_workers_may_save_their_step(
    arrive_seconds: float, save_seconds: float
) -> None:
    """Give workers less time to save than to reach the barrier.

    Workers that have not saved by then can still be made to leave.
    """
    order = keep(is_graceful=True)
    check(
        *RUNNING,
        (order, f"recall 0 1 of 0 within {save_seconds:g}, kill but 0 1, stopping"),
        (order, "kill but 0 1, stopping"),
        settings=replace(SETTINGS, arrive_seconds=arrive_seconds),
    )


def test_kept_processes_are_replaced_if_their_node_gets_another_rank() -> None:
    """Replace them, since another operator may not know which rank they had."""
    machine = check(
        *RUNNING,
        (keep(), "recall 0 1 of 0, kill but 0 1, stopping"),
        (Arrived(1, 101), "stopping"),
        (NothingLives((0, 1)), "stopping"),
        (Arrived(0, 100), "ready"),
        (start(1, rank=1), "kill, port, running"),
        (NothingLives(), "spawn train 1, running"),
        (started(1), "running"),
    )
    assert machine.report().kept == ()


@pytest.mark.parametrize("mode", ["process_level_restart", "ipr", "job_level_restart"])
def test_any_other_stop_keeps_nobody(mode: str) -> None:
    check(
        *FAULTED,
        (stop(mode=mode), "kill, stopping"),
        (Arrived(1, 101), "stopping"),
        (NothingLives((1,)), "stopping"),
        (ended(1, 101), "stopping"),
        (NothingLives(), "ready"),
        (start(1), "spawn train 1, port, running"),
    )


def test_who_never_registered_is_killed() -> None:
    check(
        *RUNNING[:3],
        (keep(), "recall 0 of 0, kill but 0, stopping"),
        (Registered(1, 101), "stopping"),
        (Arrived(0, 100), "stopping"),
        (ended(1, 101), "stopping"),
        (NothingLives((0,)), "ready"),
    )


def test_nobody_is_ready_before_the_end_of_each_worker_that_is_not_kept_was_told() -> None:
    check(
        *RUNNING[:3],
        (keep(), "recall 0 of 0, kill but 0, stopping"),
        (Arrived(0, 100), "stopping"),
        (NothingLives((0,)), "stopping"),
        (start(1), "stopping"),
        (ended(1, 101), "stopping"),
        (NothingLives((0,)), "ready"),
    )


def test_who_is_late_is_killed_and_alone_started_anew() -> None:
    machine = check(
        *RUNNING,
        (keep(), "recall 0 1 of 0, kill but 0 1, stopping"),
        (NothingLives((0, 1)), "stopping"),
        (Arrived(0, 100), "stopping"),
        (keep(), "kill but 0 1, stopping"),
    )
    assert machine.deadline() == 10.0, "a second stop gives no more time"
    orders = [short(one) for one in machine.step(Tick(), 10.0)]
    assert orders == ["kill but 0"]
    machine.step(Arrived(1, 101), 10.1)
    assert machine.state is AgentState.STOPPING, "too late is too late"
    machine.step(ended(1, 101), 10.2)
    machine.step(NothingLives((0, 1)), 10.3)
    assert machine.state is AgentState.STOPPING, "an answer to an older order"
    machine.step(NothingLives((0,)), 10.4)
    assert (machine.state, machine.report().kept) == (AgentState.READY, (0,))


def test_one_that_dies_on_its_way_to_the_barrier_is_only_not_kept() -> None:
    machine = check(
        *FAULTED,
        (keep(), "recall 1 of 0, kill but 1, stopping"),
        (ended(1, 101, CRASHED), "kill, stopping"),
        (NothingLives((1,)), "stopping"),
        (NothingLives(), "ready"),
    )
    assert (machine.report().kept, machine.deadline()) == ((), None)


@pytest.mark.parametrize("event", [Disconnected(1, 101), ended(1, 101)])
def test_one_that_dies_at_the_barrier_is_started_when_nothing_of_it_lives(
    event: AgentEvent,
) -> None:
    machine = check(
        *READY,
        (event, "kill, ready"),
        (start(1), "kill, port, running"),
        (NothingLives(), "spawn train 1, running"),
        (NothingLives(), "running"),
        (started(1, _0=102, _1=103), "running"),
    )
    assert [worker.pid for worker in machine.report().workers] == [102, 103]


def test_a_stop_while_a_start_waits_for_the_dead_starts_nothing() -> None:
    check(
        *READY,
        (Disconnected(1, 101), "kill, ready"),
        (start(1), "kill, port, running"),
        (keep(1), "kill, stopping"),
        (NothingLives(), "ready"),
        (start(2), "spawn train 2, port, running"),
    )


def test_a_harder_stop_of_the_same_attempt_counts_though_all_are_at_the_barrier() -> None:
    machine = check(
        *READY,
        (keep(0), "ready"),
        (stop(0), "kill, ready"),
        (start(1), "kill, port, running"),
        (NothingLives((1,)), "running"),
        (NothingLives(), "spawn train 1, running"),
    )
    assert machine.report().kept == ()


def test_a_worker_that_is_killed_at_the_barrier_is_reported_until_it_has_ended() -> None:
    killed = (*READY, (stop(0), "kill, ready"))
    assert check(*killed).report().kept == check(*READY).report().kept != ()
    assert check(*killed, (NothingLives(), "ready")).report().kept == ()


def test_a_hard_stop_of_an_older_attempt_ends_nobody_at_the_barrier() -> None:
    check(
        *AGAIN,
        (keep(1), "recall 1 of 1, kill but 1, stopping"),
        (ended(0, 102, attempt=1), "stopping"),
        (NothingLives((1,)), "stopping"),
        (Passed(1, 101), "stopping"),
        (Arrived(1, 101), "ready"),
        (stop(0), "ready"),
        (stop(1), "kill, ready"),
    )


def test_a_softer_stop_after_a_hard_one_keeps_nobody() -> None:
    check(
        *FAULTED,
        (stop(), "kill, stopping"),
        (keep(), "kill, stopping"),
        (ended(1, 101), "stopping"),
        (NothingLives(), "ready"),
    )


def test_a_hard_stop_overtakes_a_soft_one() -> None:
    machine = check(
        *FAULTED,
        (keep(), "recall 1 of 0, kill but 1, stopping"),
        (stop(), "kill, stopping"),
        (NothingLives((1,)), "stopping"),
        (Arrived(1, 101), "stopping"),
        (ended(1, 101), "stopping"),
        (NothingLives(), "ready"),
    )
    assert machine.deadline() is None


def test_an_arrival_from_before_the_release_is_no_arrival() -> None:
    check(
        *AGAIN,
        (Registered(0, 102), "running"),
        (keep(1), "recall 0 1 of 1, kill but 0 1, stopping"),
        (Arrived(0, 102), "stopping"),
        (Arrived(1, 101), "stopping"),
        (NothingLives((0, 1)), "stopping"),
        (Passed(1, 101), "stopping"),
        (Arrived(1, 101), "ready"),
    )


def test_where_workers_are_asked_to_end_none_of_them_is_kept_at_the_barrier() -> None:
    machine = check(
        *RUNNING,
        (stop(), "signal 15, stopping"),
        (Arrived(0, 100), "stopping"),
        (Arrived(1, 101), "stopping"),
        (NothingLives(), "stopping"),
        (keep(), "stopping"),
        (ended(0, 100, WorkerEnd(signal=15)), "stopping"),
        (ended(1, 101, DONE), "kill, stopping"),
        (NothingLives(), "ready"),
        settings=replace(SETTINGS, stop_signal=15),
    )
    assert machine.report().kept == ()


def test_an_arrival_of_a_dead_process_is_nobodys() -> None:
    check(
        *RUNNING,
        (keep(), "recall 0 1 of 0, kill but 0 1, stopping"),
        (NothingLives((0, 1)), "stopping"),
        (Arrived(0, 100), "stopping"),
        (Arrived(1, 99), "stopping"),
    )


def test_what_a_dead_process_said_is_not_its_successors_word() -> None:
    check(
        *AGAIN,
        (Registered(0, 100), "running"),
        (keep(1), "recall 1 of 1, kill but 1, stopping"),
    )


def test_one_that_leaves_by_itself_is_a_fault() -> None:
    machine = check(*RUNNING, (Arrived(0, 100), "faulted"))
    (fault,) = machine.report().faults
    assert (fault.kind, fault.local_rank, fault.pid) == (FaultKind.REPORTED, 0, 100)
    check(
        *RUNNING,
        (Arrived(0, 100), "faulted"),
        (keep(), "recall 1 of 0, kill but 0 1, stopping"),
        (NothingLives((0, 1)), "stopping"),
        (Arrived(1, 101), "ready"),
    )


def test_a_worker_names_its_fault_itself_and_how_hard_the_restart_is() -> None:
    report = FaultReported(0, 100, "process_level_restart", "BadLink", "link 3 is down")
    machine = check(*RUNNING, (report, "faulted"))
    assert (machine.report().reason, machine.report().faults[0].message) == (
        *("BadLink", "link 3 is down"),
    )
    check(*RUNNING, (report, "faulted"), (keep(), "kill, stopping"))
    plain = check(*RUNNING, (FaultReported(1, 101), "faulted"))
    assert plain.report().reason == "WorkerReportedFault"


def test_shutdown_at_the_barrier_asks_them_and_leaves_nobody() -> None:
    machine = check(
        *READY,
        (Commanded(ShutdownCommand()), "signal 15, shutdown"),
        (NothingLives((1,)), "shutdown"),
        (ended(1, 101), "kill, shutdown"),
        (NothingLives((1,)), "shutdown"),
        (NothingLives(), "exit 0, shutdown"),
    )
    assert machine.deadline() is None
    stubborn = check(*READY, (Terminated(15), "signal 15, shutdown"))
    assert [short(one) for one in stubborn.step(Tick(), 26.0)] == ["kill"]
    assert [short(one) for one in stubborn.step(NothingLives(), 27.0)] == [
        "exit 143",
        "say shutdown",
    ]


def test_stages_run_beside_those_at_the_barrier() -> None:
    settings = replace(SETTINGS, has_pre_train=True)
    script = StageStarted(1, ProgramStage.PRE_TRAIN, (200,))
    pre = StageStarted(0, ProgramStage.PRE_TRAIN, (99,))
    check(
        (start(0), "spawn pre_train 0, port, running"),
        (pre, "running"),
        (WorkerEnded(0, ProgramStage.PRE_TRAIN, 0, DONE, pid=99), "spawn train 0, running"),
        *RUNNING[1:],
        (keep(), "recall 0 1 of 0, kill but 0 1, stopping"),
        (NothingLives((0, 1)), "stopping"),
        (Arrived(0, 100), "stopping"),
        (Arrived(1, 101), "ready"),
        (start(1), "spawn pre_train 1, port, running"),
        (script, "running"),
        (ended(0, 100), "running"),
        (WorkerEnded(1, ProgramStage.PRE_TRAIN, 0, DONE, pid=200), "kill but 1, running"),
        (NothingLives((1,)), "spawn train 1 but 1, release 1 into 1, running"),
        settings=settings,
    )


INIT: tuple[Step, ...] = (
    (started(0, _0=100, _1=101), "init"),
    (Registered(0, 100), "init"),
    (Registered(1, 101), "init"),
    (Arrived(0, 100), "init"),
    (Arrived(1, 101), "ready"),
)


def test_theirs_wait_for_their_ranks_before_the_first_attempt() -> None:
    machine = Workers(THEIRS)
    spawn, *_ = machine.step(Prepared(), 0.0)
    assert isinstance(spawn, Spawn)
    assert (spawn.command.rank, spawn.command.master_addr, spawn.command.master_port) == (
        -1,
        "",
        -1,
    )
    report = check(*INIT[:2], settings=THEIRS).report()
    assert (report.attempt, report.master_port, report.kept) == (None, None, ())
    check(
        *INIT,
        (start(0), "spawn train 0 but 0 1, release 0 1 into 0, port, running"),
        (started(0), "running"),
        (Passed(0, 100), "running"),
        (Passed(1, 101), "running"),
        (stop(0, "ipr"), "recall 0 1 of 0, kill but 0 1, stopping"),
        (NothingLives((0, 1)), "stopping"),
        (Arrived(0, 100), "stopping"),
        (Arrived(1, 101), "ready"),
        settings=THEIRS,
    )


def test_theirs_are_started_anew_after_a_hard_stop_and_wait_again() -> None:
    check(
        *INIT,
        (start(0), "spawn train 0 but 0 1, release 0 1 into 0, port, running"),
        (stop(0), "kill, stopping"),
        (ended(0, 100), "stopping"),
        (ended(1, 101), "stopping"),
        (NothingLives(), "spawn train 1, init"),
        (started(1, _0=102, _1=103), "init"),
        (start(1), "init"),
        (Registered(0, 102), "init"),
        (Registered(1, 103), "init"),
        (Arrived(0, 102), "init"),
        (Arrived(1, 103), "ready"),
        (start(1), "spawn train 1 but 0 1, release 0 1 into 1, port, running"),
        settings=THEIRS,
    )


def test_of_theirs_only_the_dead_one_is_started_anew_before_all_are_ready() -> None:
    check(
        *INIT,
        (start(0), "spawn train 0 but 0 1, release 0 1 into 0, port, running"),
        (Passed(0, 100), "running"),
        (Passed(1, 101), "running"),
        (ended(0, 100), "kill but 1, faulted"),
        (NothingLives((1,)), "faulted"),
        (stop(0, "in_process_restart"), "recall 1 of 0, kill but 1, stopping"),
        (Arrived(1, 101), "stopping"),
        (NothingLives((1,)), "spawn train 1 but 1, init"),
        (started(1, _0=102), "init"),
        (Registered(0, 102), "init"),
        (Arrived(0, 102), "ready"),
        settings=THEIRS,
    )


@pytest.mark.parametrize("local_rank", [0, 1])
def test_a_death_of_theirs_before_the_barrier_is_a_fault(local_rank: int) -> None:
    steps: tuple[Step, ...] = (
        *INIT[:3],
        (ended(local_rank, 100 + local_rank, CRASHED), f"kill but {1 - local_rank}, faulted"),
    )
    machine = check(*steps, settings=THEIRS)
    assert [fault.local_rank for fault in machine.report().faults] == [local_rank]
    check(
        *steps,
        (Arrived(1 - local_rank, 101 - local_rank), "faulted"),
        (stop(0, "ipr"), f"kill but {1 - local_rank}, port, stopping"),
        (NothingLives((1 - local_rank,)), f"spawn train 1 but {1 - local_rank}, init"),
        settings=THEIRS,
    )


class World:
    """Processes as the kernel has them; the world obeys a machine, late and in any order."""

    def __init__(self, settings: Settings) -> None:
        self.machine = Workers(settings)
        self.now, self.pids = 0.0, 100
        self.alive: dict[int, int] = {}
        """Pids by local rank."""
        self.attempts: dict[int, int] = {}
        """Attempt that each pid trains; missing: the process is at the barrier."""
        self.released: dict[int, list[int]] = {}
        self.recalled: set[int] = set()
        self.left: list[AgentEvent] = []
        """Events that the machine has not received yet, in order."""
        self.feed(Prepared())

    def feed(self, event: AgentEvent) -> None:
        """Give the machine an event, and carry out its effects."""
        self.now += 1.0
        for effect in self.machine.step(event, self.now):
            self.act(effect)
        self.check()

    def act(self, effect: AgentEffect) -> None:
        """Carry out an effect."""
        match effect:
            case Spawn(stage, command, kept):
                assert set(self.alive) == set(kept), "a second process of a rank, or a survivor"
                assert not any(pid in self.attempts for pid in self.alive.values()), "the fence"
                missing = [rank for rank in (0, 1) if rank not in kept]
                for rank in missing:
                    self.pids += 1
                    self.alive[rank] = self.pids
                    self.attempts[self.pids] = command.attempt
                pids = tuple(self.alive[rank] for rank in missing)
                self.left.insert(0, StageStarted(command.attempt, stage, pids, tuple(missing)))
            case KillAll(kept):
                for rank in [rank for rank in self.alive if rank not in kept]:
                    self.die(rank, KILLED)
                self.left.append(NothingLives(kept))
            case Recall(ranks):
                self.recalled |= {self.alive[rank] for rank in ranks if rank in self.alive}
            case ReleaseWorkers(ranks, command):
                for rank in ranks:
                    if rank in self.alive:
                        self.attempts[self.alive[rank]] = command.attempt
                        self.left.append(Passed(rank, self.alive[rank]))
            case _:
                pass

    def die(self, rank: int, end: WorkerEnd) -> None:
        """End a process; its event comes later."""
        pid = self.alive.pop(rank)
        attempt = self.attempts.pop(pid, self.machine.report().newest_attempt or 0)
        self.left += [Disconnected(rank, pid), ended(rank, pid, end, attempt)]

    def arrive(self, rank: int) -> None:
        """Let a recalled process leave its training, once its earlier messages are received."""
        pid = self.alive.get(rank)
        waits = [one for one in self.left if isinstance(one, Passed) and one.pid == pid]
        if pid in self.recalled and not waits:
            self.recalled.discard(pid)
            self.attempts.pop(pid, None)
            self.left.append(Arrived(rank, pid))

    def check(self) -> None:
        """Check that READY is true."""
        report = self.machine.report()
        if report.state is AgentState.READY:
            trains = [pid for pid in self.alive.values() if pid in self.attempts]
            assert not trains, "ready while a process trains"


ACTIONS = st.one_of(
    st.tuples(st.just("start"), st.integers(0, 1)),
    st.tuples(st.sampled_from(["keep", "stop", "news"]), st.just(0)),
    st.tuples(st.just("news"), st.just(0)),
    st.tuples(st.sampled_from(["register", "arrive", "die", "end"]), st.integers(0, 1)),
    st.tuples(st.just("tick"), st.integers(0, 10)),
)


def act(world: World, kind: str, number: int, attempt: int) -> int:
    """Let one event happen; return the number of the next attempt."""
    pid = world.alive.get(number)
    match kind:
        case "start":
            world.feed(start(attempt + number))
            is_on = world.machine.state is AgentState.RUNNING
            return attempt + number + 1 if is_on else attempt
        case "keep" | "stop":
            world.feed(keep(attempt - 1) if kind == "keep" else stop(attempt - 1))
        case "news" if world.left:
            world.feed(world.left.pop(0))
        case "register" if pid is not None and pid in world.attempts:
            world.left.append(Registered(number, pid))
        case "arrive":
            world.arrive(number)
        case "die" | "end" if pid is not None:
            world.die(number, CRASHED if kind == "die" else DONE)
        case "tick":
            world.now += number
            world.feed(Tick())
    return attempt


@given(st.lists(ACTIONS, max_size=80))
def test_in_no_order_of_events_do_two_attempts_or_two_processes_of_a_rank_meet(
    actions: list[tuple[str, int]],
) -> None:
    world, attempt = World(SETTINGS), 1
    for kind, number in actions:
        attempt = act(world, kind, number, attempt)
    world.feed(stop(None))
    for _ in range(20):
        for rank in (0, 1):
            world.arrive(rank)
        while world.left:
            world.feed(world.left.pop(0))
    world.feed(Commanded(ShutdownCommand()))
    world.now += 100
    world.feed(Tick())
    while world.left:
        world.feed(world.left.pop(0))
    assert world.alive == {}
