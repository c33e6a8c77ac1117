"""What nodes have shown is kept on them, and read from those that can be compared."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from lightkube.resources.core_v1 import Node

from unbroken.core.nodes.checks.limits import FLEET_SHARE
from unbroken.operator.nodes.checks_fleet import better, fleet_of
from unbroken.spec.keys import LINK_BANDWIDTH

BIG = "ml.p5.48xlarge"
INFO = dict.fromkeys(
    [
        *("architecture", "bootID", "containerRuntimeVersion", "kernelVersion", "kubeletVersion"),
        *("kubeProxyVersion", "machineID", "operatingSystem", "osImage", "systemUUID"),
    ],
    "",
)
"""All that the type asks for."""


def node(name: str, kind: str = BIG, speed: str = "", runtime: str = "containerd://1.6") -> Node:
    content: dict[str, Any] = {
        "metadata": {
            "name": name,
            "labels": {"node.kubernetes.io/instance-type": kind} if kind else {},
            "annotations": {LINK_BANDWIDTH: speed} if speed else {},
        },
        "status": {"nodeInfo": {**INFO, "containerRuntimeVersion": runtime}},
    }
    return msgspec.convert(content, Node)


def test_a_check_knows_what_other_nodes_of_its_types_have_shown() -> None:
    nodes = [node(f"n{number}", speed=f"{number + 1}.5") for number in range(5)]
    others = [node(f"other{number}", "ml.g5.8xlarge", "100.0") for number in range(3)]
    found = fleet_of([*nodes, *others, node("bare", "")], ["n0", "bare", "gone"], {"x": 1.0})
    assert found.types == {"n0": BIG, "bare": "", "gone": ""}
    assert found.learned == {BIG: round(3.5 * FLEET_SHARE, 4)}
    assert found.configured == {"x": 1.0}


@pytest.mark.parametrize("text", ["", "fast", "nan", "inf", "-3", "0"])
def test_an_annotation_that_is_no_speed_is_none(text: str) -> None:
    nodes = [node(f"n{number}", speed=text) for number in range(3)]
    assert fleet_of(nodes, ["n0"], {}).learned == {}
    assert better(nodes[0], 0.5) == "0.5000"


def test_the_best_that_a_node_has_shown_is_kept() -> None:
    assert better(node("a", speed="40.0"), 12.0) is None
    assert better(node("a", speed="40.0"), 41.25) == "41.2500"
    assert better(node("a"), None) is None
    assert better(node("a", runtime="unbroken://0.1.0"), 41.0) is None
