"""Process groups, of which nothing survives their end, whatever was imported meanwhile."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.worker.templates import BOOT

pytest.importorskip("torch")
pytestmark = pytest.mark.slow


THREADS = """
import os, pathlib, torch.distributed as dist
from unbroken.worker.restart import groups
def running():
    names = [one.read_text().strip() for one in pathlib.Path("/proc/self/task").glob("*/comm")]
    return sum(name.startswith("pt_gloo") for name in names)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
import torch.distributed.nn.functional as functional
while not (before := running()):
    pass  # a thread gives itself its name
assert dist.group.WORLD in functional.all_reduce.__defaults__, "nothing is tested"
groups.destroy()
for thread in groups._releasing:
    thread.join()
print(before, running(), functional.all_reduce.__defaults__[-1])
"""


def test_a_module_that_has_the_group_as_a_default_does_not_keep_it() -> None:
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    before, after, default = done.stdout.split()
    assert int(before) > 0
    assert (after, default) == ("0", "None")


SHARDS = """
import os, pathlib, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from unbroken.worker.restart import groups
def running():
    names = [one.read_text().strip() for one in pathlib.Path("/proc/self/task").glob("*/comm")]
    return sum(name.startswith("pt_gloo") for name in names)
def train():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    model = torch.nn.Linear(7, 7)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 7)).sum().backward()
    optimizer.step()
    other = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    (other + other.redistribute(mesh, [Replicate()])).full_tensor()
train()
while not (before := running()):
    pass  # a thread gives itself its name
groups.destroy()
for thread in groups._releasing:
    thread.join()
print(before, running())
"""


def test_operations_on_shards_do_not_keep_the_group() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", SHARDS], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    before, after = map(int, done.stdout.split())
    assert (before > 0, after) == (True, 0)


LEFT = """
import atexit, os, subprocess, sys, time, torch, torch.distributed as dist
from unbroken.worker.restart import groups
rank, path = int(sys.argv[1]), sys.argv[2]
if rank == 0:
    peer = subprocess.Popen([sys.executable, __file__, "1", path], stdin=subprocess.PIPE)
dist.init_process_group("gloo", store=dist.FileStore(path, 2), rank=rank, world_size=2)
dist.barrier()
if rank:
    sys.stdin.read()
    os._exit(0)
dist.all_reduce(torch.ones(4), async_op=True)
groups.destroy()
class Last:
    def __del__(self):  # while the interpreter ends, the message that the group waits for is lost
        peer.kill()
        peer.wait()
        time.sleep(1)
last = Last()
atexit.register(print, "at exit")
print("done", end=" ")
sys.exit(3)
"""


def test_a_group_that_still_waits_aborts_no_program_at_its_end(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(LEFT)
    command = [sys.executable, BOOT, "run", "script", program, "0", tmp_path / "store"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (3, "done at exit\n"), done.stderr


NAMES = """
import ctypes, sys, torch, torch.distributed as dist
from unbroken.worker.boot import rendezvous
if "ask" in sys.argv:
    rendezvous.ask_for_no_names()
libc = ctypes.CDLL(None)
libc.__res_init()
libc.__res_state.restype = ctypes.POINTER(ctypes.c_int * 2)
assert libc.__res_state().contents[1] > 0, "the resolver is left as it was"
libc.__res_state().contents[1] = 0
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
store.set("a", "b")
print(store.get("a").decode())
"""


@pytest.mark.parametrize("ask", ["ask", "not"])
def test_torch_asks_for_the_names_of_no_addresses(ask: str) -> None:
    # It complains where it asks, since nobody answers in that process.
    done = subprocess.run([sys.executable, "-c", NAMES, ask], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "b\n"), done.stderr
    assert ("cannot be retrieved" in done.stderr) == (ask == "not")
