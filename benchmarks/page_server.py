"""The server of the live page as a process of its own, for `page.py`.

    page_server.py DIR SPEED [PROFILE]

Serves the page of the local cluster in DIR with a clock that runs SPEED times as fast, until
SIGTERM.  PROFILE: file for a profile of the server's thread.
"""

from __future__ import annotations

import asyncio
import cProfile
import signal
import sys
from pathlib import Path

from unbroken.cli.page import driver
from unbroken.kube import clock
from unbroken.kube.client import connect
from unbroken.local.state import Paths


async def serve(directory: Path, speed: float) -> None:
    """Serve until SIGTERM."""
    if speed != 1.0:
        driver.monotonic = lambda: clock.monotonic() * speed  # type: ignore[assignment]
        driver.pause = lambda seconds: clock.pause(seconds / speed)  # type: ignore[assignment]
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    client = connect(directory / "internal.kubeconfig")
    try:
        async with driver.serving_page(Paths(directory), client, 0) as url:
            print(url, flush=True)
            await ended.wait()
    finally:
        await client.close()


def main() -> None:
    """Serve, with a profile if one is asked for."""
    directory, speed, *profile = sys.argv[1:]
    if not profile:
        asyncio.run(serve(Path(directory), float(speed)))
        return
    measured = cProfile.Profile()
    measured.runcall(asyncio.run, serve(Path(directory), float(speed)))
    measured.dump_stats(profile[0])


if __name__ == "__main__":
    main()
