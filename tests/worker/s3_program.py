"""moto's S3 server in a process for tests, which fails as it is told. Run by path.

`s3_program.py`, with a Python that has moto. It prints its port. It makes `bucket`. A PUT of
`/-/orders` says what happens to the next requests; its answer is the number of requests since the
last orders. `copy` copies all objects of a prefix to another first. `mode`:

| mode | what happens to requests `first` to `last` |
|---|---|
| slow | each takes 0.05 s longer |
| flaky | each fourth gets no answer |
| away | none gets an answer |
| full | new objects are refused |
| lie | objects of checkpoints are confirmed, and not stored |
| hold | each waits for the next orders, and is carried out then; `held` is printed once |
| kill-before | the process `pid` is killed, and the request is lost |
| kill-after | the request is carried out, and the process is killed |
"""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import boto3
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

FULL = b"<Error><Code>QuotaExceeded</Code><Message>quota exceeded</Message></Error>"


class Quiet(WSGIRequestHandler):
    """Logs no requests."""

    def log(self, *_: Any) -> None:
        """Log nothing."""


class Failing:
    """moto's application behind orders."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._lock = threading.Condition()
        self._orders: dict[str, Any] = {}
        self._count = 0

    def __call__(
        self, environ: dict[str, Any], start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        length = int(environ.get("CONTENT_LENGTH") or 0)
        is_chunked = environ.get("wsgi.input_terminated")
        body = environ["wsgi.input"].read(*([] if is_chunked else [length]))
        environ.update({"wsgi.input": io.BytesIO(body), "CONTENT_LENGTH": str(len(body))})
        if environ["PATH_INFO"] == "/-/orders":
            return self._ordered(json.loads(body), start_response)
        return self._carried_out(environ, start_response)

    def _ordered(
        self, orders: dict[str, Any], start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        if copy := orders.get("copy"):
            copied(*copy)
        with self._lock:
            self._orders, before, self._count = orders, self._count, 0
            self._lock.notify_all()
        start_response("200 OK", [])
        return [json.dumps(before).encode()]

    def _mode(self) -> str:
        """Count a request; return what happens to it, after it was held if it is to be held."""
        with self._lock:
            self._count += 1
            orders, number = self._orders, self._count
            mode: str = orders.get("mode", "")
            if not orders.get("first", 1) <= number <= orders.get("last", number):
                return ""
            if mode == "hold":
                if not orders.get("is_told"):
                    orders["is_told"] = True
                    sys.stdout.write("held\n")
                    sys.stdout.flush()
                self._lock.wait_for(lambda: self._orders is not orders)
            is_lost = mode == "away" or (mode == "flaky" and number % 4 == 0)
        if mode == "slow":
            time.sleep(0.05)
        if mode.startswith("kill"):
            return f"{mode} {orders['pid']}"
        return "lost" if is_lost else mode

    def _carried_out(
        self, environ: dict[str, Any], start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        mode, _, pid = self._mode().partition(" ")
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        if mode == "kill-before":
            os.kill(int(pid), signal.SIGKILL)
        if mode in ("lost", "kill-before"):
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            raise ConnectionError
        if mode == "full" and method in ("PUT", "POST") and "delete" not in environ["QUERY_STRING"]:
            start_response("403 Forbidden", [("Content-Type", "application/xml")])
            return [FULL]
        if mode == "lie" and method == "PUT" and "/step-" in path:
            start_response("200 OK", [("ETag", '"0"')])
            return [b""]
        answered: Iterable[bytes] = self._app(environ, start_response)
        if mode == "kill-after":
            os.kill(int(pid), signal.SIGKILL)
        return answered


def copied(prefix: str, other: str) -> None:
    """Copy all objects whose names have a prefix."""
    for found in CLIENT.list_objects_v2(Bucket="bucket", Prefix=prefix)["Contents"]:
        source = {"Bucket": "bucket", "Key": found["Key"]}
        CLIENT.copy(source, "bucket", other + found["Key"].removeprefix(prefix))


server = make_server(
    "127.0.0.1",
    0,
    Failing(DomainDispatcherApplication(create_backend_app)),
    threaded=True,
    request_handler=Quiet,
)
threading.Thread(target=server.serve_forever, daemon=True).start()
CLIENT = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{server.port}")
CLIENT.create_bucket(Bucket="bucket")
sys.stdout.write(f"{server.port}\n")
sys.stdout.flush()
sys.stdin.read()  # until the test has ended
