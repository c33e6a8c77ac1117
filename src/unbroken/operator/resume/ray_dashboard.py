"""Asks the dashboards of Ray clusters which jobs run, stops jobs and submits jobs to them.

A dashboard is a program of a user, so its answers are bounded. A slow dashboard delays no other
user's resumption, because `RayDashboards` asks in a queue of its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
import msgspec

from unbroken.core.ray_resume import (
    DashboardAnswer,
    Head,
    StopHung,
    Submission,
    SubmitAgain,
    base_id,
)
from unbroken.kube.cache import Key
from unbroken.kube.client import KubeClient
from unbroken.kube.workqueue import WorkQueue

from .ray_api import PACKAGE, Dashboard
from .ray_views import request_text, with_attempt

ASK_SECONDS = 4.0
"""Longest wait for an answer of a dashboard."""
POLL_SECONDS = 5.0
"""Seconds between questions: a job that was submitted later than this before the loss of its head
may be unknown."""
SILENCE_SECONDS = 15.0
"""Seconds until a dashboard that did not answer is asked again."""
SUBMITTED_SECONDS = 0.5
"""Seconds until a dashboard is asked again that was given jobs, or ordered to stop one."""
WORKERS = 32
JOBS_MAX = 20
"""Running jobs of a RayCluster that are kept."""
REQUEST_BYTES_MAX = 16 * 1024
KEPT_BYTES_MAX = 96 * 1024
"""All requests of a RayCluster together: an object has 256 KiB for all annotations."""
ID_CHARACTERS_MAX = 200
RUNNING = frozenset({"PENDING", "RUNNING"})


class _Row(msgspec.Struct):
    """Part of a dashboard's answer about a job that is read."""

    type: str
    status: str
    submission_id: str | None = None
    entrypoint: str = ""
    runtime_env: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None


@dataclass(slots=True)
class _Asked:
    """A head whose dashboard is asked."""

    head: Head
    url: str
    answer: DashboardAnswer | None = None
    submissions: dict[str, SubmitAgain] = field(default_factory=dict)
    """Jobs to submit, by the id that each gets."""
    stops: dict[str, StopHung] = field(default_factory=dict)
    """Jobs to stop, by their ids."""
    impossible: dict[str, str] = field(default_factory=dict)
    """Why jobs could not be submitted, by these ids."""


class RayDashboards:
    """Keeps the last answer of the dashboard of each RayCluster that is asked for."""

    def __init__(
        self,
        client: KubeClient,
        session: aiohttp.ClientSession,
        answered: Callable[[Key], None],
    ) -> None:
        self._client = client
        self._dashboard = Dashboard(session)
        self._answered = answered
        self._asked: dict[Key, _Asked] = {}
        self._queue: WorkQueue[Key] = WorkQueue("ray-dashboards", self._ask, workers=WORKERS)

    async def run(self) -> None:
        """Ask until cancelled."""
        await self._queue.run()

    def want(self, key: Key, head: Head, url: str) -> DashboardAnswer | None:
        """Ask the head of a RayCluster from now on; return its last answer."""
        found = self._asked.get(key)
        if found is None or found.head != head or found.url != url:
            found = self._asked[key] = _Asked(head, url)
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
        listed = await self._dashboard.jobs(asked.url)
        if listed is None:
            return SILENCE_SECONDS if self._asked.get(key) is asked else 0.0
        found = answer_of(asked.head, listed)
        running = {base_id(job.id) for job in found.running}
        stops = [order for id, order in asked.stops.items() if id in found.alive]
        for stop in stops:
            await self._stop(asked, stop)
        asked.stops.clear()
        orders = [
            order
            for id, order in asked.submissions.items()
            if id not in found.ids and base_id(id) not in running
        ]
        for order in orders:
            why = await self._submit(asked, order)
            if why:
                asked.impossible[order.id] = why
        asked.submissions.clear()
        if self._asked.get(key) is not asked:
            return 0.0
        answer = replace(found, impossible={**found.impossible, **asked.impossible})
        before, asked.answer = asked.answer, answer
        if before != answer:
            self._answered(key)
        return SUBMITTED_SECONDS if orders or stops else POLL_SECONDS

    async def _stop(self, asked: _Asked, order: StopHung) -> None:
        """Stop a job whose code the head has: the question keeps the code for 10 minutes more."""
        why = await self._lost_code(asked, json.loads(order.job.request))
        if why:
            asked.impossible[order.next] = why
            return
        self._client.require_leave()
        await self._dashboard.stop(asked.url, order.job.id)

    async def _lost_code(self, asked: _Asked, request: Mapping[str, Any]) -> str:
        """Say which code of a job the head lacks; empty: none."""
        for package in packages_of(request.get("runtime_env") or {}):
            if await self._dashboard.lacks(asked.url, package):
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
        await self._dashboard.submit(asked.url, body)
        return ""


def answer_of(head: Head, listed: list[msgspec.Raw]) -> DashboardAnswer:
    """Read what a dashboard says of all jobs; rows that cannot be read are left out."""
    ids: set[str] = set()
    begun: set[str] = set()
    succeeded: set[str] = set()
    running: list[Submission] = []
    impossible: dict[str, str] = {}
    kept = 0
    for row in _rows(listed):
        assert row.submission_id is not None
        ids.add(row.submission_id)
        if row.status == "RUNNING":
            begun.add(row.submission_id)
        elif row.status == "SUCCEEDED":
            succeeded.add(row.submission_id)
        if row.status not in RUNNING:
            continue
        request = request_text(
            {
                "entrypoint": row.entrypoint,
                "runtime_env": row.runtime_env or {},
                "metadata": row.metadata or {},
            }
        )
        size = len(request.encode())
        if size > REQUEST_BYTES_MAX:
            impossible[row.submission_id] = (
                f"its request has {size} bytes; at most {REQUEST_BYTES_MAX} are kept"
            )
        elif len(running) >= JOBS_MAX or kept + size > KEPT_BYTES_MAX:
            impossible[row.submission_id] = (
                f"at most {JOBS_MAX} running jobs of {KEPT_BYTES_MAX} bytes are kept"
            )
        else:
            kept += size
            running.append(Submission(row.submission_id, request))
    known = frozenset(ids)
    return DashboardAnswer(
        head, known, tuple(running), impossible, frozenset(begun), frozenset(succeeded)
    )


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
