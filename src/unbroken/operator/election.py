"""Election of one operator at a time: the holder of the Lease acts, as long as its mandate lasts.

A process may stop between any two instructions, for longer than its lease is valid. So leadership
is never granted once and for all. Each effect asks again at the moment it leaves, and the answer is
a comparison of two times. It needs no request and no task that would have to run first.

The leader holds a mandate, which ends by the clock some seconds before another process may take the
lease. Every effect asks the mandate. So a leader that was paused learns that it may have been
replaced before it does anything else. When the mandate has run out, the program is not ended. It
waits, and resumes if the lease turns out to be still its own.

A process that waits for the lease counts only time in which the API server answered. After an
outage the holder therefore has a whole term to renew. So a leader on the server's own machine
continues during an outage: no other process can reach that server either.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
from lightkube.resources.coordination_v1 import Lease

from unbroken.errors import PeerError, WorldError
from unbroken.foreign_numbers import INT32_MAX, whole_number
from unbroken.kube.client import KubeClient, Object
from unbroken.kube.clock import boottime, micro_time, monotonic, wall
from unbroken.kube.errors import ApiRefusal, Conflict, NotFound
from unbroken.kube.informer import Informer
from unbroken.log_lines import Log

NEVER = float("-inf")


@dataclass(slots=True)
class Tenure:
    """The time until which a lease is certainly ours. Pure: all times are of one clock of this
    process."""

    good_seconds: float
    """Seconds after the sending of a renewal for which it is certainly valid; less than others must
    wait."""
    until: float = NEVER

    def renewed(self, sent: float) -> None:
        """Note that the server has accepted a renewal that was sent then.

        The others count from a later moment: when they see it.
        """
        self.until = max(self.until, sent + self.good_seconds)

    def unanswered(self, sent: float) -> None:
        """Extend the tenure for a request of this time to a server that answered neither this
        process nor any other.

        The server has given the lease to no other process, provided that the lease was ours at that
        time.
        """
        if sent < self.until:
            self.until = max(self.until, sent + self.good_seconds)

    def ended(self) -> None:
        """Note that the lease is another's, or was given back."""
        self.until = NEVER

    def holds(self, now: float) -> bool:
        """True if the lease is certainly ours."""
        return now < self.until


class Mandate:
    """A tenure and its clock: the permit of the leader."""

    def __init__(self, good_seconds: float, clock: Callable[[], float] = boottime) -> None:
        self._tenure = Tenure(good_seconds)
        self._clock = clock
        self._news = asyncio.Event()

    def is_given(self) -> bool:
        """True if the lease is certainly ours at this moment."""
        return self._tenure.holds(self._clock())

    async def given(self) -> None:
        """Return once it is; without yielding to other tasks if it is already."""
        while not self.is_given():
            self._news.clear()
            await self._news.wait()

    def renewed(self, sent: float) -> None:
        """Note as `Tenure.renewed`."""
        self._tenure.renewed(sent)
        self._news.set()

    def unanswered(self, sent: float) -> None:
        """Note as `Tenure.unanswered`."""
        self._tenure.unanswered(sent)
        self._news.set()

    def ended(self) -> None:
        """Note as `Tenure.ended`."""
        self._tenure.ended()


log = Log(__name__)

RELEASE_SECONDS = 2.0
ROUNDS = 3
"""Attempts to read and write a lease that others write at the same time."""


@dataclass(frozen=True, slots=True)
class LeaderTerms:
    """The lease, and its times."""

    name: str = "unbroken-operator"
    namespace: str = "kube-system"
    duration_seconds: int = 15
    """Seconds of silence after which a holder has lost the lease (client-go's LeaseDuration)."""
    renew_seconds: float = 2.0
    """Seconds between renewals; client-go's RetryPeriod."""
    acts_in_outages: bool | None = None
    """Continue while the API server does not answer.

    Only if no other process can reach it then; None: if it is a process of this machine.
    """

    @property
    def good_seconds(self) -> float:
        """Return the seconds that a leader acts after a renewal (client-go's RenewDeadline is two
        thirds)."""
        return self.duration_seconds * 0.8

    @property
    def try_seconds(self) -> float:
        """Return the seconds that one request to take or renew may last; two fit in before a leader
        must stop."""
        return max(1.0, self.duration_seconds / 3)


def identity() -> str:
    """Return the identity of this process, so that others on the machine can check whether it is
    alive."""
    pid = os.getpid()
    return f"{_here()}/{pid}/{_started(pid)}"


def _here() -> str:
    # The first process namespace has the same number on every machine, and hosts may share a name;
    # no two machines share a boot ID.
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()}/{boot}:{os.readlink('/proc/self/ns/pid')}"


def _started(pid: int) -> int:
    """Return the start time in clock ticks; 0: there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in "ZX" else int(fields[19])


def is_dead(holder: str) -> bool:
    """True if the holder was a process of this machine that has ended."""
    place, _, process = holder.rpartition("/")
    place, _, pid = place.rpartition("/")
    number = whole_number(pid, 1, INT32_MAX)
    if place != _here() or number is None:
        return False
    return str(_started(number)) != process


class _Silence:
    """The time that a holder has been silent while the API server answered. Pure."""

    def __init__(self, limit_seconds: float) -> None:
        self._limit = limit_seconds
        self._version = ""
        self._since = self._last = 0.0

    def seen(self, version: str, now: float) -> None:
        """Note that the lease has this version on the server."""
        # A process that has not looked for long cannot know whether the holder could have renewed.
        if version != self._version or now - self._last > self._limit / 2:
            self._version, self._since = version, now
        self._last = now

    def broken(self) -> None:
        """Note that the server did not answer: the holder could not have renewed."""
        self._version = ""

    def left(self, now: float) -> float:
        """Return the seconds until the holder has lost the lease; the whole time if nothing is
        known."""
        return self._since + self._limit - now if self._version else self._limit


class Election:
    """Runs a program while this process is the leader."""

    def __init__(self, client: KubeClient, terms: LeaderTerms, holder: str) -> None:
        self._client = client
        self._terms = terms
        self._holder = holder
        space = f"apis/coordination.k8s.io/v1/namespaces/{quote(terms.namespace)}/leases"
        self._collection, self._path = space, f"{space}/{quote(terms.name)}"
        self._title = f"{terms.namespace}/{terms.name}"
        self._silence = _Silence(terms.duration_seconds)
        self._ours: Object | None = None
        """The lease as this process wrote it last."""
        self._is_held = False
        self._mandate = Mandate(terms.good_seconds)
        given = terms.acts_in_outages
        self._acts_in_outages = client.is_local if given is None else given

    async def lead(self, program: Callable[[Mandate], Coroutine[Any, Any, None]]) -> None:
        """Run the program whenever this process leads, until cancelled.

        The program must ask its mandate before each effect.
        """
        while True:
            if not await self._try():
                log.info("operator waits: another holds the lease", lease=self._title)
                await self._wait()
            log.info("operator leads", lease=self._title, holder=self._holder)
            try:
                async with asyncio.TaskGroup() as tasks:
                    running = tasks.create_task(program(self._mandate))
                    await self._hold()
                    running.cancel()
            finally:
                self._mandate.ended()
                await asyncio.shield(self._release())
            log.warning("operator stopped: another holds the lease", lease=self._title)

    async def _wait(self) -> None:
        """Return when the lease is this process's."""
        is_free = asyncio.Event()

        def changed(old: Lease | None, new: Lease | None) -> None:
            if new is None or new.spec is None or not new.spec.holderIdentity:
                is_free.set()

        watch = Informer(
            self._client,
            Lease,
            namespace=self._terms.namespace,
            fields=f"metadata.name={self._terms.name}",
            on_change=changed,
        )
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(watch.run())
            while not await self._try():
                left = self._silence.left(monotonic())
                with suppress(TimeoutError):
                    async with asyncio.timeout(min(left, self._terms.renew_seconds)):
                        await is_free.wait()
                is_free.clear()
            watching.cancel()

    async def _hold(self) -> None:
        """Return when the lease is another's."""
        was_certain = True
        while True:
            await self._client.pause(self._terms.renew_seconds)
            if not await self._try():
                return
            is_certain = self._mandate.is_given()
            if was_certain and not is_certain:
                log.warning("operator paused: the lease was not renewed in time", lease=self._title)
            elif is_certain and not was_certain:
                log.info("operator leads again", lease=self._title, holder=self._holder)
            was_certain = is_certain

    async def _try(self) -> bool:
        """Take or renew the lease; return False if it is another's.

        Also True while that cannot be known, if this process had it; the mandate limits for how
        long.
        """
        sent = boottime()
        try:
            async with asyncio.timeout(self._terms.try_seconds):
                self._is_held = await self._take()
        except ApiRefusal as error:
            if not isinstance(error, Conflict) and not self._is_held:
                raise
            log.warning("lease not renewed", lease=self._title, error=error)
        except (WorldError, PeerError, TimeoutError) as error:
            self._silence.broken()
            if self._is_held and self._acts_in_outages:
                self._mandate.unanswered(sent)
            log.debug("lease not renewed", lease=self._title, error=error)
        else:
            if self._is_held:
                self._mandate.renewed(sent)
            else:
                self._mandate.ended()
        return self._is_held

    async def _take(self) -> bool:
        """Write this process's name into the lease, unless it is another's."""
        # The version written last need not be read again: if it has changed, the server refuses.
        result, self._ours = self._ours or await self._read(), None
        for _ in range(ROUNDS - 1):
            if result is not None and not self._may_take(result):
                return False
            try:
                self._ours = await self._write(result)
            except (Conflict, NotFound):
                result = await self._read()
            else:
                return True
        if result is not None and not self._may_take(result):
            return False
        self._ours = await self._write(result)
        return True

    async def _write(self, found: Object | None) -> Object:
        method, path = ("POST", self._collection) if found is None else ("PUT", self._path)
        answer = await self._client.raw(method, path, body=self._body(found))
        written: Object = msgspec.json.decode(answer)
        return written

    async def _read(self) -> Object | None:
        return await self._client.get_or_none(self._path, Object)

    def _may_take(self, lease: Object) -> bool:
        holder = (lease.get("spec") or {}).get("holderIdentity") or ""
        if holder in ("", self._holder) or is_dead(holder):
            return True
        # By this process's clock: the holder's may be wrong.
        now = monotonic()
        self._silence.seen(lease["metadata"]["resourceVersion"], now)
        return self._silence.left(now) <= 0.0

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
        """Release the lease, so that the next leader need not wait for its end."""
        self._is_held, self._ours = False, None
        try:
            async with asyncio.timeout(RELEASE_SECONDS):
                result = await self._read()
                if result is None or result["spec"].get("holderIdentity") != self._holder:
                    return
                result["spec"]["holderIdentity"] = ""
                await self._client.raw("PUT", self._path, body=result)
        except (ApiRefusal, WorldError, PeerError, TimeoutError) as error:
            log.debug("lease not released", lease=self._title, error=error)
