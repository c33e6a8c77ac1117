"""KubeRay's sample on the local cluster, with Ray itself in an environment of its own."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.clusters import Cluster, processes
from job_samples import MANIFESTS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
ENVIRONMENT = Path(
    os.environ.get("UNBROKEN_RAY_ENV") or Path(__file__).parents[2] / ".ray-env"
).absolute()
EXAMPLES = Path(__file__).parents[2] / "examples/ray"
PROGRAM = EXAMPLES / "where.py"
NAME = "raycluster-kuberay"
Object = dict[str, Any]


def pods_of(cluster: Cluster, node_type: str) -> list[Object]:
    """The pods of this type."""
    listed = cluster.get("pods", "-l", f"ray.io/node-type={node_type}")
    found: list[Object] = listed["items"]
    return found


def where(cluster: Cluster) -> list[str]:
    """Submit a job as a person does, and return the addresses at which its tasks ran."""
    (head,) = pods_of(cluster, "head")
    dashboard = f"http://{head['status']['podIP']}:8265"
    words = ["job", "submit", "--address", dashboard, "--working-dir", str(PROGRAM.parent)]
    done = subprocess.run(
        [str(ENVIRONMENT / "bin/ray"), *words, "--", "python3", PROGRAM.name],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    said = [line for line in done.stdout.splitlines() if line.startswith("ran on ")]
    assert said, done.stdout + done.stderr
    found: list[str] = json.loads(said[0].removeprefix("ran on "))
    return found


def addresses(cluster: Cluster) -> list[str]:
    """The addresses of all pods."""
    return sorted(pod["status"]["podIP"] for pod in cluster.get("pods")["items"])


needs_ray = pytest.mark.skipif(
    not (ENVIRONMENT / "bin/ray").exists(),
    reason=f"Ray is not installed in {ENVIRONMENT}: make ray-env, or set UNBROKEN_RAY_ENV",
)
SIZES = ("--nodes", "2", "--cpu-per-node", "4", "--memory-per-node", "8Gi")


@needs_ray
def test_a_raycluster_runs_jobs_on_all_its_pods_and_survives_its_head(
    make_cluster: Callable[..., Cluster],
) -> None:
    cluster = make_cluster(*SIZES, "--image-env", f"rayproject/ray={ENVIRONMENT}")
    cluster.apply(yaml.safe_load((MANIFESTS / "raycluster-sample.yaml").read_text()))
    is_ready = "jsonpath={.status.state}=ready"
    cluster.wait(f"raycluster/{NAME}", is_ready, seconds=90)
    (head,) = pods_of(cluster, "head")
    told = cluster.kubectl("exec", head["metadata"]["name"], "--", "ray", "status").stdout
    assert "1 workergroup" in told
    assert "/2.0 CPU" in told
    first = addresses(cluster)
    assert where(cluster) == first
    cluster.kubectl("delete", "pod", head["metadata"]["name"])
    # Not that the state is ready: KubeRay does not take it back.
    cluster.wait(f"raycluster/{NAME}", "jsonpath={.status.readyWorkerReplicas}=0", seconds=60)
    cluster.wait(f"raycluster/{NAME}", "jsonpath={.status.readyWorkerReplicas}=1", seconds=90)
    second = addresses(cluster)
    assert not set(first) & set(second)
    assert where(cluster) == second
    cluster.kubectl("delete", "raycluster", NAME)
    cluster.kubectl("wait", "pod", "--all", "--for=delete", "--timeout=60s", seconds=90)
    assert not any(processes(f"={address}") for address in first + second)


@needs_ray
def test_a_rayjob_makes_its_cluster_runs_and_takes_the_cluster_away(
    make_cluster: Callable[..., Cluster],
) -> None:
    cluster = make_cluster(*SIZES, "--image-env", f"rayproject/ray={ENVIRONMENT}")
    job, code = yaml.safe_load_all((EXAMPLES / "rayjob.yaml").read_text())
    job["spec"] |= {"ttlSecondsAfterFinished": 0, "backoffLimit": 1}
    # The first attempt fails: the second finds the file.
    mark = cluster.directory.parent / "tried"
    check = f"test -e {mark} || {{ touch {mark}; exit 3; }}"
    job["spec"]["entrypoint"] = f"sh -c '{check}; {job['spec']['entrypoint']}'"
    cluster.apply(job, code)
    is_over = "jsonpath={.status.jobDeploymentStatus}=Complete"
    cluster.wait("rayjob/count", is_over, seconds=180)
    status = cluster.get("rayjob", "count")["status"]
    assert (status["jobStatus"], status["failed"], status["succeeded"]) == ("SUCCEEDED", 1, 1)
    cluster.kubectl("wait", "raycluster", "--all", "--for=delete", "--timeout=60s", seconds=90)
    assert cluster.get("rayclusters")["items"] == []
