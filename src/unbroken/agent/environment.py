"""What a worker is started with: its command and its environment variables."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from string import Template

from unbroken.core.workers import Stage
from unbroken.wire.agent import StartCommand
from unbroken.wire.worker import VARIABLE as PAGE_VARIABLE

from .options import Options, Script

OWN = ("UNBROKEN_AGENT_TOKEN_FILE", "UNBROKEN_AGENT_AUTH", PAGE_VARIABLE)
"""Variables of the agent that no worker inherits."""
_RUN_PATH = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"


@dataclass(frozen=True, slots=True)
class Program:
    """A process to be."""

    local_rank: int
    command: tuple[str, ...]
    environment: Mapping[str, str]
    directory: str
    """Of its stdout.log, stderr.log and error.json."""
    prefix: bytes
    """Before each of its lines on the console."""
    lent: Mapping[int, int] = field(default_factory=dict)
    """What else it inherits: descriptor there, descriptor here."""


def programs(
    options: Options, stage: Stage, command: StartCommand, directory: str
) -> tuple[Program, ...]:
    """The processes of a stage; `directory` is the attempt's."""
    script, count = options.script, options.nproc
    if stage is not Stage.TRAIN:
        chosen = options.pre_train if stage is Stage.PRE_TRAIN else options.post_train
        assert chosen is not None
        script, count = chosen, 1
    name = options.role if stage is Stage.TRAIN else stage.value
    return tuple(
        Program(
            local_rank,
            argv(script, local_rank),
            environment(options, command, local_rank, f"{directory}/{local_rank}"),
            f"{directory}/{local_rank}",
            f"[{name}{local_rank}]:".encode(),
        )
        for local_rank in range(count)
    )


def argv(script: Script, local_rank: int) -> tuple[str, ...]:
    """The command line of a worker, as torchrun would make it."""
    # torchrun's macro `${local_rank}` (torch.distributed.elastic.utils.api.macros).
    given = [Template(word).safe_substitute(local_rank=local_rank) for word in script.arguments]
    python = os.environ.get("PYTHON_EXEC", sys.executable)
    if script.is_run_path:
        return (python, "-u", "-c", _RUN_PATH, script.path, *given)
    if script.is_program:
        return (script.path, *given)
    flags = ("-u", "-m") if script.is_module else ("-u",)
    return (python, *flags, script.path, *given)


def environment(
    options: Options, command: StartCommand, local_rank: int, directory: str
) -> dict[str, str]:
    """All variables of a worker.

    GROUP_WORLD_SIZE is the number of nodes, as torchrun has it (HyperPod's agent 1.1.3 gives
    WORLD_SIZE there, which no client of it reads).
    """
    found = {name: value for name, value in os.environ.items() if name not in OWN}
    nproc, attempt = options.nproc, str(command.attempt)
    rank, world = str(command.rank * nproc + local_rank), str(command.nnodes * nproc)
    if nproc > 1:
        found.setdefault("OMP_NUM_THREADS", "1")
    found.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    found.setdefault("HYPERPOD_SIGNAL_COORDINATION", "disabled")
    return found | {
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
