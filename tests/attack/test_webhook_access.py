"""A webhook that serves everybody, in the leader's loop.

The attack: any pod that reached the port posted a review without credentials; it froze the leader,
or made the operator create a dry-run pod in a namespace of the caller's choice.
"""

from __future__ import annotations

import asyncio
import os
import signal
import ssl
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import HealthCheck, given, settings

from tests.attack.hostile_objects import JSON, nested
from tests.attack.webhook_place import SECRET_PATH, Webhook, client_certificate, webhook
from tests.operator.conftest import job
from tests.watching import PATIENCE_SECONDS, until
from unbroken.kube.bounds import NAMESPACE
from unbroken.operator.webhook.registration import WebhookOptions, configuration
from unbroken.operator.webhook.server import (
    BODY_BYTES,
    CONNECTIONS_MAX,
    REVIEWS_MAX,
)

pytestmark = pytest.mark.slow

Object = dict[str, Any]


def review(manifest: Any, user: str = "eve", namespace: str = "kube-system") -> Object:
    """An AdmissionReview."""
    info = {"username": user, "groups": ["system:authenticated"]}
    request = {"uid": "1", "namespace": namespace, "object": manifest, "userInfo": info}
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}


def served(
    folder: Path,
    check: Callable[[Webhook], Awaitable[None]],
    authority: str = "",
    silence_seconds: float = PATIENCE_SECONDS,
) -> None:
    """Run a check of a webhook."""

    async def run() -> None:
        async with webhook(folder, authority, silence_seconds) as made:
            await check(made)

    asyncio.run(run())


def test_only_who_knows_the_path_is_answered_and_nothing_is_done_for_others(tmp_path: Path) -> None:
    async def check(made: Webhook) -> None:
        made.creators = {"admin"}
        for path in ("/validate", "/validate/", "/", SECRET_PATH[:-1], SECRET_PATH + "0"):
            status, _ = await made.post(review(job(), "admin"), path)
            assert status == 403
        assert made.asked == []
        status, answer = await made.post(review(job(), "admin"))
        assert (status, answer["response"]["allowed"]) == (200, True)

    served(tmp_path, check)


def test_a_pod_is_tried_only_for_a_user_who_may_create_it(tmp_path: Path) -> None:
    async def check(made: Webhook) -> None:
        made.creators = {"alice"}
        status, answer = await made.post(review(job(), "eve"))
        assert (status, answer["response"]["allowed"]) == (200, True)
        ((path, asked),) = made.asked
        assert path.startswith("/apis/authorization.k8s.io/v1/subjectaccessreviews")
        attributes = {"namespace": "kube-system", "verb": "create", "resource": "pods"}
        assert asked["spec"]["resourceAttributes"] == attributes
        assert (asked["spec"]["user"], asked["spec"]["groups"]) == ("eve", ["system:authenticated"])
        await made.post(review(job(), "alice", "team"))
        assert "/api/v1/namespaces/team/pods?dryRun=All" in made.asked[-1][0]
        await made.post(review(job(), "alice", "../../nodes"))
        assert "%2Fnodes/pods" in made.asked[-1][0] or "dryRun" not in made.asked[-1][0]

    served(tmp_path, check)


def test_without_the_client_certificate_nobody_is_answered(tmp_path: Path) -> None:
    authority, file = client_certificate(tmp_path)
    stranger_folder = tmp_path / "stranger"
    stranger_folder.mkdir()
    _, stranger = client_certificate(stranger_folder)

    async def check(made: Webhook) -> None:
        for shown in (None, stranger):
            context = made.tls()
            if shown is not None:
                context.load_cert_chain(shown)
            with pytest.raises((aiohttp.ClientError, ssl.SSLError, ConnectionError)):
                await made.post(review(job()), tls=context)
        context = made.tls()
        context.load_cert_chain(file)
        status, _ = await made.post(review(job()), tls=context)
        assert status == 200

    served(tmp_path, check, authority)


def test_large_deep_and_hostile_bodies_are_refused_and_the_honest_is_answered(
    tmp_path: Path,
) -> None:
    large = b'{"request":{"uid":"1","object":{"x":"' + b"a" * BODY_BYTES + b'"}}}'
    wide = b'{"request":{"uid":"1","object":{"x":[%s]}}}' % b",".join([b"[]"] * (1 << 20))
    deep = f'{{"request":{{"uid":"1","object":{nested(100_000)}}}}}'.encode()
    pattern = {"name": "r", "logPattern": "(?:|){64}(?!)", "faultOnMatch": True}
    frozen = job(runPolicy={"logMonitoringConfiguration": [pattern]})

    async def check(made: Webhook) -> None:
        await made.post(review(job()))
        before = made.memory()
        for body, wanted in ((large, 413), (b"[]", 400), (b"", 400), (b"\xff", 400)):
            for _ in range(2):
                with suppress(aiohttp.ClientError):  # it may close before all is sent
                    status, _ = await made.post(body)
                    assert status == wanted, body[:20]
        for refused in (wide, deep, review(frozen)):
            for answer in await asyncio.gather(*(made.post(refused) for _ in range(2))):
                assert (answer[0], answer[1]["response"]["allowed"]) == (200, False)
        status, answer = await made.post(review(job()))
        assert (status, answer["response"]["allowed"]) == (200, True)
        assert made.memory() - before < 100 << 20

    served(tmp_path, check)


@settings(
    max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(garbage=JSON)
def test_any_review_is_answered_or_refused(tmp_path: Path, garbage: Any) -> None:
    async def check(made: Webhook) -> None:
        for body in (garbage, {"request": garbage}, review(garbage), review({"spec": garbage})):
            status, _ = await made.post(body)
            assert status in (200, 400)
        strange = review(job())
        strange["request"]["userInfo"] = garbage
        assert (await made.post(strange))[0] in (200, 400)

    served(tmp_path, check)


def test_connections_that_say_nothing_keep_nobody_out(tmp_path: Path) -> None:
    """No handshake, no header, half a header, half a body; more of each than there is room for."""
    head = f"POST {SECRET_PATH} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    openings = (b"", head.encode(), head.encode() + b"Content-Length: 1000\r\n\r\n{")

    async def check(made: Webhook) -> None:
        async def honest() -> int:
            # On a busy machine its connection can be closed for silence, too.
            with suppress(aiohttp.ClientError):
                return (await made.post(review(job())))[0]
            return 0

        await until(honest, lambda status: status == 200)
        async with AsyncExitStack() as stack:
            for number in range(CONNECTIONS_MAX + 40):
                if number % 8 == 0:
                    _, plain = await asyncio.open_connection("127.0.0.1", made.port)
                    stack.callback(plain.close)
                _, writer = await made.open()
                stack.callback(writer.close)
                writer.write(openings[number % 3])
            await until(honest, lambda status: status in (200, 503))
            await until(lambda: len(os.listdir(f"/proc/{made.pid}/fd")), lambda n: n <= 40)
            await until(honest, lambda status: status == 200)

    served(tmp_path, check, silence_seconds=1.0)


def test_refusals_of_one_namespace_and_clients_that_leave_write_few_lines(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    head = f"POST {SECRET_PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{{".encode()

    async def check(made: Webhook) -> None:
        bad = review({**job(), "spec": {}}, namespace="team")
        for _ in range(3 * NAMESPACE.lines_a_minute):
            assert not (await made.post(bad))[1]["response"]["allowed"]
            _, writer = await made.open()
            writer.write(head)
            await writer.drain()
            writer.transport.abort()
        assert (await made.post(review(job())))[0] == 200

    served(tmp_path, check)
    lines = capfd.readouterr().err.splitlines()
    assert 1 <= len([line for line in lines if "job refused" in line]) <= NAMESPACE.lines_a_minute
    assert not [line for line in lines if "Traceback" in line or "ERROR" in line]


def test_reviews_beyond_the_limit_are_refused_at_once(tmp_path: Path) -> None:
    head = f"POST {SECRET_PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{{".encode()

    async def check(made: Webhook) -> None:
        async with AsyncExitStack() as stack:
            for _ in range(REVIEWS_MAX):
                _, writer = await made.open()
                stack.callback(writer.close)
                writer.write(head)
                await writer.drain()
            await until(lambda: made.post(review(job())), lambda answer: answer[0] == 503)
            assert (await made.post(review(job())))[0] == 503

    served(tmp_path, check)


def test_a_process_that_ends_is_started_again_and_none_outlives_the_operator(
    tmp_path: Path,
) -> None:
    pids: list[int] = []

    async def check(made: Webhook) -> None:
        await made.post(review(job()))
        pids.append(made.pid)
        os.kill(made.pid, signal.SIGKILL)
        assert (await made.post(review(job())))[0] == 200
        pids.append(made.pid)

    served(tmp_path, check)
    assert len(set(pids)) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_the_path_is_told_to_the_api_server_alone() -> None:
    for options in (WebhookOptions(), WebhookOptions(service=("ns", "hook"))):
        client = configuration(options, 9443, b"", SECRET_PATH)["webhooks"][0]["clientConfig"]
        found = client.get("url") or client["service"]["path"]
        assert found.endswith(SECRET_PATH)
