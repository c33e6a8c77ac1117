"""Auto-resume of real Ray on the local cluster: jobs that lose a node or their head resume."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.clusters import Cluster
from tests.e2e.test_ray import ENVIRONMENT, pods_of, with_token
from unbroken.spec.keys import AUTO_RESUME, MAX_RETRIES, RESUME_COUNT, RESUME_RAY

pytestmark = [pytest.mark.slow, pytest.mark.frameworks, pytest.mark.timeout(600)]
Object = dict[str, Any]
PATIENCE_SECONDS = 180.0
"""Seconds to wait: Ray starts a head and workers in 15 s on two cores, or much later if busy."""
BOTH = {AUTO_RESUME: "true", MAX_RETRIES: "3"}
SIZES = ("--nodes", "3", "--cpu-per-node", "2", "--memory-per-node", "6Gi")
SCRIPT = """\
import json
import os
import pathlib
import sys
import time

import ray

place = pathlib.Path(sys.argv[1])
mark = place / "checkpoint"
start = int(mark.read_text()) + 1 if mark.exists() else 0
ray.init(log_to_driver=False)


@ray.remote(num_cpus=0.1, max_retries=-1)
def work():
    time.sleep(0.2)
    return os.environ.get("UNBROKEN_RESUME", "")


for step in range(start, 100_000):
    resume = ray.get(work.remote())
    (place / "draft").write_text(str(step))
    (place / "draft").rename(mark)
    attempt = int(os.environ.get("JOB_RESTART_COUNT", "0"))
    with (place / "steps").open("a") as steps:
        steps.write(json.dumps({"step": step, "attempt": attempt, "resume": resume}) + "\\n")
"""


def group(memory: str, **more: Any) -> Object:
    """A group of Ray pods, each on a node of its own."""
    term = {
        "labelSelector": {"matchLabels": {"ray.io/is-ray-node": "yes"}},
        "topologyKey": "kubernetes.io/hostname",
    }
    resources = {"requests": {"cpu": "500m", "memory": memory}}
    container = {"name": "ray", "image": "rayproject/ray:2.60.0"}
    spec = {
        "terminationGracePeriodSeconds": 2,
        "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}},
        "containers": [{**container, "resources": {**resources, "limits": resources["requests"]}}],
    }
    return {"rayStartParams": {"num-cpus": "1"}, "template": {"spec": spec}, **more}


SPEC = {
    "headGroupSpec": group("2Gi"),
    "workerGroupSpecs": [
        group("1Gi", groupName="workers", replicas=1, minReplicas=1, maxReplicas=2)
    ],
}


class Training:
    """A script that counts steps, with a checkpoint on a shared volume."""

    def __init__(self, place: Path) -> None:
        self.script = place / "count_steps.py"
        self.place = place / "volume"
        self.place.mkdir()
        self.script.write_text(SCRIPT)
        self.entrypoint = f"python3 {self.script} {self.place}"

    def steps(self) -> list[Object]:
        """Return the steps of all attempts."""
        file = self.place / "steps"
        lines = file.read_text().splitlines() if file.exists() else []
        return [json.loads(line) for line in lines]

    def until(self, holds: Callable[[list[Object]], bool]) -> list[Object]:
        """The steps once `holds` is true of them."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not holds(found := self.steps()):
            assert time.monotonic() < deadline, found[-3:]
            time.sleep(0.2)
        return found

    def goes_on_as(self, attempt: int) -> None:
        """Return once an attempt has made five steps; no step may be lost or made twice."""
        found = self.until(lambda all: sum(one["attempt"] == attempt for one in all) >= 5)
        numbers = [one["step"] for one in found]
        # The step between its checkpoint and its line may be missing in the file.
        assert all(1 <= b - a <= 2 for a, b in pairwise(numbers)), numbers
        assert all(one["resume"] == "1" for one in found if one["attempt"])


def annotations(found: Object) -> Mapping[str, str]:
    """The annotations of an object."""
    given: Mapping[str, str] = found["metadata"]["annotations"]
    return given


def lose(cluster: Cluster, pod: Object) -> None:
    """Switch off the node of a pod."""
    cluster.kubectl("annotate", "node", pod["spec"]["nodeName"], "unbroken.dev/power=off")


def submit_job(cluster: Cluster, head: Object, id: str, entrypoint: str) -> None:
    """Submit a job to a head as a person does."""
    words = ["--no-wait", "--submission-id", id, "--address"]
    address = f"http://{head['status']['podIP']}:8265"
    name = head["metadata"]["labels"]["ray.io/cluster"]
    done = subprocess.run(
        [str(ENVIRONMENT / "bin/ray"), "job", "submit", *words, address, "--", *entrypoint.split()],
        env=with_token(cluster, name),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_rayjob_survives_its_workers_node_and_its_head(
    make_cluster: Callable[..., Cluster], tmp_path: Path
) -> None:
    cluster = make_cluster(*SIZES, "--image-env", f"rayproject/ray={ENVIRONMENT}")
    training = Training(tmp_path)
    body = {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": "count", "annotations": BOTH},
        "spec": {"entrypoint": training.entrypoint, "rayClusterSpec": SPEC},
    }
    cluster.apply(body)
    training.until(lambda all: len(all) >= 5)
    ray = "jsonpath={.status.readyWorkerReplicas}=1"
    name = cluster.get("rayjob", "count")["status"]["rayClusterName"]
    cluster.wait(f"raycluster/{name}", ray, seconds=120)

    (head,), (worker,) = pods_of(cluster, "head"), pods_of(cluster, "worker")
    lose(cluster, worker)
    cluster.kubectl("wait", f"pod/{worker['metadata']['name']}", "--for=delete", "--timeout=120s")
    (kept,) = pods_of(cluster, "head")
    assert kept["metadata"]["uid"] == head["metadata"]["uid"]
    assert annotations(cluster.get("rayjob", "count"))[RESUME_COUNT] == "1"

    cluster.kubectl("delete", "pod", head["metadata"]["name"], "--wait=false")
    training.goes_on_as(2)
    last = cluster.get("rayjob", "count")
    assert annotations(last)[RESUME_COUNT] == "2"
    assert last["status"]["rayClusterName"] != name


def test_a_submitted_job_survives_the_node_of_the_head(
    make_cluster: Callable[..., Cluster], tmp_path: Path
) -> None:
    cluster = make_cluster(*SIZES, "--image-env", f"rayproject/ray={ENVIRONMENT}")
    training = Training(tmp_path)
    about = {"apiVersion": "ray.io/v1", "kind": "RayCluster"}
    cluster.apply({**about, "metadata": {"name": "ray", "annotations": BOTH}, "spec": SPEC})
    cluster.wait("raycluster/ray", "jsonpath={.status.state}=ready", seconds=180)
    (head,) = pods_of(cluster, "head")
    submit_job(cluster, head, "count", training.entrypoint)
    known = f"jsonpath={{.metadata.annotations.{RESUME_RAY.replace('.', chr(92) + '.')}}}"
    training.until(
        lambda _: (
            "count_steps.py" in cluster.kubectl("get", "raycluster", "ray", "-o", known).stdout
        )
    )
    training.until(lambda all: len(all) >= 5)
    lose(cluster, head)
    training.goes_on_as(1)
    state = json.loads(annotations(cluster.get("raycluster", "ray"))[RESUME_RAY])
    assert [one["id"] for one in state["jobs"]] == ["count-attempt-1"]
