"""Suspending, deadlines, clean-up, expiry and what cannot be created."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.core.job.drive_job import Script, running, spec
from unbroken.core.job.events import RecordEvent, StartWorkers, StopWorkers, WriteLedger
from unbroken.core.job.life import FIRST_PORT, PORTS
from unbroken.spec.job.types import RunPolicy
from unbroken.spec.keys import ConditionType

GRACE = {"w-0": True, "w-1": True}
FAILED = RunPolicy(job_max_retry_count=0)


@pytest.mark.parametrize(
    ("policy", "events", "expected"),
    [
        (None, "10 job suspend=yes", GRACE),
        (None, "10 job restart=9", GRACE),
        (None, "10 pod w-0 deleting", {"w-0": True, "w-1": False}),
        (RunPolicy(active_deadline_seconds=30), "30 tick", GRACE),
        (FAILED, "10 failed w-0 0", GRACE),
        (None, "10 failed w-0 0", {"w-0": False, "w-1": False}),
        (None, "10 failed w-0 0\n11.5 pod w-1 deleting\n12 tick",
         {"w-0": False, "w-1": True}),
    ],
    ids=("suspended", "restarted", "deleted", "deadline", "the last fault", "a fault",
         "deleted after a fault"),
)  # fmt: skip
def test_workers_have_grace_unless_a_fault_is_to_be_recovered_from(
    policy: RunPolicy | None, events: str, expected: dict[str, bool]
) -> None:
    script = Script(spec(2, policy=policy)) if policy else Script()
    script.up()
    script.run(events)
    stops = [e for e in script.effects if isinstance(e, StopWorkers)]
    newest = {stop.pod.removesuffix(".0"): stop.command.is_graceful for stop in stops}
    assert newest == expected


def test_the_time_before_a_suspension_is_kept_once_over_operators() -> None:
    script = running()
    script.run("8 runs w-0 0 trains=7\n9 runs w-1 0 trains=6\n10 job suspend=yes")
    script.run("10.2 ready w-0 0\n10.3 ready w-1 0")
    kept = script.job.state.ledger
    assert (kept.active_seconds, kept.startup_seconds) == (pytest.approx(10.3), 7)
    assert kept.progress_at is None
    written = [e.ledger for e in script.effects if isinstance(e, WriteLedger)]
    assert written[-1] == kept

    successor = script.successor(20)
    successor.run("20 job\n20 synced\n21 tick")
    assert not [e for e in successor.effects if isinstance(e, WriteLedger)]


def test_why_a_pod_does_not_come_up_is_said_once_in_an_event_and_once_at_the_end() -> None:
    script = Script(spec(1, policy=RunPolicy(startup_deadline_seconds=30)))
    script.run("0 job\n0 synced\n1 pod w-0 why=Unschedulable says=0/2-nodes")
    *_, told = [e for e in script.effects if isinstance(e, RecordEvent)]
    assert told.reason == "Unschedulable"
    assert told.message.startswith("pod j-w-0: Unschedulable: 0/2-nodes; make room")
    assert script.condition.message.startswith("the job is created; it waits: pod j-w-0: Unsch")
    script.run("30 tick -> status Failed 0, event Failed, delete w-0")
    assert "; pod j-w-0: Unschedulable: 0/2-nodes; " in script.condition.message


@pytest.mark.parametrize("seconds", [-1, 0])
def test_job_without_expiry_is_kept(seconds: int) -> None:
    script = running(1, policy=RunPolicy(ttl_seconds_after_finished=seconds))
    script.run("10 completed w-0 0\n11 gone w-0")
    assert script.job.deadline() is None


def test_changed_replicas_are_answered_with_a_warning() -> None:
    script = running()
    script.spec = replace(script.spec, replica_specs=spec(5).replica_specs)
    script.run("10 job -> event SpecChanged")
    assert script.job.state.nnodes == 2


def test_changed_replicas_of_a_suspended_job_need_no_warning() -> None:
    script = Script(spec(1, policy=RunPolicy(suspend=True)))
    script.run("0 job\n0 synced")
    script.spec = replace(script.spec, replica_specs=spec(2).replica_specs)
    script.run("10 job ->")


def test_raised_deadline_takes_effect_at_once() -> None:
    script = running(1, policy=RunPolicy(active_deadline_seconds=50))
    script.spec = spec(1, policy=RunPolicy(active_deadline_seconds=500))
    script.run("10 job ->\n60 tick ->")


def test_created_stays_true_and_gives_the_age() -> None:
    script = running(1)
    created = script.status.conditions[0]
    assert (created.type, created.status, created.last_transition_time) == ("Created", "True", 0)
    true = [c.type for c in script.status.conditions if c.status == "True"]
    assert true == ["Created", ConditionType.RUNNING.value]


def test_ready_counts_the_pods_that_are_ready_or_train() -> None:
    script = running()

    def ready() -> str:
        found = (c.message for c in script.status.conditions if c.type == "PodsRunning")
        return next(found)

    assert ready() == "2/2"
    script.run("10 lost w-1\n10.1 ready w-0 0")
    assert ready() == "0/2"
    script.run("12 tick -> stop w-1 in 0 keep, status Faulted 1")
    assert ready() == "1/2"
    script.run("12.1 tick")
    script.run("13 gone w-1\n13.1 pod w-1 uid=w-1.1 node=n0\n13.2 ready w-1 agent=c")
    assert ready() == "2/2"
    script.run("20 job suspend=yes\n20.1 ready w-0 1\n20.2 ready w-1 1")
    assert script.condition.type == "Suspended"
    assert ready() == "0/2"


def test_when_every_port_was_used_the_first_ones_are_used_again() -> None:
    script = Script()
    ports = (29_000, *range(FIRST_PORT, FIRST_PORT + PORTS))
    script.job._life.masters |= {("10.0.0.0", port) for port in ports}
    script.up()
    [port] = {e.command.master_port for e in script.effects if isinstance(e, StartWorkers)}
    assert FIRST_PORT <= port < FIRST_PORT + PORTS
