"""The logs of a job on the live page, in a real Chromium."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.browser.conftest import Visitor
from tests.cli_calls import Cli, assert_fits
from tests.watching import wait_until

pytestmark = pytest.mark.slow
HOSTILE = "<img src=x onerror=\"window.broken='into'\"><script>window.broken='into'</script>"
TALK = f"""
import os, pathlib, sys, time
rank = int(os.environ["RANK"])
if rank == 1:
    out = sys.stdout.buffer
    out.write({HOSTILE!r}.encode() + b"\\n")
    out.write(b"\\x1b[31mred\\x1b]0;title\\x07 \\x9b \\xff\\xfe \\xe2\\x80\\xaeover\\n")
    out.write(b"long " + b"a" * 1_000_000 + b"\\n")
    out.flush()
for step in range(1_000_000):
    print("step", step, "of rank", rank, flush=True)
    time.sleep(0.2)
    if rank == 2 and pathlib.Path("break").exists():
        pathlib.Path("break").unlink()
        raise RuntimeError("rank two had enough")
"""
"""Tells its steps; rank 1 begins with hostile lines, and rank 2 fails once when a file is there."""


@pytest.fixture
def visitor(cli: Cli, browser: Any) -> Iterator[Visitor]:
    """A person at the page of a job of four ranks."""
    cli.script("talk.py", TALK)
    options = ("--nnodes", "2", "--nproc-per-node", "2", "--name", "talks", "--detach")
    cli.call("run", *options, "talk.py")
    visitor = Visitor(browser, cli.call("ui").stdout.strip())
    visitor.page.get_by_role("link", name="talks").click()
    yield visitor
    cli.call("delete", "talks")
    assert visitor.page.evaluate("window.broken") is None, "hostile text was run"


def test_logs_of_all_ranks_are_searched_and_followed(visitor: Visitor) -> None:
    page = visitor.page
    page.get_by_role("link", name="Logs", exact=True).click()
    page.get_by_role("heading", name="Logs of talks").wait_for()
    lines = page.get_by_role("region", name="Lines")
    for rank in range(4):
        lines.get_by_text(f"step 3 of rank {rank}", exact=True).wait_for()
    steps = [int(one) for one in re.findall(r"step (\d+) of rank", lines.inner_text())]
    assert steps == sorted(steps), "all ranks by step"

    newest = max(steps)
    lines.get_by_text(f"step {newest + 30} of rank 0", exact=True).wait_for()

    page.get_by_label("Rank").fill("1")
    page.get_by_role("button", name="Search").click()
    lines.get_by_text(HOSTILE).wait_for()
    assert "of rank 0" not in lines.inner_text()
    text = lines.inner_text()
    assert "\\x1b[31mred\\x1b]0;title\\x07" in text
    assert "\\u202eover" in text
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", text)
    lines.get_by_text(re.compile("characters more")).wait_for()
    visitor.examine("logs")

    page.get_by_label("Rank").fill("")
    page.get_by_label("Pattern (RE2)").check()
    page.get_by_label("Text or pattern").fill("^step (7|11) of rank [23]$")
    page.get_by_label("Text or pattern").press("Enter")
    lines.get_by_text("step 11 of rank 3").wait_for()
    assert len(lines.locator(".line").all()) == 4
    page.get_by_label("Text or pattern").fill("a(?=b)")
    page.get_by_label("Text or pattern").press("Enter")
    page.get_by_role("alert").get_by_text("the pattern cannot be used").wait_for()
    visitor.examine("logs-refused")

    answer = page.request.get(f"{visitor.origin}/api/logs/default/talks?rank=3").json()
    assert_fits(answer, ["page", "logs"])
    assert {one["rank"] for one in answer["lines"]} == {3}
    refused = [one for one in visitor.errors if "status of 404" in one]
    assert visitor.errors == refused, "Chromium notes the refused pattern, and nothing else"


def test_incidents_pods_and_attempts_lead_to_their_lines(cli: Cli, visitor: Visitor) -> None:
    page, lines = visitor.page, visitor.page.get_by_role("region", name="Lines")
    page.get_by_role("link", name="Logs", exact=True).click()
    lines.get_by_text("step 3 of rank 2", exact=True).wait_for()
    (cli.folder / "break").touch()
    wait_until(
        lambda: (
            [one.get("outcome") for one in cli.json("explain", "talks")["incidents"]]
            == ["recovered"]
        )
    )
    page.get_by_role("link", name="talks").click()
    page.get_by_role("link", name="Incident 1").click()
    page.get_by_role("link", name="Logs up to it").click()
    lines.get_by_text("RuntimeError: rank two had enough").wait_for()
    assert page.get_by_label("Rank").input_value() == "2"
    page.get_by_label("Attempt").select_option("1")
    lines.get_by_text("RuntimeError: rank two had enough").wait_for(state="hidden")
    lines.get_by_text("step 0 of rank 2").wait_for()
    assert "had enough" not in lines.inner_text()
    page.get_by_role("button", name="Newest lines").click()
    lines.get_by_text("RuntimeError: rank two had enough").wait_for()

    page.get_by_role("link", name="talks").click()
    page.get_by_role("link", name="Logs of talks-pods-1").click()
    lines.get_by_text("step 1 of rank 3").first.wait_for()
    assert "of rank 0" not in lines.inner_text()
    page.reload()
    lines.get_by_text("step 1 of rank 3").first.wait_for()
    assert page.get_by_label("Pod").input_value() == "talks-pods-1"

    assert visitor.errors == []
