"""A worker that saves without end, killed at any moment, many times: what is left in its memory?

Each child is forked from this process, so that torch is imported once, and saves a state that is
one number throughout.  Printed: how many were killed, how often each age of step was found, and
every lie.
"""

from __future__ import annotations

import collections
import json
import os
import random
import select
import signal
import socket
import sys
from typing import Any

import torch

from unbroken.agent.snapshots import Snapshots
from unbroken.worker.channel import Channel
from unbroken.worker.snapshot import Snapshot
from worker.snapshot_agents import PLENTY, served

COUNT, SECONDS_MAX = 200_000, 0.01


def state(step: int) -> dict[str, Any]:
    """That of a step; its size changes now and then."""
    rows = [torch.full((COUNT // 2,), step) for _ in range(2 + step % 7 // 5)]
    return {"rows": rows, "step": step, "text": "x" * (step % 5 * 20_000)}


def train(sock: socket.socket, begun: int, newest: int) -> None:
    """Save until killed."""
    line = Channel(sock)
    line.start()
    step = 0
    snapshot = Snapshot(extra=lambda: state(step), channel=line)
    while True:
        snapshot.save(step)
        if step == 1:
            os.write(begun, b"!")
        # The newest step that is surely whole, for the parent to see.
        os.pwrite(newest, step.to_bytes(8, "little"), 0)
        step += 1


def kill_one(agent: Snapshots, attempt: int, seconds: float, newest: int) -> None:
    """Start a worker, and end it at some moment after its second save."""
    os.environ["JOB_RESTART_COUNT"] = str(attempt)
    reading, writing = os.pipe()
    with served(agent) as sock:
        child = os.fork()
        if child == 0:
            os.close(reading)
            try:
                train(sock, writing, newest)
            finally:
                os._exit(1)
        os.close(writing)
        assert os.read(reading, 1) == b"!", "the worker died by itself"
        # Nobody writes there again: the end of this wait is the moment of the kill.
        select.select([reading], [], [], seconds)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WTERMSIG(status) == signal.SIGKILL
    os.close(reading)


def left(agent: Snapshots, attempt: int) -> tuple[int, list[str]]:
    """The newest step that the next attempt finds, and what is wrong with it."""
    os.environ["JOB_RESTART_COUNT"] = str(attempt + 1)
    with served(agent) as sock:
        line = Channel(sock.dup())
        line.start()
        snapshot = Snapshot(extra=dict, channel=line)
        found = snapshot.restore()
        snapshot.close()
    if found is None:
        return -1, ["nothing is left"]
    expected, lies = state(found.step), []
    if found.attempt != attempt or found.extra["step"] != found.step:
        lies.append(f"attempt {found.attempt}, step {found.step} holds {found.extra['step']}")
    rows = zip(found.extra["rows"], expected["rows"], strict=True)
    if found.extra["text"] != expected["text"] or not all(a.equal(b) for a, b in rows):
        lies.append(f"step {found.step} is torn")
    return found.step, lies


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ.update(UNBROKEN_JOB="job", RANK="0", WORLD_SIZE="1")
    told = os.memfd_create("newest")
    seed, kills = int(sys.argv[1]), int(sys.argv[2])
    memory, drawn = Snapshots(lambda: PLENTY), random.Random(seed)
    ages: collections.Counter[int] = collections.Counter()
    wrong: list[str] = []
    for number in range(kills):
        kill_one(memory, 2 * number, drawn.random() * SECONDS_MAX, told)
        known = int.from_bytes(os.pread(told, 8, 0), "little")
        newest, lies = left(memory, 2 * number)
        ages[newest - known] += 1
        wrong += [f"seed {seed} kill {number}: {lie}" for lie in lies]
    memory.close()
    sys.stdout.write(json.dumps({"ages": ages, "wrong": wrong}))
