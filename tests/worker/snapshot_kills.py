"""Kills a worker that saves without end, at any moment, many times, and checks its memory.

Each child is forked from this process, so that torch is imported once, and saves a state that is
one number throughout. It prints how many were killed, how often each age of step was found, and
every wrong state.
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

from tests.worker.snapshot_agents import PLENTY, served
from unbroken.agent.snapshots.slots import SnapshotSlots
from unbroken.wire.ipc import SNAPSHOT_FIND
from unbroken.worker.channel import Channel
from unbroken.worker.snapshot.snapshot import Snapshot

COUNT, SECONDS_MAX = 200_000, 0.01


def state(step: int) -> dict[str, Any]:
    """Return the state of a step; its size changes now and then."""
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


def kill_one(agent: SnapshotSlots, attempt: int, seconds: float, newest: int) -> None:
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


def left(agent: SnapshotSlots, attempt: int) -> tuple[int, list[str]]:
    """Return the newest step that the next attempt finds, and the errors in it."""
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


def late(agent: SnapshotSlots, newest: int) -> list[Any]:
    """Stop a worker, let the next attempt save, and let the stopped one save for a while.

    Return the snapshots offered after that, and those offered when only the older attempt had
    saved.
    """
    os.environ["JOB_RESTART_COUNT"] = "0"
    reading, writing = os.pipe()
    with served(agent) as sock:
        child = os.fork()
        if child == 0:
            try:
                train(sock, writing, newest)
            finally:
                os._exit(1)
        os.read(reading, 1)
        # By then both slots have grown to what the largest state needs.
        resume(child, newest, 80)
        before = offered(agent, 1)
        resume(child, newest)
        between = offered(agent, 1)
        os.environ["JOB_RESTART_COUNT"] = "1"
        with served(agent) as own:
            line = Channel(own.dup())
            line.start()
            snapshot = Snapshot(extra=lambda: state(5), channel=line)
            snapshot.save(5)
            snapshot.close()
        resume(child, newest)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return [before, between, offered(agent, 2), left(agent, 1)]


def resume(child: int, newest: int, steps: int = 6) -> None:
    """Let the stopped worker save some more steps."""
    step = int.from_bytes(os.pread(newest, 8, 0), "little")
    os.kill(child, signal.SIGCONT)
    while int.from_bytes(os.pread(newest, 8, 0), "little") < step + steps:
        assert os.waitpid(child, os.WNOHANG) == (0, 0)
    os.kill(child, signal.SIGSTOP)
    os.waitpid(child, os.WUNTRACED)


def offered(agent: SnapshotSlots, attempt: int) -> list[list[int]]:
    """Return attempts and steps that an attempt may restore."""
    message = {"type": SNAPSHOT_FIND, "name": "training", "rank": 0, "attempt": attempt}
    return [[one["attempt"], one["step"]] for one in agent.answer(message).message["steps"]]


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ.update(UNBROKEN_JOB="job", RANK="0", WORLD_SIZE="1")
    told = os.memfd_create("newest")
    if sys.argv[1:] == ["late"]:
        slots = SnapshotSlots(lambda: PLENTY)
        sys.stdout.write(json.dumps(late(slots, told)))
        slots.close()
        sys.exit()
    seed, kills = int(sys.argv[1]), int(sys.argv[2])
    memory, drawn = SnapshotSlots(lambda: PLENTY), random.Random(seed)
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
