"""Proof of the job's key at both ends: callers that an agent admits, agents that the operator
serves.

An agent puts a tag on every answer (`wire/proof`). Each connection has a session of its own, which
ends with it. So the stored state is bounded by the connections, and a recorded request is valid on
no connection.

HyperPod's own agent has neither a link nor a key. It is served without a proof, unless the operator
requires one, or anything says that the job's agents are ours, which always prove. A program that
answers at a pod's address can therefore not pass for an agent of ours
(docs/design/agent-authentication.md).
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import WeakKeyDictionary

from aiohttp import WSMsgType, web

from unbroken.spec.keys import AGENT_AUTH
from unbroken.wire.proof import (
    DIGEST_HEADER,
    NONCE_BYTES,
    NONCE_HEADER,
    TAG_HEADER,
    TAGGED,
    Asked,
    Seal,
    Session,
    Stranger,
    Unseal,
    answer_tag,
    digest_of,
    greeting,
    is_tag,
    nonce_of,
    request_tag,
)

from .snapshots import PATH, RequestRefused

PROVE_SECONDS = 5.0
"""Seconds within which a linked peer must prove the key."""
NO_KEY = "the agent talks only with who shows that they have its job's key"


@dataclass(slots=True)
class _Known:
    """A connection whose other end has the key, or claims to."""

    session: Session
    requests: int = 0


class Visit(NamedTuple):
    """An admitted request, with the data that its answer needs."""

    session: Session
    number: int


VISIT = web.RequestKey("visit", Visit)


class LinkSeals(NamedTuple):
    """Both directions of a link; both None: the job has no key."""

    seal: Seal | None = None
    unseal: Unseal | None = None


def is_snapshot(request: web.Request) -> bool:
    """True if the body is a snapshot, which is read piece by piece."""
    return request.method == "PUT" and request.path.startswith(f"{PATH}/")


class Guard:
    """Proofs of the job's key at one agent. `uid`: of its pod, empty if the agent does not know
    it."""

    def __init__(self, key: bytes, uid: str) -> None:
        self._key, self._uid = key, uid
        self._known: WeakKeyDictionary[asyncio.BaseTransport, _Known] = WeakKeyDictionary()

    def hello(self, request: web.Request) -> web.Response:
        """Begin a session of the connection. Raises Refused."""
        message, session = self._greet(request)
        if request.transport is None:
            raise ConnectionResetError
        self._known[request.transport] = _Known(session)
        return web.Response(body=message)

    def _greet(self, request: web.Request) -> tuple[bytes, Session]:
        asked = nonce_of(request.headers.get(NONCE_HEADER))
        if asked is None:
            raise RequestRefused(401, f"{NO_KEY}; {NONCE_HEADER} must be {2 * NONCE_BYTES} digits")
        return greeting(self._key, asked, os.urandom(NONCE_BYTES), self._uid, request.raw_path)

    async def admit(self, request: web.Request) -> None:
        """Admit a request and its body, if it has the tag of its connection's session. Raises
        Refused.

        The tag is checked before the body is read. The digest of a snapshot covers the headers
        only.
        """
        transport = request.transport
        known = None if transport is None else self._known.get(transport)
        if transport is None or known is None:
            raise RequestRefused(401, NO_KEY)
        headers = tuple(request.headers.get(name, "") for name in TAGGED)
        asked = Asked(request.method, request.raw_path, headers)
        wanted = request_tag(known.session, known.requests, asked)
        if not is_tag(request.headers.get(TAG_HEADER), wanted):
            del self._known[transport]
            raise RequestRefused(401, f"{NO_KEY}; this request is forged, repeated or out of order")
        request[VISIT] = Visit(known.session, known.requests)
        known.requests += 1
        if not is_snapshot(request) and digest_of(await request.read()) != headers[1]:
            raise RequestRefused(401, f"{NO_KEY}; the body is not the one of the tag")

    @staticmethod
    async def tag(request: web.Request, answer: web.StreamResponse) -> None:
        """Put a tag on an answer before it is sent."""
        visit = request.get(VISIT)
        if visit is None:
            return
        if isinstance(answer, web.Response):
            body = answer.body
            answer.headers[DIGEST_HEADER] = digest_of(body if isinstance(body, bytes) else b"")
        digest = answer.headers.get(DIGEST_HEADER, "")
        answer.headers[TAG_HEADER] = answer_tag(visit.session, visit.number, answer.status, digest)

    async def link(self, request: web.Request, channel: web.WebSocketResponse) -> LinkSeals:
        """Exchange the proofs of a new link. Raises Refused before, Stranger after."""
        message, session = self._greet(request)
        await channel.prepare(request)
        await channel.send_bytes(message)
        unseal = Unseal(session.down)
        try:
            async with asyncio.timeout(PROVE_SECONDS):
                answer = await channel.receive()
        except TimeoutError:
            raise Stranger(f"showed no key within {PROVE_SECONDS:g} s") from None
        if answer.type is not WSMsgType.BINARY or unseal(answer.data):
            raise Stranger("did not show that it has the job's key")
        return LinkSeals(Seal(session.up), unseal)


_OFFERS_NONE = "offers no proof of the job's key"


@dataclass(slots=True)
class Proofs:
    """What is known of the proofs of one job's agents."""

    is_required: bool = True
    """The operator serves no agent without a proof."""
    is_given: bool = False
    """An agent of the job has proven its key, now or before an earlier start."""
    is_served: bool = False
    """An agent of the job has been served without a proof."""

    def refusal(self, *, is_ours: bool) -> str | None:
        """Return why an agent that offers no proof is refused; None: it is served."""
        if is_ours:
            return (
                f"{_OFFERS_NONE}, but its pod runs unbroken's agent, which always proves: another "
                "program may answer at the pod's address"
            )
        if self.is_given:
            return (
                f"{_OFFERS_NONE}, but agents of this job have proven it: another program may "
                "answer at the pod's address. If the image has a new agent, create the job again"
            )
        if self.is_required:
            return (
                f"{_OFFERS_NONE}, as HyperPod's own agent does, and this operator requires one "
                f"(--agent-authentication required); to serve it, annotate the job {AGENT_AUTH}: "
                "none"
            )
        return None


@dataclass(frozen=True, slots=True)
class AgentIdentity:
    """The expected agent: the peer at its address has to prove this identity."""

    key: bytes
    """Key of its job."""
    uid: str | None
    """Uid of its pod; None: any pod of the job."""
    proofs: Proofs = field(default_factory=Proofs)
    """Proofs of the agents of its job."""
    is_ours: bool = True
    """Its pod certainly runs an agent that proves its identity."""

    @property
    def refusal(self) -> str | None:
        """Return why an agent that offers no proof is refused; None: it is served."""
        return self.proofs.refusal(is_ours=self.is_ours)
