"""The page's server: who gets in, what every answer carries, streams."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from tests.watching import PATIENCE_SECONDS
from unbroken.cli.page.access import Access
from unbroken.cli.page.entrance import LinkEntrance, Source
from unbroken.cli.page.logs import LogQuery
from unbroken.cli.page.orders import Order
from unbroken.cli.page.server import HEADERS, PageServer, built_files
from unbroken.cli.page.turns import Clock, Turns
from unbroken.errors import SpecError, WorldError

NOW = 1_800_000_000.0


@dataclass
class Site:
    """A server whose contents and time a test sets."""

    contents: dict[tuple[str, ...], Any] = field(default_factory=dict)
    access: Access = field(default_factory=lambda: Access("key"))
    seconds: float = 0.0
    cost: float = 0.0
    """Seconds of each reading."""
    reads: int = 0
    port: int = 0
    ticks: asyncio.Queue[None] = field(default_factory=asyncio.Queue)
    queries: list[LogQuery] = field(default_factory=list)
    orders: list[Order] = field(default_factory=list)
    answer: Exception | None = None
    """The error of each order; None: it is carried out."""

    async def read(self, path: tuple[str, ...]) -> dict[str, Any]:
        self.reads += 1
        self.seconds += self.cost
        found = self.contents.get(path, SpecError(f"no page {'/'.join(path)}"))
        if isinstance(found, Exception):
            raise found
        return dict(found)

    async def text(self, namespace: str, name: str, number: int) -> str:
        return f"story of {namespace}/{name} {number}\n"

    async def logs(self, namespace: str, name: str, query: LogQuery) -> dict[str, Any]:
        self.queries.append(query)
        return {"lines": [], "older": None, "notes": []}

    async def act(self, order: Order) -> str:
        self.orders.append(order)
        if self.answer is not None:
            raise self.answer
        return "train: restart requested"

    async def pause(self, seconds: float) -> None:
        await self.ticks.get()

    def later(self) -> None:
        """Let a minute pass, and wake one stream."""
        self.seconds += 60.0
        self.ticks.put_nowait(None)

    @property
    def cookie(self) -> dict[str, str]:
        return {"Cookie": f"unbroken={self.access.cookie(NOW)}"}

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"


@asynccontextmanager
async def served() -> AsyncIterator[tuple[Site, aiohttp.ClientSession]]:
    site = Site({("jobs",): {"jobs": [], "resumed": []}})
    clock = Clock(lambda: NOW, lambda: site.seconds, site.pause, lambda: site.seconds)
    source = Source(site.read, site.text, site.logs, site.act)
    entrance = LinkEntrance(source, site.access, lambda: NOW, "unbroken")
    server = PageServer(entrance, clock, Turns(clock))
    runner = web.AppRunner(server.application(), access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    place = web.TCPSite(runner, "127.0.0.1", 0)
    await place.start()
    site.port = runner.addresses[0][1]
    jar = aiohttp.DummyCookieJar()
    try:
        async with aiohttp.ClientSession(cookie_jar=jar) as session:
            yield site, session
    finally:
        await runner.cleanup()


async def test_without_a_cookie_nothing_is_told() -> None:
    async with served() as (site, session):
        for path in ("/", "/jobs", "/jobs/default/train", "/?link=", "/?link=1.2.3", "/x"):
            async with session.get(site.url(path), allow_redirects=False) as answer:
                assert answer.status == 401, path
                text = await answer.text()
                assert "unbroken ui" in text
                assert "<script" not in text
        for path in ("/api/page/jobs", "/api/stream/jobs", "/api/text/jobs/a/b/incidents/1"):
            async with session.get(site.url(path)) as answer:
                assert answer.status == 401
                assert "unbroken ui" in (await answer.json())["problem"]
        assert site.reads == 0


async def test_a_link_is_exchanged_for_a_cookie_once() -> None:
    async with served() as (site, session):
        link = site.url(f"/?link={site.access.link_token(NOW)}")
        async with session.get(link, allow_redirects=False) as answer:
            assert answer.status == 303
            assert re.fullmatch("/#key=[0-9a-f]{64}", answer.headers["Location"])
            cookie = answer.headers["Set-Cookie"]
        assert {"HttpOnly", "SameSite=Lax", "Path=/"} <= set(cookie.split("; "))
        sent = {"Cookie": cookie.partition(";")[0]}
        async with session.get(site.url("/"), headers=sent) as answer:
            assert answer.status == 200
            assert await answer.read() == built_files()["index.html"]
        async with session.get(link, allow_redirects=False) as answer:
            assert answer.status == 401
            assert "Set-Cookie" not in answer.headers


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:{port}", 200),
        ("localhost:9999", 200),
        ("LOCALHOST", 200),
        ("[::1]:80", 200),
        ("evil.example:{port}", 421),
        ("127.0.0.1.evil.example", 421),
        ("localhost.evil.example:80", 421),
        ("169.254.169.254", 421),
        ("[::1].evil.example", 421),
        ("", 421),
    ],
)
async def test_another_host_is_refused_even_with_the_cookie(host: str, status: int) -> None:
    async with served() as (site, session):
        headers = {**site.cookie, "Host": host.format(port=site.port)}
        async with session.get(site.url("/api/page/jobs"), headers=headers) as answer:
            assert answer.status == status


@pytest.mark.parametrize("origin", ["cross-site", "same-site"])
async def test_pages_of_other_sites_and_ports_read_nothing(origin: str) -> None:
    async with served() as (site, session):
        headers = {**site.cookie, "Sec-Fetch-Site": origin}
        for path in ("/api/page/jobs", "/api/stream/jobs"):
            async with session.get(site.url(path), headers=headers) as answer:
                assert answer.status == 403
                assert "Access-Control-Allow-Origin" not in answer.headers
        async with session.get(site.url("/jobs"), headers=headers) as answer:
            assert answer.status == 200, "a link in a chat opens the page"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
async def test_nothing_can_be_changed(method: str) -> None:
    async with served() as (site, session):
        for path in ("/", "/api/page/jobs", "/assets/index.js"):
            async with session.request(method, site.url(path), headers=site.cookie) as answer:
                assert answer.status == 405


async def test_every_answer_has_the_headers_that_keep_scripts_and_frames_out() -> None:
    asset = next(name for name in built_files() if name.endswith(".js"))
    async with served() as (site, session):
        paths = ["/", f"/{asset}", "/assets/no.js", "/api/page/jobs", "/api/page/no"]
        paths += ["/api/stream/jobs", "/api/text/jobs/a/b/incidents/1", "/api/text/x"]
        for path in paths:
            for headers in ({}, site.cookie):
                async with session.get(site.url(path), headers=headers) as answer:
                    said = {name: answer.headers.get(name) for name in HEADERS}
                    is_kept = path == f"/{asset}"
                    expected = dict(HEADERS)
                    if is_kept:
                        expected["Cache-Control"] = said["Cache-Control"] or ""
                        assert "immutable" in expected["Cache-Control"]
                    assert said == expected, path
        policy = HEADERS["Content-Security-Policy"]
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy


@pytest.mark.parametrize(
    "path",
    ["/assets/../index.html", "/assets/%2e%2e/ui.json", "/assets/..%2fserver.py", "/assets/a/b"],
)
async def test_only_built_files_are_served(path: str) -> None:
    async with (
        served() as (site, session),
        session.get(site.url(path), headers=site.cookie) as answer,
    ):
        body = await answer.read()
        assert answer.status == 404 or body == built_files()["index.html"]


async def test_errors_are_answers_with_a_bounded_text() -> None:
    async with served() as (site, session):
        site.contents[("jobs", "a", "away")] = WorldError("the API does not answer")
        site.contents[("jobs", "a", "odd")] = SpecError("<script>" * 1000)
        for path, status, text in (
            ("jobs/a/away", 503, "the API does not answer"),
            ("jobs/a/none", 404, "no page jobs/a/none"),
            ("jobs/a/odd", 404, "<script>" * 37 + "<scr"),
        ):
            async with session.get(site.url(f"/api/page/{path}"), headers=site.cookie) as answer:
                assert (answer.status, answer.content_type) == (status, "application/json")
                assert await answer.json() == {"problem": text}


async def test_a_defect_on_one_page_is_logged_and_ends_no_stream(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with served() as (site, session):
        site.contents[("nodes",)] = KeyError("metadata")
        async with session.get(site.url("/api/stream/nodes"), headers=site.cookie) as stream:
            assert "could not be computed" in (await event(stream))["data"]
            site.contents[("nodes",)] = {"nodes": []}
            site.later()
            assert (await event(stream))["event"] == "contents"
        assert "page not computed" in caplog.text
        caplog.clear()


async def event(stream: aiohttp.ClientResponse) -> dict[str, str]:
    """Read the next event of a stream."""
    text = (await stream.content.readuntil(b"\n\n")).decode()
    lines = (line.partition(": ") for line in text.strip("\n").split("\n"))
    return {name: value for name, _, value in lines}


async def test_a_stream_sends_what_has_changed_and_nothing_else() -> None:
    async with (
        served() as (site, session),
        session.get(site.url("/api/stream/jobs"), headers=site.cookie) as stream,
    ):
        assert stream.content_type == "text/event-stream"
        first = await event(stream)
        assert json.loads(first["data"]) == {"jobs": [], "resumed": []}
        for _ in range(20):
            site.later()  # nothing changes
        assert "data" not in await event(stream), "a comment keeps the connection"
        site.contents[("jobs",)] = {"jobs": ["a\nb\r\u2028"], "resumed": []}
        site.later()
        second = await event(stream)
        while "data" not in second:
            second = await event(stream)
        assert json.loads(second["data"])["jobs"] == ["a\nb\r\u2028"]
        assert second["id"] != first["id"]


async def test_a_stream_that_is_opened_again_continues_after_what_was_seen() -> None:
    async with served() as (site, session):
        async with session.get(site.url("/api/stream/jobs"), headers=site.cookie) as stream:
            seen = (await event(stream))["id"]
        site.contents[("jobs",)] = {"jobs": ["new"], "resumed": []}
        site.seconds += 60.0
        headers = {**site.cookie, "Last-Event-ID": seen}
        async with session.get(site.url("/api/stream/jobs"), headers=headers) as stream:
            site.later()
            site.later()  # the first stream may not have ended yet
            assert json.loads((await event(stream))["data"])["jobs"] == ["new"]


async def test_viewers_of_a_page_share_one_computation() -> None:
    async with served() as (site, session):
        for _ in range(10):
            async with session.get(site.url("/api/page/jobs"), headers=site.cookie) as answer:
                assert answer.status == 200
        assert site.reads == 1


@pytest.mark.parametrize("encoding", ["gzip, deflate, br", "identity"])
async def test_a_stream_is_the_same_compressed_or_not(encoding: str) -> None:
    async with served() as (site, session):
        site.contents["jobs",] = {"jobs": ["a" * 10_000]}
        headers = {**site.cookie, "Accept-Encoding": encoding}
        async with session.get(site.url("/api/stream/jobs"), headers=headers) as stream:
            assert stream.headers.get("Content-Encoding") == (
                "gzip" if "gzip" in encoding else None
            )
            assert json.loads((await event(stream))["data"]) == {"jobs": ["a" * 10_000]}
            site.contents["jobs",] = {"jobs": ["b"]}
            site.later()
            assert json.loads((await event(stream))["data"]) == {"jobs": ["b"]}
            for _ in range(20):
                site.later()
            assert "data" not in await event(stream)


async def test_one_who_opens_a_page_that_others_follow_has_what_they_have() -> None:
    async with served() as (site, session):
        url = site.url("/api/stream/jobs")
        async with session.get(url, headers=site.cookie) as one:
            seen = await event(one)
            site.contents["jobs",] = {"jobs": ["new"]}
            site.seconds += 60.0
            async with session.get(url, headers=site.cookie) as other:
                assert await event(other) == seen
                assert site.reads == 1


async def test_a_new_page_waits_for_no_turn() -> None:
    async with served() as (site, session):
        site.cost = 10.0
        for name in ("a", "b"):
            site.contents["jobs", "x", name] = {"name": name}
            async with session.get(
                site.url(f"/api/stream/jobs/x/{name}"), headers=site.cookie
            ) as one:
                assert json.loads((await event(one))["data"]) == {"name": name}
        assert site.seconds == 20.0


async def test_a_page_is_there_soon_after_a_cluster_that_kept_it_waiting_returns() -> None:
    async with served() as (site, session):
        url, found = site.url("/api/page/jobs"), site.contents["jobs",]
        site.cost, site.contents["jobs",] = 30.0, WorldError("no answer")
        for _ in range(2):
            async with session.get(url, headers=site.cookie) as answer:
                assert answer.status == 503
        assert site.reads == 1
        site.cost, site.contents["jobs",] = 0.0, found
        site.seconds += 2.0
        async with session.get(url, headers=site.cookie) as answer:
            assert answer.status == 200


async def test_pages_that_nobody_has_are_not_kept_for_ever() -> None:
    async with served() as (site, session):
        for number in range(100):
            path = site.url(f"/api/page/jobs/x/{number}")
            async with session.get(path, headers=site.cookie) as answer:
                assert answer.status == 404
        async with session.get(site.url("/api/page/jobs"), headers=site.cookie) as answer:
            assert answer.status == 200


async def test_the_story_of_an_incident_is_a_file() -> None:
    async with served() as (site, session):
        path = "/api/text/jobs/team/train/incidents/3"
        async with session.get(site.url(path), headers=site.cookie) as answer:
            assert await answer.text() == "story of team/train 3\n"
            assert answer.content_type == "text/plain"
            said = answer.headers["Content-Disposition"]
            assert said == 'attachment; filename="team-train-incident-3.txt"'


def test_the_built_page_stays_small() -> None:
    assert sum(len(gzip.compress(body)) for body in built_files().values()) < 300_000


@pytest.mark.parametrize("path", ["/api/stream/jobs", "/api/page/jobs", "/", "/healthz"])
async def test_nothing_follows_the_answer_to_a_request_for_its_head(path: str) -> None:
    async with served() as (site, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
        headers = {"Host": f"127.0.0.1:{site.port}", **site.cookie}
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        for method, asked in (("HEAD", path), ("GET", "/healthz")):
            writer.write(f"{method} {asked} HTTP/1.1\r\n{lines}\r\n".encode())
            async with asyncio.timeout(PATIENCE_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 "), "an answer begins where the last one ended"
        writer.close()
