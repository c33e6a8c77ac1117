"""The shell of `unbroken run`, captured in its process and taken over in the agent's."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys

import pytest

from tests.watching import PATIENCE_SECONDS
from unbroken.agent import shell
from unbroken.agent.options import SHELL_VARIABLE
from unbroken.errors import SpecError

TELL = """
import asyncio, json, os, resource
from unbroken.agent.shell import borrow_stdin, take
taken = take()
async def borrow():
    if taken.stdin:
        borrow_stdin(taken.stdin, asyncio.get_running_loop())
    given = os.read(0, 100).decode()
    while os.readlink("/proc/self/fd/0") != "/dev/null":
        await asyncio.sleep(0.01)
    return given
mask = os.umask(0)
print(json.dumps({
    "environment": taken.environment, "arguments": taken.arguments, "file": taken.error_file,
    "notes": taken.notes, "umask": mask, "cwd": os.getcwd(), "stdin": asyncio.run(borrow()),
    "core": resource.getrlimit(resource.RLIMIT_CORE)[0], "cpus": len(os.sched_getaffinity(0)),
}))
"""
FIRST = min(os.sched_getaffinity(0))


def taken(variables: dict[str, str], serve: socket.socket | None = None) -> dict[str, object]:
    """What a process says that takes over a shell; `serve`: the socket of its standard input."""
    command = [sys.executable, "-c", TELL]
    environment = {**os.environ, **variables}
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
    )
    if serve is not None:
        borrowers: list[socket.socket] = []
        assert select.select([serve], [], [], 60)[0]
        shell.hand_over(serve, borrowers)
        borrowers.pop().close()
    out, _ = process.communicate(timeout=PATIENCE_SECONDS)
    result: dict[str, object] = json.loads(out)
    return result


@pytest.mark.slow
def test_a_process_takes_over_what_another_has_captured(tmp_path: os.PathLike[str]) -> None:
    folder = os.fspath(tmp_path) + "/caf\udce9 folder"
    os.mkdir(folder)
    environ = {"CITY": "caf\udce9", "BASH_FUNC_f%%": "() { :; }", "TORCHELASTIC_ERROR_FILE": "e"}
    found = shell.capture(environ, ["a.py", "\udcff"], folder, "")
    state = json.loads(found[SHELL_VARIABLE])
    assert found.keys() == {SHELL_VARIABLE}
    state |= {"umask": 0o77, "cpus": [FIRST]}
    state["limits"]["RLIMIT_CORE"] = [0, state["limits"]["RLIMIT_CORE"][1]]
    said = taken({SHELL_VARIABLE: json.dumps(state)})
    assert said == {
        "environment": environ,
        "arguments": ["a.py", "\udcff"],
        "file": f"{folder}/e",
        "notes": [],
        "umask": 0o77,
        "cwd": folder,
        "stdin": "",
        "core": 0,
        "cpus": 1,
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "value", "note"),
    [
        ("cpus", [4095], "processors [4095] of your shell: "),
        ("limits", {"RLIMIT_NOFILE": [2**62] * 2}, "limit RLIMIT_NOFILE of ["),
        ("directory", "/gone\udce9", "folder '/gone\\udce9' of your shell: No such file"),
    ],
)
def test_what_cannot_be_taken_over_is_named(name: str, value: object, note: str) -> None:
    state = json.loads(shell.capture({}, [], "/", "")[SHELL_VARIABLE]) | {name: value}
    (said,) = taken({SHELL_VARIABLE: json.dumps(state)})["notes"]  # type: ignore[misc]
    assert said.startswith(f"{shell.NOT_TAKEN} {note}")


def test_functions_that_do_not_fit_are_refused_by_name() -> None:
    large = {"BASH_FUNC_small%%": "x", "BASH_FUNC_large%%": "x" * 2**17}
    with pytest.raises(SpecError, match="unset 'BASH_FUNC_large%%' "):
        shell.capture(large, [], "/", "")


@pytest.mark.slow
def test_standard_input_is_lent_while_its_owner_lives() -> None:
    out, into = os.pipe()
    os.write(into, b"data")
    before = os.dup(0)
    os.dup2(out, 0)
    try:
        server = shell.listen()
        assert server is not None
        name = server.getsockname()[1:].decode()
        variables = shell.capture({}, [], "/", name)
        with server:
            assert taken(variables, server)["stdin"] == "data"
        assert taken(variables)["stdin"] == ""
    finally:
        os.dup2(before, 0)
        for fd in (out, into, before):
            os.close(fd)
