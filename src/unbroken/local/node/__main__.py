"""A node on its own, for any cluster: `python -m unbroken.local.node --kubeconfig F ...`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Sequence
from pathlib import Path

from unbroken.kube.client import connect

from .driver import NodeOptions, run_node, stop_pods


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 1024
    parser = argparse.ArgumentParser(prog="python -m unbroken.local.node", description=__doc__)
    parser.add_argument("--kubeconfig", type=Path)
    parser.add_argument("--name", required=True)
    parser.add_argument("--dir", type=Path, required=True, help="keeps all of the node's state")
    parser.add_argument("--index", type=int, default=0, help="number of the node on this machine")
    parser.add_argument("--cpu", default=str(os.cpu_count() or 1))
    parser.add_argument("--memory", default=f"{memory}Ki")
    parser.add_argument("--gpus", type=int, default=0)
    parser.add_argument("--label", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--token", default="", help="of the node's own server")
    parser.add_argument("--heartbeat", type=float, default=10.0, help="seconds between two")
    parser.add_argument("--stop-pods", action="store_true", help="end all pods and leave")
    return parser.parse_args(arguments)


async def _main(given: argparse.Namespace) -> None:
    if given.stop_pods:
        await stop_pods(given.dir)
        return
    node = NodeOptions(
        name=given.name,
        directory=given.dir.resolve(),
        index=given.index,
        cpu=given.cpu,
        memory=given.memory,
        gpus=given.gpus,
        labels=dict(label.split("=", 1) for label in given.label),
        kubelet_token=given.token,
        heartbeat_seconds=given.heartbeat,
    )
    client = connect(given.kubeconfig)
    running = asyncio.current_task()
    assert running is not None
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, running.cancel)
    try:
        with contextlib.suppress(asyncio.CancelledError):
            await run_node(client, node)
    finally:
        await client.close()


def main() -> None:
    """Run a node until a signal; its pods stay."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
    # One line per request, which is never read.
    logging.getLogger("httpx2").setLevel(logging.WARNING)
    asyncio.run(_main(options()))


if __name__ == "__main__":
    main()
