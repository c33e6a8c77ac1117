"""The look at all ranks before a suspected hang is taken for a fault."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.core.job.drive_job import Script
from tests.core.job.watch.drive_watch import IN_DATA, WatchedJob, ill, looked, shown, well
from unbroken.core.job.events import AgentReported, AskAgent, EvidenceReceived, JobEffect, PodUid
from unbroken.core.job.recovery.recovery import is_hang
from unbroken.core.job.watch.examination import DISMISSED, EXAMINE_SECONDS
from unbroken.core.job.watch.unreached import GRACE_SECONDS
from unbroken.core.patience import BLIND
from unbroken.spec.job.detectors import Detector
from unbroken.wire.agent import (
    AgentReport,
    AgentState,
    FaultKind,
    RuleState,
    RuleView,
    Violation,
    WorkerFault,
)
from unbroken.wire.observation import CollectCommand, Evidence, RankWatch

SILENT, STOPPED, STUCK = Detector.SILENT, Detector.STOPPED, Detector.STUCK
STOP = "stop w-0 in 0 keep, stop w-1 in 0 keep, incident 1 open"
WAITS = EXAMINE_SECONDS + GRACE_SECONDS


def questions(effects: list[JobEffect]) -> list[CollectCommand]:
    """Return the questions to agents."""
    asked = [one.request for one in effects if isinstance(one, AskAgent)]
    return [one for one in asked if isinstance(one, CollectCommand)]


def silent(modes: str = "", allowed: float = 10.0) -> WatchedJob:
    """Return a job whose two ranks have been silent since 10, and are looked at since 30."""
    job = WatchedJob(modes=modes)
    job.tell("w-1", 10, well(1, 10))
    job.tell("w-0", 10, well(0, 10))
    job.tell("w-0", 30, ill(0, SILENT, 10, allowed))
    assert job.tell("w-1", 30, ill(1, SILENT, 10, allowed)) == "look w-0, look w-1"
    return job


def test_the_rank_that_keeps_the_others_waiting_is_the_culprit() -> None:
    job = silent()
    assert job.answer("w-0", 31, looked(0)) == ""
    assert job.answer("w-1", 32, looked(1, IN_DATA)) == "", "one look is not certain"
    assert job.job.deadline() == 37
    job.tick(37)
    job.answer("w-0", 38, looked(0))
    assert job.answer("w-1", 38, looked(1, IN_DATA)) == STOP
    found = job.incidents[1]
    culprit = found.culprit
    assert (culprit.fault, culprit.rank, culprit.pod, culprit.node) == ("Stalled", 1, "j-w-1", "n1")
    assert culprit.evidence[:2] == IN_DATA[:2]
    assert culprit.step == 10
    assert "get_batch" in found.blame
    assert found.confidence == "certain"
    assert [group.ranks for group in found.groups] == ["1", "0"]
    assert (found.detected_at, found.examined_at) == (37, 38)
    assert (found.step, found.progress_before, found.step_seconds) == (10, 10, 1.0)
    assert job.condition.reason == "Stalled"
    assert job.record(SILENT) == (1, 0)


def test_an_agent_that_does_not_answer_is_left_out_when_the_time_is_over() -> None:
    job = silent()
    job.answer("w-1", 31, replace(looked(1, IN_DATA), state="T"))
    assert job.job.deadline() == 30 + WAITS
    assert job.tick(30 + WAITS) == STOP
    assert job.incidents[1].blame.endswith("rank 0 could not be examined")


def test_ranks_that_only_wait_for_each_other_are_given_time_for_a_link_that_flaps() -> None:
    job = silent()
    job.answer("w-0", 31, looked(0))
    assert job.answer("w-1", 32, looked(1)) == ""
    (told,) = job.told(DISMISSED)
    assert "waiting longer: no rank is behind" in told
    assert job.job.deadline() == 54, "22 s of silence, and as many more"
    job.tick(54)
    job.answer("w-0", 55, looked(0))
    assert job.answer("w-1", 55, looked(1)) == ""
    assert job.job.deadline() == 70, "60 s of silence"
    job.tick(70)
    job.answer("w-0", 71, looked(0))
    assert job.answer("w-1", 71, looked(1)) == STOP
    assert job.incidents[1].culprit.rank is None
    assert job.incidents[1].confidence == "unsure"


def test_without_any_evidence_the_silence_is_a_fault_of_nobody() -> None:
    job = silent()
    assert job.tick(30 + WAITS) == ""
    assert job.job.deadline() == 30 + WAITS + 10
    assert job.tick(45) == "look w-0, look w-1"
    assert job.tick(45 + WAITS) == "", "twice the time for who did not answer"
    due = 45 + 2 * EXAMINE_SECONDS + GRACE_SECONDS
    while job.tick(due) != STOP:
        assert job.incidents == {}
        due = job.job.deadline() or 0.0
    assert 10 + BLIND.seconds <= due < 10 + BLIND.seconds + 25
    found = job.incidents[1]
    assert (found.culprit.rank, found.culprit.pod, found.examined_at) == (None, "", None)


def test_an_answer_to_another_question_is_none() -> None:
    job = silent()
    asked = questions(job.effects)[0]
    for request, attempt in ((asked.request - 1, 0), (asked.request, 1)):
        for uid in ("w-0.0", "w-1.0"):
            evidence = Evidence(request, attempt, "a", 31.0)
            assert job.give(EvidenceReceived(PodUid(uid), evidence), 31) == []
    job.answer("w-0", 31, looked(0))
    assert job.answer("w-0", 31, looked(0)) == "", "twice the same is one answer"


def test_a_silence_with_work_is_dismissed_and_looked_at_again_when_it_has_doubled() -> None:
    job = silent()
    job.answer("w-0", 31, looked(0))
    busy = replace(looked(1, IN_DATA), is_same=False)
    assert job.answer("w-1", 32, busy) == ""
    assert len(job.told(DISMISSED)) == 1
    assert job.job.deadline() == 54, "22 s of silence, and as many more"
    assert job.tick(53) == ""
    assert job.tick(54) == "look w-0, look w-1"
    job.answer("w-0", 55, looked(0))
    job.answer("w-1", 55, busy)
    assert len(job.told(DISMISSED)) == 1, "told once in an episode"
    job.tell("w-1", 60, well(1, 60))
    assert job.job.deadline() is None
    assert job.record(SILENT) == (0, 1)
    assert job.incidents == {}


def test_a_job_that_goes_on_during_the_look_is_left_alone() -> None:
    job = silent()
    job.answer("w-0", 31, looked(0))
    job.tell("w-1", 31, well(1, 31))
    assert job.answer("w-1", 32, looked(1, IN_DATA)) == ""
    assert job.told(DISMISSED) == []


SPIN = ("step (train.py:9)",)


def test_a_rank_that_spins_is_looked_at_thrice_and_given_more_time_than_one_that_waits() -> None:
    job = silent()
    for at in (30, 41, 52):
        job.tick(at)
        assert job.answer("w-0", at + 1, looked(0)) == ""
        assert job.incidents == {}
        said = job.answer("w-1", at + 1, looked(1, SPIN, "R", 1.0))
        assert said == STOP or job.job.deadline() == at + 11
    assert said == STOP
    assert job.incidents[1].culprit.fault == "Spinning"


def test_looks_of_two_silences_that_follow_in_one_report_are_not_counted_together() -> None:
    job = silent()
    for at in (30, 41):
        job.tick(at)
        job.answer("w-0", at + 1, looked(0))
        assert job.answer("w-1", at + 1, looked(1, SPIN, "R", 1.0)) == ""
    # The ranks made a step at 44; no report shows the time before the next alarm.
    job.tell("w-0", 60, ill(0, SILENT, 44))
    assert job.tell("w-1", 60, ill(1, SILENT, 44)) == "", "both are asked already"
    assert job.record(SILENT) == (0, 1)
    for at in (60, 71, 82):
        job.tick(at)
        job.answer("w-0", at + 1, looked(0))
        assert job.incidents == {}
        said = job.answer("w-1", at + 1, looked(1, SPIN, "R", 1.0))
    assert said == STOP
    assert "for 39 s" in job.incidents[1].culprit.text


def test_a_look_that_a_step_has_overtaken_says_nothing_of_the_next_silence() -> None:
    job = silent()
    job.answer("w-0", 31, looked(0))
    assert job.tell("w-0", 50, ill(0, SILENT, 31.5)) == "look w-0, look w-1"
    assert job.answer("w-1", 51, looked(1, IN_DATA)) == ""
    assert job.job.deadline() == 50 + WAITS
    assert len(questions(job.effects)) == 4


def test_a_rank_that_is_seen_elsewhere_once_does_not_spin() -> None:
    job = silent()
    for at, is_same in ((30, True), (41, True), (52, False), (96, True), (107, True)):
        job.tick(at)
        job.answer("w-0", at + 1, looked(0))
        seen = replace(looked(1, SPIN, "R", 1.0), is_same=is_same)
        assert job.answer("w-1", at + 1, seen) == ""
    job.tick(118)
    job.answer("w-0", 119, looked(0))
    assert job.answer("w-1", 119, looked(1, SPIN, "R", 1.0)) == STOP


def test_a_crash_does_not_wait_for_the_look_and_takes_along_what_it_has_shown() -> None:
    job = WatchedJob(3)
    for at, rank in ((20, 0), (20, 1), (21, 2)):
        job.tell(f"w-{rank}", at, ill(rank, SILENT, 10))
    job.answer("w-0", 22, looked(0))
    job.answer("w-1", 22, looked(1, IN_DATA))
    job.run("""
        23 failed w-2 0 kind=PeerLost at=23 rank=2 -> stop w-0 w-1 w-2 in 0 keep, status Faulted 1,
            event Faulted, incident 1 open, ledger
    """)
    found = job.incidents[1]
    assert (found.culprit.fault, found.culprit.rank) == ("Stalled", 1)
    assert [signal.fault for signal in found.signals] == ["Stalled", "PeerLost"]
    assert (found.detected_at, found.examined_at) == (20, 23)
    assert job.answer("w-2", 23.5, looked(2)) == ""


def test_a_crash_beside_a_silence_of_nobody_is_the_cause() -> None:
    job = silent()
    job.run("""
        31 failed w-0 0 at=31 rank=0 -> stop w-0 w-1 in 0 keep, status Faulted 1, event Faulted,
            incident 1 open, ledger
    """)
    assert job.incidents[1].culprit.fault == "ExitCode"


def test_a_lost_agent_does_not_wait_for_the_look() -> None:
    job = silent()
    job.run("""
        31 lost w-1 -> stop w-0 w-1 in 0 keep, status Faulted 1, event Faulted, incident 1 open,
            ledger
    """)


def test_a_lost_spare_changes_nothing_about_it() -> None:
    job = WatchedJob(spares=1)
    job.tell("w-0", 20, ill(0, STOPPED, 19))
    job.run("21 lost w-2 ->")
    assert job.job.deadline() == 20 + WAITS


def test_a_person_who_restarts_the_job_ends_the_look_and_nobody_is_blamed() -> None:
    job = silent()
    job.run("""
        31 job restart=31 -> stop w-0 w-1 in 0 gently, status Faulted 1, event Faulted,
            incident 1 open
    """)
    assert [s.fault for s in job.incidents[1].signals] == ["RestartRequested"]
    assert job.record(SILENT) == (0, 0)


def test_a_suspension_ends_the_look() -> None:
    job = silent()
    job.run("31 job suspend=yes -> stop w-0 w-1 in 0 gently")
    assert job.answer("w-0", 31.5, looked(0)) == ""
    assert job.incidents == {}


def test_a_stopped_rank_is_certain_and_its_place_is_kept() -> None:
    job = WatchedJob()
    job.tell("w-1", 20, ill(1, STOPPED, 19))
    job.answer("w-0", 21, looked(0))
    assert job.answer("w-1", 21, looked(1, IN_DATA, "T")) == STOP
    found = job.incidents[1]
    assert (found.culprit.fault, found.culprit.rank, found.confidence) == ("Stopped", 1, "certain")
    assert found.culprit.evidence == IN_DATA
    assert job.record(STOPPED) == (1, 0)


def test_a_stop_that_was_continued_is_dismissed_and_a_new_one_is_not() -> None:
    job = WatchedJob()
    job.tell("w-1", 20, ill(1, STOPPED, 19))
    job.answer("w-0", 21, looked(0))
    assert job.answer("w-1", 21, looked(1)) == ""
    assert job.tick(40) == "", "not asked again for the same stop"
    job.tell("w-1", 41, well(1, 41))
    assert job.record(STOPPED) == (0, 1)
    assert job.tell("w-1", 50, ill(1, STOPPED, 49)) == "look w-0, look w-1"


def test_an_answer_from_before_a_stop_does_not_dismiss_it() -> None:
    job = silent()
    job.answer("w-1", 31, looked(1))
    job.tell("w-1", 33, ill(1, STOPPED, 32.5))
    assert job.answer("w-0", 33.5, looked(0)) == "look w-0, look w-1", "the stop has its own look"
    job.answer("w-0", 35, looked(0))
    assert job.answer("w-1", 35, looked(1, IN_DATA, "T")) == STOP
    assert job.incidents[1].culprit.fault == "Stopped"


def test_a_stop_that_was_continued_before_its_own_look_is_dismissed() -> None:
    job = silent()
    job.answer("w-1", 31, looked(1))
    job.tell("w-1", 33, ill(1, STOPPED, 32.5))
    job.answer("w-0", 33.5, looked(0))
    job.answer("w-0", 35, looked(0))
    assert job.answer("w-1", 35, looked(1)) == ""
    assert job.tick(36) == ""


def test_a_rank_stuck_in_the_kernel_is_stopped_only_where_that_may_act() -> None:
    job = WatchedJob(modes="stuck=act")
    job.tell("w-1", 20, ill(1, STUCK, 5))
    job.answer("w-0", 21, looked(0))
    assert job.answer("w-1", 21, looked(1, IN_DATA, "D")) == STOP
    assert job.incidents[1].culprit.fault == "Stuck"


def test_a_process_that_cannot_be_killed_is_left_behind_with_its_pod() -> None:
    job = WatchedJob(modes="stuck=act")
    job.tell("w-1", 20, ill(1, STUCK, 5))
    job.answer("w-0", 21, looked(0))
    job.answer("w-1", 21, looked(1, IN_DATA, "D"))
    job.run("""
        22 ready w-0 0
        23 stopping w-1 0
        81 tick -> stop w-1 in 0 keep, delete w-1, status Faulted 1, incident 1 open
    """)
    assert job.incidents[1].remedy.value == "pod"


HANGING = RuleView("loss", RuleState.HANGING, "some", 3, last_match_at=5.0, last_rank=0)


def hang(job: WatchedJob, pod: str, at: float) -> str:
    """Report that the agent no longer sees the pattern of the rule `loss`."""
    report = replace(job.report(f"runs {pod} 0"), log_rules=(HANGING,))
    return shown(job.give(AgentReported(PodUid(f"{pod}.0"), report), at))


def test_a_log_rule_keeps_its_name_and_gets_the_rank_that_hangs() -> None:
    job = WatchedJob()
    hang(job, "w-0", 60)
    assert hang(job, "w-1", 60) == "look w-0, look w-1"
    job.answer("w-0", 61, looked(0))
    assert job.answer("w-1", 61, looked(1, IN_DATA)) == STOP
    assert job.condition.reason == "LogHang_loss"
    culprit = job.incidents[1].culprit
    assert (culprit.fault, culprit.rank, culprit.pod) == ("LogRule", 1, "j-w-1")


def test_a_log_rule_is_not_dismissed_whatever_the_ranks_do() -> None:
    job = WatchedJob()
    hang(job, "w-0", 60)
    hang(job, "w-1", 60)
    job.answer("w-0", 61, replace(looked(0, IN_DATA), is_same=False))
    assert job.answer("w-1", 61, replace(looked(1, IN_DATA), is_same=False)) == STOP
    assert job.condition.reason == "LogHang_loss"
    assert job.incidents[1].culprit.rank == 0, "the rule's own rank, as nobody differs"


def broken_rule(violation: Violation, rank: int = 0, at: float = 0.0) -> WorkerFault:
    """Return the fault of a rule whose message says something else."""
    rule = (FaultKind.LOG_RULE, 0, rank, 7, at)
    return WorkerFault(*rule, message="LogFault_y: text", rule="x", violation=violation)


def rule_fault(job: Script, pod: str, violation: Violation, at: float) -> str:
    """Report a broken rule; the agent lets its workers run."""
    fault = broken_rule(violation, int(pod[-1]), at)
    report = replace(job.report(f"failed {pod} 0"), faults=(fault,))
    return shown(job.give(AgentReported(PodUid(f"{pod}.0"), report), at))


def test_a_rule_of_one_node_that_hangs_is_looked_into_and_one_that_failed_is_not() -> None:
    job = WatchedJob()
    assert rule_fault(job, "w-1", Violation.HANG, 20) == "look w-0, look w-1"
    assert rule_fault(job, "w-1", Violation.HANG, 21) == ""
    assert job.tick(20 + WAITS) == STOP
    assert job.condition.reason == "LogHang_x"
    job = WatchedJob()
    assert rule_fault(job, "w-1", Violation.FAULT, 20) == STOP


def test_a_hang_is_only_what_hangs_altogether() -> None:
    hangs, faulty = broken_rule(Violation.SLOW), broken_rule(Violation.FAULT)
    crash = WorkerFault(FaultKind.EXIT_CODE, 0, 0, 1, 0.0)
    report = AgentReport("a", AgentState.FAULTED)
    assert is_hang(replace(report, faults=(hangs,)))
    assert not is_hang(replace(report, faults=(hangs, crash)))
    assert not is_hang(replace(report, faults=(hangs, faulty)))
    assert not is_hang(report)


def test_a_stock_agent_is_not_asked() -> None:
    job = WatchedJob()
    stock = AgentReport("stock", AgentState.RUNNING)
    job.job.state.roster.members[PodUid("w-0.0")].report = stock
    assert job.tell("w-1", 20, ill(1, STOPPED, 19)) == "look w-1"


def test_a_new_operator_begins_the_look_anew() -> None:
    job = silent()
    job.run("30 pod w-0 phase=Running\n30 pod w-1 phase=Running")
    new = job.successor(33)
    new.run("33 synced")
    effects = []
    for pod, rank in (("w-0", 0), ("w-1", 1)):
        report = replace(job.agents[pod], rank=rank)
        effects += new.give(AgentReported(PodUid(f"{pod}.0"), report), 34)
    requests = {one.request for one in questions(effects)}
    assert len(requests) == 1
    assert requests != {one.request for one in questions(job.effects)}


def test_after_a_fault_of_a_job_with_steps_only_a_step_is_progress() -> None:
    job = silent()
    job.tick(30 + WAITS)
    job.run("36 ready w-0 0\n36 ready w-1 0")
    job.run_ordered(37)
    job.run("38 runs w-0 1 output=38 -> ")
    assert job.incidents[1].outcome == ""
    job.tell("w-0", 45, replace(well(0, 44.5), step=30, first_step=7), attempt=1)
    found = job.incidents[1]
    assert (found.outcome, found.progress_at, found.resumed_step) == ("recovered", 44.5, 7)


def test_training_resumed_with_the_first_step_and_not_with_the_first_look_at_one() -> None:
    job = silent()
    job.tick(30 + WAITS)
    job.run("36 ready w-0 0\n36 ready w-1 0")
    job.run_ordered(37)
    seen = replace(well(0, 38.9), step=200, first_step=7, first_step_at=38.1)
    job.tell("w-0", 39, seen, attempt=1)
    found = job.incidents[1]
    assert (found.outcome, found.progress_at, found.resumed_step) == ("recovered", 38.1, 7)


def stepless(at: float) -> RankWatch:
    """Return a rank that reports no steps; its last sign of life was seen then."""
    return replace(well(0, at), step=None, step_at=None)


@pytest.mark.parametrize(
    ("fault", "before"),
    [
        ("21 failed w-1 0 at=21", 21),
        ("25 failed w-1 0 at=22.9", 22.9),
        ("59 failed w-1 0 at=59", 59),
        ("21 failed w-1 0 at=5", 20),
        ("21 failed w-1 0 at=21 kind=PeerLost", 20),
        ("21 gone w-1", 20),
    ],
)
def test_a_worker_that_was_not_late_has_trained_until_its_end(fault: str, before: float) -> None:
    job = WatchedJob()
    job.tell("w-0", 20, stepless(20))
    job.run(fault)
    assert job.incidents[1].progress_before == before


def test_a_worker_that_was_late_had_trained_until_its_last_sign() -> None:
    job = WatchedJob()
    job.tell("w-0", 50, replace(stepless(20), late_since=20.0))
    job.run("59 failed w-1 0 at=59")
    assert job.incidents[1].progress_before == 20


def test_with_steps_the_newest_step_is_the_last_progress() -> None:
    job = WatchedJob()
    job.tell("w-0", 20, well(0, 20))
    job.run("21 failed w-1 0 at=21")
    assert job.incidents[1].progress_before == 20


def test_a_job_without_steps_makes_progress_with_a_line_that_recurs() -> None:
    job = WatchedJob()
    job.tell("w-0", 20, stepless(20))
    job.run("21 failed w-1 0 at=21\n22 ready w-0 0\n22 ready w-1 0")
    job.run_ordered(23)
    job.run("24 runs w-0 1 output=24 ->\n30 runs w-0 1 output=24 trains=29.5")
    found = job.incidents[1]
    assert (found.step, found.progress_before, found.progress_at) == (None, 21, 29.5)
    assert found.first_output_at == 24


def stopped_after(job: WatchedJob, attempt: int, since: float, step: int) -> float:
    """Let both ranks be silent in the same place; return the silence until the job is stopped."""
    for at, alarmed in ((since, False), (since + 20, True)):
        for rank, pod in enumerate(("w-0", "w-1")):
            watch = ill(rank, SILENT, since) if alarmed else well(rank, since)
            job.tell(pod, at, replace(watch, step=step), attempt=attempt)
    at = since + 21
    while not (said := job.answer("w-0", at, looked(0)) + job.answer("w-1", at, looked(1))):
        due = job.job.deadline()
        assert due is not None
        at = due + 1
        job.tick(due)
    assert "stop w-0" in said
    return at - since


def restarted(job: WatchedJob, attempt: int, at: float) -> None:
    for pod in ("w-0", "w-1"):
        job.run(f"{at} ready {pod} {attempt}")
    job.run_ordered(at + 1)


def test_a_pause_that_comes_again_after_each_restart_is_given_eight_times_as_long() -> None:
    job = WatchedJob()
    seconds = []
    for attempt, since in enumerate((10, 500, 5200)):
        seconds.append(stopped_after(job, attempt, since, step=10))
        restarted(job, attempt, since + seconds[-1] + 5)
    assert seconds == [61, 481, 3841]


def test_a_silence_after_another_step_is_no_pause_that_comes_again() -> None:
    job = WatchedJob()
    assert stopped_after(job, 0, 10, step=10) == 61
    restarted(job, 0, 75)
    assert stopped_after(job, 1, 200, step=77) == 61
