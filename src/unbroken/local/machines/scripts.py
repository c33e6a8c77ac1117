"""Lifecycle scripts of machines, their copies on the machine, and the cut of a node's power.

Each attempt has a supervisor of its own, as a container has. It continues when the pool is killed,
the next pool finds it again, and nothing that it started outlives it. Files on disk:
nodes/NAME/lifecycle/KIND/{record.json,ATTEMPT/,source/} and resource_config.json.

A script runs as the user of `unbroken up`, with that user's rights; only its own copy of the source
separates it from the other machines.

Callers of the cluster API choose addresses and file names of scripts. So both are resolved when
they are used, and nothing outside the mapped folder is run or copied.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    LocalSource,
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
from unbroken.local.node.driver import pods_below
from unbroken.local.node.pods.events import Exit
from unbroken.local.node.processes.isolation import Isolation
from unbroken.local.node.processes.process import (
    MARKER,
    Launcher,
    Run,
    adopt,
    kill_marked,
    select_readable,
)
from unbroken.local.node.processes.supervisor import (
    SIGKILL_ALL,
    descendants,
    start_ticks,
    write_json,
)
from unbroken.log_lines import Log
from unbroken.spec.nodes.kinds import MachineSpec, script_names

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


FILES_MAX = 10_000
BYTES_MAX = 1 << 30
DEPTH_MAX = 32
"""Lifecycle scripts of HyperPod's samples: about 100 files of 1 MB together, 5 folders deep."""


def source_folder(source: LocalSource, file: str) -> Path:
    """The folder of a script, which is there; SpecError for one outside the mapped folder."""
    root = _real(source.root)
    folder = _real(root.joinpath(*source.names))
    script = _real(folder.joinpath(*script_names(file)))
    for path in (folder, script):
        if not path.is_relative_to(root):
            raise SpecError(f"{path} is outside the mapped folder {root}")
    if not script.is_relative_to(folder):
        raise SpecError(f"{script} is outside its source {folder}")
    if not script.is_file():
        raise SpecError(f"there is no such file in {folder}")
    return folder


def copy_source(folder: Path, target: Path) -> list[str]:
    """Copy a folder; names in it that were left out, because they lead out or are no files.

    A link stays a link if it leads to a place in the copy.  WorldError for a folder that is too
    large.  Blocks.
    """
    copy = _Copy(folder)
    copy.add(folder, target, DEPTH_MAX)
    return copy.left_out


def script_in(copy: Path, file: str) -> Path:
    """The script in a copy; SpecError where it is not a file in there."""
    script = copy.joinpath(*script_names(file))
    if not _real(script).is_relative_to(_real(copy)) or not script.is_file():
        raise SpecError("the file is a link that leads out of its source")
    return script


class _Copy:
    """One copy while it is made."""

    def __init__(self, folder: Path) -> None:
        self.left_out: list[str] = []
        self._folder = folder
        self._files = 0
        self._bytes = 0

    def add(self, folder: Path, target: Path, depth: int) -> None:
        """Copy a folder and what is below it, at most `depth` folders deep."""
        if depth == 0:
            raise self._too_large(f"more than {DEPTH_MAX} folders deep")
        target.mkdir(mode=0o700)
        with os.scandir(folder) as entries:
            for entry in entries:
                self._files += 1
                if self._files > FILES_MAX:
                    raise self._too_large(f"more than {FILES_MAX} files")
                self._add_entry(entry, target / entry.name, depth)

    def _add_entry(self, entry: os.DirEntry[str], target: Path, depth: int) -> None:
        if entry.is_symlink():
            link = Path(entry.path)
            if self._stays_inside(link):
                target.symlink_to(link.readlink())
            else:
                self.left_out.append(str(link.relative_to(self._folder)))
        elif entry.is_dir(follow_symlinks=False):
            self.add(Path(entry.path), target, depth - 1)
        elif entry.is_file(follow_symlinks=False):
            self._bytes += entry.stat(follow_symlinks=False).st_size
            if self._bytes > BYTES_MAX:
                raise self._too_large(f"more than {BYTES_MAX >> 20} MiB")
            shutil.copy2(entry.path, target, follow_symlinks=False)
        else:
            self.left_out.append(str(Path(entry.path).relative_to(self._folder)))

    def _stays_inside(self, link: Path) -> bool:
        return not link.readlink().is_absolute() and _real(link).is_relative_to(_real(self._folder))

    def _too_large(self, reason: str) -> WorldError:
        return WorldError(f"the scripts in {self._folder} are too large to copy: {reason}")


def _real(path: Path | str) -> Path:
    """The path without links.  Unlike Path.resolve it raises nothing for links in a circle."""
    return Path(os.path.realpath(path))


def kill_pods(directory: Path) -> None:
    """Kill every process of a node's pods, beginning with those that would report it. Blocks."""
    kill_runs([run for files in pods_below(directory) for run in files.live_runs()])


def kill_runs(runs: Sequence[Run]) -> None:
    """Kill every process of these, and close them.  Blocks."""
    try:
        for run in runs:
            _kill_run(run)
        for run in runs:
            # Processes that had left its family.
            kill_marked(run.details[MARKER])
    finally:
        for run in runs:
            run.close()


def kill_gpu_users(directory: Path) -> int:
    """Kill the containers of a node that hold GPUs; return their number. Blocks.

    Their supervisors stay alive to report how they ended.
    """
    runs = list(_gpu_users(directory))
    try:
        for run in runs:
            run.signal(SIGKILL_ALL)
        for run in runs:
            select_readable(run.pidfd)
            kill_marked(run.details[MARKER])
    finally:
        for run in runs:
            run.close()
    return len(runs)


def _gpu_users(directory: Path) -> Iterator[Run]:
    for files in pods_below(directory):
        for run in files.live_runs() if (files.recorded() or {}).get("gpus") else ():
            # Containers of earlier versions do not record it; those of a pod with GPUs may use
            # them.
            if run.details.get("gpus", "all"):
                yield run
            else:
                run.close()


def _kill_run(run: Run) -> None:
    # Stop all of them first: a process that sees another die would react, and stopped ones cannot.
    run.signal(signal.SIGSTOP)
    stopped: dict[int, int] = {}
    while born := {pid for pid in descendants(run.supervisor) if pid not in stopped}:
        for pid in born:
            stopped[pid] = _signal(pid, start_ticks(pid), signal.SIGSTOP)
    for pid, ticks in stopped.items():
        _signal(pid, ticks, signal.SIGKILL)
    run.signal(signal.SIGKILL)


def _signal(pid: int, ticks: int | None, number: int) -> int:
    """Signal the process that started at `ticks`, if it lives; gives `ticks` back, or 0."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return 0
    try:
        # The number was checked after the descriptor was had: it cannot change hands.
        if ticks is None or start_ticks(pid) != ticks:
            return 0
        signal.pidfd_send_signal(handle, number)
    except ProcessLookupError:
        return 0
    finally:
        os.close(handle)
    return ticks
