"""NodeRecovery `None`: no order, drain, test or label, whatever happens to a node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.core.nodes.drive_repair import World
from unbroken.core.nodes.repair.events import (
    ClusterSeen,
    PatchNode,
    PodsSeen,
    RecordRepairEvent,
    RepairSettings,
    WriteRecord,
)
from unbroken.spec.nodes.kinds import NodeRecordSpec, RepairState
from unbroken.spec.nodes.values import Action, Health, NodeRecovery

DAY = 86400.0


def world(option: NodeRecovery, cluster: NodeRecovery | None) -> World:
    """Five nodes; `option` is the operator's, `cluster` the Cluster's."""
    found = World(RepairSettings(recovery=option), recovery=cluster)
    found.add("node-0", "node-1", "node-2", "node-3", "node-4")
    found.start()
    found.settle()
    return found


def flap(found: World) -> None:
    """The node goes silent again and again."""
    for _ in range(6):
        found.silence("node-0")
        found.wait(700)
        found.speak("node-0")
        found.wait(60)


def fail_check(found: World) -> None:
    """A deep check that somebody asked for has failed."""
    node = found.nodes["node-0"]
    found.change(replace(node, health=Health.PENDING_REPLACEMENT, has_failed_check=True))


def label(health: Health) -> Callable[[World], None]:
    """A person sets the label."""

    def trouble(found: World) -> None:
        found.change(replace(found.nodes["node-0"], health=health))

    return trouble


def quarantine(found: World) -> None:
    """Restore a quarantine from automatic recovery, without the taint that a person removed."""
    found.records["node-0"] = NodeRecordSpec(quarantined_at=found.now - 60)
    found.start()


TROUBLES: dict[str, Callable[[World], None]] = {
    "reset": lambda found: found.fault("node-0", action=Action.RESET_GPU),
    "reboot": lambda found: found.fault("node-0", action=Action.REBOOT),
    "replace": lambda found: found.fault("node-0", action=Action.REPLACE),
    "lost": lambda found: found.silence("node-0"),
    "flapping": flap,
    "failed check": fail_check,
    "label reboot": label(Health.PENDING_REBOOT),
    "label replacement": label(Health.PENDING_REPLACEMENT),
    "quarantined": quarantine,
}


@pytest.mark.parametrize("trouble", TROUBLES)
@pytest.mark.parametrize(
    ("option", "cluster"),
    [
        (NodeRecovery.NONE, None),
        (NodeRecovery.NONE, NodeRecovery.NONE),
        (NodeRecovery.AUTOMATIC, NodeRecovery.NONE),
    ],
)
def test_nothing_is_done_to_the_node(
    trouble: str, option: NodeRecovery, cluster: NodeRecovery | None
) -> None:
    found = world(option, cluster)
    TROUBLES[trouble](found)
    found.wait(DAY)
    # Another operator takes over.
    found.start()
    found.wait(DAY)
    assert not found.done()
    written = [one for one in found.effects if not isinstance(one, WriteRecord | RecordRepairEvent)]
    # The taint moves with the label that a person has set, whoever repairs.
    done = [one for one in written if one != PatchNode("node-0", taint=True)]
    assert not done, "records and events are all else that is written"


@pytest.mark.parametrize("trouble", sorted(TROUBLES.keys() - {"flapping", "quarantined"}))
def test_the_same_is_repaired_where_the_cluster_says_automatic(trouble: str) -> None:
    found = world(NodeRecovery.NONE, NodeRecovery.AUTOMATIC)
    TROUBLES[trouble](found)
    found.wait(DAY)
    assert found.done()


def test_repair_that_waits_or_drains_ends_when_the_cluster_is_set_to_none() -> None:
    found = world(NodeRecovery.AUTOMATIC, NodeRecovery.AUTOMATIC)
    for name in ("node-0", "node-1"):
        found.tell(PodsSeen(name, (f"lm-{name}",)))
        found.fault(name)
    found.wait(1)
    states = {found.state(name) for name in ("node-0", "node-1")}
    assert states == {RepairState.DRAINING, RepairState.WAITING}
    found.tell(ClusterSeen("c", NodeRecovery.NONE))
    found.wait(DAY)
    assert not found.done()
    for name in ("node-0", "node-1"):
        assert found.state(name) is None
        assert found.records[name].history[-1].message == "NodeRecovery is None now"
