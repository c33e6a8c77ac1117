"""The checkpoint memory of the local cluster: a server beside each node, in a process of its own.

The memory is a folder of the machine's tmpfs, which outlives the server and `up`. A cut of the
node's power frees it, and so does the end of the cluster. The servers find each other by files of
the cluster's directory.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import signal
import stat
import sys
from functools import partial
from pathlib import Path

from unbroken.core.checkpoint_memory import PORT
from unbroken.errors import WorldError
from unbroken.kube.client import KubeClient
from unbroken.kube.quantity import parse_quantity

from .machines.node import Companion, power_cuts
from .networks import node_address
from .node import NodeOptions
from .node.processes.isolation import PR_SET_PDEATHSIG, prctl

TMPFS = Path("/dev/shm")
MEMBERS = "checkpoint-memory"
"""Folder of a cluster's directory, with a file for each server."""


def memory_folder(directory: Path) -> Path:
    """Return the folder in memory of the cluster in `directory`."""
    digest = hashlib.sha256(os.fsencode(directory)).hexdigest()[:16]
    return TMPFS / f"unbroken-checkpoints-{os.geteuid()}-{digest}"


def discard_memory(directory: Path) -> None:
    """Free the memory of a cluster that has stopped.  Blocks."""
    shutil.rmtree(memory_folder(directory), ignore_errors=True)


def memory_beside(directory: Path, percent: int) -> Companion:
    """Return the program that runs a node's server with this share of the node's memory."""

    async def serve(_: KubeClient, node: NodeOptions) -> None:
        address = node_address(node.index)
        members = directory / MEMBERS
        size = round(parse_quantity(node.memory) * percent / 100)
        of_node = await asyncio.to_thread(_own_folder, directory, node.name)
        folder = of_node / (node.boot_id or "host")
        await asyncio.to_thread(_forget_other_boots, folder)
        members.mkdir(mode=0o700, exist_ok=True)
        cuts = power_cuts(node.directory)
        words = ("-m", "unbroken.cli.main", "checkpoint-memory", "--folder", str(folder))
        where = ("--host", address, "--memory", str(size), "--members", str(members))
        # It ends with `up`, however that ends.
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, *words, *where),
            stdin=asyncio.subprocess.DEVNULL,
            preexec_fn=partial(prctl, PR_SET_PDEATHSIG, signal.SIGKILL),
        )
        member = members / f"{address}:{PORT}"
        try:
            member.touch(mode=0o600)
            code = await process.wait()
            raise WorldError(f"checkpoint memory of {node.name} ended with exit code {code}")
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
                member.unlink(missing_ok=True)
            if power_cuts(node.directory) != cuts:
                shutil.rmtree(of_node, ignore_errors=True)

    return serve


def _own_folder(directory: Path, node: str) -> Path:
    """Return the folder in memory of a node; WorldError if it is another user's."""
    folder = memory_folder(directory)
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if found.st_uid != os.geteuid() or not stat.S_ISDIR(found.st_mode):
        raise WorldError(f"{folder} belongs to another user or is no folder: have it removed")
    result = folder / node
    result.mkdir(mode=0o700, exist_ok=True)
    return result


def _forget_other_boots(folder: Path) -> None:
    """Delete the memory of earlier boots of the node, as a boot does."""
    for other in folder.parent.iterdir():
        if other != folder:
            shutil.rmtree(other, ignore_errors=True)
