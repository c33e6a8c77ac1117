"""The long pauses of healthy runs: each really works, moves on, and ends; none prints a line.

In an evaluation all ranks work; in the others rank 0 works alone and the others wait at a barrier.
"""

from __future__ import annotations

import os
import socket
import subprocess
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

BATCH_SECONDS = 0.5
ASK_SECONDS, PART_SECONDS = 1.0, 0.05
SAMPLES_MAX = 1_000_000
"""Then the next part of the index begins: the memory of the machine is not for it alone."""
CHUNK_BYTES = 1 << 20
COMPILER = ("sh", "-c", "while :; do :; done")
"""Command that stands for a compiler: it is not Python, and uses a whole core if it can."""
LOWEST = 19
"""Priority of what computes at full speed: many trials share the machine."""


def evaluate(rank: int, seconds: float, directory: Path) -> None:
    """Go over batches: the time of each is a GPU's, then a metric is computed."""
    del rank, directory
    until = time.monotonic() + seconds
    count = 0
    while time.monotonic() < until:
        _forward()
        count += sum(_metric())


def save(rank: int, seconds: float, directory: Path) -> None:
    """Write a large checkpoint to slow storage, a MiB each half second, from rank 0."""
    if rank != 0:
        return
    until = time.monotonic() + seconds
    with (directory / "large-checkpoint").open("wb") as file:
        while time.monotonic() < until:
            file.write(bytes(CHUNK_BYTES))
            file.flush()
            os.fsync(file.fileno())
            time.sleep(BATCH_SECONDS)


def compile_model(rank: int, seconds: float, directory: Path) -> None:
    """Wait for a compiler that rank 0 has started and that computes all the time."""
    del directory
    if rank == 0:
        limit = ("timeout", str(seconds), "nice", "-n", str(LOWEST))
        subprocess.run([*limit, *COMPILER], check=False)


def prepare_data(rank: int, seconds: float, directory: Path) -> None:
    """Read files and count their words at full speed, on rank 0."""
    del directory
    if rank != 0:
        return
    before = os.getpriority(os.PRIO_PROCESS, 0)
    os.setpriority(os.PRIO_PROCESS, 0, LOWEST)
    until = time.monotonic() + seconds
    words: dict[str, int] = {}
    files = sorted(Path(__file__).parent.glob("*.py"))
    while time.monotonic() < until:
        for path in files:
            _count(_split(path.read_text()), words)
    os.setpriority(os.PRIO_PROCESS, 0, before)


def ask(rank: int, seconds: float, directory: Path) -> None:
    """Ask each second whether somebody else's data set is there, on rank 0."""
    until = time.monotonic() + seconds
    while rank == 0 and time.monotonic() < until and not (directory / "never").exists():
        time.sleep(ASK_SECONDS)


def upload(rank: int, seconds: float, directory: Path) -> None:
    """Send a checkpoint to a slow store, with a thread for which the main thread waits; rank 0."""
    del directory
    if rank != 0:
        return
    store, connection = socket.socketpair()
    if os.fork() == 0:
        connection.close()
        while store.recv(CHUNK_BYTES):
            pass
        os._exit(0)
    store.close()
    sender = threading.Thread(target=_send, args=(connection, time.monotonic() + seconds))
    sender.start()
    sender.join()
    connection.close()
    os.wait()


def _send(connection: socket.socket, until: float) -> None:
    part = bytes(CHUNK_BYTES)
    while time.monotonic() < until:
        connection.sendall(zlib.crc32(part).to_bytes(4, "big") + part)
        time.sleep(PART_SECONDS)


def index(rank: int, seconds: float, directory: Path) -> None:
    """Compute an index of samples at full speed in one function, on rank 0."""
    del directory
    if rank != 0:
        return
    before = os.getpriority(os.PRIO_PROCESS, 0)
    os.setpriority(os.PRIO_PROCESS, 0, LOWEST)
    until = time.monotonic() + seconds
    samples: dict[int, str] = {}
    while time.monotonic() < until:
        number = len(samples)
        samples[number] = f"sample-{number * number % 1_000_003}"
        if number >= SAMPLES_MAX:
            samples = {}
    os.setpriority(os.PRIO_PROCESS, 0, before)


def transfer(rank: int, seconds: float, directory: Path) -> None:
    """Wait for a program that copies files to a slow place, on rank 0."""
    del directory
    if rank == 0:
        copies = "while :; do head -c 4000000 /dev/zero | cksum > /dev/null; sleep 0.1; done"
        subprocess.run(["timeout", str(seconds), "sh", "-c", copies], check=False)


def _split(text: str) -> list[str]:
    return [word for line in text.splitlines() for word in line.split()]


def _count(found: list[str], words: dict[str, int]) -> None:
    for word in found:
        words[word] = words.get(word, 0) + 1


def _forward() -> None:
    time.sleep(BATCH_SECONDS)


def _metric() -> list[int]:
    return [number % 7 for number in range(20_000)]


PAUSES: Mapping[str, Callable[[int, float, Path], None]] = {
    "evaluation": evaluate,
    "checkpoint": save,
    "compile": compile_model,
    "data set": prepare_data,
    "poll": ask,
    "upload": upload,
    "index": index,
    "program": transfer,
}
