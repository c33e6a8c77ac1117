"""Asks the dashboards of Ray clusters which jobs run, stops jobs and submits jobs to them.

A dashboard is a program of a user, so its answers and their cost are bounded (`ray_api`). A slow
dashboard delays no other user's resumption: `RayDashboards` asks in a queue of its own, and only a
few of one namespace at the same time.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
import msgspec

from unbroken.budget import Budget
from unbroken.core.ray_resume import (
    DashboardAnswer,
    Head,
    StopHung,
    Submission,
    SubmitAgain,
    base_id,
)
from unbroken.errors import PeerError
from unbroken.kube.cache import Key
from unbroken.kube.client import KubeClient
from unbroken.kube.clock import monotonic
from unbroken.kube.workqueue import WorkQueue
from unbroken.log_lines import Log

from .ray_api import PACKAGE, TOTAL, Dashboard, Place, RefusedError, Use, rows_of
from .ray_views import request_text, with_attempt

log = Log(__name__)

ASK_SECONDS = 4.0
"""Longest wait for an answer of a dashboard."""
POLL_SECONDS = 5.0
"""Seconds between questions: a job that was submitted later than this before the loss of its head
may be unknown."""
SILENCE_SECONDS = 15.0
"""Seconds until a dashboard that did not answer is asked again."""
SUBMITTED_SECONDS = 0.5
"""Seconds until a dashboard is asked again that was given jobs, or ordered to stop one."""
TURN_SECONDS = 30.0
"""Longest turn of one dashboard, with all orders to it.  The other orders wait for its next turn.
"""
BUSY_SECONDS = 1.0
"""Seconds until a dashboard is asked again, because too many of its namespace are being asked."""
PACKAGES_MAX = 16
"""Packages of code of a job that is submitted again."""
JOBS_MAX = 20
"""Running jobs of a RayCluster that are kept."""
REQUEST_BYTES_MAX = 16 * 1024
KEPT_BYTES_MAX = 96 * 1024
"""All requests of a RayCluster together: an object has 256 KiB for all annotations."""
RECEIVED_BYTES_MAX = 2 * REQUEST_BYTES_MAX
"""Longest request that is decoded: a dashboard may send more white space than is kept."""
FULL = f"at most {JOBS_MAX} running jobs of {KEPT_BYTES_MAX} bytes are kept"
ID_CHARACTERS_MAX = 200
RUNNING = frozenset({"PENDING", "RUNNING"})


class _Row(msgspec.Struct):
    """Part of a dashboard's answer about a job that is read; long values stay undecoded."""

    type: str
    status: str
    submission_id: str | None = None
    entrypoint: str = ""
    runtime_env: msgspec.Raw = msgspec.Raw(b"null")
    metadata: msgspec.Raw = msgspec.Raw(b"null")

    @property
    def request_bytes(self) -> int:
        """Length of the job's request as received."""
        raw = (self.runtime_env, self.metadata)
        return len(self.entrypoint) + sum(memoryview(one).nbytes for one in raw)


@dataclass(slots=True)
class _Asked:
    """A head whose dashboard is asked."""

    head: Head
    place: Place
    budget: Budget
    answer: DashboardAnswer | None = None
    submissions: dict[str, SubmitAgain] = field(default_factory=dict)
    """Jobs to submit, by the id that each gets."""
    stops: dict[str, StopHung] = field(default_factory=dict)
    """Jobs to stop, by their ids."""
    impossible: dict[str, str] = field(default_factory=dict)
    """Why jobs could not be submitted, by these ids."""
    why: str = ""
    """Why a list of the dashboard was not read, as last logged."""
    refusal: str = ""
    """Last reason for which it could not be asked."""


class RayDashboards:
    """Keeps the last answer of the dashboard of each RayCluster that is asked for."""

    def __init__(
        self,
        client: KubeClient,
        session: aiohttp.ClientSession,
        answered: Callable[[Key], None],
        refused: Callable[[Key, str], None],
    ) -> None:
        """`answered`: called with the RayCluster whose answer has changed; `refused`: with that
        whose head cannot be asked, and why."""
        self._client = client
        self._dashboard = Dashboard(session)
        self._answered = answered
        self._refused = refused
        self._asked: dict[Key, _Asked] = {}
        self._queue: WorkQueue[Key] = WorkQueue(
            "ray-dashboards", self._ask, workers=TOTAL.connections[Use.QUESTION]
        )

    async def run(self) -> None:
        """Ask until cancelled."""
        await self._queue.run()

    def want(self, key: Key, head: Head, place: Place, budget: Budget) -> DashboardAnswer | None:
        """Ask the head of a RayCluster from now on; return its last answer."""
        found = self._asked.get(key)
        if found is None or found.head != head or found.place != place:
            found = self._asked[key] = _Asked(head, place, budget)
            self._queue.add(key)
        return found.answer

    def forget(self, key: Key) -> None:
        """Ask the head of a RayCluster no more."""
        self._asked.pop(key, None)

    def submit(self, key: Key, order: SubmitAgain) -> None:
        """Submit a job, unless the head that is asked is another one by then."""
        found = self._asked.get(key)
        if found is not None and found.head == order.head and order.id not in found.submissions:
            found.submissions[order.id] = order
            self._queue.add(key)

    def stop(self, key: Key, order: StopHung) -> None:
        """Stop a job, unless the head that is asked is another one by then."""
        found = self._asked.get(key)
        if found is not None and found.head == order.head and order.job.id not in found.stops:
            found.stops[order.job.id] = order
            self._queue.add(key)

    async def _ask(self, key: Key) -> float | None:
        asked = self._asked.get(key)
        if asked is None:
            return None
        try:
            with asked.budget.connection(Use.QUESTION):
                async with asyncio.timeout(TURN_SECONDS):
                    return await self._turn(key, asked)
        except RefusedError as error:
            if asked.refusal != str(error):
                asked.refusal = str(error)
                self._refused(key, f"{asked.head.name}: {error}")
            return SILENCE_SECONDS
        except PeerError as error:
            log.debug("dashboard not asked", cluster=key, error=error)
            return BUSY_SECONDS
        except TimeoutError:
            log.debug("turn of a dashboard ended", cluster=key, seconds=TURN_SECONDS)
            return SILENCE_SECONDS

    async def _turn(self, key: Key, asked: _Asked) -> float:
        """Ask a dashboard, and give it the orders; return the seconds until the next turn."""
        body = await self._dashboard.jobs(asked.place)
        began = monotonic()
        found = None if body is None else self._read(asked, body)
        now = monotonic()
        delay = asked.budget.spend(len(body or b""), now - began, now)
        if found is None:
            is_same = self._asked.get(key) is asked
            return max(SILENCE_SECONDS, delay) if is_same else delay
        running = {base_id(job.id) for job in found.running}
        stops = [order for id, order in asked.stops.items() if id in found.alive]
        for stop in stops:
            await self._stop(asked, stop)
        asked.stops.clear()
        orders = [
            order
            for id, order in asked.submissions.items()
            if not (id in found.ids or id in asked.impossible or base_id(id) in running)
        ]
        for order in orders:
            why = await self._submit(asked, order)
            if why:
                asked.impossible[order.id] = why
        asked.submissions.clear()
        if self._asked.get(key) is not asked:
            return delay
        answer = replace(found, impossible={**found.impossible, **asked.impossible})
        before, asked.answer = asked.answer, answer
        if before != answer:
            self._answered(key)
        return max(delay, SUBMITTED_SECONDS if orders or stops else POLL_SECONDS)

    def _read(self, asked: _Asked, body: bytes) -> DashboardAnswer | None:
        """Return what a list of jobs says; None: it is refused, which is logged once."""
        try:
            return answer_of(asked.head, rows_of(body))
        except PeerError as error:
            why = str(error)
        if why != asked.why and asked.budget.may_log(monotonic()):
            asked.why = why
            log.warning("list of a dashboard not read", pod=asked.head.name, error=why)
        return None

    async def _stop(self, asked: _Asked, order: StopHung) -> None:
        """Stop a job whose code the head has: the question keeps the code for 10 minutes more."""
        why = await self._lost_code(asked, json.loads(order.job.request))
        if why:
            asked.impossible[order.next] = why
            return
        self._client.require_leave()
        self._log_refusal(asked, await self._dashboard.stop(asked.place, order.job.id))

    async def _lost_code(self, asked: _Asked, request: Mapping[str, Any]) -> str:
        """Say which code of a job the head lacks; empty: none."""
        packages = packages_of(request.get("runtime_env") or {})
        if len(packages) > PACKAGES_MAX:
            return f"its code is in {len(packages)} packages; at most {PACKAGES_MAX} are looked for"
        for package in packages:
            if await self._dashboard.lacks(asked.place, package):
                return (
                    f"its code {package[:100]} was lost with the head: keep code in the image or "
                    "on a shared volume instead of --working-dir"
                )
        return ""

    async def _submit(self, asked: _Asked, order: SubmitAgain) -> str:
        """Submit a job; return why it is impossible, or nothing."""
        self._client.require_leave()
        request = json.loads(order.job.request)
        why = await self._lost_code(asked, request)
        if why:
            return why
        environment = with_attempt(request.get("runtime_env") or {}, order.attempt)
        body = {**request, "runtime_env": environment, "submission_id": order.id}
        self._log_refusal(asked, await self._dashboard.submit(asked.place, body))
        return ""

    def _log_refusal(self, asked: _Asked, why: str) -> None:
        """Log that a dashboard refused an order."""
        if why and asked.budget.may_log(monotonic()):
            log.warning("dashboard refused an order", pod=asked.head.name, error=why)


def answer_of(head: Head, listed: list[msgspec.Raw]) -> DashboardAnswer:
    """Read what a dashboard says of all jobs; rows that cannot be read are left out."""
    ids: set[str] = set()
    begun: set[str] = set()
    succeeded: set[str] = set()
    running: list[Submission] = []
    impossible: dict[str, str] = {}
    kept = 0
    for row in _rows(listed):
        id, request, size = row.submission_id, "", row.request_bytes
        assert id is not None
        is_running, is_full = row.status in RUNNING, len(running) >= JOBS_MAX
        if is_running and not is_full and size <= RECEIVED_BYTES_MAX:
            request = _request_of(row)
            if not request:
                continue
            size = len(request)
        ids.add(id)
        if row.status == "SUCCEEDED":
            succeeded.add(id)
        if not is_running:
            continue
        if is_full or (size <= REQUEST_BYTES_MAX and kept + size > KEPT_BYTES_MAX):
            impossible[id] = FULL
        elif size > REQUEST_BYTES_MAX:
            impossible[id] = f"its request has {size} bytes; at most {REQUEST_BYTES_MAX} are kept"
        else:
            kept += size
            running.append(Submission(id, request))
            if row.status == "RUNNING":
                begun.add(id)
    known = frozenset(ids)
    return DashboardAnswer(
        head, known, tuple(running), impossible, frozenset(begun), frozenset(succeeded)
    )


def _request_of(row: _Row) -> str:
    """Return the request of a job as text in ASCII; empty if it cannot be read."""
    try:
        environment = msgspec.json.decode(row.runtime_env, type=dict[str, Any] | None)
        metadata = msgspec.json.decode(row.metadata, type=dict[str, str] | None)
        found = {
            "entrypoint": row.entrypoint,
            "runtime_env": environment or {},
            "metadata": metadata or {},
        }
        return request_text(found)
    except (msgspec.MsgspecError, RecursionError):
        return ""


def _rows(listed: list[msgspec.Raw]) -> Iterator[_Row]:
    """Yield the jobs that were submitted, by their ids: the order of answers may change."""
    found: dict[str, _Row] = {}
    for raw in listed:
        try:
            row = msgspec.json.decode(raw, type=_Row)
        except (msgspec.MsgspecError, RecursionError):
            continue
        id = row.submission_id
        if row.type == "SUBMISSION" and id and len(id) <= ID_CHARACTERS_MAX:
            found[id] = row
    yield from (found[id] for id in sorted(found))


def packages_of(runtime_env: Mapping[str, Any]) -> list[str]:
    """List the code of a runtime environment that the head keeps."""
    modules = runtime_env.get("py_modules")
    found = [runtime_env.get("working_dir"), *(modules if isinstance(modules, list) else ())]
    return [one for one in found if isinstance(one, str) and one.startswith(PACKAGE)]
