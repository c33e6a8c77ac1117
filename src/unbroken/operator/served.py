"""Work on a kind of objects that may be installed, or removed, while the operator runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Protocol

from lightkube.resources.apiextensions_v1 import CustomResourceDefinition

from unbroken.kube.client import KubeClient
from unbroken.kube.informer import Informer
from unbroken.log_lines import Log

log = Log(__name__)


class ServedKind(Protocol):
    """A kind of objects with a definition."""

    @property
    def name(self) -> str:
        """The kind, as objects spell it."""

    @property
    def resource(self) -> str:
        """The name of the definition."""


async def while_served(
    client: KubeClient, kind: ServedKind, work: Callable[[], Coroutine[None, None, None]]
) -> None:
    """Run `work` whenever the API serves a kind, until cancelled."""
    definition = _Definition()
    name = f"metadata.name={kind.resource}"
    watch = Informer(client, CustomResourceDefinition, fields=name, on_change=definition.changed)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(watch.run())
        while True:
            await definition.becomes(True)
            log.info("the API serves the kind", kind=kind.name)
            running = tasks.create_task(work())
            await definition.becomes(False)
            log.info("the API does not serve the kind any more", kind=kind.name)
            running.cancel()


class _Definition:
    """True if the API serves the kind."""

    def __init__(self) -> None:
        self._is_served = False
        self._change = asyncio.Event()

    def changed(
        self, old: CustomResourceDefinition | None, new: CustomResourceDefinition | None
    ) -> None:
        """Take in a change of the definition."""
        conditions = (new.status and new.status.conditions) if new is not None else None
        self._is_served = any(
            one.type == "Established" and one.status == "True" for one in conditions or ()
        )
        self._change.set()

    async def becomes(self, wanted: bool) -> None:
        """Return once the kind is served (`wanted`), or no longer served."""
        while self._is_served is not wanted:
            self._change.clear()
            await self._change.wait()
