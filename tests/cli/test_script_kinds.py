"""What `unbroken run` takes for a script: everything that python itself runs."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from unbroken.cli.run.manifests import RunScript, check_script, script_name
from unbroken.errors import SpecError


@pytest.fixture(name="folder")
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("pkg/__main__.py", "compiled/__main__.pyc", "plain", "train.py"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).touch()
    with zipfile.ZipFile("all.zip", "w") as archive:
        archive.writestr("__main__.py", "")
    Path("empty").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    "program", ["pkg", "pkg/", "./pkg", "compiled", "all.zip", "plain", "train.py"]
)
def test_what_python_runs_is_taken(folder: Path, program: str) -> None:
    assert check_script(RunScript((program,), program), None) == ()
    absolute = str(folder / program)
    assert check_script(RunScript((absolute,), absolute), None) == ()


@pytest.mark.parametrize(
    ("program", "why"),
    [("empty", "empty is a folder without __main__.py"), ("none.py", "no such script: none.py")],
)
def test_what_python_cannot_run_is_refused(folder: Path, program: str, why: str) -> None:
    with pytest.raises(SpecError, match=why):
        check_script(RunScript((program,), program), None)


@pytest.mark.parametrize("program", ["pkg", "pkg/", "./pkg", "/tmp/x/pkg//"])
def test_a_folder_gives_its_job_a_name(program: str) -> None:
    assert script_name(program, ()) == "pkg"
    assert script_name(program, ("pkg",)) == "pkg-2"
