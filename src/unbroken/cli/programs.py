"""Programs that run until they are stopped: the operator, the cluster API, the node daemon."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unbroken.log_lines import LINE_FORM

from .app import option
from .options import Context, LocalDirectory
from .place import find

if TYPE_CHECKING:
    from unbroken.kube.client import KubeClient


def start_logging() -> None:
    """Write log lines of level INFO and above to standard error."""
    logging.basicConfig(level=logging.INFO, format=LINE_FORM)


async def until_stopped(work: Coroutine[Any, Any, None]) -> None:
    """Run `work` until it ends, or SIGTERM or SIGINT cancels it."""
    running = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, running.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await running


@dataclass(frozen=True, slots=True)
class ProgramTarget:
    """The cluster of a program, which may run in one of its pods."""

    kubeconfig: Path | None = option(
        "--kubeconfig", help="Kubeconfig of the cluster to use.", show_default="KUBECONFIG's"
    )
    context: Context = None
    directory: LocalDirectory = None

    def run(self, manager: str, work: Callable[[KubeClient], Coroutine[Any, Any, None]]) -> None:
        """Run `work` with a client until it ends, or SIGTERM or SIGINT cancels it.

        `manager`: the field manager of its writes.
        """
        from unbroken.kube.client import connect  # slow to load

        file, context = self._cluster()

        async def run() -> None:
            async with connect(file, context=context, manager=manager) as client:
                await until_stopped(work(client))

        asyncio.run(run())

    def _cluster(self) -> tuple[Path | str | None, str | None]:
        """Kubeconfig and context; without a file the client uses the pod's service account."""
        if self.kubeconfig is not None:
            return self.kubeconfig, self.context
        is_named = os.environ.get("KUBECONFIG") or "KUBERNETES_SERVICE_HOST" in os.environ
        if self.directory is None and is_named and not os.environ.get("UNBROKEN_DIR"):
            return None, self.context
        place = find(self.directory, self.context)
        return place.kubeconfig, place.context
