"""Datagrams of JSON, with descriptors, over one end of a pair of sockets."""

import _socket
import json
import sys
from typing import Any

DESCRIPTORS_MAX = 64
_INT_BYTES = 4


class Pair:
    """This side's end; it takes over the descriptor."""

    def __init__(self, number: int) -> None:
        self._socket = _socket.socket(fileno=number)

    def send(self, message: dict[str, Any]) -> None:
        """Send a message; wait until there is room. Raises OSError if the other end is closed."""
        self._socket.sendmsg([encoded(message)], [], _socket.MSG_NOSIGNAL)

    def receive(self, bytes_max: int) -> tuple[dict[str, Any] | None, list[int]]:
        """Return the next message with its descriptors, closed on exec; None at the end of file."""
        room = _socket.CMSG_SPACE(DESCRIPTORS_MAX * _INT_BYTES)
        try:
            data, beside, _, _ = self._socket.recvmsg(bytes_max, room, _socket.MSG_CMSG_CLOEXEC)
        except ConnectionResetError:
            return None, []
        numbers = [
            int.from_bytes(sent[start : start + _INT_BYTES], sys.byteorder)
            for level, kind, sent in beside
            if (level, kind) == (_socket.SOL_SOCKET, _socket.SCM_RIGHTS)
            for start in range(0, len(sent), _INT_BYTES)
        ]
        return (decoded(data) if data else None), numbers

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close the descriptor; call it once only."""
        self._socket.close()


def encoded(message: dict[str, Any]) -> bytes:
    """Return one line of JSON."""
    return json.dumps(message, separators=(",", ":")).encode()


def decoded(data: bytes) -> dict[str, Any]:
    """Return the message in a line. Raises ValueError if it is no JSON."""
    result: dict[str, Any] = json.loads(data)
    return result
