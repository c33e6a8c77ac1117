"""A real webhook gets a message about each incident of a job that is broken on a local cluster."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.cli_calls import Cli, assert_fits
from tests.e2e.clusters import kill
from tests.watching import wait_until

pytestmark = pytest.mark.slow
SECRET = "T0KEN-of-the-webhook"
TRAIN = """
import os, time
from unbroken import worker
for step in range(1_000_000):
    time.sleep(0.1)
    worker.progress(step)
    if os.environ["RANK"] == "1" and os.path.exists("give-up"):
        raise RuntimeError("<!channel> rank 1 had enough")
"""
MakeCli = Callable[..., Cli]


class Received:
    """Messages that a webhook got."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    def first(self, state: str) -> dict[str, Any] | None:
        """The first message about a state; None: there is none yet."""
        return next((one for one in self.messages if one["state"] == state), None)

    def of(self, number: int) -> list[str]:
        """States of an incident, in the order in which they were told."""
        return [
            one["state"]
            for one in self.messages
            if one["incident"] and one["incident"]["number"] == number
        ]


@contextmanager
def webhook(file: Path) -> Iterator[Received]:
    """Run a webhook, whose address is written to a file."""
    got = Received()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path == f"/services/{SECRET}":
                got.messages.append(json.loads(data))
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        file.touch(0o600)
        file.write_text(f"http://127.0.0.1:{server.server_port}/services/{SECRET}\n")
        try:
            yield got
        finally:
            server.shutdown()
            thread.join()


def test_each_incident_is_told_once_also_over_restarts_of_the_operator(make_cli: MakeCli) -> None:
    cli = make_cli()
    file = cli.folder / "webhook"
    with webhook(file) as got:
        cli.call("up", "--detach", "--nodes", "2", "--notify-file", str(file))
        cli.script("train.py", TRAIN)
        options = ("--nnodes", "2", "--nproc-per-node", "1", "--name", "lm", "--detach")
        cli.call("run", *options, "train.py")
        wait_until(lambda: cli.json("top", "lm")["heatMap"], lambda found: found and found["steps"])

        cli.call("chaos", "kill-worker", "lm", "--rank", "1")
        wait_until(lambda: got.of(1), lambda told: told[-1:] == ["recovered"])
        # The operator dies without a word, and another one adopts the job.
        kill(json.loads((cli.directory / "up.json").read_text())["pid"])
        cli.call("up", "--detach")
        assert _has_no_secret(cli)
        cli.call("nodes", "reboot", "node-0")
        repair = wait_until(lambda: got.first("repair-ended"))
        assert repair is not None
        assert (repair["repair"]["node"], repair["repair"]["action"]) == ("node-0", "reboot")
        (cli.folder / "give-up").touch()
        last = wait_until(lambda: got.first("gave-up"))
        assert last is not None
        assert got.of(1)[-1] == "recovered"
        assert len({one["id"] for one in got.messages}) == len(got.messages), "none came twice"
        assert [one["state"] for one in got.messages].count("gave-up") == 1
        address = cli.json("status")["ui"]
        number = last["incident"]["number"]
        assert last["link"] == f"{address}jobs/default/lm/incidents/{number}"
        assert "<!channel> rank 1 had enough" in last["text"]
        for one in got.messages:
            assert_fits(one, ["notification"])


def _has_no_secret(cli: Cli) -> bool:
    """Fail if the address of the webhook is in a file, an object or an argument of the cluster."""
    for path in cli.directory.rglob("*"):
        if path.is_file():
            assert SECRET.encode() not in path.read_bytes(), path
    for name in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            assert SECRET.encode() not in name.read_bytes()
        except OSError:
            continue
    return True


def test_a_file_without_an_address_is_refused_at_once(make_cli: MakeCli) -> None:
    cli = make_cli()
    file = cli.folder / "webhook"
    file.write_text(f"http://example.com/{SECRET}")
    said = cli.call("up", "--detach", "--notify-file", str(file), code=1).stderr
    assert "it must have one address that begins with https://" in said
    assert SECRET not in said
