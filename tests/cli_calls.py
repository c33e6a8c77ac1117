"""Calling `unbroken` from tests, and scripts for it to run that need no torch."""

from __future__ import annotations

import asyncio
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

from tests.cli_forks import UNBROKEN, run_unbroken
from tests.cluster_logs import assert_no_errors
from unbroken.cli import main

SCHEMAS = Path(__file__).parents[1] / "docs/reference/schemas"
COUNT = """
import os, sys, time
for step in range(int(sys.argv[1])):
    print("step", step, flush=True)
    time.sleep(0.1)
"""
"""Counts to its argument, ten steps a second."""

TELL = """
import json, os, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "CLI_TEST", "JOB_RESTART_COUNT")
told = {name: os.environ.get(name) for name in names}
print(json.dumps({**told, "argv": sys.argv[1:], "cwd": os.getcwd(), "python": sys.executable}))
"""
"""Program that prints its arguments and environment, and ends."""

FAIL = """
import os, sys, time
from pathlib import Path
here = Path("here-" + os.environ["MASTER_PORT"])
if os.environ["RANK"] == "1":
    while not here.exists():
        time.sleep(0.01)
    print("rank 1 had enough", file=sys.stderr, flush=True)
    sys.exit(7)
print("rank", os.environ["RANK"], "is here", flush=True)
here.touch()
time.sleep(1000)
"""
"""Rank 1 fails as soon as rank 0 has said something."""


PROCESSES = {
    *{("up",), ("down",), ("run",), ("doctor",)},
    *{("operator",), ("node-daemon",), ("cluster-api",)},
}
"""Commands that start processes, or that signals end: each call has a process of its own."""


@contextmanager
def _person(
    arguments: Sequence[str], folder: Path, environment: Mapping[str, str]
) -> Iterator[None]:
    """Make this process look like that of a command, within the block."""
    before = dict(os.environ), sys.argv
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["unbroken", *arguments]
    try:
        with chdir(folder):
            yield
    finally:
        os.environ.clear()
        os.environ.update(before[0])
        sys.argv = before[1]


def _is_in_event_loop() -> bool:
    """Return True in a coroutine, where no command can run an event loop of its own."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def call_here(
    arguments: Sequence[str], folder: Path, environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run a command in this process."""
    out, error = io.StringIO(), io.StringIO()
    code: Any = 0
    with redirect_stdout(out), redirect_stderr(error), _person(arguments, folder, environment):
        try:
            main.run()
        except SystemExit as end:
            code = end.code or 0
    return subprocess.CompletedProcess([*arguments], code, out.getvalue(), error.getvalue())


@dataclass(frozen=True)
class Cli:
    """The `unbroken` command with a cluster directory, in a folder for scripts."""

    directory: Path
    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """The environment of a person who has set this directory in the shell."""
        ours = {"UNBROKEN_DIR": str(self.directory), "COLUMNS": "200", "NO_COLOR": "1"}
        rest = {name: value for name, value in os.environ.items() if name != "KUBECONFIG"}
        return {**rest, **ours}

    def call(
        self,
        *arguments: str,
        code: int | None = 0,
        stdin: str = "",
        environment: dict[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end; `code` None: whatever it ends with."""
        environment = environment or self.environment
        if stdin or arguments[:1] in PROCESSES or _is_in_event_loop():
            done = run_unbroken([*arguments], self.folder, environment, stdin)
        else:
            done = call_here(arguments, self.folder, environment)
        said = f"unbroken {' '.join(arguments)} ended with {done.returncode}:\n{done.stderr}"
        assert code is None or done.returncode == code, said
        assert "Traceback" not in done.stderr or '"' in done.stderr, said
        return done

    def take_away(self) -> None:
        """Stop the cluster, and fail if it said anything of an error."""
        self.call("down", code=None)
        try:
            assert_no_errors(self.directory / "up.log")
        finally:
            self.call("down", "--purge", code=None)

    def json(self, *arguments: str, code: int = 0) -> Any:
        """The answer of a command with `-o json`, which its schema in the reference must fit."""
        found = json.loads(self.call(*arguments, "-o", "json", code=code).stdout)
        assert_fits(found, arguments)
        return found

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start a command, with what it says on one stream."""
        return subprocess.Popen(
            [*UNBROKEN, *arguments],
            cwd=self.folder,
            env=self.environment,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def script(self, name: str, text: str) -> str:
        """Write a script; its name."""
        (self.folder / name).write_text(text)
        return name


def assert_fits(value: Any, command: Sequence[str]) -> None:
    """Fail if a value does not fit the published JSON Schema of the command that printed it."""
    for words in (command[:2], command[:1]):
        file = SCHEMAS / f"{'-'.join(words)}.json"
        if file.is_file():
            errors = Draft202012Validator(json.loads(file.read_text())).iter_errors(value)
            said = [f"{one.json_path}: {one.message}" for one in errors]
            assert not said, f"{file.name}: {said}"
            return


def read_until(process: subprocess.Popen[str], holds: Callable[[str], bool]) -> list[str]:
    """Lines of a command up to the first that holds; an AssertionError with all if it ends."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line.rstrip("\n"))
        if holds(lines[-1]):
            return lines
    raise AssertionError("\n".join(lines))


def manifest(name: str, *command: str, replicas: int = 1, **policy: Any) -> dict[str, Any]:
    """A job whose pods run a program under the agent with two ranks each."""
    container = {
        "name": "pytorch",
        "image": "any",
        "command": ["hyperpodrun", "--no-python", *command],
    }
    replica = {
        "name": "pods",
        "replicas": replicas,
        "template": {"spec": {"containers": [container], "terminationGracePeriodSeconds": 5}},
    }
    return {
        "apiVersion": "sagemaker.amazonaws.com/v1",
        "kind": "HyperPodPyTorchJob",
        "metadata": {"name": name},
        "spec": {
            "nprocPerNode": "2",
            "runPolicy": {"cleanPodPolicy": "None", **policy},
            "replicaSpecs": [replica],
        },
    }
