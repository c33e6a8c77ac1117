"""Gets the reports of a job's agents from the operator, for the page.

The page of a local cluster runs in the operator's process. The page in another cluster asks by
HTTP. Only the leader among the operators has them. The name of the operators' Service stands for
the addresses of all replicas: they are asked in turn, the one that answered last first. All viewers
of a job share one answer.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from urllib.parse import quote

import aiohttp
from yarl import URL

from unbroken.agent_http.sessions import plain_session
from unbroken.errors import PeerError, SpecError
from unbroken.foreign_numbers import PORT_MAX, whole_number
from unbroken.kube.clock import monotonic
from unbroken.log_lines import LastProblem, Log
from unbroken.operator.reports import ReportSource
from unbroken.wire.agent import AgentReport
from unbroken.wire.reports import END, PATH, TOKEN_CHARACTERS, decode_lines

log = Log(__name__)

KEPT_SECONDS = 2.0
"""Seconds for which an answer counts: the page samples running jobs as often."""
KEPT_MAX = 32
"""Answers that are kept."""
ANSWER_SECONDS = 15.0
"""Timeout of a request: an operator makes an answer wait, so that answers take 5 % of its time."""
CONNECT_SECONDS = 3.0
ANSWER_BYTES_MAX = 128 << 20
"""Largest answer: 64 KiB for each of 2,048 agents; one of 8 ranks that train takes 4."""
LINE_BYTES_MAX = 1 << 20
"""Longest line."""
CHUNK = 1 << 18
"""Bytes that are decoded at once."""
REPLICAS_MAX = 8
"""Addresses of operators that are asked."""
MISSING = "Steps, metrics and ranks are missing: "

Reports = Mapping[str, AgentReport]
"""By the uid of the agent's pod."""


@dataclass(slots=True)
class _Answer:
    """The newest answer about a job."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    until: float = float("-inf")
    reports: Reports = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OperatorPlace:
    """The address at which operators serve reports, and the file of the token for them."""

    host: str
    port: int
    token: Path


def operator_place(text: str, token: Path) -> OperatorPlace:
    """Read `HOST:PORT`.  Raises SpecError."""
    host, _, number = text.rpartition(":")
    port = whole_number(number, 1, PORT_MAX)
    if not host or port is None:
        raise SpecError(f"--operator {text}: must be HOST:PORT")
    return OperatorPlace(host.removeprefix("[").removesuffix("]"), port, token)


class OwnReports:
    """The reports of all jobs, from the operator in this process."""

    problem = ""
    """No sentence for the page: this operator leads."""

    def __init__(self, source: ReportSource) -> None:
        self._source = source

    async def of_job(self, namespace: str, job: str) -> Reports:
        """Return the newest reports of a job; none if it does not run."""
        found = self._source.of_job(namespace, job) or {}
        return {str(uid): report for uid, report in found.items()}


class OperatorReports:
    """The reports of all jobs; `problem` says why there are none."""

    def __init__(self, place: OperatorPlace, session: aiohttp.ClientSession) -> None:
        self.problem = ""
        """A sentence for the page; empty: an operator answers."""
        self._place = place
        self._session = session
        self._logged = LastProblem()
        self._last = ""
        """Address of the replica that answered last."""
        self._answers: dict[tuple[str, str], _Answer] = {}

    async def of_job(self, namespace: str, job: str) -> Reports:
        """Return the reports of a job, at most KEPT_SECONDS old; none if no operator answers."""
        key = (namespace, job)
        found = self._answers.pop(key, None) or _Answer()
        self._answers[key] = found
        if len(self._answers) > KEPT_MAX:
            del self._answers[next(iter(self._answers))]
        async with found.lock:
            if monotonic() >= found.until:
                found.reports = await self._ask(namespace, job)
                found.until = monotonic() + KEPT_SECONDS
        return found.reports

    async def _ask(self, namespace: str, job: str) -> Reports:
        why, path = "", f"{PATH}/{quote(namespace, safe='')}/{quote(job, safe='')}"
        try:
            token = _token(self._place.token)
            for address in await self._addresses():
                try:
                    answer = await self._ask_one(address, path, token)
                except _Refused as refusal:
                    # A replica that does not lead says less than one that refuses.
                    why = str(refusal) if refusal.is_leader or not why else why
                else:
                    self._last = address
                    self._note("")
                    return answer
        except OSError as error:
            why = error.strerror or str(error)
        self._note(why or f"no operator is at {self._place.host}")
        return {}

    def _note(self, why: str) -> None:
        self.problem = f"{MISSING}{why}." if why else ""
        if self._logged.note(why) and why:
            log.warning("no reports of the operator", address=self._place.host, error=why)

    async def _addresses(self) -> list[str]:
        """Addresses of the replicas, the one that answered last first.  Raises OSError."""
        host, port = self._place.host, self._place.port
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = list(dict.fromkeys(str(one[4][0]) for one in found))[:REPLICAS_MAX]
        return sorted(addresses, key=lambda one: one != self._last)

    async def _ask_one(self, address: str, path: str, token: str) -> Reports:
        """Ask one replica.  Raises _Refused."""
        place = f"[{address}]" if ":" in address else address
        url = URL(f"http://{place}:{self._place.port}{path}", encoded=True)
        try:
            headers = {"Authorization": f"Bearer {token}"}
            async with self._session.get(url, headers=headers) as answer:
                if answer.status == HTTPStatus.NOT_FOUND:
                    return {}
                if answer.status != HTTPStatus.OK:
                    raise _Refused(await _reason(answer), answer.status != 503)
                return await _read(answer)
        except TimeoutError:
            raise _Refused("the operator does not answer in time", is_leader=True) from None
        except aiohttp.ClientError as error:
            raise _Refused(f"no operator answers ({error})", is_leader=False) from error
        except PeerError as error:
            raise _Refused(f"the answer of the operator cannot be read ({error})", True) from error


class _Refused(Exception):
    """A replica has given no reports."""

    def __init__(self, why: str, is_leader: bool) -> None:
        super().__init__(why)
        self.is_leader = is_leader


def _token(file: Path) -> str:
    """The token, which the kubelet renews in its file.  Raises OSError."""
    with file.open("rb") as opened:
        text = opened.read(TOKEN_CHARACTERS).strip()
    if not text.isascii() or len(text.split()) != 1:
        raise OSError(f"{file} has no token")
    return text.decode()


async def _reason(answer: aiohttp.ClientResponse) -> str:
    """The reason of a refusal, in bounded size."""
    text = (await answer.content.read(1000)).decode(errors="replace")
    return f"the operator refuses them (HTTP {answer.status}: {text[:200]})"


async def _read(answer: aiohttp.ClientResponse) -> Reports:
    """Read the lines of an answer, some at a time.  Raises PeerError."""
    found: dict[str, AgentReport] = {}
    rest, size = b"", 0
    async for chunk in answer.content.iter_chunked(CHUNK):
        size += len(chunk)
        if size > ANSWER_BYTES_MAX or len(rest) > LINE_BYTES_MAX:
            raise PeerError(
                f"an answer of more than {ANSWER_BYTES_MAX} bytes, or a line of "
                f"more than {LINE_BYTES_MAX}"
            )
        *lines, rest = (rest + chunk).split(END)
        found.update(decode_lines(lines))
    if rest:
        raise PeerError("it ends within a line")
    return found


@asynccontextmanager
async def asking_operator(place: OperatorPlace) -> AsyncIterator[OperatorReports]:
    """Ask with the same connections during the block."""
    timeout = aiohttp.ClientTimeout(total=ANSWER_SECONDS, sock_connect=CONNECT_SECONDS)
    async with plain_session(timeout) as session:
        yield OperatorReports(place, session)
