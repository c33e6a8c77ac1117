"""Facts about nodes for a check: their types, and the measured speed of their links.  Pure."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping

from lightkube.resources.core_v1 import Node

from unbroken.core.nodes.checks.limits import Fleet, learn
from unbroken.foreign_numbers import finite_number
from unbroken.kube.cache import key_of
from unbroken.operator.instance_types import instance_types
from unbroken.spec.keys import DEVICE_BANDWIDTH, LINK_BANDWIDTH
from unbroken.spec.nodes.values import instance_type_of

from .checks_pods import gpus_of, is_local


def instance_type(node: Node) -> str:
    """Return the instance type in its labels; empty: they have none."""
    return instance_type_of((node.metadata and node.metadata.labels) or {})


def fleet_of(
    nodes: Collection[Node],
    asked: Iterable[str],
    told: Mapping[str, float],
    inside: Mapping[str, float],
) -> Fleet:
    """Return facts for a check of the nodes `asked`, from all `nodes` of the cluster.

    `told`, `inside`: configured GB/s of two nodes, and of the devices of one, by instance type.
    """
    names = set(asked)
    types = {key_of(node).name: instance_type(node) for node in nodes}
    alike = [
        node for node in nodes if types[key_of(node).name] in {types.get(n, "") for n in names}
    ]
    return Fleet(
        {name: types.get(name, "") for name in names},
        told,
        _published([node for node in nodes if key_of(node).name in names]),
        learn(_shown(alike, LINK_BANDWIDTH)),
        inside,
        learn(_shown(alike, DEVICE_BANDWIDTH)),
    )


def _published(nodes: Iterable[Node]) -> dict[str, float]:
    """Return the published GB/s of instance types, where every node has all GPUs of its type."""
    table = instance_types()
    least: dict[str, float] = {}
    for node in nodes:
        kind = table.get(instance_type(node))
        is_whole = kind is not None and not is_local(node) and gpus_of(node) == str(kind.gpus)
        least[instance_type(node)] = kind.all_reduce if kind is not None and is_whole else 0.0
    return {name: speed for name, speed in least.items() if speed}


def _shown(nodes: Iterable[Node], key: str) -> list[tuple[str, float]]:
    return [
        (instance_type(node), speed) for node in nodes if (speed := _speed(node, key)) is not None
    ]


def better(node: Node, key: str, speed: float | None) -> str | None:
    """Return the annotation to write after a check that has measured `speed`; None: it stays.

    The best is kept: a network that slows down gradually does not become the usual.
    """
    if speed is None or is_local(node) or speed <= (_speed(node, key) or 0.0):
        return None
    return f"{speed:.4f}"


def _speed(node: Node, key: str) -> float | None:
    text = ((node.metadata and node.metadata.annotations) or {}).get(key, "")
    return finite_number(text, 0.0, sys.float_info.max) or None
