"""Invariants of a repairer, for all events and restarts: nothing twice, no storm, and rest."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.core.nodes.drive_repair import World, outcomes
from unbroken.core.nodes.repair.events import (
    PatchNode,
    PodsSeen,
    RepairSettings,
    WriteRecord,
)
from unbroken.core.tick import Tick
from unbroken.spec.nodes.kinds import CheckPhase, NodeRecordSpec, RepairRecord, RepairState
from unbroken.spec.nodes.values import Action, Health, NodeRecovery

NODES = [f"node-{index}" for index in range(6)]
SHARE = 0.34
ACTIVE_MAX = 2
MISFORTUNES = st.tuples(
    st.sampled_from(["reset", "reboot", "replace", "silence", "speak", "jobs", "empty"]),
    st.sampled_from(NODES),
)
ORDERS = st.tuples(st.sampled_from(["order reboot", "order replace"]), st.sampled_from(NODES))
COURSE = st.one_of(
    st.tuples(st.sampled_from(["deliver", "again", "carry"]), st.sampled_from(NODES)),
    st.tuples(st.sampled_from(["restart", "settle"]), st.just("")),
    st.tuples(st.just("wait"), st.sampled_from(["3", "40", "700", "4000"])),
)
STEPS = st.lists(st.one_of(MISFORTUNES, COURSE, COURSE), max_size=50)
ENDS = st.lists(
    st.sampled_from(["done", "done", "failed", "never", "gone", "left", "stuck", "unsupported"]),
    min_size=1,
)
VERDICTS = st.lists(st.sampled_from(list(CheckPhase)), min_size=1)
KINDS = {"reset": Action.RESET_GPU, "reboot": Action.REBOOT, "replace": Action.REPLACE}


def befall(found: World, what: str, name: str) -> None:
    """Let one event happen to an existing node."""
    match what:
        case "silence":
            found.silence(name)
        case "speak":
            found.speak(name)
        case "order reboot" | "order replace":
            found.order(name, what.removeprefix("order "))
        case "jobs" | "empty":
            found.pods[name] = ("lm-0",) if what == "jobs" else ()
            found.events.append(PodsSeen(name, found.pods[name]))
        case _ if what in KINDS:
            found.fault(name, action=KINDS[what])


def happen(found: World, what: str, name: str) -> None:
    """Let one step of the world happen."""
    if name in found.nodes:
        befall(found, what, name)
    match what:
        case "deliver":
            found.deliver()
        case "again" if found.events:
            found.events.insert(1, found.events[0])
        case "carry":
            found.carry_out(name)
        case "restart":
            found.start()
        case "settle":
            found.settle()
        case "wait":
            found.now += float(name)
            found.tell(Tick())
        case _:
            pass


def begun(ends: list[str], verdicts: list[CheckPhase], **given: object) -> World:
    """Return a world of some nodes; orders and checks have these outcomes in turn."""
    left = list(verdicts)
    found = World(
        RepairSettings(share=SHARE, **given),  # type: ignore[arg-type]
        outcome=outcomes(ends),
        check=lambda node: left.pop(0) if len(left) > 1 else left[0],
    )
    found.add(*NODES)
    found.start()
    return found


def active(found: World) -> list[RepairRecord]:
    """Return the repairs in progress that no person has ordered."""
    repairs = [found.repairer.record(name).repair for name in (*NODES, *found.nodes)]
    names = {id(one): one for one in repairs if one is not None}
    return [
        one
        for one in names.values()
        if one.state not in (RepairState.WAITING,) and one.asked_by not in ("annotation", "clear")
    ]


def assert_nothing_twice(found: World) -> None:
    """Assert that only a person's order ends a boot or replaces a machine twice."""
    own = 0 if found.settings.recovery is NodeRecovery.NONE else 1
    done = Counter(
        (one.node, one.action, one.boot_id if one.action is Action.REBOOT else "")
        for one in found.executions
        if not one.has_failed and one.action is not Action.RESET_GPU
    )
    for (node, action, _), count in done.items():
        assert count <= own + found.asked[node, action.value], found.executions


def is_kept(found: World, name: str) -> bool:
    """Return whether a node is in quarantine."""
    return found.records.get(name, NodeRecordSpec()).quarantined_at is not None


@settings(max_examples=200, deadline=None)
@given(STEPS, ENDS, VERDICTS)
@example(
    [("replace", "node-0"), ("reset", "node-1"), ("settle", ""), ("reset", "node-2")],
    ["stuck", "gone"],
    [CheckPhase.PENDING],
)
@example(
    [
        *[("replace", "node-1"), ("settle", ""), ("wait", "4000"), ("carry", "node-1")],
        ("restart", ""),
    ],
    ["done"],
    [CheckPhase.PENDING],
)
def test_no_storm_nothing_twice_and_rest(
    steps: list[tuple[str, str]], ends: list[str], verdicts: list[CheckPhase]
) -> None:
    found = begun(ends, verdicts)
    for what, name in steps:
        happen(found, what, name)
        assert len(active(found)) <= ACTIVE_MAX
    assert_nothing_twice(found)
    # The world heals; what is left to a person is said, all else is in service.
    found.outcome, found.check = outcomes(["done"]), lambda node: CheckPhase.PASSED
    for name in list(found.nodes):
        found.speak(name)
    found.wait(3 * 86400.0)
    assert_nothing_twice(found)
    kept = [name for name in found.nodes if is_kept(found, name)]
    for name, node in found.nodes.items():
        record = found.records.get(name, NodeRecordSpec())
        if kept and record.repair is not None:
            # It waits for a person to clear the nodes in quarantine.
            assert record.repair.state is RepairState.WAITING, (name, record)
            assert "in quarantine or under repair" in record.repair.message, (name, record)
            assert len(kept) >= max(1, int(SHARE * len(found.nodes))), kept
            continue
        assert record.repair is None, (name, record)
        assert found.repairer.record(name) == record
        if record.quarantined_at is not None:
            assert node.has_taint, name
        else:
            assert not node.has_taint, (name, node, record)
            assert node.health in (None, Health.SCHEDULABLE)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(MISFORTUNES, COURSE), max_size=40), ENDS)
def test_without_automatic_recovery_records_are_all_that_is_written(
    steps: list[tuple[str, str]], ends: list[str]
) -> None:
    found = begun(ends, [CheckPhase.PASSED], recovery=NodeRecovery.NONE)
    for what, name in steps:
        happen(found, what, name)
    found.wait(86400.0)
    assert {type(effect) for effect in found.effects} <= {WriteRecord}
    assert all(record.repair is None for record in found.records.values())


@settings(max_examples=100, deadline=None)
@given(st.lists(st.one_of(MISFORTUNES, COURSE, ORDERS), max_size=40), ENDS)
@example([("order reboot", "node-4"), ("wait", "4000"), ("order reboot", "node-4")], ["never"])
def test_without_automatic_recovery_only_ordered_nodes_are_touched(
    steps: list[tuple[str, str]], ends: list[str]
) -> None:
    found = begun(ends, [CheckPhase.PASSED], recovery=NodeRecovery.NONE)
    for what, name in steps:
        happen(found, what, name)
    found.wait(86400.0)
    assert_nothing_twice(found)
    ordered = {name for what, name in steps if what.startswith("order")}
    ours = ordered | {f"{name}-x" for name in ordered}
    assert {one.node for one in found.effects if isinstance(one, PatchNode)} <= ours
    assert {one.node for one in found.executions} <= ours


@settings(max_examples=100, deadline=None)
@given(STEPS, st.integers(0, 50))
def test_dry_run_does_nothing_whatever_was_begun(steps: list[tuple[str, str]], cut: int) -> None:
    found = begun(["done"], [CheckPhase.PASSED])
    for what, name in steps[:cut]:
        happen(found, what, name)
    found.settings = replace(found.settings, is_dry_run=True)
    found.start()
    before, count = len(found.effects), len(found.executions)
    for what, name in steps[cut:]:
        happen(found, what, name)
    found.wait(86400.0)
    assert len(found.executions) == count
    assert not [one for one in found.effects[before:] if isinstance(one, PatchNode)]
