"""Keeps a pod's status in the API equal to its machine's: one patch a change, the latest wins."""

from __future__ import annotations

import asyncio
import logging

from unbroken.errors import PeerError, WorldError
from unbroken.kube import clock
from unbroken.kube.errors import Conflict, NotFound
from unbroken.local.node.context import NodeContext
from unbroken.log_lines import Log

from .container import Stage
from .events import Object
from .lifecycle import PodLifecycle
from .status import Addresses, pod_status

SETTLE_SECONDS = 0.1
"""A start that is done within this time is not announced before; it saves a write."""
OWNED = (
    "PodReadyToStartContainers",
    "Initialized",
    "Ready",
    "ContainersReady",
    "PodScheduled",
)
"""Conditions that the node writes; PodScheduled only if it is missing."""

log = Log(__name__)


class StatusWriter:
    """Writes one pod's status."""

    def __init__(self, node: NodeContext, machine: PodLifecycle) -> None:
        self._node = node
        self._machine = machine
        self._pod = machine.pod
        self._written: Object = dict(machine.pod.get("status") or {})
        self._addresses = Addresses(node.address)
        self._dirty = asyncio.Event()
        self._settled = asyncio.Event()
        self._is_deleted = False
        self._is_final = machine.is_finished
        """The status was complete when the pod was taken over; it stays."""

    def observed(self, pod: Object) -> None:
        """A newer version of the pod, with conditions of others."""
        self._pod = pod
        self._refresh_machine()

    def dirty(self, addresses: Addresses) -> None:
        """The machine has moved."""
        self._addresses = addresses
        if self._is_settling():
            self._settled.clear()
        else:
            self._settled.set()
        self._dirty.set()

    def _is_settling(self) -> bool:
        machine = self._machine
        if machine.is_finished or machine.ending is not None:
            return False
        is_preparing = not machine.is_prepared and machine.deadline() is None
        return is_preparing or any(c.stage is Stage.STARTING for c in machine.all)

    def _refresh_machine(self) -> None:
        """The machine reads conditions from its pod: ours as written, others' as observed."""
        status = self._pod.get("status") or {}
        ours = [c for c in self._written.get("conditions") or () if c["type"] in OWNED]
        seen = {c["type"] for c in ours}
        others = [c for c in status.get("conditions") or () if c["type"] not in seen]
        self._machine.set_pod({**self._pod, "status": {**status, "conditions": ours + others}})

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            await self._dirty.wait()
            if not self._settled.is_set():
                await self._settle()
            self._dirty.clear()
            await self._write_when_possible()

    async def _settle(self) -> None:
        try:
            async with asyncio.timeout(SETTLE_SECONDS):
                await self._settled.wait()
        except TimeoutError:
            self._settled.set()

    async def _write_when_possible(self) -> None:
        try:
            await self._write()
            await self._delete_finished()
        except PeerError as refusal:
            # Not found, or another pod of this name: the watch will inform the worker.
            is_expected = isinstance(refusal, NotFound | Conflict)
            level = logging.DEBUG if is_expected else logging.WARNING
            log.log(level, "pod status refused", pod=self._pod["metadata"]["name"], error=refusal)
        except WorldError as error:
            log.warning("pod status not written", pod=self._pod["metadata"]["name"], error=error)
            if error.retry_after_seconds is not None:
                await clock.pause(error.retry_after_seconds)
                self._dirty.set()

    async def _write(self) -> None:
        if self._is_final:
            return
        wanted = pod_status(self._machine, self._addresses, self._node.clock())
        patch = changes(self._written, wanted)
        if not patch:
            return
        await self._node.api.patch_pod_status(self._pod, patch)
        self._written = {**self._written, **wanted}
        self._refresh_machine()

    async def _delete_finished(self) -> None:
        is_leaving = "deletionTimestamp" in self._pod["metadata"]
        if is_leaving and self._machine.is_finished and not self._is_deleted:
            await self._node.api.delete_pod(self._pod)
            self._is_deleted = True


def changes(written: Object, wanted: Object) -> Object:
    """The patch from one status to the other; conditions are merged by their type."""
    patch = {
        key: value
        for key, value in wanted.items()
        if key != "conditions" and written.get(key) != value
    }
    if "podIPs" in patch:
        # Merged by address, so an old one must be taken out by name.
        stale = [entry["ip"] for entry in written.get("podIPs") or ()]
        patch["podIPs"] = [
            *patch["podIPs"],
            *({"$patch": "delete", "ip": ip} for ip in stale if {"ip": ip} not in patch["podIPs"]),
        ]
    known = {c["type"]: c for c in written.get("conditions") or ()}
    conditions = [c for c in wanted.get("conditions") or () if not _same(known.get(c["type"]), c)]
    if conditions:
        patch["conditions"] = [{"reason": None, "message": None, **c} for c in conditions]
    return patch


def _same(known: Object | None, wanted: Object) -> bool:
    fields = ("status", "reason", "message")
    return known is not None and all(known.get(f) == wanted.get(f) for f in fields)
