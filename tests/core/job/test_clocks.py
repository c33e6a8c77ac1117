"""Agents whose clocks are wrong: their times are read by the operator's clock."""

from __future__ import annotations

import pytest

from tests.core.job.drive_job import running
from unbroken.core.job.clocks import AgentClock, translated
from unbroken.core.job.events import AgentReported, PodUid
from unbroken.wire.agent import AgentReport, AgentState, FaultKind, WorkerFault, WorkerReport
from unbroken.wire.observation import Alarm, RankWatch


def report(step_at: float, agent: str = "a") -> AgentReport:
    return AgentReport(agent, AgentState.RUNNING, watch=(RankWatch(0, step=1, step_at=step_at),))


def clock(behind: float, *, each: float = 1.0) -> AgentClock:
    """Return the clock of an agent that is so far behind, after reports of ten steps."""
    found = AgentClock()
    for number in range(10):
        now = 1000.0 + each * number
        found.hear(report(now - 0.5 - behind), now)
    return found


@pytest.mark.parametrize(("behind", "correction"), [
    (0.0, 0.0), (-3.0, 0.0), (8.0, 0.0), (180.0, 180.0), (-28_800.0, -28_800.0),
])  # fmt: skip
def test_a_clock_that_is_far_off_is_corrected(behind: float, correction: float) -> None:
    assert clock(behind).correction == pytest.approx(correction, abs=1.0)


def test_an_old_step_says_nothing_about_a_clock() -> None:
    found = AgentClock()
    found.hear(report(700.0), 1000.0)
    found.hear(report(700.0), 1001.0)
    assert found.correction == 0.0
    assert clock(180.0, each=6.0).correction == 0.0, "the step may be as old as the report before"


def test_a_new_process_has_a_clock_of_its_own() -> None:
    found = clock(180.0)
    found.hear(report(1020.0, "b"), 1020.0)
    assert found.correction == 0.0


def test_all_times_are_translated() -> None:
    fault = WorkerFault(FaultKind.EXIT_CODE, 0, 0, 7, 100.0)
    watch = RankWatch(0, step_at=90.0, late_since=91.0, alarms=(Alarm("silent", 92.0, 93.0, "x"),))
    worker = WorkerReport(0, 0, 7, "failed", 50.0, ended_at=100.0)
    found = translated(
        AgentReport("a", AgentState.FAULTED, faults=(fault,), watch=(watch,), workers=(worker,)),
        1000.0,
    )
    assert found.faults[0].at == 1100.0
    assert (found.watch[0].step_at, found.watch[0].late_since) == (1090.0, 1091.0)
    assert (found.watch[0].alarms[0].since, found.watch[0].alarms[0].at) == (1092.0, 1093.0)
    assert (found.workers[0].started_at, found.workers[0].ended_at) == (1050.0, 1100.0)
    assert found.watch[0].sign_at is None


def test_the_first_of_two_errors_is_named_though_the_clock_of_the_second_is_behind() -> None:
    script = running()

    def tell(pod: str, now: float, behind: float, *faults: WorkerFault) -> None:
        state = AgentState.FAULTED if faults else AgentState.RUNNING
        rank = int(pod[2:])
        told = AgentReport(
            f"{pod}.a", state, newest_attempt=0, attempt=0, rank=rank, nproc=1, faults=faults,
            watch=(RankWatch(rank, step=int(now), step_at=now - behind),),
        )  # fmt: skip
        script.give(AgentReported(PodUid(f"{pod}.0"), told), now)

    for now in range(10, 20):
        tell("w-0", float(now), 180.0)
        tell("w-1", float(now), 0.0)
    late = WorkerFault(FaultKind.EXIT_CODE, 0, 0, 7, 25.0 - 180.0, exit_code=1)
    script.run("20 tick")
    script.job.steps(
        (
            AgentReported(
                PodUid("w-0.0"),
                AgentReport("w-0.a", AgentState.FAULTED, newest_attempt=0, attempt=0, rank=0,
                            nproc=1, faults=(late,)),
            ),
            AgentReported(
                PodUid("w-1.0"),
                AgentReport("w-1.a", AgentState.FAULTED, newest_attempt=0, attempt=0, rank=1,
                            nproc=1,
                            faults=(WorkerFault(FaultKind.EXIT_CODE, 0, 1, 7, 22.0, exit_code=1),)),
            ),
        ),
        26.0,
    )  # fmt: skip
    assert script.job.state.incidents.open is not None
    assert script.job.state.incidents.open.culprit.pod == "j-w-1"
