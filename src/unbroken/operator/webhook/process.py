"""The webhook's server as a process, which is started again if it ends."""

from __future__ import annotations

import asyncio
import socket
import sys
from contextlib import suppress

import msgspec

from unbroken.kube.backoff import Backoff
from unbroken.kube.clock import entropy, monotonic, pause
from unbroken.log_lines import Log

from .certificates import Leaf
from .server import Settings

log = Log(__name__)

MODULE = "unbroken.operator.webhook.server"
RESTARTS = Backoff(first=0.2, limit=30.0)
STEADY_SECONDS = 60.0
"""Seconds that a process must live to end a run of failures."""
CLOSING_SECONDS = 3.0


class WebhookProcess:
    """One process after another, all on one listening socket."""

    def __init__(self, listening: socket.socket, settings: Settings) -> None:
        self._listening = listening
        self._settings = settings
        self._process: asyncio.subprocess.Process | None = None

    def renew(self, leaf: Leaf) -> None:
        """Use a new certificate from now on."""
        self._settings.leaf = leaf
        if self._process is not None:
            self._send(self._process, leaf)

    async def run(self) -> None:
        """Keep a process running until cancelled."""
        random, failures = entropy(), 0
        while True:
            began = monotonic()
            try:
                ended = f"exit_code={await self._run_once()}"
            except OSError as error:  # no memory, descriptor or process for another
                ended = f'reason="{error}"'
            failures = 1 if monotonic() - began > STEADY_SECONDS else failures + 1
            log.warning("webhook ended", reason=ended, failures=failures)
            await pause(RESTARTS.delay(failures, random))

    async def _run_once(self) -> int:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", MODULE),
            stdin=asyncio.subprocess.PIPE,
            pass_fds=[self._listening.fileno()],
        )
        self._process = process
        self._send(process, self._settings)
        try:
            return await process.wait()
        finally:
            self._process = None
            assert process.stdin is not None
            process.stdin.close()
            try:
                async with asyncio.timeout(CLOSING_SECONDS):
                    await process.wait()
            except TimeoutError:
                with suppress(ProcessLookupError):
                    process.kill()

    def _send(self, process: asyncio.subprocess.Process, message: object) -> None:
        assert process.stdin is not None
        with suppress(ConnectionError):
            process.stdin.write(msgspec.json.encode(message) + b"\n")
