"""The checkpoint memory of the local cluster: a server beside each node, in a process of its own.

The share of a node's memory is that of its cluster (TieredStorageConfig), else that of `up`; the
servers follow it. The memory is a folder of the machine's tmpfs, which outlives the server and
`up`. A cut of the node's power frees it, and so do Mode Disable and the end of the cluster. The
servers find each other by files of the cluster's directory.
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
from unbroken.core.clusters.groups import checkpoint_percent
from unbroken.errors import WorldError
from unbroken.kube.client import KubeClient
from unbroken.kube.informer import Informers
from unbroken.kube.quantity import parse_quantity
from unbroken.operator.kinds import ClusterObject, MachineObject
from unbroken.spec.nodes.kinds import CLUSTER, MACHINE

from .machines.node import Companion, power_cuts
from .networks import node_address
from .node import NodeOptions
from .node.processes.isolation import PR_SET_PDEATHSIG, prctl

TMPFS = Path("/dev/shm")
MEMBERS = "checkpoint-memory"
"""Folder of a cluster's directory, with a file for each server."""
SIZE = "checkpoint-memory-bytes"
"""File of a node's directory with the size of its memory for checkpoints."""


def memory_folder(directory: Path) -> Path:
    """Return the folder in memory of the cluster in `directory`."""
    digest = hashlib.sha256(os.fsencode(directory)).hexdigest()[:16]
    return TMPFS / f"unbroken-checkpoints-{os.geteuid()}-{digest}"


def discard_memory(directory: Path) -> None:
    """Free the memory of a cluster that has stopped.  Blocks."""
    shutil.rmtree(memory_folder(directory), ignore_errors=True)


class CheckpointShares:
    """The share of each node's memory for checkpoints, in percent."""

    def __init__(self, informers: Informers, percent: int) -> None:
        """`percent`: of nodes whose cluster does not say, and of those without one."""
        self._percent = percent
        self._machines = informers.of(MachineObject)
        self._clusters = informers.of(ClusterObject)
        self._change = asyncio.Event()
        self._clusters.subscribe(self._on_cluster)

    def of(self, node: str) -> int:
        """Return the share of a node; 0: it has no server."""
        machine = self._machines.get(node)
        name = "" if machine is None else MACHINE.spec_of(machine)[0].cluster
        percent = _percent_of(self._clusters.get(name))
        return self._percent if percent is None else percent

    async def other_than(self, node: str, percent: int) -> int:
        """Return the share of a node once it is not `percent`."""
        while (found := self.of(node)) == percent:
            await self._change.wait()
        return found

    def _on_cluster(self, old: ClusterObject | None, new: ClusterObject | None) -> None:
        if _percent_of(old) != _percent_of(new):
            self._change.set()
            self._change = asyncio.Event()


def _percent_of(cluster: ClusterObject | None) -> int | None:
    return None if cluster is None else checkpoint_percent(CLUSTER.spec_of(cluster)[0])


def memory_beside(directory: Path, shares: CheckpointShares) -> Companion:
    """Return the program that runs a node's server while the node has a share."""

    async def serve(_: KubeClient, node: NodeOptions) -> None:
        while True:
            percent = await shares.other_than(node.name, 0)
            await _serve(directory, node, shares, percent)

    return serve


async def _serve(
    directory: Path, node: NodeOptions, shares: CheckpointShares, percent: int
) -> None:
    """Run a node's server until the node has no share, which frees the memory."""
    address = node_address(node.index)
    members = directory / MEMBERS
    of_node = await asyncio.to_thread(_own_folder, directory, node.name)
    folder = of_node / (node.boot_id or "host")
    await asyncio.to_thread(_forget_other_boots, folder)
    members.mkdir(mode=0o700, exist_ok=True)
    cuts = power_cuts(node.directory)
    size = node.directory / SIZE
    _write_size(size, node, percent)
    words = ("-m", "unbroken.cli.main", "checkpoint-memory", "--folder", str(folder))
    where = ("--host", address, "--memory-file", str(size), "--members", str(members))
    # It ends with `up`, however that ends.
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, *words, *where),
        stdin=asyncio.subprocess.DEVNULL,
        preexec_fn=partial(prctl, PR_SET_PDEATHSIG, signal.SIGKILL),
    )
    member = members / f"{address}:{PORT}"
    ending = asyncio.ensure_future(process.wait())
    following = asyncio.ensure_future(_follow(size, node, shares, percent))
    is_off = False
    try:
        member.touch(mode=0o600)
        await asyncio.wait({ending, following}, return_when=asyncio.FIRST_COMPLETED)
        if not following.done():
            code = ending.result()
            raise WorldError(f"checkpoint memory of {node.name} ended with exit code {code}")
        following.result()
        is_off = True
    finally:
        following.cancel()
        is_running = process.returncode is None
        if is_running:
            process.kill()
            await ending
        if is_running or is_off:
            member.unlink(missing_ok=True)
        if is_off or power_cuts(node.directory) != cuts:
            shutil.rmtree(of_node, ignore_errors=True)


async def _follow(size: Path, node: NodeOptions, shares: CheckpointShares, percent: int) -> None:
    """Write each new size of a node's memory, until the node has no share."""
    while percent := await shares.other_than(node.name, percent):
        _write_size(size, node, percent)


def _write_size(file: Path, node: NodeOptions, percent: int) -> None:
    """Write the bytes of a node's share, in one step."""
    part = file.with_suffix(".part")
    part.write_text(str(round(parse_quantity(node.memory) * percent / 100)))
    part.replace(file)


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
