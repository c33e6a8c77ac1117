"""Follows objects of a cluster for as long as a command runs.  Reads only."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any, Self

from unbroken.cli.connection import Cluster
from unbroken.kube.informer import Informer


class Watch:
    """Informers that run inside an `async with`, and a wait for the next change of any of them."""

    def __init__(self, cluster: Cluster) -> None:
        self._client = cluster.client
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

        False if none has in so many seconds; None: wait without a limit."""
        try:
            async with asyncio.timeout(seconds):
                await self._event.wait()
        except TimeoutError:
            return False
        self._event.clear()
        return True
