"""The launcher: a small process, started once, that forks supervisors in a millisecond.

It reads requests from a socket. One descriptor holds the request as JSON, the next is for the
supervisor's report, the rest are the streams of a command. It keeps nothing and ends with the
runner; the supervisors it forked continue.

Standard library only, and little of it: every supervisor is a copy of this process.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys

from . import isolation, supervisor

MAX_DESCRIPTORS = 8


def serve(requests: socket.socket) -> None:
    """Fork a supervisor for each request until the runner is gone."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    gc.collect()
    gc.freeze()
    gc.disable()
    while True:
        message, fds, _, _ = socket.recv_fds(requests, 16, MAX_DESCRIPTORS)
        if not message:
            return
        if os.fork() == 0:
            _supervise(requests, message, list(fds))
        for fd in fds:
            os.close(fd)


def _supervise(requests: socket.socket, message: bytes, fds: list[int]) -> None:
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        requests.close()
        for fd in fds:
            os.set_inheritable(fd, False)
        request, report, *streams = fds
        os.lseek(request, 0, os.SEEK_SET)
        decoded = json.loads(supervisor.read_all(request))
        control = socket.socket(fileno=report)
        if message == b"container":
            supervisor.run_container(decoded, control)
        else:
            supervisor.run_exec(decoded, streams, control)
    finally:
        if (error := sys.exc_info()[1]) is not None:
            os.write(2, f"unbroken supervisor: {error!r}\n".encode())
        os._exit(0)


def main() -> None:
    """Serve the socket whose descriptor is the only argument."""
    requests = socket.socket(fileno=int(sys.argv[1]))
    # Its own children must be waited for here, before SIGCHLD is ignored.
    requests.send(isolation.supported().value.encode())
    serve(requests)
