"""A job of a framework's script under torchrun or `unbroken run`, as `frameworks.py` kills it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from recovery_launch import UP, end, free_port, parent

LOOK_SECONDS = 0.02
START_SECONDS = 300.0
TOLD_SECONDS = 90.0
"""Longest wait for the incident of a kill to be complete; without a sign of training: a minute."""
TEACH_SECONDS = 600.0
"""Longest wait for a template to have learned what a script imports."""
ASKS_MISSING = """
import importlib.util, sys
print(*[name for name in sys.argv[1:] if importlib.util.find_spec(name) is None])
"""
TICKS = os.sysconf("SC_CLK_TCK")
Pids = frozenset[int]
T = TypeVar("T")


class Unmeasured(Exception):
    """A trial did not come to its end; the text says why."""


@dataclass(frozen=True)
class Framework:
    """A framework, and the script that trains with it."""

    name: str
    modules: tuple[str, ...]
    script: Path

    @property
    def install(self) -> str:
        """Packages to install."""
        return " ".join(("torch==2.13.0", *self.modules))

    def missing(self, python: Path) -> list[str]:
        """Return the modules that the environment lacks."""
        command = [str(python), "-c", ASKS_MISSING, "torch", *self.modules]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise Unmeasured(f"{python} cannot run: {done.stderr.strip()}")
        return done.stdout.split()


HERE = Path(__file__).parent
FRAMEWORKS = (
    Framework("hf-trainer", ("transformers", "accelerate"), HERE / "train_hf_trainer.py"),
    Framework("accelerate", ("accelerate",), HERE / "train_accelerate.py"),
    Framework("lightning", ("lightning",), HERE / "train_lightning.py"),
)


@dataclass(frozen=True)
class Setting:
    """Size of a job, and where it runs."""

    nodes: int
    ranks_per_node: int
    python: Path
    cluster: Path
    """Directory of the local cluster."""

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.nodes * self.ranks_per_node


def until(found: Callable[[], T | None], seconds: float, what: str) -> T:
    """Look until there is something; Unmeasured says what did not come."""
    deadline = time.monotonic() + seconds
    while (seen := found()) is None:
        if time.monotonic() > deadline:
            raise Unmeasured(f"no {what} within {seconds:.0f} s")
        time.sleep(LOOK_SECONDS)
    return seen


class Job:
    """A job of one launcher; `stop` it in any case."""

    def __init__(self, framework: Framework, setting: Setting, folder: Path) -> None:
        self.framework, self.setting, self.folder = framework, setting, folder
        self.steps_file = folder / "steps.jsonl"
        folder.mkdir()
        self.steps_file.touch()
        self.launchers: list[subprocess.Popen[bytes]] = []

    def environment(self) -> dict[str, str]:
        """Return the environment of the launcher and its workers."""
        return {
            **os.environ,
            "FRAMEWORK_STEPS": str(self.steps_file),
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }

    def start(self) -> None:
        """Start the launchers."""
        raise NotImplementedError

    def spawn(self, command: list[str], more: Mapping[str, str]) -> None:
        """Start a launcher in a session of its own, with its output in a file."""
        with (self.folder / f"launcher-{len(self.launchers)}.log").open("wb") as log:
            self.launchers.append(
                subprocess.Popen(
                    command,
                    env={**self.environment(), **more},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )

    def steps(self) -> list[dict[str, Any]]:
        """Return all steps of all ranks, in the order of their lines; a torn last line is left
        out."""
        lines = self.steps_file.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def first_steps(self, old: Pids = frozenset()) -> dict[int, dict[str, Any]] | None:
        """Return the first step of each rank in a process that is not an old one; None: some rank
        has none."""
        codes = [one.poll() for one in self.launchers]
        if any(code is not None for code in codes):
            raise Unmeasured(f"a launcher ended with {codes}; see {self.folder}")
        found: dict[int, dict[str, Any]] = {}
        for one in self.steps():
            if one["pid"] not in old:
                found.setdefault(one["rank"], one)
        return found if len(found) == self.setting.ranks else None

    def workers(self) -> dict[int, int]:
        """Return the newest process of each rank."""
        return {one["rank"]: one["pid"] for one in self.steps()}

    def kill(self, bound: float) -> tuple[float, float]:
        """Kill the last rank's worker; return when, and when all ranks had made a step again."""
        old = frozenset(one["pid"] for one in self.steps())
        at = time.time()
        os.kill(self.workers()[self.setting.ranks - 1], signal.SIGKILL)
        again = until(lambda: self.first_steps(old), bound, "step of all ranks after the kill")
        return at, max(one["at"] for one in again.values())

    def stop(self) -> None:
        """End launchers and workers."""
        end(self.launchers, 15.0)
        mark = f"FRAMEWORK_STEPS={self.steps_file}".encode()
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            with suppress(OSError):
                if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    os.kill(pid, signal.SIGKILL)


class Torchrun(Job):
    """torchrun with a new store for each attempt: without it no attempt follows on a kill."""

    def start(self) -> None:
        """Start an agent for each node; the first hosts the rendezvous."""
        endpoint = f"127.0.0.1:{free_port()}"
        for number in range(self.setting.nodes):
            command = [
                str(self.setting.python),
                "-m",
                "torch.distributed.run",
                f"--nnodes={self.setting.nodes}",
                f"--nproc-per-node={self.setting.ranks_per_node}",
                "--rdzv-backend=c10d",
                f"--rdzv-endpoint={endpoint}",
                "--rdzv-id=bench",
                f"--rdzv-conf=is_host={int(number == 0)}",
                "--local-addr=127.0.0.1",
                "--max-restarts=1000",
                str(self.framework.script),
            ]
            self.spawn(command, {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})


class Unbroken(Job):
    """`unbroken run` on the local cluster; `cache` holds what earlier runs have learned."""

    def __init__(self, framework: Framework, setting: Setting, folder: Path, cache: Path) -> None:
        super().__init__(framework, setting, folder)
        self.cache = cache
        self.name = folder.name

    def unbroken(self, *words: str) -> str:
        """Run a command on the local cluster; return its output."""
        command = [*UP, words[0], "--dir", str(self.setting.cluster), *words[1:]]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise Unmeasured(f"unbroken {words[0]}: {done.stderr.strip()}")
        return done.stdout

    def start(self) -> None:
        """Start `unbroken run`."""
        command = [*UP, "run", "--dir", str(self.setting.cluster), "--name", self.name]
        command += [f"--nnodes={self.setting.nodes}", "--max-restarts=1000"]
        command += [f"--nproc-per-node={self.setting.ranks_per_node}", str(self.framework.script)]
        more = {"PYTHON_EXEC": str(self.setting.python), "XDG_CACHE_HOME": str(self.cache)}
        self.spawn(command, more)

    def told(self) -> dict[str, Any]:
        """Return the incident of the kill as `unbroken explain` shows it, once it is closed."""

        def closed() -> dict[str, Any] | None:
            found = json.loads(self.unbroken("explain", self.name, "-o", "json"))["incidents"]
            return found[-1] if found and found[-1].get("outcome") else None

        return until(closed, TOLD_SECONDS, "closed incident")

    def starts(self) -> list[str]:
        """Return how each rank's worker was started: warm or cold."""
        pods = json.loads(self.unbroken("describe", self.name, "-o", "json"))["pods"]
        workers = [one for pod in pods for one in (pod.get("agent") or {}).get("workers", [])]
        return sorted(str(one.get("start")) for one in workers)

    def helpers(self) -> Helpers:
        """Return the memory and processor time of all that is not a worker, of all agents."""
        workers = set(self.workers().values())
        agents = {parent(pid) for pid in workers}
        below = children()
        others = [pid for pid in family(below, agents, workers) if pid not in agents]
        return Helpers(
            sum(map(memory_mib, others)),
            sum(map(memory_mib, workers)),
            sum(own_seconds(pid) + reaped_seconds(pid) for pid in others)
            + sum(map(reaped_seconds, agents)),
        )

    def has_learned(self) -> bool | None:
        """True once a template has noted what it has learned; None before."""
        folder = self.cache / "unbroken/imports"
        return True if folder.exists() and any(folder.glob("[0-9a-f]*.json")) else None

    def stop(self) -> None:
        """Delete the job, and end what is left of it."""
        with suppress(Unmeasured):
            self.unbroken("delete", self.name)
        super().stop()


@dataclass(frozen=True)
class Helpers:
    """The price of warm starts: templates, parked workers, and trials of imports."""

    mib: float
    """Proportional set size of templates and parked workers, in MiB."""
    workers_mib: float
    """The same of the workers themselves, to compare."""
    cpu_seconds: float
    """Processor time of templates, parked workers and trials, those that have ended too."""


def children() -> dict[int, list[int]]:
    """Return the processes of this machine by their parent."""
    found: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            found.setdefault(parent(int(name)), []).append(int(name))
    return found


def family(below: Mapping[int, list[int]], roots: set[int], without: set[int]) -> Iterator[int]:
    """Yield the roots and all below them, except for some processes and all below those."""
    for root in roots - without:
        yield root
        yield from family(below, set(below.get(root, ())), without)


def memory_mib(pid: int) -> float:
    """Return the proportional set size of a process in MiB; 0 if it has ended."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1024
    return 0.0


def own_seconds(pid: int) -> float:
    """Return the processor time of a process."""
    return _seconds(pid, 11)


def reaped_seconds(pid: int) -> float:
    """Return the processor time of the children whose ends a process has taken note of."""
    return _seconds(pid, 13)


def _seconds(pid: int, field: int) -> float:
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[field]) + int(fields[field + 1])) / TICKS
    return 0.0
