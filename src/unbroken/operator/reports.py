"""Serves the newest reports of a job's agents to the live page, by HTTP.

Only the leader has links to agents: another replica says that it does not lead, and the page asks
the next one. Only one ServiceAccount may ask. Its token has an audience of its own, so it is of no
use at the Kubernetes API, and the operator has the API review it.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from http import HTTPStatus

import msgspec
from aiohttp import web

from unbroken.core.job.events import PodUid
from unbroken.errors import PeerError, WorldError
from unbroken.kube.cache import Key
from unbroken.kube.client import KubeClient
from unbroken.kube.clock import monotonic, pause, processor
from unbroken.listener import Limits, admitted, bound, serving
from unbroken.log_lines import Log
from unbroken.wire.agent import AgentReport
from unbroken.wire.agent_codec import encode_brief
from unbroken.wire.reports import AUDIENCE, PATH, TOKEN_CHARACTERS, encode_line

from .election import Mandate
from .jobs.operator import JobRunners

log = Log(__name__)

LIMITS = Limits(16)
"""Limits of connections: one page, and those who try."""
TOGETHER = 32
"""Reports that are encoded at once, before the operator's other work has its turn: 2 ms of work
with 8 ranks each."""
COST_FACTOR = 20.0
"""The next answer begins after this many times the seconds that the last one took to encode: at
most 5 % of the operator's time."""
WAITING_MAX = 16
"""Requests that wait for their turn; further ones are refused."""
REVIEWS = "apis/authentication.k8s.io/v1/tokenreviews"
REVIEW_SECONDS = 60.0
"""Seconds for which the review of a token counts."""
REVIEWED_MAX = 64
"""Reviews that are kept."""


@dataclass(frozen=True, slots=True)
class ReportsOptions:
    """Address of the server, and who may ask it."""

    port: int
    """Port; 0: any that is free."""
    reader: tuple[str, str]
    """Namespace and name of the ServiceAccount of the page."""
    host: str = "127.0.0.1"


class ReportSource:
    """The reports of all jobs, while this operator leads."""

    def __init__(self) -> None:
        self._runners: JobRunners | None = None
        self._mandate: Mandate | None = None

    @contextmanager
    def leading(self, runners: JobRunners, mandate: Mandate) -> Iterator[None]:
        """Give the reports of these jobs for the time of the block."""
        self._runners, self._mandate = runners, mandate
        try:
            yield
        finally:
            self._runners = self._mandate = None

    def leader(self) -> JobRunners | None:
        """Return the jobs of this operator; None if another one may lead."""
        is_leading = self._mandate is not None and self._mandate.is_given()
        return self._runners if is_leading else None

    def of_job(self, namespace: str, job: str) -> dict[PodUid, AgentReport] | None:
        """Return the newest reports of a job by the uid of their pod; None: there is no such job,
        or this operator does not lead."""
        runners = self.leader()
        return None if runners is None else runners.reports(Key(namespace, job))


class _User(msgspec.Struct):
    username: str = ""


class _ReviewStatus(msgspec.Struct):
    authenticated: bool = False
    user: _User = msgspec.field(default_factory=_User)
    audiences: list[str] = []


class _Review(msgspec.Struct):
    """The answer to a TokenReview."""

    status: _ReviewStatus


class Reviews:
    """Asks the Kubernetes API whose token it is, and remembers the answer for a minute."""

    def __init__(self, client: KubeClient, reader: tuple[str, str]) -> None:
        self._client = client
        self._user = "system:serviceaccount:" + ":".join(reader)
        self._known: dict[bytes, tuple[float, bool]] = {}
        """By the token's hash: end of the review's validity, and whether the reader has it."""
        self._turn = asyncio.Lock()

    async def is_reader(self, token: str) -> bool:
        """True if it is a valid token of the reader for this audience.  Raises as `KubeClient`."""
        name = hashlib.sha256(token.encode()).digest()
        async with self._turn:  # a flood of strange tokens costs one request at a time
            until, answer = self._known.get(name, (0.0, False))
            if monotonic() >= until:
                answer = await self._review(token)
                self._known.pop(name, None)
                self._known[name] = (monotonic() + REVIEW_SECONDS, answer)
                if len(self._known) > REVIEWED_MAX:
                    del self._known[next(iter(self._known))]
        return answer

    async def _review(self, token: str) -> bool:
        body = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenReview",
            "spec": {"token": token, "audiences": [AUDIENCE]},
        }
        answer = await self._client.raw("POST", REVIEWS, body=body)
        status = msgspec.json.decode(answer, type=_Review).status
        is_for_us = AUDIENCE in status.audiences
        return status.authenticated and is_for_us and status.user.username == self._user


class ReportsServer:
    """Answers `GET /v1/reports/{namespace}/{job}`."""

    def __init__(self, source: ReportSource, reviews: Reviews) -> None:
        self._source = source
        self._reviews = reviews
        self._turn = asyncio.Lock()
        self._waiting = 0
        self._free_at = float("-inf")
        """Time of the monotonic clock from which the next answer may begin."""

    def application(self) -> web.Application:
        """Make the application of aiohttp."""
        app = web.Application(client_max_size=0)
        app.router.add_get(f"{PATH}/{{namespace}}/{{job}}", self._answer)
        return app

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if (refusal := await self._refusal(request)) is not None:
            refusal.force_close()
            return refusal
        admitted(request)
        if self._waiting >= WAITING_MAX:
            return _problem(HTTPStatus.TOO_MANY_REQUESTS, f"{WAITING_MAX} requests wait")
        self._waiting += 1
        try:
            async with self._turn:
                await self._until_free()
                return await self._reports(request)
        finally:
            self._waiting -= 1

    async def _refusal(self, request: web.Request) -> web.Response | None:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        if scheme != "Bearer" or not 0 < len(token) <= TOKEN_CHARACTERS:
            return _problem(HTTPStatus.UNAUTHORIZED, "a token of the page's account is needed")
        if self._source.leader() is None:
            return _problem(HTTPStatus.SERVICE_UNAVAILABLE, "this replica does not lead")
        try:
            is_reader = await self._reviews.is_reader(token)
        except (WorldError, PeerError, msgspec.DecodeError) as error:
            log.warning("token of a reader of reports not reviewed", error=error)
            return _problem(HTTPStatus.BAD_GATEWAY, "the token could not be reviewed")
        if not is_reader:
            return _problem(HTTPStatus.UNAUTHORIZED, "this is no token of the page's account")
        return None

    async def _until_free(self) -> None:
        while (early := self._free_at - monotonic()) > 0:
            await pause(early)

    async def _reports(self, request: web.Request) -> web.StreamResponse:
        """Send the reports, a few at a time: links and commands come first."""
        place = request.match_info
        if self._source.leader() is None:
            return _problem(HTTPStatus.SERVICE_UNAVAILABLE, "this replica does not lead")
        reports = self._source.of_job(place["namespace"], place["job"])
        if reports is None:
            return _problem(HTTPStatus.NOT_FOUND, "this operator runs no such job")
        answer = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await answer.prepare(request)
        waiting, took = list(reports.items()), 0.0
        while waiting:
            began = processor()
            some = b"".join(_line(*one) for one in waiting[:TOGETHER])
            del waiting[:TOGETHER]
            took += processor() - began
            await answer.write(some)
            await pause(0)
        self._free_at = monotonic() + COST_FACTOR * took
        await answer.write_eof()
        return answer


def _line(uid: PodUid, report: AgentReport) -> bytes:
    return encode_line(uid, encode_brief(report))


def _problem(status: HTTPStatus, text: str) -> web.Response:
    return web.json_response({"problem": text}, status=status)


@asynccontextmanager
async def serving_reports(
    client: KubeClient, source: ReportSource, options: ReportsOptions
) -> AsyncIterator[str]:
    """Serve for the time of the block; yield the address.  Raises WorldError."""
    server = ReportsServer(source, Reviews(client, options.reader))
    try:
        sockets = await bound(options.host, options.port)
    except OSError as error:
        text = f"cannot serve reports at {options.host}:{options.port}: {error.strerror}"
        raise WorldError(f"{text}; choose another --reports-port") from error
    port = sockets[0].getsockname()[1]
    async with serving(server.application(), sockets, LIMITS, handler_cancellation=True):
        yield f"http://{options.host}:{port}{PATH}"
