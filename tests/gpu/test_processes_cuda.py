"""Processes with CUDA: after an aborted collective a rank keeps its memory; none starts warm."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from unbroken.agent.ports import OfferedPorts

pytestmark = pytest.mark.slow
RUN = Path(__file__).parents[2] / "benchmarks/gpu/run.py"

ABORT = """
import json, os, sys, threading
import torch, torch.distributed as dist
from unbroken.worker.restart import groups
rank, size, *ports = map(int, sys.argv[1:])
torch.cuda.set_device(rank)
held = torch.arange(1000, device="cuda")
address, expected = held.data_ptr(), held.clone()
def join(port):
    where = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("nccl", init_method=where, rank=rank, world_size=size)
    tensor = torch.ones(1000, device="cuda")
    dist.all_reduce(tensor)
    assert tensor.sum().item() == 1000 * size
    return tensor
tensor = join(ports[0])
outcome = "left"
if size == 1:
    torch.cuda._sleep(1 << 30)
if rank == 0:
    # Nobody else enters: only an abort ends it.
    threading.Timer(1, groups.abort).start()
    try:
        dist.all_reduce(tensor)
        torch.cuda.synchronize()
    except RuntimeError as error:
        outcome = f"left with {type(error).__name__}"
else:
    groups.abort()
groups.destroy()
assert not dist.is_initialized()
join(ports[1])
groups.destroy()
told = dict(rank=rank, outcome=outcome, same=held.data_ptr() == address,
    equal=torch.equal(held, expected))
print(json.dumps(told))
"""


def aborted(size: int, folder: Path) -> list[dict[str, Any]]:
    """Return the reports of the ranks."""
    script = folder / "ranks.py"
    script.write_text(ABORT)
    offered = OfferedPorts()
    ports = [str(offered.next(None)), str(offered.next(None))]
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(size), *ports],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(size)
    ]  # fmt: skip
    found = []
    try:
        for one in ranks:
            said, wrong = one.communicate(timeout=100)
            assert one.returncode == 0, wrong
            found.append(json.loads(said.splitlines()[-1]))
    finally:
        for one in ranks:
            one.kill()
        offered.close()
    return found


def test_a_group_of_one_is_aborted_and_made_anew(tmp_path: Path) -> None:
    (alone,) = aborted(1, tmp_path)
    assert alone["same"]
    assert alone["equal"]


@pytest.mark.gpus(2)
def test_who_waits_in_a_collective_gets_out_and_joins_again(tmp_path: Path) -> None:
    for one in aborted(2, tmp_path):
        assert one["outcome"].startswith("left")
        assert one["same"]
        assert one["equal"]


FORKED = """
import json, os
from unbroken.worker.boot.safety import Look, cuda
look = Look("")
import torch
before = look.danger()
torch.zeros(1, device="cuda")
after = [cuda(), look.danger()]
if os.fork() == 0:
    print(json.dumps([before, *after, cuda()]), flush=True)
    os._exit(0)
os.wait()
"""


def test_a_process_that_uses_cuda_is_not_forked() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKED], capture_output=True, text=True, check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    before, *found = json.loads(done.stdout)
    assert before is None
    assert found == ["has initialised CUDA"] * 3


@pytest.mark.parametrize("part", ["restarts", "hang"])
def test_a_kill_and_a_hang_are_judged_right(part: str, tmp_path: Path) -> None:
    command = [sys.executable, str(RUN), "--parts", part, "--kills=1", "--modes=in-process"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
