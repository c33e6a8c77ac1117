"""The result of a TrainJob reaches its pod through a real kubelet, and ends a real Job.

The controllers of Trainer and JobSet are stand-ins; those of Jobs and pods are Kubernetes' own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator

import pytest

from tests.operator.conftest import Place
from tests.operator.resume.jobset_standin import install, is_true
from tests.operator.trainjobs.trainer_standin import RuntimeControllers, apply_runtime
from tests.realnodes.jobs import PLAIN, Job
from tests.realnodes.machines import IMAGE
from tests.realnodes.plane import RealCluster, operator
from tests.train_jobs import RUNTIME, patch, train_job
from tests.watching import running
from unbroken.kube.client import connect
from unbroken.spec.keys import RESULT, RESULT_LABEL

NODES = 1
pytestmark = [
    pytest.mark.slow,
    pytest.mark.heavy,
    pytest.mark.realkube,
    pytest.mark.timeout(600),
]
SLOWEST = 150.0
"""Seconds in which a kubelet must have carried the result into the pod: it looks at each pod within
a minute and a half (kubernetes 1.20, pod_workers.go and the option `sync-frequency`)."""


@pytest.fixture(scope="module")
def operates(cluster: RealCluster) -> Iterator[None]:
    with operator(cluster):
        yield


@pytest.mark.usefixtures("operates")
async def test_a_result_ends_the_pod_that_waits_for_it(
    cluster: RealCluster, record_property: Callable[[str, object], None]
) -> None:
    job = Job(cluster, "train", replicas=1)
    folder = cluster.shared / job.name
    folder.mkdir()
    (folder / "train.py").write_text(PLAIN)
    # The image of these nodes has its programs from this host.
    words = ["python3", "-m", "unbroken.agent", "--nproc-per-node=1", "--nnodes=$(NNODES)"]
    trainer = {
        "image": IMAGE,
        "command": [*words, f"{folder}/train.py", str(folder)],
        "numProcPerNode": 1,
        "env": [{"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}],
    }
    mounts = {
        "volumes": [{"name": "shared", "hostPath": {"path": str(folder)}}],
        "containers": [
            {"name": "node", "volumeMounts": [{"name": "shared", "mountPath": str(folder)}]}
        ],
    }
    annotations = {"unbroken.dev/agent": "image"}
    train = train_job(
        job.name,
        metadata={"annotations": annotations},
        trainer=trainer,
        runtimePatches=[patch(mounts)],
    )
    del train["metadata"]["uid"]
    async with connect(cluster.directory / "kubeconfig") as client:
        here = Place(client, "default")
        await install(client)
        await apply_runtime(client, RUNTIME)
        controllers = RuntimeControllers(here, [], folder, has_kubelets=False, has_jobs=False)
        async with running(controllers.run()):
            await here.post("trainjobs", train)
            await asyncio.to_thread(job.running)
            pods = await here.until("pods", lambda listed: waits(listed) == ["Running"])
            (pod,) = (one for one in pods["items"] if RESULT_LABEL in one["metadata"]["labels"])
            (folder / "finish").touch()
            path = f"pods/{pod['metadata']['name']}"
            await here.until(path, lambda one: RESULT in one["metadata"].get("annotations", {}))
            written = time.monotonic()
            ended = "jsonpath={.status.phase}=Succeeded"
            await asyncio.to_thread(
                cluster.wait, f"pod/{pod['metadata']['name']}", ended, seconds=int(SLOWEST)
            )
            record_property(
                "seconds from the result to the end of its pod", time.monotonic() - written
            )
            await here.until("trainjobs/train", lambda one: is_true(one, "Complete"))


def waits(listed: dict[str, object]) -> list[str]:
    """Return the phases of the pods that wait for a result."""
    items = listed["items"]
    assert isinstance(items, list)
    found = [pod for pod in items if RESULT_LABEL in pod["metadata"].get("labels", {})]
    return [pod["status"].get("phase", "") for pod in found]
