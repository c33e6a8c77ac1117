"""The HTTP API of the dashboard that each Ray head has, and the budget of these dashboards.

A dashboard is a program of a user, so its answers are bounded.  A dashboard that does not answer,
or not in this form, is no error: the caller asks again.

A user's program costs the operator a bounded part. Each dashboard has a budget, so has each
namespace, and there is one for all. The budgets of a namespace are a third of the total or less: no
namespace takes the connections, the time or the log lines of the others.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Hashable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any
from urllib.parse import quote
from weakref import WeakValueDictionary

import aiohttp
import msgspec

from unbroken.agent_http.sessions import cut, pace
from unbroken.budget import Budget, Flow, Limits
from unbroken.errors import PeerError
from unbroken.log_lines import Log

BURST_SECONDS = 4.0
"""Seconds of its rate that a dashboard may spend at once."""
MEBIBYTE = 1024 * 1024.0


class Use(Enum):
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

    uses: dict[Enum, int] = {Use.LOG: logs, Use.QUESTION: questions}
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
class Place:
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

    async def jobs(self, place: Place) -> bytes | None:
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

    async def job(self, place: Place, job_id: str) -> JobDetails | None:
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

    async def lacks(self, place: Place, package: str) -> bool:
        """True if the head says that it has no such package."""
        name = package.removeprefix(PACKAGE)
        try:
            where = f"{place.url}/api/packages/gcs/{quote(name, safe='')}"
            async with self._session.get(where, headers=place.headers) as answer:
                return answer.status == 404
        except NO_ANSWER as error:
            log.debug("dashboard does not answer", url=place.url, error=error)
            return False

    async def submit(self, place: Place, body: Mapping[str, Any]) -> str:
        """Submit a job.  Returns the refusal; empty: the next list shows whether it is known."""
        return await self._post(place, f"{place.url}/api/jobs/", body)

    async def stop(self, place: Place, job_id: str) -> str:
        """Stop a job.  Returns the refusal; empty: the next list shows whether it runs."""
        return await self._post(place, f"{place.url}/api/jobs/{quote(job_id, safe='')}/stop")

    async def _post(self, place: Place, where: str, body: Mapping[str, Any] | None = None) -> str:
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
        self, place: Place, job_id: str, charge: Callable[[float], float]
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
