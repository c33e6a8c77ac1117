"""Accounts of the people who have signed in to a page that many people share.

A person pastes a token of the own Kubernetes account. The page reads with this token and with
nothing else, so Kubernetes decides about each request of each person, at the moment of the request.
The page's own account may list jobs and nothing else. So a mistake here cannot show a person what
Kubernetes refuses to this person.

Tokens and sessions are in memory only. A token leaves it when its last session ends, when
Kubernetes refuses it, or when it was not used for long.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec

from unbroken.cli.place import ClusterPlace
from unbroken.errors import SpecError, WorldError
from unbroken.kube.client import KubeClient, TokenClients
from unbroken.kube.clock import monotonic, pause
from unbroken.kube.errors import Unauthorized

from .account import Account
from .entrance import Source
from .logs import LogQuery
from .orders import Order

REVIEWS = "apis/authentication.k8s.io/v1/tokenreviews"
TOKEN_CHARACTERS = 16 * 1024
"""Longest token."""
WAY = "sign in again with its name"
"""The way of a person to other namespaces."""
NAMESPACES_MAX = 20
"""Namespaces that a person may name."""
SESSION_SECONDS = 8 * 3600.0
"""Seconds after which a person must sign in again."""
ACCOUNTS_MAX = 200
"""Tokens that are kept: beyond, the one that was used longest ago is dropped."""
ACCOUNTS_EACH = 16
"""Those of one account: it drops its own, and not those of others."""
SESSIONS_MAX = 8
"""Sessions of one token: beyond, the oldest ends."""
SIGNING_MAX = 8
"""People who sign in at the same time: each costs a few requests to the Kubernetes API."""
EXPIRE_SECONDS = 60.0
"""Seconds between two looks for sessions that have ended."""
KEY_BYTES = 32
Namespace = Annotated[str, msgspec.Meta(max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?\Z")]


class _User(msgspec.Struct):
    username: str = ""


class _ReviewStatus(msgspec.Struct):
    authenticated: bool = False
    user: _User = msgspec.field(default_factory=_User)


class _Review(msgspec.Struct):
    """The answer to a TokenReview."""

    status: _ReviewStatus


@dataclass(eq=False, slots=True)
class Person:
    """A person who has signed in, with one token."""

    name: str
    """The account as Kubernetes names it."""
    inner: Source | None
    """The person's reads and actions, which hold the token; None: the token is forgotten."""
    sessions: dict[bytes, float] = field(default_factory=dict)
    """By the hash of the cookie, the oldest first: time of the monotonic clock of its end."""

    @property
    def source(self) -> Source:
        """The same, which keeps no token after the end: the server keeps it with contents."""
        return Source(self._read, self._text, self._logs, self._act)

    def end(self) -> None:
        """Forget the token."""
        self.sessions.clear()
        self.inner = None

    @contextmanager
    def _accepted(self) -> Iterator[Source]:
        """End all sessions if Kubernetes does not accept the token any more."""
        if self.inner is None:
            raise WorldError("the session has ended")
        try:
            yield self.inner
        except Unauthorized:
            self.end()
            raise

    async def _read(self, path: tuple[str, ...]) -> dict[str, Any]:
        with self._accepted() as inner:
            return await inner.read(path)

    async def _text(self, namespace: str, job: str, number: int) -> str:
        with self._accepted() as inner:
            return await inner.text(namespace, job, number)

    async def _logs(self, namespace: str, job: str, query: LogQuery) -> dict[str, Any]:
        with self._accepted() as inner:
            return await inner.logs(namespace, job, query)

    async def _act(self, order: Order) -> str:
        with self._accepted() as inner:
            return await inner.act(order)


class Accounts:
    """The people who have signed in."""

    def __init__(
        self,
        own: KubeClient,
        clients: TokenClients,
        place: ClusterPlace,
        source_of: Callable[[Account, str], Source],
    ) -> None:
        """`own`: client of the page's own account, which has the tokens reviewed.  `source_of`:
        what an account of this name may read and do."""
        self._own = own
        self._clients = clients
        self._place = place
        self._source_of = source_of
        self._people: dict[bytes, Person] = {}
        """By the hash of token and namespaces; the one that was used longest ago first."""
        self._signing = 0

    async def sign_in(self, token: str, namespaces: Sequence[str]) -> str:
        """Begin a session, and return the value of its cookie.

        Raises SpecError if Kubernetes does not accept the token or lets its account list jobs
        nowhere, WorldError if that cannot be found out.
        """
        _check(token, namespaces)
        if self._signing >= SIGNING_MAX:
            raise WorldError("too many people sign in at this moment: try again", 1.0)
        self._signing += 1
        try:
            name = await self._review(token)
            account = Account(self._place, self._clients.client(token), namespaces, WAY)
            await account.cluster("")
        finally:
            self._signing -= 1
        key = _hash("\n".join([token, *namespaces]))
        self._drop_ended()
        person = self._people.pop(key, None) or Person(name, self._source_of(account, name))
        self._people[key] = person
        own = [one for one, each in self._people.items() if each.name == name]
        for one in own[:-ACCOUNTS_EACH]:
            self._people.pop(one).end()
        while len(self._people) > ACCOUNTS_MAX:
            self._people.pop(next(iter(self._people))).end()
        cookie = secrets.token_urlsafe(KEY_BYTES)
        person.sessions[_hash(cookie)] = monotonic() + SESSION_SECONDS
        while len(person.sessions) > SESSIONS_MAX:
            del person.sessions[next(iter(person.sessions))]
        return cookie

    async def _review(self, token: str) -> str:
        """Name the account of a token.  Raises SpecError if Kubernetes does not accept it."""
        kind = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview"}
        answer = await self._own.raw("POST", REVIEWS, body={**kind, "spec": {"token": token}})
        status = msgspec.json.decode(answer, type=_Review).status
        if not status.authenticated or not status.user.username:
            raise SpecError("Kubernetes does not accept this token. Has it expired?")
        return status.user.username

    def person(self, cookie: str) -> Person | None:
        """The person of a session; None: the session has ended, or never was."""
        self._drop_ended()
        name = _hash(cookie)
        for key, person in self._people.items():
            if name in person.sessions:
                self._people[key] = self._people.pop(key)
                return person
        return None

    def sign_out(self, cookie: str) -> None:
        """End a session; forget the token with its last one."""
        person = self.person(cookie)
        if person is not None:
            del person.sessions[_hash(cookie)]
            self._drop_ended()

    async def expire(self) -> None:
        """Forget the tokens of sessions that have ended, for ever."""
        while True:
            await pause(EXPIRE_SECONDS)
            self._drop_ended()

    def _drop_ended(self) -> None:
        now = monotonic()
        for key, person in list(self._people.items()):
            for name in [one for one, until in person.sessions.items() if until <= now]:
                del person.sessions[name]
            if not person.sessions:
                person.end()
                del self._people[key]


def _hash(text: str) -> bytes:
    """Return the name under which a secret is looked up; the time of a look tells nothing of it."""
    return hashlib.sha256(text.encode(errors="replace")).digest()


def _check(token: str, namespaces: Sequence[str]) -> None:
    """Raise SpecError for what cannot be a token, or names of namespaces."""
    is_printable = token.isascii() and token.isprintable() and " " not in token
    if not token or not is_printable:
        raise SpecError("paste a token: printable characters without spaces")
    if len(token) > TOKEN_CHARACTERS:
        raise SpecError(f"a token has {TOKEN_CHARACTERS} characters at most")
    if len(namespaces) > NAMESPACES_MAX:
        raise SpecError(f"name {NAMESPACES_MAX} namespaces at most")
    try:
        msgspec.convert(list(namespaces), list[Namespace])
    except msgspec.ValidationError:
        raise SpecError("a namespace has small letters, digits and hyphens only") from None
