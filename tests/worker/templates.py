"""A template process and its parked workers, as an agent has them."""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import site
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import unbroken.worker
from unbroken.wire.warm import MESSAGE_BYTES_MAX

BOOT = str(Path(unbroken.worker.__file__).parent / "boot/boot.py")
_PR_SET_CHILD_SUBREAPER = 36
SEEN = "import sys\nprint(*[n for n in sys.modules if n.startswith('mod')])"
"""Program that prints which modules of a test it finds imported."""


@dataclass(frozen=True)
class Ended:
    """Exit code and output of a program that has ended."""

    code: int
    """Exit code; if a signal ended the program, minus its number."""
    stdout: str
    stderr: str


class Template:
    """A template process. Close it to end it and its parked workers."""

    def __init__(
        self,
        program: Sequence[str],
        directory: Path,
        environment: Mapping[str, str] = os.environ,
        python: str = sys.executable,
    ) -> None:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
        self.python = python
        self.program, self.directory, self.environment = [*program], directory, dict(environment)
        self.pair, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.found: dict[str, dict[str, str]] = {"left_out": {}, "files": {}}
        self._outputs = os.memfd_create("stdout"), os.memfd_create("stderr")
        with theirs:
            self.process = subprocess.Popen(
                [python, "-u", BOOT, "template", str(theirs.fileno()), *program],
                stdin=subprocess.DEVNULL,
                stdout=self._outputs[0],
                stderr=self._outputs[1],
                cwd=directory,
                env=self.environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def __enter__(self) -> Template:
        return self

    def __exit__(self, *_: object) -> None:
        self.pair.close()
        self.process.wait()
        self.printed = tuple(_contents(fd) for fd in self._outputs)

    def ask(self, message: dict[str, Any], *descriptors: int) -> dict[str, Any]:
        """Send a message; return the answer."""
        self.send(message, *descriptors)
        return self.answer()

    def send(self, message: dict[str, Any], *descriptors: int) -> None:
        """Send a message without waiting for an answer."""
        socket.send_fds(self.pair, [json.dumps(message).encode()], descriptors)

    def answer(self) -> dict[str, Any]:
        """Return the next message of the template; what it has found is added to `found`."""
        while True:
            answer: dict[str, Any] = json.loads(
                self.pair.recv(MESSAGE_BYTES_MAX) or b'{"type": "end"}'
            )
            if answer["type"] != "found":
                return answer
            for key in self.found:
                self.found[key].update(answer.get(key, {}))

    def prepare(
        self, *modules: str, is_given: bool = False, left_out: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """Request the import of modules; return the answer."""
        order = {"type": "import", "modules": modules, "is_given": is_given}
        return self.ask({**order, "left_out": dict(left_out or {})})

    def park(self) -> Worker:
        """Return a parked worker."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            answer = self.ask({"type": "park"}, theirs.fileno())
        assert answer["type"] == "parked", answer
        return Worker(self, answer["pid"], ours)

    def run(self, **order: Any) -> Ended:
        """Park a worker, run it, and wait for its end."""
        worker = self.park()
        worker.start(**order)
        return worker.end()


class Worker:
    """A parked worker, until it is started."""

    def __init__(self, template: Template, pid: int, pair: socket.socket) -> None:
        self.template, self.pid, self.pair = template, pid, pair
        self._files: list[int] = []

    def start(
        self,
        program: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        given: Mapping[int, int] | None = None,
        directory: Path | None = None,
    ) -> None:
        """Order it to become the program."""
        self._files = [os.memfd_create("stdout"), os.memfd_create("stderr")]
        numbers = {1: self._files[0], 2: self._files[1], **(given or {})}
        kind, *arguments = program or self.template.program
        message = {
            "type": "run",
            "environment": dict(self.template.environment if environment is None else environment),
            "directory": str(directory or self.template.directory),
            "kind": kind,
            "arguments": arguments,
            "numbers": [*numbers],
        }
        socket.send_fds(self.pair, [json.dumps(message).encode()], [*numbers.values()])

    def prepare(
        self, environment: Mapping[str, str], left_out: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """Have it import for the rank with these variables; return the answer."""
        order = {"type": "prepare", "environment": dict(environment)}
        self.pair.send(json.dumps({**order, "left_out": dict(left_out or {})}).encode())
        return self.said()

    def said(self) -> dict[str, Any]:
        """Return its next message; `end` if it has closed the pair."""
        found: dict[str, Any] = json.loads(self.pair.recv(MESSAGE_BYTES_MAX) or b'{"type": "end"}')
        return found

    def end(self) -> Ended:
        """Wait for its end."""
        _, status = os.waitpid(self.pid, 0)
        self.pair.close()
        printed = [_contents(fd) for fd in self._files] or ["", ""]
        return Ended(os.waitstatus_to_exitcode(status), *printed)

    def kill(self) -> None:
        """Kill it with SIGKILL."""
        os.kill(self.pid, signal.SIGKILL)


def user_packages(directory: Path) -> Path:
    """Make and return a directory that a template takes for site-packages: one user's."""
    name = Path(site.getusersitepackages()).parent.name
    path = directory / "base" / "lib" / name / "site-packages"
    path.mkdir(parents=True)
    return path


def user_template(packages: Path, text: str = SEEN, **variables: str) -> Template:
    """Return the template of a program in a folder without other files, which finds these user's
    packages."""
    directory = packages.parents[3] / "program"
    directory.mkdir()
    (directory / "train.py").write_text(text)
    # A venv has no user site: the base interpreter has.
    environment = {**os.environ, "PYTHONUSERBASE": str(packages.parents[2]), **variables}
    environment.pop("PYTHONPATH", None)
    python = os.path.realpath(sys.executable)
    return Template(["script", "train.py"], directory, environment, python)


def plainly(
    program: Sequence[str],
    directory: Path,
    environment: Mapping[str, str] = os.environ,
    boot: Sequence[str] = (),
    python: str = sys.executable,
) -> Ended:
    """Run the program in a new interpreter, as a cold start does, with or without `boot`."""
    kind, *arguments = program
    path = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
    flags = {"script": [], "module": ["-m"], "run-path": ["-c", path]}[kind]
    command = [BOOT, *boot, *program] if boot else [*flags, *arguments]
    files = os.memfd_create("stdout"), os.memfd_create("stderr")
    code = subprocess.run(
        [python, "-u", *command],
        stdin=subprocess.DEVNULL,
        stdout=files[0],
        stderr=files[1],
        cwd=directory,
        env=dict(environment),
        start_new_session=True,
        check=False,
    ).returncode
    return Ended(code, *(_contents(fd) for fd in files))


def _contents(fd: int) -> str:
    os.lseek(fd, 0, os.SEEK_SET)
    with open(fd) as file:
        return masked(file.read())


def masked(text: str) -> str:
    """Return a text without addresses, which differ in any two processes."""
    return re.sub("0x[0-9a-f]{6,}", "(an address)", text)
