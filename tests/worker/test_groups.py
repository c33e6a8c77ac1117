"""Nothing of a process group outlives its end, whatever was imported meanwhile."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.slow

THREADS = """
import os, pathlib, torch.distributed as dist
from unbroken.worker import groups
def running():
    names = [one.read_text().strip() for one in pathlib.Path("/proc/self/task").glob("*/comm")]
    return sum(name.startswith("pt_gloo") for name in names)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
import torch.distributed.nn.functional as functional
before = running()
assert dist.group.WORLD in functional.all_reduce.__defaults__, "nothing is tested"
groups.destroy()
print(before, running(), functional.all_reduce.__defaults__[-1])
"""


def test_a_module_that_has_the_group_as_a_default_does_not_keep_it() -> None:
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    before, after, default = done.stdout.split()
    assert int(before) > 0
    assert (after, default) == ("0", "None")
