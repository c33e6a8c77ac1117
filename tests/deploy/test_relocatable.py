"""The folder with the agent and its own Python, in root directories without any other file."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.apiservers import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="changing the root directory needs root"),
]
CHROOT = shutil.which("chroot") or "/usr/sbin/chroot"
NOBODY = 10001
PLACES = ("/unbroken/agent", "/srv/a b/agent")
ALL_MODULES = """
import pkgutil, importlib, sys
sys.path[:0] = [f"{sys.argv[1]}/library", f"{sys.argv[1]}/packages"]
import unbroken.agent, unbroken.worker
for package in (unbroken.agent, unbroken.worker):
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if not found.name.endswith("__main__"):
            try:
                importlib.import_module(found.name)
            except ModuleNotFoundError as error:  # some have subclasses of torch's classes
                if error.name != "torch":
                    raise
outside = {m.__file__ for m in sys.modules.values() if getattr(m, "__file__", None)}
outside = {one for one in outside if not one.startswith(sys.argv[1])}
print(sys.prefix == sys.argv[1], sorted(outside), "unbroken.agent.driver" in sys.modules)
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the folder as the image has it."""
    folder = tmp_path_factory.mktemp("image") / "agent"
    subprocess.run([sys.executable, ROOT / "deploy/relocatable.py", folder], check=True)
    return folder


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, made: Path, tmp_path: Path) -> Iterator[str]:
    """Copy the folder into an empty root directory; yield its path there."""
    path: str = request.param
    target = tmp_path / path[1:]
    shutil.copytree(made, target, symlinks=True)
    tmp_path.chmod(0o755)
    yield path
    shutil.rmtree(tmp_path)


def run(root: Path, place: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the folder's Python in its root directory, as a user without rights or variables."""
    command = [f"{place}/lib/loader", "--library-path", f"{place}/lib", f"{place}/bin/python3"]
    return subprocess.run(
        [CHROOT, f"--userspec={NOBODY}:{NOBODY}", root, *command, "-I", "-S", "-u", *words],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONHOME": "/nowhere", "PYTHONPATH": "/nowhere", "LD_LIBRARY_PATH": "/nowhere"},
        timeout=60,
    )


def test_all_modules_are_found_in_the_folder_alone(tmp_path: Path, place: str) -> None:
    done = run(tmp_path, place, "-c", ALL_MODULES, place)
    assert done.stderr == ""
    assert done.stdout == "True [] True\n"


def test_the_agent_says_what_the_image_lacks(tmp_path: Path, place: str) -> None:
    done = run(tmp_path, place, f"{place}/run.py", "torchrun", "train.py")
    assert done.returncode == 2
    assert "unbrokenrun: there is no python3 in the image" in done.stderr
    done = run(tmp_path, place, f"{place}/run.py", "sh", "-c", "torchrun train.py")
    assert done.returncode == 2
    assert "cannot take over 'sh'" in done.stderr


def test_the_library_of_workers_brings_no_other_package(made: Path) -> None:
    assert [one.name for one in (made / "library").iterdir()] == ["unbroken"]


def test_py_spy_comes_with_the_agent(made: Path) -> None:
    """Check that py-spy, which reads stacks, needs no library of the image."""
    done = subprocess.run([made / "bin/py-spy", "--version"], capture_output=True, text=True)
    assert done.stdout.startswith("py-spy ")
