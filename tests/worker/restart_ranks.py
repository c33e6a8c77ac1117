"""A process that has imported torch and forks a template for each folder that it reads a line of.

A template forks ranks as the pipe `orders` of its folder says: one line of JSON, one rank.  Each
rank trains in a restartable function and writes what it sees to the pipe `reports`, a line each.
"""

from __future__ import annotations

import gc
import json
import os
import queue
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist

from unbroken import worker
from unbroken.worker.restart import groups, step_end

users: list[socket.socket] = []


def tell(what: str, **values: Any) -> None:
    """One write, so that ranks do not mix."""
    where = worker.context()
    line = {"what": what, "rank": where.rank, "attempt": where.attempt, "pid": os.getpid()}
    os.write(1, json.dumps({**line, "at": time.monotonic(), **values}).encode() + b"\n")


def reduce_forever() -> None:
    """Run collectives, so that the rank is in one nearly always."""
    tensor = torch.ones(1000)
    while True:
        dist.all_reduce(tensor)
        tensor /= dist.get_world_size()


def compute_forever() -> None:
    """Python that never calls anything which waits."""
    number = 0
    while True:
        number += 1


def finalize_forever() -> None:
    """Run finalizers nearly always: an exception in one is only printed."""

    class Slow:
        def __del__(self) -> None:
            end = time.monotonic() + 0.02
            while time.monotonic() < end:
                pass

    while True:
        Slow()
        time.sleep(0.003)


def swallow_once() -> None:
    """Catches what is not its own."""
    with suppress(BaseException):
        time.sleep(1000)
    time.sleep(1000)


def reduce_and_fail() -> None:
    """The third rank's own mistake."""
    if dist.get_rank() == 2 and worker.context().attempt == 0:
        raise ValueError("a mistake of the script")
    reduce_forever()


def ddp_forever() -> None:
    """Train like most scripts: with groups of a model, and cycles of objects."""
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    second = dist.new_group([0, 1])
    while True:
        model(torch.ones(2, 8)).sum().backward()
        if dist.get_rank() < 2:
            dist.all_reduce(torch.ones(1), group=second)


def save_forever() -> None:
    """Note each step that is saved, as a snapshot does; a rank is held up now and then."""
    chance, step = random.Random(os.getpid()), 0
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))

    def work() -> None:
        time.sleep(chance.choice([0, 0, 0.002, 0.02]))

    while True:
        model(torch.ones(2, 8)).sum().backward()
        work()
        step += 1
        tell("saved", step=step)
        step_end.saved(work)
        work()


def save_once() -> None:
    """Note one save, and none after it."""
    tell("saved", step=1)
    step_end.saved(lambda: None)
    time.sleep(1000)


def lose_models() -> None:
    """A model goes when its function returns, and is the last that holds a destroyed group."""

    def step() -> None:
        inner = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(4)))
        model = torch.nn.parallel.DistributedDataParallel(inner, find_unused_parameters=True)
        for _ in range(3):
            model(torch.ones(2, 16)).sum().backward()
        dist.destroy_process_group()

    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    for number in range(5):
        step()
        prefix = dist.PrefixStore(str(number), store)
        dist.init_process_group("gloo", store=prefix, rank=rank, world_size=3)
    tell("models", held=len(groups._held))
    step()


def second_group_forever() -> None:
    """Waits for one that never comes to make a group."""
    if dist.get_rank() == 0:
        reduce_forever()
    dist.new_group()


def users_sockets() -> None:
    """Say whether the user's own connections live, and wait in a collective."""
    for sock in users:
        sock.sendall(b"x")
    tell("echo", count=sum(sock.recv(1) == b"x" for sock in users))
    reduce_forever()


ACTIONS: dict[str, Callable[[], Any]] = {
    "reduce": reduce_forever,
    "compute": compute_forever,
    "finalize": finalize_forever,
    "swallow": swallow_once,
    "ddp": ddp_forever,
    "fail": reduce_and_fail,
    "group": second_group_forever,
    "models": lose_models,
    "sockets": users_sockets,
    "sleep": lambda: time.sleep(1000),
    "queue": lambda: queue.SimpleQueue().get(),
    "lock": lambda: threading.Semaphore(0).acquire(),
    "save": save_forever,
    "save_once": save_once,
    "return": lambda: None,
}


def open_users_sockets(address: tuple[str, int], until: threading.Event) -> None:
    """Another thread's, while groups are made."""
    while not until.wait(0.001):
        users.append(socket.create_connection(address))
        if len(users) > 40:
            return


@worker.restartable
def train(order: dict[str, Any]) -> str:
    """One attempt, or part of one."""
    tell("begins", fds=len(os.listdir("/proc/self/fd")), threads=len(os.listdir("/proc/self/task")))
    made = threading.Event()
    if "server" in order and not users:
        users.append(socket.create_connection(order["server"]))
        opener = threading.Thread(target=open_users_sockets, args=(order["server"], made))
        opener.start()
    dist.init_process_group("gloo")
    made.set()
    dist.all_reduce(torch.ones(1000))
    tell("runs")
    action = order["action"]
    ACTIONS[action[worker.context().rank] if isinstance(action, list) else action]()
    return "done"


def become(order: dict[str, Any]) -> None:
    """A rank, in a forked process."""
    os.setsid()
    os.environ.update(order["environ"])
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        result = train(order)
        tell("returns", result=result)
    except BaseException as error:  # noqa: BLE001  (the test judges it)
        tell("raises", error=f"{type(error).__name__}: {error}")
        os._exit(1)
    os._exit(0)


def park() -> tuple[int, int]:
    """A process that waits for its order: its id and where to write it."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(writer)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        with os.fdopen(reader) as orders:
            line = orders.readline()
        if not line:
            os._exit(0)
        become(json.loads(line))
    os.close(reader)
    return pid, writer


def main() -> None:
    """Fork templates until standard input ends."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    gc.collect()
    for line in sys.stdin:
        if os.fork() == 0:
            folder = Path(line.rstrip("\n"))
            with open(folder / "orders") as orders, open(folder / "reports", "wb") as reports:
                os.dup2(reports.fileno(), 1)
                template(orders)
            os._exit(0)


def template(orders: TextIO) -> None:
    """Fork ranks until there are no more orders."""
    parked = park()
    for line in orders:
        if line == "park\n":
            parked = parked if parked[0] else park()
            continue
        pid, writer = parked if parked[0] else park()
        parked = (0, -1)
        os.write(writer, line.encode())
        os.close(writer)
        os.write(1, json.dumps({"what": "forked", "pid": pid}).encode() + b"\n")
    if parked[0]:
        with suppress(OSError):
            os.close(parked[1])


if __name__ == "__main__":
    main()
