"""A worker that prints what differs in its process, a line each: inside a restartable function,
and after it."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import socket
import sys

import torch
import torch.distributed as dist

from unbroken import worker

if version := os.environ.pop("PRETENDED_TORCH", ""):
    torch.__version__ = torch.torch_version.TorchVersion(version)
OWNERS = {
    "socket.socket": socket.socket,
    **{
        f"torch.distributed.{name}": getattr(dist, name)
        for name in ("Store", "TCPStore", "PrefixStore", "ProcessGroup", "ProcessGroupGloo", "Work")
    },
    **{
        name: importlib.import_module(name)
        for name in ("socket", "torch.distributed", "torch.distributed.rendezvous",
                     "torch.distributed.distributed_c10d")
    },
}  # fmt: skip
NUMBERS = {*signal.Signals, *range(signal.SIGRTMIN, signal.SIGRTMAX)}


def look() -> dict[str, object]:
    """Return the functions and classes that torch's users see, signal handlers and variables."""
    found: dict[str, object] = {
        f"{owner}.{name}": value
        for owner, place in OWNERS.items()
        for name, value in vars(place).items()
        if callable(value)
    }
    for number in NUMBERS:
        found[f"signal {getattr(number, 'name', number)}"] = signal.getsignal(number)
    found["garbage collector"] = gc.get_freeze_count() > 0
    return found | {f"environment variable {name}": value for name, value in os.environ.items()}


def tell_changes() -> None:
    """Say what has another value than before, and what is new or gone."""
    now = look()
    say(",".join(sorted(name for name in now if now[name] != before.get(name, now[name]))))
    say(",".join(sorted(now.keys() ^ before.keys())))


def say(line: str) -> None:
    """Write it at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


@worker.restartable
def train() -> None:
    """Look before anything of torch is used, and use it."""
    tell_changes()
    if "wait" in sys.argv:
        say("waits")
        signal.pause()
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(3))
    dist.destroy_process_group()


before = look()
train()
tell_changes()
