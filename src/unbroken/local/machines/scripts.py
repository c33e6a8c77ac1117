"""Lifecycle scripts of machines, run on this host together with their nodes.

Each attempt has a supervisor of its own, as a container has. It continues when the pool is killed,
the next pool finds it again, and nothing that it started outlives it. Files on disk:
nodes/NAME/lifecycle/KIND/{record.json,ATTEMPT/,source/} and resource_config.json.

A script runs as the user of `unbroken up`, with that user's rights; only its own copy of the source
separates it from the other machines.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from unbroken.core.tick import Tick
from unbroken.errors import SpecError, WorldError
from unbroken.kube.clock import pause, rfc3339, wall
from unbroken.local.machines.decisions.machine import SKIPPED, SUCCEEDED, ScriptReport
from unbroken.local.machines.decisions.scripts import (
    Ended,
    Event,
    Keep,
    Looked,
    ScriptKind,
    ScriptRecord,
    ScriptRun,
    Start,
    Unmapped,
    Unusable,
    after_boot,
    instance_id,
    local_source,
)
from unbroken.local.node.context import base_environment
from unbroken.local.node.pods.events import Exit
from unbroken.local.node.processes.isolation import Isolation
from unbroken.local.node.processes.process import MARKER, Launcher, Run, adopt
from unbroken.local.node.processes.supervisor import SIGKILL_ALL, write_json
from unbroken.log_lines import Log
from unbroken.spec.nodes.kinds import MachineSpec

from .power import kill_runs
from .script_copies import copy_source, script_in, source_folder

log = Log(__name__)

RESOURCE_CONFIG = "SAGEMAKER_RESOURCE_CONFIG_PATH"
"""Environment variable that names the file (HyperPod, "lifecycle scripts")."""
NODE, ADDRESS = "UNBROKEN_NODE", "UNBROKEN_NODE_ADDRESS"
"""Environment variables for the script's own instance in that file: all share this host's own
addresses."""
STREAM = "LifecycleConfig"
"""Stream of the logs, as HyperPod names it (reference section 1.5)."""
_REDIRECT = 'exec "$@" >>"$0" 2>&1'
TAIL_BYTES, LINE_MAX = 4096, 200
RECORD = "record.json"
LEFT_OUT_SHOWN = 20
"""Files that were not copied, in the log of each attempt."""


@dataclass(frozen=True, slots=True)
class ScriptPlace:
    """Location of one machine's scripts, and their environment."""

    name: str
    address: str
    directory: Path
    """Directory of the node."""
    spec: MachineSpec
    logs: Path
    sources: Mapping[str, str]
    resource_config: Mapping[str, Any]

    def file(self, kind: ScriptKind) -> str:
        """The script's file below its source; empty: there is none."""
        life_cycle = self.spec.life_cycle
        return life_cycle.on_create if kind is ScriptKind.ON_CREATE else life_cycle.on_init_complete

    @property
    def log(self) -> Path:
        """Return the path of the output of both scripts."""
        group = _file_name(self.spec.instance_group) or "ungrouped"
        return self.logs / STREAM / group / f"{_file_name(instance_id(self.name))}.log"


async def run_script(
    place: ScriptPlace,
    kind: ScriptKind,
    launcher: Launcher,
    on_report: Callable[[ScriptReport], None],
) -> bool:
    """Run one script of a machine until it need run no more; return whether the machine may
    continue.

    Cancelled, it leaves the script running for the next call to find.
    """
    if not place.file(kind):
        return True
    return await _Script(place, kind, launcher, on_report).run()


class _Script:
    """Carries one script out."""

    def __init__(
        self,
        place: ScriptPlace,
        kind: ScriptKind,
        launcher: Launcher,
        on_report: Callable[[ScriptReport], None],
    ) -> None:
        self._place = place
        self._file = place.file(kind)
        self._launcher = launcher
        self._on_report = on_report
        self._directory = _scripts_below(place.directory) / kind.value
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._machine = ScriptRun(kind, self._file, _read_record(self._directory))
        self._run: Run | None = None

    async def run(self) -> bool:
        """As `run_script`."""
        self._tell()
        events: list[Event] = [self._look()]
        try:
            while not self._machine.record.is_over:
                event = events.pop() if events else await self._next()
                for effect in self._machine.step(event, wall()):
                    match effect:
                        case Keep(record):
                            self._keep(record)
                        case Start(attempt):
                            events += await self._start(attempt)
        finally:
            if self._run is not None:
                self._run.close()
        return self._machine.record.state in (SUCCEEDED, SKIPPED)

    def _look(self) -> Event:
        result = adopt(self._attempt(self._machine.record.attempts))
        if isinstance(result, Run):
            self._run = result
            return Looked(is_alive=True)
        return Looked(exit_code=result.exit_code if result is not None else None)

    def _source(self) -> Path | Unmapped | Unusable:
        """The folder of the script, where it was mapped to."""
        address = self._place.spec.life_cycle.source
        try:
            source = local_source(address, self._place.sources)
            if source is None:
                return Unmapped(address)
            return source_folder(source, self._file)
        except (SpecError, OSError) as error:
            return Unusable(f"it cannot be taken from {address}: {error}")

    def _keep(self, record: ScriptRecord) -> None:
        write_json(str(self._directory / RECORD), asdict(record))
        self._tell()
        log.info(
            "lifecycle script",
            node=self._place.name,
            file=self._file,
            state=record.state,
            failures=record.attempts,
            message=record.message,
        )

    async def _start(self, attempt: int) -> list[Event]:
        """Start an attempt; what came of it if it does not run now."""
        source = self._source()
        if isinstance(source, Unmapped | Unusable):
            return [source]
        directory = self._attempt(attempt)
        try:
            argv = await asyncio.to_thread(self._prepare, source, directory, attempt)
            identity = os.urandom(32).hex()
            request = self._request(argv, directory, identity)
            result = await self._launcher.run(request, {MARKER: identity}, wall())
        except (WorldError, SpecError, OSError) as error:
            return [Unusable(f"it cannot be started: {error}")]
        if isinstance(result, Exit):
            return [Ended(result.exit_code, result.message)]
        self._run = result
        return []

    def _prepare(self, source: Path, directory: Path, attempt: int) -> list[str]:
        """A copy of the source, as an instance downloads it, and the command in it.  Blocks."""
        for old in (directory, self._copy):
            if old.exists():
                shutil.rmtree(old)
        directory.mkdir(parents=True, mode=0o700)
        left_out = copy_source(source, self._copy)
        write_json(str(self._config), dict(self._place.resource_config))
        self._place.log.parent.mkdir(parents=True, exist_ok=True)
        with self._place.log.open("a", encoding="utf-8") as file:
            file.write(f"{rfc3339(wall())} {self._file}: attempt {attempt}\n")
            for name in left_out[:LEFT_OUT_SHOWN]:
                file.write(f"not copied, because it leads elsewhere or is no file: {name!r}\n")
        script = script_in(self._copy, self._file)
        with script.open("rb") as file:
            is_executable = file.read(2) == b"#!"
        if not is_executable:
            return ["/bin/sh", str(script)]
        script.chmod(script.stat().st_mode | 0o500)
        return [str(script)]

    @property
    def _copy(self) -> Path:
        return self._directory / "source"

    @property
    def _config(self) -> Path:
        return self._place.directory / "resource_config.json"

    def _attempt(self, attempt: int) -> Path:
        return self._directory / str(attempt)

    def _request(self, argv: Sequence[str], directory: Path, identity: str) -> dict[str, Any]:
        environment = {
            **base_environment(),
            MARKER: identity,
            RESOURCE_CONFIG: str(self._config),
            NODE: self._place.name,
            ADDRESS: self._place.address,
        }
        return {
            "directory": str(directory),
            "argv": ["/bin/sh", "-c", _REDIRECT, str(self._place.log), *argv],
            "env": environment,
            "cwd": str(self._copy),
            "isolation": Isolation.NONE.value,
            "mounts": [],
            "scratch": str(directory),
        }

    async def _next(self) -> Event:
        """Return the next event: the end of the attempt, or the time for another."""
        if self._run is not None:
            ended = await self._run.ended()
            self._run.close()
            self._run = None
            return Ended(ended.exit_code, await asyncio.to_thread(last_line, self._place.log))
        due = self._machine.deadline()
        assert due is not None
        await pause(due - wall())
        return Tick()

    def _tell(self) -> None:
        record = self._machine.record
        self._on_report(ScriptReport(record.state, record.message, str(self._place.log)))


def _scripts_below(node: Path) -> Path:
    return node / "lifecycle"


def _read_record(directory: Path) -> ScriptRecord:
    try:
        return msgspec.json.decode((directory / RECORD).read_bytes(), type=ScriptRecord)
    except FileNotFoundError:
        return ScriptRecord()
    except msgspec.MsgspecError as error:
        log.warning("record of a script ignored", file=directory / RECORD, error=error)
        return ScriptRecord()


def _file_name(text: str) -> str:
    """Return a name as that of one file, also if a user chose it."""
    return quote(text, safe="").replace("..", "%2E%2E")


def last_line(path: Path) -> str:
    """Return the last line of a file that is not empty."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        lines = file.read().decode("utf-8", "replace").split("\n")
    return next((line.strip()[:LINE_MAX] for line in reversed(lines) if line.strip()), "")


def _attempts(node: Path) -> list[Path]:
    """Directories of all attempts of a node that are on disk."""
    return [path.parent for path in _scripts_below(node).glob("*/*/run.json")]


def _alive(node: Path) -> list[Run]:
    return [run for path in _attempts(node) if isinstance(run := adopt(path), Run)]


def kill_scripts(node: Path) -> None:
    """Kill the scripts of a node, as its pods are killed when its power goes. Blocks.

    A killed script starts again when the node is switched on, and so does one that was given up.
    """
    kill_runs(_alive(node))
    _forget(node)
    for path in _scripts_below(node).glob(f"*/{RECORD}"):
        write_json(str(path), asdict(after_boot(_read_record(path.parent))))


async def stop_scripts(nodes: Path) -> None:
    """End the scripts of all nodes below a directory; the next pool starts them again."""
    directories = await asyncio.to_thread(lambda: list(nodes.glob("*/lifecycle")))
    for node in (directory.parent for directory in directories):
        runs = _alive(node)
        for run in runs:
            run.signal(SIGKILL_ALL)
        for run in runs:
            await run.ended()
            run.close()
        _forget(node)


def _forget(node: Path) -> None:
    for path in _attempts(node):
        shutil.rmtree(path)
