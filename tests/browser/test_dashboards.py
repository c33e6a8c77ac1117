"""The dashboards in a real Chromium, with data of a real Prometheus about a cluster that breaks."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.browser.conftest import Visitor
from tests.cli_calls import assert_fits
from tests.e2e.jobs import job
from tests.monitored import broken_cluster
from tests.watching import wait_until
from unbroken.observe.dashboards import DASHBOARDS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
HOSTILE = "<img src=x onerror=window.broken='into'><script>window.broken='into'</script>"
EXPOSED = f'# TYPE unbroken_jobs gauge\nunbroken_jobs{{state="{HOSTILE}"}} 1\n'
ONE_BY_ONE = "[...document.querySelectorAll('.panels .card')].map((one) => one.innerText)"
DRAWN = """
[...document.querySelectorAll('.plot canvas')].map((one) => {
  const pixels = one.getContext('2d').getImageData(0, 0, one.width, one.height).data;
  return pixels.some((value, index) => index % 4 === 3 && value > 0);
})
"""
"""For each chart, whether anything is drawn."""


@contextmanager
def hostile_target() -> Iterator[str]:
    """Serve a metric whose label would run in a careless page; yield the address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(EXPOSED.encode())

        def log_message(self, format: str, *args: object) -> None:
            """Write nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def empty_panels(visitor: Visitor) -> list[str]:
    """Return the panels that are on the page without data."""
    shown: list[str] = visitor.page.evaluate(ONE_BY_ONE)
    without = ("No data at this time", "Prometheus", "in another form")
    return (
        [text for text in shown if any(one in text for one in without)] if shown else ["no panel"]
    )


def test_every_panel_of_every_dashboard_is_drawn_with_data(browser: Any, tmp_path: Path) -> None:
    with hostile_target() as hostile, broken_cluster(tmp_path, hostile=hostile) as scene:
        (tmp_path / "shown").mkdir()
        environment = {"PROGRESS": "1"}
        with job(scene.cluster, tmp_path / "shown", environment=environment) as one:
            one.kill(one.steps(0, 3)[1])
            one.steps(1, 3)
            one.incidents(1)
            _look(Visitor(browser, scene.cluster.unbroken("ui").stdout.strip()))
            one.finish()


def _look(visitor: Visitor) -> None:
    """Open every dashboard, and look at it in both themes and at both widths."""
    page = visitor.page
    page.get_by_role("link", name="Dashboards", exact=True).click()
    page.get_by_role("heading", name="Dashboards: training").wait_for()
    visitor.sees(HOSTILE)
    for name, board in DASHBOARDS.items():
        links = page.get_by_role("navigation", name="Dashboards")
        links.get_by_role("link", name=board.title, exact=True).click()
        page.get_by_role("heading", name=f"Dashboards: {board.title}", exact=True).wait_for()
        page.get_by_role("navigation", name="Time").get_by_role("link", name="15m").click()
        page.get_by_role("link", name="15m", exact=True).and_(
            page.locator("[aria-current=page]")
        ).wait_for()
        wait_until(lambda: empty_panels(visitor), lambda left: not left, patience=300)
        titles = [one.title for one in board.panels]
        assert page.locator(".panels h2").all_inner_texts() == titles
        charts = page.evaluate(DRAWN)
        assert len(charts) == sum(one.kind.value == "timeseries" for one in board.panels)
        assert all(charts), "a chart is empty"
        assert page.url.endswith(f"/dashboards/{name}/15m")
        answer = page.request.get(f"{visitor.origin}/api/page/dashboards/{name}/15m")
        assert_fits(json.loads(answer.body()), ["page", "dashboard"])
        visitor.examine(f"dashboard-{name}")
    assert page.evaluate("window.broken") is None, "hostile text was run"
    assert visitor.errors == []
