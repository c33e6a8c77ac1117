"""Informers that several programs of one process share: one watch a kind."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

from .cache import HasMetadata
from .client import KubeClient
from .informer import Informer

T = TypeVar("T", bound=HasMetadata)


class Informers:
    """One informer per kind, over all namespaces; made on first use."""

    def __init__(self, client: KubeClient) -> None:
        self._client = client
        self._informers: dict[type[Any], Informer[Any]] = {}
        self._tasks: asyncio.TaskGroup | None = None

    def of(self, resource_type: type[T]) -> Informer[T]:
        """Return the informer of a kind; it runs while `run` does."""
        informer = self._informers.get(resource_type)
        if informer is None:
            informer = self._informers[resource_type] = Informer(self._client, resource_type)
            if self._tasks is not None:
                self._tasks.create_task(informer.run())
        return informer

    async def synced(self) -> None:
        """Return once all informers requested so far know their objects."""
        await all_synced(*self._informers.values())

    async def run(self) -> None:
        """Run every informer, also those requested later, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            for informer in self._informers.values():
                tasks.create_task(informer.run())
            # A group without members would end, and could take no later ones.
            await asyncio.Event().wait()


async def all_synced(*informers: Informer[Any]) -> None:
    """Return once every informer knows the objects of its kind."""
    for informer in informers:
        await informer.synced.wait()
