"""Whatever happens to a cluster's machines, it comes to rest with one for each place."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.clusters.test_clusters import DEEP, Bench, spec
from unbroken.core.clusters.draft import ClusterNode, MachineView
from unbroken.core.clusters.rules import MINIMUM_SECONDS, RETRY_SECONDS
from unbroken.core.clusters.state import ClusterPhase, GroupPhase, OperationStatus
from unbroken.spec.nodes.kinds import CheckPhase, MachinePhase

ACTIONS = ("step", "up", "fail", "lose", "delete", "replace", "vanish", "scale", "check", "wait")
Steps = list[tuple[str, int]]


def happen(bench: Bench, action: str, number: int) -> None:
    """Do something to the cluster."""
    names = sorted(bench.machines)
    name = names[number % len(names)] if names else ""
    match action:
        case "step":
            bench.step()
        case "scale":
            bench.scale("workers", *(f"workers-{one}" for one in range(number % 5)))
        case "vanish":
            bench.vanish()
        case "wait":
            bench.now += 100.0 * number
        case "check":
            for check in [one for one in bench.checks.values() if not one.has_ended]:
                phase = (CheckPhase.PASSED, CheckPhase.FAILED, CheckPhase.UNKNOWN)[number % 3]
                faulty = check.nodes[:1] if phase is CheckPhase.FAILED else ()
                bench.end_check(check.name, phase, faulty)
        case _ if name:
            _to_machine(bench, action, name, number)


def _to_machine(bench: Bench, action: str, name: str, number: int) -> None:
    machine = bench.machines[name]
    match action:
        case "up":
            bench.come_up(name)
        case "fail":
            bench.fail(name)
        case "lose":
            del bench.machines[name], bench.nodes[name]
        case "delete":
            bench.machines[name] = replace(machine, is_deleting=True)
        case "replace":
            new = f"hyperpod-i-{number:010x}{len(bench.machines):07x}"
            if new not in bench.machines:
                bench.machines[new] = replace(
                    MachineView(new, machine.logical_id, machine.group), created_at=bench.now + 1
                )
                bench.nodes[new] = ClusterNode(new)


def heal(bench: Bench) -> None:
    """Let all machines and checks succeed, without any further request."""
    for _ in range(12):
        for name, one in list(bench.machines.items()):
            if one.phase is MachinePhase.FAILED:
                bench.machines[name] = replace(one, phase=MachinePhase.PENDING, message="")
        bench.vanish()
        bench.come_up()
        for check in [one for one in bench.checks.values() if not one.has_ended]:
            bench.end_check(check.name, CheckPhase.PASSED)
        bench.now += max(RETRY_SECONDS, MINIMUM_SECONDS / 6)
        bench.step()


@pytest.mark.parametrize("continuous", [False, True])
@pytest.mark.parametrize("more", [{}, DEEP])
@settings(max_examples=60, deadline=None)
@given(steps=st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 40)), max_size=25))
def test_any_cluster_comes_to_rest(
    continuous: bool, more: dict[str, list[str]], steps: Steps
) -> None:
    bench = Bench(spec(continuous=continuous, groups={"workers": (2, more)}))
    for action, number in steps:
        happen(bench, action, number)
    heal(bench)
    bench.step()
    assert not bench.effects
    places = sorted(one.logical_id for one in bench.machines.values())
    assert places == sorted(bench.spec.targets["workers"])
    assert bench.phase is ClusterPhase.IN_SERVICE
    assert bench.group() is GroupPhase.IN_SERVICE
    ended = {one.status for one in bench.state.operations}
    assert OperationStatus.IN_PROGRESS not in ended
    assert len({event.id for event in bench.state.events}) == len(bench.state.events)


@settings(max_examples=40, deadline=None)
@given(steps=st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 40)), max_size=25))
def test_any_cluster_can_be_deleted(steps: Steps) -> None:
    bench = Bench(spec())
    for action, number in steps:
        happen(bench, action, number)
    bench.is_deleting = True
    bench.step()
    assert all(one.is_deleting for one in bench.machines.values())
    bench.vanish()
    bench.step()
    assert [type(one).__name__ for one in bench.effects] == ["ReleaseCluster"]
