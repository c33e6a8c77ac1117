"""Rewriting of scripts: what happens replaces what a line expects, and nothing else."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.core.job import drive_job
from tests.core.job.transcripts import Edits

BEFORE = '''\
from tests.core.job.drive_job import Script, spec

NAME = "w-1"


def test_a() -> None:
    script = Script(spec(2))
    script.up()
    script.run("""
        10 failed w-0 0 -> stop w-7 0
        11 tick ->
    """)
    script.run("12 ready w-0 0 ->")
    script.run(f"12 ready {NAME} 0 -> nothing,  status X 7")


def test_b() -> None:
    Script(spec(1)).run("""
        0 job -> create w-0,
            status Created 0
        0 synced ->
    """)
'''
AFTER = '''\
from tests.core.job.drive_job import Script, spec

NAME = "w-1"


def test_a() -> None:
    script = Script(spec(2))
    script.up()
    script.run("""
        10 failed w-0 0 -> stop w-0 0 keep, stop w-1 0 keep, status Faulted 1, event Faulted,
            incident 1 open
        11 tick -> stop w-0 0 keep, stop w-1 0 keep
    """)
    script.run("12 ready w-0 0 -> stop w-1 0 keep, status Faulted 1")
    script.run(f"""
        12 ready {NAME} 0 -> start w-0 1 rank=0, start w-1 1 rank=1, status Faulted 1,
            incident 1 open
    """)


def test_b() -> None:
    Script(spec(1)).run("""
        0 job ->
        0 synced -> create w-0, status Created 0, event Created
    """)
'''
SHARED = '''\
from tests.core.job.drive_job import Script, spec


def run(replicas: int, expected: str) -> None:
    script = Script(spec(replicas))
    script.run(f"0 job -> {expected}")


def test_c() -> None:
    for replicas in (1, 2):
        script = Script(spec(replicas))
        script.run("""
            0 job
            0 synced -> create
        """)
'''


def rewritten(path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Run the tests of a file with the flag; return what was said of the files."""
    path.write_text(text)
    edits = Edits(is_on=True)
    monkeypatch.setattr(drive_job, "EDITS", edits)
    given = importlib.util.spec_from_file_location(path.stem, path)
    assert given is not None
    assert given.loader is not None
    module = importlib.util.module_from_spec(given)
    given.loader.exec_module(module)
    for name, test in vars(module).items():
        if name.startswith("test_"):
            test()
    return list(edits.write())


def test_expectations_become_what_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "some_script.py"
    said = rewritten(path, BEFORE, monkeypatch)
    assert path.read_text() == AFTER
    assert said == [f"{path}: 6 lines written"]
    assert rewritten(path, AFTER, monkeypatch) == []


def test_a_script_with_several_results_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "some_script.py"
    said = rewritten(path, SHARED, monkeypatch)
    assert path.read_text() == SHARED
    assert said == [f"{path}:14: left, for tests that share it differ"]


def test_a_part_in_an_expectation_is_left_and_the_test_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = SHARED.replace(
        "def test_c", "def test_a() -> None:\n    run(1, 'delete w-0')\n\n\ndef test_c"
    )
    with pytest.raises(AssertionError, match="0 job -> "):
        rewritten(tmp_path / "some_script.py", text, monkeypatch)


def test_without_the_flag_a_wrong_expectation_fails() -> None:
    with pytest.raises(AssertionError, match="0 job -> "):
        drive_job.Script(drive_job.spec(1)).run("0 job -> create w-0")
