"""Sender of each ended incident as a trace, once.

It stores nothing: incidents that had ended before this operator led were sent by the earlier one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from unbroken.core.job.record.spans import IncidentName, Trace, trace_of
from unbroken.kube.cache import key_of
from unbroken.kube.informer import Informer
from unbroken.operator.kinds import IncidentObject
from unbroken.spec.job.codec import incident_from

SETTLE_SECONDS = 5.0
"""Seconds after an incident's end: its restored steps may be known only after the first step."""


class IncidentTraces:
    """Sends the traces of incidents that end while `run` runs."""

    def __init__(
        self,
        incidents: Informer[IncidentObject],
        send: Callable[[Trace], None],
        settle_seconds: float = SETTLE_SECONDS,
    ) -> None:
        self._incidents = incidents
        self._send = send
        self._settle_seconds = settle_seconds
        self._told: set[str] = set()
        """Uids of incidents that have ended."""
        self._waiting: dict[str, IncidentObject] = {}
        """The newest versions of incidents that are not sent yet, by uid."""
        self._is_over = False

    async def run(self) -> None:
        """Send until cancelled, and then the rest."""
        await self._incidents.synced.wait()
        self._told = {
            incident["metadata"]["uid"]
            for incident in self._incidents.items()
            if _has_ended(incident)
        }
        self._incidents.subscribe(self._on_incident)
        try:
            await asyncio.Event().wait()
        finally:
            self._is_over = True
            for uid in list(self._waiting):
                self._tell(uid)

    def _on_incident(self, old: IncidentObject | None, new: IncidentObject | None) -> None:
        if self._is_over:
            return
        if new is None:
            assert old is not None
            self._told.discard(old["metadata"]["uid"])
            return
        uid = new["metadata"]["uid"]
        if uid in self._waiting:
            self._waiting[uid] = new
        elif _has_ended(new) and uid not in self._told:
            self._told.add(uid)
            self._waiting[uid] = new
            asyncio.get_running_loop().call_later(self._settle_seconds, self._tell, uid)

    def _tell(self, uid: str) -> None:
        item = self._waiting.pop(uid, None)
        owners = (item and item["metadata"].get("ownerReferences")) or ()
        if item is None or not owners:
            return
        key = key_of(item)
        named = IncidentName(uid, key.name, key.namespace, owners[0]["name"])
        self._send(trace_of(incident_from(item)[0], named))


def _has_ended(item: IncidentObject) -> bool:
    spec = item.get("spec")
    return isinstance(spec, Mapping) and bool(spec.get("outcome"))
