"""A node that drains, and the Ray pods on it: the repairer and auto-resume together.

KubeRay moves no pod off an unhealthy node.  Without auto-resume, training went on there until the
drain ended, 600 s later, and the reboot killed it.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from lightkube.models.core_v1 import NodeCondition, NodeStatus
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.core_v1 import Node

from tests.core.nodes.drive_repair import World, world
from tests.core.test_ray_resume import BY_DEFAULT, JOB_WELL, WELL
from unbroken.core.auto_resume import WINDOW_SECONDS, DeleteResumedPod, PodNode
from unbroken.core.nodes.repair.events import PodsSeen, RepairSettings
from unbroken.core.ray_resume import RayPicture, RayResume, SuspendRayCluster, WriteRayRecord
from unbroken.operator.resume.jobs import node_state
from unbroken.spec.keys import HEALTH
from unbroken.spec.nodes.kinds import RepairState
from unbroken.spec.nodes.values import Action

RAYJOB_BY_DEFAULT = replace(
    JOB_WELL, resume=BY_DEFAULT.resume, record=BY_DEFAULT.record, state=BY_DEFAULT.state
)
SUBJECTS = pytest.mark.parametrize(
    "ray",
    [WELL, BY_DEFAULT, JOB_WELL, RAYJOB_BY_DEFAULT],
    ids=["raycluster", "raycluster by default", "rayjob", "rayjob by default"],
)


def seen_by_resume(found: World) -> dict[str, PodNode]:
    """Return the nodes as auto-resume reads the objects that the repairer has labelled."""
    states = {}
    for name, node in found.nodes.items():
        ready = NodeCondition(type="Ready", status="True")
        labels = {HEALTH: node.health.value} if node.health is not None else {}
        metadata = ObjectMeta(name=name, labels=labels)
        states[name] = node_state(Node(metadata=metadata, status=NodeStatus(conditions=[ready])))
    return states


def follow(found: World, machine: RayResume, ray: RayPicture) -> RayPicture:
    """Carry out the orders of auto-resume at this moment, as the operator and KubeRay do."""
    ray = replace(ray, nodes=seen_by_resume(found))
    for effect in machine.step(ray, found.now):
        match effect:
            case WriteRayRecord():
                version = ray.version + "1"
                ray = replace(ray, record=effect.record, state=effect.state, version=version)
            case DeleteResumedPod(uid=uid):
                ray = replace(ray, pods=tuple(pod for pod in ray.pods if pod.uid != uid))
            case SuspendRayCluster():
                ray = replace(ray, pods=(), is_suspension_asked=True)
    for name in found.nodes:
        found.tell(PodsSeen(name, tuple(pod.name for pod in ray.pods if pod.node == name)))
    return ray


@SUBJECTS
@pytest.mark.parametrize("pod", ["ray-head", "ray-w-1"])
def test_ray_leaves_a_node_that_drains_within_seconds(ray: RayPicture, pod: str) -> None:
    assert RepairSettings().drain_seconds == 600.0
    found, machine = world(), RayResume()
    pods = [replace(one, node=f"node-{number}") for number, one in enumerate(ray.pods)]
    (lost,) = (one for one in pods if one.name == pod)
    assert lost.node is not None
    ray = follow(found, machine, replace(ray, pods=tuple(pods)))
    assert len(ray.pods) == 3
    found.fault(lost.node)
    found.settle()
    assert found.state(lost.node) is RepairState.DRAINING
    drains = found.now
    while lost in ray.pods:
        assert found.now <= drains + WINDOW_SECONDS + 1.0
        ray = follow(found, machine, ray)
        found.wait(1.0)
    assert found.done() == [(lost.node, Action.REBOOT)]
    others = {one.name for one in ray.pods}
    assert others == (set() if pod == "ray-head" else {one.name for one in pods} - {pod})
