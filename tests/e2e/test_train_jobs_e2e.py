"""A TrainJob of the runtime `unbroken-torch` on a local cluster: real workers, one of them killed.

The controllers of Trainer, JobSet and Jobs are stand-ins that follow their sources.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.clusters import kill
from tests.operator.conftest import Place
from tests.operator.resume.jobset_standin import install, is_true
from tests.operator.trained_jobs import SCRIPT, Job, is_alive, named_job
from tests.operator.trainjobs.trainer_standin import RuntimeControllers, apply_runtime
from tests.train_jobs import train_job
from tests.watching import running
from unbroken.kube.client import connect
from unbroken.spec.keys import RESULT, RESULT_LABEL

pytestmark = pytest.mark.slow
Object = dict[str, Any]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    """Provide a cluster of two nodes with an operator, and a job that is not there yet."""
    with named_job(tmp_path) as found:
        yield found


@asynccontextmanager
async def trainer(job: Job) -> AsyncIterator[Place]:
    """Run the controllers of others in the namespace `default`, without kubelets."""
    async with connect(job.cluster.directory / "kubeconfig") as client:
        place = Place(client, "default")
        await install(client)
        await apply_runtime(client)
        controllers = RuntimeControllers(place, [], job.folder, has_kubelets=False)
        async with running(controllers.run()):
            yield place


def applied(job: Job) -> Object:
    """Return the TrainJob, whose workers run until `job.finish`."""
    (job.folder / "train.py").write_text(SCRIPT)
    files = (str(job.folder / name) for name in ("train.py", "diary", "finish"))
    trainer = {
        "image": "any:1",
        "command": [sys.executable],
        "args": [*files],
        "numNodes": 2,
        "numProcPerNode": 2,
    }
    made = train_job(trainer=trainer)
    del made["metadata"]["uid"]
    return made


def one_waits(listed: Object) -> bool:
    """Return whether one result pod runs and has no result."""
    pods = [pod for pod in listed["items"] if RESULT_LABEL in pod["metadata"]["labels"]]
    phases = [pod["status"].get("phase") for pod in pods]
    results = [pod["metadata"].get("annotations", {}).get(RESULT) for pod in pods]
    return phases == ["Running"] and results == [None]


def carry(job: Job, pod: Object) -> None:
    """Write the annotation of a pod into its volume: a kubelet does, a local node does not."""
    (file,) = job.cluster.directory.rglob(f"{pod['metadata']['uid']}/volumes/result/result")
    file.write_text(pod["metadata"]["annotations"][RESULT])


async def test_a_train_job_loses_a_worker_recovers_and_leaves_its_result(job: Job) -> None:
    async with trainer(job) as here:
        await here.post("trainjobs", applied(job))
        first = await asyncio.to_thread(job.started, 0)
        assert {worker.pod for worker in first.values()} == {"lm-node-0", "lm-node-1"}
        listed = await here.until("pods", one_waits)
        assert len(listed["items"]) == 3, "two pods train and one waits"

        kill(first[3].pid)
        second = await asyncio.to_thread(job.started, 1)
        assert not any(is_alive(worker.pid) for worker in first.values())
        assert {rank: one.pod for rank, one in second.items()} == {
            rank: one.pod for rank, one in first.items()
        }
        incident = await asyncio.to_thread(job.incident, 1)
        assert (incident["culprit"]["rank"], incident["remedy"]) == (3, "process")
        assert not is_true(await here.until("trainjobs/lm", bool), "Complete")
        shown = await asyncio.to_thread(job.cluster.unbroken, "jobs", "-A", "-o", "name")
        assert shown.stdout.split() == ["default/lm"]

        for command in ("suspend", "resume", "delete"):
            refused = await asyncio.to_thread(job.cluster.unbroken, command, "lm", check=False)
            assert refused.returncode == 1
            assert "job lm belongs to TrainJob lm, which would change it back" in refused.stderr

        job.finish()
        await asyncio.to_thread(job.wait, "Completed")
        pods = await here.until("pods", lambda listed: RESULT in str(listed["items"]))
        (waited,) = (one for one in pods["items"] if RESULT_LABEL in one["metadata"]["labels"])
        assert waited["metadata"]["annotations"][RESULT] == "Completed"
        carry(job, waited)
        await here.until("trainjobs/lm", lambda one: is_true(one, "Complete"))

        await here.delete("trainjobs/lm")
        await here.absent("hyperpodpytorchjobs/lm")
        await asyncio.to_thread(job.cluster.wait, "pod/lm-node-0", "delete")
