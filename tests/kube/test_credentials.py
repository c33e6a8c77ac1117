"""A kubeconfig's program for credentials: one run for all requests, and errors in one line."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from aiohttp import web

from tests import loopback
from unbroken.errors import WorldError
from unbroken.kube.client import connect

pytestmark = pytest.mark.slow

SECRET = "very-secret"
PROGRAM = """
import json, os, sys
run = len(os.listdir(sys.argv[1]))
open(f"{sys.argv[1]}/{os.getpid()}", "x").close()
print(json.dumps({"status": {"token": f"very-secret-{run}"}}))
"""


@dataclass
class TokenServer:
    """An API server that takes one token at a time."""

    token: str = f"{SECRET}-0"
    refused: list[str] = field(default_factory=list)

    async def answer(self, request: web.Request) -> web.Response:
        """Answer who comes with the token."""
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if given == self.token:
            return web.json_response({"kind": "List"})
        self.refused.append(given)
        return web.json_response({"kind": "Status", "code": 401, "message": "no"}, status=401)

    def application(self) -> web.Application:
        """Its application."""
        app = web.Application()
        app.router.add_get("/{path:.*}", self.answer)
        return app


def kubeconfig(folder: Path, port: int, command: str, *args: str) -> Path:
    """A kubeconfig whose user has a program for credentials."""
    version = "client.authentication.k8s.io/v1beta1"
    program = {"apiVersion": version, "command": command, "args": list(args)}
    names = {"cluster": "it", "user": "it"}
    config = {
        "current-context": "it",
        "contexts": [{"name": "it", "context": names}],
        "clusters": [{"name": "it", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "users": [{"name": "it", "user": {"exec": program}}],
    }
    file = folder / "kubeconfig"
    file.write_text(json.dumps(config))
    return file


async def test_a_token_that_expires_is_fetched_once_for_all_requests(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    server = TokenServer()
    async with loopback.serving(server.application()) as port:
        file = kubeconfig(tmp_path, port, sys.executable, "-c", PROGRAM, str(runs))
        async with connect(file) as client:
            for number in (0, 1):
                server.token = f"{SECRET}-{number}"
                await asyncio.gather(*(client.raw("GET", f"api/{one}") for one in range(20)))
                assert len(list(runs.iterdir())) == number + 1
    assert server.refused == [f"{SECRET}-0"] * 20


@pytest.mark.parametrize(
    ("command", "args", "reason"),
    [
        ("/nowhere/program", (), "/nowhere/program does not start: No such file or directory"),
        (sys.executable, ("-c", f"print('{SECRET}')"), "printed no ExecCredential with a token$"),
        (sys.executable, ("-c", "print('[]')"), "printed no ExecCredential with a token$"),
        (sys.executable, ("-c", "print('{\"status\": {}}')"), "printed no ExecCredential"),
        (sys.executable, ("-c", 'print(\'{"status": {"token": 3}}\')'), "printed no Exec"),
        (sys.executable, ("-c", "exit('log in first')"), "returned 1: log in first"),
    ],
    ids=["missing", "text", "list", "status", "number", "failed"],
)
async def test_a_program_that_gives_no_token_is_an_error_in_words(
    tmp_path: Path, command: str, args: tuple[str, ...], reason: str
) -> None:
    async with connect(kubeconfig(tmp_path, 9, command, *args)) as client:
        with pytest.raises(WorldError, match=reason) as raised:
            await client.raw("GET", "version")
    assert SECRET not in str(raised.value)
