"""Ray's own autoscaler on the local cluster: tasks bring pods, idleness takes them away."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.clusters import Cluster
from tests.e2e.test_ray import ENVIRONMENT, pods_of
from tests.e2e.test_ray_after_losses import SIZES, group, submit_job

pytestmark = [pytest.mark.slow, pytest.mark.frameworks, pytest.mark.timeout(600)]
Object = dict[str, Any]
SCRIPT = """\
import pathlib
import sys
import time

import ray

place = pathlib.Path(sys.argv[1])
ray.init(log_to_driver=False)


@ray.remote(num_cpus=1)
def work(number):
    (place / f"began-{number}").touch()
    while not (place / "enough").exists():
        time.sleep(0.2)


ray.get([work.remote(number) for number in range(2)])
"""


def spec(least: int, most: int) -> Object:
    """A RayCluster whose head takes no task, and that is autoscaled."""
    head = group("2Gi")
    workers = group("1Gi", groupName="workers", replicas=0, minReplicas=least, maxReplicas=most)
    small = {"cpu": "100m", "memory": "512Mi"}
    return {
        "enableInTreeAutoscaling": True,
        "autoscalerOptions": {
            "idleTimeoutSeconds": 5,
            "upscalingMode": "Default",
            "resources": {"requests": small, "limits": small},
        },
        "headGroupSpec": {**head, "rayStartParams": {"num-cpus": "0"}},
        "workerGroupSpecs": [workers],
    }


def wait_for(cluster: Cluster, field: str, value: int) -> None:
    """Return once a field of the status has a value."""
    cluster.wait("raycluster/ray", f"jsonpath={{.status.{field}}}={value}", seconds=120)


def test_tasks_bring_pods_and_idleness_takes_them_away(
    make_cluster: Callable[..., Cluster], tmp_path: Path
) -> None:
    cluster = make_cluster(*SIZES, "--image-env", f"rayproject/ray={ENVIRONMENT}")
    script = tmp_path / "work.py"
    script.write_text(SCRIPT)
    about = {"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": {"name": "ray"}}
    cluster.apply({**about, "spec": spec(0, 2)})
    cluster.wait("raycluster/ray", "jsonpath={.status.state}=ready", seconds=180)
    (head,) = pods_of(cluster, "head")
    assert pods_of(cluster, "worker") == []
    for job in ("first", "second"):
        place = tmp_path / job
        place.mkdir()
        submit_job(cluster, head, job, f"python3 {script} {place}")
        wait_for(cluster, "readyWorkerReplicas", 2)
        status = cluster.get("raycluster", "ray")["status"]
        counts = {"desiredWorkerReplicas": 2, "minWorkerReplicas": 0, "maxWorkerReplicas": 2}
        assert counts.items() <= status.items()
        (place / "enough").touch()
        wait_for(cluster, "desiredWorkerReplicas", 0)
        wait_for(cluster, "availableWorkerReplicas", 0)
        assert {one.name for one in place.iterdir()} == {"enough", "began-0", "began-1"}
    (kept,) = pods_of(cluster, "head")
    assert kept["metadata"]["uid"] == head["metadata"]["uid"]
