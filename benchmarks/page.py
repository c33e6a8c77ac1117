#!/usr/bin/env python3
"""The live page under load: first paint, updates, memory of a tab, cost of the server.

    benchmarks/page.py [--jobs N] [--ranks N] [--nproc N] [--minutes N] [--parts LIST] [--ask]
                       [--json FILE]

200 jobs are objects of the local API server; one of them has 16,384 ranks.  A made-up operator in
the process of the page's real server has the reports of their agents, as in `unbroken up`.  With
--ask the page asks made-up agents, at addresses of their own and with the proof of real ones, as it
does while no operator leads.  A real Chromium shows the pages.  The README has the meaning of each
figure.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import platform
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import aiohttp
from arguments import count, output_file, words
from page_world import Shape, Starter, World, cpu_seconds, memory_mebibytes, name_of, world

PARTS = ("paint", "update", "viewers", "memory")
LARGE = "/jobs/default/large"
WAIT_SECONDS = 600.0
UPDATES = 10
PAINTS = 5
VIEWERS = 10
WINDOW_SECONDS = 60.0
SETTLE_SECONDS = 30.0
HOUR_SECONDS = 3600.0
SCRIPT = """
(() => {
  const now = () => performance.timeOrigin + performance.now();
  const painted = (then) => requestAnimationFrame(() => requestAnimationFrame(() => then(now())));
  window.updates = []; window.shown = null; window.count = 0;
  const Real = window.EventSource;
  window.EventSource = class extends Real {
    constructor(place) {
      super(place);
      super.addEventListener('contents', (event) => {
        const came = now(), found = /"now":"([^"]+)"/.exec(event.data);
        const bytes = event.data.length;
        window.count += 1;
        painted((at) => {
          window.updates.push({came, at, bytes, began: found ? Date.parse(found[1]) : null});
          if (window.updates.length > 100) window.updates.shift();
        });
      });
    }
  };
  new MutationObserver((_, self) => {
    if (!document.querySelector('.cells span, table[aria-label=Jobs] tbody tr')) return;
    self.disconnect();
    painted((at) => { window.shown = at - performance.timeOrigin; });
  }).observe(document, {childList: true, subtree: true});
})();
"""
"""Notes when contents came, and when the second frame after them began, which shows them."""
FIRST = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? null"


@contextmanager
def chromium() -> Iterator[Any]:
    """A Chromium of this machine."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as program:
        sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = program.chromium.launch(executable_path=shutil.which("chromium"), args=sandbox)
        yield browser
        browser.close()


@contextmanager
def visitor(browser: Any, found: World) -> Iterator[Any]:
    """A page of a browser that has access."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    name, _, value = found.cookie().partition("=")
    context.add_cookies([{"name": name, "value": value, "url": found.url}])
    context.add_init_script(SCRIPT)
    page = context.new_page()
    page.set_default_timeout(WAIT_SECONDS * 1000)
    try:
        yield page
    finally:
        context.close()


def until(page: Any, condition: str) -> None:
    """Wait until a condition of the page holds."""
    # The page's policy forbids `wait_for_function`, which evaluates text in the page.
    deadline = time.monotonic() + WAIT_SECONDS
    while not page.evaluate(condition):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{condition}: {page.inner_text('body')[:2000]}")
        page.wait_for_timeout(50)


def summary(values: Sequence[float]) -> dict[str, float]:
    """Median, most and number of values."""
    return {
        "p50": round(statistics.median(values), 1),
        "max": round(max(values), 1),
        "n": len(values),
    }


def paint(starter: Starter) -> dict[str, Any]:
    """Milliseconds from the request of a page to the frame that shows it."""
    result: dict[str, Any] = {}
    with chromium() as browser:
        for name, path in (("job", LARGE), ("jobs", "/jobs")):
            cold, first, shown = [], [], []
            for number in range(PAINTS):
                # The first one is of a server that has just started.
                with starter.page() as found, visitor(browser, found) as page:
                    for turn in range(3):
                        page.goto(found.url.rstrip("/") + path)
                        until(page, "window.shown !== null")
                        at = page.evaluate("window.shown")
                        (shown if turn else cold).append(at)
                        first.append(page.evaluate(FIRST))
                        page.goto("about:blank")
                        page.wait_for_timeout(1500)
                print(f"{name} {number}: {cold[-1]:.0f} ms, then {shown[-1]:.0f} ms", flush=True)
            result[name] = {
                "first_contentful_paint_ms": summary(first),
                "contents_ms": summary(shown),
                "contents_of_a_new_server_ms": summary(cold),
            }
    return result


def update(starter: Starter) -> dict[str, Any]:
    """Milliseconds from a change at the server to the frame that shows it."""
    with starter.page() as found, chromium() as browser, visitor(browser, found) as page:
        page.goto(found.url.rstrip("/") + LARGE)
        began = time.monotonic()
        until(page, "window.updates.length > 1")
        first = page.evaluate("window.count")
        until(page, f"window.updates.length > {UPDATES}")
        seconds = time.monotonic() - began
        seen = page.evaluate("window.updates")[-UPDATES:]
        number = page.evaluate("window.count") - first
    server = [one["came"] - one["began"] for one in seen if one["began"] is not None]
    shown = [one["at"] - one["came"] for one in seen]
    whole = [one["at"] - one["began"] for one in seen if one["began"] is not None]
    return {
        "server_ms": summary(server),
        "browser_ms": summary(shown),
        "whole_ms": summary(whole),
        "kilobytes": summary([one["bytes"] / 1000 for one in seen]),
        "seconds_between": round(seconds / max(number, 1), 2),
    }


async def look(found: World, paths: Sequence[str], seconds: float) -> dict[str, Any]:
    """Follow these pages; return the cost of the servers meanwhile."""
    events = received = 0

    async def follow(session: aiohttp.ClientSession, path: str) -> None:
        nonlocal events, received
        headers = {"Cookie": found.cookie(), "Accept-Encoding": "gzip, deflate"}
        place = f"{found.url.rstrip('/')}/api/stream{path}"
        async with session.get(place, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            async for data in answer.content.iter_any():
                received += len(data)
                events += data.count(b"event: contents")

    timeout = aiohttp.ClientTimeout(total=None)
    jar = aiohttp.DummyCookieJar()
    async with (
        aiohttp.ClientSession(timeout=timeout, cookie_jar=jar, auto_decompress=False) as session,
        asyncio.TaskGroup() as tasks,
    ):
        following = [tasks.create_task(follow(session, path)) for path in paths]
        await asyncio.sleep(SETTLE_SECONDS)
        events = received = 0
        before, began = (cpu_seconds(found.server), cpu_seconds(found.api)), time.monotonic()
        await asyncio.sleep(seconds)
        after, took = (cpu_seconds(found.server), cpu_seconds(found.api)), time.monotonic() - began
        for task in following:
            task.cancel()
    return {
        "page_percent_of_a_core": round(100 * (after[0] - before[0]) / took, 2),
        "api_percent_of_a_core": round(100 * (after[1] - before[1]) / took, 2),
        "updates_per_second": round(events / took, 2),
        "kilobytes_per_second": round(received / took / 1000, 1),
    }


def viewers(starter: Starter) -> dict[str, Any]:
    """Cost of the server with no viewer, ten of one page, ten of ten pages."""
    others = [f"/jobs/default/{name_of(number)}" for number in range(1, VIEWERS - 2)]
    mixed = ["/jobs", "/nodes", LARGE, *others]
    cases: dict[str, list[str]] = {
        "none": [],
        "one_of_the_large_job": [LARGE],
        "ten_of_the_large_job": [LARGE] * VIEWERS,
        "ten_of_ten_pages": mixed[:VIEWERS],
    }
    result = {}
    for name, paths in cases.items():
        with starter.page() as found:
            result[name] = asyncio.run(look(found, paths, WINDOW_SECONDS))
            result[name]["memory_mebibytes"] = round(memory_mebibytes(found.server), 1)
        print(name, result[name], flush=True)
    return result


def memory(starter: Starter, minutes: float) -> dict[str, Any]:
    """Memory of a tab over as many updates as an hour brings, in `minutes`."""
    with starter.page() as found, chromium() as browser, visitor(browser, found) as page:
        page.goto(found.url.rstrip("/") + LARGE)
        until(page, "window.updates.length > 1")
        first, began = page.evaluate("window.count"), time.monotonic()
        page.wait_for_timeout(60_000)
        rate = (page.evaluate("window.count") - first) / (time.monotonic() - began)
    wanted = rate * HOUR_SECONDS
    speed = HOUR_SECONDS / (minutes * 60)
    taken = []
    with starter.page(speed) as found, chromium() as browser, visitor(browser, found) as page:
        page.goto(found.url.rstrip("/") + LARGE)
        until(page, "window.updates.length > 1")
        measure = _memory_of(browser, page)
        began = time.monotonic()
        while True:
            taken.append({**measure(), "minutes": round((time.monotonic() - began) / 60, 2)})
            print(taken[-1], flush=True)
            if taken[-1]["updates"] >= wanted and time.monotonic() - began >= minutes * 60:
                break
            page.wait_for_timeout(30_000)
    return {
        "updates_in_an_hour": round(wanted),
        "speed": speed,
        "first": taken[0],
        "last": taken[-1],
        "most_tab_mebibytes": max(one["tab_mebibytes"] for one in taken),
        "series": taken,
    }


def _memory_of(browser: Any, page: Any) -> Callable[[], dict[str, Any]]:
    whole, own = browser.new_browser_cdp_session(), page.context.new_cdp_session(page)
    own.send("Performance.enable")

    def measure() -> dict[str, Any]:
        processes = whole.send("SystemInfo.getProcessInfo")["processInfo"]
        tabs = [one["id"] for one in processes if one["type"] == "renderer"]
        tab = max(memory_mebibytes(pid) for pid in tabs)
        own.send("HeapProfiler.collectGarbage")
        found = {one["name"]: one["value"] for one in own.send("Performance.getMetrics")["metrics"]}
        return {
            "updates": page.evaluate("window.count"),
            "tab_mebibytes": round(tab, 1),
            "heap_mebibytes": round(found["JSHeapUsedSize"] / 2**20, 1),
            "nodes": int(found["Nodes"]),
            "listeners": int(found["JSEventListeners"]),
        }

    return measure


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--jobs", type=count, default=200)
    parser.add_argument("--ranks", type=count, default=16_384, help="of the large job")
    parser.add_argument("--nproc", type=count, default=8, help="ranks of a pod")
    parser.add_argument("--minutes", type=count, default=10, help="for the updates of an hour")
    parser.add_argument("--parts", type=words(PARTS), default=list(PARTS))
    parser.add_argument("--ask", action="store_true", help="the page asks the agents itself")
    parser.add_argument("--json", type=output_file, metavar="FILE")
    parser.add_argument("--log", type=output_file, metavar="FILE", help="of the page's server")
    parser.add_argument("--profile", type=output_file, metavar="FILE",
                        help="only profile the server for a minute with ten viewers")  # fmt: skip
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    shape = Shape(options.jobs, options.ranks, options.nproc)
    result: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "jobs": shape.jobs,
        "ranks": shape.ranks,
        "ranks_of_a_pod": shape.nproc,
        "page_asks_agents": options.ask,
    }
    with world(shape, options.log, is_asking=options.ask) as starter:
        print("the world is built", flush=True)
        if options.profile:
            with starter.page(profile=options.profile) as found:
                print(asyncio.run(look(found, [LARGE], WINDOW_SECONDS)))
            return
        measures: dict[str, Callable[[], dict[str, Any]]] = {
            "paint": lambda: paint(starter),
            "update": lambda: update(starter),
            "viewers": lambda: viewers(starter),
            "memory": lambda: memory(starter, options.minutes),
        }
        for name in options.parts:
            before = os.getloadavg()[0]
            result[name] = measures[name]()
            result[name]["load"] = [round(before, 1), round(os.getloadavg()[0], 1)]
            print(name, json.dumps(result[name], indent=1), flush=True)
            if options.json:
                options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
