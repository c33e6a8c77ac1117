"""The worker's end of the agent's socket: one connection of the process, read by a thread.

Without an agent, or with an agent that has no socket, there is no channel. Processes forked from
the connected one have none either: the agent would take their messages for the worker's.
"""

from __future__ import annotations

import array
import collections
import contextlib
import json
import os
import socket
import struct
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from unbroken.errors import WorldError
from unbroken.log_lines import Log
from unbroken.wire.ipc import FRAME_BYTES_MAX, HEADER, INIT, VARIABLE, encode

if TYPE_CHECKING:
    from typing import ParamSpec

    P = ParamSpec("P")

__all__ = ["Channel", "Heard", "attempt_now", "connect", "is_whole", "whole"]

FDS_MAX = 64
"""Most descriptors with one frame; the kernel takes 253."""
ANSWER_SECONDS = 10.0
_CREDENTIALS = struct.Struct("3i")
Heard = Callable[[Mapping[str, Any]], None]
R = TypeVar("R")
log = Log(__name__, "unbroken.worker: ")
_whole: set[CodeType] = set()


def whole(function: Callable[P, R]) -> Callable[P, R]:
    """Mark a function that `restartable` does not interrupt: half a frame would end the channel."""
    _whole.add(function.__code__)
    return function


def is_whole(frame: FrameType | None) -> bool:
    """True if such a function runs, whatever called it, or a finalizer: Python only prints
    exceptions in one."""
    while frame is not None:
        if frame.f_code in _whole or frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


class _Answer:
    """Answer that one request waits for."""

    def __init__(self) -> None:
        self.is_there = threading.Event()
        self.is_wanted = True
        self.message: Mapping[str, Any] | None = None
        self.fds: list[int] = []


class Channel:
    """Messages both ways, from any thread.

    Messages that are neither requested nor have a handler are dropped, and so are the descriptors
    that came with them.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._client_id = os.urandom(16).hex()
        self._lock = threading.Lock()
        self._answers: dict[str, collections.deque[_Answer]] = {}
        self._handlers: dict[str, Heard] = {}
        self._ended: Callable[[], None] | None = None
        self.is_open = True

    def start(self) -> None:
        """Register this process, and read."""
        self.introduce(restartable=False)
        threading.Thread(target=self._read, name="unbroken-channel", daemon=True).start()

    def introduce(self, *, restartable: bool) -> None:
        """Report which worker this is, and whether it leaves its training on request."""
        self.send({"type": INIT, "restartable": restartable, "attempt": attempt_now()})

    def listen(self, handlers: Mapping[str, Heard], ended: Callable[[], None] | None) -> None:
        """Set the handlers of messages, by type, and the handler of the agent's end.

        They are called by the thread that reads, so none may wait in there.
        """
        with self._lock:
            self._handlers, self._ended = dict(handlers), ended
        if not self.is_open and ended is not None:
            ended()

    @whole
    def send(self, message: Mapping[str, Any], fds: Sequence[int] = ()) -> bool:
        """Send a message; return False if there is no agent any more."""
        with self._lock:
            return self._send(message, fds)

    def request(
        self,
        message: Mapping[str, Any],
        answer_type: str,
        fds: Sequence[int] = (),
        seconds: float = ANSWER_SECONDS,
    ) -> tuple[Mapping[str, Any], list[int]]:
        """Send a request; return the answer and its descriptors, which are the caller's.

        Raises WorldError if the agent is gone, or does not answer.
        """
        answer = self._ask(message, answer_type, fds)
        try:
            is_there = answer.is_there.wait(seconds)
        finally:
            result = self._taken(answer)
        if result is not None:
            return result, answer.fds
        why = f"does not answer in {seconds:g} s" if self.is_open and not is_there else "is gone"
        raise WorldError(f"the agent {why}: {message.get('type')}")

    @whole
    def _ask(self, message: Mapping[str, Any], kind: str, fds: Sequence[int]) -> _Answer:
        answer = _Answer()
        with self._lock:
            if self._send(message, fds):
                self._answers.setdefault(kind, collections.deque()).append(answer)
            else:
                answer.is_there.set()
        return answer

    @whole
    def _taken(self, answer: _Answer) -> Mapping[str, Any] | None:
        """Take the answer that has come; a later one is dropped, but keeps its place in the
        order."""
        with self._lock:
            answer.is_wanted = False
            if sys.exc_info()[0] is not None:
                _close(answer.fds)
            return answer.message

    def _send(self, message: Mapping[str, Any], fds: Sequence[int]) -> bool:
        if not self.is_open:
            return False
        who = {"local_rank": int(os.environ.get("LOCAL_RANK") or 0), "client_id": self._client_id}
        data = memoryview(encode({**message, **who}))
        try:
            while data:
                data = data[socket.send_fds(self._sock, [data], fds) :]
                fds = ()
        except OSError:
            # The thread that reads sees the end as well, and reports it.
            return False
        return True

    def _read(self) -> None:
        try:
            while True:
                head, fds = self._receive(HEADER.size)
                (length,) = HEADER.unpack(head)
                if length > FRAME_BYTES_MAX:
                    raise OSError(f"a frame of {length} bytes")
                body, more = self._receive(length)
                self._deliver(_object(body), fds + more)
        except (OSError, EOFError) as error:
            log.debug("socket of the agent has ended", error=error)
        self._end()

    def _receive(self, size: int) -> tuple[bytes, list[int]]:
        """Receive exactly this number of bytes.

        Descriptors come with the first byte of their frame, and so are known to belong to it.
        """
        data, fds = bytearray(), array.array("i")
        room = socket.CMSG_SPACE(FDS_MAX * fds.itemsize)
        while len(data) < size:
            part, beside, _, _ = self._sock.recvmsg(size - len(data), room, socket.MSG_CMSG_CLOEXEC)
            for level, kind, raw in beside:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    fds.frombytes(raw[: len(raw) - len(raw) % fds.itemsize])
            if not part:
                _close(fds)
                raise EOFError
            data += part
        return bytes(data), list(fds)

    def _deliver(self, message: Mapping[str, Any], fds: list[int]) -> None:
        kind = str(message.get("type"))
        with self._lock:
            waiting = self._answers.get(kind)
            if waiting:
                answer = waiting.popleft()
                if answer.is_wanted:
                    answer.message, answer.fds = message, fds
                    answer.is_there.set()
                    return
            handlers = None if waiting else self._handlers.get(kind)
        _close(fds)
        if handlers is not None:
            handlers(message)

    def _end(self) -> None:
        with self._lock:
            self.is_open = False
            self._sock.close()
            for answer in [one for row in self._answers.values() for one in row]:
                answer.is_there.set()
            self._answers.clear()
            ended = self._ended
        if ended is not None:
            ended()

    def forget(self) -> None:
        """Drop the connection in a forked child: it is its parent's."""
        self.is_open = False
        self._lock = threading.Lock()
        self._sock.close()


_lock = threading.Lock()
_channel: Channel | None = None
_is_child = False


def connect() -> Channel | None:
    """Return this process's channel, made on first use; None: there is no agent."""
    global _channel
    with _lock:
        if _channel is None and not _is_child and not _is_helper():
            _channel = _connected(os.environ.get(VARIABLE, ""))
            if _channel is not None:
                _channel.start()
    return _channel if _channel is not None and _channel.is_open else None


def _connected(path: str) -> Channel | None:
    if not path:
        return None
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect(path)
    except OSError as error:
        sock.close()
        log.warning("no agent: faults of other ranks end this worker", file=path, error=error)
        return None
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(raw)
    if uid != os.geteuid():
        # Whoever may write the folder of temporary files can put a socket there, such as another
        # container of the pod; and a worker does what its agent orders.
        sock.close()
        log.warning("no agent at the socket", file=path, error=f"it is that of user {uid}")
        return None
    return Channel(sock)


def _is_helper() -> bool:
    """True if multiprocessing has started this process."""
    module = sys.modules.get("multiprocessing.process")
    return module is not None and module.parent_process() is not None


def attempt_now() -> int:
    """Return the attempt that this process trains in, or trained in last."""
    with contextlib.suppress(ValueError):
        return int(os.environ.get("JOB_RESTART_COUNT") or 0)
    return 0


def _object(body: bytes) -> Mapping[str, Any]:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def _forget() -> None:
    global _channel, _is_child, _lock
    _lock = threading.Lock()
    if _channel is not None:
        # A worker forked from a template that has not connected may connect.
        _channel.forget()
        _channel, _is_child = None, True


os.register_at_fork(after_in_child=_forget)
