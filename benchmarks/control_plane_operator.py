"""`unbroken operator` for `control_plane.py`: it counts its requests, and can be profiled.

`control_plane.py` starts it with the operator's own arguments. A SIGUSR1 writes the counts to the
file in CONTROL_PLANE_COUNTS. With CONTROL_PLANE_PROFILE, a SIGUSR2 starts the profiler, and a
second one ends it and writes its figures there. With CONTROL_PLANE_TURNS, each turn of the loop
that takes longer than TURN_SECONDS becomes a line of that file: seconds, processor seconds, what
ran.
"""

from __future__ import annotations

import asyncio
import cProfile
import json
import os
import re
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx2

from unbroken.kube.transport import AiohttpTransport

COUNTS: Counter[str] = Counter()
TURN_SECONDS, TURN_CHARACTERS = 0.02, 400
_NAMES = re.compile(r"(?<=/pods/)[^/]+|(?<=/leases/)[^/]+|(?<=incidents/)[^/]+|(?<=jobs/)[^/]+")


class CountingTransport(AiohttpTransport):
    """HTTP transport that counts requests by verb and kind of object."""

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Count the request, and send it."""
        verb = "WATCH" if "watch=true" in str(request.url) else request.method
        COUNTS[f"{verb} {_NAMES.sub('*', request.url.path)}"] += 1
        return await super().handle_async_request(request)


def write_counts(*_: Any) -> None:
    """Write the number of requests by verb and path."""
    target = Path(os.environ["CONTROL_PLANE_COUNTS"])
    part = target.with_suffix(".part")
    part.write_text(json.dumps(COUNTS))
    part.rename(target)


class Profile:
    """Profiler that runs between two signals."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._running: cProfile.Profile | None = None

    def toggle(self, *_: Any) -> None:
        """Start the profiler, or stop it and write its figures."""
        if self._running is None:
            self._running = cProfile.Profile()
            self._running.enable()
            return
        self._running.disable()
        part = Path(self._target).with_suffix(".part")
        self._running.dump_stats(part)
        part.rename(self._target)
        self._running = None


def note_turns(target: Path) -> None:
    """Write down the long turns of the event loop from now on."""
    run = asyncio.Handle._run  # type: ignore[attr-defined]

    def timed(handle: Any) -> None:
        began, work = time.perf_counter(), time.thread_time()
        run(handle)
        seconds = time.perf_counter() - began
        if seconds > TURN_SECONDS:
            with target.open("a") as lines:
                used = time.thread_time() - work
                lines.write(f"{seconds:.4f} {used:.4f} {handle!r}"[:TURN_CHARACTERS] + "\n")

    asyncio.Handle._run = timed  # type: ignore[attr-defined]


def main() -> None:
    """Run the operator."""
    if "CONTROL_PLANE_TURNS" in os.environ:
        note_turns(Path(os.environ["CONTROL_PLANE_TURNS"]))
    import unbroken.kube.client as client

    client.AiohttpTransport = CountingTransport  # type: ignore[misc]
    signal.signal(signal.SIGUSR1, write_counts)
    if "CONTROL_PLANE_PROFILE" in os.environ:
        signal.signal(signal.SIGUSR2, Profile(os.environ["CONTROL_PLANE_PROFILE"]).toggle)
    from unbroken.cli.main import run

    sys.argv[1:1] = ["operator"]
    run()


if __name__ == "__main__":
    main()
