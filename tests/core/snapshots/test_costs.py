"""The cost of each kind of loss: steps to make again, and the source of the state."""

from __future__ import annotations

from dataclasses import replace

import pytest

from unbroken.core.snapshots.costs import LossCost, LossKind, PodSnapshots, Source, loss_costs
from unbroken.wire.agent import SnapshotState

NODES = 4
NEWEST, CHECKPOINT = 110, 60


def sharded(**changes: object) -> list[PodSnapshots]:
    """Four nodes with one rank each; all have step 109, and their buddies 105."""
    state = SnapshotState(0, "training", 109, 1000, 0.01, buddy_step=105, common_step=104)
    return [
        PodSnapshots(
            f"node-{rank}",
            (rank + 2) % NODES,
            (replace(state, rank=rank, **changes),),  # type: ignore[arg-type]
        )
        for rank in range(NODES)
    ]


def costs(pods: list[PodSnapshots], checkpoint: int | None = CHECKPOINT) -> dict[str, str]:
    """Return source, step and steps of each kind of loss."""
    return {
        one.loss.value: f"{one.source.value} {one.step} {one.steps}"
        for one in loss_costs(pods, NEWEST, checkpoint)
    }


def test_each_kind_of_loss_has_its_source() -> None:
    assert costs(sharded()) == {
        "worker": "memory 109 1",
        "rank 0": "memory 109 1",
        "node": "buddy 104 6",
        "node and its buddy": "checkpoint 60 50",
    }


def test_without_a_checkpoint_all_steps_are_made_again() -> None:
    found = loss_costs(sharded(), NEWEST, None)[-1]
    assert found == LossCost(LossKind.NODE_AND_BUDDY, Source.NOTHING, None, NEWEST + 1)


@pytest.mark.parametrize(
    ("changes", "node"),
    [
        ({"buddy_step": 109}, "buddy 109 1"),
        ({"buddy_step": 110}, "buddy 104 6"),
        ({"buddy_step": None, "common_step": None}, "checkpoint 60 50"),
        ({"replicas": "0-3"}, "replica 109 1"),
        ({"replicas": "0-1,..."}, "replica 109 1"),
        ({"replicas": "..."}, "buddy 104 6"),
        ({"replicas": "7-9999999999"}, "buddy 104 6"),
        ({"replicas": "-,x,1-y,-3"}, "buddy 104 6"),
    ],
    ids=["its buddy is up to date", "the survivors lack the buddy's step", "nothing was sent",
         "replicas", "replicas, cut", "all of them cut", "ranks that nobody has", "no ranges"],
)  # fmt: skip
def test_a_lost_node_costs(changes: dict[str, object], node: str) -> None:
    assert costs(sharded(**changes))["node"] == node


def test_the_dearest_node_counts() -> None:
    pods = sharded()
    late = replace(pods[2].ranks[0], common_step=90)
    pods[2] = replace(pods[2], ranks=(late,))
    assert costs(pods)["node"] == "buddy 90 20"
    pods[3] = replace(pods[3], buddy=None)
    assert costs(pods)["node"] == "checkpoint 60 50"


def test_replicas_on_other_nodes_outlive_a_node_and_its_buddy() -> None:
    pods = [
        replace(pod, ranks=(replace(pod.ranks[0], replicas=replicas),))
        for pod, replicas in zip(sharded(), ["0-1", "0-1", "2-3", "2-3"], strict=True)
    ]
    assert costs(pods)["node and its buddy"] == "replica 109 1"
    seen = [
        replace(pod, buddy=1 - index, ranks=(replace(pod.ranks[0], replicas="0,2"),))
        for index, pod in enumerate(pods[:2])
    ]
    assert costs(seen)["node"] == "buddy 104 6", "the pod of rank 2 does not answer"


def test_pods_of_one_node_are_lost_together() -> None:
    pods = [replace(pod, node=f"node-{index % 2}") for index, pod in enumerate(sharded())]
    assert costs(pods) == {
        "worker": "memory 109 1",
        "rank 0": "memory 109 1",
        "node": "checkpoint 60 50",
    }, "each has its buddy on the same node"


def test_who_has_saved_nothing_has_no_costs() -> None:
    assert loss_costs([], NEWEST, CHECKPOINT) == ()
    assert loss_costs([PodSnapshots("a", None, ())], NEWEST, CHECKPOINT) == ()
