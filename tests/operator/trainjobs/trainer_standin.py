"""The controllers of Trainer, JobSet and Jobs for TrainJobs whose runtime has several jobs.

What they do with a runtime, as their sources have it:

- Trainer 2.3: a JobSet of the runtime's template. Image, command and args of the TrainJob go to
  containers named `node` (pkg/runtime/framework/plugins/jobset/builder.go, `Trainer`), and the
  number of nodes to the job with the label of the trainer. The end of the JobSet is the TrainJob's.
- JobSet: a failed Job fails the set. If all Jobs that the success policy names have succeeded, the
  set is complete, before any other Job is made (pkg/controllers/jobset_controller.go, `reconcile`).
  A Job is not made until the jobs that it depends on have succeeded (`reconcileReplicatedJobs`,
  depends_on.go), in a suspended set neither.
- Job: the exit code of a pod decides by `podFailurePolicy`; an ignored pod is replaced
  (kubernetes 1.33, pkg/controller/job/pod_failure_policy.go).
"""

from __future__ import annotations

import copy
import subprocess
from pathlib import Path
from typing import Any

from tests.operator.conftest import Place
from tests.operator.resume.jobset_standin import (
    SUSPENDED,
    Controllers,
    is_suspended,
    is_true,
    owned,
)
from tests.train_jobs import RUNTIME
from unbroken.kube.client import MERGE, KubeClient
from unbroken.kube.errors import ApiRefusal
from unbroken.spec.job_kinds import JOB_SET, TRAIN_RUNTIME
from unbroken.spec.keys import RESULT, TRAINER_STEP
from unbroken.spec.kubeflow.trainjob import RUNTIME_KIND

Object = dict[str, Any]
RUNTIMES = f"apis/{RUNTIME_KIND.group}/{RUNTIME_KIND.version}/{RUNTIME_KIND.plural}"
MOUNT = "/etc/unbroken"


async def apply_runtime(client: KubeClient, runtime: Object = RUNTIME) -> None:
    """Create the runtime, or change it."""
    try:
        await client.raw("POST", RUNTIMES, body=runtime)
    except ApiRefusal as error:
        assert error.code == 409, error
        path = f"{RUNTIMES}/{TRAIN_RUNTIME}"
        await client.raw("PATCH", path, body={"spec": runtime["spec"]}, headers=MERGE)


def job_set_of(train: Object, runtime: Object) -> Object:
    """Return the JobSet that Trainer makes."""
    spec = copy.deepcopy(runtime["spec"]["template"]["spec"])
    trainer = train["spec"].get("trainer") or {}
    for job in spec["replicatedJobs"]:
        labels = (job["template"].get("metadata") or {}).get("labels")
        if labels is None:
            continue
        if labels.get(TRAINER_STEP) == "trainer":
            nodes = trainer.get("numNodes") or runtime["spec"]["mlPolicy"].get("numNodes", 1)
            job["template"]["spec"] |= {"parallelism": nodes, "completions": nodes}
        for container in job["template"]["spec"]["template"]["spec"]["containers"]:
            if container["name"] == "node":
                given = {
                    key: trainer[key] for key in ("image", "command", "args") if key in trainer
                }
                container |= given
    metadata = {"name": train["metadata"]["name"], "ownerReferences": owned(train)}
    head = {"apiVersion": f"{JOB_SET.group}/{JOB_SET.version}", "kind": JOB_SET.name}
    return {**head, "metadata": metadata, "spec": {**spec, "suspend": is_suspended(train)}}


def exit_code(container: Object, folder: Path, result: str) -> int:
    """Run the program of a result pod with a result in its volume; return its exit code."""
    (folder / "result").write_text(result)
    words = [word.replace(MOUNT, str(folder)) for word in container["command"]]
    return subprocess.run(words, capture_output=True, check=False, timeout=20).returncode


class RuntimeControllers(Controllers):
    """The controllers of one namespace, and kubelets that run result pods; `folder` is theirs.

    `has_kubelets` False: real nodes run the pods. `has_jobs` False: a real controller manager runs
    the Jobs.
    """

    def __init__(
        self,
        place: Place,
        nodes: list[str],
        folder: Path,
        *,
        has_kubelets: bool = True,
        has_jobs: bool = True,
    ) -> None:
        super().__init__(place, nodes)
        self._folder = folder
        self._has_kubelets = has_kubelets
        self._has_jobs = has_jobs

    async def _train_job(self, train: Object) -> None:
        name = train["metadata"]["name"]
        if train["spec"]["runtimeRef"]["name"] != TRAIN_RUNTIME:
            return
        if is_true(train, "Complete") or is_true(train, "Failed"):
            return
        found = await self._place.get(f"jobsets/{name}")
        if found is None:
            await self._do("POST", "jobsets", job_set_of(train, RUNTIME))
        elif is_suspended(train) is not is_suspended(found):
            body = {"spec": {"suspend": is_suspended(train)}}
            await self._do("PATCH", f"jobsets/{name}", body)
        elif is_true(found, "Completed"):
            await self._condition(f"trainjobs/{name}", "Complete")
        elif is_true(found, "Failed"):
            await self._condition(f"trainjobs/{name}", "Failed")

    async def _job_set(self, found: Object) -> None:
        if is_true(found, "Completed"):
            return
        name = found["metadata"]["name"]
        jobs = {
            one["name"]: await self._place.get(f"jobs/{name}-{one['name']}-0")
            for one in found["spec"]["replicatedJobs"]
        }
        if any(job is not None and is_true(job, "Failed") for job in jobs.values()):
            await self._condition(f"jobsets/{name}", "Failed")
            return
        succeeded = {
            key for key, job in jobs.items() if job is not None and is_true(job, "Complete")
        }
        if set(found["spec"]["successPolicy"]["targetReplicatedJobs"]) <= succeeded:
            await self._condition(f"jobsets/{name}", "Completed")
            return
        for replicated in found["spec"]["replicatedJobs"]:
            waits_for = {one["name"] for one in replicated.get("dependsOn") or ()}
            if waits_for <= succeeded:
                await self._keep_job(found, replicated, jobs[replicated["name"]])

    async def _keep_job(self, found: Object, replicated: Object, job: Object | None) -> None:
        name, suspended = f"{found['metadata']['name']}-{replicated['name']}-0", is_suspended(found)
        if job is None:
            await self._do("POST", "jobs", self._new_job(found, replicated, name))
        elif job["metadata"]["annotations"][SUSPENDED] != str(suspended).lower():
            body = {"metadata": {"annotations": {SUSPENDED: str(suspended).lower()}}}
            await self._do("PATCH", f"jobs/{name}", body)

    def _new_job(self, found: Object, replicated: Object, name: str) -> Object:
        job = super()._new_job(found, replicated, name)
        own = replicated["template"]["spec"]["template"].get("metadata") or {}
        job["spec"]["template"]["metadata"]["labels"] |= own.get("labels") or {}
        job["spec"].pop("podFailurePolicy", None)  # Kubernetes 1.20 has none; `_job` follows it
        return job

    async def _job(self, job: Object) -> None:
        """End a Job as the exit code of its pod says, or have its pod replaced."""
        name, uid = job["metadata"]["name"], job["metadata"]["uid"]
        if is_true(job, "Complete") or not self._has_jobs:
            return
        for pod in await self._list("pods"):
            if any(one["uid"] == uid for one in pod["metadata"].get("ownerReferences") or ()):
                statuses = pod["status"].get("containerStatuses") or ()
                ends = [one["state"].get("terminated") or {} for one in statuses]
                codes = [one.get("exitCode") for one in ends]
                if codes == [0]:
                    await self._condition(f"jobs/{name}", "Complete")
                    return
                if codes == [1]:
                    await self._condition(f"jobs/{name}", "Failed")
                    return
        await super()._job({**job, "spec": {**job["spec"], "backoffLimit": 100}})

    def _place_of_pod(self, there: list[Object]) -> Object | None:
        # A scheduler places the pods of real nodes.
        return super()._place_of_pod(there) if self._has_kubelets else {}

    async def _kubelet(self, pod: Object) -> None:
        if not self._has_kubelets:
            return
        await super()._kubelet(pod)
        name, result = pod["metadata"]["name"], pod["metadata"].get("annotations", {}).get(RESULT)
        if pod["status"].get("phase") != "Running" or not result:
            return
        (container,) = pod["spec"]["containers"]
        code = exit_code(container, self._folder, result)
        ended = {"name": container["name"], "image": "", "imageID": "", "ready": False}
        ended |= {"restartCount": 0, "state": {"terminated": {"exitCode": code}}}
        phase = "Failed" if code else "Succeeded"
        status = {"phase": phase, "containerStatuses": [ended]}
        await self._do("PATCH", f"pods/{name}/status", {"status": status})
