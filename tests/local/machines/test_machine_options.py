"""Capacity and labels of a machine's node."""

from __future__ import annotations

from pathlib import Path

import pytest

from unbroken.errors import SpecError
from unbroken.local.machines.pool import machine_size, maker
from unbroken.local.node import NodeOptions
from unbroken.local.state import ClusterOptions, Paths
from unbroken.spec.nodes.kinds import MachineSpec, MachineTaint

TYPE = "node.kubernetes.io/instance-type"
HEALTH = "sagemaker.amazonaws.com/node-health-status"


def made(options: ClusterOptions, spec: MachineSpec | None = None) -> NodeOptions:
    """Return the node of a machine `m` in a cluster of these options."""
    return maker(Paths(Path("/d")), options, "token")("m", spec or MachineSpec(), 7, "boot")


def offered(node: NodeOptions) -> tuple[str, str, int, dict[str, str]]:
    """Return its capacity."""
    return str(node.cpu), node.memory, node.gpus, dict(node.resources)


def test_without_a_type_it_offers_what_the_cluster_or_this_machine_says() -> None:
    host = machine_size()
    assert offered(made(ClusterOptions())) == (host["cpu"], host["memory"], 0, {})
    options = ClusterOptions(cpu="3", gpus=2, resources={"example.com/x": "1"})
    assert offered(made(options)) == ("3", host["memory"], 2, {"example.com/x": "1"})
    assert TYPE not in made(options).labels


def test_a_machines_own_type_counts_before_everything() -> None:
    options = ClusterOptions(cpu="3", gpus=2, instance_type="ml.g5.xlarge")
    node = made(options, MachineSpec(instance_type="ml.trn1.32xlarge"))
    devices = {"vpc.amazonaws.com/efa": "8", "aws.amazon.com/neuron": "16"}
    assert offered(node) == ("128", "524288Mi", 0, devices)
    assert node.labels[TYPE] == "ml.trn1.32xlarge"


@pytest.mark.parametrize(
    ("kind", "threads", "cpus"),
    [
        ("ml.p5.48xlarge", 0, "192"),
        ("ml.p5.48xlarge", 2, "192"),
        ("ml.p5.48xlarge", 1, "96"),
        ("ml.g6e.xlarge", 1, "2"),
        # Their cores have one thread anyway.
        ("ml.c6g.medium", 1, "1"),
        ("ml.c8a.16xlarge", 1, "64"),
        ("ml.p6e-gb200.36xlarge", 1, "144"),
    ],
)
def test_with_one_thread_per_core_it_offers_a_cpu_for_each_core(
    kind: str, threads: int, cpus: str
) -> None:
    node = made(ClusterOptions(), MachineSpec(instance_type=kind, threads_per_core=threads))
    assert node.cpu == cpus


def test_the_clusters_type_fills_what_no_option_says() -> None:
    node = made(ClusterOptions(cpu="3", instance_type="ml.g5.12xlarge"))
    assert offered(node) == ("3", "196608Mi", 4, {"vpc.amazonaws.com/efa": "1"})
    assert node.labels[TYPE] == "ml.g5.12xlarge"


def test_an_unknown_type_is_refused() -> None:
    with pytest.raises(SpecError, match=r"ml\.p9\.48xlarge"):
        made(ClusterOptions(), MachineSpec(instance_type="ml.p9.48xlarge"))


def test_labels_of_a_machine_are_first_ones_and_its_taints_go_with_them() -> None:
    spec = MachineSpec(
        instance_group="worker",
        labels={HEALTH: "Unschedulable"},
        taints=(MachineTaint(HEALTH, "NoSchedule", "Unschedulable"),),
    )
    node = made(ClusterOptions(labels={"rack": "1"}), spec)
    assert node.labels == {"rack": "1"}
    assert node.first_labels == {
        HEALTH: "Unschedulable",
        "sagemaker.amazonaws.com/compute-type": "hyperpod",
        "sagemaker.amazonaws.com/instance-group-name": "worker",
    }
    assert [dict(one) for one in node.taints] == [
        {"key": HEALTH, "effect": "NoSchedule", "value": "Unschedulable"}
    ]
    assert (node.directory, node.index, node.boot_id) == (Path("/d/nodes/m"), 7, "boot")
