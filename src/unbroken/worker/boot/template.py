"""The template of a pod's workers: it imports what they import, and parks forks of itself.

It trains nothing, and ends when the agent does: at the end of file on its pair.
"""

import atexit
import fcntl
import gc
import os
import sys
from collections.abc import Callable
from time import monotonic  # noqa: TID251  (how long the imports took is told)
from types import ModuleType
from typing import Any, NoReturn

PASS_VARIABLE = "UNBROKEN_TEMPLATE_PASS"
"""Environment variable from one process of a template to the next, which starts without an unfit
module.

It names the descriptor of the data that the next process needs.
"""
PASSES_MAX = 8
SKIPPED_MAX = 300
"""Skipped modules listed at most; the list fits a datagram."""
PART_CHARACTERS = 25_000
"""Characters of names, files and reasons in one datagram; JSON makes six bytes of one at most."""
RESERVED = range(3, 64)
"""Numbers that no module's file may have: the agent gives a worker descriptors there."""


def serve(
    beside: Callable[[str], ModuleType], begin: list[str], arguments: list[str], shown: set[str]
) -> tuple[int, list[str]]:
    """Be the template.

    It returns in processes forked from it: the position of the program's directory in `sys.path`,
    and the program that they become. `shown` are the modules that every interpreter has imported by
    then.
    """
    return _Template(beside, begin, arguments, shown).serve()


class _Template:
    def __init__(
        self,
        beside: Callable[[str], ModuleType],
        begin: list[str],
        arguments: list[str],
        shown: set[str],
    ) -> None:
        self._shown = shown
        self._beside, self._number, program = beside, int(arguments[0]), arguments[1:]
        self._command = [*sys.orig_argv]
        self._warm, self._safety = beside("../../wire/warm"), beside("safety")
        self._imports, self._pairs = beside("imports"), beside("datagrams")
        self._freshness = beside("freshness").Freshness
        self._fresh = self._freshness({}, (), self._imports.state)
        self._learning, self._rendezvous = beside("learning"), beside("rendezvous")
        becoming, kind, file = beside("becoming"), program[0], program[1]
        self._front = becoming.show(begin, kind, program[1:])
        self._left_out = {file: "it is the program"} if kind == "module" else {}
        self._parked = beside("parked").Parked(self._pairs, becoming, begin, self._front)
        self._ours = [name for name in sys.modules if name not in shown]
        self._environment = dict(os.environ)
        value = self._environment.pop(PASS_VARIABLE, None)
        # It is never freed: freeing would cost a worker 10 ms, of copied pages, before its first
        # line.
        self._itself = self
        self._told: dict[str, Any] = {}
        self._importer: Any = None
        if value is not None:
            del os.environ[PASS_VARIABLE]
            self._told = self._pairs.decoded(_contents(int(value)))

    def serve(self) -> tuple[int, list[str]]:
        # Output of modules is no output of a worker.
        os.dup2(2, 1)
        moved = fcntl.fcntl(self._number, fcntl.F_DUPFD_CLOEXEC, RESERVED.stop)
        os.close(self._number)
        self._agent = self._pairs.Pair(moved)
        self._reserved = _reserve()
        self._look = self._safety.Look(self._warm.THREADS)
        # Last, at a worker's end: frozen objects are never collected, nor are objects in their
        # namespaces finalized.
        atexit.register(gc.unfreeze)
        self._import()
        while True:
            message, descriptors = self._receive()
            if message["type"] == "import":
                self._import(message)
            elif message["type"] == "check":
                self._check()
            elif message["type"] == "park":
                (pair,) = descriptors
                if self._park(pair):
                    self._agent.close()
                    self._fresh.close()
                    return self._become(pair)

    def _become(self, pair: int) -> tuple[int, list[str]]:
        size, learnt = self._warm.MESSAGE_BYTES_MAX, self._warm.LEARNT_VARIABLE
        result: tuple[int, list[str]] = self._parked.wait(
            pair, self._reserved, size, learnt, self._prepare
        )
        if learnt in os.environ:
            self._learning.learn(learnt)
        return result

    def _prepare(self, pair: int, message: dict[str, Any]) -> dict[str, Any]:
        """Import, in a parked worker, what a process that is forked must not; return the answer."""
        rank, own = message["environment"], self._importer.left_out
        others = {name: why for name, why in own.items() if not why.endswith(self._warm.LATER)}
        others |= message["left_out"]
        later = [name for name in self._later() if name not in others]
        os.environ.update(rank)
        importer = self._imports.Importer(
            self._warm.PER_ATTEMPT, self._warm.LATER, self._told["given"], {**others}
        )
        importer.run(later, lambda: self._look.danger((pair,), is_forked=False))
        found = {name: importer.left_out[name] for name in importer.left_out if name not in others}

        def changed() -> str | None:
            state, files = self._imports.state, importer.files
            file = next((file for file in files if state(file) != files[file]), self._hidden())
            return file and f"{file} has changed"

        self._parked.prepare_rank(rank, importer.variables, changed)
        count = sum(name in sys.modules for name in later)
        return {
            "type": "prepared",
            "modules": count,
            "left_out": dict([*found.items()][:SKIPPED_MAX]),
        }

    def _later(self) -> list[str]:
        """Return the modules that only a process that is forked no more may import, in order."""
        # A module is skipped, not left out, if its package is left out.
        reasons: dict[str, str] = {**self._importer.skipped, **self._importer.left_out}
        names = self._told["names"]
        return [name for name in names if reasons.get(name, "").endswith(self._warm.LATER)]

    def _receive(self) -> tuple[dict[str, Any], list[int]]:
        message, descriptors = self._agent.receive(self._warm.MESSAGE_BYTES_MAX)
        if message is None:
            os._exit(0)
        return message, descriptors

    def _ask(self, message: dict[str, Any] | None) -> dict[str, Any]:
        """Return the modules to import, with the state so far; `message`: the first one, if already
        read."""
        names: list[str] = self._told.get("names", [])
        left: dict[str, str] = self._told.get("left", {})
        while True:
            message = message or self._receive()[0]
            names += message["modules"]
            left |= message.get("left_out", {})
            if not message.get("more"):
                break
            message = None
        given = message.get("is_given", False)
        told = {"names": names, "given": given, "left": left, "files": {}}
        return {**told, "began": monotonic(), "passes": 1}

    def _import(self, message: dict[str, Any] | None = None) -> None:
        """Import, report the result, and be ready to fork."""
        if message is not None or not self._told:
            self._told = self._ask(message)
        told, importer = self._told, self._importer
        self._fresh.close()
        if importer is None:
            left_out = {**told["left"], **self._left_out}
            importer = self._imports.Importer(
                self._warm.PER_RANK, self._warm.LATER, told["given"], left_out
            )
            is_archive = self._front is not None and not os.path.isdir(self._front)
            importer.remember_imported(self._front if is_archive else None)
            self._importer = importer
        hidden = self._imports.first_of(self._front, self._ours)
        if hidden is not None:
            self._send_unsafe(f"{hidden}.py beside the script hides the library's")
        else:
            importer.run(told["names"], self._look.danger)
        if importer.is_tainted and told["passes"] < PASSES_MAX:
            self._start_anew(importer)
        self._parked.prepare(self._environment, importer.variables, self._look.directory)
        reason = self._look.danger()
        if reason is None and importer.is_tainted:
            reason = f"after {PASSES_MAX} starts there still are modules unfit for it"
        if reason is not None:
            self._send_unsafe(reason)
        elif hidden is None:
            self._rendezvous.be_patient(os.environ.get(self._warm.IN_PROCESS_VARIABLE, ""))
            self._fresh = self._freshness(importer.files, importer.roots, self._imports.state)
            gc.collect()
            gc.freeze()
            if not told["given"]:
                self._send_found("left_out", importer.left_out)
                self._send_found("files", {**told["files"], **_states(importer.files)})
            self._send_ready({**importer.left_out, **importer.skipped})

    def _send_found(self, key: str, values: dict[str, str]) -> None:
        part: dict[str, str] = {}
        room = PART_CHARACTERS
        for name, value in values.items():
            room -= len(name) + len(value)
            if room < 0 and part:
                self._agent.send({"type": "found", key: part})
                part, room = {}, PART_CHARACTERS - len(name) - len(value)
            part[name] = value
        self._agent.send({"type": "found", key: part})

    def _send_ready(self, skipped: dict[str, str]) -> None:
        self._agent.send(
            {
                "type": "ready",
                "modules": sum(name in sys.modules for name in self._told["names"]),
                "later": len(self._later()),
                "skipped": dict([*skipped.items()][:SKIPPED_MAX]),
                "seconds": monotonic() - self._told["began"],
            }
        )

    def _send_unsafe(self, reason: str) -> None:
        self._agent.send({"type": "unsafe", "reason": reason})

    def _start_anew(self, importer: Any) -> NoReturn:
        """Continue as a new process, without the unfit modules."""
        files = {**self._told["files"], **_states(importer.files)}
        passes = self._told["passes"] + 1
        told = {**self._told, "left": importer.left_out, "files": files, "passes": passes}
        self._safety.end_children()
        kept = os.memfd_create("unbroken-template", 0)
        os.write(kept, self._pairs.encoded(told))
        os.chdir(self._look.directory)
        os.dup2(self._agent.fileno(), self._number)
        environment = {**self._environment, PASS_VARIABLE: str(kept)}
        os.execve(sys.executable, self._command, environment)

    def _check(self) -> None:
        file = self._fresh.changed_file() or self._hidden()
        self._agent.send({"type": "fresh"} if file is None else {"type": "stale", "file": file})

    def _hidden(self) -> str | None:
        """Return a module in the program's folder that appeared after another of its name was
        imported."""
        builtin = sys.builtin_module_names
        names = [module for module in sys.modules if "." not in module and module not in builtin]
        hidden = self._imports.first_of(self._front, [n for n in names if n not in self._shown])
        return hidden and f"{self._front}/{hidden}"

    def _park(self, pair: int) -> bool:
        """Fork a worker that waits at the pair; return True in it."""
        reason = self._look.danger((self._agent.fileno(), pair, *self._fresh.fds()))
        pid = 0
        if reason is None:
            pid, reason = _fork_twice(self._safety.cuda)
            if pid == 0 and reason is None:
                return True
        os.close(pair)
        if reason is None:
            self._agent.send({"type": "parked", "pid": pid})
        else:
            self._send_unsafe(reason)
        return False


def _fork_twice(danger: Callable[[], str | None]) -> tuple[int, str | None]:
    """Fork twice; return the grandchild's pid, 0 in it, or the reason why there is none.

    Its parent is by now the process that adopts orphans.
    """
    told, tell = os.pipe2(os.O_CLOEXEC)
    child = os.fork()
    if child == 0:
        os.close(told)
        if _fork_once(tell, danger) == 0:
            return 0, None
        os._exit(0)
    os.close(tell)
    with open(told, "rb") as lines:
        said = lines.read().decode()
    os.waitpid(child, 0)
    return (int(said), None) if said.isdecimal() else (0, said or "a fork of it died at once")


def _fork_once(tell: int, danger: Callable[[], str | None]) -> int:
    """Fork; the other end is at the end of file when the worker leads its session."""
    said, pid = danger(), -1
    if said is None:
        try:
            pid = os.fork()
        except OSError as error:
            said = f"it cannot fork: {error.strerror}"
    if pid == 0:
        os.setsid()
    else:
        os.write(tell, (said or str(pid)).encode())
    os.close(tell)
    return pid


def _reserve() -> list[int]:
    """Occupy the free numbers. A file that is open there is the agent's lease; each worker has its
    own."""
    result = [int(name) for name in os.listdir("/proc/self/fd") if int(name) in RESERVED]
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    number = fcntl.fcntl(nothing, fcntl.F_DUPFD_CLOEXEC, RESERVED.start)
    while number in RESERVED:
        result += [number]
        number = fcntl.fcntl(nothing, fcntl.F_DUPFD_CLOEXEC, RESERVED.start)
    os.close(number)
    return sorted({*result, nothing})


def _states(files: dict[str, tuple[int, int]]) -> dict[str, str]:
    return {file: f"{size}:{changed_at}" for file, (size, changed_at) in files.items()}


def _contents(fd: int) -> bytes:
    with open(fd, "rb") as file:
        file.seek(0)
        return file.read()
