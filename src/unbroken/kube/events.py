"""Recorder of core/v1 Events, which `kubectl describe` shows below an object.

Equal events are counted in one object, as client-go's correlator does. Recording never waits and
never fails: events that the API cannot take in time are dropped and counted.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from dataclasses import dataclass, field

from lightkube.core.resource import Resource, api_info
from lightkube.models.core_v1 import ObjectReference

from unbroken.errors import UnbrokenError
from unbroken.log_lines import Log

from .cache import HasMetadata
from .client import KubeClient, Object
from .clock import rfc3339, wall

log = Log(__name__)

QUEUED = 1000
"""Events that may wait for the API; client-go's broadcaster holds 1,000 as well."""

REMEMBERED = 4096
"""Series that are remembered (client-go v1.33 events_cache.go, maxLruCacheEntries)."""

MESSAGE = 1024
"""Longest message that the API takes (core/v1 validation, NoteLengthLimit)."""

BURST, REFILL_SECONDS = 25, 300.0
"""Events that an object may have at once, and seconds until each further one; the rest are dropped
(client-go v1.33 events_cache.go, defaultSpamBurst and defaultSpamQPS)."""


def reference_to(item: HasMetadata) -> ObjectReference:
    """Return a reference to an object that came from the API."""
    metadata = item.metadata
    assert metadata is not None
    assert isinstance(item, Resource)
    definition = api_info(item).resource
    return ObjectReference(
        apiVersion=definition.api_version,
        kind=definition.kind,
        name=metadata.name,
        namespace=metadata.namespace,
        uid=metadata.uid,
        resourceVersion=metadata.resourceVersion,
    )


@dataclass(frozen=True, slots=True)
class Occurrence:
    """An event about an object; occurrences that are equal in all fields are one series."""

    namespace: str
    kind: str
    name: str
    uid: str
    type: str
    reason: str
    message: str
    field_path: str


@dataclass(slots=True)
class EventSeries:
    """The Event object that counts equal occurrences."""

    event_name: str
    first: float
    last: float
    reference: ObjectReference
    count: int = 0
    sent: int = 0
    """The count that the API has; 0: the object does not exist yet."""


@dataclass(slots=True)
class _EventBudget:
    tokens: float
    time: float


@dataclass(slots=True)
class Correlator:
    """Decides which occurrences belong together and which are too many. Pure."""

    series: OrderedDict[Occurrence, EventSeries] = field(default_factory=OrderedDict)
    _budgets: OrderedDict[str, _EventBudget] = field(default_factory=OrderedDict)

    def note(self, what: Occurrence, reference: ObjectReference, now: float) -> EventSeries | None:
        """Return the series to send for an occurrence at `now` (wall time); None: one too many."""
        if not self._may_spend(what, now):
            return None
        series = self.series.get(what)
        if series is None:
            # client-go v1.33 names events by the time in hexadecimal nanoseconds.
            name = f"{what.name or what.kind.lower()}.{int(now * 1e9):x}"
            series = self.series[what] = EventSeries(name, now, now, reference)
        series.count += 1
        series.last = now
        self.series.move_to_end(what)
        if len(self.series) > REMEMBERED:
            self.series.popitem(last=False)
        return series

    def _may_spend(self, what: Occurrence, now: float) -> bool:
        owner = f"{what.namespace}/{what.kind}/{what.name}/{what.uid}"
        budget = self._budgets.setdefault(owner, _EventBudget(BURST, now))
        self._budgets.move_to_end(owner)
        if len(self._budgets) > REMEMBERED:
            self._budgets.popitem(last=False)
        budget.tokens = min(BURST, budget.tokens + max(0.0, now - budget.time) / REFILL_SECONDS)
        budget.time = now
        if budget.tokens < 1.0:
            return False
        budget.tokens -= 1.0
        return True


class EventRecorder:
    """Sends events in the background; `run` it together with the code that records.

    `component` and `host` name the reporter ("kubelet", "node-1").
    """

    def __init__(self, client: KubeClient, component: str, host: str = "") -> None:
        self.dropped = 0
        """Events that were lost: too many, or refused by the API."""
        self._client = client
        self._component = component
        self._host = host
        self._correlator = Correlator()
        self._queue: deque[tuple[Occurrence, EventSeries]] = deque()
        self._wake = asyncio.Event()

    def record(
        self, about: HasMetadata | ObjectReference, type: str, reason: str, message: str
    ) -> bool:
        """Record an event about an object; `type` is Normal or Warning.

        Returns False if it was dropped: its object, or all together, had too many events.
        """
        reference = about if isinstance(about, ObjectReference) else reference_to(about)
        what = Occurrence(
            reference.namespace or "",
            reference.kind or "",
            reference.name or "",
            reference.uid or "",
            type,
            reason,
            message[:MESSAGE].encode(errors="replace").decode(),
            reference.fieldPath or "",
        )
        if len(self._queue) >= QUEUED:
            self.dropped += 1
            return False
        series = self._correlator.note(what, reference, wall())
        if series is None:
            self.dropped += 1
            return False
        self._queue.append((what, series))
        self._wake.set()
        return True

    async def run(self) -> None:
        """Send recorded events until cancelled."""
        while True:
            while self._queue:
                what, series = self._queue.popleft()
                try:
                    await self._send(what, series)
                except (UnbrokenError, UnicodeError, RecursionError) as error:
                    self.dropped += 1
                    log.debug("event dropped", event=series.event_name, error=error)
            self._wake.clear()
            await self._wake.wait()

    async def _send(self, what: Occurrence, series: EventSeries) -> None:
        if series.sent == series.count:
            return  # sent with an earlier occurrence
        count = series.count
        namespace = what.namespace or "default"
        path = f"api/v1/namespaces/{namespace}/events"
        counted = {"count": count, "lastTimestamp": rfc3339(series.last)}
        if not series.sent or not await self._client.merge_if_present(
            f"{path}/{series.event_name}", counted
        ):
            await self._client.raw("POST", path, body=self._body(what, series, count, namespace))
        series.sent = count

    def _body(self, what: Occurrence, series: EventSeries, count: int, namespace: str) -> Object:
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": series.event_name, "namespace": namespace},
            "involvedObject": series.reference,
            "type": what.type,
            "reason": what.reason,
            "message": what.message,
            "source": {"component": self._component, "host": self._host},
            "reportingComponent": self._component,
            "reportingInstance": self._host,
            "firstTimestamp": rfc3339(series.first),
            "lastTimestamp": rfc3339(series.last),
            "count": count,
        }
