"""KubeRay's sample on the local cluster, with Ray itself in an environment of its own."""

from __future__ import annotations

import base64
import http.client
import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from string import Template
from typing import Any

import pytest
import yaml

from tests.e2e.clusters import Cluster, processes
from tests.job_samples import MANIFESTS
from tests.watching import PATIENCE_SECONDS

pytestmark = [pytest.mark.slow, pytest.mark.frameworks, pytest.mark.timeout(300)]
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


def with_token(cluster: Cluster, name: str) -> dict[str, str]:
    """The variables with which a person uses a RayCluster from a shell."""
    secret = cluster.get("secret", f"{name}-ray-token")
    token = base64.b64decode(secret["data"]["auth_token"]).decode()
    return {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}


def where(cluster: Cluster) -> list[str]:
    """Submit a job as a person does, and return the addresses at which its tasks ran."""
    (head,) = pods_of(cluster, "head")
    dashboard = f"http://{head['status']['podIP']}:8265"
    words = ["job", "submit", "--address", dashboard, "--working-dir", str(PROGRAM.parent)]
    done = subprocess.run(
        [str(ENVIRONMENT / "bin/ray"), *words, "--", "python3", PROGRAM.name],
        env=with_token(cluster, NAME),
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


SIZES = ("--nodes", "2", "--cpu-per-node", "4", "--memory-per-node", "8Gi")


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


@contextmanager
def dashboard(cluster: Cluster, service: str) -> Iterator[str]:
    """`kubectl port-forward` to the head's service; the place on this machine."""
    words = [cluster.kubectl_path, "port-forward", f"service/{service}", ":8265"]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, text=True, env=cluster.environment
    ) as forwarding:
        assert forwarding.stdout is not None
        try:
            found = re.match(r"Forwarding from (\S+) ->", forwarding.stdout.readline())
            assert found
            yield found[1]
        finally:
            forwarding.terminate()
            forwarding.communicate()


def submit(cluster: Cluster, place: str, *words: str) -> str:
    """Run a program of the examples as a job, through the forwarded port; its output."""
    command = [str(ENVIRONMENT / "bin/ray"), "job", "submit", "--address", f"http://{place}"]
    done = subprocess.run(
        [*command, "--working-dir", str(EXAMPLES), "--", "python3", *words],
        env=with_token(cluster, "rayml"),
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def manifests(name: str) -> list[Object]:
    """The objects of a manifest of the guide, with empty variables."""
    text = Template((EXAMPLES / name).read_text())
    empty = {"REGISTRY": "", "SUBNET_ID": "", "SECURITYGROUP_ID": ""}
    return list(yaml.safe_load_all(text.substitute(empty)))


def raycluster_of_the_guide(make_cluster: Callable[..., Cluster]) -> Cluster:
    """A cluster in which the guide's manifests have been applied, and are ready."""
    cluster = make_cluster(*SIZES, "--image-env", f"rayproject/ray={ENVIRONMENT}")
    cluster.apply(*manifests("storage.yaml"), *manifests("raycluster.yaml"))
    cluster.wait("raycluster/rayml", "jsonpath={.status.state}=ready", seconds=120)
    return cluster


def test_the_dashboard_is_used_through_a_forwarded_port(
    make_cluster: Callable[..., Cluster],
) -> None:
    cluster = raycluster_of_the_guide(make_cluster)
    with dashboard(cluster, "rayml-head-svc") as place:
        page = http.client.HTTPConnection(place, timeout=PATIENCE_SECONDS)
        page.request("GET", "/")
        answer = page.getresponse()
        assert (answer.status, b"<title>Ray Dashboard" in answer.read()) == (200, True)
        page.close()
        assert f"ran on {json.dumps(addresses(cluster))}" in submit(cluster, place, "where.py")


@pytest.mark.heavy
@pytest.mark.timeout(1200)
@pytest.mark.skipif(
    not list(ENVIRONMENT.glob("lib/python3*/site-packages/lightning")),
    reason=f"Lightning is not installed in {ENVIRONMENT}: make ray-env",
)
def test_a_run_that_is_submitted_again_goes_on_from_its_newest_checkpoint(
    make_cluster: Callable[..., Cluster],
) -> None:
    cluster = raycluster_of_the_guide(make_cluster)
    words = ("fsdp_ray.py", "--storage", "/fsx/runs", "--checkpoint-every", "10")
    with dashboard(cluster, "rayml-head-svc") as place:
        first = submit(cluster, place, *words, "--steps", "25")
        again = submit(cluster, place, *words, "--steps", "40")
    assert "resumed at" not in first
    assert "step 10 loss" in first
    assert "resumed at step 25" in again
    assert "step 40 loss" in again
    assert "step 10 loss" not in again
