"""Companions of a node in the pool: they run while it has power, and restart when they fail."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

from lightkube.resources.core_v1 import Node

from unbroken.errors import WorldError
from unbroken.kube.client import KubeClient, connect
from unbroken.kube.informer import Informers
from unbroken.local.apiserver.driver import serving
from unbroken.local.machines.pool import MachinePool, MachineRequests, PoolOptions
from unbroken.local.node import NodeOptions
from unbroken.operator import definitions
from unbroken.operator.kinds import MachineObject
from unbroken.spec.nodes.kinds import MACHINE, MachineSpec

STORY_SECONDS = 60


def first_index() -> int:
    """Return addresses of its own for each test process."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0")
    return 160 + int(worker.removeprefix("gw"))


class Companion:
    """A program that fails at first and then runs until it is stopped."""

    def __init__(self) -> None:
        self.story: list[str] = []
        self._moved = asyncio.Event()

    async def run(self, client: KubeClient, options: NodeOptions) -> None:
        """Run as a companion of the pool."""
        # The node is there when its companions begin.
        await client.get(Node, options.name)
        if not self.story:
            self._note(f"failed beside {options.name}")
            raise WorldError("not yet")
        self._note("began")
        try:
            await asyncio.Event().wait()
        finally:
            self._note("stopped")

    def _note(self, word: str) -> None:
        self.story.append(word)
        self._moved.set()

    async def until(self, *words: str) -> None:
        """Wait until the story has these words."""
        while self.story != list(words):
            self._moved.clear()
            await self._moved.wait()


def options_in(directory: Path) -> Callable[[str, MachineSpec, int, str], NodeOptions]:
    """Return options of small nodes."""

    def make(name: str, spec: MachineSpec, index: int, boot_id: str) -> NodeOptions:
        place = directory / "nodes" / name
        return NodeOptions(name, place, index, cpu="1", memory="1Gi", boot_id=boot_id)

    return make


async def phase(informers: Informers, name: str, wanted: str) -> None:
    """Wait until a machine has reached a phase."""
    moved = asyncio.Event()
    machines = informers.of(MachineObject)
    machines.subscribe(lambda *_: moved.set())
    while True:
        moved.clear()
        found = machines.get(name)
        if found is not None and MACHINE.status_of(found)[0].phase.value == wanted:
            return
        await moved.wait()


async def story(directory: Path, client: KubeClient) -> None:
    """Fail, run, lose power, get it back, be deleted."""
    await definitions.install(client)
    requests = MachineRequests(client)
    await requests.ensure(1)
    informers, companion = Informers(client), Companion()
    nodes = directory / "nodes"
    options = PoolOptions(
        *(nodes, directory / "logs", first_index(), options_in(directory)),
        companions=[companion.run],
    )
    pool = MachinePool(client, informers, options)
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(informers.run()), tasks.create_task(pool.run())]
        await pool.settled()
        await companion.until("failed beside node-0", "began")
        await phase(informers, "node-0", "Running")

        await annotate(client, "off")
        await companion.until("failed beside node-0", "began", "stopped")
        await phase(informers, "node-0", "Pending")
        await annotate(client, None)
        await companion.until("failed beside node-0", "began", "stopped", "began")

        await client.raw("DELETE", f"{MACHINE.path}/node-0")
        await companion.until("failed beside node-0", "began", "stopped", "began", "stopped")
        for task in running:
            task.cancel()


async def annotate(client: KubeClient, power: str | None) -> None:
    """Cut the power of the node, or give it back."""
    body = {"metadata": {"annotations": {"unbroken.dev/power": power}}}
    await client.merge("api/v1/nodes/node-0", body)


async def test_a_companion_lives_as_long_as_its_nodes_power(tmp_path: Path) -> None:
    async with asyncio.timeout(STORY_SECONDS), serving(tmp_path / "api") as server:
        client = connect(server.internal_kubeconfig)
        try:
            await story(tmp_path, client)
        finally:
            await client.close()
