"""A worker that waits, with everything imported, for the order to become the user's program."""

import fcntl
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from types import ModuleType
from typing import Any

STARTUP = ("PYTHON", "LD_", "GLIBC_", "MALLOC_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_")
"""Prefixes of variables that the interpreter or a library reads once, when it starts."""


class Parked:
    """Values that a forked worker needs of its template."""

    def __init__(
        self, pairs: ModuleType, becoming: ModuleType, begin: list[str], front: str | None
    ) -> None:
        self._pairs, self._becoming, self._begin, self._front = pairs, becoming, begin, front
        self._imported_in: dict[str, str] = {}
        self._variables: Collection[str] = ()
        self._set: dict[str, str] = {}
        self._unset: list[str] = []
        self._directory = ""
        self._changed: Callable[[], str | None] = lambda: None

    def prepare(self, environment: dict[str, str], read: Collection[str], directory: str) -> None:
        """Record, in the template, its environment during imports, the variables read then, and its
        directory."""
        self._imported_in, self._variables, self._directory = environment, read, directory
        now = dict(os.environ)
        self._set = {name: now[name] for name in now if environment.get(name) != now[name]}
        self._unset = [name for name in environment if name not in now]

    def prepare_rank(
        self,
        rank: Mapping[str, str],
        read: Collection[str],
        changed: Callable[[], str | None],
    ) -> None:
        """Record, in this worker, the variables of its rank during further imports, and all
        variables that were read then. `changed` returns why these imports are no longer true."""
        self.prepare({**self._imported_in, **rank}, {*self._variables, *read}, self._directory)
        self._changed = changed

    def wait(
        self,
        number: int,
        reserved: Collection[int],
        bytes_max: int,
        learnt: str,
        prepared: Callable[[int, dict[str, Any]], dict[str, Any]],
    ) -> tuple[int, list[str]]:
        """Wait for the order; return the position of the program's directory in `sys.path`, and the
        program.

        `learnt` is the variable of a descriptor that a cold start does not need. `prepared` answers
        a `prepare`.
        """
        pair = self._pairs.Pair(number)
        _separate()
        while True:
            message, descriptors = pair.receive(bytes_max)
            if message is None:
                os._exit(0)
            if message["type"] == "run":
                break
            answer = prepared(pair.fileno(), message)
            pair.send(answer)
            if answer["left_out"]:
                os._exit(0)
        numbers = message["numbers"]
        free = {0, 1, 2, *reserved, *descriptors, pair.fileno()}
        cold = self._why_cold(message["environment"]) or self._changed()
        cold = cold or _occupied(numbers, free)
        if cold:
            pair.send({"type": "cold", "reason": cold})
        pair.close()
        _place(descriptors, numbers)
        for spare in reserved:
            if spare not in numbers:
                os.close(spare)
        self._move(message["directory"])
        program = [message["kind"], *message["arguments"]]
        if cold:
            value = message["environment"].pop(learnt, None)
            if value is not None:
                os.close(int(value))
            _replace(message["environment"])
            self._becoming.start_anew(self._becoming.command(self._begin, program[0], program[1:]))
        _replace({**message["environment"], **self._set}, self._unset)
        return self._position(), program

    def _why_cold(self, environment: dict[str, str]) -> str | None:
        before = self._imported_in
        for name in environment.keys() | before.keys():
            if (name in self._variables or name.startswith(STARTUP)) and environment.get(
                name
            ) != before.get(name):
                return f"{name} has changed since the imports, which read it"
        return None

    def _move(self, directory: str) -> None:
        os.chdir(directory)
        process: Any = sys.modules.get("multiprocessing.process")
        if process is not None and self._directory == process.ORIGINAL_DIR:
            process.ORIGINAL_DIR = os.getcwd()

    def _position(self) -> int:
        if self._front not in sys.path:
            return 0
        index = sys.path.index(self._front)
        del sys.path[index]
        return index


def _separate() -> None:
    """Give the process its own copy of state that a fork has from its parent; `random` does so
    itself."""
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is not None:
        numpy.seed()
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        # Seed of the CPU: it is random in each process, those of CUDA are one constant.
        torch.default_generator.seed()
    process = sys.modules.get("multiprocessing.process")
    if process is not None:
        process.current_process().authkey = os.urandom(32)
    threading = sys.modules.get("threading")
    if threading is not None:
        threading.main_thread()._set_native_id()


def _occupied(numbers: Sequence[int], free: Collection[int]) -> str | None:
    for number in numbers:
        if number not in free and os.path.lexists(f"/proc/self/fd/{number}"):
            return f"descriptor {number} is a file of an imported module"
    return None


def _place(descriptors: Sequence[int], numbers: Sequence[int]) -> None:
    """Move descriptors to their numbers, whatever has those now."""
    above = max(numbers, default=2) + 1
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above) for fd in descriptors]
    for fd in descriptors:
        os.close(fd)
    for fd, number in zip(moved, numbers, strict=True):
        os.dup2(fd, number)
        os.close(fd)


def _replace(environment: dict[str, str], without: Collection[str] = ()) -> None:
    """Replace the environment, for Python and for C."""
    os.environ.clear()
    os.environ.update({name: environment[name] for name in environment if name not in without})
