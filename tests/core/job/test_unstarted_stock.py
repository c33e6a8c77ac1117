"""HyperPod's agent whose workers end, or take too long, before they have a rank.

It reports a fault if all of its workers were at the barrier before, and else stays in INIT. These
are its statuses as it gives them (agent 1.1.3; tests/interop has the real one).
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.core.job.drive_job import Script, begun, running
from unbroken.core.job.events import AgentReported, PodHeld, PodPhase, PodSeen, StartWorkers
from unbroken.core.job.obstacles import AGENT_SHARED, split_wait
from unbroken.spec.job.detectors import read_detectors
from unbroken.spec.job.incident import Remedy
from unbroken.spec.job.types import JobOptions, LogRule, RunPolicy
from unbroken.wire.agent_bodies import report_of_status

CRASH = (
    "A training worker process has crashed:\n    Local Rank 1 exited with code -768 due to: "
    "Signal 768 (<N/A>) received by PID 15219\n"
)


def at(second: float) -> str:
    """A time as the agent writes it."""
    return f"2026-11-24T15:{int(second) // 60:02}:{second % 60:09.6f}+00:00"


def says(script: Script, pod: str, now: float, state: str, **entered: float) -> None:
    """The agent of the pod has this status; `entered`: seconds of its latest entries."""
    body = {
        "status": state,
        "transitions": {name: at(second) for name, second in entered.items()},
        "restartMode": "in_process_restart",
        "rank_labels": {},
        "agent_version": "1.1.3",
        "spare": "True",
    }
    if state == "faulted":
        body |= {"reason": "WorkerCrash", "message": CRASH}
    script.give(AgentReported(script.views[pod].uid, report_of_status(body)), now)


def test_workers_that_end_at_the_barrier_are_charged_until_the_budget_ends_the_job() -> None:
    script = begun(2, RunPolicy(job_max_retry_count=2))
    for attempt in range(3):
        began = 10.0 * attempt
        says(script, "w-0", began + 1, "init", INIT=began)
        says(script, "w-0", began + 2, "ready", INIT=began, READY=began + 1)
        says(script, "w-0", began + 3, "faulted", INIT=began, READY=began + 1, FAULTED=began + 2)
        assert len(script.incidents) == attempt + 1
        # It is polled, and stopped, which takes a while.
        says(script, "w-0", began + 4, "faulted", INIT=began, READY=began + 1, FAULTED=began + 2)
        assert len(script.incidents) == attempt + 1
    script.run("60 tick")
    told = list(script.incidents.values())
    assert [one.remedy for one in told] == [Remedy.PROCESS, Remedy.PROCESS, Remedy.FAIL]
    assert {one.culprit.fault for one in told} == {"WorkerCrash"}
    line = "before the start: A training worker process has crashed: Local Rank 1 exited with code"
    assert told[0].culprit.text.startswith(line)
    assert not [one for one in told if "\n" in one.culprit.text + one.reason]
    assert script.events.count("Faulted") == 3
    script.run("100 tick")
    assert (script.condition.type, script.condition.reason) == ("Failed", "RetriesExhausted")
    assert "Local Rank 1 exited" in script.condition.message
    assert script.status.restart_count == 2


def test_a_fault_after_a_soft_stop_is_before_the_start_too() -> None:
    body = {"status": "faulted", "transitions": {"INIT": at(0), "RUNNING": at(2), "FAULTED": at(9)}}
    assert not report_of_status(body).is_unstarted
    body["transitions"] |= {"READY": at(1)}  # type: ignore[operator]
    assert not report_of_status(body).is_unstarted
    body["transitions"] |= {"READY": at(5)}  # type: ignore[operator]
    assert report_of_status(body).is_unstarted


def test_a_start_that_came_too_late_is_not_charged_twice() -> None:
    script = begun()
    says(script, "w-0", 2, "ready", INIT=0, READY=1)
    script.run("5 tick -> start w-0=0 in 0")
    says(script, "w-0", 5.1, "faulted", INIT=0, READY=1, FAULTED=5)
    says(script, "w-0", 5.2, "faulted", INIT=0, READY=1, FAULTED=5)
    assert [one.attempt for one in script.incidents.values()] == [0]
    assert len(script.incidents[1].signals) == 1


def test_a_new_operator_charges_no_fault_that_was_charged() -> None:
    script = begun(2)
    says(script, "w-0", 2, "ready", INIT=0, READY=1)
    says(script, "w-0", 3, "faulted", INIT=0, READY=1, FAULTED=3)
    new = script.successor(5.0)
    new.run("5 synced")
    says(new, "w-0", 6, "faulted", INIT=0, READY=1, FAULTED=3)
    says(new, "w-1", 6, "ready", INIT=0, READY=1)
    new.run("17 tick")
    assert new.status.restart_count == 1
    assert set(new.incidents) <= {1}
    says(new, "w-0", 18, "init", INIT=17)
    says(new, "w-0", 19, "ready", INIT=17, READY=18)
    assert new.status.restart_count == 1
    new.run("30 tick")
    assert new.job.phase.value == "Training"


def test_a_new_operator_charges_no_fault_that_was_charged_without_an_incident() -> None:
    script = begun(2)
    says(script, "w-0", 2, "ready", INIT=0, READY=1)
    says(script, "w-0", 3, "faulted", INIT=0, READY=1, FAULTED=3)
    new = script.successor(5.0, is_incident_written=False)
    new.run("5 synced")
    says(new, "w-0", 6, "faulted", INIT=0, READY=1, FAULTED=3)
    says(new, "w-1", 6, "ready", INIT=0, READY=1)
    new.run("17 tick -> stop w-0 in 0")
    assert (new.status.restart_count, new.incidents) == (1, {})
    says(new, "w-0", 18, "init", INIT=17)
    says(new, "w-0", 19, "ready", INIT=17, READY=18)
    says(new, "w-0", 20, "faulted", INIT=17, READY=18, FAULTED=20)
    assert (new.status.restart_count, list(new.incidents)) == (2, [1]), "it failed again"


def waiting(policy: RunPolicy | None = None) -> Script:
    """A job whose two agents say INIT, and nothing more."""
    script = begun(2, policy or RunPolicy(job_max_retry_count=2))
    says(script, "w-0", 1, "init", INIT=0)
    says(script, "w-1", 2, "init", INIT=0)
    return script


def test_workers_that_do_not_come_are_told_within_half_a_minute() -> None:
    script = waiting()
    script.run("30 tick")
    assert "WorkersNotReady" not in script.events
    script.run("32 tick")
    assert script.events.count("WorkersNotReady") == 1
    assert script.condition.type == "Created"
    assert "it waits: pod j-w-0 (and 1 more): WorkersNotReady" in script.condition.message
    assert "kubectl logs j-w-0" in script.condition.message
    says(script, "w-0", 40, "ready", INIT=0, READY=39)
    says(script, "w-1", 41, "ready", INIT=0, READY=40)
    script.run("44 tick")
    assert "it waits" not in script.condition.message


def test_workers_that_never_come_cost_a_restart_each_ten_minutes_until_the_job_fails() -> None:
    script = waiting()
    script.run("600.9 tick -> status Created 0, event WorkersNotReady")
    assert not script.incidents
    script.run("601 tick -> delete w-0, status Faulted 1, event Faulted, incident 1 open")
    script.run("602 tick -> delete w-1, status Faulted 1")
    incident = script.incidents[1]
    assert (incident.remedy, incident.culprit.fault) == (Remedy.POD, "WorkersNotReady")
    for life, start in ((1, 610), (2, 1220)):
        for pod, second in (("w-0", start), ("w-1", start + 1)):
            script.run(f"{second} gone {pod}\n{second} pod {pod} uid={pod}.{life} node=n{pod[2:]}")
            says(script, pod, second + 1, "init", INIT=second)
        script.run(f"{start + 605} tick")
    assert [one.remedy.value for one in script.incidents.values()] == ["pod", "pod", "fail"]
    script.run("2000 tick")
    assert (script.condition.type, script.condition.reason) == ("Failed", "RetriesExhausted")
    assert "WorkersNotReady: not all of its workers wait" in script.condition.message
    assert script.status.restart_count == 2


@pytest.mark.parametrize(
    "policy",
    [
        RunPolicy(startup_deadline_seconds=3600),
        RunPolicy(
            log_monitoring_configuration=(
                LogRule("first", "step", expected_start_cut_off_in_seconds=3600),
            )
        ),
    ],
    ids=["deadline", "log rule"],
)
def test_rules_of_the_job_about_its_start_give_more_time(policy: RunPolicy) -> None:
    script = waiting(policy)
    script.run("700 tick -> status Created 0, event WorkersNotReady")
    assert not script.incidents


def test_the_annotation_of_detectors_turns_the_limit_off() -> None:
    script = waiting()
    script.job.state.options = JobOptions(detectors=read_detectors("silent=warn"))
    script.run("5000 tick -> status Created 0, event WorkersNotReady")
    assert script.events.count("WorkersNotReady") == 1


def test_a_new_operator_counts_the_time_anew() -> None:
    new = waiting().successor(300.0)
    new.run("300 synced")
    says(new, "w-0", 301, "init", INIT=0)
    says(new, "w-1", 301, "init", INIT=0)
    new.run("""
        330 tick ->
        602 tick -> status Created 0, event WorkersNotReady
        901 tick -> delete w-0 w-1, status Faulted 1, event Faulted, incident 1 open
    """)


def test_a_job_that_trains_does_not_wait_for_a_spare() -> None:
    script = running(1, 1)
    says(script, "w-1", 10, "init", INIT=9)
    script.run("2000 tick ->")
    assert not script.incidents


def test_a_new_process_that_no_stop_has_reached_joins_the_restart_under_way() -> None:
    script = begun(2)
    for pod in ("w-0", "w-1"):
        says(script, pod, 2, "ready", INIT=0, READY=1)
    script.run("3 lost w-1")
    says(script, "w-0", 4, "faulted", INIT=0, READY=1, FAULTED=4)
    assert script.status.restart_count == 1
    # Its agent was killed, and the workers of the next one have ended at the barrier as well.
    says(script, "w-1", 4.2, "faulted", INIT=3, READY=3.5, FAULTED=3.9)
    assert script.status.restart_count == 1
    assert [one.pod for one in script.incidents[1].signals][-1] == "j-w-1"
    # They are stopped, and what ends after that is another fault.
    script.run("5 lost w-1")
    says(script, "w-1", 6, "faulted", INIT=5, READY=5.5, FAULTED=5.9)
    assert script.status.restart_count == 2


def started(script: Script) -> list[str]:
    """Return the pods whose workers were started."""
    uids = {one.pod for one in script.effects if isinstance(one, StartWorkers)}
    return [name for name, view in script.views.items() if view.uid in uids]


def addressed(script: Script, **addresses: str) -> None:
    """Give pods these addresses."""
    for name, address in addresses.items():
        pod = name.replace("_", "-")
        script.views[pod] = replace(script.views[pod], address=address, phase=PodPhase.RUNNING)
        script.give(PodSeen(script.views[pod]), 1.0)


def test_a_pod_at_whose_address_an_agent_of_another_job_answers_says_so() -> None:
    script = begun(2)
    addressed(script, w_0="127.77.0.3", w_1="127.77.1.3")
    text = "the agent of a pod of job team/other answers at its port 8080"
    script.give(PodHeld(script.views["w-0"].uid, AGENT_SHARED, text), 2.0)
    says(script, "w-1", 2, "ready", INIT=1.5, READY=2)
    script.run("60 tick")
    assert started(script) == []
    (line,) = split_wait(script.condition.message)[1]
    assert line.startswith("pod j-w-0: AgentShared: the agent of a pod of job team/other answers")
    assert "--server-host=$(AGENT_HOST)" in line
    says(script, "w-0", 61, "ready", INIT=60, READY=61)
    script.run("62 tick")
    assert started(script) == ["w-0", "w-1"]


@pytest.mark.parametrize("host", ["127.77.0.3 127.77.1.3", "10.0.0.7 10.0.0.7"])
def test_one_agent_that_answers_for_two_pods_gets_no_ranks_until_each_has_its_own(
    host: str,
) -> None:
    script = begun(2)
    script.run("1 gone w-1\n1 pod w-1 uid=w-1.1 node=n0")
    one, other = host.split()
    addressed(script, w_0=one, w_1=other)
    for pod in ("w-0", "w-1", "w-0", "w-1"):
        says(script, pod, 2, "ready", INIT=1.5, READY=2)
    script.run("20 tick")
    assert started(script) == []
    (line,) = split_wait(script.condition.message)[1]
    assert line.startswith("pod j-w-1: AgentShared: one agent answers at its port 8080 and at that")
    assert "of pod j-w-0; give the agent of each pod the address" in line
    assert "--server-host=$(AGENT_HOST)" in line
    says(script, "w-1", 30, "ready", INIT=29, READY=29.5)
    script.run("31 tick")
    assert split_wait(script.condition.message)[1] == []
    assert started(script) == ["w-0", "w-1"]


def test_agents_of_other_machines_may_have_begun_at_the_same_moment() -> None:
    script = begun(2)
    addressed(script, w_0="10.0.0.7", w_1="10.0.0.8")
    for pod in ("w-0", "w-1"):
        says(script, pod, 2, "ready", INIT=1.5, READY=2)
    assert started(script) == ["w-0", "w-1"]
