"""One operator at a time: whoever holds the Lease acts.

A holder that cannot reach the API server goes on: nobody else can take the lease meanwhile, and
two that act for a moment do no harm, as the agents refuse what is older than what they know.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from unbroken.errors import PeerError, WorldError
from unbroken.kube.client import ApiRefusal, KubeClient
from unbroken.kube.clock import micro_time, monotonic, pause, wall

log = logging.getLogger(__name__)

Object = dict[str, Any]
NOT_FOUND, CONFLICT = 404, 409
RELEASE_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class LeaderTerms:
    """Which lease, and for how long."""

    name: str = "unbroken-operator"
    namespace: str = "kube-system"
    duration_seconds: int = 15
    """A holder that was silent for so long has lost it (client-go's LeaseDuration)."""
    renew_seconds: float = 2.0
    """client-go's RetryPeriod."""


def identity() -> str:
    """This process, so that others on the machine can tell whether it lives."""
    pid = os.getpid()
    return f"{_here()}/{pid}/{_started(pid)}"


def _here() -> str:
    return f"{socket.gethostname()}/{os.readlink('/proc/self/ns/pid')}"


def _started(pid: int) -> int:
    """Start time in clock ticks; 0: there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in "ZX" else int(fields[19])


def is_dead(holder: str) -> bool:
    """Whether the holder was a process of this machine that has ended."""
    place, _, process = holder.rpartition("/")
    place, _, pid = place.rpartition("/")
    if place != _here() or not pid.isdecimal():
        return False
    return str(_started(int(pid))) != process


class Election:
    """Runs a program while this process is the leader."""

    def __init__(self, client: KubeClient, terms: LeaderTerms, holder: str) -> None:
        self._client = client
        self._terms = terms
        self._holder = holder
        space = f"apis/coordination.k8s.io/v1/namespaces/{quote(terms.namespace)}/leases"
        self._collection, self._path = space, f"{space}/{quote(terms.name)}"
        self._seen: tuple[str, float] = ("", 0.0)
        """The lease's version as last seen, and since when."""
        self._is_held = False

    async def lead(self, program: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run the program whenever this process leads, until cancelled."""
        while True:
            if not await self._try():
                log.info("operator=waiting lease=%s/%s", self._terms.namespace, self._terms.name)
                while not await self._try():
                    await pause(self._terms.renew_seconds)
            log.info("operator=leading holder=%s", self._holder)
            try:
                async with asyncio.TaskGroup() as tasks:
                    running = tasks.create_task(program())
                    await self._hold()
                    running.cancel()
            finally:
                await asyncio.shield(self._release())
            log.warning("operator=stopped lease=%s/%s", self._terms.namespace, self._terms.name)

    async def _hold(self) -> None:
        """Return when the lease is another's."""
        while True:
            await pause(self._terms.renew_seconds)
            if not await self._try():
                return

    async def _try(self) -> bool:
        """Take or renew the lease; False: it is another's.

        True also while the API server is away, to one who has it.
        """
        try:
            return await self._take()
        except ApiRefusal as error:
            if error.code != CONFLICT:
                raise
            # Somebody else has written; whose it is now will be read next time.
            return self._is_held
        except (WorldError, PeerError) as error:
            log.debug('operator=lease reason="%s"', error)
            return self._is_held

    async def _take(self) -> bool:
        found = await self._read()
        if found is not None and not self._may_take(found):
            self._is_held = False
            return False
        body = self._body(found)
        method, path = ("POST", self._collection) if found is None else ("PUT", self._path)
        await self._client.raw(method, path, body=body)
        self._is_held = True
        return True

    async def _read(self) -> Object | None:
        try:
            found: Object = msgspec.json.decode(await self._client.raw("GET", self._path))
        except ApiRefusal as error:
            if error.code == NOT_FOUND:
                return None
            raise
        return found

    def _may_take(self, lease: Object) -> bool:
        holder = (lease.get("spec") or {}).get("holderIdentity") or ""
        if holder in ("", self._holder) or is_dead(holder):
            return True
        version = lease["metadata"]["resourceVersion"]
        if version != self._seen[0]:
            # By our own clock: the holder's may be anything.
            self._seen = (version, monotonic())
        return monotonic() - self._seen[1] > self._terms.duration_seconds

    def _body(self, found: Object | None) -> Object:
        metadata = {"name": self._terms.name, "namespace": self._terms.namespace}
        now = micro_time(wall())
        before = (found or {}).get("spec") or {}
        spec: Object = {
            "holderIdentity": self._holder,
            "leaseDurationSeconds": self._terms.duration_seconds,
            "renewTime": now,
            "acquireTime": now,
            "leaseTransitions": int(before.get("leaseTransitions") or 0),
        }
        if before.get("holderIdentity") == self._holder:
            spec["acquireTime"] = before.get("acquireTime") or now
        elif found is not None:
            spec["leaseTransitions"] += 1
        if found is not None:
            metadata["resourceVersion"] = found["metadata"]["resourceVersion"]
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": metadata,
            "spec": spec,
        }

    async def _release(self) -> None:
        """Give the lease back, so that the next need not wait for its end."""
        self._is_held = False
        try:
            async with asyncio.timeout(RELEASE_SECONDS):
                found = await self._read()
                if found is None or found["spec"].get("holderIdentity") != self._holder:
                    return
                found["spec"]["holderIdentity"] = ""
                await self._client.raw("PUT", self._path, body=found)
        except (ApiRefusal, WorldError, PeerError, TimeoutError) as error:
            log.debug('operator=lease not_released="%s"', error)
