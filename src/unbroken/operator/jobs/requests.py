"""Requests to the API server about one job's objects."""

from __future__ import annotations

from urllib.parse import quote

import msgspec
from lightkube.resources.core_v1 import Node, Pod
from lightkube.resources.policy_v1 import PodDisruptionBudget

from unbroken.core.job.events import DeletePod
from unbroken.kube.client import KubeClient, Object
from unbroken.kube.errors import NotFound
from unbroken.operator.kinds import INCIDENTS, JOBS
from unbroken.spec.job import incident as incidents
from unbroken.spec.job import types as jobs
from unbroken.spec.job.codec import OTHER, OTHERS, incident_to, job_status_to
from unbroken.spec.job.incident import Incident
from unbroken.spec.job.ledger import Ledger, write_ledger
from unbroken.spec.job.types import FaultyPods, JobStatus
from unbroken.spec.keys import LEDGER
from unbroken.spec.schema.fields import fields_of

from .pods import JobIdentity, disruption_budget, key_secret
from .views import node_view

APPLY = {"Content-Type": "application/apply-patch+yaml"}
FAULTY = "latestFaultyPodInstanceList"


def status_patch(status: JobStatus) -> Object:
    """Return a merge patch that keeps other writers' parts of the status, and nothing stale of
    ours."""
    written = job_status_to(status)
    ours = [field.key for field in fields_of(JobStatus) if field.key != OTHER]
    patch: Object = {key: written.get(key) for key in ours if key not in OTHERS}
    if patch[FAULTY] is not None:
        # A merge goes into objects, where a value that is now empty would stay.
        patch[FAULTY] = {**dict.fromkeys(f.key for f in fields_of(FaultyPods)), **patch[FAULTY]}
    return patch


POLICY_VERSIONS = ("policy/v1", "policy/v1beta1")
"""Versions of PodDisruptionBudgets, the newest first: Kubernetes 1.20 has only the second."""


class JobRequests:
    """Requests for one job; each raises as `unbroken.kube.client.api_errors`."""

    def __init__(self, client: KubeClient, job: JobIdentity) -> None:
        self._client = client
        self._job = job
        space = f"namespaces/{quote(job.namespace)}"
        self._pods = f"api/v1/{space}/pods"
        self._events = f"api/v1/{space}/events"
        self._secrets = f"api/v1/{space}/secrets"
        self._budgets = [f"apis/{one}/{space}/poddisruptionbudgets" for one in POLICY_VERSIONS]
        self._self = f"{JOBS}/{space}/{jobs.PLURAL}/{quote(job.name)}"
        self._incidents = f"{INCIDENTS}/{space}/{incidents.PLURAL}"

    async def create_pod(self, body: Object) -> Pod:
        """Create a pod. Raises ApiRefusal AlreadyExists if the name is taken."""
        return msgspec.json.decode(await self._client.raw("POST", self._pods, body=body), type=Pod)

    async def pod(self, name: str) -> Pod | None:
        """Return the present pod of a name."""
        return await self._client.get_or_none(f"{self._pods}/{quote(name)}", Pod)

    async def warnings(self, uid: str) -> list[Object]:
        """Return some events of type Warning about the pod."""
        query = {"fieldSelector": f"involvedObject.uid={uid},type=Warning", "limit": "20"}
        result = await self._client.raw("GET", self._events, parameters=query)
        items: list[Object] = msgspec.json.decode(result).get("items") or []
        return items

    async def delete_pod(self, order: DeletePod) -> bool:
        """Delete this very pod; return False if it is gone already, perhaps replaced."""
        path, grace = f"{self._pods}/{quote(order.name)}", 0 if order.force else None
        return await self._client.delete_if_present(path, order.uid, grace_seconds=grace)

    async def delete_job(self) -> None:
        """Delete the job; its objects go with it."""
        await self._client.delete_if_present(self._self, self._job.uid, propagation="Background")

    async def write_status(self, status: JobStatus) -> None:
        """Write the status of this very job."""
        body = {"status": status_patch(status)}
        await self._client.merge(f"{self._self}/status", body, uid=self._job.uid)

    async def write_incident(self, incident: Incident) -> None:
        """Create or replace the Incident object."""
        job = {"name": self._job.name, "namespace": self._job.namespace, "uid": self._job.uid}
        body = incident_to(incident, job)
        path = f"{self._incidents}/{quote(body['metadata']['name'])}"
        await self._client.raw(
            "PATCH", path, body=body, headers=APPLY, parameters={"force": "true"}
        )

    async def write_ledger(self, ledger: Ledger) -> None:
        """Write the annotation with the ledger of this very job."""
        annotations = {LEDGER: write_ledger(ledger) or None}
        body = {"metadata": {"annotations": annotations}}
        await self._client.merge(self._self, body, uid=self._job.uid)

    async def delete_incident(self, number: int) -> None:
        """Delete the Incident object, if it is there."""
        name = f"{self._job.name}-{number}"
        await self._client.delete_if_present(f"{self._incidents}/{quote(name)}")

    async def is_fenced(self, node: str) -> bool:
        """True if the node is fenced or gone now: watches may lag behind."""
        result = await self._client.get_or_none(f"api/v1/nodes/{quote(node)}", Node)
        return result is None or node_view(result).is_fenced

    async def create_secret(self, name: str, key: bytes) -> None:
        """Create the Secret with the job's key, if none has its name.

        Secrets are never read: the name identifies the key in it (`core/keys`).
        """
        await self._client.create_if_absent(self._secrets, key_secret(self._job, name, key))

    async def guard(self) -> None:
        """Create the job's PodDisruptionBudget, if none has its name."""
        for version, path in zip(POLICY_VERSIONS, self._budgets, strict=True):
            try:
                await self._client.create_if_absent(path, disruption_budget(self._job, version))
                return
            except NotFound:
                if path is self._budgets[-1]:
                    raise

    async def unguard(self) -> None:
        """Delete the job's PodDisruptionBudget, and no other one of its name."""
        for collection in self._budgets:
            path = f"{collection}/{quote(self._job.name)}"
            budget = await self._client.get_or_none(path, PodDisruptionBudget)
            owners = (budget.metadata.ownerReferences if budget and budget.metadata else None) or ()
            if budget and budget.metadata and any(owner.uid == self._job.uid for owner in owners):
                await self._client.delete_if_present(path, budget.metadata.uid)
                return
