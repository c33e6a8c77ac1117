"""Follows objects of a cluster for as long as a command runs.  Reads only."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, suppress
from typing import Any, Self

from unbroken.cli.connection import Cluster
from unbroken.kube.informer import Informer
from unbroken.local import state

LOOK_SECONDS = 2.0
"""Between looks whether a local cluster still runs."""
GONE_SECONDS = 10.0
"""Seconds without a process of the local cluster after which the command ends. A cluster that is
being started again has one."""


class Watch:
    """Informers that run inside an `async with`, and a wait for the next change of any of them."""

    def __init__(self, cluster: Cluster) -> None:
        self._client = cluster.client
        self._place = cluster.place
        self._gone_at: float | None = None
        """Since when the local cluster has no process, by the event loop's clock."""
        self._informers: list[Informer[Any]] = []
        self._stack = AsyncExitStack()
        self._event = asyncio.Event()

    def follow(
        self,
        kind: type[Any],
        *,
        namespace: str | None = None,
        labels: str | None = None,
        fields: str | None = None,
    ) -> Informer[Any]:
        """Return an informer of the objects in this scope; only before the `async with`."""
        made: Informer[Any] = Informer(
            self._client,
            kind,
            namespace=namespace,
            labels=labels,
            fields=fields,
            on_change=self._changed,
            tells=False,
        )
        self._informers.append(made)
        return made

    async def __aenter__(self) -> Self:
        tasks = await self._stack.enter_async_context(asyncio.TaskGroup())
        for informer in self._informers:
            task = tasks.create_task(informer.run())
            self._stack.callback(task.cancel)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def _changed(self, old: Any, new: Any) -> None:
        self._event.set()

    def wake(self) -> None:
        """Wake the caller of `change`."""
        self._event.set()

    async def change(self, seconds: float | None = None) -> bool:
        """Wait until an object has changed since the last call.

        False if none has in so many seconds; None: wait without a limit.  SpecError if the local
        cluster was stopped."""
        left = float("inf") if seconds is None else seconds
        while not self._event.is_set():
            if left <= 0.0:
                return False
            wait = min(left, LOOK_SECONDS)
            left -= wait
            with suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self._event.wait()
            self._require_running()
        self._event.clear()
        return True

    def _require_running(self) -> None:
        if self._place.paths is None or state.is_up(self._place.paths):
            self._gone_at = None
            return
        now = asyncio.get_running_loop().time()
        if self._gone_at is None:
            self._gone_at = now
        if now - self._gone_at >= GONE_SECONDS:
            self._place.require_running()
