"""The processes of one machine: its node, its lifecycle scripts, and other programs.

The pool orders it to switch on, to cut and to reset; a callback reports its progress. Cancelling it
leaves pods and scripts running, for the next pool to find.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from unbroken.errors import UnbrokenError
from unbroken.kube.backoff import Backoff
from unbroken.kube.client import KubeClient
from unbroken.kube.clock import entropy, monotonic, pause
from unbroken.local.machines.decisions.machine import ScriptReport, Stage
from unbroken.local.machines.decisions.scripts import ScriptKind
from unbroken.local.node import NodeOptions, run_node
from unbroken.local.node.driver import pods_below
from unbroken.local.node.processes.process import Launcher
from unbroken.log_lines import Log

from .scripts import ScriptPlace, kill_gpu_users, kill_pods, kill_scripts, run_script

log = Log(__name__)

CUT_SECONDS = 0.2
"""Seconds for a runner that is cut off: it stops within a few rounds of the loop.

Its longer waits, such as those for its server's clients, do not write to the API.
"""
AGAIN = Backoff(first=0.5, limit=60.0)
"""Seconds until a node or a companion that has failed is started again."""
SETTLED_SECONDS = 60.0
"""Seconds of running that count as a successful start."""
POWER_CUTS = "power-cuts"
"""File of a machine's directory with the number of its power cuts."""

Companion = Callable[[KubeClient, NodeOptions], Awaitable[None]]
"""A program that runs with a node while it is on. It ends only with the node's power; a program
that ends or fails earlier is started again."""


@dataclass(frozen=True, slots=True)
class PoolResources:
    """Resources that all machines of a pool share."""

    client: KubeClient
    launcher: Launcher
    """Launcher of lifecycle scripts."""
    companions: Sequence[Companion] = ()


class MachineNode:
    """Runs one machine; `changed` is called whenever it got further or back."""

    def __init__(
        self,
        shared: PoolResources,
        directory: Path,
        tasks: asyncio.TaskGroup,
        changed: Callable[[], None],
    ) -> None:
        self.stage = Stage.UNKNOWN
        self.trouble = ""
        """Why its node does not run now; empty: it does, or is not wanted."""
        self.script = ScriptReport()
        self._shared = shared
        self._directory = directory
        self._tasks = tasks
        self._changed = changed
        self._life: asyncio.Task[None] | None = None
        self._parts: asyncio.TaskGroup | None = None
        self._runner: asyncio.Task[None] | None = None
        self._options: NodeOptions | None = None
        self._registered = asyncio.Event()

    @property
    def name(self) -> str:
        """Name of the machine and its node."""
        return self._directory.name

    # --- the pool's orders

    def switch_on(self, options: NodeOptions, place: ScriptPlace) -> None:
        """Begin to run it; must not run already."""
        assert self._life is None
        if self.stage is Stage.DARK:
            log.info("machine powered on", node=self.name)
        self.script, self.trouble = ScriptReport(), ""
        self.stage = Stage.PREPARING
        self._life = self._tasks.create_task(self._live(options, place), name=self.name)

    async def cut(self) -> None:
        """Kill everything that runs of it. Its work is not undone: its pods are found dead
        later."""
        log.warning("machine powered off", node=self.name)
        self._count_cut()
        life = self._life
        if life is not None:
            life.cancel()
            await asyncio.wait({life}, timeout=CUT_SECONDS)
        await asyncio.to_thread(self._kill)
        if life is not None:
            await asyncio.wait({life})
            self._life = None
            # Programs that were being started while the power went.
            await asyncio.to_thread(self._kill)
        self.stage, self.trouble, self.script = Stage.DARK, "", ScriptReport()

    async def reset(self) -> None:
        """Kill what uses the GPUs; nothing is started on them before all of it is dead."""
        assert self._runner is not None
        assert self._parts is not None
        await _stopped(self._runner)
        count = await asyncio.to_thread(kill_gpu_users, self._directory)
        log.warning("GPUs reset", node=self.name, killed=count)
        self._runner = self._parts.create_task(self._keep_node())

    async def discard(self) -> None:
        """Remove its files; it must be dark."""
        assert self.stage is Stage.DARK
        await asyncio.to_thread(discard, self._directory)

    @property
    def cuts(self) -> int:
        """Return the number of power cuts."""
        return power_cuts(self._directory)

    def _count_cut(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        (self._directory / POWER_CUTS).write_text(str(self.cuts + 1))

    def _kill(self) -> None:
        kill_scripts(self._directory)
        kill_pods(self._directory)

    # --- its life

    async def _live(self, options: NodeOptions, place: ScriptPlace) -> None:
        self._options = options

        async def once() -> None:
            await self._live_once(place)

        await keep(f"machine={self.name}", once, self._set_trouble)

    async def _live_once(self, place: ScriptPlace) -> None:
        if not await self._script(place, ScriptKind.ON_CREATE):
            self._enter(Stage.FAILED)
            # Until it is rebooted or deleted.
            await asyncio.Event().wait()
        self._enter(Stage.JOINING)
        self._registered.clear()
        async with asyncio.TaskGroup() as self._parts:
            self._runner = self._parts.create_task(self._keep_node())
            await self._registered.wait()
            for companion in self._shared.companions:
                self._parts.create_task(self._keep_companion(companion))
            self._enter(Stage.ON)
            await self._script(place, ScriptKind.ON_INIT_COMPLETE)
            # The group must not end while a reset has stopped its only task.
            await asyncio.Event().wait()

    def _enter(self, stage: Stage) -> None:
        self.stage = stage
        self._changed()

    async def _script(self, place: ScriptPlace, kind: ScriptKind) -> bool:
        def report_trouble(report: ScriptReport) -> None:
            self.script = report
            self._changed()

        return await run_script(place, kind, self._shared.launcher, report_trouble)

    async def _keep_node(self) -> None:
        def registered() -> None:
            self._registered.set()
            self._set_trouble("")

        options = self._options
        assert options is not None

        def run() -> Awaitable[None]:
            return run_node(self._shared.client, options, on_registered=registered)

        await keep(f"node={self.name}", run, self._set_trouble)

    def _set_trouble(self, trouble: str) -> None:
        if trouble != self.trouble:
            self.trouble = trouble
            self._changed()

    async def _keep_companion(self, companion: Companion) -> None:
        options = self._options
        assert options is not None

        def run() -> Awaitable[None]:
            return companion(self._shared.client, options)

        await keep(f"companion of node={self.name}", run, lambda _: None)


async def keep(
    what: str, start: Callable[[], Awaitable[None]], report_trouble: Callable[[str], None]
) -> None:
    """Run a program until cancelled, again and again; `report_trouble` is called with the reason of
    each restart."""
    random, failures = entropy(), 0
    while True:
        began = monotonic()
        try:
            await start()
            reason = "it ended by itself"
        except (UnbrokenError, OSError) as error:
            reason = str(error) or type(error).__name__
        except Exception as error:
            # A bug of one program must not end the nodes.
            log.exception("program of a machine failed", program=what)
            reason = f"{type(error).__name__}: {error}"
        failures = 1 if monotonic() - began > SETTLED_SECONDS else failures + 1
        seconds = AGAIN.delay(failures, random)
        log.warning(
            "program of a machine failed",
            program=what,
            failures=failures,
            retry_seconds=seconds,
            error=reason,
        )
        report_trouble(f"it does not run and is tried again: {reason}")
        await pause(seconds)


async def _stopped(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait({task})


def power_cuts(directory: Path) -> int:
    """Return the number of power cuts of the machine with this directory."""
    try:
        return int((directory / POWER_CUTS).read_text())
    except (FileNotFoundError, ValueError):
        return 0


def discard(directory: Path) -> None:
    """Remove the files of a node of which nothing runs.  Blocks."""
    for files in pods_below(directory):
        files.discard()
    if directory.exists():
        shutil.rmtree(directory)
