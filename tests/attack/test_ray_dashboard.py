"""A user's program in place of Ray's dashboard costs the operator a bounded part.

In the attacks, pings or empty messages in one log took the operator's whole processor, 4,000 jobs
its descriptors, unfinished messages 600 MB of its memory, and new jobs in each answer wrote 4 MB of
log a second.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from tests import loopback
from tests.watching import Watcher, running
from unbroken.agent_http.sessions import plain_session, small_socket
from unbroken.budget import Budget, Limits
from unbroken.core.auto_resume import Say
from unbroken.core.ray_resume import DashboardAnswer, Head, StopHung
from unbroken.errors import PeerError
from unbroken.kube.cache import Key
from unbroken.kube.events import BURST, EventRecorder
from unbroken.operator.kinds import job_class
from unbroken.operator.resume import ray_dashboard
from unbroken.operator.resume.jobs import Orders
from unbroken.operator.resume.ray_dashboard import (
    COMMAS_MAX,
    DASHBOARD,
    JOBS_LISTED_MAX,
    JOBS_MAX,
    LIST_BYTES_MAX,
    NAMESPACE,
    Budgets,
    ConnectionUse,
    DashboardAddress,
    answer_of,
    rows_of,
)
from unbroken.operator.resume.ray_logs import PIECE_CHARACTERS, RayLogs
from unbroken.spec.job.types import LogRule
from unbroken.spec.job_kinds import RAY_CLUSTER

HEAD = Head("ray-head", "h0")
RULE = LogRule(name="Steps", log_pattern=".*step=")
FLOOD = 100
"""Messages of a small flood."""


# --- messages of a log


class Charged(Budget):
    """A budget that notes each charge."""

    def __init__(self, hold_seconds: float = 0.0) -> None:
        super().__init__("it", DASHBOARD, 0.0)
        self.hold_seconds = hold_seconds
        """Seconds that the stream of a log is held up after each piece."""
        self.sizes, self.reads = Watcher[int](), Watcher[float]()

    def spend(self, size: float, work: float, now: float, messages: float = 1.0) -> float:
        """Note the charge."""
        if messages:
            self.sizes(int(size))
        else:
            self.reads(work)
        delay = super().spend(size, work, now, messages)
        return delay if messages else self.hold_seconds


@asynccontextmanager
async def serving(routes: list[web.RouteDef]) -> AsyncIterator[str]:
    """Serve at a free port of this machine; its address."""
    app = web.Application()
    app.add_routes(routes)
    async with loopback.serving(app) as port:
        yield f"http://127.0.0.1:{port}"


@asynccontextmanager
async def flooding(kind: aiohttp.WSMsgType, payload: bytes) -> AsyncIterator[str]:
    """Serve a log that is nothing but messages of one kind; its address."""

    async def tail(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        for _ in range(FLOOD):
            await socket.send_frame(payload, kind)
        await socket.receive()
        return socket

    async with serving([web.get("/api/jobs/{id}/logs/tail", tail)]) as url:
        yield url


@pytest.mark.parametrize(
    ("kind", "payload"),
    [
        (aiohttp.WSMsgType.PING, b""),
        (aiohttp.WSMsgType.PONG, b"a"),
        (aiohttp.WSMsgType.TEXT, b""),
        (aiohttp.WSMsgType.TEXT, b"a"),
    ],
)
async def test_each_message_is_charged(kind: aiohttp.WSMsgType, payload: bytes) -> None:
    budget = Charged()
    async with flooding(kind, payload) as url, plain_session() as session:
        logs: RayLogs[str] = RayLogs(session, lambda _: None)
        async with running(logs.run()):
            logs.want("a", HEAD, DashboardAddress(url), ["one"], (RULE,), budget)
            await budget.sizes.until(lambda sizes: len(sizes) >= FLOOD)
    assert budget.sizes.seen == [len(payload)] * FLOOD


async def test_a_long_message_gives_way_after_each_piece() -> None:
    budget = Charged()
    async with flooding(aiohttp.WSMsgType.TEXT, b"a" * 5000) as url, plain_session() as session:
        logs: RayLogs[str] = RayLogs(session, lambda _: None)
        async with running(logs.run()):
            logs.want("a", HEAD, DashboardAddress(url), ["one"], (RULE,), budget)
            await budget.sizes.until(lambda sizes: len(sizes) >= FLOOD)
    assert set(budget.sizes.seen) == {PIECE_CHARACTERS}
    assert len(budget.reads.seen) >= (FLOOD - 1) * 4


async def test_fragments_without_end_are_charged_and_hold_up_no_other() -> None:
    bad, good = Charged(hold_seconds=3600.0), Charged()

    async def tail(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        assert request.transport is not None
        # They come in several pieces: the receive buffer is smaller.
        request.transport.write(b"\x01\x00" + b"\x00\x00" * 512 * 1024)
        await asyncio.Event().wait()
        return socket

    routes = [web.get("/api/jobs/{id}/logs/tail", tail)]
    flood = flooding(aiohttp.WSMsgType.TEXT, b"a")
    async with (
        serving(routes) as url,
        flood as other,
        plain_session(make_socket=small_socket) as session,
    ):
        logs: RayLogs[str] = RayLogs(session, lambda _: None)
        async with running(logs.run()):
            logs.want("bad", HEAD, DashboardAddress(url), ["one"], (RULE,), bad)
            await bad.reads.until(bool)
            logs.want("good", HEAD, DashboardAddress(other), ["one"], (RULE,), good)
            await good.sizes.until(lambda sizes: len(sizes) >= FLOOD)
    assert len(bad.reads.seen) == 1
    assert bad.sizes.seen == []


# --- connections and the operator's log


def test_no_namespace_takes_the_connections_of_others() -> None:
    budgets = Budgets(0.0)
    bad = [budgets.of("bad", number, 0.0) for number in range(10)]
    good = budgets.of("good", "ray", 0.0)
    with ExitStack() as opened:
        for _ in range(DASHBOARD.connections[ConnectionUse.LOG]):
            opened.enter_context(bad[0].connection(ConnectionUse.LOG))
        with pytest.raises(PeerError, match="its head has 20 connections for each log"):
            opened.enter_context(bad[0].connection(ConnectionUse.LOG))
        for number in range(
            DASHBOARD.connections[ConnectionUse.LOG], NAMESPACE.connections[ConnectionUse.LOG]
        ):
            opened.enter_context(bad[1 + number % 9].connection(ConnectionUse.LOG))
        with pytest.raises(PeerError, match="namespace bad has 100 connections"):
            opened.enter_context(bad[9].connection(ConnectionUse.LOG))
        opened.enter_context(bad[9].connection(ConnectionUse.QUESTION))
        opened.enter_context(good.connection(ConnectionUse.LOG))
    with bad[0].connection(ConnectionUse.LOG), bad[9].connection(ConnectionUse.LOG):
        assert budgets.of("bad", 0, 0.0) is bad[0]


def test_all_namespaces_together_have_a_limit() -> None:
    budgets = Budgets(0.0)
    every = [budgets.of(f"n{number // 5}", number, 0.0) for number in range(30)]
    with ExitStack() as opened, pytest.raises(PeerError, match="the operator has 400"):
        for budget in every:
            for _ in range(DASHBOARD.connections[ConnectionUse.LOG]):
                opened.enter_context(budget.connection(ConnectionUse.LOG))


def test_a_dashboard_over_its_rate_waits_and_another_does_not() -> None:
    budgets = Budgets(0.0)
    bad, good = budgets.of("a", "bad", 0.0), budgets.of("a", "good", 0.0)
    assert all(bad.spend(1, 0.0, 0.0) == 0.0 for _ in range(1000))
    assert max(bad.spend(1, 0.0, 0.0) for _ in range(4000)) > 0.5
    assert good.spend(1, 0.0, 0.0) == 0.0
    assert bad.spend(1, 0.0, 100.0) == 0.0
    assert good.spend(64 * 1024 * 1024, 0.0, 100.0) > 1.0
    assert bad.spend(1, 10.0, 200.0) > 1.0


def test_lines_of_the_log_are_counted() -> None:
    budgets = Budgets(0.0)
    every = [budgets.of("bad", number, 0.0) for number in range(20)]
    lines = sum(budget.may_log(float(second)) for second in range(600) for budget in every)
    assert lines == 10 * NAMESPACE.lines_a_minute
    assert budgets.of("good", "ray", 600.0).may_log(600.0)


async def test_events_that_are_dropped_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    unused: Any = None
    orders = Orders(unused, EventRecorder(unused, "test"), unused, 0.0)
    metadata: Any = {"name": "ray", "namespace": "default", "uid": "u0"}
    job = job_class(RAY_CLUSTER)(metadata=metadata)
    for number in range(1000):
        await orders.carry_out(RAY_CLUSTER, job, Say("AutoResumeImpossible", f"job {number}"))
    assert len(caplog.records) == BURST


# --- the list of jobs


def test_of_thousands_of_jobs_only_those_that_are_kept_have_their_log_read() -> None:
    rows = [{"type": "SUBMISSION", "status": "RUNNING", "submission_id": f"j{number}"}
            for number in range(4000)]  # fmt: skip
    listed = rows_of(json.dumps(rows).encode())
    assert listed is not None
    found = answer_of(HEAD, listed)
    assert len(found.ids) == 4000
    assert len(found.begun) == JOBS_MAX
    assert found.begun == {job.id for job in found.running}


@pytest.mark.parametrize("piece", [b"[]", b"{}", b"1", b'{"type":""}'])
@pytest.mark.parametrize("place", [b"[%s]", b'[{"type":"SUBMISSION","runtime_env":[%s]}]'])
def test_a_list_with_too_many_values_is_not_decoded(piece: bytes, place: bytes) -> None:
    body = place % b",".join([piece] * (COMMAS_MAX + 2))
    assert len(body) < LIST_BYTES_MAX
    for long in (body, b"[%s]" % b",".join([piece] * (JOBS_LISTED_MAX + 1))):
        with pytest.raises(PeerError, match="its list"):
            rows_of(long)


@pytest.mark.parametrize("body", [b"", b"{}", b"[" * 4_000_000, b'{"":' * 1_000_000, b"[1,", b"7"])
def test_what_is_no_list_is_not_read(body: bytes) -> None:
    with pytest.raises(PeerError, match="no list of jobs"):
        rows_of(body)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b" " * (LIST_BYTES_MAX + 1), "more than 4194304 bytes"),
        (b"[%s]" % (b"," * (COMMAS_MAX + 1)), "more than 262144 commas"),
        (b"{}", "no list of jobs"),
    ],
)
async def test_a_list_that_is_refused_is_named_once(
    body: bytes, why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ray_dashboard, "SILENCE_SECONDS", 0.0)
    listed, unused = Watcher[str](), Any

    async def jobs(_: web.Request) -> web.Response:
        listed("")
        return web.Response(body=body)

    async with serving([web.get("/api/jobs/", jobs)]) as url, plain_session() as session:
        dashboards = ray_dashboard.RayDashboards(unused, session, lambda _: None, lambda *_: None)
        key = Key("team", "ray")
        budget = Budget(
            "its head", Limits(connections=DASHBOARD.connections, lines_a_minute=2), 0.0
        )
        dashboards.want(key, HEAD, DashboardAddress(url), budget)
        async with running(dashboards.run()):
            await listed.until(lambda seen: len(seen) >= 4)
    (line,) = (one.getMessage() for one in caplog.records if one.levelname == "WARNING")
    assert line.startswith("list of a dashboard not read")
    assert why in line


def test_a_long_request_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[int] = []
    real = msgspec.json.decode

    def decode(value: Any, **more: Any) -> Any:
        if more["type"] is not ray_dashboard._DashboardRow:
            decoded.append(memoryview(value).nbytes)
        return real(value, **more)

    lists: Any = {"a": [[]] * (COMMAS_MAX // 2)}
    row = {"type": "SUBMISSION", "status": "RUNNING", "submission_id": "a", "entrypoint": "x"}
    rows = [msgspec.Raw(json.dumps({**row, "runtime_env": lists}).encode())]
    monkeypatch.setattr(msgspec.json, "decode", decode)
    found = answer_of(HEAD, rows)
    assert decoded == []
    assert "bytes; at most" in found.impossible["a"]


# --- orders to a dashboard


@dataclass
class Asking:
    """A dashboard that is asked, with the calls that reached it."""

    want: Callable[[], DashboardAnswer | None]
    answers: Watcher[Key]
    listed: Watcher[str]
    packages: Watcher[str]


@asynccontextmanager
async def asking(packages: int, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Asking]:
    """Ask a dashboard that never says whether it has a package of its only job."""
    monkeypatch.setattr(ray_dashboard, "SILENCE_SECONDS", 0.0)
    environment = {"py_modules": [f"gcs://{number}.zip" for number in range(packages)]}
    job = {"type": "SUBMISSION", "status": "RUNNING", "submission_id": "a", "entrypoint": "x"}
    listed, package = Watcher[str](), Watcher[str]()

    async def jobs(_: web.Request) -> web.Response:
        listed("")
        return web.json_response([{**job, "runtime_env": environment}])

    async def has(request: web.Request) -> web.Response:
        package(request.path)
        await asyncio.Event().wait()
        raise AssertionError

    unused: Any = None
    answers = Watcher[Key]()
    routes = [web.get("/api/jobs/", jobs), web.get("/api/packages/gcs/{name}", has)]
    async with serving(routes) as url, plain_session() as session:
        dashboards = ray_dashboard.RayDashboards(unused, session, answers, lambda *_: None)
        key = Key("team", "ray")
        budget = Budgets(0.0).of("team", key, 0.0)

        def want() -> DashboardAnswer | None:
            return dashboards.want(key, HEAD, DashboardAddress(url), budget)

        async with running(dashboards.run()):
            want()
            await answers.until(bool)
            found = want()
            assert found is not None
            dashboards.stop(key, StopHung(HEAD, found.running[0], "a-attempt-1"))
            yield Asking(want, answers, listed, package)


async def test_code_in_many_packages_is_not_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async with asking(ray_dashboard.PACKAGES_MAX + 1, monkeypatch) as it:
        await it.answers.until(lambda seen: len(seen) == 2)
        found = it.want()
        assert found is not None
        assert "17 packages; at most 16" in found.impossible["a-attempt-1"]
        assert it.packages.seen == []


async def test_a_dashboard_that_keeps_its_turn_loses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_dashboard, "TURN_SECONDS", 0.2)
    async with asking(16, monkeypatch) as it:
        await it.packages.until(lambda seen: len(seen) >= 2)
        # The order is left for the next turn.
        assert set(it.packages.seen) == {"/api/packages/gcs/0.zip"}
        assert len(it.listed.seen) >= 3
