"""Orders: who may give one, and what is refused before anything is done."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import aiohttp
import pytest

from tests.cli.page.test_server import NOW, Site, served
from unbroken.cli.page.entrance import KEY_HEADER
from unbroken.cli.page.orders import (
    ORDER_BYTES_MAX,
    ClearNode,
    DrainNode,
    Order,
    ReplaceNode,
    RestartJob,
    SetDetector,
    read_order,
)
from unbroken.errors import SpecError, WorldError
from unbroken.kube.errors import Forbidden
from unbroken.spec.job.detectors import Detector, Mode

ORDER = {"action": "restart", "namespace": "default", "name": "train"}
JSON = {"Content-Type": "application/json"}


async def key_of(site: Site, session: aiohttp.ClientSession) -> dict[str, str]:
    """The headers of a page that was opened by a link."""
    link = site.url(f"/?link={site.access.link_token(NOW)}")
    async with session.get(link, allow_redirects=False) as answer:
        key = answer.headers["Location"].partition("#key=")[2]
    own = {"Origin": f"http://127.0.0.1:{site.port}", "Sec-Fetch-Site": "same-origin"}
    return {**site.cookie, **own, **JSON, KEY_HEADER: key}


async def send(
    site: Site,
    session: aiohttp.ClientSession,
    headers: Mapping[str, str],
    body: bytes | None = None,
) -> tuple[int, dict[str, Any]]:
    """Status and body of the answer to an order."""
    data = json.dumps(ORDER).encode() if body is None else body
    async with session.post(site.url("/api/orders"), data=data, headers=headers) as answer:
        assert answer.content_type == "application/json"
        assert answer.headers["Cache-Control"] == "no-store"
        return answer.status, await answer.json()


async def test_an_order_of_the_own_page_is_carried_out() -> None:
    async with served() as (site, session):
        headers = await key_of(site, session)
        status, value = await send(site, session, headers)
        assert (status, value) == (200, {"result": "train: restart requested"})
        assert site.orders == [RestartJob(namespace="default", name="train")]
        older = {name: value for name, value in headers.items() if name != "Sec-Fetch-Site"}
        assert (await send(site, session, older))[0] == 200, "a browser of before 2023"
        tunnel = {"Host": "localhost:9999", "Origin": "http://localhost:9999"}
        assert (await send(site, session, headers | tunnel))[0] == 200, "through a tunnel"


@pytest.mark.parametrize(
    ("changed", "status"),
    [
        ({"Cookie": ""}, 401),
        ({"Cookie": "unbroken=1.2"}, 401),
        ({KEY_HEADER: ""}, 403),
        ({KEY_HEADER: "0" * 64}, 403),
        ({KEY_HEADER: "\u00e9"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Sec-Fetch-Site": "none"}, 403),
        ({"Origin": ""}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://127.0.0.1"}, 403),
        ({"Origin": "http://127.0.0.1:1"}, 403),
        ({"Origin": "http://localhost:{port}"}, 403),
        ({"Origin": "http://evil.example:{port}"}, 403),
        ({"Origin": "http://x@127.0.0.1:{port}"}, 403),
        ({"Origin": "file://127.0.0.1:{port}"}, 403),
        ({"Origin": "http://[", "Host": "127.0.0.1:{port}"}, 403),
        ({"Host": "evil.example", "Origin": "http://evil.example"}, 421),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Content-Type": "multipart/form-data; boundary=x"}, 415),
    ],
)
async def test_a_forged_order_does_nothing(changed: dict[str, str], status: int) -> None:
    async with served() as (site, session):
        made = {name: value.format(port=site.port) for name, value in changed.items()}
        headers = {**await key_of(site, session), **made}
        found, value = await send(site, session, headers)
        assert found == status
        assert value["problem"]
        assert site.orders == []


async def test_a_cookie_alone_lets_nobody_act() -> None:
    """Check what a user can do who has listened at another port and got the cookie."""
    async with served() as (site, session):
        own = {"Origin": f"http://127.0.0.1:{site.port}", **JSON, **site.cookie}
        status, value = await send(site, session, own)
        assert status == 403
        assert "run `unbroken ui` and open its link" in value["problem"]
        async with session.get(site.url("/"), headers=site.cookie) as answer:
            assert "key" not in answer.headers.get("Location", "")


async def test_the_key_ends_with_the_server_and_is_for_who_has_a_link() -> None:
    async with served() as (site, session):
        headers = await key_of(site, session)
    async with served() as (after, session):
        own = {"Origin": f"http://127.0.0.1:{after.port}"}
        assert (await send(after, session, headers | own))[0] == 403
        used = after.url(f"/?link={after.access.link_token(NOW)}")
        for expected in ("/#key=", "/"):
            async with session.get(used, headers=after.cookie, allow_redirects=False) as answer:
                location = answer.headers["Location"]
                assert location == expected or (expected != "/" and location.startswith(expected))
        assert after.orders == []


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b"\xff\xfe",
        b'{"action":',
        b"[" * ORDER_BYTES_MAX,
        b'{"action":"explode","namespace":"default","name":"train"}',
        b'{"action":["restart"],"namespace":"default","name":"train"}',
        b'{"action":"restart","namespace":"default"}',
        b'{"action":"restart","namespace":"default","name":"train","force":true}',
        b'{"action":"restart","namespace":"default","name":7}',
        b'{"action":"restart","namespace":"default","name":""}',
        b'{"action":"restart","namespace":"default","name":"../../secrets/x"}',
        b'{"action":"restart","namespace":"default","name":"a%2fb"}',
        b'{"action":"restart","namespace":"default","name":"train?x=1"}',
        b'{"action":"restart","namespace":"default","name":"train\\n"}',
        b'{"action":"restart","namespace":"<b>","name":"train"}',
        b'{"action":"restart","namespace":"default","name":"' + b"a" * 254 + b'"}',
    ],
)
async def test_a_body_that_is_no_order_is_refused_with_the_reason(body: bytes) -> None:
    async with served() as (site, session):
        status, value = await send(site, session, await key_of(site, session), body)
        assert status == 400
        assert value["problem"].startswith("this is no order: ")
        assert site.orders == []


NODE = {"name": "node-1"}


@pytest.mark.parametrize(
    ("given", "order"),
    [
        ({"action": "drain", **NODE}, DrainNode(name="node-1")),
        ({"action": "drain", **NODE, "deadline": "9m"}, DrainNode(name="node-1", deadline="9m")),
        ({"action": "replace", **NODE}, ReplaceNode(name="node-1")),
        ({"action": "clear", **NODE, "why": "ok"}, ClearNode(name="node-1", why="ok")),
        (
            {**ORDER, "action": "detector", "detector": "spike", "mode": "act"},
            SetDetector(namespace="default", name="train", detector=Detector.SPIKE, mode=Mode.ACT),
        ),
        ({"action": "clear", **NODE, "why": " \t"}, None),
        ({"action": "clear", **NODE, "why": "x" * 501}, None),
        ({"action": "clear", **NODE}, None),
        ({"action": "drain", **NODE, "namespace": "default"}, None),
        ({"action": "drain", **NODE, "deadline": "9" * 21}, None),
        ({"action": "reset", "name": "../pods/x"}, None),
        ({**ORDER, "action": "detector", "detector": "spike;x", "mode": "act"}, None),
        ({**ORDER, "action": "detector", "detector": "spike", "mode": "act; nan=off"}, None),
    ],
)
def test_orders_about_nodes_and_detectors_are_typed(
    given: dict[str, Any], order: Order | None
) -> None:
    if order is None:
        with pytest.raises(SpecError):
            read_order(json.dumps(given).encode())
    else:
        assert read_order(json.dumps(given).encode()) == order


async def test_a_long_body_is_not_read() -> None:
    async with served() as (site, session):
        body = json.dumps(ORDER).encode() + b" " * ORDER_BYTES_MAX
        status, value = await send(site, session, await key_of(site, session), body)
        assert (status, value) == (413, {"problem": "Request Entity Too Large"})
        assert site.orders == []


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "PATCH", "DELETE", "OPTIONS"])
async def test_only_post_gives_an_order(method: str) -> None:
    async with served() as (site, session):
        headers, data = await key_of(site, session), json.dumps(ORDER).encode()
        url = site.url("/api/orders")
        async with session.request(method, url, data=data, headers=headers) as answer:
            assert answer.status == (200 if method in ("GET", "HEAD") else 405)
            assert "Access-Control-Allow-Origin" not in answer.headers
        assert site.orders == []


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (SpecError("job train has ended (Failed)"), 409),
        (Forbidden('User "ann" cannot patch resource', 403, "Forbidden"), 403),
        (WorldError("the API does not answer"), 503),
    ],
)
async def test_a_refusal_is_told_as_it_is(error: Exception, status: int) -> None:
    async with served() as (site, session):
        site.answer = error
        answer = await send(site, session, await key_of(site, session))
        assert answer == (status, {"problem": str(error)})
