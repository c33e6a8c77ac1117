"""What the operator asks of the API server about one job's objects."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec
from lightkube.resources.core_v1 import Node, Pod

from unbroken.core.job.events import DeletePod, FenceNode
from unbroken.errors import PeerError, WorldError
from unbroken.kube.backoff import Backoff
from unbroken.kube.client import ApiRefusal, KubeClient
from unbroken.kube.clock import entropy, pause
from unbroken.operator.kinds import INCIDENTS, JOBS
from unbroken.spec.job import incident as incidents
from unbroken.spec.job import types as jobs
from unbroken.spec.job.codec import OTHER, OTHERS, incident_to, job_status_to
from unbroken.spec.job.incident import Incident
from unbroken.spec.job.ledger import ANNOTATION as LEDGER
from unbroken.spec.job.ledger import Ledger, write_ledger
from unbroken.spec.job.types import FaultyPods, JobStatus
from unbroken.spec.schema.fields import fields_of

from .pods import JobIdentity, key_secret
from .views import node_view

log = logging.getLogger(__name__)

Object = dict[str, Any]
T = TypeVar("T")

MERGE = {"Content-Type": "application/merge-patch+json"}
APPLY = {"Content-Type": "application/apply-patch+yaml"}
FENCE = "unbroken.dev/fence"
"""Annotation of a node that asks for proof that nothing runs there; its value is the reason."""
FAULTY = "latestFaultyPodInstanceList"
NOT_FOUND, CONFLICT = 404, 409
RETRY = Backoff(first=0.1, limit=2.0)
LOUD_FAILURES = 4


async def persist(doing: str, request: Callable[[], Awaitable[T]]) -> T:
    """The answer to a request that is made until the API server gives one; raises ApiRefusal."""
    random, failures = entropy(), 0
    while True:
        try:
            return await request()
        except ApiRefusal:
            raise
        except (WorldError, PeerError) as error:
            failures += 1
            level = logging.WARNING if failures == LOUD_FAILURES else logging.DEBUG
            log.log(level, '%s failures=%d reason="%s"', doing, failures, error)
        await pause(RETRY.delay(failures, random))


def status_patch(status: JobStatus) -> Object:
    """A merge patch that leaves of the status what others write, and nothing stale of ours."""
    written = job_status_to(status)
    ours = [field.key for field in fields_of(JobStatus) if field.key != OTHER]
    patch: Object = {key: written.get(key) for key in ours if key not in OTHERS}
    if patch[FAULTY] is not None:
        # A merge goes into objects, where what is empty now would stay as it was.
        patch[FAULTY] = {**dict.fromkeys(f.key for f in fields_of(FaultyPods)), **patch[FAULTY]}
    return patch


class JobRequests:
    """Requests for one job; each raises as `unbroken.kube.client.api_errors`."""

    def __init__(self, client: KubeClient, job: JobIdentity) -> None:
        self._client = client
        self._job = job
        space = f"namespaces/{quote(job.namespace)}"
        self._pods = f"api/v1/{space}/pods"
        self._events = f"api/v1/{space}/events"
        self._secrets = f"api/v1/{space}/secrets"
        self._self = f"{JOBS}/{space}/{jobs.PLURAL}/{quote(job.name)}"
        self._incidents = f"{INCIDENTS}/{space}/{incidents.PLURAL}"

    async def create_pod(self, body: Object) -> Pod:
        """Create a pod; ApiRefusal AlreadyExists where the name is taken."""
        return msgspec.json.decode(await self._client.raw("POST", self._pods, body=body), type=Pod)

    async def pod(self, name: str) -> Pod | None:
        """The pod of a name as it is now."""
        found = await self._get(f"{self._pods}/{quote(name)}")
        return None if found is None else msgspec.json.decode(found, type=Pod)

    async def warnings(self, uid: str) -> list[Object]:
        """Some events of type Warning about the pod."""
        query = {"fieldSelector": f"involvedObject.uid={uid},type=Warning", "limit": "20"}
        found = await self._client.raw("GET", self._events, parameters=query)
        items: list[Object] = msgspec.json.decode(found).get("items") or []
        return items

    async def delete_pod(self, order: DeletePod) -> bool:
        """Delete this very pod; False: it is gone already, perhaps replaced."""
        body: Object = {"preconditions": {"uid": order.uid}}
        if order.force:
            body["gracePeriodSeconds"] = 0
        return await self._delete(f"{self._pods}/{quote(order.name)}", body)

    async def delete_job(self) -> None:
        """Delete the job; its objects go with it."""
        body = {"preconditions": {"uid": self._job.uid}, "propagationPolicy": "Background"}
        await self._delete(self._self, body)

    async def write_status(self, status: JobStatus) -> None:
        """Write the status of this very job."""
        body = {"metadata": {"uid": self._job.uid}, "status": status_patch(status)}
        await self._client.raw("PATCH", f"{self._self}/status", body=body, headers=MERGE)

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
        body = {"metadata": {"uid": self._job.uid, "annotations": annotations}}
        await self._client.raw("PATCH", self._self, body=body, headers=MERGE)

    async def delete_incident(self, number: int) -> None:
        """Delete the Incident object, if it is there."""
        name = f"{self._job.name}-{number}"
        await self._delete(f"{self._incidents}/{quote(name)}", {})

    async def fence(self, order: FenceNode) -> None:
        """Ask for the fence of a node that is still not ready; one that is gone runs nothing.

        It may have come back while the API server was away, and is then nobody's to be fenced.
        """
        body = {"metadata": {"annotations": {FENCE: order.reason}}}
        path = f"api/v1/nodes/{quote(order.node)}"
        try:
            found = await self._client.raw("GET", path)
            if node_view(msgspec.json.decode(found, type=Node)).is_ready:
                log.info("node=%s fence=dropped reason=ready", order.node)
                return
            await self._client.raw("PATCH", path, body=body, headers=MERGE)
        except ApiRefusal as error:
            if error.code != NOT_FOUND:
                raise

    async def is_fenced(self, node: str) -> bool:
        """Whether the node is fenced or gone now: watches may lag behind."""
        found = await self._get(f"api/v1/nodes/{quote(node)}")
        return found is None or node_view(msgspec.json.decode(found, type=Node)).is_fenced

    async def create_secret(self, name: str, key: bytes) -> None:
        """Create the Secret with the job's key, if there is none of its name.

        Secrets are never read: the name tells which key is in it (`core/keys`).
        """
        try:
            await self._client.raw("POST", self._secrets, body=key_secret(self._job, name, key))
        except ApiRefusal as error:
            if error.code != CONFLICT:
                raise

    async def _get(self, path: str) -> bytes | None:
        try:
            return await self._client.raw("GET", path)
        except ApiRefusal as error:
            if error.code == NOT_FOUND:
                return None
            raise

    async def _delete(self, path: str, body: Mapping[str, Any]) -> bool:
        try:
            await self._client.raw("DELETE", path, body=body)
        except ApiRefusal as error:
            if error.code not in (NOT_FOUND, CONFLICT):
                raise
            return False
        return True
