"""Clusters: machines for each place, and the reports on groups, operations and the cluster."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from unbroken.core.clusters.draft import (
    CheckView,
    ClusterDecision,
    ClusterEffect,
    ClusterNode,
    Configure,
    CreateCheck,
    CreateMachine,
    DeleteMachine,
    MachineView,
    ReleaseCluster,
    ReplaceNode,
    Retarget,
    World,
)
from unbroken.core.clusters.groups import (
    NodeConfig,
    checkpoint_percent,
    node_config,
    retargeted,
)
from unbroken.core.clusters.rules import MINIMUM_SECONDS, RETRY_SECONDS, decide_cluster
from unbroken.core.clusters.state import (
    EVENTS_MAX,
    CheckRequest,
    ClusterPhase,
    ClusterState,
    GroupPhase,
    InstancePhase,
    OperationState,
    OperationStatus,
    OperationType,
    SoftwareUpdate,
    read_state,
    write_state,
)
from unbroken.spec.keys import CLUSTER_NAME, DEEP_CHECK, HEALTH, INSTANCE_GROUP
from unbroken.spec.nodes.kinds import CheckKind, CheckPhase, ClusterSpec, MachinePhase

PERCENT = "InstanceMemoryAllocationPercentage"
DEEP = {"OnStartDeepHealthChecks": ["InstanceStress", "InstanceConnectivity"]}


def spec(continuous: bool = False, groups: dict[str, Any] | None = None) -> ClusterSpec:
    """Return a cluster with groups by name: a count, or (count, members of the request)."""
    request: dict[str, Any] = {"ClusterName": "Train", "InstanceGroups": []}
    if continuous:
        request["NodeProvisioningMode"] = "Continuous"
    targets = {}
    for name, asked in (groups or {"workers": 2}).items():
        count, more = asked if isinstance(asked, tuple) else (asked, {})
        request["InstanceGroups"].append(
            {
                "InstanceGroupName": name,
                "InstanceType": "ml.p5.48xlarge",
                "InstanceCount": count,
                **more,
            }
        )
        targets[name] = [f"{name}-{number}" for number in range(count)]
    return ClusterSpec("Train", "abcdef012345", request, targets=targets)


@dataclass
class Bench:
    """A cluster whose orders are carried out as far as a test lets them."""

    spec: ClusterSpec
    state: ClusterState = field(default_factory=ClusterState)
    phase: ClusterPhase = ClusterPhase.CREATING
    message: str = ""
    now: float = 1000.0
    is_deleting: bool = False
    machines: dict[str, MachineView] = field(default_factory=dict)
    nodes: dict[str, ClusterNode] = field(default_factory=dict)
    checks: dict[str, CheckView] = field(default_factory=dict)
    effects: tuple[ClusterEffect, ...] = ()

    def step(self) -> ClusterDecision:
        """Decide once and carry it out; the state goes through JSON, as in the real program."""
        world = World(
            "train",
            self.spec,
            self.phase,
            self.message,
            self.is_deleting,
            list(self.machines.values()),
            dict(self.nodes),
            list(self.checks.values()),
        )
        made = decide_cluster(world, self.state, self.now)
        again = decide_cluster(world, self.state, self.now)
        assert made == again, "a decision depends on nothing else"
        self.state = read_state(write_state(made.state))
        assert self.state == made.state
        self.phase, self.message, self.effects = made.phase, made.message, made.effects
        for effect in made.effects:
            self._do(effect)
        return made

    def _do(self, effect: ClusterEffect) -> None:
        match effect:
            case CreateMachine(name, wanted):
                assert name not in self.machines
                self.machines[name] = MachineView(
                    name,
                    wanted.logical_id,
                    wanted.instance_group,
                    created_at=self.now,
                    config=node_config(wanted),
                )
                self.nodes[name] = ClusterNode(
                    name,
                    health=wanted.labels[HEALTH],
                    deep_check=wanted.labels.get(DEEP_CHECK, ""),
                )
            case DeleteMachine(name):
                self.machines[name] = replace(self.machines[name], is_deleting=True)
            case CreateCheck(name, nodes, kinds):
                self.checks[name] = CheckView(name, nodes, kinds)
            case Configure(name, was, wanted):
                assert self.machines[name].config == was
                self.machines[name] = replace(self.machines[name], config=wanted)
            case Retarget(targets):
                self.spec = retargeted(self.spec, targets)
            case ReplaceNode() | ReleaseCluster():
                pass

    def end_check(self, name: str, phase: CheckPhase, faulty: tuple[str, ...] = ()) -> None:
        """End a check as the checker does: its nodes first, then its status."""
        for node in [self.nodes[one] for one in self.checks[name].nodes if one in self.nodes]:
            if node.deep_check != "InProgress":
                continue
            health, deep = "Schedulable", "" if phase is CheckPhase.UNKNOWN else "Passed"
            if node.name in faulty:
                health, deep = "UnschedulablePendingReplacement", "Failed"
            elif node.health not in ("Unschedulable", "Schedulable"):
                health = node.health
            self.nodes[node.name] = replace(node, health=health, deep_check=deep)
        self.checks[name] = replace(self.checks[name], phase=phase, faulty=faulty)

    def rest(self) -> None:
        """Step until there are no more orders."""
        for _ in range(20):
            self.step()
            if not self.effects:
                return
        raise AssertionError(f"never at rest: {self.effects}")

    def come_up(self, *names: str) -> None:
        """Let machines run with ready nodes; without names, all machines."""
        for name in names or [name for name, one in self.machines.items() if not one.is_deleting]:
            self.machines[name] = replace(self.machines[name], phase=MachinePhase.RUNNING)
            self.nodes[name] = replace(self.nodes[name], is_ready=True)

    def fail(self, name: str) -> None:
        """Let the start of a machine fail."""
        self.machines[name] = replace(
            self.machines[name], phase=MachinePhase.FAILED, message="OnCreate ended with 1"
        )

    def vanish(self) -> None:
        """Remove the machines that are being deleted."""
        for name in [name for name, one in self.machines.items() if one.is_deleting]:
            del self.machines[name], self.nodes[name]

    def scale(self, group: str, *ids: str) -> None:
        """Scale a group, as UpdateCluster does."""
        self.spec = retargeted(self.spec, {group: ids})

    @property
    def texts(self) -> list[str]:
        """Texts of the events."""
        return [event.text for event in self.state.events]

    def group(self, name: str = "workers") -> GroupPhase:
        """Return the phase of a group."""
        found = self.state.group(name)
        assert found is not None
        return found.phase

    def up(self, **arguments: Any) -> Bench:
        """Bring up all machines."""
        self.rest()
        self.come_up()
        self.rest()
        return self


def test_each_place_gets_a_machine_with_the_labels_of_its_group() -> None:
    kubernetes = {
        "Labels": {"team": "a"},
        "Taints": [{"Key": "dedicated", "Value": "x", "Effect": "NoExecute"}],
    }
    scripts = {"SourceS3Uri": "s3://sagemaker-x/y", "OnCreate": "on_create.sh"}
    more = {"KubernetesConfig": kubernetes, "LifeCycleConfig": scripts, "ThreadsPerCore": 1}
    bench = Bench(spec(groups={"head": 1, "workers": (2, more)}))
    made = bench.step()
    machines = [effect for effect in made.effects if isinstance(effect, CreateMachine)]
    assert len(machines) == 3
    worker = machines[1].spec
    assert (worker.cluster, worker.instance_group) == ("train", "workers")
    assert worker.logical_id == "workers-0"
    assert worker.labels["team"] == "a"
    assert worker.labels[CLUSTER_NAME] == "Train"
    assert worker.labels[INSTANCE_GROUP] == "workers"
    assert worker.labels[HEALTH] == "Schedulable"
    assert worker.labels["node.kubernetes.io/instance-type"] == "ml.p5.48xlarge"
    assert [(t.key, t.value, t.effect) for t in worker.taints] == [("dedicated", "x", "NoExecute")]
    assert worker.life_cycle.on_create == "on_create.sh"
    assert [one.spec.threads_per_core for one in machines] == [0, 1, 1]
    assert all(len(one.name) == len("hyperpod-i-") + 17 for one in machines)
    assert made.phase is ClusterPhase.CREATING


def test_nodes_that_are_there_follow_changed_labels_and_taints() -> None:
    def workers(**labels: str) -> dict[str, Any]:
        return {"workers": (2, {"KubernetesConfig": {"Labels": labels}, **DEEP})}

    bench = Bench(spec(groups=workers(team="a")))
    bench.rest()
    up, coming = bench.machines
    bench.come_up(up)
    bench.spec = spec(groups=workers(team="b"))
    bench.step()
    change = Configure(up, NodeConfig({"team": "a"}), NodeConfig({"team": "b"}))
    assert [one for one in bench.effects if isinstance(one, Configure)] == [change]
    # One that comes up may still register with what its machine said first.
    bench.rest()
    assert bench.machines[coming].config == NodeConfig({"team": "a"})
    bench.come_up()
    bench.rest()
    assert all(one.config == NodeConfig({"team": "b"}) for one in bench.machines.values())
    bench.step()
    assert not bench.effects


def test_a_cluster_is_in_service_when_all_run() -> None:
    bench = Bench(spec(groups={"head": 1, "workers": 2}))
    bench.rest()
    *most, last = bench.machines
    bench.come_up(*most)
    bench.rest()
    assert (bench.phase, bench.group("head")) == (ClusterPhase.CREATING, GroupPhase.IN_SERVICE)
    assert bench.group("workers") is GroupPhase.CREATING
    bench.come_up(last)
    bench.rest()
    assert bench.phase is ClusterPhase.IN_SERVICE
    assert "Cluster Train is InService" in bench.texts
    [operation] = bench.state.operations
    assert operation.status is OperationStatus.DONE
    assert [detail.desired_target for detail in operation.scaling] == [1, 2]


def test_rest_is_rest() -> None:
    bench = Bench(spec()).up()
    before = bench.state
    bench.now += 1e6
    bench.step()
    assert bench.state == before
    assert not bench.effects


def test_under_continuous_provisioning_a_cluster_is_in_service_at_once() -> None:
    bench = Bench(spec(continuous=True))
    bench.step()
    assert bench.phase is ClusterPhase.IN_SERVICE
    assert bench.group() is GroupPhase.CREATING


def test_who_decides_twice_makes_one_machine() -> None:
    bench = Bench(spec())
    first = bench.step().effects
    bench.machines.clear()  # as an informer that has not seen them yet
    bench.nodes.clear()
    assert [one for one in bench.step().effects if isinstance(one, CreateMachine)] == list(first)


def test_a_creation_that_fails_is_said_with_its_reason() -> None:
    bench = Bench(spec())
    bench.rest()
    bench.fail(next(iter(bench.machines)))
    bench.rest()
    assert bench.phase is ClusterPhase.FAILED
    assert "OnCreate ended with 1" in bench.message
    assert bench.group() is GroupPhase.FAILED
    [event] = [one for one in bench.state.events if one.metadata.get("Cluster")]
    assert "OnCreate ended with 1" in event.metadata["Cluster"]["FailureMessage"]


def test_an_update_that_fails_is_rolled_back() -> None:
    bench = Bench(spec()).up()
    bench.scale("workers", "workers-0", "workers-1", "workers-2")
    bench.step()
    assert bench.phase is ClusterPhase.UPDATING
    [new] = [one.name for one in bench.machines.values() if one.logical_id == "workers-2"]
    bench.fail(new)
    bench.step()
    assert bench.phase is ClusterPhase.ROLLING_BACK
    assert bench.spec.request["InstanceGroups"][0]["InstanceCount"] == 2
    bench.step()
    bench.vanish()
    bench.rest()
    assert bench.phase is ClusterPhase.IN_SERVICE
    assert "OnCreate ended with 1" in bench.message
    assert len(bench.machines) == 2


def test_fewer_are_wanted_and_the_right_ones_go() -> None:
    bench = Bench(spec()).up()
    bench.scale("workers", "workers-1")
    bench.step()
    deleted = [one.logical_id for one in bench.machines.values() if one.is_deleting]
    assert deleted == ["workers-0"]


def test_a_group_that_is_taken_away_goes_with_its_machines() -> None:
    bench = Bench(spec(groups={"head": 1, "workers": 1})).up()
    bench.spec = spec(groups={"head": 1})
    bench.step()
    assert bench.group("workers") is GroupPhase.DELETING
    assert bench.phase is ClusterPhase.UPDATING
    bench.vanish()
    bench.rest()
    assert bench.state.group("workers") is None
    assert bench.phase is ClusterPhase.IN_SERVICE


def test_a_machine_that_somebody_replaces_keeps_its_place() -> None:
    bench = Bench(spec()).up()
    old = next(iter(bench.machines.values()))
    name = "hyperpod-i-00000000000000000"
    bench.machines[name] = MachineView(name, old.logical_id, old.group, created_at=bench.now + 5)
    bench.nodes[name] = ClusterNode(name)
    bench.now += 5
    bench.step()
    assert bench.effects == (DeleteMachine(old.name),)
    assert bench.group() is GroupPhase.DEGRADED
    assert any("takes the place of" in text for text in bench.texts)
    bench.vanish()
    bench.come_up()
    bench.rest()
    assert bench.group() is GroupPhase.IN_SERVICE
    assert len(bench.machines) == 2


def test_a_machine_that_vanishes_is_made_anew_under_another_name() -> None:
    bench = Bench(spec()).up()
    lost = next(iter(bench.machines))
    del bench.machines[lost], bench.nodes[lost]
    bench.step()
    assert len(bench.machines) == 2
    assert lost not in bench.machines


def test_a_machine_is_made_anew_only_when_the_old_one_is_gone() -> None:
    bench = Bench(spec()).up()
    name = next(iter(bench.machines))
    bench.machines[name] = replace(bench.machines[name], is_deleting=True)
    bench.step()
    assert not bench.effects
    assert InstancePhase.SHUTTING_DOWN in [one.phase for one in bench.state.instances]


def test_under_continuous_provisioning_what_failed_is_tried_again() -> None:
    bench = Bench(spec(continuous=True))
    bench.rest()
    name = next(iter(bench.machines))
    bench.fail(name)
    assert bench.step().again_at == bench.now + RETRY_SECONDS
    bench.now += RETRY_SECONDS
    bench.step()
    assert bench.effects == (DeleteMachine(name),)


def test_a_minimum_that_is_not_met_in_time_is_given_up() -> None:
    bench = Bench(spec(continuous=True, groups={"workers": (2, {"MinInstanceCount": 2})}))
    bench.rest()
    assert bench.step().again_at == bench.now + MINIMUM_SECONDS
    bench.now += MINIMUM_SECONDS
    bench.step()
    assert bench.spec.targets["workers"] == []
    assert bench.group() is GroupPhase.FAILED
    assert any("was not met in 3 h" in text for text in bench.texts)


def test_new_nodes_are_checked_together_before_they_take_pods() -> None:
    bench = Bench(spec(groups={"workers": (2, DEEP)}))
    bench.step()
    assert {node.health for node in bench.nodes.values()} == {"Unschedulable"}
    first, second = bench.machines
    bench.come_up(first)
    made = bench.step()
    assert not made.effects, "it waits for the other"
    assert made.again_at is not None
    bench.come_up(second)
    [check] = bench.step().effects
    assert isinstance(check, CreateCheck)
    assert check.nodes == tuple(sorted((first, second)))
    assert check.kinds == (CheckKind.STRESS, CheckKind.CONNECTIVITY)
    assert {one.phase for one in bench.state.instances} == {InstancePhase.DEEP_CHECK}
    bench.rest()
    assert bench.phase is ClusterPhase.CREATING
    bench.end_check(check.name, CheckPhase.PASSED)
    bench.rest()
    assert {(n.health, n.deep_check) for n in bench.nodes.values()} == {("Schedulable", "Passed")}
    assert bench.phase is ClusterPhase.IN_SERVICE
    assert sum("passed its deep check" in text for text in bench.texts) == 2


def test_a_node_found_faulty_is_labelled_for_replacement() -> None:
    bench = Bench(spec(groups={"workers": (2, DEEP)}))
    bench.rest()
    bench.come_up()
    bench.rest()
    bad, good = sorted(bench.machines)
    [check] = bench.checks.values()
    bench.end_check(check.name, CheckPhase.FAILED, (bad,))
    bench.rest()
    assert bench.nodes[bad].health == "UnschedulablePendingReplacement"
    assert bench.nodes[bad].deep_check == "Failed"
    assert bench.nodes[good].health == "Schedulable"
    assert sum("failed its deep check" in text for text in bench.texts) == 1
    assert sum("passed its deep check" in text for text in bench.texts) == 1


def test_a_check_that_could_not_be_made_blames_nobody() -> None:
    bench = Bench(spec(groups={"workers": (1, DEEP)}))
    bench.rest()
    bench.come_up()
    bench.rest()
    [check] = bench.checks.values()
    bench.checks[check.name] = replace(check, message="no torch")
    bench.end_check(check.name, CheckPhase.UNKNOWN)
    bench.rest()
    [node] = bench.nodes.values()
    assert (node.health, node.deep_check) == ("Schedulable", "")
    assert sum("could not be checked: no torch" in text for text in bench.texts) == 1


def test_of_a_check_that_found_a_fault_a_node_without_a_verdict_has_not_passed() -> None:
    bench = Bench(spec(groups={"workers": (2, DEEP)}))
    bench.rest()
    bench.come_up()
    bench.rest()
    [check] = bench.checks.values()
    faulty, unknown = check.nodes
    bench.end_check(check.name, CheckPhase.UNKNOWN, (faulty,))
    bench.checks[check.name] = replace(
        bench.checks[check.name], phase=CheckPhase.FAILED, message="at fault: one"
    )
    bench.rest()
    assert bench.nodes[unknown].deep_check == ""
    assert not any("passed its deep check" in text for text in bench.texts)
    assert sum("could not be checked: at fault: one" in text for text in bench.texts) == 1


def test_a_result_is_reported_when_the_node_shows_it() -> None:
    bench = Bench(spec(groups={"workers": (1, DEEP)}))
    bench.rest()
    bench.come_up()
    bench.rest()
    [name], [check] = bench.nodes, bench.checks.values()
    waiting = replace(bench.nodes[name], is_held=True)
    bench.end_check(check.name, CheckPhase.PASSED)
    shown, bench.nodes[name] = bench.nodes[name], waiting
    bench.rest()
    assert not any("its deep check" in text for text in bench.texts)
    assert bench.phase is ClusterPhase.CREATING
    bench.nodes[name] = shown
    bench.rest()
    assert sum("passed its deep check" in text for text in bench.texts) == 1
    assert bench.phase is ClusterPhase.IN_SERVICE


def test_a_node_that_joins_anew_is_checked_anew() -> None:
    bench = Bench(spec(groups={"workers": (1, DEEP)}))
    bench.rest()
    bench.come_up()
    bench.rest()
    [name], [first] = bench.nodes, bench.checks
    joined = bench.nodes[name]
    bench.end_check(first, CheckPhase.PASSED)
    bench.rest()
    bench.nodes[name] = joined  # its Node was deleted; its kubelet made it again, as at first
    bench.rest()
    [second] = bench.checks.keys() - {first}
    bench.end_check(second, CheckPhase.PASSED)
    bench.rest()
    assert (bench.nodes[name].health, bench.nodes[name].deep_check) == ("Schedulable", "Passed")
    assert len(bench.checks) == 2


def test_a_check_on_demand_ends_its_operation() -> None:
    bench = Bench(spec()).up()
    request = CheckRequest("workers", (CheckKind.STRESS,))
    asked = OperationState("0123abcd-1", OperationType.DEEP_CHECK, bench.now, checks=(request,))
    bench.state = replace(bench.state, operations=(*bench.state.operations, asked))
    [check] = bench.step().effects
    assert isinstance(check, CreateCheck)
    assert check.name == "train-0123abcd-0"
    bench.rest()
    assert bench.state.operations[-1].status is OperationStatus.IN_PROGRESS
    bench.checks[check.name] = replace(bench.checks[check.name], phase=CheckPhase.PASSED)
    bench.rest()
    assert bench.state.operations[-1].status is OperationStatus.DONE
    assert any("Deep health check has ended" in text for text in bench.texts)


def test_a_scaling_that_is_overtaken_says_so() -> None:
    bench = Bench(spec(continuous=True)).up()
    bench.scale("workers", "workers-0", "workers-1", "workers-2")
    bench.step()
    bench.scale("workers", "workers-0")
    bench.step()
    statuses = [one.status for one in bench.state.operations]
    assert statuses == [
        OperationStatus.DONE,
        OperationStatus.SUPERSEDED,
        OperationStatus.IN_PROGRESS,
    ]


def test_software_is_updated_a_batch_at_a_time() -> None:
    bench = Bench(spec(groups={"workers": 3})).up()
    update = SoftwareUpdate(bench.now, ("workers",), tuple(bench.machines), batch=1)
    bench.state = replace(bench.state, update=update)
    replaced = []
    for number in range(3):
        [order] = bench.step().effects
        assert isinstance(order, ReplaceNode)
        assert bench.phase is ClusterPhase.SYSTEM_UPDATING
        assert not bench.step().effects, "ordered once"
        replaced.append(order.name)
        old = bench.machines.pop(order.name)
        del bench.nodes[order.name]
        name = f"hyperpod-i-{number:017x}"
        bench.machines[name] = MachineView(name, old.logical_id, old.group, created_at=bench.now)
        bench.nodes[name] = ClusterNode(name)
        assert not bench.step().effects, "the new one is not up yet"
        bench.come_up()
    bench.rest()
    assert len(set(replaced)) == 3
    assert bench.state.update is None
    assert bench.phase is ClusterPhase.IN_SERVICE


def test_a_cluster_goes_when_its_last_machine_is_gone() -> None:
    bench = Bench(spec()).up()
    bench.is_deleting = True
    bench.step()
    assert bench.phase is ClusterPhase.DELETING
    assert all(one.is_deleting for one in bench.machines.values())
    assert not bench.step().effects
    bench.vanish()
    assert bench.step().effects == (ReleaseCluster(),)


def test_events_are_bounded_and_have_ids_of_their_own() -> None:
    bench = Bench(spec(continuous=True)).up()
    for number in range(EVENTS_MAX // 4):
        bench.scale("workers", *(f"workers-{one}" for one in range(6 * (number % 2))))
        bench.step()
        bench.step()
        bench.vanish()
    assert len(bench.state.events) == EVENTS_MAX
    assert len({event.id for event in bench.state.events}) == EVENTS_MAX
    assert len(bench.state.operations) <= 100


@pytest.mark.parametrize(
    ("config", "percent"),
    [
        (None, None),
        ({"Mode": "Disable", PERCENT: 40}, 0),
        ({"Mode": "Enable", PERCENT: 40}, 40),
        ({"Mode": "Enable"}, 20),
        # The cluster API stores none of these; a person may have changed the object.
        ({}, 0),
        ("Enable", None),
        ({"Mode": "Enable", PERCENT: 4000}, 20),
        ({"Mode": "Enable", PERCENT: "all"}, 20),
    ],
)
def test_the_memory_for_checkpoints_is_what_the_cluster_says(
    config: Any, percent: int | None
) -> None:
    given = spec()
    if config is not None:
        given = replace(given, request={**given.request, "TieredStorageConfig": config})
    assert checkpoint_percent(given) == percent
