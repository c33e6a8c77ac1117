"""Deaths that the kernel deals: out of memory, and a shared memory that is full.  For real."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agent.running import linked, program, running, start
from unbroken.wire.agent import AgentState, FaultKind, WorkerFault

pytestmark = pytest.mark.slow

GREEDY = """
import time
kept = []
while True:
    kept.append(bytearray(b"x" * (1 << 20)))
"""
SHARED = """
import mmap, os
fd = os.open("/dev/shm/block", os.O_CREAT | os.O_RDWR)
os.ftruncate(fd, 64 << 20)
with mmap.mmap(fd, 64 << 20) as block:
    for offset in range(0, 64 << 20, 4096):
        block[offset] = 1
"""
LIMIT_BYTES = 100 << 20


def first_fault(tmp_path: Path, script: str, wrapper: tuple[str, ...]) -> WorkerFault:
    async def story() -> WorkerFault:
        with running(tmp_path, script, nproc=1, wrapper=wrapper) as agent:
            async with linked(agent) as operator:
                operator.send(start(0))
                return (await operator.state(AgentState.FAULTED)).faults[0]

    return asyncio.run(story())


@pytest.fixture
def memory_group() -> Iterator[Path]:
    """A group of `LIMIT_BYTES`, of the cgroup version that this machine has."""
    path = next(
        (
            Path("/sys/fs/cgroup") / ("memory" if "memory" in names else "") / own.lstrip("/")
            for _, names, own in (
                line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()
            )
            if "memory" in names.split(",")
        ),
        Path("/sys/fs/cgroup"),
    )
    group = path / f"unbroken-{uuid.uuid4().hex[:8]}"
    try:
        group.mkdir()
        names = ("memory.limit_in_bytes", "memory.max")
        limit = next((group / name for name in names if (group / name).exists()), None)
        if limit is not None:
            limit.write_text(str(LIMIT_BYTES))
    except OSError as error:
        pytest.skip(f"memory groups cannot be made here: {error}")
    if limit is None:
        group.rmdir()
        pytest.skip("this machine's groups have no memory controller")
    yield group
    group.rmdir()


def test_a_worker_that_takes_too_much_memory_is_named(tmp_path: Path, memory_group: Path) -> None:
    wrapper = ("sh", "-c", f'echo 0 > {memory_group}/cgroup.procs && exec "$@"', "sh")
    fault = first_fault(tmp_path, program(tmp_path, GREEDY), wrapper)
    assert (fault.kind, fault.signal) == (FaultKind.OUT_OF_MEMORY, 9)
    assert fault.message == "killed by SIGKILL: the container ran out of memory"


def test_a_full_shared_memory_is_named(tmp_path: Path) -> None:
    inside = 'mount -t tmpfs -o size=1m none /dev/shm && exec "$@"'
    wrapper = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c", inside, "sh")
    if (
        shutil.which("unshare") is None
        or subprocess.run([*wrapper, "true"], check=False).returncode
    ):
        pytest.skip("no user namespaces here")
    fault = first_fault(tmp_path, program(tmp_path, SHARED), wrapper)
    assert (fault.kind, fault.signal) == (FaultKind.SHARED_MEMORY_FULL, 7)


def test_a_killed_worker_is_not_taken_for_one_without_memory(
    tmp_path: Path, memory_group: Path
) -> None:
    """The count of the group is compared with the one before the worker started."""
    inside = f'echo 0 > {memory_group}/cgroup.procs; ({sys.executable} {{}}); exec "$@"'
    wrapper = ("sh", "-c", inside.format(program(tmp_path, GREEDY, "greedy.py")), "sh")
    text = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    fault = first_fault(tmp_path, program(tmp_path, text), wrapper)
    assert (fault.kind, fault.signal) == (FaultKind.SIGNAL, 9)
