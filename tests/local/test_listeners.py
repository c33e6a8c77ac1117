"""Who listens at an address of the loopback network."""

from __future__ import annotations

import io
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from unbroken.local import listeners

HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout"
ROW = "   {n}: 0100007F:{port:04X} {other} {state} 00000000:00000000 00:00000000 00000000 {uid} 0"


class Table:
    """A table of the kernel whose rows must not be read after the first connection."""

    def exists(self) -> bool:
        return True

    def open(self) -> Any:
        class Rows(io.StringIO):
            def __iter__(self) -> Iterator[str]:
                yield ROW.format(n=0, port=80, other="0:0", state="0A", uid=7)
                yield ROW.format(n=1, port=80, other="0100007F:9000", state="01", uid=8)
                raise AssertionError("all connections of the machine were listed")

            def __next__(self) -> str:
                return HEAD

        return Rows()


def test_the_connections_of_the_machine_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listeners, "TABLES", (Table(),))
    assert listeners.strangers("127.0.0.1", 80, {}) == ["7"]
    assert listeners.strangers("127.0.0.1", 80, {"securityContext": {"runAsUser": 7}}) == []
    assert listeners.strangers("127.0.0.1", 81, {}) == []


def test_linux_lists_a_listener_that_is_newer_than_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with ExitStack() as stack:
        older = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        stack.enter_context(socket.create_connection(older.getsockname()))
        newer = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        monkeypatch.setattr(os, "geteuid", lambda: -1)
        found = listeners.strangers("127.0.0.1", newer.getsockname()[1], {})
    assert found == [str(os.getuid())]
