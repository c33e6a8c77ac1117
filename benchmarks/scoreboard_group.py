"""Sums over the ranks of a trial: over plain sockets, or with torch and gloo.

The plain group starts at once and behaves like gloo. A rank waits in the kernel for the others, for
ever or for the time limit of the group. A message of another collective is put aside. A rank that
loses a peer fails with gloo's words. The GPU group is the plain one with host threads that wait as
they do for a collective on a GPU.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

LOST = "[gloo/transport/tcp/pair.cc:534] Connection closed by peer [{}]"
LATE = (
    "[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting {:.0f}ms for recv operation"
    " to complete"
)
MESSAGE = struct.Struct("!Id")
ALL_REDUCE, BARRIER, HELLO, WELCOME = 1, 2, 3, 4
MEET_SECONDS, AGAIN_SECONDS = 90.0, 0.02
WELCOME_SECONDS = 10.0
"""Seconds to wait for rank 0's welcome.

After that, the address belongs to a rank 0 that is gone, or to one that still waits for others.
"""

DRIVER = b"""
#include <poll.h>
#include <sched.h>
int cudaStreamSynchronize(int collective) {
    struct pollfd found = {collective, POLLIN, 0};
    while (poll(&found, 1, 0) == 0)
        sched_yield();
    return 0;
}
"""
"""How CUDA waits if a machine has fewer cores than contexts (cudaDeviceScheduleYield)."""


def gpu_driver(directory: Path) -> Callable[[int], int]:
    """Compile the library that stands for CUDA's into the directory; return its
    `cudaStreamSynchronize`, which ends once the file descriptor can be read."""
    directory.mkdir(parents=True, exist_ok=True)
    library = directory / "libcudart.so"
    compiler = ["cc", "-shared", "-fPIC", "-O1", "-o", str(library), "-x", "c", "-"]
    subprocess.run(compiler, input=DRIVER, check=True)
    found: Callable[[int], int] = ctypes.CDLL(str(library)).cudaStreamSynchronize
    return found


class Peer:
    """A connection to another rank."""

    def __init__(self, connection: socket.socket, seconds: float) -> None:
        connection.settimeout(seconds)
        self.connection = connection
        self.seconds = seconds
        self.name = "{}:{}".format(*connection.getpeername())
        self._aside: dict[int, list[float]] = {}
        self.synchronize: Callable[[int], object] = lambda _: None
        """Waits for the next message; by default `receive` does it."""

    def send(self, kind: int, value: float) -> None:
        """Send a message. RuntimeError: the peer has gone."""
        try:
            self.connection.sendall(MESSAGE.pack(kind, value))
        except ConnectionError:
            raise RuntimeError(LOST.format(self.name)) from None

    def receive(self, kind: int) -> float:
        """Wait for a message of this kind; others are kept.  RuntimeError: gone, or too late."""
        while not self._aside.get(kind):
            self.synchronize(self.connection.fileno())
            try:
                data = self.connection.recv(MESSAGE.size, socket.MSG_WAITALL)
            except ConnectionError:
                data = b""
            except TimeoutError:
                raise RuntimeError(LATE.format(self.seconds * 1000)) from None
            if len(data) < MESSAGE.size:
                raise RuntimeError(LOST.format(self.name))
            found, value = MESSAGE.unpack(data)
            self._aside.setdefault(found, []).append(value)
        return self._aside[kind].pop(0)


class PlainGroup:
    """Rank 0 listens and adds up; the others send and receive."""

    def __init__(self, directory: Path, seconds: float) -> None:
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._note = directory / "store"
        self._seconds = seconds
        self._peers: list[Peer] = []

    def meet(self, step: int) -> int:
        """Wait for all ranks; return the step of rank 0, from which all ranks resume."""
        if self.rank == 0:
            self._gather(step)
            return step
        until = time.monotonic() + MEET_SECONDS
        while time.monotonic() < until:
            with suppress(OSError, RuntimeError, ValueError):
                return self._join()
            time.sleep(AGAIN_SECONDS)
        raise RuntimeError("TCPStore: timed out waiting for clients: rank 0 was not found")

    def all_reduce(self, value: float) -> float:
        """The sum over all ranks."""
        return self._collect(ALL_REDUCE, value)

    def barrier(self) -> None:
        """Wait for all ranks to come here."""
        self._collect(BARRIER, 0.0)

    def _collect(self, kind: int, value: float) -> float:
        if self.rank != 0:
            self._peers[0].send(kind, value)
            return self._peers[0].receive(kind)
        total = value + sum(peer.receive(kind) for peer in self._peers)
        for peer in self._peers:
            peer.send(kind, total)
        return total

    def _gather(self, step: int) -> None:
        """Listen at the launcher's port, or at any port if the launcher's own store is there."""
        has_own_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        place = ("127.0.0.1", 0)
        if not has_own_store:
            place = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        found: dict[int, Peer] = {}
        with socket.create_server(place, backlog=self.world) as server:
            server.settimeout(MEET_SECONDS)
            part = self._note.with_suffix(f".{os.getpid()}")
            part.write_text("{} {}".format(*server.getsockname()))
            part.rename(self._note)
            while len(found) < self.world - 1:
                peer = Peer(server.accept()[0], WELCOME_SECONDS)
                with suppress(RuntimeError):
                    found[int(peer.receive(HELLO))] = peer
        self._peers = [found[rank] for rank in sorted(found)]
        for peer in self._peers:
            peer.seconds = self._seconds
            peer.connection.settimeout(self._seconds)
            peer.send(WELCOME, step)

    def _join(self) -> int:
        host, port = self._note.read_text().split()
        peer = Peer(socket.create_connection((host, int(port)), timeout=1), MEET_SECONDS)
        peer.send(HELLO, self.rank)
        step = int(peer.receive(WELCOME))
        peer.seconds = self._seconds
        peer.connection.settimeout(self._seconds)
        self._peers = [peer]
        return step


class GpuGroup(PlainGroup):
    """The plain group, whose host threads spin in the driver until a collective has ended."""

    def __init__(self, directory: Path, seconds: float) -> None:
        super().__init__(directory, seconds)
        self._synchronize = gpu_driver(directory / f"gpu/{self.rank}")

    def meet(self, step: int) -> int:
        """Wait for all ranks; return the step of rank 0, from which all ranks resume."""
        found = super().meet(step)
        for peer in self._peers:
            peer.synchronize = self._synchronize
        return found


class TorchGroup:
    """Sums with torch.distributed on gloo, and a small DDP model that is trained as well."""

    def __init__(self, directory: Path, seconds: float) -> None:
        del directory
        self._seconds = seconds

    def meet(self, step: int) -> int:
        """Wait for all ranks; return the step of rank 0, from which all ranks resume."""
        from datetime import timedelta

        import torch
        from torch import distributed
        from torch.nn.parallel import DistributedDataParallel

        torch.set_num_threads(1)
        distributed.init_process_group("gloo", timeout=timedelta(seconds=self._seconds))
        self._model = DistributedDataParallel(torch.nn.Linear(64, 64))
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01)
        agreed = torch.tensor([step])
        distributed.broadcast(agreed, 0)
        return int(agreed[0])

    def all_reduce(self, value: float) -> float:
        """Train the model for a step; return the sum over all ranks."""
        import torch
        from torch import distributed

        self._optimizer.zero_grad()
        self._model(torch.ones(8, 64)).square().mean().backward()
        self._optimizer.step()
        total = torch.tensor([value], dtype=torch.float64)
        distributed.all_reduce(total)
        return float(total[0])

    def barrier(self) -> None:
        """Wait for all ranks to come here."""
        from torch import distributed

        distributed.barrier()
