"""State of the shell of `unbroken run` that a script inherits and a pod's spec cannot hold.

`capture` writes it in the shell's process, into one variable of the Secret of the job. `take` reads
it in the agent's process, from which the workers inherit it. The values are ASCII: text that is not
UTF-8 is escaped.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import resource
import socket
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from unbroken.errors import SpecError

from .options import SHELL_VARIABLE

NAME_CHARACTERS_MAX = 253
"""Longest key of a Secret (apimachinery, IsConfigMapKey)."""
VALUE_BYTES_MAX = 128 * 1024 - len(SHELL_VARIABLE) - 2
"""Longest value of a variable (Linux, MAX_ARG_STRLEN)."""
NOT_TAKEN = "the script does not get the"
"""Begin of a note about what this process could not take over."""
ANSWER_SECONDS = 5.0
"""Seconds that `unbroken run` may take to hand over its standard input."""

# Variables that every worker gets anew, and those that are about unbroken's own processes.
_LEFT_OUT = re.compile(
    r"_|UNBROKEN_(?!DIR$).*|AGENT_(HOST|PORT)|(LOCAL_|GROUP_|ROLE_)?RANK"
    r"|(LOCAL_|GROUP_|ROLE_)?WORLD_SIZE|MASTER_(ADDR|PORT)"
)
# Variables that would be options of the agent: it sets them when it has read its own.
_LATE = re.compile(r"NNODES|NPROC_PER_NODE|PET_.*|TORCHELASTIC_.*")
_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_LIMITS = {
    name: getattr(resource, name)
    for name in dir(resource)
    if name.startswith("RLIMIT_") and name != "RLIMIT_OFILE"  # an alias
}
_CREDENTIALS = struct.Struct("3i")


@dataclass(frozen=True, slots=True)
class Shell:
    """A shell's state, as the agent has taken it."""

    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables to set when the agent has read its options."""
    arguments: Sequence[str] | None = None
    """Arguments of the agent; None: those of its command line."""
    error_file: str = ""
    """File for the error of the worker that failed first; empty: none is wanted."""
    stdin: str = ""
    """Name of the socket that lends standard input; empty: none."""
    notes: tuple[str, ...] = ()
    """Sentences about the parts that this process could not take over."""


def is_text(text: str) -> bool:
    """True if a JSON document in UTF-8 can hold the text."""
    return text.isascii() or text == text.encode(errors="replace").decode()


def capture(
    environ: Mapping[str, str], arguments: Sequence[str], directory: str, stdin: str
) -> dict[str, str]:
    """Return the variables of a Secret for this shell.

    `stdin` is the name of a socket of `listen`, or empty.
    """
    wanted = {name: value for name, value in environ.items() if not _LEFT_OUT.fullmatch(name)}
    own = {
        name: value
        for name, value in wanted.items()
        if _KEY.fullmatch(name)
        and len(name) <= NAME_CHARACTERS_MAX
        and is_text(value)
        and not _LATE.fullmatch(name)
    }
    state: dict[str, Any] = {
        "environment": {name: wanted[name] for name in wanted if name not in own},
        "umask": _umask(),
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "cpus": sorted(os.sched_getaffinity(0)),
        "limits": {name: resource.getrlimit(number) for name, number in _LIMITS.items()},
        "stdin": stdin,
    }
    if not all(map(is_text, arguments)):
        state["arguments"] = list(arguments)
    if not is_text(directory):
        state["directory"] = directory
    if path := environ.get("TORCHELASTIC_ERROR_FILE"):
        state["error_file"] = os.path.join(directory, path)
    text = json.dumps(state)
    if len(text) > VALUE_BYTES_MAX:
        sizes = {name: len(json.dumps(value)) for name, value in state["environment"].items()}
        largest = max(sizes, key=sizes.__getitem__, default="")
        raise SpecError(
            f"the shell's functions and special variables have {len(text)} bytes; at most "
            f"{VALUE_BYTES_MAX} fit; unset {largest!a} ({sizes.get(largest, 0)} bytes)"
        )
    return {**own, SHELL_VARIABLE: text}


def _umask() -> int:
    result = os.umask(0)
    os.umask(result)
    return result


def take() -> Shell:
    """Make this process inherit what a shell has left for it in the environment, if it has."""
    text = os.environ.pop(SHELL_VARIABLE, None)
    if text is None:
        return Shell()
    state = json.loads(text)
    os.umask(state["umask"])
    notes = [note for what, act in _acts(state) if (note := _refused(what, act))]
    error_file, arguments = state.get("error_file", ""), state.get("arguments")
    return Shell(state["environment"], arguments, error_file, state["stdin"], tuple(notes))


def _acts(state: Mapping[str, Any]) -> Iterator[tuple[str, Callable[[], object]]]:
    if "directory" in state:
        yield f"folder {state['directory']!a}", lambda: os.chdir(state["directory"])
    if state["nice"] != os.getpriority(os.PRIO_PROCESS, 0):
        yield (
            f"nice value {state['nice']}",
            lambda: os.setpriority(os.PRIO_PROCESS, 0, state["nice"]),
        )
    yield f"processors {state['cpus']}", lambda: os.sched_setaffinity(0, state["cpus"])
    for name, pair in state["limits"].items():
        if name in _LIMITS and tuple(pair) != resource.getrlimit(_LIMITS[name]):
            yield f"limit {name} of {pair}", partial(_limit, _LIMITS[name], *pair)


def _limit(number: int, soft: int, hard: int) -> None:
    try:
        resource.setrlimit(number, (soft, hard))
    except ValueError:  # only root can raise a hard limit; the soft one is what programs meet
        resource.setrlimit(number, (soft, resource.getrlimit(number)[1]))


def _refused(what: str, act: Callable[[], object]) -> str:
    """Return a note that names what could not be done; empty: it was done."""
    try:
        act()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        return f"{NOT_TAKEN} {what} of your shell: {reason}"
    return ""


# --- standard input


def listen() -> socket.socket | None:
    """Listen for agents that ask for standard input; None: this process has none.

    The name is abstract: it needs no folder, and ends with this process.
    """
    try:
        os.fstat(0)
    except OSError:
        return None
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.bind(f"\0unbroken-stdin-{os.urandom(16).hex()}")
    server.listen()
    server.setblocking(False)
    return server


def hand_over(server: socket.socket, borrowers: list[socket.socket]) -> None:
    """Lend one agent of this user the standard input; it gives it back when its borrower closes."""
    with contextlib.suppress(OSError):
        connection, _ = server.accept()
        borrowers.append(connection)
        if _is_own(connection):
            socket.send_fds(connection, [b"i"], [0])


def borrow_stdin(name: str, loop: asyncio.AbstractEventLoop) -> None:
    """Have the standard input of `unbroken run` until that ends, unless it has ended."""
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(ANSWER_SECONDS)
    with contextlib.suppress(OSError):
        connection.connect(f"\0{name}")
        if _is_own(connection):
            for descriptor in socket.recv_fds(connection, 1, 1)[1]:
                os.dup2(descriptor, 0)
                os.close(descriptor)
                loop.add_reader(connection, _give_back, connection, loop)
                return
    connection.close()


def _give_back(connection: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
    """Let go of it: who writes to a pipe would wait for this process else."""
    loop.remove_reader(connection)
    connection.close()
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)


def _is_own(connection: socket.socket) -> bool:
    given = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    uid: int = _CREDENTIALS.unpack(given)[1]
    return uid == os.geteuid()
