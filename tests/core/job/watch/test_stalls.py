"""Meaning of the watchdogs' alarms for the whole job."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.core.job.drive_job import Script
from tests.core.job.watch.drive_watch import WatchedJob, alarm, ill, well
from unbroken.core.job.events import AgentReported, AskAgent, PodUid
from unbroken.core.job.watch.examination import SURVEY_SECONDS
from unbroken.core.job.watch.stalls import COMPARE_SECONDS
from unbroken.core.job.watch.unreached import GRACE_SECONDS
from unbroken.spec.job.detectors import Detector
from unbroken.wire.observation import RankWatch

SILENT, STOPPED = Detector.SILENT, Detector.STOPPED
NAN, SPIKE = Detector.NAN, Detector.SPIKE
LOOK = "look w-0, look w-1"
STOP = "stop w-0 in 0 keep, stop w-1 in 0 keep, incident 1 open"


def test_one_silent_rank_beside_others_that_go_on_is_no_hang() -> None:
    job = WatchedJob()
    job.tell("w-1", 20, well(1, 20))
    assert job.tell("w-0", 20, ill(0, SILENT, 8)) == ""
    assert job.tell("w-1", 31, ill(1, SILENT, 20)) == LOOK


def test_ranks_that_have_learned_no_rhythm_do_not_count() -> None:
    job = WatchedJob(3)
    job.tell("w-0", 20, well(0, 20, None))
    job.tell("w-2", 20, well(2, 20))
    assert job.tell("w-1", 20, ill(1, SILENT, 8)) == ""
    assert job.tell("w-2", 20, ill(2, SILENT, 8)).startswith("look")


def test_a_job_in_which_nobody_has_learned_anything_is_not_silent() -> None:
    job = WatchedJob()
    for pod, rank in (("w-0", 0), ("w-1", 1)):
        assert job.tell(pod, 500, well(rank, 5, None)) == ""


def test_a_stopped_rank_counts_alone() -> None:
    job = WatchedJob()
    job.tell("w-0", 20, well(0, 20))
    assert job.tell("w-1", 20, ill(1, STOPPED, 19)) == LOOK


def test_a_missed_checkpoint_is_a_fault_at_once_where_it_may_act() -> None:
    job = WatchedJob(modes="checkpoint=act")
    assert job.tell("w-1", 20, ill(1, Detector.CHECKPOINT, 18)) == STOP
    culprit = job.incidents[1].culprit
    assert (culprit.rank, culprit.pod, culprit.node) == (1, "j-w-1", "n1")
    assert (culprit.at, culprit.text, culprit.step) == (18, "it is checkpoint", 18)
    assert job.record(Detector.CHECKPOINT) == (1, 0)


@pytest.mark.parametrize("detector", [NAN, SPIKE])
def test_an_alarm_that_only_one_rank_has_waits_a_moment_for_the_others(detector: Detector) -> None:
    job = WatchedJob(modes=f"{detector.value}=act")
    assert job.tell("w-1", 20, ill(1, detector, 18)) == ""
    assert job.job.deadline() == 20 + COMPARE_SECONDS
    assert job.tick(20 + COMPARE_SECONDS) == STOP
    culprit = job.incidents[1].culprit
    assert (culprit.rank, culprit.pod, culprit.node) == (1, "j-w-1", "n1")
    assert (culprit.at, culprit.text, culprit.step) == (18, f"it is {detector.value}", 18)
    assert job.record(detector) == (1, 0)


def nan(rank: int, since: float, step: int | None = None) -> RankWatch:
    """Return a rank whose loss has been NaN since a step."""
    return replace(well(rank, since), alarms=(replace(alarm(NAN, since), step=step),))


@pytest.mark.parametrize("mode", ["act", "warn"])
def test_the_first_bad_step_decides_and_not_the_first_report(mode: str) -> None:
    job = WatchedJob(3, modes=f"nan={mode}")
    job.tell("w-0", 20, nan(0, 18.0, 104))
    job.tell("w-2", 20.5, nan(2, 18.0, 104))
    ordered = job.tell("w-1", 21, nan(1, 18.1, 103))
    if mode == "warn":
        told = ["rank 1: it is nan; from step 103, later on ranks 0,2"]
        assert (ordered, job.told("BadMetric")) == ("", told)
    else:
        culprit = job.incidents[1].culprit
        assert (culprit.rank, culprit.pod, culprit.step) == (1, "j-w-1", 103)
        assert culprit.text == "it is nan; from step 103, later on ranks 0,2"


def test_nobody_is_named_for_what_all_ranks_have_at_the_same_step() -> None:
    job = WatchedJob(modes="nan=act")
    job.tell("w-1", 20, nan(1, 18, 103))
    assert job.tell("w-0", 21, nan(0, 18, 103)) == STOP
    culprit = job.incidents[1].culprit
    assert (culprit.rank, culprit.pod, culprit.step) == (None, "", 103)
    assert culprit.text == "ranks 0-1: it is nan; on all of them at step 103"


def test_without_steps_moments_apart_are_the_same_time() -> None:
    job = WatchedJob(modes="nan=warn")
    job.tell("w-0", 20, nan(0, 18.7, 104))
    job.tell("w-1", 20, nan(1, 18.0))
    assert job.told("BadMetric") == ["ranks 0-1: it is nan; on all of them at the same time"]


def test_an_alarm_that_waits_goes_into_the_incident_of_what_overtakes_it() -> None:
    job = WatchedJob(modes="nan=act")
    job.tell("w-1", 20, nan(1, 18, 18))
    job.run("21 failed w-0 0")
    assert {one.fault for one in job.incidents[1].signals} == {"BadMetric", "ExitCode"}
    job.tick(20 + COMPARE_SECONDS)
    assert list(job.incidents) == [1]


def test_an_alarm_that_ends_before_it_is_judged_restarts_nothing() -> None:
    job = WatchedJob(modes="nan=act")
    job.tell("w-1", 20, nan(1, 18, 18))
    job.tell("w-1", 21, well(1, 21))
    assert job.tick(20 + COMPARE_SECONDS) == ""
    assert (job.incidents, job.record(NAN)) == ({}, (0, 1))


def test_a_job_in_which_all_steps_are_slower_is_told_and_not_restarted() -> None:
    job = WatchedJob(modes="slow=act")
    job.tell("w-0", 20, well(0, 20))
    job.tell("w-1", 20, ill(1, Detector.SLOW, 18))
    assert job.tick(20 + COMPARE_SECONDS) == "sample w-0, sample w-1"
    job.tell("w-0", 25, ill(0, Detector.SLOW, 18))
    assert job.tick(22 + SURVEY_SECONDS + GRACE_SECONDS) == ""
    assert job.told("SlowSteps") == ["all ranks: it is slow; no rank differs from the others"]
    assert job.incidents == {}


def test_a_rank_whose_steps_are_slower_than_those_of_the_others_is_named() -> None:
    job = WatchedJob(3, modes="slow=act")
    for pod, rank in (("w-0", 0), ("w-2", 2)):
        job.tell(pod, 20, well(rank, 20))
    job.tell("w-1", 20, replace(ill(1, Detector.SLOW, 18), step_seconds=2.0))
    assert job.tick(20 + COMPARE_SECONDS).startswith("stop w-0 in 0")
    culprit = job.incidents[1].culprit
    assert (culprit.rank, culprit.text) == (1, "it is slow, others 1 s")


def test_a_detector_that_may_warn_tells_once_for_all_ranks() -> None:
    job = WatchedJob(modes="nan=warn")
    job.tell("w-0", 20, ill(0, NAN, 19))
    job.tell("w-1", 20, ill(1, NAN, 19))
    job.tell("w-1", 21, ill(1, NAN, 19))
    job.tick(30)
    assert job.told("BadMetric") == ["ranks 0-1: it is nan; on all of them at the same time"]
    assert job.incidents == {}


def test_warnings_of_what_comes_and_goes_are_bounded() -> None:
    job = WatchedJob(modes="nan=warn")
    for at in range(20, 80, 2):
        job.tell("w-0", at, ill(0, NAN, at))
        job.tell("w-0", at + 1, well(0, at + 1))
    assert len(job.told("BadMetric")) == 5
    assert job.record(NAN) == (0, 30)


def test_a_silence_of_which_is_only_warned_is_not_looked_into() -> None:
    job = WatchedJob(modes="silent=warn")
    job.tell("w-1", 9, well(1, 9))
    job.tell("w-0", 20, ill(0, SILENT, 8))
    assert job.tell("w-1", 22, ill(1, SILENT, 9)) == ""
    (said,) = job.told("Stalled")
    assert said == "no sign of life from 2 ranks for 13 s, 10 s are usual at most"


def test_a_shadow_tells_nothing_and_keeps_count() -> None:
    job = WatchedJob(modes="*=shadow")
    job.tell("w-0", 20, ill(0, SILENT, 8))
    job.tell("w-1", 20, ill(1, SILENT, 8))
    job.tell("w-1", 25, well(1, 25))
    assert job.record(SILENT) == (0, 1)
    assert (job.told("Stalled"), job.incidents) == ([], {})


def test_what_is_off_keeps_no_count() -> None:
    job = WatchedJob(modes="*=off")
    job.tell("w-0", 20, ill(0, NAN, 19))
    job.tell("w-0", 21, well(0, 21))
    assert job.ledger.detectors == {}


@pytest.mark.parametrize(
    ("what", "count"),
    [("21 failed w-1 0", (1, 0)), ("21 job restart=21", (0, 0)), ("21 job suspend=yes", (0, 0))],
)
def test_an_alarm_was_right_if_a_fault_and_no_person_ended_the_attempt(
    what: str, count: tuple[int, int]
) -> None:
    job = WatchedJob(modes="nan=shadow")
    job.tell("w-0", 20, ill(0, NAN, 19))
    job.run(what)
    assert job.record(NAN) == count


def test_an_alarm_of_an_attempt_that_is_over_counts_no_more() -> None:
    job = WatchedJob(modes="nan=act; silent=act")
    job.tell("w-0", 20, ill(0, SILENT, 8))
    job.run("""
        21 failed w-1 0
        22 ready w-0 0
        22 ready w-1 0
    """)
    job.run_ordered(23)
    job.tell("w-0", 30, well(0, 30), attempt=1)
    assert job.tell("w-1", 40, ill(1, SILENT, 30), attempt=1) == ""


def test_a_new_operator_hears_the_alarms_that_stand() -> None:
    job = WatchedJob()
    job.run("5 pod w-0 phase=Running\n5 pod w-1 phase=Running")
    new = job.successor(30)
    for pod, rank in (("w-0", 0), ("w-1", 1)):
        job.tell(pod, 30, ill(rank, SILENT, 10))
    new.run("30 synced")
    looks: list[str] = []
    for pod, rank in (("w-0", 0), ("w-1", 1)):
        report = replace(job.agents[pod], rank=rank)
        new.agents[pod] = report
        looks += _looks(new, pod, 31)
    assert sorted(looks) == ["w-0.0", "w-1.0"]


def _looks(new: Script, pod: str, at: float) -> list[str]:
    effects = new.give(AgentReported(PodUid(f"{pod}.0"), new.agents[pod]), at)
    return [e.pod for e in effects if isinstance(e, AskAgent)]


def test_a_rank_that_has_ended_is_not_silent() -> None:
    job = WatchedJob()
    job.tell("w-1", 20, ill(1, SILENT, 8))
    report = replace(job.report("completed w-1 0"), watch=(ill(1, SILENT, 8),))
    job.give(AgentReported(PodUid("w-1.0"), report), 21)
    assert job.record(SILENT) == (0, 1)
    assert "w-1.0" not in [e.pod for e in job.effects if isinstance(e, AskAgent)][2:]


def test_alarms_of_detectors_that_nobody_knows_are_passed_over() -> None:
    job = WatchedJob()
    strange = replace(alarm(NAN, 19), detector="sunspots")
    assert job.tell("w-0", 20, replace(well(0, 20), alarms=(strange,))) == ""
