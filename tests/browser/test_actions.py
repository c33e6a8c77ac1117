"""Actions of the live page in a real Chromium, on a job that runs."""

from __future__ import annotations

import getpass
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.browser.conftest import Visitor
from tests.cli_calls import COUNT, Cli
from tests.watching import wait_until

pytestmark = pytest.mark.slow


def start(cli: Cli, name: str) -> None:
    """Run a job of two ranks until it is deleted."""
    cli.script("count.py", COUNT)
    options = ("--nnodes", "2", "--name", name, "--detach")
    cli.call("run", *options, "count.py", "1000000")
    wait_until(lambda: cli.json("describe", name)["state"] == "Running")


def opened(cli: Cli, browser: Any, name: str) -> tuple[Visitor, Any, Any]:
    """Run a job and open its page; return the visitor, the page, and the dialog of its actions."""
    start(cli, name)
    visitor = Visitor(browser, cli.call("ui").stdout.strip())
    visitor.page.get_by_role("link", name=name).click()
    return visitor, visitor.page, visitor.page.get_by_role("dialog")


def told(cli: Cli, name: str) -> list[str]:
    """Return the messages of a job's events about actions."""
    events = cli.json("describe", name)["events"]
    return [one["message"] for one in events if one["reason"] == "ActionOnPage"]


def test_a_job_is_restarted_suspended_and_resumed_on_its_page(cli: Cli, browser: Any) -> None:
    visitor, page, dialog = opened(cli, browser, "acted")

    page.get_by_role("button", name="Restart").click()
    dialog.get_by_text("Restart the job's workers in their pods.").wait_for()
    dialog.get_by_text("unbroken restart acted").wait_for()
    visitor.examine("action")
    dialog.get_by_role("button", name="Cancel").click()
    dialog.wait_for(state="hidden")
    assert told(cli, "acted") == []

    for verb, result, state in (
        ("Restart", "restart requested", "Running"),
        ("Suspend", "suspended", "Suspended"),
        ("Resume", "resumed", "Running"),
    ):
        page.get_by_role("button", name=verb).click()
        dialog.get_by_role("button", name=verb).click()
        dialog.get_by_text(f"acted: {result}").wait_for()
        if verb == "Suspend":
            visitor.examine("action-result")
        dialog.get_by_role("button", name="Close").click()
        page.get_by_role("heading", name=f"acted {state}").wait_for()
        assert told(cli, "acted")[-1] == f"{result} on the live page by {getpass.getuser()}"
    page.get_by_role("link", name="Incident 1").wait_for()
    (incident,) = cli.json("explain", "acted")["incidents"]
    assert incident["culprit"]["fault"] == "RestartRequested"
    assert visitor.errors == []
    cli.call("delete", "acted")


def test_a_node_is_drained_and_repaired_on_the_page_of_nodes(cli: Cli, browser: Any) -> None:
    visitor = Visitor(browser, cli.call("ui").stdout.strip())
    page, dialog = visitor.page, visitor.page.get_by_role("dialog")
    page.get_by_role("link", name="Nodes").click()

    def act(label: str, result: str) -> None:
        page.get_by_role("button", name="Actions on node-1").click()
        dialog.get_by_label("Action").select_option(label)
        if label == "Drain":
            dialog.get_by_label("Time after which").fill("10m")
            dialog.get_by_text("unbroken nodes drain node-1 --deadline 10m").wait_for()
            visitor.examine("action-node")
        dialog.get_by_role("button", name=label).click()
        dialog.get_by_text(f"node-1: {result}").wait_for()
        dialog.get_by_role("button", name="Close").click()

    act("Drain", "drain begun, until ")
    wait_until(lambda: not cli.json("nodes", "describe", "node-1")["schedulable"])
    page.get_by_role("row", name=re.compile("node-1.*NoPods")).wait_for()
    act("Uncordon", "takes pods again")
    wait_until(lambda: cli.json("nodes", "describe", "node-1")["schedulable"])
    act("Reboot", "reboot ordered")
    # Until the repair begins it is an order, then it is in the node's record.
    found = cli.json("nodes", "describe", "node-1")
    record = found["record"]
    repairs = [one["reason"] for one in (record.get("repair"), *record.get("history", ())) if one]
    assert found["ordered"] == "reboot" or repairs == ["ordered: reboot"]
    visitor.examine("nodes-actions")
    assert visitor.errors == []


def test_the_mode_of_a_detector_is_set_on_the_page(cli: Cli, browser: Any) -> None:
    visitor, page, dialog = opened(cli, browser, "watched")
    page.get_by_text("8 detectors:").click()
    page.get_by_role("button", name="Set the mode of spike").click()
    dialog.get_by_label("Mode").select_option("act")
    dialog.get_by_text("A change takes effect when the workers start the next time").wait_for()
    visitor.examine("action-detector")
    dialog.get_by_role("button", name="Set").click()
    dialog.get_by_text("watched: detector spike=act").wait_for()
    modes = {one["detector"]: one["mode"] for one in cli.json("detectors", "watched")["detectors"]}
    assert modes["spike"] == "act"
    assert told(cli, "watched") == [f"detector spike=act on the live page by {getpass.getuser()}"]
    assert visitor.errors == []
    cli.call("delete", "watched")


def test_what_the_cluster_refuses_is_told_in_place(cli: Cli, browser: Any) -> None:
    visitor, page, dialog = opened(cli, browser, "gone")
    page.get_by_role("button", name="Restart").click()
    cli.call("delete", "gone")
    dialog.get_by_role("button", name="Restart").click()
    dialog.get_by_role("alert").get_by_text('no job "gone" in namespace default').wait_for()
    visitor.examine("action-refused")


def test_a_browser_with_the_cookie_alone_may_only_look(cli: Cli, browser: Any) -> None:
    start(cli, "looked-at")
    visitor = Visitor(browser, cli.call("ui").stdout.strip())
    page, dialog = visitor.page, visitor.page.get_by_role("dialog")
    page.evaluate("localStorage.clear()")
    page.reload()
    page.get_by_role("link", name="looked-at").click()
    page.get_by_role("button", name="Suspend").click()
    dialog.get_by_role("button", name="Suspend").click()
    dialog.get_by_role("alert").get_by_text("run unbroken ui and open its link").wait_for()
    assert cli.json("describe", "looked-at")["state"] == "Running"
    page.goto(cli.call("ui").stdout.strip())
    page.get_by_role("link", name="looked-at").click()
    page.get_by_role("button", name="Suspend").click()
    dialog.get_by_role("button", name="Suspend").click()
    dialog.get_by_text("looked-at: suspended").wait_for()
    cli.call("delete", "looked-at")


def test_an_action_is_taken_and_cancelled_by_keyboard_alone(cli: Cli, browser: Any) -> None:
    visitor, page, dialog = opened(cli, browser, "typed")
    page.get_by_role("button", name="Restart").wait_for()

    def focus() -> str:
        return str(page.evaluate("document.activeElement.textContent"))

    def press_until(text: str) -> None:
        for _ in range(20):
            if focus() == text:
                return
            page.keyboard.press("Tab")
        raise AssertionError(f"Tab does not reach {text}")

    press_until("Restart")
    page.keyboard.press("Enter")
    dialog.wait_for()
    assert focus() == "Cancel", "Enter alone takes no action"
    page.keyboard.press("Escape")
    dialog.wait_for(state="hidden")
    assert focus() == "Restart", "the focus is where it was"
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="Suspend job typed?").wait_for()
    press_until("Suspend")
    page.keyboard.press("Enter")
    dialog.get_by_text("typed: suspended").wait_for()
    page.keyboard.press("Escape")
    page.get_by_role("heading", name=re.compile("typed Suspended")).wait_for()
    assert visitor.errors == []
    cli.call("delete", "typed")


@contextmanager
def served_page() -> Iterator[str]:
    """An empty page at another port of this machine; yield its origin."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(b"<!doctype html><title>stranger</title><body></body>")

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_page_of_another_port_and_a_frame_do_nothing(cli: Cli, browser: Any) -> None:
    """Try what a page of another program on this machine can do in the same browser."""
    start(cli, "attacked")
    visitor = Visitor(browser, cli.call("ui").stdout.strip())
    visitor.sees("attacked")
    order = '{"action":"suspend","namespace":"default","name":"attacked"}'
    target = f"{visitor.origin}/api/orders"
    stranger = visitor.page.context.new_page()
    with served_page() as origin:
        stranger.goto(origin)
        headers = "{'Content-Type': 'application/json', 'X-Unbroken-Key': 'x'}"
        for options in ("mode: 'no-cors'", f"headers: {headers}"):
            sent = f"{{method: 'POST', body: '{order}', credentials: 'include', {options}}}"
            script = f"fetch('{target}', {sent}).then(a => a.type, e => 'refused')"
            assert stranger.evaluate(script) in ("refused", "opaque")
        stranger.evaluate(
            f"document.body.innerHTML = `<form method=post enctype=text/plain action={target}>"
            f"<input name='{order[:-1]},\"x\":\"' value='\"}}'></form>`; document.forms[0].submit()"
        )
        stranger.wait_for_url(re.compile("/api/orders"))
        assert "another site" in stranger.content()
        stranger.goto(origin)
        stranger.evaluate(f"document.body.innerHTML = '<iframe src={visitor.origin}/></iframe>'")
        frame = stranger.frame_locator("iframe")
        assert frame.get_by_text("attacked").count() == 0
        assert stranger.evaluate("localStorage.length") == 0, "another port has another storage"
    assert cli.json("describe", "attacked")["state"] == "Running"
    assert told(cli, "attacked") == []
    cli.call("delete", "attacked")
