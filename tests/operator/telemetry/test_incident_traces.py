"""Each incident is sent once as a trace, after its end, whichever operator leads."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tests.operator.conftest import Object, Place
from tests.watching import Watcher, running
from unbroken.core.job.record.spans import Trace
from unbroken.kube.informer import Informer
from unbroken.operator import definitions
from unbroken.operator.kinds import IncidentObject
from unbroken.operator.telemetry import IncidentTraces
from unbroken.spec.job.codec import incident_to
from unbroken.spec.job.incident import RECOVERED, Incident, Remedy, Symptom

KILLED = Symptom(1e9, "Signal", "killed", pod="lm-pods-1", node="n1", rank=3)
NEVER = 1000.0
"""Seconds to settle: longer than any test."""


def broken(namespace: str, number: int) -> Object:
    """Return an open incident of the job lm."""
    symptoms, why = (KILLED,), "first fault"
    found = Incident(number, 0, KILLED, symptoms, Remedy.PROCESS, why, detected_at=1e9 + 1)
    return incident_to(found, {"name": "lm", "namespace": namespace, "uid": "1"})


class Told(Watcher[Trace]):
    """Traces in the order in which they are sent."""

    @property
    def names(self) -> list[Any]:
        """Names of the traces' incidents."""
        return [one.whole.attributes["unbroken.incident.name"] for one in self.seen]


@asynccontextmanager
async def watched(here: Place) -> AsyncIterator[tuple[Informer[IncidentObject], Watcher[str]]]:
    """Yield an informer of a namespace's incidents, and the changes that it reports."""
    await definitions.install(here.client)
    heard = Watcher[str]()
    informer = Informer(here.client, IncidentObject, namespace=here.namespace)
    async with running(informer.run()):
        await informer.synced.wait()
        informer.subscribe(heard.change)
        yield informer, heard


async def create(here: Place, number: int) -> None:
    """Create an open incident."""
    await here.post("incidents", broken(here.namespace, number))


async def change(here: Place, number: int, **spec: Any) -> None:
    """Change fields of an incident."""
    await here.merge(f"incidents/lm-{number}", {"spec": spec})


async def test_an_incident_is_told_once_with_what_is_added_soon_after_its_end(place: Any) -> None:
    told = Told()
    async with place() as here, watched(here) as (informer, _):
        await create(here, 1)
        async with running(IncidentTraces(informer, told, settle_seconds=1).run()):
            await change(here, 1, outcome=RECOVERED)
            await change(here, 1, resumed="resumed after step 7")
            await told.until(bool)
            await change(here, 1, resumed="too late")
            await create(here, 2)
            await change(here, 2, outcome="RetriesExhausted")
            await told.until(lambda seen: len(seen) > 1)
    assert told.names == ["lm-1", "lm-2"]
    whole = told.seen[0].whole
    assert whole.attributes["unbroken.incident.resumed"] == "resumed after step 7"
    assert whole.attributes["unbroken.job.name"] == "lm"
    assert whole.attributes["k8s.namespace.name"] == here.namespace
    assert [one.problem for one in told.seen] == ["", "RetriesExhausted"]


async def test_who_leads_next_tells_nothing_again_and_what_is_left_open(place: Any) -> None:
    first, second = Told(), Told()
    async with place() as here, watched(here) as (informer, _):
        await create(here, 1)
        await create(here, 2)
        async with running(IncidentTraces(informer, first, settle_seconds=0).run()):
            await change(here, 1, outcome=RECOVERED)
            await first.until(bool)
        async with running(IncidentTraces(informer, second, settle_seconds=0).run()):
            await change(here, 1, resumed="told later")
            await change(here, 2, outcome=RECOVERED)
            await second.until(bool)
    assert (first.names, second.names) == (["lm-1"], ["lm-2"])


async def test_who_ends_tells_what_has_ended_first(place: Any) -> None:
    told = Told()
    async with place() as here, watched(here) as (informer, heard):
        await create(here, 1)
        await create(here, 2)
        async with running(IncidentTraces(informer, told, settle_seconds=NEVER).run()):
            await heard.until(lambda seen: "+lm-2" in seen)
            await change(here, 1, outcome=RECOVERED)
            await heard.until(lambda seen: "~lm-1" in seen)
            assert told.names == []
    assert told.names == ["lm-1"]
