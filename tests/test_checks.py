"""`make check` finds planted faults: effects in the pure core, and what is too long or silent."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.tools import tool

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
PURE = next(
    contract
    for contract in SETTINGS["importlinter"]["contracts"]
    if contract["name"] == "core and values reach no effect"
)
EFFECTS = [
    "_thread", "aiohttp", "asyncio", "boto3", "concurrent", "ctypes", "dbm", "fcntl", "glob",
    "http", "httpx", "lightkube", "mmap", "multiprocessing", "os", "pathlib", "psutil", "pty",
    "queue", "random", "resource", "sched", "secrets", "select", "selectors", "shelve", "shutil",
    "signal", "smtplib", "socket", "socketserver", "sqlite3", "ssl", "subprocess", "tempfile",
    "termios", "threading", "time", "torch", "urllib", "uuid", "websockets",
]  # fmt: skip
"""Modules that reach a clock, randomness, threads, processes, files or a network."""


def test_an_effect_in_the_core_is_found_also_behind_another_module(tmp_path: Path) -> None:
    package = tmp_path / "planted"
    (package / "core").mkdir(parents=True)
    for folder in (package, package / "core"):
        (folder / "__init__.py").touch()
    for number, name in enumerate(EFFECTS):
        (package / f"behind_{name}.py").write_text(f"import {name}\n")
        body = f"def use():\n    from planted import behind_{name}\n"
        (package / "core" / f"m{number}.py").write_text(body)
    listed = "\n    ".join(PURE["forbidden_modules"])
    settings = tmp_path / "settings.ini"
    settings.write_text(
        "[importlinter]\nroot_package = planted\ninclude_external_packages = True\n"
        "[importlinter:contract:pure]\nname = pure\ntype = forbidden\n"
        f"source_modules =\n    planted.core\nforbidden_modules =\n    {listed}\n"
    )
    # A process of its own: it switches off the loggers of the process that it runs in.
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache", "--config", settings]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    shown = done.stdout
    assert [
        name for name in EFFECTS if f"planted.core is not allowed to import {name}" not in shown
    ] == []


def test_the_contract_covers_all_pure_packages() -> None:
    pure = {"core", "spec", "wire", "errors", "foreign_numbers", "typed_fields"}
    pure |= {f"local.{name}.decisions" for name in ("kubeflow", "machines", "ray")}
    assert {f"unbroken.{name}" for name in pure} <= set(PURE["source_modules"])
    assert "ignore_imports" not in PURE
    # The exceptions for programs' clocks are for files of this name.
    folders = [ROOT / "src/unbroken" / name.replace(".", "/") for name in pure]
    assert [path for folder in folders for path in folder.rglob("driver.py")] == []


@pytest.mark.parametrize(
    ("source", "rule"),
    [
        ("import datetime\nNOW = datetime.datetime.now()\n", "TID251"),
        ("from datetime import datetime as d\nNOW = d.utcnow()\n", "TID251"),
        ("from datetime import date\nread = date.today\n", "TID251"),
        ("from time import monotonic as read\nNOW = read()\n", "TID251"),
        ("X = 1\n", "D100"),
        ("def f() -> None:\n    return None\n", "D103"),
        ("class A:\n    def f(self) -> None:\n        return None\n", "D102"),
    ],
)
def test_a_clock_and_a_missing_docstring_are_found(source: str, rule: str) -> None:
    place = "src/unbroken/core/planted.py"
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--output-format", "concise"]
    done = subprocess.run(
        [*command, "--stdin-filename", place, "-"],
        input=source,
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 1
    assert f": {rule} " in done.stdout


def test_long_functions_and_files_are_found(tmp_path: Path) -> None:
    lengths = tool("lengths")
    path = tmp_path / "a.py"
    body = "    x = 1\n" * 59
    path.write_text(
        f'def f():\n    """A.\n\n    B."""\n{body}\n\nasync def g():\n{body}    y = 2\n'
    )
    assert list(lengths.findings(path)) == [f"{path}:66: g: 61 lines, 60 at most"]
    path.write_text("X = 1\n" * 1001)
    assert list(lengths.findings(path)) == [f"{path}: 1001 lines, 1000 at most"]
    path.write_text("X = 1\n" * 1000)
    assert list(lengths.findings(path)) == []
