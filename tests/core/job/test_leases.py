"""Times at which the operator considers a silent agent's workers ended, in scripts of a job."""

from __future__ import annotations

from typing import Any

import pytest

from tests.core.job.drive_job import Script, show, spec
from unbroken.core.job.events import (
    IncidentSeen,
    LedgerWritten,
    StartWorkers,
    WriteLedger,
)
from unbroken.spec.job.types import RunPolicy

LENGTH = 8 * 1.03 + 1.5
"""Seconds from the last renewal that might have arrived until the workers have ended."""


def running(job: str = "job", lease: str = "lease=0", nodes: int = 2, at: float = 0.0) -> Script:
    """Return a job that runs its first attempt; `lease` is the last agent's report on leases."""
    script = Script(spec(nodes))
    script.run(f"{at} {job}\n{at} synced")
    names = [f"w-{number}" for number in range(nodes)]
    for name in names:
        script.run(f"{at} pod {name} node=n{name[2:]} phase=Running")
    for name in names:
        script.run(f"{at} ready {name} {lease if name == names[-1] else 'lease=0'}")
    script.run(f"{at} tick")
    for name in names:
        script.run(f"{at} runs {name} 0 {lease if name == names[-1] else 'lease=8'} unvouched=0")
    return script


def leases(script: Script) -> set[float]:
    """Return the leases of all starts."""
    return {e.command.lease_seconds for e in script.effects if isinstance(e, StartWorkers)}


def is_over_at(script: Script, at: float) -> None:
    """Assert that the lost pod is given up at that time, and not a moment before."""
    script.run(f"{at - 0.1} tick")
    assert script.job.state.gang.unclear.keys() == {"w-1.0"}
    script.run(f"{at + 0.01} tick -> delete w-1 force, incident 1 open")
    assert not script.job.state.gang.unclear
    script.run(f"{at + 1} gone w-1 -> create w-1 avoid=n1")


def test_workers_of_several_nodes_start_under_a_lease() -> None:
    assert leases(running()) == {8.0}


@pytest.mark.parametrize(("nodes", "job", "lease"), [
    (1, "job", "lease=0"),
    (2, "job fence-by=provider", "lease=0"),
    (2, "job", ""),
])  # fmt: skip
def test_no_lease_without_peers_or_where_an_agent_knows_none(
    nodes: int, job: str, lease: str
) -> None:
    assert leases(running(job, lease, nodes)) == {0.0}


def test_one_that_has_never_vouched_counts_before_those_that_became_clear_earlier() -> None:
    script = running(nodes=4)
    script.run("13 lost w-1 seconds=3")
    for number, says in ((0, ""), (2, ""), (3, "unvouched=0")):
        script.run(f"{14 + number} ready w-{number} 0 lease=8 {says}")
    is_over_at(script, 10 + LENGTH)


def given_up_and_lost_again(nodes: str, lost: float = 53.0) -> Script:
    """Return a job whose rank of node n1 was given up, and whose workers on n2 are given up, too.

    `nodes` are the reports on nodes between both, `lost` is when the second agent is lost.
    """
    script = running()
    script.run(f"""
        5 node n1 ready
        13 lost w-1 seconds=3
        14 ready w-0 0 lease=8 unvouched=0
        {10 + LENGTH} tick
        21 gone w-1 -> create w-1 avoid=n1
        {nodes}
        30 pod w-1 uid=w-1.1 node=n2
        30 pod w-1 uid=w-1.1 phase=Running
        31 ready w-1 agent=b lease=0
        32 tick
        33 runs w-0 1 lease=8 unvouched=1
        33 runs w-1 1 agent=b rank=1 lease=8 unvouched=1
        {lost} lost w-1 seconds=3
        {lost + 1} ready w-0 1 lease=8 unvouched=1
        {lost - 3 + LENGTH} tick
    """)
    return script


def test_a_node_that_was_given_up_is_used_again_once_it_is_back() -> None:
    script = given_up_and_lost_again("22 node n1 not-ready\n25 node n1 ready")
    script.run("61 gone w-1 -> create w-1 avoid=n2")


def test_a_node_that_was_given_up_and_has_never_left_is_avoided() -> None:
    script = given_up_and_lost_again("25 node n1 ready topology=rack")
    script.run("61 gone w-1 -> create w-1 avoid=n1/n2")


def test_a_node_that_was_given_up_and_stayed_ready_for_a_minute_is_used_again() -> None:
    script = given_up_and_lost_again("25 node n1 ready topology=rack", lost=75.0)
    script.run("83 gone w-1 -> create w-1 avoid=n2")


def after_a_lost_rack(
    extra: str = "", *, nodes: int = 4, is_ledger_lost: bool = False, agents: str = "lease=8"
) -> Script:
    """Return the job of a new operator that never hears the last two pods, at 200 s.

    The others have left attempt 0.
    """
    old = running(nodes=nodes)
    if is_ledger_lost:
        old.effects = [effect for effect in old.effects if not isinstance(effect, WriteLedger)]
    new = old.successor(100)
    names = [f"w-{number}" for number in range(nodes)]
    new.run("100 job\n100 synced")
    for name in names[-2:]:
        new.run(f"100 node n{name[2:]} not-ready")
    for name in names[:-2]:
        new.run(f"101 ready {name} 0 rank={name[2:]} {agents}")
    new.run(f"{extra}\n110 tick\n111 tick\n200 tick")
    return new


def test_a_new_operator_replaces_two_pods_that_it_never_hears() -> None:
    new = after_a_lost_rack()
    assert not new.job.state.gang.unclear
    shown = {show(effect) for effect in new.effects}
    assert {"delete w-2 force", "delete w-3 force"} <= shown
    new.run("201 gone w-2 -> create w-2 avoid=n2/n3\n201 gone w-3 -> create w-3 avoid=n2/n3")


def test_agents_that_have_all_restarted_do_not_hide_the_lease_of_the_attempt() -> None:
    assert not after_a_lost_rack(agents="lease=0").job.state.gang.unclear


def test_two_pods_of_two_may_renew_each_other() -> None:
    assert len(after_a_lost_rack(nodes=3).job.state.gang.unclear) == 0, "it has three ranks"
    old = running(nodes=2)
    new = old.successor(100)
    new.run("100 synced\n110 tick\n111 tick\n200 tick")
    assert new.job.state.gang.unclear.keys() == {"w-0.0", "w-1.0"}


@pytest.mark.parametrize(("extra", "rest"), [
    ("", {"is_ledger_lost": True}),  # the number of nodes is not known
    ("", {"agents": ""}),  # an agent that knows no leases
    ("103 lost w-0\n103 lost w-1", {}),  # they may follow a late order
    ("103 runs w-0 1 rank=0 lease=8", {}),  # a late order was followed
])  # fmt: skip
def test_pods_that_a_new_operator_never_hears_may_run_while_peers_may_renew_them(
    extra: str, rest: dict[str, Any]
) -> None:
    unclear = after_a_lost_rack(extra, **rest).job.state.gang.unclear
    assert unclear.keys() >= {"w-2.0", "w-3.0"}


def three_pods(each: str, policy: RunPolicy | None = None) -> Script:
    """Return the job of an operator that saw three pods run, each on a node of its own, and `each`
    of them."""
    script = Script(spec(3, policy=policy))
    script.run("0 job\n0 synced")
    for name in ("w-0", "w-1", "w-2"):
        script.run(f"0 pod {name} node=n{name[2:]} phase=Running\n{each.format(name)}")
    return script


def after_three_pods(each: str = "") -> Script:
    """Return the job of a new operator, at 100 s."""
    return three_pods(each).successor(100)


def test_nor_is_one_begun_again_whose_fault_was_not_written() -> None:
    """One agent was started again and knows of no attempt; the others are out of reach."""
    old = three_pods("1 ready {} lease=0", RunPolicy(job_max_retry_count=1))
    old.run("""
        2 lost w-2 -> stop w-0 w-1 w-2 in 0 keep, status Faulted 1, event Faulted, incident 1 open
    """)
    old.run("3 ready w-0 0\n3 ready w-1 0\n3 ready w-2 0\n4 lost w-2")
    assert sorted(old.incidents) == [1, 2]
    assert old.status.restart_count == 1
    new = old.successor(100, is_incident_written=False)
    new.give(IncidentSeen(old.incidents[1]), 100)
    new.run("""
        100 synced
        100 node n0 not-ready
        100 node n1 not-ready
        101 ready w-2 lease=0
        110 tick -> stop w-2 in 0, delete w-0, fence n0, delete w-1, fence n1
        111 ready w-2 0
        201 gone w-0
        201 gone w-1
        202 pod w-0 uid=w-0.1 node=n3
        202 pod w-1 uid=w-1.1 node=n4
        203 ready w-0
        204 ready w-1 -> stop w-2 in 1, status Faulted 2
        205 ready w-2 1 -> start w-0.1=0 w-1.1=1 w-2=2 in 2, status PodsRunning 2
    """)


def test_a_pod_of_one_node_runs_nothing_where_nothing_was_written() -> None:
    new = Script(spec(1))
    new.run("""
        100 job
        100 pod w-0 node=n0 phase=Running
        100 node n0 not-ready
        100 synced
        110 tick
        200 tick
    """)
    shown = {show(effect) for effect in new.effects}
    assert "delete w-0 force" in shown


def test_no_operator_has_told_pods_to_start_that_none_has_heard() -> None:
    new = after_three_pods()
    for node in ("n0", "n1", "n2"):
        new.run(f"100 node {node} not-ready")
    new.run("100 job suspend=yes\n100 synced\n170 tick")
    shown = {show(effect) for effect in new.effects}
    assert {"delete w-0 force", "delete w-1 force", "delete w-2 force"} <= shown


@pytest.mark.parametrize("agents", ["lease=8", ""])
def test_a_first_start_is_written_before_it_is_ordered(agents: str) -> None:
    script = Script(spec(2))
    script.is_api_up = False
    script.run(f"""
        0 job
        0 synced
        0 pod w-0 node=n0
        0 pod w-1 node=n1
        1 ready w-0 {agents} ->
        1 ready w-1 {agents} -> ledger awaited
        9 tick ->
    """)
    [write] = [one for one in script.effects if isinstance(one, WriteLedger)]
    seconds = script.job.state.options.lease_seconds if agents else 0
    assert write.is_awaited
    assert write.ledger.start == (seconds, 2)
    lease = " lease=8" if agents else ""
    starts = script.give(LedgerWritten(write.ledger), 10.0)
    assert [show(one) for one in starts if isinstance(one, StartWorkers)] == [
        f"start w-0=0 in 0{lease}",
        f"start w-1=1 in 0{lease}",
    ]


def test_nothing_that_is_stored_is_waited_for_again() -> None:
    """Recoveries go on while the API server is away."""
    script = running(nodes=2)
    script.is_api_up = False
    script.run("""
        10 failed w-1 0 rank=1 lease=8 -> stop w-0 w-1 in 0 keep, status Faulted 1, event Faulted,
            incident 1 open
        11 ready w-0 0 lease=8
        11 ready w-1 0 lease=8 -> start w-0=0 w-1=1 in 1 lease=8, status Faulted 1, incident 1 open
    """)


def test_a_suspended_job_does_not_wait_for_a_pod_that_is_never_heard() -> None:
    new = running().successor(100)
    new.run("""
        100 job suspend=yes
        100 synced
        100 node n1 not-ready
        160 ready w-0 0 lease=8
        161 gone w-0
        162 tick
        180 tick
    """)
    shown = {show(effect) for effect in new.effects}
    assert "delete w-1 force" in shown
    assert "delete w-0 force" not in shown
