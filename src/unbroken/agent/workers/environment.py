"""Command, environment variables and table of addresses that a worker is started with.

`pod_resourceconfig.json` has the addresses of all ranks, for programs in the pod that read it.
HyperPod's agent 1.1.3 writes it whenever an operator sends both a version and addresses. The table
is resized to the number of nodes, and the sent addresses replace the known ones.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import Any

import unbroken
from unbroken.agent.options import ELASTIC_OFF, ELASTIC_VARIABLE, LaunchOptions, Script
from unbroken.core.agent.events import ProgramStage
from unbroken.log_lines import Log
from unbroken.spec.job.types import PRELOAD_VARIABLE, WARM_VARIABLE
from unbroken.wire.agent import StartCommand
from unbroken.wire.warm import LEARNT_VARIABLE, MODULE, RUN_PATH, SCRIPT
from unbroken.wire.worker import VARIABLE as PAGE_VARIABLE

OWN = (
    "UNBROKEN_AGENT_KEY_FILE", "UNBROKEN_AGENT_AUTH", PAGE_VARIABLE, WARM_VARIABLE,
    PRELOAD_VARIABLE, LEARNT_VARIABLE,
)  # fmt: skip
"""Variables of the agent that no worker inherits."""
BOOT = f"{os.path.dirname(unbroken.__file__)}/worker/boot/boot.py"
"""Path of the program that the worker's interpreter runs; that interpreter need not have
unbroken."""
ACCELERATE_LAUNCH = f"{os.path.dirname(unbroken.__file__)}/worker/accelerate_launch.py"
"""Path of the script of workers for whose command accelerate reads the options."""
_RUN_PATH = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"


@dataclass(frozen=True, slots=True)
class Program:
    """A process to be started."""

    local_rank: int
    command: tuple[str, ...]
    environment: Mapping[str, str]
    directory: str
    """Directory of its stdout.log, stderr.log and error.json."""
    prefix: bytes
    """Prefix of each of its lines on the console."""
    lent: Mapping[int, int] = field(default_factory=dict)
    """Further descriptors that it inherits: number there, number here."""
    kind: str = ""
    """Kind as in wire/warm.py; empty: it does not start by `BOOT`, and never warm."""
    arguments: tuple[str, ...] = ()
    """Arguments; the first is the script's or module's name, if there is a kind."""


def programs(
    options: LaunchOptions,
    stage: ProgramStage,
    command: StartCommand,
    directory: str,
    boots: bool = False,
) -> tuple[Program, ...]:
    """Return the processes of a stage; `directory` is the attempt's.

    With `boots` the training processes are started by `BOOT`.
    """
    script, count = options.script, options.nproc
    if stage is not ProgramStage.TRAIN:
        chosen = options.pre_train if stage is ProgramStage.PRE_TRAIN else options.post_train
        assert chosen is not None
        script, count = chosen, 1
    name = options.role if stage is ProgramStage.TRAIN else stage.value
    kind = kind_of(script) if boots and stage is ProgramStage.TRAIN else ""
    return tuple(
        Program(
            local_rank,
            argv(script, local_rank, kind),
            environment(options, command, local_rank, f"{directory}/{local_rank}"),
            f"{directory}/{local_rank}",
            f"[{name}{local_rank}]:".encode(),
            kind=kind,
            arguments=_words(script, local_rank) if kind else (),
        )
        for local_rank in range(count)
    )


def python() -> str:
    """Return the workers' interpreter."""
    return os.environ.get("PYTHON_EXEC", sys.executable)


def kind_of(script: Script) -> str:
    """Return the kind for `BOOT`; empty: the script is no Python."""
    if script.is_run_path:
        return RUN_PATH
    if script.is_program:
        return ""
    return MODULE if script.is_module else SCRIPT


def argv(script: Script, local_rank: int, kind: str = "") -> tuple[str, ...]:
    """Return the command line of a worker, as torchrun would make it, or by `BOOT` if it has a
    kind."""
    words = _words(script, local_rank)
    if kind:
        return (python(), "-u", BOOT, "run", kind, *words)
    if script.is_run_path:
        return (python(), "-u", "-c", _RUN_PATH, *words)
    if script.is_program:
        return words
    flags = ("-u", "-m") if script.is_module else ("-u",)
    return (python(), *flags, *words)


def _words(script: Script, local_rank: int) -> tuple[str, ...]:
    # torchrun's macro `${local_rank}` (torch.distributed.elastic.utils.api.macros).
    given = [Template(word).safe_substitute(local_rank=local_rank) for word in script.arguments]
    return (script.path, *given)


def environment(
    options: LaunchOptions, command: StartCommand, local_rank: int, directory: str
) -> dict[str, str]:
    """Return all variables of a worker.

    GROUP_WORLD_SIZE is the number of nodes, as torchrun has it (HyperPod's agent 1.1.3 gives
    WORLD_SIZE there, which no client of it reads).
    """
    result = {name: value for name, value in os.environ.items() if name not in OWN}
    nproc, attempt = options.nproc, str(command.attempt)
    rank, world = str(command.rank * nproc + local_rank), str(command.nnodes * nproc)
    if nproc > 1:
        result.setdefault("OMP_NUM_THREADS", "1")
    result.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    result.setdefault(ELASTIC_VARIABLE, ELASTIC_OFF)
    return result | {
        "LOCAL_RANK": str(local_rank),
        "RANK": rank,
        "GROUP_RANK": str(command.rank),
        "ROLE_RANK": rank,
        "ROLE_NAME": options.role,
        "LOCAL_WORLD_SIZE": str(nproc),
        "WORLD_SIZE": world,
        "GROUP_WORLD_SIZE": str(command.nnodes),
        "ROLE_WORLD_SIZE": world,
        "MASTER_ADDR": command.master_addr,
        "MASTER_PORT": str(command.master_port),
        "JOB_RESTART_COUNT": attempt,
        "TORCHELASTIC_RESTART_COUNT": attempt,
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_RUN_ID": options.run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_ERROR_FILE": f"{directory}/error.json",
    }


log = Log(__name__)

DIRECTORY = "/opt/ml/input/config"
DIRECTORY_VARIABLE = "UNBROKEN_RESOURCE_CONFIG_DIR"
NAME = "pod_resourceconfig.json"


def merge(known: list[str | None], command: StartCommand) -> list[str | None]:
    """Return the table after a command."""
    table = (known + [None] * command.nnodes)[: command.nnodes]
    for rank, ip in command.rank_ips or ():
        table[rank] = ip
    return table


class RankTable:
    """The file and its last contents."""

    def __init__(self, directory: Path) -> None:
        self._file = directory / NAME
        self._ips: list[str | None] = []
        self.version: str | None = None
        """Version that the file holds; operators send again until it is theirs."""
        self.warning = ""
        """Why the last write failed."""

    def load(self) -> None:
        """Take over what an earlier agent in this pod wrote."""
        try:
            result: Any = json.loads(self._file.read_bytes())
            ips = [ip if isinstance(ip, str) else None for ip in result["ips"]]
            version = result["ips_timestamp"]
        except (OSError, ValueError, KeyError, TypeError):
            return
        if isinstance(version, str):
            self._ips, self.version = ips, version

    def take(self, command: StartCommand) -> None:
        """Write the addresses of the command; a file that cannot be written stops nothing."""
        if command.ip_version is None or command.rank_ips is None:
            return
        table = merge(self._ips, command)
        current = table[command.rank] if command.rank < len(table) else None
        value = {"ips": table, "current_pod_ip": current, "ips_timestamp": command.ip_version}
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            draft = self._file.with_suffix(".draft")
            draft.write_text(json.dumps(value))
            os.replace(draft, self._file)
        except OSError as error:
            self.warning = f"cannot write {self._file}: {error.strerror}"
            log.warning("rank table not written", error=self.warning, variable=DIRECTORY_VARIABLE)
            return
        self._ips, self.version, self.warning = table, command.ip_version, ""
