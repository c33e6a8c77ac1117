"""The live page in a real Chromium, on a local cluster whose job is broken meanwhile.

Screenshots of each page, in both themes and at two widths, are kept in build/screenshots.
"""

from __future__ import annotations

import json
import re
import sqlite3
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.browser.conftest import Visitor
from tests.cli_calls import Cli, assert_fits
from tests.watching import wait_until

pytestmark = pytest.mark.slow
HOSTILE = "<img src=x onerror=\"window.broken='into'\"><script>window.broken='into'</script>"
TRAIN = f"""
import math, os, pathlib, sys, time
from unbroken import worker
rank, kept = int(os.environ["RANK"]), pathlib.Path("step")
start = int(kept.read_text()) if kept.exists() else 0
for step in range(start, 1_000_000):
    time.sleep(0.1)
    worker.progress(step, loss=4 * math.exp(-step / 200) + 0.3, **{{{HOSTILE[:20]!r}: 1.0}})
    if rank == 0 and step % 5 == 0:
        draft = pathlib.Path("step.new")
        draft.write_text(str(step))
        draft.rename(kept)
    if rank == 1 and pathlib.Path("break").exists():
        pathlib.Path("break").unlink()
        print({HOSTILE!r}, file=sys.stderr, flush=True)
        raise RuntimeError({HOSTILE!r})
"""
"""Reports steps and a loss; rank 1 fails once, with a hostile text, when a file is there."""
SILENCE = "Failed to load resource: net::ERR_"
"""What Chromium says first while nobody listens: the only errors that a restart may bring."""


def test_every_page_is_live_while_a_job_is_broken(cli: Cli, browser: Any) -> None:
    cli.script("train.py", TRAIN)
    options = ("--nnodes", "2", "--nproc-per-node", "2", "--name", "train", "--detach")
    cli.call("run", *options, "train.py")
    visitor = Visitor(browser, cli.call("ui").stdout.strip())
    page = visitor.page

    page.get_by_role("row", name=re.compile("train.*Running")).wait_for()
    wait_until(lambda: cli.json("describe", "train")["pods"][0]["agent"]["watch"][0]["step"])
    visitor.examine("jobs")

    page.get_by_role("link", name="train").click()
    visitor.sees("steps per second")
    before = visitor.figure("Step")
    wait_until(lambda: visitor.figure("Step") != before)

    cli.call("chaos", "kill-worker", "train", "--rank", "3")
    page.get_by_role("link", name="Incident 1").wait_for()
    Path(cli.folder / "break").touch()
    page.get_by_role("link", name="Incident 2").wait_for()
    wait_until(lambda: cli.json("explain", "train")["incidents"][1].get("outcome") == "recovered")
    visitor.examine("job")

    page.get_by_role("link", name="Incident 2").click()
    page.get_by_role("heading", name="Incident 2 of train").wait_for()
    page.get_by_text("rank 1 (").first.wait_for()
    assert HOSTILE in page.content().replace("&lt;", "<").replace("&gt;", ">")
    visitor.examine("incident")
    with page.expect_download() as saved:
        page.get_by_role("link", name="Save as a file").click()
    assert saved.value.suggested_filename == "default-train-incident-2.txt"
    assert "remedy     process" in Path(saved.value.path()).read_text()

    page.get_by_role("link", name="Nodes").click()
    page.get_by_role("row", name=re.compile("node-0.*Ready")).wait_for()
    visitor.examine("nodes")

    page.go_back()
    page.get_by_role("heading", name="Incident 2 of train").wait_for()
    page.goto(f"{visitor.origin}/jobs/default/train/incidents/9")
    visitor.sees("job train has no incident 9")
    assert page.evaluate("window.broken") is None, "hostile text was run"
    assert visitor.errors == []
    _assert_contents_fit(visitor)


def _assert_contents_fit(visitor: Visitor) -> None:
    """Fail if the contents of a page do not fit their schema."""
    for kind, path in {
        "jobs": "jobs",
        "job": "jobs/default/train",
        "incident": "jobs/default/train/incidents/1",
        "nodes": "nodes",
        "node": "nodes/node-0",
    }.items():
        answer = visitor.page.request.get(f"{visitor.origin}/api/page/{path}")
        assert_fits(json.loads(answer.body()), ["page", kind])


def test_a_node_is_shown_over_time_with_its_checks(cli: Cli, browser: Any) -> None:
    cli.call("check", "node-0", "--force")
    visitor = Visitor(browser, cli.call("ui").stdout.strip())
    page = visitor.page
    page.goto(f"{visitor.origin}/nodes")
    visitor.sees("No check of the last day has measured links")
    page.get_by_role("link", name="node-0").click()
    visitor.sees("finds no NVIDIA driver")
    page.get_by_role("img", name=re.compile("processors busy, %: from")).wait_for()
    page.get_by_text(re.compile("[0-9]+ results")).click()
    page.get_by_role("table", name=re.compile("Results of")).wait_for()
    visitor.examine("node")
    assert visitor.errors == []


def test_a_link_opens_the_page_once(cli: Cli, browser: Any) -> None:
    link = cli.call("ui").stdout.strip()
    assert cli.json("status")["ui"] == link.partition("?")[0]
    visitor = Visitor(browser, link)
    visitor.page.get_by_role("heading", name="Jobs").wait_for()
    assert visitor.page.url == f"{visitor.origin}/", "the address does not keep the link's token"
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(link)


def test_an_open_page_survives_a_restart_of_the_cluster(cli: Cli, browser: Any) -> None:
    visitor = Visitor(browser, cli.call("ui").stdout.strip())
    visitor.page.get_by_role("link", name="Nodes").click()
    visitor.sees("2 of 2 nodes ready")
    cli.call("down")
    visitor.sees("not connected since")
    assert visitor.page.get_by_text("2 of 2 nodes ready").is_visible(), "the last contents stay"
    cli.call("up", "--detach")
    visitor.page.locator(".live.live").wait_for()
    visitor.sees("2 of 2 nodes ready")
    assert [one for one in visitor.errors if not one.startswith(SILENCE)] == []


def test_the_past_of_a_job_outlives_a_restart_of_the_cluster(cli: Cli, browser: Any) -> None:
    cli.script("past.py", TRAIN)
    options = ("--nnodes", "1", "--nproc-per-node", "1", "--name", "past", "--detach")
    cli.call("run", *options, "past.py")
    visitor = Visitor(browser, cli.call("ui").stdout.strip())

    def past() -> list[float]:
        answer = visitor.page.request.get(f"{visitor.origin}/api/page/jobs/default/past")
        found: list[float] = json.loads(answer.body())["history"]["times"]
        return found

    visitor.page.goto(f"{visitor.origin}/jobs/default/past")
    before = wait_until(past, lambda found: len(found) >= 3)
    cli.call("down")
    cli.call("up", "--detach")
    visitor.page.locator(".live.live").wait_for()
    assert past()[: len(before)] == before
    visitor.sees("steps per second")
    cli.call("delete", "past")
    with sqlite3.connect(cli.directory / "ui-history.sqlite") as kept:
        jobs = "SELECT count(*) FROM jobs"
        count = kept.execute(jobs).fetchone()[0]
        assert count >= 1
        wait_until(lambda: kept.execute(jobs).fetchone()[0] < count)


def test_the_page_is_used_by_keyboard_alone(cli: Cli, browser: Any) -> None:
    visitor = Visitor(browser, cli.call("ui").stdout.strip())
    page = visitor.page
    page.get_by_role("heading", name="Jobs").wait_for()

    def press(times: int) -> str:
        for _ in range(times):
            page.keyboard.press("Tab")
        return str(page.evaluate("document.activeElement.textContent"))

    assert press(1) == "Skip to the contents"
    assert press(3) == "Nodes"
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="Nodes").wait_for()
    assert page.url == f"{visitor.origin}/nodes"
    assert page.evaluate("document.activeElement.id") == "main", "a reader is at the contents"
    assert visitor.errors == []
