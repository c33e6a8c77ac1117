"""Writer of a job's state: the status, its events, its incidents, the ledger, and its
PodDisruptionBudget.

It makes one write at a time. Of several statuses the newest is written. While the API server is
away all writes wait, and are made when it is back.

`JobRequests` makes the requests to the API server about one job's objects.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from urllib.parse import quote

import msgspec
from lightkube.models.core_v1 import ObjectReference
from lightkube.resources.core_v1 import Node, Pod
from lightkube.resources.policy_v1 import PodDisruptionBudget

from unbroken.core.job.events import DeletePod, RecordEvent
from unbroken.kube.backoff import persist
from unbroken.kube.client import KubeClient, Object
from unbroken.kube.errors import ApiRefusal, Conflict, NotFound
from unbroken.kube.events import EventRecorder
from unbroken.log_lines import Log
from unbroken.operator.kinds import INCIDENTS, JOBS
from unbroken.spec.job import incident as incidents
from unbroken.spec.job import types as jobs
from unbroken.spec.job.codec import OTHER, OTHERS, incident_to, job_status_to
from unbroken.spec.job.incident import Incident
from unbroken.spec.job.ledger import Ledger, write_ledger
from unbroken.spec.job.types import GROUP, KIND, VERSION, FaultyPods, JobStatus
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


log = Log(__name__)

EVENTS_MAX = 1000
"""Events that wait for the API server; older ones are dropped."""

GATHER_SECONDS = 0.15
"""Seconds that news waits for more, unless an order waits for it to be stored.

A recovery reports several times within this time. Writing each would take the processor from the
workers that are starting, and the last one contains it all.
"""


class JobWriter:
    """The writes of one job, in order; `run` makes them."""

    def __init__(
        self,
        requests: JobRequests,
        recorder: EventRecorder,
        job: JobIdentity,
        *,
        gather_seconds: float = GATHER_SECONDS,
    ) -> None:
        self._gather_seconds = gather_seconds
        self._requests = requests
        self._recorder = recorder
        self._job = job
        self._status: JobStatus | None = None
        self._events: list[RecordEvent] = []
        self._incidents: dict[int, Incident] = {}
        self._ledger: Ledger | None = None
        self._ledger_written: Callable[[], None] | None = None
        self._forgotten: list[int] = []
        self._is_guarded: bool | None = None
        """True: guard the pods from evictions; False: do not; None: unchanged."""
        self._wake = asyncio.Event()
        self._stored = asyncio.Event()
        self._stored.set()
        self._hurry = asyncio.Event()
        self.about = ObjectReference(
            apiVersion=f"{GROUP}/{VERSION}",
            kind=KIND,
            name=job.name,
            namespace=job.namespace,
            uid=job.uid,
        )

    def status(self, status: JobStatus) -> None:
        """Set the status to write."""
        self._status = status
        self._stored.clear()
        self._wake.set()

    async def status_stored(self) -> None:
        """Return once the API server has the newest status, or has refused it for good."""
        if not self._stored.is_set():
            self._hurry.set()
        await self._stored.wait()

    def guard(self, is_guarded: bool) -> None:
        """Set whether the job's pods are protected from eviction."""
        self._is_guarded = is_guarded
        self._wake.set()

    def event(self, event: RecordEvent) -> None:
        """Record an event after the status that was given last."""
        self._events = [*self._events, event][-EVENTS_MAX:]
        self._wake.set()

    def incident(self, incident: Incident) -> None:
        """Write an incident; only its newest state counts."""
        self._incidents[incident.number] = incident
        self._wake.set()

    def ledger(self, ledger: Ledger, written: Callable[[], None] | None = None) -> None:
        """Set the ledger to write. `written` is called once the API server has stored it, or has
        refused it for good, unless a newer ledger takes its place; None: nobody waits for it."""
        self._ledger = ledger
        self._ledger_written = written
        self._wake.set()
        if written is not None:
            self._hurry.set()

    def forget(self, number: int) -> None:
        """Delete an incident once the ledger with its cost is stored."""
        self._incidents.pop(number, None)
        self._forgotten.append(number)
        self._wake.set()

    async def run(self) -> None:
        """Write until cancelled."""
        requests = self._requests
        while True:
            await self._wake.wait()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._gather_seconds):
                    await self._hurry.wait()
            self._wake.clear()
            self._hurry.clear()
            events, self._events = self._events, []
            incidents, self._incidents = self._incidents, {}
            ledger, self._ledger = self._ledger, None
            written, self._ledger_written = self._ledger_written, None
            forgotten, self._forgotten = self._forgotten, []
            guarded, self._is_guarded = self._is_guarded, None
            if guarded is False:
                # First, since an operator that finds the job ended does not look for its budget.
                await self._persist("delete the disruption budget", requests.unguard)
            await self._write_status()
            if guarded:
                await self._persist("write the disruption budget", requests.guard)
            for event in events:
                kind = "Warning" if event.is_warning else "Normal"
                self._recorder.record(self.about, kind, event.reason, event.message)
            for incident in incidents.values():
                await self._persist(
                    f"write incident {incident.number}", partial(requests.write_incident, incident)
                )
            if ledger is not None:
                await self._persist("write the ledger", partial(requests.write_ledger, ledger))
                if written is not None:
                    written()
            for number in forgotten:
                await self._persist(
                    f"delete incident {number}", partial(requests.delete_incident, number)
                )

    async def _write_status(self) -> None:
        written: JobStatus | None = None

        async def write() -> None:
            # Each attempt writes the newest.
            nonlocal written
            written = self._status
            assert written is not None
            await self._requests.write_status(written)

        if self._status is None:
            return
        try:
            await persist("write the status", write, job=self._title)
        except ApiRefusal as error:
            # The watch will report that the job is gone; any other refusal is of a status that
            # should be valid.
            level = logging.DEBUG if isinstance(error, NotFound | Conflict) else logging.ERROR
            log.log(level, "status refused", job=self._title, error=error)
        if self._status is written:
            self._status = None
            self._stored.set()

    async def _persist(self, what: str, request: Callable[[], Awaitable[None]]) -> None:
        try:
            await persist(what, request, job=self._title)
        except ApiRefusal as error:
            log.warning("API request refused", task=what, job=self._title, error=error)

    @property
    def _title(self) -> str:
        return f"{self._job.namespace}/{self._job.name}"
