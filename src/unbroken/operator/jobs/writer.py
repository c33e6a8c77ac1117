"""Writer of a job's state: the status, its events, its incidents, the ledger, and its
PodDisruptionBudget.

It makes one write at a time. Of several statuses the newest is written. While the API server is
away all writes wait, and are made when it is back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from functools import partial

from lightkube.models.core_v1 import ObjectReference

from unbroken.core.job.events import RecordEvent
from unbroken.kube.errors import ApiRefusal, Conflict, NotFound
from unbroken.kube.events import EventRecorder
from unbroken.kube.persist import persist
from unbroken.log_lines import Log
from unbroken.spec.job.incident import Incident
from unbroken.spec.job.ledger import Ledger
from unbroken.spec.job.types import GROUP, KIND, VERSION, JobStatus

from .pods import JobIdentity
from .requests import JobRequests

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
