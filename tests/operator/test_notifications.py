"""Each state of an incident is sent to the webhook once, whichever operator leads."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientTimeout, web

from tests import loopback
from tests.attack.redirecting import Redirecting, redirecting
from tests.operator.conftest import Place
from tests.watching import running, until
from unbroken.agent_http.sessions import plain_session
from unbroken.core.notifications import Message, ObjectName, incident_messages
from unbroken.errors import SpecError
from unbroken.kube.clock import wall
from unbroken.kube.informer import Informer
from unbroken.operator import definitions
from unbroken.operator.kinds import IncidentObject, NodeRecordObject
from unbroken.operator.notifications import (
    ADDRESS_MAX,
    Answer,
    Notifier,
    NotifyOptions,
    read_address,
    send_message,
)
from unbroken.spec.job.codec import incident_to
from unbroken.spec.job.incident import RECOVERED, Incident, Remedy, Symptom
from unbroken.spec.keys import NOTIFIED
from unbroken.spec.nodes.kinds import NODE_RECORD, NodeRecordSpec, RepairRecord, RepairState
from unbroken.spec.nodes.values import Action
from unbroken.spec.notifications import NotificationForm

SECRET = "T0KEN-of-the-webhook"


def broken(number: int = 1) -> Incident:
    """An incident that was found a while ago."""
    at = wall() - 30.0
    culprit = Symptom(at, "Signal", "killed", pod="lm-pods-1", node="n1", rank=3)
    return Incident(number, 0, culprit, (culprit,), Remedy.PROCESS, "first fault", at)


@dataclass
class Webhook:
    """A receiver of notifications."""

    file: Path
    statuses: list[int] = field(default_factory=list)
    """Statuses of the next answers; then 200."""
    heads: dict[str, str] = field(default_factory=dict)
    got: list[dict[str, Any]] = field(default_factory=list)

    async def take(self, request: web.Request) -> web.Response:
        """Take a message."""
        assert request.path == f"/services/{SECRET}"
        assert request.headers["Content-Type"] == "application/json"
        self.got.append(json.loads(await request.text()))
        status = self.statuses.pop(0) if self.statuses else 200
        return web.Response(status=status, headers=self.heads)

    @property
    def ids(self) -> list[str]:
        """States of the messages, in order, each with its incident."""
        return [f"{one['incident']['number']}/{one['state']}" for one in self.got]


@asynccontextmanager
async def webhook(folder: Path) -> AsyncIterator[Webhook]:
    """Serve a webhook whose address is in a file."""
    found = Webhook(folder / "webhook")
    app = web.Application()
    app.router.add_post("/{path:.*}", found.take)
    async with loopback.serving(app) as port:
        found.file.write_text(f"http://127.0.0.1:{port}/services/{SECRET}\n")
        yield found


@asynccontextmanager
async def notifying(here: Place, file: Path) -> AsyncIterator[None]:
    """Run the notifier of an operator that leads."""
    informer = Informer(here.client, IncidentObject, namespace=here.namespace)
    notifier = Notifier(here.client, informer, None, NotifyOptions(file))
    async with running(informer.run(), notifier.run(lambda: True)):
        yield


async def create(here: Place, incident: Incident) -> None:
    """Create an incident of the job lm."""
    job = {"name": "lm", "namespace": here.namespace, "uid": "1"}
    await here.post("incidents", incident_to(incident, job))


async def annotation(here: Place, number: int) -> str:
    """The states that an incident notes."""
    found: dict[str, Any] = await here.get(f"incidents/lm-{number}")
    return str((found["metadata"].get("annotations") or {}).get(NOTIFIED, ""))


async def test_no_operator_repeats_a_state(place: Any, tmp_path: Path) -> None:
    async with place() as here, webhook(tmp_path) as receiver:
        await definitions.install(here.client)
        await create(here, broken(1))
        async with notifying(here, receiver.file):
            await until(lambda: annotation(here, 1), lambda found: found == "found")
        assert receiver.ids == ["1/found"]
        async with notifying(here, receiver.file):
            await create(here, broken(2))
            await until(lambda: annotation(here, 2), lambda found: found == "found")
            ended = {"outcome": RECOVERED, "endedAt": None}
            await here.merge("incidents/lm-1", {"spec": ended})
            await until(lambda: annotation(here, 1), lambda found: found == "found,recovered")
    assert receiver.ids == ["1/found", "2/found", "1/recovered"]
    assert len({one["id"] for one in receiver.got}) == 3


async def test_both_states_of_a_record_are_noted_before_its_copy_is_new(
    place: Any, tmp_path: Path
) -> None:
    at = wall() - 60.0
    ended = RepairRecord(
        Action.REPLACE, "XID 79", "daemon", RepairState.DONE, at, ended_at=at + 1.0
    )
    again = RepairRecord(Action.REBOOT, "XID 79", "daemon", RepairState.DRAINING, at + 2.0)
    async with place() as here, webhook(tmp_path) as receiver:
        await definitions.install(here.client)
        name = here.namespace
        record = NODE_RECORD.new(name, NodeRecordSpec(history=(ended,), repair=again))
        await here.client.create_if_absent(NODE_RECORD.path, record)
        informer = Informer(here.client, NodeRecordObject)
        async with running(informer.run()):
            await informer.synced.wait()
        # The copy gets no news from here on.
        others = Informer(here.client, IncidentObject, namespace=here.namespace)
        notifier = Notifier(here.client, others, informer, NotifyOptions(receiver.file))
        async with running(notifier.run(lambda: True)):
            await until(lambda: told(receiver, 2))
            path = f"{NODE_RECORD.path}/{name}"
            await until(lambda: note_of(here, path), lambda found: found.endswith("began"))
            first, last = (await note_of(here, path)).split(",")
        await here.client.delete_if_present(path)
    assert (first.partition("/")[2], last.partition("/")[2]) == ("repair-ended", "repair-began")


async def told(receiver: Webhook, count: int) -> bool:
    """True if a webhook has got so many messages."""
    return len(receiver.got) == count


async def note_of(here: Place, path: str) -> str:
    """The states that an object notes."""
    found = json.loads(await here.client.raw("GET", path))
    return str((found["metadata"].get("annotations") or {}).get(NOTIFIED, ""))


async def test_a_webhook_that_fails_is_asked_again(
    place: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with place() as here, webhook(tmp_path) as receiver:
        await definitions.install(here.client)
        receiver.statuses = [503, 429]
        await create(here, broken(1))
        async with notifying(here, receiver.file):
            await until(lambda: annotation(here, 1))
    assert receiver.ids == ["1/found"] * 3
    assert len({one["id"] for one in receiver.got}) == 1
    text = caplog.text
    assert text.count("notification not sent error=HTTP_503") + text.count('"HTTP 503"') == 1
    assert "notifications are sent again" in text
    assert SECRET not in text


def message() -> Message:
    """A message about an incident."""
    (found,) = incident_messages(broken(), ObjectName("u", "lm-1", "team", "lm"))
    return found


async def answered(options: NotifyOptions) -> Answer:
    """Send a message once."""
    async with plain_session(ClientTimeout(total=5.0)) as session:
        return await send_message(session, options, message())


@pytest.mark.parametrize(
    ("status", "answer"),
    [
        *((status, Answer()) for status in (200, 201, 202, 204)),
        *((status, Answer(f"HTTP {status}", is_final=True)) for status in (400, 413, 415, 422)),
        *(
            (status, Answer(f"HTTP {status}", seconds=7.0))
            for status in (401, 403, 404, 410, 429, 500, 503)
        ),
    ],
)
async def test_an_answer_is_taken_or_final_or_comes_too_early(
    tmp_path: Path, status: int, answer: Answer
) -> None:
    async with webhook(tmp_path) as receiver:
        receiver.statuses, receiver.heads = [status], {"Retry-After": "7"}
        found = await answered(NotifyOptions(receiver.file))
    seconds = 0.0 if not answer.problem else 7.0
    assert found == Answer(answer.problem, answer.is_final, seconds)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_a_webhook_sends_the_operator_nowhere_else(tmp_path: Path, status: int) -> None:
    async with redirecting(Redirecting(status)) as pod:
        file = tmp_path / "webhook"
        file.write_text(f"http://127.0.0.1:{pod.port}/{SECRET}")
        found = await answered(NotifyOptions(file))
    assert found.is_final
    assert SECRET not in found.problem
    assert pod.heard == []


async def test_no_error_contains_the_address(tmp_path: Path) -> None:
    file = tmp_path / "webhook"
    for address in (f"http://127.0.0.1:1/{SECRET}", f"https://127.0.0.1:1/{SECRET}"):
        file.write_text(address)
        found = await answered(NotifyOptions(file))
        assert found.problem.startswith("no answer (")
        assert SECRET not in found.problem
        assert not found.is_final


async def test_slack_gets_a_text(tmp_path: Path) -> None:
    async with webhook(tmp_path) as receiver:
        options = NotifyOptions(receiver.file, NotificationForm.SLACK, "https://page/")
        assert await answered(options) == Answer()
    (found,) = receiver.got
    assert found.keys() == {"text"}
    assert found["text"].endswith(" <https://page/jobs/team/lm/incidents/1|incident>")


@pytest.mark.parametrize(
    "text",
    [
        *("https://hooks.example.com/services/x", " https://h:8443/x?y=z\n"),
        *("http://127.0.0.1:8000/x", "http://localhost/x", "http://[::1]:1/x"),
    ],
)
def test_an_address_is_https_or_of_this_machine(tmp_path: Path, text: str) -> None:
    file = tmp_path / "webhook"
    file.write_text(text)
    assert read_address(file) == text.strip()


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"\n", b"T0KEN-of-the-webhook", b"http://example.com/T0KEN-of-the-webhook"),
        *(b"http://127.0.0.1.evil.com/T0KEN-of-the-webhook", b"ftp://h/T0KEN-of-the-webhook"),
        *(b"https:///T0KEN-of-the-webhook", b"https://h:99999/T0KEN-of-the-webhook", b"\xff\xfe"),
        *(b"https://h/ T0KEN-of-the-webhook", b"https://[::1/T0KEN-of-the-webhook"),
        b"https://h/" + b"x" * ADDRESS_MAX,
    ],
)
def test_another_address_is_refused_and_not_shown(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "webhook"
    file.write_bytes(data)
    with pytest.raises(SpecError, match="with the webhook: it ") as refused:
        read_address(file)
    assert SECRET not in str(refused.value)
    assert refused.value.__cause__ is None
    with pytest.raises(SpecError, match="No such file"):
        read_address(tmp_path / "nowhere")
