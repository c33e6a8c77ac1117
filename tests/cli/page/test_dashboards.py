"""The page of a dashboard, of a server that answers as Prometheus does, or does not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from tests.apiservers import free_port
from tests.cli_calls import assert_fits
from unbroken.cli.page import dashboards, prometheus
from unbroken.cli.page.dashboards import (
    KEPT_SECONDS,
    QUERIES_AT_ONCE,
    Dashboards,
    dashboard_page,
)
from unbroken.cli.page.prometheus import read_prometheus_address
from unbroken.errors import SpecError, WorldError
from unbroken.observe.dashboards import DASHBOARDS

NOW = 1_800_000_007.0
HOSTILE = "<script>window.broken='into'</script>"
Answer = Callable[[web.Request, dict[str, str]], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def served(answer: Answer) -> AsyncIterator[str]:
    """Serve the two queries of the HTTP API at an address with a path."""

    async def handle(request: web.Request) -> web.StreamResponse:
        form = await request.post()
        return await answer(request, {name: str(value) for name, value in form.items()})

    app = web.Application()
    for name in ("query", "query_range"):
        app.router.add_post(f"/metrics/api/v1/{name}", handle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/metrics"
    finally:
        await runner.cleanup()


def success(*series: dict[str, object]) -> web.Response:
    """An answer with series, as Prometheus gives it."""
    data = {"resultType": "matrix", "result": [*series]}
    return web.json_response({"status": "success", "data": data})


async def test_each_panel_has_the_answer_to_its_query() -> None:
    asked: list[tuple[str, dict[str, str]]] = []

    async def answer(request: web.Request, form: dict[str, str]) -> web.StreamResponse:
        asked.append((request.path.rpartition("/")[2], form))
        if "start" in form:
            values = [[float(form["end"]), "0.5"], [float(form["start"]), "NaN"]]
            return success({"metric": {"namespace": "a", "job": HOSTILE}, "values": values})
        return success({"metric": {"state": HOSTILE}, "value": [NOW, "3"]})

    async with served(answer) as address:
        page = await dashboard_page(address, "", "", NOW)
    assert_fits(json.loads(json.dumps(page)), ["page", "dashboard"])
    board = DASHBOARDS["training"]
    assert [one["title"] for one in page["panels"]] == [one.title for one in board.panels]
    assert len(asked) == len(board.panels)
    assert {"query", "query_range"} == {path for path, _ in asked}
    jobs, goodput = page["panels"][:2]
    assert jobs["series"] == [{"name": HOSTILE, "newest": 3.0, "values": ()}]
    (line,) = goodput["series"]
    assert (line["name"], line["newest"]) == (f"a/{HOSTILE}", 0.5)
    assert line["values"][-1] == 0.5
    assert set(line["values"][:-1]) == {None}
    assert page["times"][-1] == 1_800_000_000


async def test_the_browser_chooses_from_the_tables_only() -> None:
    for name, span in (("up{}", "1h"), ("training", "1y"), ("training", "1h[5m]"), ("", "x")):
        with pytest.raises(SpecError, match="no such dashboard"):
            await dashboard_page("http://127.0.0.1:1", name, span, NOW)


async def test_without_a_prometheus_the_page_says_how_to_name_one() -> None:
    with pytest.raises(SpecError, match="unbroken up --prometheus"):
        await dashboard_page("", "training", "1h", NOW)


@pytest.mark.parametrize(
    ("text", "status", "problem"),
    [
        (json.dumps({"status": "error", "error": HOSTILE}), 422, HOSTILE),
        ("<html>" + HOSTILE, 200, "HTTP 200 in another form"),
        ('{"status":"success","data":{"result":[1]}}', 200, "in another form"),
        ('{"status":"success","data":{"result":[{"metric":{"a":1}}]}}', 200, "in another form"),
        ("[" * 100_000, 200, "in another form"),
        ('"' + "x" * (prometheus.BYTES_MAX + 1), 200, "more than 4 MiB"),
    ],
)
async def test_an_answer_without_data_is_the_problem_of_its_panel(
    text: str, status: int, problem: str
) -> None:
    async def answer(request: web.Request, form: dict[str, str]) -> web.StreamResponse:
        if form["query"] != "sum by (state) (unbroken_jobs)":
            return success()
        return web.Response(text=text, status=status)

    async with served(answer) as address:
        page = await dashboard_page(address, "training", "1h", NOW)
    assert problem in page["panels"][0]["problem"]
    assert len(page["panels"][0]["problem"]) < 300
    assert [one["problem"] for one in page["panels"][1:]] == [""] * (len(page["panels"]) - 1)


async def test_a_redirect_is_not_followed() -> None:
    async def answer(request: web.Request, form: dict[str, str]) -> web.StreamResponse:
        return web.Response(status=307, headers={"Location": "http://127.0.0.1:1/"})

    async with served(answer) as address:
        page = await dashboard_page(address, "training", "1h", NOW)
    assert all("redirect" in one["problem"] for one in page["panels"])


async def test_a_slow_query_is_the_problem_of_its_panel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboards, "PAGE_SECONDS", 2.0)
    never = asyncio.Event()

    async def answer(request: web.Request, form: dict[str, str]) -> web.StreamResponse:
        if form["query"].startswith("sum by (state)"):
            await never.wait()
        return success()

    async with served(answer) as address:
        page = await dashboard_page(address, "training", "1h", NOW)
    assert page["panels"][0]["problem"] == "no answer within 2 s"


async def test_a_dashboard_is_asked_for_once_for_all_who_look() -> None:
    asked = 0

    async def answer(request: web.Request, form: dict[str, str]) -> web.StreamResponse:
        nonlocal asked
        asked += 1
        return success()

    async with served(answer) as address:
        shown = Dashboards(address)
        first = await shown.page("training", "1h", NOW)
        assert await shown.page("training", "1h", NOW + KEPT_SECONDS - 1) is first
        assert asked == len(DASHBOARDS["training"].panels)
        assert await shown.page("training", "1h", NOW - 1) is not first, "the clock was set back"
        assert await shown.page("training", "1h", NOW + KEPT_SECONDS) is not first
    assert asked == 3 * len(DASHBOARDS["training"].panels)


async def test_queries_are_asked_a_few_at_a_time() -> None:
    panels = len(DASHBOARDS["hardware"].panels)
    together = asyncio.Barrier(QUERIES_AT_ONCE)
    open_now, most, begun = 0, 0, 0

    async def answer(request: web.Request, form: dict[str, str]) -> web.StreamResponse:
        nonlocal open_now, most, begun
        open_now, begun = open_now + 1, begun + 1
        most = max(most, open_now)
        if begun <= panels // QUERIES_AT_ONCE * QUERIES_AT_ONCE:
            await together.wait()
        open_now -= 1
        return success()

    async with served(answer) as address:
        await dashboard_page(address, "hardware", "1h", NOW)
    assert most == QUERIES_AT_ONCE


async def test_a_prometheus_that_is_away_is_the_problem_of_the_page() -> None:
    with pytest.raises(WorldError, match="cannot ask Prometheus at http"):
        await dashboard_page(f"http://127.0.0.1:{free_port()}", "training", "1h", NOW)


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "127.0.0.1:9090",
            "ftp://a",
            "http://",
            "http://a:0",
            "http://a:x",
            "http://[",
            "x y",
        ),
        *(
            "http://user:secret@a",
            "http://a?x=1",
            "http://a#b",
            "http://a/ b",
            "http://" + "a" * 3000,
        ),
    ],
)
def test_an_address_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match="--prometheus") as found:
        read_prometheus_address(text)
    assert "secret" not in str(found.value)


def test_an_address_may_have_a_path() -> None:
    assert read_prometheus_address("https://host/prometheus/") == "https://host/prometheus"
    assert read_prometheus_address("http://[::1]:9090") == "http://[::1]:9090"
