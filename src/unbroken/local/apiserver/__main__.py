"""`python -m unbroken.local.apiserver --dir DIR [--port N]`: the API server alone."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from pathlib import Path

from unbroken.errors import WorldError

from .driver import serving


async def _serve(directory: Path, port: int) -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    async with serving(directory, port) as server:
        sys.stdout.write(f"ready {server.kubeconfig}\n")
        sys.stdout.flush()
        await stopped.wait()


def main() -> None:
    """Serve until SIGTERM or SIGINT; one line `ready KUBECONFIG` when requests are answered."""
    parser = argparse.ArgumentParser(prog="python -m unbroken.local.apiserver")
    parser.add_argument("--dir", type=Path, required=True, help="folder of all state")
    parser.add_argument("--port", type=int, default=0, help="0: the last one, or any")
    options = parser.parse_args()
    try:
        asyncio.run(_serve(options.dir.absolute(), options.port))
    except WorldError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
