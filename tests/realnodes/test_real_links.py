"""The check of links between real nodes: it names the node of a slow link, or no node."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.e2e.clusters import UNBROKEN
from tests.realnodes import machines
from tests.realnodes.plane import RealCluster, operator, repair_options, until
from unbroken.spec.keys import INSTANCE_TYPES, LINK_BANDWIDTH

NODES = 3
pytestmark = [
    pytest.mark.slow,
    pytest.mark.heavy,
    pytest.mark.realkube,
    pytest.mark.timeout(900),
]

CHECK = ["check", "--kind", "InstanceConnectivity", "--seconds", "2", "-o", "json"]
RATE = ["tbf", "rate", "80mbit", "burst", "64kb", "latency", "100ms"]
"""Options of tc for 10 MB/s; the bridge carries hundreds."""


@contextmanager
def slow_link(cluster: RealCluster, node: str) -> Iterator[None]:
    """Slow down all packets to a node."""
    link = f"un-{machines.number_of(cluster.directory, node)}"
    subprocess.run(["tc", "qdisc", "add", "dev", link, "root", *RATE], check=True)
    try:
        yield
    finally:
        subprocess.run(["tc", "qdisc", "del", "dev", link, "root"], check=True)


def check(cluster: RealCluster, *nodes: str) -> tuple[int, dict[str, Any]]:
    """Run `unbroken check` of these nodes, or of all; return its exit code and output."""
    command = [*UNBROKEN, *CHECK, *cluster.operator_options, *nodes]
    done = subprocess.run(
        command, env=cluster.environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode in (0, 1, 3), done.stderr
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def passes(cluster: RealCluster, *nodes: str) -> None:
    """Check nodes until no link is slow: other programs of this machine may slow one down."""
    found: list[dict[str, Any]] = []

    def is_passed() -> bool:
        code, said = check(cluster, *nodes)
        found.append(said)
        return (code, said["phase"], said.get("faulty") or []) == (0, "Passed", [])

    try:
        until(is_passed, "the check passes", 300)
    except AssertionError as error:
        raise AssertionError(f"{error}: {json.dumps(found)}") from None


def test_a_node_behind_a_slow_link_is_named_and_without_one_none(
    cluster: RealCluster, record_property: Callable[[str, object], None]
) -> None:
    # None: a node that fails is shown, and left as it is for the second look.
    with operator(cluster, *repair_options(cluster), "--node-recovery", "None"):
        passes(cluster)
        with slow_link(cluster, "n2"):
            code, said = check(cluster)
        assert (code, said["phase"], said.get("faulty")) == (1, "Failed", ["n2"]), said
        [slow] = [one for one in said["results"] if one["outcome"] == "fail"]
        assert slow["node"] == "n2"
        assert slow["measured"] < slow["expected"]
        record_property("usual, at least half of it", f"{slow['expected']:.2f} GB/s")
        record_property("behind 80 Mbit/s", f"{slow['measured']:.3f} GB/s")


def test_what_a_type_has_shown_is_asked_of_two_that_meet_alone(cluster: RealCluster) -> None:
    for number in range(1, NODES + 1):
        kind = f"{INSTANCE_TYPES[0]}=ml.c5.large"
        cluster.kubectl("label", "node", f"n{number}", "--overwrite", kind)
    with operator(cluster, *repair_options(cluster), "--node-recovery", "None"):
        passes(cluster)
        shown = [
            one["metadata"]["annotations"][LINK_BANDWIDTH] for one in cluster.get("nodes")["items"]
        ]
        assert min(map(float, shown)) > 0.0
        with slow_link(cluster, "n2"):
            code, said = check(cluster, "n1", "n2")
        # Nobody has met a third: either may be the slow one, but neither has passed.
        assert (code, said["phase"], said.get("faulty") or []) == (3, "Unknown", []), said
        assert any("either may be at fault" in one["message"] for one in said["results"]), said
        after = [
            one["metadata"]["annotations"][LINK_BANDWIDTH] for one in cluster.get("nodes")["items"]
        ]
        assert after == shown
        passes(cluster, "n1", "n2")
