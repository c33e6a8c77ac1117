"""Programs started by boot.py, cold or warm: they see no difference from `python`."""

from __future__ import annotations

import os
import shutil
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.worker.boot_programs import (
    ENDINGS,
    ENVIRONMENT,
    NAMESPACE,
    PROCESSES,
    SIGNALS,
    SURROUNDINGS,
    TORCH,
)
from tests.worker.templates import Ended, Template, plainly

pytestmark = pytest.mark.slow
IMPORTS = ("threading", "warnings", "multiprocessing.pool", "inspect", "pickle", "runpy", "numpy")


def check(
    directory: Path, program: Sequence[str], environment: Mapping[str, str] = os.environ
) -> Ended:
    """Three ways, one outcome."""
    expected = plainly(program, directory, environment)
    assert plainly(program, directory, environment, ["run"]) == expected
    base = {name: environment[name] for name in environment if name not in ("RANK", "GONE")}
    with Template(program, directory, base) as template:
        assert template.prepare(*IMPORTS)["type"] == "ready"
        assert template.run(environment=environment) == expected
    return expected


@pytest.mark.parametrize("ending", ENDINGS)
def test_ends_as_python_does(ending: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ENDINGS[ending])
    check(tmp_path, ["script", "train.py", "--lr", "1"])


@pytest.mark.parametrize(
    "program",
    [
        ("script", "train.py", "-m", ""),
        ("script", "./sub/../train.py"),
        ("script", "link.py"),
        ("script", "{}/train.py", "a b"),
        ("script", "folder"),
        ("script", "archive.zip", "a"),
        ("script", "compiled.pyc"),
        ("module", "train", "a"),
        ("module", "package"),
        ("module", "package.part", "--a"),
        ("run-path", "train.py", "a"),
        ("run-path", "folder", "a"),
        ("script", "absent.py"),
        ("script", "sub"),
        ("module", "absent"),
        ("module", "package.absent"),
        ("module", "broken"),
        ("run-path", "absent.py"),
    ],
)
@pytest.mark.parametrize("safe", ["", "1"])
def test_namespace_and_paths_are_those_of_python(
    program: tuple[str, ...], safe: str, tmp_path: Path
) -> None:
    _place(tmp_path)
    arguments = [argument.format(tmp_path) for argument in program]
    check(tmp_path, arguments, {**os.environ, "PYTHONSAFEPATH": safe, "PYTHONPATH": "sub"})


def _place(directory: Path) -> None:
    import py_compile

    (directory / "train.py").write_text(NAMESPACE)
    (directory / "broken.py").write_text("raise ValueError(__name__)")
    (directory / "sub").mkdir()
    shutil.copy(directory / "train.py", directory / "sub" / "other.py")
    (directory / "link.py").symlink_to("sub/other.py")
    py_compile.compile(str(directory / "train.py"), str(directory / "compiled.pyc"))
    for name in ("folder", "package"):
        (directory / name).mkdir()
        shutil.copy(directory / "train.py", directory / name / "__main__.py")
    (directory / "package" / "__init__.py").write_text("import sys; print(__name__, sys.argv)")
    shutil.copy(directory / "train.py", directory / "package" / "part.py")
    with zipfile.ZipFile(directory / "archive.zip", "w") as archive:
        archive.write(directory / "train.py", "__main__.py")


def test_signals_umask_and_environment_are_those_of_python(tmp_path: Path) -> None:
    (tmp_path / "signals.py").write_text(SIGNALS)
    check(tmp_path, ["script", "signals.py"])
    (tmp_path / "environment.py").write_text(ENVIRONMENT)
    check(tmp_path, ["script", "environment.py"], {"RANK": "3", "Ü": "\udcff", **os.environ})


def test_surroundings_are_those_of_python(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SURROUNDINGS)
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    assert check(tmp_path, ["script", "train.py"], environment).code == 0


def test_torch_cannot_tell_either(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TORCH)
    program, environment = ["script", "train.py"], {**os.environ, "OMP_NUM_THREADS": "2"}
    expected = plainly(program, tmp_path, environment)
    assert expected.code == 0
    with Template(program, tmp_path, environment) as template:
        assert template.prepare("torch", "torch.utils.data", "numpy")["skipped"] == {}
        assert template.run() == expected


def test_processes_of_the_program_find_its_main(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROCESSES)
    ended = check(tmp_path, ["script", "train.py", "a"])
    assert (ended.code, ended.stdout.count("in __mp_main__ 1 ['a']")) == (0, 2)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "part.py").write_text(PROCESSES)
    assert check(tmp_path, ["module", "package.part", "a"]).code == 0


def test_module_beside_the_program_comes_before_the_library(tmp_path: Path) -> None:
    for name in ("typing", "types", "json", "fcntl", "contextlib"):
        (tmp_path / f"{name}.py").write_text(f"print('own {name}')")
    (tmp_path / "train.py").write_text("import typing, types, json, fcntl")
    program = ["script", "train.py"]
    expected = plainly(program, tmp_path)
    assert "own typing" in expected.stdout
    assert plainly(program, tmp_path, boot=["run"]) == expected
    with Template(program, tmp_path) as template:
        assert "beside the script hides" in template.prepare("json")["reason"]


def test_cold_start_imports_nothing_more(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys\nprint(*sys.modules, sep='\\n')")
    program = ["script", "train.py"]
    ours = plainly(program, tmp_path, boot=["run"]).stdout.split()
    assert {*ours} - {*plainly(program, tmp_path).stdout.split()} <= {"__future__"}
