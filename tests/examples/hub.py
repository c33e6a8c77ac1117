"""A hub of Hugging Face on this machine: what its libraries ask for when they read.

A data set is the folder `datasets/OWNER/NAME` of the hub's folder, a tokenizer the folder
`OWNER/NAME`. Programs take the hub's URL from HF_ENDPOINT.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingTCPServer
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
"""The only revision of all repositories."""
API = re.compile(
    r"/api/(datasets|models)/([^/]+/[^/]+)(?:/(revision|tree|paths-info)/[^/]+)?(/.*)?"
)
FILE = re.compile(r"/((?:datasets/)?[^/]+/[^/]+)/resolve/[^/]+/(.+)")


class Hub(BaseHTTPRequestHandler):
    """One connection; `root` is the folder."""

    protocol_version = "HTTP/1.1"
    root: Path

    def log_message(self, *_: object) -> None:
        """Log nothing."""

    def do_GET(self) -> None:
        """Answer a request for a file or for facts about files."""
        given = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        parts = urlsplit(self.path)
        path = unquote(parts.path)
        if found := API.fullmatch(path):
            kind, name, view, inner = found.groups()
            folder = self.root / ("datasets" if kind == "datasets" else "") / name
            if folder.is_dir():
                return self._facts(name, folder, view, (inner or "/")[1:], given)
        elif found := FILE.fullmatch(path):
            file = self.root / found[1] / found[2]
            if file.is_file():
                return self._file(file.read_bytes())
            if (self.root / found[1]).is_dir():
                return self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
        return self._send(404, b"", {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_POST = do_GET

    def _facts(self, name: str, folder: Path, view: str | None, inner: str, given: str) -> None:
        entries: Any
        if view == "paths-info":
            is_json = "json" in self.headers.get("Content-Type", "")
            wanted = json.loads(given)["paths"] if is_json else parse_qs(given)["paths"]
            entries = [entry(folder, folder / one) for one in wanted if (folder / one).exists()]
        elif view == "tree":
            entries = [entry(folder, one) for one in sorted((folder / inner).rglob("*"))]
        else:
            files = [one for one in sorted(folder.rglob("*")) if one.is_file()]
            siblings = [{"rfilename": str(one.relative_to(folder))} for one in files]
            entries = {"id": name, "sha": COMMIT, "private": False, "siblings": siblings}
        self._send(200, json.dumps(entries).encode(), {"Content-Type": "application/json"})

    def _file(self, content: bytes) -> None:
        headers = {"ETag": f'"{len(content)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if wanted is None:
            return self._send(200, content, headers)
        first, size = int(wanted[1]), len(content)
        last = min(int(wanted[2] or size), size - 1)
        headers["Content-Range"] = f"bytes {first}-{last}/{size}"
        return self._send(206, content[first : last + 1], headers)

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def entry(folder: Path, path: Path) -> dict[str, Any]:
    """Return what the hub tells of a file or folder of a repository."""
    told = {"path": str(path.relative_to(folder)), "oid": COMMIT}
    if path.is_dir():
        return told | {"type": "directory"}
    return told | {"type": "file", "size": path.stat().st_size}


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """Serve a folder; yield the URL."""
    handler = type("Here", (Hub,), {"root": folder})
    # An HTTPServer would look up the name of its address first.
    with ThreadingTCPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()
