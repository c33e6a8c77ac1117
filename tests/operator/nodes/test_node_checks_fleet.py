"""Results of checks, which are kept on their nodes and read from comparable nodes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from lightkube.resources.core_v1 import Node

from unbroken.core.nodes.checks.plan import FLEET_SHARE
from unbroken.operator.nodes.checks import better, fleet_of
from unbroken.spec.keys import DEVICE_BANDWIDTH, LINK_BANDWIDTH

BIG = "ml.p5.48xlarge"
INFO = dict.fromkeys(
    [
        *("architecture", "bootID", "containerRuntimeVersion", "kernelVersion", "kubeletVersion"),
        *("kubeProxyVersion", "machineID", "operatingSystem", "osImage", "systemUUID"),
    ],
    "",
)
"""All fields that the type requires."""


def node(
    name: str,
    kind: str = BIG,
    speed: str = "",
    runtime: str = "containerd://1.6",
    key: str = LINK_BANDWIDTH,
    gpus: str = "8",
) -> Node:
    content: dict[str, Any] = {
        "metadata": {
            "name": name,
            "labels": {"node.kubernetes.io/instance-type": kind} if kind else {},
            "annotations": {key: speed} if speed else {},
        },
        "status": {
            "allocatable": {"nvidia.com/gpu": gpus},
            "nodeInfo": {**INFO, "containerRuntimeVersion": runtime},
        },
    }
    return msgspec.convert(content, Node)


def test_a_check_knows_what_other_nodes_of_its_types_have_shown() -> None:
    nodes = [node(f"n{number}", speed=f"{number + 1}.5") for number in range(5)]
    others = [node(f"other{number}", "ml.g5.8xlarge", "100.0") for number in range(3)]
    known = [*nodes, *others, node("bare", "")]
    found = fleet_of(known, ["n0", "bare", "gone"], {"x": 1.0}, {"x": 2.0})
    assert found.types == {"n0": BIG, "bare": "", "gone": ""}
    assert found.learned == {BIG: round(3.5 * FLEET_SHARE, 4)}
    assert found.inside_learned == {}
    assert (found.configured, found.inside) == ({"x": 1.0}, {"x": 2.0})


def test_what_gpus_of_other_nodes_have_shown_together_is_known_too() -> None:
    nodes = [node(f"n{number}", speed="400.0", key=DEVICE_BANDWIDTH) for number in range(3)]
    found = fleet_of(nodes, ["n0"], {}, {})
    assert (found.learned, found.inside_learned) == ({}, {BIG: 400.0 * FLEET_SHARE})


@pytest.mark.parametrize("kind", ["ml.p4d.24xlarge", "ml.p5.48xlarge"])
def test_a_published_limit_holds_for_whole_machines_of_the_type(kind: str) -> None:
    """Check that a published limit is used only for whole machines of its type.

    HyperPod's documents give 80 GB/s for these two, and no value for p4de.
    """
    whole = [node("a", kind), node("b", kind), node("c", "ml.p4de.24xlarge")]
    assert fleet_of(whole, ["a", "b", "c"], {}, {}).published == {kind: 80.0}
    for other in (node("b", kind, gpus="7"), node("b", kind, runtime="unbroken://0.1.0")):
        assert fleet_of([whole[0], other], ["b"], {}, {}).published == {}


@pytest.mark.parametrize("text", ["", "fast", "nan", "inf", "-3", "0"])
def test_an_annotation_that_is_no_speed_is_none(text: str) -> None:
    nodes = [node(f"n{number}", speed=text) for number in range(3)]
    assert fleet_of(nodes, ["n0"], {}, {}).learned == {}
    assert better(nodes[0], LINK_BANDWIDTH, 0.5) == "0.5000"


def test_the_best_that_a_node_has_shown_is_kept() -> None:
    assert better(node("a", speed="40.0"), LINK_BANDWIDTH, 12.0) is None
    assert better(node("a", speed="40.0"), LINK_BANDWIDTH, 41.25) == "41.2500"
    assert better(node("a"), LINK_BANDWIDTH, None) is None
    assert better(node("a", runtime="unbroken://0.1.0"), LINK_BANDWIDTH, 41.0) is None
