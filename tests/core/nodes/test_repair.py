"""Actions of the repairer for one node, and their order."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from tests.core.nodes.drive_repair import World, outcomes, world
from unbroken.core.nodes.repair.events import (
    AskProvider,
    MakeCheck,
    NodeFault,
    OrderRepair,
    PatchNode,
    PodsSeen,
    RepairOrder,
    WriteRecord,
)
from unbroken.spec.keys import REPAIR
from unbroken.spec.nodes.kinds import BlameKind, CheckPhase, NodeRecordSpec, RepairState
from unbroken.spec.nodes.values import Action, Health, NodeRecovery

REBOOT_ONLY = frozenset({Action.REBOOT})


def history(found: World, name: str) -> list[tuple[Action, RepairState]]:
    """Return the ended repairs of a node."""
    return [(one.action, one.state) for one in found.records[name].history]


def is_well(found: World, name: str) -> bool:
    """Return whether a node is in service, with nothing left of its fault."""
    node = found.nodes[name]
    return (
        node.health is Health.SCHEDULABLE
        and not node.has_taint
        and not node.faults
        and found.state(name) is None
    )


@pytest.mark.parametrize("action", [Action.RESET_GPU, Action.REBOOT])
def test_fault_is_repaired_tested_and_the_node_returned(action: Action) -> None:
    found = world()
    before = found.nodes["node-0"].boot_id
    found.fault("node-0", action=action)
    found.wait(60)
    assert found.done() == [("node-0", action)]
    assert is_well(found, "node-0")
    assert history(found, "node-0") == [(action, RepairState.DONE)]
    verified = found.nodes["node-0"].verified
    assert verified.startswith("check node-0-") if action is Action.RESET_GPU else verified
    assert (verified == before) is False
    assert [one.spec.nodes for one in found.effects if isinstance(one, MakeCheck)] == [("node-0",)]
    assert found.told() == ["RepairNeeded", "RepairOrdered", "NodeRepaired"]


@pytest.mark.parametrize("joins_held_back", [True, False])
def test_replacement_is_tested_before_it_takes_pods(joins_held_back: bool) -> None:
    found = world(joins_held_back=joins_held_back)
    found.fault("node-0", action=Action.REPLACE)
    found.wait(60)
    assert found.done() == [("node-0", Action.REPLACE)]
    assert "node-0" not in found.nodes
    assert is_well(found, "node-0-x")
    assert found.records["node-0"].history[-1].replacement == "node-0-x"
    patches = [p.taint for p in found.effects if isinstance(p, PatchNode) and p.node == "node-0-x"]
    assert patches == ([False] if joins_held_back else [True, False])


def test_replacement_that_comes_too_late_to_be_tested_is_left_to_a_person() -> None:
    def outcome(order: RepairOrder) -> str:
        return "late" if order.action is Action.REPLACE else "done"

    found = world(outcome=outcome, replace_seconds=100.0)
    found.fault("node-0", action=Action.REPLACE)
    found.wait(150)
    assert history(found, "node-0") == [(Action.REPLACE, RepairState.FAILED)]
    found.join_late("node-0-x")
    found.wait(10)
    new = found.nodes["node-0-x"]
    assert "too late to be tested" in found.records["node-0-x"].quarantine_reason
    assert (new.health, new.has_taint) == (Health.UNSCHEDULABLE, True)
    found.clear("node-0-x")
    found.wait(60)
    assert is_well(found, "node-0-x")


def test_new_repairer_asks_the_provider_before_it_gives_an_order_up() -> None:
    found = world(replace_seconds=100.0)
    found.fault("node-0", action=Action.REPLACE)
    while not found.executions:
        assert found.carry_out() or found.deliver()
    found.start()
    found.now += 1000
    found.wait(60)
    assert history(found, "node-0") == [(Action.REPLACE, RepairState.DONE)]
    assert is_well(found, "node-0-x")


def test_replacement_that_is_in_a_deep_check_is_returned_by_who_tests_it() -> None:
    verdicts = {"node-0-x": CheckPhase.RUNNING}
    found = world(check=lambda node: verdicts[node], check_seconds=100.0)
    found.fault("node-0", action=Action.REPLACE)
    found.wait(10)
    new = found.nodes["node-0-x"]
    found.change(replace(new, health=Health.UNSCHEDULABLE, is_in_deep_check=True))
    found.wait(200)
    new = found.nodes["node-0-x"]
    assert history(found, "node-0") == [(Action.REPLACE, RepairState.DONE)]
    assert new.verified
    assert (new.health, new.has_taint) == (Health.UNSCHEDULABLE, True)


def test_record_is_written_before_the_order_and_the_node_back_before_the_record_ends() -> None:
    found = world()
    found.fault("node-0")
    found.wait(60)
    kinds = []
    for effect in found.effects:
        if isinstance(effect, WriteRecord):
            kinds.append(effect.record.repair.state.value if effect.record.repair else "-")
        elif isinstance(effect, PatchNode | OrderRepair):
            kinds.append(type(effect).__name__)
    kinds = [kind for i, kind in enumerate(kinds) if not i or kinds[i - 1] != kind]
    wanted = "- Waiting Draining PatchNode Acting OrderRepair Checking PatchNode -"
    assert kinds == wanted.split()


def test_waits_for_the_jobs_to_leave_but_not_for_ever() -> None:
    found = world(drain_seconds=100.0)
    found.tell(PodsSeen("node-0", ("lm-0", "lm-1")))
    found.fault("node-0")
    found.wait(50)
    assert found.state("node-0") is RepairState.DRAINING
    assert found.nodes["node-0"].has_taint
    assert "2 pods" in found.message("node-0")
    found.tell(PodsSeen("node-0", ()))
    found.wait(1)
    assert found.done() == [("node-0", Action.REBOOT)]
    found.tell(PodsSeen("node-1", ("lm-0",)))
    found.fault("node-1")
    found.wait(101)
    assert len(found.done()) == 2


def test_jobs_have_no_more_time_to_leave_under_a_new_repairer() -> None:
    found = world(drain_seconds=100.0)
    found.pods["node-0"] = ("lm-0",)
    found.tell(PodsSeen("node-0", found.pods["node-0"]))
    found.fault("node-0")
    for _ in range(3):
        found.wait(30)
        found.start()
        found.settle()
        assert found.state("node-0") is RepairState.DRAINING
    found.wait(11)
    assert found.done() == [("node-0", Action.REBOOT)]


def test_same_fault_soon_after_a_reboot_leads_to_replacement() -> None:
    found = world()
    found.fault("node-0")
    found.wait(60)
    found.wait(3600)
    found.fault("node-0")
    found.wait(60)
    assert found.done() == [("node-0", Action.REBOOT), ("node-0", Action.REPLACE)]
    kinds = [entry.kind for entry in found.records["node-0"].blame]
    assert kinds.count(BlameKind.RELAPSE) == 1


def test_fault_after_the_probation_counts_anew() -> None:
    found = world()
    found.fault("node-0")
    found.wait(60)
    found.wait(86500)
    found.fault("node-0")
    found.wait(60)
    assert found.done() == [("node-0", Action.REBOOT)] * 2


def test_provider_that_fails_is_tried_again_later_and_then_one_rung_up() -> None:
    found = world(outcome=outcomes(["failed", "failed", "failed", "done"]))
    found.fault("node-0")
    found.wait(10)
    assert len(found.executions) == 1
    assert "try 1 failed" in found.message("node-0")
    found.wait(25)
    assert len(found.executions) == 2
    found.wait(600)
    assert [one.action for one in found.executions] == [Action.REBOOT] * 3 + [Action.REPLACE]
    assert is_well(found, "node-0-x")


def test_node_that_never_returns_is_replaced_and_then_a_person_is_told() -> None:
    found = world(outcome=outcomes(["never", "failed"]))
    found.fault("node-0")
    found.wait(3 * 3600)
    assert history(found, "node-0") == [
        (Action.REBOOT, RepairState.FAILED),
        (Action.REPLACE, RepairState.FAILED),
    ]
    assert found.records["node-0"].quarantined_at is not None
    assert found.told()[-1] == "NodeQuarantined"
    count = len(found.executions)
    found.wait(7 * 86400)
    assert len(found.executions) == count


def test_order_that_does_not_end_is_given_up() -> None:
    found = world(outcome=outcomes(["stuck", "done"]))
    found.fault("node-0")
    found.wait(1000)
    assert found.state("node-0") is RepairState.ACTING
    assert found.message("node-0") == "still at it"
    assert sum(isinstance(one, AskProvider) for one in found.effects) > 100
    found.wait(3600)
    assert found.done() == [("node-0", Action.REPLACE)]


def test_failed_check_leads_to_the_next_rung_and_is_held_against_the_node() -> None:
    found = world(check=lambda node: CheckPhase.PASSED if node.endswith("x") else CheckPhase.FAILED)
    found.fault("node-0")
    found.wait(600)
    assert found.done() == [("node-0", Action.REBOOT), ("node-0", Action.REPLACE)]
    assert BlameKind.CHECK in [entry.kind for entry in found.records["node-0"].blame]
    assert is_well(found, "node-0-x")


@pytest.mark.parametrize("phase", [CheckPhase.UNKNOWN, CheckPhase.PENDING, CheckPhase.RUNNING])
def test_check_that_says_nothing_is_no_fault(phase: CheckPhase) -> None:
    found = world(check=lambda node: phase)
    found.fault("node-0")
    found.wait(8000)
    assert found.done() == [("node-0", Action.REBOOT)]
    assert is_well(found, "node-0")


def test_fault_while_it_is_tested_is_the_repairs_failure() -> None:
    found = world(check=lambda node: CheckPhase.RUNNING)
    found.fault("node-0")
    found.wait(60)
    assert found.state("node-0") is RepairState.CHECKING
    found.fault("node-0")
    found.wait(60)
    assert found.done()[-1] == ("node-0", Action.REPLACE)


def test_replacement_that_fails_its_check_is_left_to_a_person() -> None:
    found = world(check=lambda node: CheckPhase.FAILED)
    found.fault("node-0", action=Action.REPLACE)
    found.wait(3600)
    assert found.done() == [("node-0", Action.REPLACE)]
    assert found.records["node-0-x"].quarantined_at is not None
    assert found.nodes["node-0-x"].has_taint


def test_silent_node_is_replaced_after_a_while_and_left_alone_if_it_comes_back() -> None:
    found = world(lost_seconds=300.0)
    found.silence("node-0")
    found.wait(200)
    found.speak("node-0")
    found.wait(500)
    assert not found.done()
    assert [entry.kind for entry in found.records["node-0"].blame] == [BlameKind.LOST]
    found.silence("node-0")
    found.wait(299)
    assert not found.done()
    found.wait(60)
    assert found.done() == [("node-0", Action.REPLACE)]


def test_pods_of_a_lost_node_are_not_waited_for() -> None:
    found = world(lost_seconds=300.0)
    found.tell(PodsSeen("node-0", ("lm-0",)))
    found.silence("node-0")
    found.wait(310)
    assert found.done() == [("node-0", Action.REPLACE)]


@pytest.mark.parametrize(
    ("pods", "is_awaited", "is_early"),
    [(("lm-0",), True, True), ((), True, False), (("lm-0",), False, False)],
)
def test_a_silent_node_whose_fence_a_job_waits_for_is_replaced_earlier(
    pods: tuple[str, ...], is_awaited: bool, is_early: bool
) -> None:
    found = world(lost_seconds=300.0, awaited_seconds=60.0)
    found.tell(PodsSeen("node-0", pods))
    found.silence("node-0")
    found.change(replace(found.nodes["node-0"], is_awaited=is_awaited))
    found.wait(50)
    assert not found.done()
    found.wait(20)
    assert found.done() == ([("node-0", Action.REPLACE)] if is_early else [])


def awaited(found: World, name: str) -> None:
    """Let the node fall silent under a pod of a job, which asks for its fence."""
    found.tell(PodsSeen(name, ("lm-0",)))
    found.silence(name)
    found.change(replace(found.nodes[name], is_awaited=True, is_fence_asked=True))


def test_the_node_object_that_is_left_of_a_replaced_machine_is_out_of_service() -> None:
    found = world(awaited_seconds=60.0, outcome=lambda _: "left")
    awaited(found, "node-0")
    found.wait(50)
    assert not found.nodes["node-0"].is_fenced
    found.wait(30)
    assert found.done() == [("node-0", Action.REPLACE)]
    assert found.nodes["node-0"].is_fenced
    assert not [one for one in found.nodes.values() if one.is_fenced and one.name != "node-0"]
    assert history(found, "node-0") == [(Action.REPLACE, RepairState.DONE)]
    found.wait(86400)
    assert found.done() == [("node-0", Action.REPLACE)], "the machine is not replaced twice"
    # Another machine takes its name.
    found.speak("node-0")
    found.wait(86400)
    node = found.nodes["node-0"]
    assert (node.is_fenced, node.is_fence_asked, node.has_taint) == (False, False, False)
    assert node.health is Health.SCHEDULABLE
    assert found.done() == [("node-0", Action.REPLACE)]


def test_a_machine_that_takes_the_name_of_one_that_is_gone_is_tested() -> None:
    found = world(outcome=lambda _: "stuck")
    found.order("node-0", "replace")
    found.wait(1)
    found.orders = dict.fromkeys(found.orders, "left")
    found.wait(20)
    assert found.state("node-0") is RepairState.ACTING, "its Node is not silent yet"
    found.change(replace(found.nodes["node-0"], boot_id="another"))
    found.wait(20)
    assert history(found, "node-0") == [(Action.REPLACE, RepairState.DONE)]
    assert is_well(found, "node-0")
    assert len(found.checks) == 1


def test_a_node_that_comes_back_by_itself_keeps_no_request_for_a_fence() -> None:
    found = world(awaited_seconds=60.0)
    awaited(found, "node-0")
    found.wait(30)
    found.speak("node-0")
    found.wait(300)
    assert not found.nodes["node-0"].is_fence_asked
    assert not found.done()


def test_a_fence_that_is_asked_for_while_the_node_is_ready_is_left_to_who_carries_it_out() -> None:
    found = world()
    found.change(replace(found.nodes["node-0"], is_fence_asked=True))
    found.wait(30)
    assert found.nodes["node-0"].is_fence_asked


@pytest.mark.parametrize(
    ("action", "outcome", "is_silent", "boot"),
    [
        (Action.REPLACE, "left", False, None),
        (Action.REPLACE, "left", True, "another"),
        (Action.REPLACE, "stuck", True, None),
        (Action.REPLACE, "failed", True, None),
        (Action.REBOOT, "never", True, None),
    ],
    ids=["its kubelet reports", "it booted since", "not yet", "refused", "rebooted"],
)
def test_a_node_of_which_something_may_run_stays_in_service(
    action: Action, outcome: str, is_silent: bool, boot: str | None
) -> None:
    found = world(outcome=lambda _: "stuck")
    found.order("node-0", action.value)
    found.wait(1)
    assert found.state("node-0") is RepairState.ACTING
    down = replace(found.nodes["node-0"], is_ready=False, is_silent=is_silent, ready_at=found.now)
    found.change(replace(down, boot_id=boot or down.boot_id))
    found.settle()
    found.orders = dict.fromkeys(found.orders, outcome)
    found.wait(30)
    assert not found.nodes["node-0"].is_fenced


def test_a_node_that_reports_is_not_replaced_earlier_for_a_job() -> None:
    found = world(lost_seconds=300.0, awaited_seconds=60.0)
    found.tell(PodsSeen("node-0", ("lm-0",)))
    down = replace(found.nodes["node-0"], is_ready=False, ready_at=found.now, is_awaited=True)
    found.change(down)
    found.wait(200)
    assert not found.done()


def test_label_taken_back_while_the_jobs_leave_puts_the_node_back() -> None:
    found = world()
    found.tell(PodsSeen("node-0", ("lm-0",)))
    found.change(replace(found.nodes["node-0"], health=Health.PENDING_REBOOT))
    found.wait(10)
    assert found.state("node-0") is RepairState.DRAINING
    found.change(replace(found.nodes["node-0"], health=Health.SCHEDULABLE))
    found.wait(1000)
    assert not found.done()
    assert is_well(found, "node-0")


def test_record_of_a_node_long_gone_is_dropped_and_no_other() -> None:
    found = world()
    for name in ("node-0", "node-1"):
        found.fault(name, action=Action.REPLACE)
        found.wait(60)
    found.now += 50 * 86400
    found.fault("node-2", action=Action.REPLACE)
    found.wait(60)
    found.now += 10 * 86400
    found.start()
    found.wait(1)
    assert "node-0" not in found.records
    assert "node-2" in found.records


def test_many_lost_nodes_are_rather_the_networks_fault() -> None:
    found = world(5, lost_seconds=300.0)
    for index in range(3):
        found.silence(f"node-{index}")
    found.wait(1000)
    assert not found.done()
    assert "3 of 5 are not ready" in found.message("node-0")
    found.speak("node-2")
    found.wait(10)
    assert len(found.done()) == 2


def test_five_bad_nodes_at_once_are_repaired_one_after_another() -> None:
    found = world(10, check=lambda node: CheckPhase.RUNNING, check_seconds=100.0)
    for index in range(5):
        found.fault(f"node-{index}")
        found.now += 1
    found.wait(30)
    assert found.done() == [("node-0", Action.REBOOT), ("node-1", Action.REBOOT)]
    assert found.message("node-2") == (
        "waits for its turn: node-0, node-1 in quarantine or under repair, of 10 nodes; "
        "the limit is 2 (--repair-share)"
    )
    found.wait(95)
    assert [name for name, _ in found.done()] == [f"node-{index}" for index in range(4)]
    found.wait(300)
    assert [name for name, _ in found.done()] == [f"node-{index}" for index in range(5)]


@pytest.mark.parametrize("one_per_rack", [True, False])
def test_never_two_of_one_rack_unless_told(one_per_rack: bool) -> None:
    found = World(settings=replace(world().settings, share=1.0, one_per_rack=one_per_rack))
    found.check = lambda node: CheckPhase.RUNNING
    found.add("a", "b", rack="r1")
    found.add("c", "d", rack="r2")
    found.start()
    for name in ("a", "b", "c"):
        found.fault(name)
        found.now += 1
    found.wait(10)
    assert sorted(name for name, _ in found.done()) == (["a", "c"] if one_per_rack else list("abc"))
    if one_per_rack:
        assert found.message("b") == "waits for a, of the same rack, which is under repair"


def test_persons_order_waits_for_nobodys_turn() -> None:
    found = world(check=lambda node: CheckPhase.RUNNING)
    found.fault("node-0")
    found.wait(1)
    found.order("node-1", "reboot")
    found.wait(1)
    assert found.done() == [("node-0", Action.REBOOT), ("node-1", Action.REBOOT)]
    assert not found.nodes["node-1"].order


def test_persons_order_without_automatic_recovery() -> None:
    found = world(recovery=NodeRecovery.NONE)
    found.fault("node-0")
    found.silence("node-1")
    found.wait(86400)
    assert not found.done()
    found.order("node-0", "reboot")
    found.wait(60)
    assert found.done() == [("node-0", Action.REBOOT)]
    assert is_well(found, "node-0")


def test_order_of_more_than_is_under_way_is_taken_before_it_is_ordered() -> None:
    found = world()
    found.tell(PodsSeen("node-0", ("lm-0",)))
    found.fault("node-0")
    found.wait(1)
    found.order("node-0", "replace")
    found.wait(601)
    assert found.done() == [("node-0", Action.REPLACE)]


def test_order_of_no_more_than_is_under_way_is_taken_away() -> None:
    found = world(check=lambda node: CheckPhase.RUNNING)
    found.fault("node-0")
    found.wait(1)
    found.order("node-0", "reset")
    found.wait(1)
    assert not found.nodes["node-0"].order
    assert found.done() == [("node-0", Action.REBOOT)]


def test_unknown_label_is_told_and_left() -> None:
    found = world()
    found.change(replace(found.nodes["node-0"], unknown_health="Broken"))
    found.wait(10)
    assert found.told() == ["HealthUnknown"]
    assert not found.done()


def test_unknown_order_is_told_and_left() -> None:
    found = world()
    found.order("node-0", "reimage")
    found.wait(10)
    assert found.told() == ["RepairUnknown"]
    assert not found.done()


def test_worse_fault_raises_what_is_not_yet_ordered() -> None:
    found = world()
    found.tell(PodsSeen("node-0", ("lm-0",)))
    found.fault("node-0")
    found.wait(1)
    found.fault("node-0", "RowRemapFailure", Action.REPLACE)
    found.wait(601)
    assert found.done() == [("node-0", Action.REPLACE)]


def test_dry_run_tells_and_does_nothing() -> None:
    found = world(is_dry_run=True)
    found.fault("node-0")
    found.order("node-1", "replace")
    found.wait(86400)
    kinds = {type(effect).__name__ for effect in found.effects}
    assert kinds == {"WriteRecord", "RecordRepairEvent"}
    assert found.message("node-0") == "dry run: would reboot the node"
    assert found.told().count("RepairDryRun") == 2


def test_what_the_provider_cannot_do_is_left_to_a_person_and_noticed() -> None:
    found = world(supports=frozenset())
    found.fault("node-0")
    found.wait(86400)
    assert not found.done()
    assert "do it by hand" in found.message("node-0")
    found.change(replace(found.nodes["node-0"], boot_id="by hand"))
    found.wait(60)
    assert is_well(found, "node-0")
    assert history(found, "node-0") == [(Action.REBOOT, RepairState.DONE)]


def test_provider_that_says_late_that_it_cannot() -> None:
    found = world(outcome=lambda order: "unsupported")
    found.fault("node-0")
    found.wait(86400)
    orders = [one.order for one in found.effects if isinstance(one, OrderRepair)]
    asked = [int(order.id.split("-")[-2]) / 1000 for order in orders]
    gaps = [after - before for before, after in pairwise(asked)]
    assert gaps[:7] == [60, 120, 240, 480, 960, 1920, 3600]
    assert set(gaps[7:]) == {3600}
    assert found.told().count("RepairByHand") == 1
    assert "do it by hand" in found.message("node-0")


def test_provider_that_can_after_all_is_asked_again() -> None:
    found = world(outcome=outcomes(["unsupported", "unsupported", "done"]))
    found.fault("node-0")
    found.wait(170)
    assert not found.done()
    found.wait(20)
    assert found.done() == [("node-0", Action.REBOOT)]
    assert is_well(found, "node-0")


def test_person_who_orders_again_is_not_told_what_was_so_before() -> None:
    found = world(outcome=outcomes(["unsupported", "done"]))
    found.order("node-0", "reboot")
    found.wait(1)
    assert "do it by hand" in found.message("node-0")
    found.order("node-0", "reboot")
    found.wait(1)
    assert found.done() == [("node-0", Action.REBOOT)]


def test_rung_that_the_provider_lacks_is_passed_over() -> None:
    found = world(supports=REBOOT_ONLY)
    found.fault("node-0", action=Action.RESET_GPU)
    found.wait(60)
    assert found.done() == [("node-0", Action.REBOOT)]


def test_relapse_with_no_rung_left_ends_in_quarantine() -> None:
    found = world(supports=REBOOT_ONLY)
    found.fault("node-0")
    found.wait(3600)
    found.fault("node-0")
    found.wait(60)
    assert found.done() == [("node-0", Action.REBOOT)]
    assert found.records["node-0"].quarantined_at is not None


def test_flapping_node_ends_in_quarantine_until_cleared_and_burnt_in() -> None:
    found = world(probation_seconds=60.0)
    for _ in range(3):
        found.fault("node-0")
        found.wait(3600)
    assert found.done() == [("node-0", Action.REBOOT)] * 3
    record = found.records["node-0"]
    assert "repaired 3 times within 24 hours" in record.quarantine_reason
    assert found.nodes["node-0"].has_taint
    assert found.nodes["node-0"].health is Health.UNSCHEDULABLE
    found.fault("node-0")
    found.wait(3600)
    assert len(found.done()) == 3
    made = sum(isinstance(one, MakeCheck) for one in found.effects)
    found.clear("node-0")
    found.wait(60)
    assert sum(isinstance(one, MakeCheck) for one in found.effects) == made + 1
    assert is_well(found, "node-0")
    assert found.records["node-0"].quarantined_at is None
    found.wait(3600)
    assert found.records["node-0"].quarantined_at is None


def test_failed_burn_in_keeps_the_node_in_quarantine() -> None:
    verdicts = [CheckPhase.PASSED] * 3 + [CheckPhase.FAILED]
    found = world(probation_seconds=60.0, check=lambda node: verdicts.pop(0))
    for _ in range(3):
        found.fault("node-0")
        found.wait(3600)
    found.clear("node-0")
    found.wait(3600)
    assert "burn-in failed" in found.records["node-0"].quarantine_reason
    assert found.nodes["node-0"].has_taint


def test_losses_alone_add_up_to_quarantine() -> None:
    found = world(lost_seconds=300.0)
    for _ in range(5):
        found.silence("node-0")
        found.wait(30)
        found.speak("node-0")
        found.wait(30)
    assert not found.done()
    assert "points are held against it" in found.records["node-0"].quarantine_reason


def test_label_taken_back_by_a_person_ends_what_has_not_begun() -> None:
    found = world(check=lambda node: CheckPhase.RUNNING)
    found.fault("node-0")
    found.wait(1)
    found.change(replace(found.nodes["node-1"], health=Health.PENDING_REBOOT))
    found.wait(1)
    assert found.state("node-1") is RepairState.WAITING
    found.change(replace(found.nodes["node-1"], health=Health.SCHEDULABLE))
    found.wait(1)
    assert found.state("node-1") is None
    assert found.done() == [("node-0", Action.REBOOT)]


def test_provider_without_a_word_of_the_replacement_ends_it_with_the_machine() -> None:
    found = world(outcome=lambda order: "gone")
    found.fault("node-0", action=Action.REPLACE)
    found.wait(60)
    assert history(found, "node-0") == [(Action.REPLACE, RepairState.DONE)]


def test_nothing_is_decided_before_all_is_known() -> None:
    found = World()
    found.add("node-0")
    found.fault("node-0")
    found.repairer = type(found.repairer)(found.settings)
    while found.events:
        assert found.deliver()
        assert not found.effects


def test_person_order_is_not_carried_out_twice() -> None:
    found = world()
    found.order("node-0", "reboot")
    found.wait(7 * 86400)
    assert found.done() == [("node-0", Action.REBOOT)]
    assert any(REPAIR in one.annotations for one in found.effects if isinstance(one, PatchNode))
    assert found.records["node-0"] != NodeRecordSpec()


def test_another_fault_in_the_probation_is_repaired_at_its_own_rung() -> None:
    found = world()
    found.fault("node-0", "Xid79")
    found.wait(60)
    found.fault("node-0", "Xid62", Action.RESET_GPU)
    found.wait(60)
    assert found.done() == [("node-0", Action.REBOOT), ("node-0", Action.RESET_GPU)]


def test_reboot_that_a_person_orders_begins_no_probation() -> None:
    found = world()
    found.order("node-0", "reboot")
    found.wait(60)
    assert found.records["node-0"].probation_until is None
    found.fault("node-0")
    found.wait(60)
    assert found.done() == [("node-0", Action.REBOOT)] * 2


def test_condition_is_weighed_by_its_label_which_may_come_later() -> None:
    found = world(recovery=NodeRecovery.NONE)
    fault = NodeFault("NvidiaGPUUnhealthy", "Xid79", found.now, "gone")
    found.change(replace(found.nodes["node-0"], faults=(fault,)))
    found.wait(1)
    assert "node-0" not in found.records
    found.change(replace(found.nodes["node-0"], health=Health.PENDING_REPLACEMENT))
    found.wait(1)
    assert [one.weight for one in found.records["node-0"].blame] == [4.0]


def test_label_that_is_seen_before_its_condition_is_the_daemons_and_is_blamed_later() -> None:
    found = world(outcome=lambda order: "stuck")
    node = found.nodes["node-0"]
    at = found.now
    labelled = replace(
        node, health=Health.PENDING_REBOOT, fault_reason="Xid119", advice="reset-gpu"
    )
    found.change(labelled)
    found.wait(5)
    repair = found.records["node-0"].repair
    assert repair is not None
    assert (repair.asked_by, repair.action) == ("daemon", Action.RESET_GPU)
    assert not found.records["node-0"].blame
    fault = NodeFault("NvidiaGPUUnhealthy", "Xid119", at, "GSP does not answer")
    found.change(replace(found.nodes["node-0"], faults=(fault,)))
    found.wait(1)
    assert [one.source for one in found.records["node-0"].blame] == ["Xid119"]


@pytest.mark.parametrize("recovery", list(NodeRecovery))
@pytest.mark.parametrize("health", [Health.UNSCHEDULABLE, Health.SCHEDULABLE])
def test_the_taint_moves_with_the_label_that_a_person_sets(
    recovery: NodeRecovery, health: Health
) -> None:
    found = world(recovery=recovery)
    is_out = health is Health.UNSCHEDULABLE
    before = found.nodes["node-0"]
    found.change(replace(before, health=health, has_taint=not is_out))
    found.wait(1)
    assert (found.nodes["node-0"].health, found.nodes["node-0"].has_taint) == (health, is_out)
