"""Sends notifications about incidents and repairs of nodes to a webhook.

`core/notifications` decides what is sent and when. The address of the webhook is a secret: it
stands in a file, which is read before each message, and in no argument, log line or object. A
webhook that is slow, away or refuses delays nothing but notifications.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import aiohttp
import msgspec

from unbroken.agent_http.sessions import plain_session
from unbroken.core.notifications import (
    Message,
    ObjectName,
    Outbox,
    incident_messages,
    message_value,
    note,
    repair_messages,
    sent_states,
    slack_value,
)
from unbroken.errors import PeerError, SpecError, UnbrokenError
from unbroken.foreign_numbers import whole_number
from unbroken.kube.client import KubeClient, Object
from unbroken.kube.clock import pause, steady_clock
from unbroken.kube.informer import Informer
from unbroken.log_lines import LastProblem, Log
from unbroken.spec.job import incident as incidents
from unbroken.spec.job.codec import incident_from
from unbroken.spec.keys import NOTIFIED
from unbroken.spec.nodes.kinds import NODE_RECORD
from unbroken.spec.notifications import NotificationForm

from .kinds import INCIDENTS, IncidentObject, NodeRecordObject

log = Log(__name__)

SEND_SECONDS = 10.0
"""Seconds that a webhook has to take a message."""
NOTE_SECONDS = 10.0
"""Seconds that the API server has to note it."""
AGAIN_SECONDS = 5.0
"""Seconds after an error of this program."""
ADDRESS_MAX = 2048
"""Bytes of the file with the address."""
LEAST_SECONDS = 0.05
NEWS_SECONDS = 1.0
"""Seconds between looks at what waits while objects change: a look goes through all of it."""
RETRY_AFTER_MAX = 3600
NEVER = frozenset({400, 413, 415, 422})
"""Statuses by which a webhook refuses this very message. Others may change: of a service that is
away, or of an address that is being replaced."""
OWN_HOSTS = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, slots=True)
class NotifyOptions:
    """The webhook."""

    file: Path
    """File with its address."""
    form: NotificationForm = NotificationForm.JSON
    page: str = ""
    """Address of the live page, with a slash at its end; empty: messages have no link."""


def read_address(file: Path) -> str:
    """Read the address of a webhook.  Raises SpecError, which does not contain the address."""
    try:
        with file.open("rb") as stream:
            address = stream.read(ADDRESS_MAX + 1).decode().strip()
        parts = urlsplit(address)
        is_safe = parts.scheme == "https" or (
            parts.scheme == "http" and parts.hostname in OWN_HOSTS
        )
        is_whole = bool(parts.hostname) and len(address) <= ADDRESS_MAX and parts.port != 0
    except OSError as error:
        raise SpecError(f"{file} with the webhook: {error.strerror}") from None
    except ValueError:
        raise SpecError(f"{file} with the webhook: it has no valid address") from None
    if not is_safe or not is_whole or len(address.split()) != 1:
        raise SpecError(
            f"{file} with the webhook: it must have one address that begins with https:// (http:// "
            "only for this machine)"
        )
    return address


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of sending a message."""

    problem: str = ""
    """Reason for a failure; empty: the webhook has taken the message."""
    is_final: bool = False
    """True if the message is not to be sent again."""
    seconds: float = 0.0
    """Seconds that the webhook asks to wait."""


async def send_message(
    session: aiohttp.ClientSession, options: NotifyOptions, message: Message
) -> Answer:
    """Send a message to the webhook once.  No text of the answer contains the address."""
    make = slack_value if options.form is NotificationForm.SLACK else message_value
    body = msgspec.json.encode(make(message, options.page))
    try:
        address = await asyncio.to_thread(read_address, options.file)
        headers = {"Content-Type": "application/json"}
        async with session.post(address, data=body, headers=headers) as answer:
            status, after = answer.status, answer.headers.get("Retry-After", "")
    except SpecError as error:
        return Answer(str(error))
    except PeerError:
        return Answer("a redirect or compressed content, which is refused", is_final=True)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        return Answer(f"no answer ({type(error).__name__})")
    if 200 <= status < 300:
        return Answer()
    seconds = whole_number(after, 0, RETRY_AFTER_MAX) or 0
    return Answer(f"HTTP {status}", status in NEVER, seconds)


class Notifier:
    """Sends the messages of one term of leadership."""

    def __init__(
        self,
        client: KubeClient,
        incidents: Informer[IncidentObject],
        records: Informer[NodeRecordObject] | None,
        options: NotifyOptions,
    ) -> None:
        """`records` None: repairs of nodes are not told."""
        self._client = client
        self._incidents = incidents
        self._records = records
        self._options = options
        self._clock = steady_clock()
        self._outbox = Outbox()
        self._news = asyncio.Event()
        self._problem = LastProblem()

    async def run(self, may_send: Callable[[], bool]) -> None:
        """Send messages until cancelled; `may_send`: true while this operator leads."""
        log.info("notifications are on")
        self._incidents.subscribe(self._on_incident)
        if self._records is not None:
            self._records.subscribe(self._on_record)
        while True:
            try:
                async with plain_session(aiohttp.ClientTimeout(total=SEND_SECONDS)) as session:
                    while True:
                        await self._step(session, may_send)
            except Exception as error:  # noqa: BLE001 -- notifications must not end the operator
                # The text of an unknown error may contain the address.
                log.error("notifications failed", error=type(error).__name__)
                await pause(AGAIN_SECONDS)

    def _on_incident(self, old: IncidentObject | None, new: IncidentObject | None) -> None:
        item: Any = old if new is None else new
        metadata = item["metadata"]
        owners = metadata.get("ownerReferences") or ()
        job = str(owners[0].get("name", "")) if owners else ""
        about = ObjectName(metadata["uid"], metadata["name"], metadata["namespace"], job)
        messages = incident_messages(incident_from(item)[0], about) if new is not None else []
        self._look(about.uid, messages, item)

    def _on_record(self, old: NodeRecordObject | None, new: NodeRecordObject | None) -> None:
        item: Any = old if new is None else new
        about = ObjectName(item["metadata"]["uid"], item["metadata"]["name"])
        record = NODE_RECORD.spec_of(item)[0]
        self._look(about.uid, repair_messages(record, about) if new is not None else [], item)

    def _look(self, uid: str, messages: list[Message], item: Object) -> None:
        self._outbox.look(uid, messages, _noted(item), self._clock())
        self._news.set()

    async def _step(self, session: aiohttp.ClientSession, may_send: Callable[[], bool]) -> None:
        """Send one message, or wait for one."""
        self._news.clear()
        now = self._clock()
        message = self._outbox.next(now)
        if message is None or not may_send():
            at = self._outbox.next_at(now)
            wait = None if at is None else max(at - now, LEAST_SECONDS)
            wait = wait if message is None else AGAIN_SECONDS
            with suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self._news.wait()
                    await pause(NEWS_SECONDS)
            return
        answer = await send_message(session, self._options, message)
        now = self._clock()
        if not answer.problem:
            self._outbox.sent(message, now)
            self._report("")
            await self._note(message)
        elif answer.is_final:
            self._outbox.refused(message, now)
            self._report(answer.problem)
        else:
            wait = self._outbox.failed(now, answer.seconds)
            self._report(answer.problem, wait)

    def _report(self, problem: str, seconds: float | None = None) -> None:
        """Log a problem once, and its end."""
        if not self._problem.note(problem):
            return
        if problem:
            log.warning("notification not sent", error=problem, retry_seconds=seconds)
        else:
            log.info("notifications are sent again")

    async def _note(self, message: Message) -> None:
        """Note in the object that a state was told, so that no other operator repeats it."""
        about = message.about
        if about is None:
            return
        path, item = self._place(about)
        # The copy may not have the last note yet.
        before = [*(_noted(item) if item is not None else ()), *self._outbox.told(about.uid)]
        value = note(dict.fromkeys(before), message.key)
        body = {"metadata": {"annotations": {NOTIFIED: value}}}
        try:
            async with asyncio.timeout(NOTE_SECONDS):
                await self._client.merge_if_present(path, body, uid=about.uid)
        except (UnbrokenError, TimeoutError) as error:
            log.warning("notification not noted", object=about.name, error=error)

    def _place(self, about: ObjectName) -> tuple[str, Any]:
        """The path of an object, and its present copy."""
        if about.namespace:
            space = f"namespaces/{quote(about.namespace)}"
            path = f"{INCIDENTS}/{space}/{incidents.PLURAL}/{quote(about.name)}"
            return path, self._incidents.get(about.name, about.namespace)
        path = f"{NODE_RECORD.path}/{quote(about.name)}"
        return path, self._records.get(about.name) if self._records is not None else None


def _noted(item: Object) -> tuple[str, ...]:
    """The states that the annotation of an object notes."""
    annotations = item["metadata"].get("annotations") or {}
    return sent_states(str(annotations.get(NOTIFIED) or ""))
