"""Serve at three ports of the pod: a page, digests of what comes, and broken connections."""

from __future__ import annotations

import hashlib
import http.server
import os
import socket
import socketserver
import struct
import sys
import threading

ADDRESS = os.environ["IP"]


class Page(http.server.BaseHTTPRequestHandler):
    """One page."""

    def do_GET(self) -> None:
        """Answer with it."""
        text = b"page of the pod\n"
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


class Digests(socketserver.BaseRequestHandler):
    """Reads to the end, or as many bytes as a first line of digits says."""

    def handle(self) -> None:
        """Answer with the SHA-256 of what came."""
        data = b""
        length = None
        while length is None or len(data) < length:
            more = self.request.recv(1 << 16)
            if not more:
                break
            data += more
            if data == b"held":
                sys.stdout.write("held\n")
            head, found, rest = data.partition(b"\n")
            if length is None and found and head.isdigit() and len(head) < 10:
                length, data = int(head), rest
        if data == b"held":
            sys.stdout.write("gone\n")
        self.request.sendall(hashlib.sha256(data).hexdigest().encode())


class Broken(socketserver.BaseRequestHandler):
    """Resets each connection on which something comes."""

    def handle(self) -> None:
        """End with a reset instead of an end."""
        if self.request.recv(1):
            linger = struct.pack("ii", 1, 0)
            self.request.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self.request.close()


class Server(socketserver.ThreadingTCPServer):
    """A thread for each connection."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 50


def main() -> None:
    """Serve until killed."""
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    made = [
        http.server.ThreadingHTTPServer((ADDRESS, 8000), Page),
        Server((ADDRESS, 8001), Digests),
        Server((ADDRESS, 8002), Broken),
    ]
    threads = [threading.Thread(target=one.serve_forever) for one in made]
    for one in threads:
        one.start()
    for one in threads:
        one.join()


main()
