"""The dashboard that each Ray head has: its HTTP API, its budget, and the operator's questions and
requests to it.

A dashboard is a program of a user, so its answers and their cost are bounded. A dashboard that does
not answer, or not in this form, is no error: the caller asks again. A slow dashboard delays no
other user's resumption: `RayDashboards` asks in a queue of its own, and only a few of one namespace
at the same time.

A user's program costs the operator a bounded part. Each dashboard has a budget, so has each
namespace, and there is one for all. The budgets of a namespace are a third of the total or less: no
namespace takes the connections, the time or the log lines of the others.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Hashable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any
from urllib.parse import quote
from weakref import WeakValueDictionary

import aiohttp
import msgspec

from unbroken.agent_http.sessions import cut, pace
from unbroken.budget import Budget, Flow, Limits
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

from .ray_views import request_text, with_attempt

BURST_SECONDS = 4.0
"""Seconds of its rate that a dashboard may spend at once."""
MEBIBYTE = 1024 * 1024.0


class ConnectionUse(Enum):
    """Use of a connection to a dashboard."""

    LOG = "log"
    QUESTION = "question"


def _limits(
    logs: int, questions: int, megabytes: float, messages: float, work: float, lines: int
) -> Limits:
    """Return limits: logs that are read, and dashboards that are asked, at the same time; MiB,
    messages of logs (Ray 2.60 puts up to 10 lines into each) and work a second; lines a minute."""

    def flow(rate: float) -> Flow:
        return Flow(rate, rate * BURST_SECONDS)

    uses: dict[Enum, int] = {ConnectionUse.LOG: logs, ConnectionUse.QUESTION: questions}
    return Limits(flow(messages), flow(megabytes * MEBIBYTE), flow(work), uses, lines)


DASHBOARD = _limits(20, 1, 4.0, 1000.0, 0.1, 2)
NAMESPACE = _limits(100, 8, 8.0, 2000.0, 0.15, 6)
TOTAL = _limits(400, 32, 24.0, 6000.0, 0.45, 30)
"""400 of the 1,024 descriptors that a process may have by default."""


class Budgets:
    """The budgets of all dashboards, each kept while it is used."""

    def __init__(self, now: float) -> None:
        self._total = Budget("the operator", TOTAL, now)
        self._namespaces: WeakValueDictionary[str, Budget] = WeakValueDictionary()
        self._dashboards: WeakValueDictionary[Hashable, Budget] = WeakValueDictionary()

    def of(self, namespace: str, subject: Hashable, now: float) -> Budget:
        """Return the budget of the dashboard of a subject in a namespace."""
        found = self._dashboards.get(subject)
        if found is None:
            above = self._namespaces.get(namespace)
            if above is None:
                above = Budget(f"namespace {namespace}", NAMESPACE, now, self._total)
                self._namespaces[namespace] = above
            found = self._dashboards[subject] = Budget("its head", DASHBOARD, now, above)
        return found


log = Log(__name__)

LIST_BYTES_MAX = 4 * 1024 * 1024
"""Longest list of jobs that is read; it names ended jobs, too."""
JOB_BYTES_MAX = 1024 * 1024
"""Longest answer about one job that is read."""
REFUSAL_BYTES_MAX = 4096
JOBS_LISTED_MAX = 5000
"""Jobs in the longest list that is read."""
COMMAS_MAX = 256 * 1024
"""Commas in the longest list that is read: they bound the values that decoding makes."""
LOG_MESSAGE_BYTES_MAX = 256 * 1024
"""Longest message of a job's log.  Ray 2.60 sends at most 20,000 characters, or 10 lines (Ray's
dashboard/modules/job/utils.py)."""
LOG_PING_SECONDS = 15.0
"""Seconds between questions whether the sender of a log is still there."""
PACKAGE = "gcs://"
"""Scheme of code that `ray job submit --working-dir` stores in the head."""
NO_ANSWER = (aiohttp.ClientError, TimeoutError, PeerError)


class RefusedError(PeerError):
    """The operator has no token for a dashboard, or must not send it there."""


Tokens = Callable[[Mapping[str, Any], str], str]
"""Returns the token of Ray in a RayCluster, to be sent to a URL; empty: none is known.  Raises
RefusedError if another program listens there."""


def no_token(cluster: Mapping[str, Any], url: str) -> str:
    """Return no token: on Kubernetes, the operator reads no Secret of a user."""
    return ""


@dataclass(frozen=True, slots=True)
class DashboardAddress:
    """Address of a dashboard, and the token that it asks for."""

    url: str
    token: Callable[[], str] = field(default=str, compare=False)
    """Asked before each request; empty: none is sent."""

    @property
    def headers(self) -> dict[str, str]:
        """Return the headers of each request.  Raises RefusedError: nothing may be sent."""
        token = self.token()
        return {"Authorization": f"Bearer {token}"} if token else {}


class JobDetails(msgspec.Struct):
    """The fields of a dashboard's job that are read."""

    status: str
    """Empty: the dashboard knows no such job."""
    message: str | None = None
    end_time: float | None = None
    """Milliseconds since the epoch."""


class Dashboard:
    """The API of jobs that each head's dashboard has."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def jobs(self, place: DashboardAddress) -> bytes | None:
        """Return the list of jobs that a dashboard knows, to be read by `rows_of`, or its
        beginning; None if it does not answer.  Raises RefusedError."""
        try:
            async with self._session.get(f"{place.url}/api/jobs/", headers=place.headers) as answer:
                _check_access(answer)
                if answer.status != 200:
                    log.debug("dashboard refused a request", url=place.url, status=answer.status)
                    return None
                return await _beginning(answer, LIST_BYTES_MAX + 1)
        except RefusedError:
            raise
        except NO_ANSWER as error:
            log.debug("dashboard does not answer", url=place.url, error=error)
            return None

    async def job(self, place: DashboardAddress, job_id: str) -> JobDetails | None:
        """Return the state of a job; None if the dashboard does not answer.  Raises
        RefusedError."""
        try:
            where = f"{place.url}/api/jobs/{quote(job_id, safe='')}"
            async with self._session.get(where, headers=place.headers) as answer:
                _check_access(answer)
                if answer.status == 404:
                    return JobDetails("")
                if answer.status != 200:
                    return None
                body = await _beginning(answer, JOB_BYTES_MAX)
            return msgspec.json.decode(body, type=JobDetails)
        except RefusedError:
            raise
        except (*NO_ANSWER, msgspec.MsgspecError, RecursionError) as error:
            log.debug("dashboard does not answer", url=place.url, error=error)
            return None

    async def lacks(self, place: DashboardAddress, package: str) -> bool:
        """True if the head says that it has no such package."""
        name = package.removeprefix(PACKAGE)
        try:
            where = f"{place.url}/api/packages/gcs/{quote(name, safe='')}"
            async with self._session.get(where, headers=place.headers) as answer:
                return answer.status == 404
        except NO_ANSWER as error:
            log.debug("dashboard does not answer", url=place.url, error=error)
            return False

    async def submit(self, place: DashboardAddress, body: Mapping[str, Any]) -> str:
        """Submit a job.  Returns the refusal; empty: the next list shows whether it is known."""
        return await self._post(place, f"{place.url}/api/jobs/", body)

    async def stop(self, place: DashboardAddress, job_id: str) -> str:
        """Stop a job.  Returns the refusal; empty: the next list shows whether it runs."""
        return await self._post(place, f"{place.url}/api/jobs/{quote(job_id, safe='')}/stop")

    async def _post(
        self, place: DashboardAddress, where: str, body: Mapping[str, Any] | None = None
    ) -> str:
        try:
            async with self._session.post(where, json=body, headers=place.headers) as answer:
                if answer.status == 200:
                    return ""
                said = (await _beginning(answer, REFUSAL_BYTES_MAX))[-500:]
                return f"{where} is answered with HTTP {answer.status}: {said!r}"
        except NO_ANSWER as error:
            log.debug("dashboard does not answer", url=where, error=error)
            return ""

    @asynccontextmanager
    async def open_log(
        self, place: DashboardAddress, job_id: str, charge: Callable[[float], float]
    ) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
        """Open the log of a job: messages with all that it has written, and then with what it
        writes.  Pings are messages, too: the caller answers them as it has time.  Raises one of
        `NO_ANSWER`.

        `charge` gets the seconds that each piece of the stream took to read, and returns those
        until the next piece is read.
        """
        where = f"{place.url}/api/jobs/{quote(job_id, safe='')}/logs/tail"
        async with self._session.ws_connect(
            where,
            headers=place.headers,
            max_msg_size=LOG_MESSAGE_BYTES_MAX,
            heartbeat=LOG_PING_SECONDS,
            autoping=False,
            timeout=aiohttp.ClientWSTimeout(ws_close=1.0),
        ) as socket:
            pace(socket, lambda _, work: charge(work))
            try:
                yield socket
            finally:
                cut(socket)


def rows_of(body: bytes) -> list[msgspec.Raw]:
    """Return the jobs of a dashboard's list, undecoded.  Raises PeerError if it is no list, or too
    long."""
    if len(body) > LIST_BYTES_MAX:
        raise PeerError(f"its list of jobs has more than {LIST_BYTES_MAX} bytes")
    if body.count(b",") > COMMAS_MAX:
        raise PeerError(f"its list of jobs has more than {COMMAS_MAX} commas")
    try:
        found = msgspec.json.decode(body, type=list[msgspec.Raw])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise PeerError(f"what it lists is no list of jobs: {error}"[:REFUSAL_BYTES_MAX]) from None
    if len(found) > JOBS_LISTED_MAX:
        raise PeerError(f"its list has {len(found)} jobs; at most {JOBS_LISTED_MAX} are read")
    return found


def _check_access(answer: aiohttp.ClientResponse) -> None:
    if answer.status in (401, 403):
        raise RefusedError(f"the dashboard asks for another token (HTTP {answer.status})")


async def _beginning(answer: aiohttp.ClientResponse, most: int) -> bytes:
    """Return the body, or so many bytes of it."""
    found = bytearray()
    while len(found) < most and (piece := await answer.content.read(most - len(found))):
        found += piece
    return bytes(found)


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


class _DashboardRow(msgspec.Struct):
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
    place: DashboardAddress
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
            "ray-dashboards", self._ask, workers=TOTAL.connections[ConnectionUse.QUESTION]
        )

    async def run(self) -> None:
        """Ask until cancelled."""
        await self._queue.run()

    def want(
        self, key: Key, head: Head, place: DashboardAddress, budget: Budget
    ) -> DashboardAnswer | None:
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
            with asked.budget.connection(ConnectionUse.QUESTION):
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


def _request_of(row: _DashboardRow) -> str:
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


def _rows(listed: list[msgspec.Raw]) -> Iterator[_DashboardRow]:
    """Yield the jobs that were submitted, by their ids: the order of answers may change."""
    found: dict[str, _DashboardRow] = {}
    for raw in listed:
        try:
            row = msgspec.json.decode(raw, type=_DashboardRow)
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
