"""A socket that another container of the pod put in the place of the agent's.

The folder of temporary files may be a volume that containers of a pod share, in which any user can
rename the agent's folder. A worker that connected there did what the stranger ordered: it set any
variable of its environment.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from unbroken.worker import channel


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    """A socket at which a program of this user listens."""
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(tmp_path / "agent.sock"))
        made.listen()
        yield made


def test_a_worker_says_nothing_to_a_socket_of_another_user(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    assert channel._connected(listener.getsockname()) is None
    with listener.accept()[0] as other:
        assert other.recv(1) == b""


def test_a_worker_connects_to_the_socket_of_its_own_user(listener: socket.socket) -> None:
    found = channel._connected(listener.getsockname())
    assert found is not None
    found.forget()


def test_a_frame_that_is_deep_ends_no_thread_of_a_worker() -> None:
    assert channel._object(b"[" * 500_000) == {}
