"""Packages that are imported warm: the program's own logic, with packages made here."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from imports import (
    PACKAGES,
    Package,
    Row,
    is_good,
    parse,
    remaining,
    reordered,
    table,
    try_package,
)

from tests.worker.templates import user_packages
from unbroken.wire.warm import READ

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RESULT = BENCHMARKS / "results/imports-2026-11-29.json"
READS = f"RANK {READ}"
THREADED = (
    "import threading; STOP = threading.Event()\n"
    "threading.Thread(target=STOP.wait, daemon=True).start()"
)
FORKED = (
    "import os; FORKS = 0\nos.register_at_fork(after_in_child=lambda: globals().update(FORKS=1))"
)
THREAD = "has started threads: Thread-1"


def test_thirty_packages_and_more_have_a_script_of_two_lines() -> None:
    assert len(PACKAGES) >= 30
    assert len({one.name for one in PACKAGES}) == len(PACKAGES)
    for one in PACKAGES:
        assert one.lines.count("\n") == 1
        compile(one.lines, one.name, "exec")


def test_what_a_parked_worker_imports_for_its_rank_is_not_left_out() -> None:
    reasons = {"a": READS, "b": f"a: {READS}", "c": THREAD}
    assert remaining(reasons, {"b": "has changed the directory to /"}) == {
        "c": THREAD,
        "b": "has changed the directory to /",
    }


def test_the_table_has_each_reason_once() -> None:
    assert len({line.count(" | ") for line in table([Row("a", "")]).splitlines()}) == 1
    left_out = {"a": THREAD, "a.b": f"a: {THREAD}", "a.c": f"a: {THREAD}"}
    good = Row("numpy", "", "2.4.6", 3, 3, {}, True, values=12_345, cold_seconds=0.5)
    cold = Row("other", "", "1.0", 3, 0, left_out, False, "A has changed", 10, 1)
    absent = Row("absent", "", why_not="not installed")
    _, _, *lines = table([good, cold, absent]).splitlines()
    assert lines[0] == "| numpy 2.4.6 | yes | 3 of 3 |  | 12,345 | 0 | 0 | 0 | 0.50 | 0.00 |"
    assert f"| 0 of 3 | 2 modules: a: {THREAD}, `a`: {THREAD} | 10 | 1 |" in lines[1]
    assert lines[2] == "| absent | not installed |  |  |  |  |  |  |  |  |"
    assert [is_good(one) for one in (good, cold, absent)] == [True, False, False]


def test_a_list_in_another_order_is_no_difference_of_its_values() -> None:
    cold = {"a[0]": "1", "a[1]": "2", "b[0]": "1", "b[1]": "2", "c": "1"}
    warm = {"a[0]": "2", "a[1]": "1", "b[0]": "2", "b[1]": "3", "c": "2"}
    assert reordered([*cold], cold, warm) == {"a"}
    assert reordered(["b[0]", "b[1]", "c"], cold, warm) == set()


def test_the_table_of_the_page_is_that_of_the_run() -> None:
    run = json.loads(RESULT.read_text())
    rows = [Row(**one) for one in run["packages"]]
    assert table(rows) in (BENCHMARKS / "README.md").read_text()
    assert {row.package for row in rows} == {one.name for one in PACKAGES}


def test_an_unknown_package_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse([f"--env={sys.prefix}", "--packages=numpy,left-pad"])
    assert "unknown: left-pad" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "left_out", "different"),
    [
        ("import os\nRANK = os.environ['RANK']", {}, set()),
        (THREADED,
         {"modmine": "has started threads: Thread-1 (wait)"}, set()),
        ("try:\n    import modabsent\nexcept ImportError:\n    modabsent = None", {}, set()),
        (FORKED, {}, set()),
        ("import traceback\nDEPTH = len(traceback.extract_stack())", {}, {"modmine.'DEPTH'"}),
    ],
    ids=["rank", "thread", "absent", "fork", "stack"],
)  # fmt: skip
def test_a_package_is_compared_with_cold_starts(
    code: str,
    left_out: dict[str, str],
    different: set[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packages = user_packages(tmp_path)
    (packages / "modmine.py").write_text(code)
    (packages / "modmine-1.5.dist-info").mkdir()
    (packages / "modmine-1.5.dist-info/METADATA").write_text("Name: modmine\nVersion: 1.5\n")
    monkeypatch.setenv("PYTHONUSERBASE", str(packages.parents[2]))
    folder = tmp_path / "program"
    folder.mkdir()
    package = Package("modmine", "import modmine\nmodmine.__name__")
    row = try_package(package, Path(os.path.realpath(sys.executable)), folder)
    assert (row.why_not, row.version, row.is_warm) == ("", "1.5", True)
    assert (row.left_out, {*row.different}) == (left_out, different)
    assert row.after_fork == ("FORKS" in code)
    assert row.warm_modules == row.modules - len(left_out)
    assert row.values > 1
