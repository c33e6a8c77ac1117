"""The controllers of TrainJobs, JobSets and batch Jobs, and kubelets, on an API server without any.

What they do to suspension, pods and failures, as their sources have it:

- Trainer (kubeflow/trainer 2.3, pkg/runtime/framework/plugins/jobset/jobset.go): a JobSet with the
  name of its TrainJob, applied anew only while one of both is suspended; its end is the TrainJob's.
- JobSet (kubernetes-sigs/jobset, pkg/controllers/jobset_controller.go): Jobs `<set>-<job>-<index>`,
  suspended and resumed with the JobSet; a Job that fails is the end of a JobSet that has no failure
  policy (failure_policy.go, `executeFailurePolicy`).
- Job (kubernetes 1.33, pkg/controller/job/job_controller.go): pods with a finalizer; one that is
  being deleted and has not succeeded counts as failed (`isPodFailed`) and is replaced at once; more
  failures than `backoffLimit` fail the Job; pods of a suspended Job lose the finalizer before they
  are deleted (`deleteJobPods`), so that they do not count.

Suspension of Jobs is an annotation here: Kubernetes 1.20 has no such field.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.apiservers import ROOT
from tests.operator.conftest import Place
from tests.watching import until
from unbroken.kube.client import KubeClient
from unbroken.kube.clock import pause
from unbroken.kube.errors import ApiRefusal
from unbroken.spec.job_kinds import JOB_SET, TRAIN_JOB, JobKind
from unbroken.spec.kubeflow.trainjob import RUNTIME_KIND

Object = dict[str, Any]
CRDS = ROOT.parent / "shared/crds"
DEFINITIONS = "apis/apiextensions.k8s.io/v1/customresourcedefinitions"
TRACKING = "batch.kubernetes.io/job-tracking"
ANY = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
SUSPENDED = "standin/suspended"
KINDS = (TRAIN_JOB.resource, RUNTIME_KIND.resource, JOB_SET.resource)
INDEX = "batch.kubernetes.io/job-completion-index"


def definitions() -> Iterator[Object]:
    """Trainer's definitions of TrainJobs and runtimes, and JobSet's; skips without their files.

    Without the schemas of their specs: Kubernetes 1.20 refuses defaults that are empty strings.
    """
    for file in ("trainer.crds.yaml.gz", "jobset.crds.yaml.gz"):
        if not (CRDS / file).exists():
            pytest.skip(f"no {file} in {CRDS}")
        for one in yaml.load_all(gzip.decompress((CRDS / file).read_bytes()), yaml.CSafeLoader):
            if one["metadata"]["name"] in KINDS:
                one["spec"].pop("conversion", None)  # its certificate is a placeholder
                for version in one["spec"]["versions"]:
                    schema = version["schema"]["openAPIV3Schema"]
                    schema["properties"]["spec"] = ANY
                yield one


async def install(client: KubeClient) -> None:
    """Install the kinds, and return once they are served."""
    for body in definitions():
        try:
            await client.raw("POST", DEFINITIONS, body=body)
        except ApiRefusal as error:
            assert error.code == 409, error
    kinds = (TRAIN_JOB, RUNTIME_KIND, JOB_SET)
    for path in (f"apis/{kind.group}/{kind.version}/{kind.plural}" for kind in kinds):
        await until(lambda path=path: is_served(client, path))


async def is_served(client: KubeClient, path: str) -> bool:
    """Return whether the server has a collection at the path."""
    try:
        await client.raw("GET", path)
    except ApiRefusal as error:
        assert error.code == 404, error
        return False
    return True


def head(kind: JobKind, **metadata: Any) -> Object:
    """The first fields of an object of a kind, named `lm`."""
    about = {"apiVersion": f"{kind.group}/{kind.version}", "kind": kind.name}
    return {**about, "metadata": {"name": "lm", **metadata}}


def train_job(**metadata: Any) -> Object:
    """A TrainJob of the runtime `torch-distributed`."""
    return {**head(TRAIN_JOB, **metadata), "spec": {"runtimeRef": {"name": "torch-distributed"}}}


def job_set(pods: int, backoff_limit: int, **metadata: Any) -> Object:
    """A JobSet of one Job `node`, as Trainer makes it."""
    container = {"name": "node", "image": "any", "command": ["torchrun", "train.py"]}
    template = {"spec": {"restartPolicy": "OnFailure", "containers": [container]}}
    counts = {"completions": pods, "parallelism": pods, "backoffLimit": backoff_limit}
    replicated = {"name": "node", "replicas": 1, "template": {"spec": {"template": template}}}
    replicated["template"]["spec"] |= counts
    return {**head(JOB_SET, **metadata), "spec": {"replicatedJobs": [replicated]}}


def is_true(thing: Object, type: str) -> bool:
    """True if a condition of the object is."""
    listed = (thing.get("status") or {}).get("conditions") or ()
    return any(one["type"] == type and one["status"] == "True" for one in listed)


def is_suspended(thing: Object) -> bool:
    """True if a TrainJob or JobSet asks to be suspended."""
    return bool(thing["spec"].get("suspend"))


def owned(owner: Object) -> list[Object]:
    """The reference of an object that a controller makes for its owner."""
    about = {key: owner[key] for key in ("apiVersion", "kind")}
    named = {key: owner["metadata"][key] for key in ("name", "uid")}
    return [{**about, **named, "controller": True, "blockOwnerDeletion": True}]


class Controllers:
    """The controllers and kubelets of one namespace; a test runs `run` in a task."""

    def __init__(
        self, place: Place, nodes: list[str], pods: int = 2, backoff_limit: int = 0
    ) -> None:
        self._place = place
        self.alive = list(nodes)
        """Nodes whose kubelet works, and which get pods."""
        self._pods = pods
        self._backoff_limit = backoff_limit
        self.made: list[tuple[str, frozenset[str]]] = []
        """Uid of each pod made, and uids of the pods that were there before it."""

    async def run(self) -> None:
        """Reconcile until cancelled."""
        while True:
            for train in await self._list("trainjobs"):
                await self._train_job(train)
            for found in await self._list("jobsets"):
                if not is_true(found, "Failed"):
                    await self._job_set(found)
            for found in await self._list("jobs"):
                if not is_true(found, "Failed"):
                    await self._job(found)
            for pod in await self._list("pods"):
                await self._kubelet(pod)
            await pause(0.05)

    async def _list(self, plural: str) -> list[Object]:
        try:
            listed: list[Object] = (await self._place.call("GET", plural))["items"]
        except ApiRefusal as error:
            assert error.code == 404, error
            return []
        for one in listed:
            # Items of a list have no kind; the two below own objects.
            one.setdefault("apiVersion", "batch/v1")
            one.setdefault("kind", "Job")
        return listed

    async def _do(self, method: str, what: str, body: Object) -> None:
        """A change; the object may be gone, or somebody else was first."""
        try:
            if method == "PATCH":
                await self._place.merge(what, body)
            else:
                await self._place.call(method, what, body=body)
        except ApiRefusal as error:
            if error.code not in (404, 409):
                raise

    async def _condition(self, what: str, type: str) -> None:
        told = {"type": type, "status": "True", "reason": "Test", "message": "by the test"}
        told["lastTransitionTime"] = "2026-01-01T00:00:00Z"
        await self._do("PATCH", f"{what}/status", {"status": {"conditions": [told]}})

    async def _train_job(self, train: Object) -> None:
        name = train["metadata"]["name"]
        found = await self._place.get(f"jobsets/{name}")
        if found is None:
            made = job_set(self._pods, self._backoff_limit, name=name, ownerReferences=owned(train))
            made["spec"]["suspend"] = is_suspended(train)
            await self._do("POST", "jobsets", made)
        elif is_suspended(train) is not is_suspended(found):
            body = {"spec": {"suspend": is_suspended(train)}}
            await self._do("PATCH", f"jobsets/{name}", body)
        elif is_true(found, "Failed") and not is_true(train, "Failed"):
            await self._condition(f"trainjobs/{name}", "Failed")

    async def _job_set(self, found: Object) -> None:
        for replicated in found["spec"]["replicatedJobs"]:
            for index in range(replicated.get("replicas", 1)):
                name = f"{found['metadata']['name']}-{replicated['name']}-{index}"
                job = await self._place.get(f"jobs/{name}")
                suspended = str(is_suspended(found)).lower()
                if job is None:
                    await self._do("POST", "jobs", self._new_job(found, replicated, name))
                elif is_true(job, "Failed"):
                    await self._condition(f"jobsets/{found['metadata']['name']}", "Failed")
                elif job["metadata"]["annotations"][SUSPENDED] != suspended:
                    await self._do("PATCH", f"jobs/{name}", self._suspension(suspended))

    def _suspension(self, suspended: str) -> Object:
        """Return the patch that suspends a Job, or lets it run."""
        return {"metadata": {"annotations": {SUSPENDED: suspended}}}

    def _new_job(self, found: Object, replicated: Object, name: str) -> Object:
        labels = {JOB_SET.pod_label: found["metadata"]["name"]}
        spec = dict(replicated["template"]["spec"])
        spec["template"] = {**spec["template"], "metadata": {"labels": labels}}
        annotations = {SUSPENDED: str(is_suspended(found)).lower()}
        metadata = {"name": name, "labels": labels, "annotations": annotations}
        metadata["ownerReferences"] = owned(found)
        return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}

    async def _job(self, job: Object) -> None:
        name, uid = job["metadata"]["name"], job["metadata"]["uid"]
        pods = [pod for pod in await self._list("pods") if _is_of(pod, uid)]
        failed = (job.get("status") or {}).get("failed", 0)
        lost = [pod for pod in pods if _is_failed(pod) and pod["metadata"].get("finalizers")]
        if lost:
            failed += len(lost)
            await self._do("PATCH", f"jobs/{name}/status", {"status": {"failed": failed}})
        for pod in lost:
            await self._release(pod)
        active = [pod for pod in pods if _is_active(pod)]
        is_held = job["metadata"]["annotations"][SUSPENDED] == "true"
        if failed > job["spec"]["backoffLimit"]:
            await self._condition(f"jobs/{name}", "Failed")
        if is_held or failed > job["spec"]["backoffLimit"]:
            for pod in active:
                await self._release(pod)
                await self._do("DELETE", f"pods/{pod['metadata']['name']}", {})
            return
        taken = {pod["metadata"]["annotations"][INDEX] for pod in active}
        for index in map(str, range(job["spec"]["completions"])):
            if index not in taken:
                await self._new_pod(job, index)

    async def _release(self, pod: Object) -> None:
        """Remove the finalizer that a pod is counted by."""
        body = {"metadata": {"finalizers": None}}
        await self._do("PATCH", f"pods/{pod['metadata']['name']}", body)

    def _place_of_pod(self, there: list[Object]) -> Object | None:
        """Return the node of a new pod as a part of its spec; None: no node is free."""
        used = {pod["spec"].get("nodeName") for pod in there if _is_active(pod)}
        node = next((name for name in self.alive if name not in used), None)
        return None if node is None else {"nodeName": node}

    async def _new_pod(self, job: Object, index: str) -> None:
        there = await self._list("pods")
        place = self._place_of_pod(there)
        if place is None:
            return
        template = job["spec"]["template"]
        metadata = {
            "generateName": f"{job['metadata']['name']}-{index}-",
            "labels": {**template["metadata"]["labels"], "job-name": job["metadata"]["name"]},
            "annotations": {INDEX: index},
            "finalizers": [TRACKING],
            "ownerReferences": owned(job),
        }
        pod = {"metadata": metadata, "spec": {**template["spec"], **place}}
        made = await self._place.post("pods", pod)
        before = frozenset(one["metadata"]["uid"] for one in there)
        self.made.append((made["metadata"]["uid"], before))

    async def _kubelet(self, pod: Object) -> None:
        """A node that answers starts its pods and ends those that are deleted."""
        if pod["spec"].get("nodeName") not in self.alive:
            return
        name = pod["metadata"]["name"]
        if "deletionTimestamp" in pod["metadata"]:
            await self._do("DELETE", f"pods/{name}", {"gracePeriodSeconds": 0})
        elif pod["status"].get("phase", "Pending") == "Pending":
            await self._do("PATCH", f"pods/{name}/status", {"status": {"phase": "Running"}})


def _is_of(pod: Object, uid: str) -> bool:
    return any(one["uid"] == uid for one in pod["metadata"].get("ownerReferences") or ())


def _is_failed(pod: Object) -> bool:
    phase = pod["status"].get("phase")
    return phase == "Failed" or ("deletionTimestamp" in pod["metadata"] and phase != "Succeeded")


def _is_active(pod: Object) -> bool:
    is_ended = pod["status"].get("phase") in ("Failed", "Succeeded")
    return not is_ended and "deletionTimestamp" not in pod["metadata"]
