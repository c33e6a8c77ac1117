"""Facts about nodes for a check: their types, and the measured speed of their links.  Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from math import isfinite

from lightkube.resources.core_v1 import Node

from unbroken.core.nodes.checks.limits import Fleet, learn
from unbroken.kube.cache import key_of
from unbroken.spec.keys import LINK_BANDWIDTH
from unbroken.spec.nodes.values import instance_type_of

from .checks_pods import is_local


def instance_type(node: Node) -> str:
    """Return the instance type in its labels; empty: they have none."""
    return instance_type_of((node.metadata and node.metadata.labels) or {})


def fleet_of(nodes: Collection[Node], asked: Iterable[str], told: Mapping[str, float]) -> Fleet:
    """Return facts for a check of the nodes `asked`, from all `nodes` of the cluster."""
    names = set(asked)
    types = {key_of(node).name: instance_type(node) for node in nodes}
    wanted = {types.get(name, "") for name in names}
    shown = [
        (kind, speed)
        for node in nodes
        if (kind := types[key_of(node).name]) in wanted and (speed := _speed(node)) is not None
    ]
    return Fleet({name: types.get(name, "") for name in names}, told, learn(shown))


def better(node: Node, speed: float | None) -> str | None:
    """Return the annotation to write after a check that has measured `speed`; None: it stays.

    The best is kept: a network that slows down gradually does not become the usual.
    """
    if speed is None or is_local(node) or speed <= (_speed(node) or 0.0):
        return None
    return f"{speed:.4f}"


def _speed(node: Node) -> float | None:
    text = ((node.metadata and node.metadata.annotations) or {}).get(LINK_BANDWIDTH, "")
    try:
        speed = float(text)
    except ValueError:
        return None
    return speed if isfinite(speed) and speed > 0 else None
