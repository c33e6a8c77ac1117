"""The agent takes over an image's command: it finds the image's Python, which has our library."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.agent.running import linked, running, start
from unbroken.agent.injected import interpreter, prepare
from unbroken.errors import SpecError
from unbroken.spec.job.launch import Launch, read_launch
from unbroken.wire.agent import AgentState

MAIN = "import sys; from unbroken.agent.injected import script; script(*sys.argv.pop(1).split(':'))"
LOCAL = "from unbroken.agent.injected import script; script()"
FACTS = """
import importlib, os, pkgutil, sys, tempfile
from unbroken import worker
for found in pkgutil.walk_packages(worker.__path__, "unbroken.worker."):
    if sys.version_info >= (3, 10) or ".boot" not in found.name:
        try:
            importlib.import_module(found.name)
        except ModuleNotFoundError as error:  # some have subclasses of torch's classes
            if error.name != "torch":
                raise
names = ("RANK", "WORLD_SIZE", "PYTHONPATH")
print("facts", *sys.version_info[:2], worker.__file__, tempfile.gettempdir(), flush=True)
print("given", *sys.argv[1:], *(os.environ[name] for name in names), flush=True)
"""


def put(folder: Path, name: str, text: str) -> Path:
    """A program in a folder of programs."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)
    return folder / name


def other_pythons() -> list[str]:
    """Interpreters of this machine that can run the worker library, other than the agent's."""
    versions = [f"python3.{minor}" for minor in (9, 10, 12, 13, 14)]
    homes = sorted(Path.home().glob(".pyenv/versions/*/bin"))
    path = os.pathsep.join([*map(str, homes), os.environ["PATH"]])
    found = [shutil.which(one, path=path) for one in versions]
    return [one for one in found if one is not None and "shims" not in one]


def test_the_interpreter_is_the_one_that_a_script_names(tmp_path: Path) -> None:
    binaries = tmp_path / "bin"
    python = str(put(binaries, "python3", ""))
    conda = str(put(tmp_path / "conda env", "python3.9", ""))
    path, launch = str(binaries), Launch("torchrun", False, ())
    assert interpreter(launch, path) == python, "no torchrun: the image's own"
    put(binaries, "torchrun", f"#!{sys.executable}\n")
    assert interpreter(launch, path) == sys.executable
    put(binaries, "torchrun", "#!/usr/bin/env python3\n")
    assert interpreter(launch, path) == python
    put(binaries, "torchrun", f"""#!/bin/sh\n'''exec' "{conda}" "$0" "$@"\n' '''\n""")
    assert interpreter(launch, path) == conda
    put(binaries, "torchrun", "#!/gone/python3\n")
    assert interpreter(launch, path) == python, "beside the script"
    put(binaries, "torchrun", "\x7fELF")
    assert interpreter(launch, path) == python
    assert interpreter(Launch("python3", True, ()), path) == python


def test_an_image_without_python_is_an_error(tmp_path: Path) -> None:
    for launch in (Launch("torchrun", False, ()), Launch("python3.9", True, ())):
        with pytest.raises(SpecError, match="in the image"):
            interpreter(launch, str(tmp_path))


def test_folders_of_the_user_come_before_ours() -> None:
    launch = read_launch([sys.executable, "train.py"])
    environ = {"PATH": "/bin", "PYTHONPATH": "/app"}
    prepare(launch, environ, "/library")
    assert environ["PYTHONPATH"] == f"/app{os.pathsep}/library"
    assert environ["PYTHON_EXEC"] == sys.executable
    bare = {"PYTHON_EXEC": "/chosen/python"}
    prepare(launch, bare, "/library")
    assert bare == {"PYTHON_EXEC": "/chosen/python", "PYTHONPATH": "/library"}
    prepare(launch, environ, None)
    assert environ["PYTHONPATH"] == f"/app{os.pathsep}/library"


@pytest.mark.slow
@pytest.mark.parametrize("python", [sys.executable, *other_pythons()])
async def test_workers_run_on_the_python_of_the_command(tmp_path: Path, python: str) -> None:
    library = tmp_path / "library"
    library.mkdir()
    source = Path(sys.modules["unbroken"].__file__ or "").parent
    (library / "unbroken").symlink_to(source)
    (tmp_path / "train.py").write_text(FACTS)
    words = ("-c", MAIN, f"{library}:{tmp_path}", python, "-u", "train.py", "--lr", "1")
    environ = {"NPROC_PER_NODE": "2", "PYTHONPATH": "/app", "PATH": os.environ["PATH"]}
    with running(tmp_path, command=(sys.executable, *words), **environ) as agent:
        async with linked(agent) as operator:
            operator.send(start(0))
            await operator.state(AgentState.COMPLETED)
            version = await version_of(python)
            where = f"{library}/unbroken/worker/__init__.py"
            agent.stdout.wait_for(rf"facts {version} {where} ")
            for rank in range(2):
                given = f"given --lr 1 {rank} 2 /app{os.pathsep}{library}"
                agent.stdout.wait_for(given)


async def version_of(python: str) -> str:
    """`MAJOR MINOR` of an interpreter."""
    asks = "import sys; print(*sys.version_info[:2])"
    made = await asyncio.create_subprocess_exec(python, "-c", asks, stdout=asyncio.subprocess.PIPE)
    output, _ = await made.communicate()
    return output.decode().strip()


ACCELERATED = """
import os, sys
from accelerate import Accelerator
from accelerate.utils import DistributedType
import torch

accelerator = Accelerator(cpu=True)
state = accelerator.state
assert __name__ == "__main__" and sys.modules["__main__"].__file__.endswith("train.py")
assert sys.path[0] == os.path.dirname(os.path.realpath(sys.argv[0])), sys.path
total = accelerator.reduce(torch.tensor([state.process_index + 1.0]))
print("made", state.process_index, state.num_processes, state.mixed_precision, int(total),
      os.environ["ACCELERATE_DYNAMO_BACKEND"], *sys.argv[1:], flush=True)
# Without this torch 2.13 may abort as the process ends, with threads of gloo that still run.
accelerator.end_training()
"""
CONFIGURED = """
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
mixed_precision: bf16
num_machines: 4
num_processes: 32
main_process_ip: 10.9.9.9
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "precision"),
    [(["--config_file", "accelerate.yaml"], "bf16"), (["--cpu", "--mixed_precision", "no"], "no")],
)
async def test_accelerate_reads_its_options_in_each_worker(
    tmp_path: Path, options: list[str], precision: str
) -> None:
    (tmp_path / "train.py").write_text(ACCELERATED)
    (tmp_path / "accelerate.yaml").write_text(CONFIGURED)
    program = f"{Path(sys.executable).parent}/accelerate"
    words = ("-c", LOCAL, program, "launch", *options, "train.py", "--lr", "1")
    environ = {"NPROC_PER_NODE": "2", "PATH": os.environ["PATH"]}
    with running(tmp_path, command=(sys.executable, *words), **environ) as agent:
        async with linked(agent) as operator:
            ready = await operator.report(lambda report: report.offered_port is not None)
            operator.send(start(0, master_port=ready.offered_port))
            await operator.state(AgentState.COMPLETED)
            for rank in range(2):
                agent.stdout.wait_for(f"made {rank} 2 {precision} 3 NO --lr 1")


@pytest.mark.slow
async def test_options_that_accelerate_refuses_end_the_attempt_with_its_words(
    tmp_path: Path,
) -> None:
    program = f"{Path(sys.executable).parent}/accelerate"
    words = ("-c", LOCAL, program, "launch", "--cpu", "--multi_gpu", "train.py")
    with running(tmp_path, command=(sys.executable, *words), PATH=os.environ["PATH"]) as agent:
        async with linked(agent) as operator:
            operator.send(start(0))
            await operator.state(AgentState.FAULTED)
            agent.stderr.wait_for("accelerate launch: You can only use one of")
