"""The agent's machine: what it orders, and which commands it refuses."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.agent import drive_workers
from tests.core.agent.drive_workers import CRASHED, DONE, KILLED, SETTINGS, Step, short
from unbroken.core.agent.events import (
    AgentEvent,
    Commanded,
    Exit,
    FirstOutput,
    KillAll,
    NothingLives,
    OfferPort,
    PortFound,
    Prepared,
    ProgramStage,
    Publish,
    RecurringLine,
    RulesRead,
    Settings,
    Spawn,
    SpawnFailed,
    StageStarted,
    Terminated,
    TurnedCold,
    WorkerEnded,
)
from unbroken.core.agent.faults import WorkerEnd
from unbroken.core.agent.machine import Workers
from unbroken.core.logs.rule_events import RuleViolated
from unbroken.core.tick import Tick
from unbroken.wire.agent import (
    AgentState,
    FaultKind,
    RuleState,
    RuleView,
    ShutdownCommand,
    StartCommand,
    StopCommand,
    Violation,
)

GENTLE = replace(SETTINGS, stop_signal=15)
STAGES = replace(SETTINGS, has_pre_train=True, has_post_train=True)
RESET = WorkerEnd(
    exit_code=1,
    lines=(
        "Traceback (most recent call last):",
        '  File "train.py", line 3, in <module>',
        "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.1]:4",
    ),
)


def command(attempt: int = 0, **changes: object) -> StartCommand:
    """A start of an attempt on the first of two nodes."""
    plain = StartCommand(attempt, rank=0, nnodes=2, master_addr="10.0.0.1", master_port=2000)
    return replace(plain, **changes)  # type: ignore[arg-type]


def start(attempt: int = 0, **changes: object) -> AgentEvent:
    return Commanded(command(attempt, **changes))


def stop(attempt: int | None = 0, **changes: object) -> AgentEvent:
    return Commanded(replace(StopCommand(attempt), **changes))  # type: ignore[arg-type]


def started(
    attempt: int = 0, stage: ProgramStage = ProgramStage.TRAIN, count: int = 2
) -> AgentEvent:
    return StageStarted(attempt, stage, tuple(range(100, 100 + count)))


def ended(
    local_rank: int, end: WorkerEnd, attempt: int = 0, stage: ProgramStage = ProgramStage.TRAIN
) -> AgentEvent:
    return WorkerEnded(attempt, stage, local_rank, end)


check = partial(drive_workers.check, with_reports=True)
RUNNING: tuple[Step, ...] = (
    (start(), "spawn train 0, port, say running"),
    (started(), "say running"),
)
READY_AGAIN: tuple[Step, ...] = (
    *RUNNING,
    (ended(0, KILLED), "kill, say faulted"),
    (ended(1, KILLED), "say faulted"),
    (NothingLives(), ""),
    (stop(), "kill, say stopping"),
    (NothingLives(), "say ready"),
)


def test_it_is_ready_and_offers_a_port_when_it_listens() -> None:
    machine = Workers(SETTINGS)
    effects = machine.step(Prepared(), 1.0)
    assert [short(effect) for effect in effects] == ["port", "say ready"]
    assert short(machine.step(PortFound(25000), 1.0)[0]) == "say ready"
    assert machine.report().offered_port == 25000
    assert machine.entered == {AgentState.INIT: 1.0, AgentState.READY: 1.0}


def test_an_agent_that_is_shut_down_while_it_warms_up_does_not_become_ready() -> None:
    machine = Workers(SETTINGS)
    machine.step(Terminated(15), 1.0)
    assert machine.step(Prepared(), 2.0) == []
    assert machine.state is AgentState.SHUTDOWN


@pytest.mark.parametrize("given", [start(), stop()])
def test_an_offered_port_is_withdrawn_once_an_attempt_may_have_its_store_there(
    given: AgentEvent,
) -> None:
    machine = Workers(SETTINGS)
    machine.step(Prepared(), 1.0)
    machine.step(PortFound(25000), 1.0)
    machine.step(given, 2.0)
    assert machine.report().offered_port is None
    machine.step(PortFound(25001), 2.0)
    assert machine.report().offered_port == 25001


def test_the_port_that_an_operator_chose_for_an_attempt_is_not_offered_for_the_next_one() -> None:
    machine = Workers(SETTINGS)
    machine.step(Prepared(), 1.0)
    effects = machine.step(start(), 2.0)
    assert [one.used for one in effects if isinstance(one, OfferPort)] == [2000]


def test_a_worker_that_turns_cold_is_reported_so() -> None:
    machine = check(
        (start(), "spawn train 0, port, say running"),
        (StageStarted(0, ProgramStage.TRAIN, (100, 101), None, ("warm", "warm")), "say running"),
        (TurnedCold(0, ProgramStage.TRAIN, 1, 99), ""),
        (TurnedCold(0, ProgramStage.TRAIN, 1, 101), "say running"),
    )
    assert [worker.start for worker in machine.report().workers] == ["warm", "cold"]


def test_all_workers_succeed_and_it_stays_completed() -> None:
    machine = check(
        *RUNNING,
        (FirstOutput(0, 1), "say running"),
        (RecurringLine(0, 1, 3.5), "say running"),
        (ended(0, DONE), "say running"),
        (ended(1, DONE), "say completed"),
        (start(), ""),
        (Tick(), ""),
    )
    report = machine.report()
    found = [
        (w.rank, w.pid, w.state, w.first_output_at, w.recurring_line_at) for w in report.workers
    ]
    assert found == [(0, 100, "succeeded", None, None), (1, 101, "succeeded", 3.0, 3.5)]
    assert (report.attempt, report.faults, report.reason) == (0, (), "")


def test_one_failure_kills_the_others_and_is_told_at_once() -> None:
    report = check(*READY_AGAIN[:4]).report()
    (fault,) = report.faults
    assert (fault.kind, fault.local_rank, fault.signal, fault.at) == (FaultKind.SIGNAL, 0, 9, 3.0)
    assert [worker.state for worker in report.workers] == ["failed", "stopped"]
    assert report.reason == "WorkerCrash"
    assert report.message.splitlines()[1] == "local rank 0 (exit code -9): killed by SIGKILL"


def test_a_worker_that_failed_by_itself_before_it_was_killed_is_told_as_well() -> None:
    machine = check(*READY_AGAIN[:3], (ended(1, CRASHED), "say faulted"))
    assert [fault.local_rank for fault in machine.report().faults] == [0, 1]


def test_it_is_ready_only_when_nothing_lives() -> None:
    check(
        *RUNNING,
        (stop(), "kill, say stopping"),
        (stop(), "kill"),
        (ended(0, KILLED), "say stopping"),
        (ended(1, KILLED), "say stopping"),
        (start(1), ""),
        (NothingLives(), "say ready"),
        (start(1), "spawn train 1, port, say running"),
    )


def test_a_stop_while_workers_are_being_started_ends_them_all() -> None:
    check(
        RUNNING[0],
        (stop(is_graceful=True), "kill, say stopping"),
        (started(), "say stopping"),
        (ended(0, KILLED), "say stopping"),
        (ended(1, KILLED), "say stopping"),
        (NothingLives(), "say ready"),
    )


@pytest.mark.parametrize(
    ("settings", "orders"),
    [(SETTINGS, "kill"), (replace(SETTINGS, stop_signal=15), "signal 15")],
)
def test_a_worker_that_died_before_its_stop_is_a_fault_though_it_is_told_later(
    settings: Settings, orders: str
) -> None:
    machine = check(*RUNNING, (stop(), f"{orders}, say stopping"), settings=settings)
    found = WorkerEnded(0, ProgramStage.TRAIN, 1, KILLED, at=2.5, is_signalled=False)
    (said,) = machine.step(found, 4.0)
    assert isinstance(said, Publish)
    assert [(f.rank, f.at) for f in said.report.faults] == [(1, 2.5)]
    assert [worker.ended_at for worker in said.report.workers] == [None, 2.5]
    # The other one died of the stop.
    effects = machine.step(ended(0, WorkerEnd(signal=15 if orders != "kill" else 9)), 5.0)
    assert ", ".join(map(short, effects)) == (
        "say stopping" if orders == "kill" else "kill, say stopping"
    )
    assert len(machine.report().faults) == 1


def test_a_stop_that_finds_all_workers_dead_is_over_without_waiting() -> None:
    machine = check(
        *RUNNING,
        (stop(), "signal 15, say stopping"),
        (WorkerEnded(0, ProgramStage.TRAIN, 0, KILLED, is_signalled=False), "say stopping"),
        (WorkerEnded(0, ProgramStage.TRAIN, 1, KILLED, is_signalled=False), "kill, say stopping"),
        (NothingLives(), "say ready"),
        settings=replace(SETTINGS, stop_signal=15),
    )
    assert machine.state is AgentState.READY


def test_a_program_that_cannot_start_while_it_is_stopped_is_no_fault() -> None:
    failed = SpawnFailed(0, ProgramStage.TRAIN, 0, "no such file")
    check(
        RUNNING[0],
        (stop(), "kill, say stopping"),
        (failed, "say stopping"),
        (NothingLives(), "say ready"),
    )


@pytest.mark.parametrize(
    ("before", "given", "refusal"),
    [
        (READY_AGAIN, command(0), "attempt 0 is over; the newest is 0"),
        (((stop(5), "port, say ready"),), command(4), "attempt 4 is over; the newest is 5"),
        (((stop(5), "port, say ready"),), command(5), "attempt 5 is over; the newest is 5"),
        (((stop(5), "port, say ready"),), command(6), ""),
        (RUNNING, command(0), ""),
        (RUNNING, command(1), "cannot start attempt 1 in state running"),
        (RUNNING, command(0, rank=1), "attempt 0 was started with another rank or address"),
        (RUNNING, command(0, master_port=1), "attempt 0 was started with another rank or address"),
        (RUNNING, StopCommand(7), ""),
        (READY_AGAIN[:3], command(1), "cannot start attempt 1 in state faulted"),
        (READY_AGAIN[:6], command(1), "cannot start attempt 1 in state stopping"),
        (READY_AGAIN[:6], command(0), "attempt 0 is over; the newest is 0"),
        (((Commanded(ShutdownCommand()), "kill, say shutdown"),), StopCommand(), "the agent is"),
    ],
)
def test_commands_are_fenced(
    before: tuple[Step, ...], given: StartCommand | StopCommand, refusal: str
) -> None:
    machine = check(*before)
    found = machine.refusal(given)
    assert found.startswith(refusal)
    assert bool(found) == bool(refusal)
    if refusal:
        report = machine.report()
        assert machine.step(Commanded(given), 99.0) == []
        assert machine.report() == report


def test_a_doubled_start_changes_nothing_of_what_runs() -> None:
    machine = check(*RUNNING, (start(), ""), (start(0, rank=1), ""), (start(9), ""))
    assert (machine.report().rank, machine.report().newest_attempt) == (0, 0)


def test_a_stop_of_an_older_attempt_stops_nothing_newer() -> None:
    check(
        *READY_AGAIN,
        (start(3), "spawn train 3, port, say running"),
        (started(3), "say running"),
        (stop(2), ""),
        (stop(3), "kill, say stopping"),
    )


def test_a_stop_of_a_newer_attempt_stops_what_runs_and_renews_the_port() -> None:
    machine = check(*RUNNING, (stop(4), "kill, port, say stopping"))
    assert machine.report().newest_attempt == 4


def test_a_strangers_plain_stop_lets_the_same_attempt_start_again() -> None:
    check(
        *RUNNING,
        (stop(None), "kill, say stopping"),
        (ended(0, KILLED), "say stopping"),
        (ended(1, KILLED), "say stopping"),
        (NothingLives(), "say ready"),
        (stop(None), ""),
        (start(0), "spawn train 0, port, say running"),
    )


def test_a_graceful_stop_asks_and_then_kills() -> None:
    machine = check(
        *RUNNING, (stop(is_graceful=True, timeout_seconds=4.0), "signal 15, say stopping")
    )
    assert machine.deadline() == 7.0
    assert machine.step(stop(is_graceful=True, timeout_seconds=4.0), 5.0) == []
    assert machine.deadline() == 7.0
    assert machine.step(Tick(), 6.9) == []
    assert machine.step(Tick(), 7.0) == [KillAll()]
    assert machine.deadline() is None


def test_a_stop_that_kills_overtakes_a_graceful_one() -> None:
    check(
        *RUNNING,
        (stop(is_graceful=True, timeout_seconds=60.0), "signal 15, say stopping"),
        (stop(), "kill"),
    )


def test_workers_that_follow_a_graceful_stop_leave_nothing_behind() -> None:
    machine = check(
        *RUNNING,
        (stop(is_graceful=True), "signal 15, say stopping"),
        (ended(0, DONE), "say stopping"),
        (ended(1, CRASHED), "kill, say stopping"),
        (NothingLives(), "say ready"),
    )
    assert machine.report().faults == ()
    assert machine.deadline() is None


def test_shutdown_signal_term_gives_the_workers_their_time() -> None:
    machine = check(*RUNNING, (stop(), "signal 15, say stopping"), settings=GENTLE)
    assert machine.deadline() == 18.0


def test_being_shut_down_gives_workers_that_are_being_stopped_no_more_time() -> None:
    machine = check(
        *RUNNING,
        (stop(is_graceful=True), "signal 15, say stopping"),
        (Terminated(15), "say shutdown"),
    )
    assert machine.deadline() == 18.0, "15 s after the stop"


@pytest.mark.parametrize(
    ("settings", "given", "expected"),
    [
        (SETTINGS, stop(is_graceful=True), "signal 15"),
        (replace(SETTINGS, has_elastic_events=True), stop(is_graceful=True), "signal 10"),
        (replace(SETTINGS, has_elastic_events=True), stop(), "kill"),
        (replace(SETTINGS, stop_signal=15, has_elastic_events=True), stop(), "signal 15"),
    ],
)
def test_sigusr1_is_only_for_scripts_that_asked_for_elastic_events(
    settings: Settings, given: AgentEvent, expected: str
) -> None:
    check(*RUNNING, (given, f"{expected}, say stopping"), settings=settings)


def test_a_worker_has_each_signal_once() -> None:
    """A second SIGTERM would interrupt a handler that saves."""
    graceful = (stop(is_graceful=True), "signal 15, say stopping")
    check(*RUNNING, graceful, (Terminated(15), "say shutdown"), (Terminated(15), ""))
    check(*RUNNING, (Terminated(15), "signal 15, say shutdown"), (graceful[0], ""))
    check(*RUNNING, graceful, (Terminated(2), "signal 2, say shutdown"))
    elastic = replace(SETTINGS, has_elastic_events=True)
    asked = (graceful[0], "signal 10, say stopping")
    check(*RUNNING, asked, (Terminated(15), "signal 15, say shutdown"), settings=elastic)


def test_stages_follow_one_another() -> None:
    check(
        (start(), "spawn pre_train 0, port, say running"),
        (started(stage=ProgramStage.PRE_TRAIN, count=1), "say running"),
        (ended(0, DONE, stage=ProgramStage.PRE_TRAIN), "spawn train 0, say running"),
        (started(), "say running"),
        (ended(0, DONE, stage=ProgramStage.PRE_TRAIN), ""),
        (ended(1, DONE), "say running"),
        (ended(0, DONE), "spawn post_train 0, say running"),
        (started(stage=ProgramStage.POST_TRAIN, count=1), "say running"),
        (ended(0, DONE, stage=ProgramStage.POST_TRAIN), "say completed"),
        settings=STAGES,
    )


@pytest.mark.parametrize(
    ("stage", "kind"),
    [
        (ProgramStage.PRE_TRAIN, FaultKind.PRE_TRAIN),
        (ProgramStage.POST_TRAIN, FaultKind.POST_TRAIN),
    ],
)
def test_a_failing_script_is_a_fault_of_its_own_kind(stage: ProgramStage, kind: FaultKind) -> None:
    training = (
        (ended(0, DONE, stage=ProgramStage.PRE_TRAIN), "spawn train 0, say running"),
        (started(), "say running"),
        (ended(0, DONE), "say running"),
        (ended(1, DONE), "spawn post_train 0, say running"),
        (started(stage=ProgramStage.POST_TRAIN, count=1), "say running"),
    )
    machine = check(
        (start(), "spawn pre_train 0, port, say running"),
        (started(stage=ProgramStage.PRE_TRAIN, count=1), "say running"),
        *(training if stage is ProgramStage.POST_TRAIN else ()),
        (ended(0, WorkerEnd(exit_code=3), stage=stage), "kill, say faulted"),
        settings=STAGES,
    )
    (fault,) = machine.report().faults
    assert (fault.kind, fault.exit_code) == (kind, 3)


def test_a_program_that_cannot_start_is_a_fault() -> None:
    machine = check(
        RUNNING[0], (SpawnFailed(0, ProgramStage.TRAIN, 1, "no such file"), "kill, say faulted")
    )
    (fault,) = machine.report().faults
    assert (fault.kind, fault.rank, fault.message) == (FaultKind.NOT_STARTED, 1, "no such file")
    assert "local rank 1 (not started): no such file" in machine.report().message


def test_one_that_left_early_is_named_before_those_who_miss_it() -> None:
    machine = check(
        *RUNNING, (ended(1, DONE), "say running"), (ended(0, RESET), "kill, say faulted")
    )
    kinds = [(fault.kind, fault.local_rank, fault.at) for fault in machine.report().faults]
    assert kinds == [(FaultKind.EARLY_EXIT, 1, 3.0), (FaultKind.PEER_LOST, 0, 4.0)]


def test_one_that_was_done_is_not_blamed_for_another_ones_own_error() -> None:
    machine = check(
        *RUNNING, (ended(1, DONE), "say running"), (ended(0, CRASHED), "kill, say faulted")
    )
    assert [fault.local_rank for fault in machine.report().faults] == [0]


@pytest.mark.parametrize(
    ("before", "orders", "code"),
    [
        ((), "kill, say shutdown", 143),
        (RUNNING, "signal 15, say shutdown", 143),
        ((*RUNNING, (ended(0, DONE), "say running"), (ended(1, DONE), "say completed")),
         "kill, say shutdown", 0),
        (READY_AGAIN[:5], "kill, say shutdown", 143),
    ],
)  # fmt: skip
def test_a_signal_to_the_agent_ends_it(before: tuple[Step, ...], orders: str, code: int) -> None:
    machine = check(*before, (Terminated(15), orders), (Terminated(2), ""))
    if before == RUNNING:
        assert machine.deadline() == 18.0
        assert machine.step(Tick(), 18.0) == [KillAll()]
    assert not machine.report().has_ended
    last = machine.step(NothingLives(), 20.0)
    assert last == [Exit(code), Publish(machine.report())]
    assert machine.report().has_ended


def test_shutdown_asks_the_workers_whatever_the_stop_signal_is() -> None:
    check(
        *RUNNING,
        (Commanded(ShutdownCommand()), "signal 15, say shutdown"),
        (Commanded(ShutdownCommand()), ""),
        (ended(0, WorkerEnd(signal=15)), "say shutdown"),
        (ended(1, WorkerEnd(exit_code=1)), "kill, say shutdown"),
        (NothingLives(), "exit 0, say shutdown"),
    )


def test_what_is_told_of_an_attempt_that_is_over_is_passed_over() -> None:
    check(
        *READY_AGAIN,
        (ended(0, KILLED), ""),
        (started(), ""),
        (FirstOutput(0, 0), ""),
        (RecurringLine(0, 0, 1.0), ""),
        (start(1), "spawn train 1, port, say running"),
        (ended(0, KILLED), ""),
        (SpawnFailed(0, ProgramStage.TRAIN, 0, "late"), ""),
    )


EVENTS = st.one_of(
    st.builds(start, st.integers(0, 3)),
    st.builds(stop, st.integers(0, 3) | st.none(), is_graceful=st.booleans()),
    st.builds(started, st.integers(0, 3), st.sampled_from(ProgramStage)),
    st.builds(
        ended,
        st.integers(0, 1),
        st.sampled_from([KILLED, CRASHED, DONE, RESET]),
        st.integers(0, 3),
        st.sampled_from(ProgramStage),
    ),
    st.just(NothingLives()),
    st.just(Tick()),
    st.just(Commanded(ShutdownCommand())),
)


@given(st.lists(EVENTS, max_size=60), st.sampled_from([SETTINGS, GENTLE, STAGES]))
def test_no_order_of_events_starts_an_attempt_twice_or_out_of_turn(
    events: list[AgentEvent], settings: Settings
) -> None:
    machine = Workers(settings)
    machine.step(Prepared(), 0.0)
    stopped, spawned = -1, set[tuple[int, ProgramStage]]()
    for second, event in enumerate(events, 1):
        effects = machine.step(event, float(second))
        match event:
            case Commanded(StopCommand(attempt=attempt)) if attempt is not None:
                stopped = max(stopped, attempt)
            case Commanded(StopCommand()):
                spawned.clear()
        for effect in effects:
            if isinstance(effect, Spawn):
                key = (effect.command.attempt, effect.stage)
                assert effect.command.attempt > stopped
                assert key not in spawned
                spawned.add(key)
        report = machine.report()
        if report.state is AgentState.READY:
            assert (report.workers, report.attempt, machine.deadline()) == ((), None, None)


def test_after_a_strangers_stop_nothing_older_starts() -> None:
    machine = check(
        (start(5), "spawn train 5, port, say running"),
        (stop(None), "kill, say stopping"),
        (NothingLives(), "say ready"),
        (start(4), ""),
        (start(5), "spawn train 5, port, say running"),
    )
    assert machine.report().attempt == 5


def test_nobody_is_ready_before_the_end_of_each_worker_was_told() -> None:
    check(
        *RUNNING,
        (stop(), "kill, say stopping"),
        (ended(0, KILLED), "say stopping"),
        (NothingLives(), ""),
        (ended(1, KILLED), "say stopping"),
        (NothingLives(), "say ready"),
    )


def test_a_doubled_end_changes_nothing() -> None:
    machine = check(
        *RUNNING,
        (ended(0, KILLED), "kill, say faulted"),
        (ended(0, KILLED), ""),
        (ended(0, CRASHED), ""),
    )
    assert len(machine.report().faults) == 1


def violated(kind: Violation, rank: int | None = None, *, is_decisive: bool = True) -> RuleViolated:
    return RuleViolated("loss", kind, 2.5, "why", rank, line="loss=9", is_decisive=is_decisive)


def rules_read(*found: RuleViolated, attempt: int = 0) -> AgentEvent:
    return RulesRead(attempt, (RuleView("loss", RuleState.HANGING, "node"),), found)


def test_a_broken_rule_is_a_fault_and_lets_the_workers_run() -> None:
    machine = check(
        *RUNNING,
        (rules_read(violated(Violation.HANG, 1), violated(Violation.SLOW)), "say faulted"),
        (rules_read(violated(Violation.FAULT)), ""),
        (ended(0, CRASHED), "say faulted"),
        (stop(), "kill, say stopping"),
    )
    report = machine.report()
    assert [view.name for view in report.log_rules] == ["loss"]
    hang, slow, crash = report.faults
    assert (hang.kind, hang.local_rank, hang.pid, hang.at) == (FaultKind.LOG_RULE, 1, 101, 2.5)
    assert (hang.message, hang.lines) == ("LogHang_loss: why", ("loss=9",))
    assert (slow.rank, slow.pid) == (0, 0), "no worker can be named"
    broken = [(fault.rule, fault.violation) for fault in report.faults]
    assert broken == [("loss", Violation.HANG), ("loss", Violation.SLOW), ("", None)]
    assert crash.kind is FaultKind.EXIT_CODE


def test_the_reason_is_the_first_broken_rule() -> None:
    report = check(*RUNNING, (rules_read(violated(Violation.FAULT, 0)), "say faulted")).report()
    assert report.reason == "LogFault_loss"
    assert report.message == "LogFault_loss: why; newest match: loss=9"


@pytest.mark.parametrize(
    "event",
    [
        rules_read(),
        rules_read(violated(Violation.HANG, is_decisive=False)),
    ],
)
def test_what_one_node_cannot_decide_is_only_told(event: AgentEvent) -> None:
    report = check(*RUNNING, (event, "say running")).report()
    assert (report.faults, report.log_rules[0].state) == ((), RuleState.HANGING)


def test_rules_of_another_attempt_are_passed_over() -> None:
    check(*RUNNING, (rules_read(violated(Violation.HANG), attempt=1), ""))
