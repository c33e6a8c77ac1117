"""A client of the cluster API, for our own commands; others use the aws CLI or boto3."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
from yarl import URL

from unbroken.agent_http.sessions import plain_session
from unbroken.errors import PeerError, SpecError, UnbrokenError, WorldError
from unbroken.kube.clock import entropy, wall

from .server import CONTENT_TYPE, TARGET_PREFIX
from .signatures import Credential, Message, sign

Object = dict[str, Any]
TIMEOUT = aiohttp.ClientTimeout(total=60, connect=5)
"""A call reads and writes a few objects; boto3 waits 60 s as well."""


class ClusterApiRefused(SpecError):
    """The server declined; `code` is that of the API, such as ResourceNotFound."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{message} ({code})")
        self.code = code


class Client:
    """Calls to one server, signed by a credential."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, credential: Credential, region: str
    ) -> None:
        self._session = session
        self._url = URL(url).with_path("/")
        self._credential = credential
        self._region = region
        self._random = entropy()

    async def call(self, operation: str, body: Mapping[str, Any]) -> Object:
        """The answer of an operation; Refused, or WorldError where trying again may help."""
        data = msgspec.json.encode(body)
        headers = {
            "host": self._url.authority,
            "content-type": CONTENT_TYPE,
            "x-amz-target": f"{TARGET_PREFIX}{operation}",
            # Makes each signature another one: equal calls within a second are not a replay.
            "amz-sdk-invocation-id": f"{self._random.getrandbits(128):032x}",
        }
        message = Message("POST", "/", "", headers, data)
        headers = sign(message, self._credential, self._region, wall())
        post = self._session.post(self._url, data=data, headers=headers, allow_redirects=False)
        try:
            async with post as response:
                return _read(response.status, await response.read())
        except (aiohttp.ClientError, TimeoutError) as error:
            text = f"no answer from the cluster API at {self._url}: {str(error) or 'time-out'}"
            raise WorldError(text, retry_after_seconds=1.0) from error

    async def pages(
        self, operation: str, member: str, body: Mapping[str, Any]
    ) -> AsyncIterator[Object]:
        """Every item of a list, over its pages."""
        token: str | None = None
        while True:
            more = {"NextToken": token} if token else {}
            answer = await self.call(operation, {**body, **more})
            for item in answer.get(member) or ():
                yield item
            token = answer.get("NextToken")
            if not token:
                return


def _read(status: int, said: bytes) -> Object:
    try:
        result: Object = msgspec.json.decode(said, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise PeerError(f"the cluster API answered {status} with no JSON") from error
    if status == 200:
        return result
    raise _refusal(status, result)


def _refusal(status: int, found: Object) -> UnbrokenError:
    text = str(found.get("message") or found.get("Message") or status)
    if status >= 500:
        return WorldError(f"the cluster API: {text}", retry_after_seconds=1.0)
    return ClusterApiRefused(str(found.get("__type") or status), text)


@asynccontextmanager
async def connected(
    url: str, credential: Credential, region: str, ca_bundle: str = ""
) -> AsyncIterator[Client]:
    """A client for the time of the block; `ca_bundle` is a file of certificates to trust.

    SpecError for an address or a file that cannot be used.
    """
    try:
        is_usable = URL(url).scheme in ("http", "https") and bool(URL(url).host)
    except ValueError:
        is_usable = False
    if not is_usable:
        raise SpecError(f"{url!r} is no address; write it as http://127.0.0.1:8080")
    try:
        tls = ssl.create_default_context(cafile=ca_bundle or None)
    except (OSError, ssl.SSLError) as error:
        raise SpecError(f"cannot read the certificates in {ca_bundle}: {error}") from error
    async with plain_session(TIMEOUT, tls=tls) as session:
        yield Client(session, url, credential, region)
