"""Real processes made by fork, so that torch is imported once: children, and groups of ranks."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import torch

# Here, so that no child has to import them: each takes seconds.
import torch._dynamo
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
from torch import distributed

import unbroken.worker.checkpointing.checkpoints  # noqa: F401

POINTS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.link", "os.listdir"}
"""Audit events of Python that change or read a directory."""


@dataclass
class Child:
    """A child process, and the pipe from it."""

    pid: int
    said: Connection

    def answer(self) -> Any:
        """Return what its function returned; raise what its function raised."""
        failed, value = pickle.loads(self.said.recv_bytes())
        self.end()
        assert not failed, value
        return value

    def end(self) -> int:
        """Wait for its end; return its exit status."""
        self.said.close()
        return os.waitpid(self.pid, 0)[1]

    def has_returned(self) -> bool:
        """Wait for its end; return False if it was killed. Raise what its function raised."""
        try:
            self.answer()
        except EOFError:
            self.end()
            return False
        return True

    def has_stopped(self) -> bool:
        """Wait until it has stopped or ended; return whether it has stopped."""
        return os.WIFSTOPPED(os.waitpid(self.pid, os.WUNTRACED)[1])


def fork(
    act: Callable[..., Any], *arguments: Any, variables: Mapping[str, str] | None = None
) -> Child:
    """Run a function in a child. The last argument is its end of the pipe if it sends more."""
    here, there = Pipe(duplex=False)
    pid = os.fork()
    if pid:
        there.close()
        return Child(pid, here)
    status = 1
    try:
        os.environ.update(variables or {})
        torch.set_num_threads(1)
        try:
            answer = (False, act(*arguments))
        except BaseException:  # noqa: BLE001  (the parent raises it)
            answer = (True, traceback.format_exc())
        there.send_bytes(pickle.dumps(answer))
        status = 0
    finally:
        os._exit(status)


def ranks(
    world: int, act: Callable[..., Any], store: Path, *arguments: Any, per_node: int = 0
) -> list[Any]:
    """Run a function on every rank of a gloo group; return the result of each."""
    return [child.answer() for child in group(world, act, store, *arguments, per_node=per_node)]


def group(
    world: int, act: Callable[..., Any], store: Path, *arguments: Any, per_node: int = 0
) -> list[Child]:
    """Start a function on every rank of a gloo group; return the running children."""
    store.unlink(missing_ok=True)
    local = per_node or world
    return [
        fork(_ranked, act, store, *arguments, variables={
            "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank % local),
            "LOCAL_WORLD_SIZE": str(local), "GLOO_SOCKET_IFNAME": "lo",
        })
        for rank in range(world)
    ]  # fmt: skip


def _ranked(act: Callable[..., Any], store: Path, *arguments: Any) -> Any:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world
    )
    answer = act(rank, *arguments)
    distributed.barrier()
    distributed.destroy_process_group()
    return answer


def signal_at(point: int, number: signal.Signals, directory: Path) -> None:
    """Send this process a signal just before it accesses the directory for the n-th time."""
    prefix, left = str(directory), [point]

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in POINTS and str(arguments[0]).startswith(prefix):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), number)

    sys.addaudithook(hook)
