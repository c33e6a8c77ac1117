"""`torchrun` and `unbroken run` side by side: the table of docs/guide/migrate-torchrun.md.

The rows are in test_torchrun_matrix.yaml.  A row without a reason must be the same for both, and
`--rewrite` writes the table into the page.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli_calls import UNBROKEN, Cli

# It runs some twenty launchers one after the other, on one processor.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ROWS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
PAGE = Path(__file__).parents[2] / "docs/guide/migrate-torchrun.md"
BEGIN, END = "<!-- table: tests/cli/test_torchrun_matrix.py writes it -->\n", "<!-- end -->\n"
LAUNCHERS = {
    "torchrun": [sys.executable, "-m", "torch.distributed.run"],
    "unbroken run": [*UNBROKEN, "run"],
}
SCRIPTS = {
    "ask.py": """
import json, os, resource, signal, socket, subprocess, sys
mask = os.umask(0)
os.umask(mask)
said = [str(eval(ask)) for ask in json.loads(os.environ["ASKS"])]
print("ANSWERS", json.dumps(said))
print("x" * 100_000)
print("to err", file=sys.stderr)
print("flood\\n" * 100_000, end="")
""",
    "record.py": """
from torch.distributed.elastic.multiprocessing.errors import record
@record
def main():
    raise ValueError("had enough")
main()
""",
    "records.py": """
import os, time
from torch.distributed.elastic.multiprocessing.errors import record
@record
def main():
    if os.environ["RANK"] == "1":
        raise ValueError("cause")
    try:
        time.sleep(1000)
    finally:
        raise ValueError("consequence")
def end(*_):
    raise SystemExit(1)
import signal
signal.signal(signal.SIGTERM, end)
main()
""",
    "true.py": "",
    "numbers.json": "[1, 2]",
    "exit.py": "import sys; sys.exit(7)",
    "kill.py": "import os; os.kill(os.getpid(), 9)",
    "term.py": """
import pathlib, signal, sys, time
def save(*_):
    pathlib.Path("saved").write_text("saved")
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
time.sleep(1000)
""",
    "function.sh": "#!/bin/bash\nhello\n",
}
WORDS = ["--lr=1", "--x", "--zeta=16", "--", "caf\udce9", "", "a b", "$(RANK)", "${local_rank}"]
ONCE = ["--max-restarts", "0"]
RUNS = {
    "ambiguous": ["true.py", "--l"],
    "record": [*ONCE, "record.py"],
    "records": [*ONCE, "--nproc-per-node", "2", "records.py"],
    "exit": [*ONCE, "exit.py"],
    "kill": [*ONCE, "kill.py"],
    "term": ["term.py"],
    "program": ["--no-python", "./function.sh"],
    "module": ["-m", "json.tool", "--compact", "numbers.json"],
    "gpu": ["--nproc-per-node", "gpu", "exit.py"],
}


@dataclass(frozen=True)
class Ended:
    """A launcher that has ended."""

    code: int
    stdout: str
    stderr: str


def answers(launcher: str, cli: Cli) -> Iterator[str]:
    """The answers of a launcher to all rows, in order."""
    folder = cli.folder / launcher.replace(" ", "-") / "caf\udce9 folder"
    folder.mkdir(parents=True)
    for name, text in SCRIPTS.items():
        (folder / name).write_text(text)
    (folder / "function.sh").chmod(0o755)
    environment = environment_of(cli, folder)
    ended = Ended(0, "", "")
    for run, rows in ROWS.items():
        if run != "shell":
            ended = run_one(run, launcher, folder, environment)
        if run == "script":
            line = next(one for one in ended.stdout.splitlines() if one.startswith("ANSWERS "))
            yield from json.loads(line.removeprefix("ANSWERS "))
            continue
        for _, ask, *_ in rows:

            def file(name: str) -> str | None:
                path = folder / name
                return path.read_text() if path.exists() else None

            yield str(eval(ask, {"ended": ended, "file": file, "json": json}))


def environment_of(cli: Cli, folder: Path) -> dict[str, str]:
    """The variables of a shell with everything special in it."""
    ours = {
        "ASKS": json.dumps([ask for _, ask, *_ in ROWS["script"]]),
        "REAL_PWD": os.getcwd(),
        "REAL_NICE": str(os.nice(0)),
        "SHLVL": "4",
        "KUBECONFIG": "/nowhere/config",
        "NNODES": "9",
        "CITY": "caf\udce9",
        "TWO": "a\nb",
        "DOLLARS": "$(RANK) $$",
        "LANG": "C.UTF-8",
        "BASH_FUNC_hello%%": "() { echo hello; }",
        "REAL_HOST": socket.gethostname(),
        "REAL_PYTHON": sys.executable,
        "TORCHELASTIC_ERROR_FILE": "e.json",
    }
    result = {**cli.environment, **ours, "REAL_PATH": cli.environment["PATH"]}
    for name in ("VIRTUAL_ENV", "OMP_NUM_THREADS", "PYTHONUNBUFFERED"):
        result.pop(name, None)
    return result


def run_one(run: str, launcher: str, folder: Path, environment: dict[str, str]) -> Ended:
    """Run a launcher from a shell with a umask, limits, a nice value and one processor."""
    words = ["ask.py", *WORDS] if run == "script" else RUNS[run]
    shell = 'umask 027; ulimit -c 0; ulimit -n 1000; cd "$1"; shift; exec nice -n 3 "$@"'
    cpu = min(os.sched_getaffinity(0))
    command = ["taskset", "-c", str(cpu), *LAUNCHERS[launcher], *words]
    process = subprocess.Popen(
        ["bash", "-c", shell, "bash", str(folder), *command],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    begin = b""
    if run == "term":
        assert process.stdout is not None
        begin = process.stdout.readline()
        process.send_signal(signal.SIGTERM)
    out, error = process.communicate(b"first\nsecond\n")
    said = Ended(
        process.returncode, (begin + out).decode(errors="replace"), error.decode(errors="replace")
    )
    assert run != "script" or said.code == 0, said
    return said


def table(columns: dict[str, list[str]]) -> Iterator[str]:
    """The lines of the table in the page."""
    yield f"| behaviour | {' | '.join(f'`{launcher}`' for launcher in columns)} | why |"
    yield "|---|---|---|---|"
    rows = (row for rows in ROWS.values() for row in rows)
    for (about, _, *why), *values in zip(rows, *columns.values(), strict=True):
        cells = [cell(value) for value in values]
        yield f"| {about} | {' | '.join(cells)} | {' '.join(why)} |"


def cell(value: str) -> str:
    """A value as a cell of a table."""
    text = value.strip().replace("\n", "\\n").replace("|", "\\|")
    return f"`{text}`" if text else "(empty)"


def test_torchrun_and_unbroken_run_do_the_same_but_for_what_the_page_says(
    cli: Cli, request: pytest.FixtureRequest
) -> None:
    columns: dict[str, list[str]] = {name: list(answers(name, cli)) for name in LAUNCHERS}
    rows: list[list[Any]] = [row for rows in ROWS.values() for row in rows]
    assert len(rows) >= 40
    theirs, ours = columns.values()
    wrong = [
        (row[0], one, other)
        for row, one, other in zip(rows, theirs, ours, strict=True)
        if (one == other) != (len(row) == 2)
    ]
    assert not wrong
    before, _, rest = PAGE.read_text().partition(BEGIN)
    found, _, after = rest.partition(END)
    wanted = "\n".join(["", *table(columns), "", ""])
    if request.config.getoption("rewrite"):
        PAGE.write_text(before + BEGIN + wanted + END + after)
    else:
        assert found == wanted
