"""The served version of Kueue's API, if any, and its changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from lightkube.resources.apiextensions_v1 import CustomResourceDefinition

from unbroken.kube.client import KubeClient
from unbroken.kube.clock import pause
from unbroken.kube.informer import Informer
from unbroken.kube.persist import persist
from unbroken.spec.keys import KUEUE_GROUP

from .objects import VERSIONS, WORKLOADS

LAG_SECONDS = 1.0
"""Seconds after which the API serves a kind whose definition is established."""


async def served_version(client: KubeClient, tasks: asyncio.TaskGroup) -> AsyncIterator[str | None]:
    """Yield the newest supported version, None without Kueue, and every later one.

    Discovery is open to every client. If the definition itself may not be read, a Kueue that is
    installed later is found at the next start.
    """
    definition = _Definition()
    name = f"metadata.name={WORKLOADS}.{KUEUE_GROUP}"
    watch = Informer(client, CustomResourceDefinition, fields=name, on_change=definition.changed)
    tasks.create_task(watch.run())
    told: list[str | None] = []
    while True:
        definition.change.clear()
        result = await persist("discover Kueue", lambda: _discovered(client))
        if told != [result]:
            told = [result]
            yield result
        if watch.synced.is_set() and definition.version != result:
            await pause(LAG_SECONDS)
            continue
        await definition.change.wait()


class _Definition:
    """Served version of Workloads, according to their definition."""

    def __init__(self) -> None:
        self.version: str | None = None
        self.change = asyncio.Event()

    def changed(
        self, old: CustomResourceDefinition | None, new: CustomResourceDefinition | None
    ) -> None:
        """Take the definition."""
        conditions = (new.status and new.status.conditions) if new is not None else None
        is_served = any(
            condition.type == "Established" and condition.status == "True"
            for condition in conditions or ()
        )
        served = (
            {version.name for version in new.spec.versions if version.served}
            if new is not None
            else set()
        )
        self.version = next((v for v in VERSIONS if is_served and v in served), None)
        self.change.set()


async def _discovered(client: KubeClient) -> str | None:
    for version in VERSIONS:
        listed = await client.get_or_none(f"apis/{KUEUE_GROUP}/{version}", dict[str, Any])
        if listed is not None and any(item["name"] == WORKLOADS for item in listed["resources"]):
            return version
    return None
