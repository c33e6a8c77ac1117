"""Jobs of real Ray that hang on the local cluster: log rules find them, and they resume."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.clusters import Cluster
from tests.e2e.test_ray import ENVIRONMENT, pods_of
from tests.e2e.test_ray_after_losses import BOTH, SIZES, SPEC, Training, annotations, submit_job
from unbroken.spec.keys import LOG_MONITORING, RESUME_COUNT, RESUME_FAULT, RESUME_RAY

pytestmark = [pytest.mark.slow, pytest.mark.frameworks, pytest.mark.timeout(600)]
Object = dict[str, Any]
RULES = """\
- name: Steps
  logPattern: '.*step=(\\d+)'
  expectedStartCutOffInSeconds: 300
  expectedRecurringFrequencyInSeconds: 20
"""
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
attempt = int(os.environ.get("JOB_RESTART_COUNT", "0"))
ray.init(log_to_driver=False)


@ray.remote(num_cpus=0.1)
def work(step):
    if step == 8 and not attempt:
        (place / "hanging").write_text(str(os.getpid()))
        time.sleep(1_000_000)
    time.sleep(0.2)
    return os.environ.get("UNBROKEN_RESUME", "")


for step in range(start, 100_000):
    if step == 8:
        print("waiting for the task of step 8", flush=True)
    resume = ray.get(work.remote(step))
    (place / "draft").write_text(str(step))
    (place / "draft").rename(mark)
    with (place / "steps").open("a") as steps:
        steps.write(json.dumps({"step": step, "attempt": attempt, "resume": resume}) + "\\n")
    print(f"step={step}", flush=True)
"""
FAULT = "is hung: no match of log rule Steps for 20 s; last line: waiting for the task of step 8"


class Hanging(Training):
    """A script that counts steps, and hangs in its first attempt."""

    def __init__(self, place: Path) -> None:
        super().__init__(place)
        self.script.write_text(SCRIPT)

    def goes_on(self) -> None:
        """Return once the second attempt runs; nothing of the first may run any more."""
        self.goes_on_as(1)
        process = (self.place / "hanging").read_text()
        assert not Path(f"/proc/{process}").exists(), "the task that hung still runs"


def test_a_submitted_job_that_hangs_goes_on_and_its_pods_stay(
    make_cluster: Callable[..., Cluster], tmp_path: Path
) -> None:
    cluster = make_cluster(*SIZES, "--image-env", f"rayproject/ray={ENVIRONMENT}")
    training = Hanging(tmp_path)
    metadata = {"name": "ray", "annotations": {**BOTH, LOG_MONITORING: RULES}}
    about = {"apiVersion": "ray.io/v1", "kind": "RayCluster"}
    cluster.apply({**about, "metadata": metadata, "spec": SPEC})
    cluster.wait("raycluster/ray", "jsonpath={.status.state}=ready", seconds=180)
    before = sorted(pod["metadata"]["uid"] for pod in cluster.get("pods")["items"])
    (head,) = pods_of(cluster, "head")
    submit_job(cluster, head, "count", training.entrypoint)
    training.goes_on()
    assert sorted(pod["metadata"]["uid"] for pod in cluster.get("pods")["items"]) == before
    found = annotations(cluster.get("raycluster", "ray"))
    assert (found[RESUME_COUNT], found[RESUME_FAULT]) == ("1", f"job count {FAULT}")
    assert [one["id"] for one in json.loads(found[RESUME_RAY])["jobs"]] == ["count-attempt-1"]
    told = " ".join(cluster.unbroken("explain", "ray").stdout.split())
    assert "culprit job count what job count is hung" in told
    assert "remedy stops 1 job and submits it again" in told
    assert "outcome ran again after" in told


def test_a_rayjob_that_hangs_goes_on_on_a_new_raycluster(
    make_cluster: Callable[..., Cluster], tmp_path: Path
) -> None:
    cluster = make_cluster(*SIZES, "--image-env", f"rayproject/ray={ENVIRONMENT}")
    training = Hanging(tmp_path)
    body: Object = {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": "count", "annotations": {**BOTH, LOG_MONITORING: RULES}},
        "spec": {"entrypoint": training.entrypoint, "rayClusterSpec": SPEC},
    }
    cluster.apply(body)
    training.until(lambda all: len(all) >= 5)
    name = cluster.get("rayjob", "count")["status"]["rayClusterName"]
    training.goes_on()
    last = cluster.get("rayjob", "count")
    assert last["status"]["rayClusterName"] != name
    assert annotations(last)[RESUME_COUNT] == "1"
    assert FAULT in annotations(last)[RESUME_FAULT]
