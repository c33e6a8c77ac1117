"""The file of TORCHELASTIC_ERROR_FILE: the recorded error of the worker that failed first.

torchrun's agent on each node writes such a file.  Here all agents of a job may write the same one.
The modification time of the file is the time of the error, so that a later error of another agent
does not replace it.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator

from unbroken.log_lines import Log

from . import facts

log = Log(__name__)


class ErrorFile:
    """Writes the file at `path`, or nothing if that is empty.

    `directory` is one of the agent's own; its modification time is used to read the time.
    """

    def __init__(self, path: str, directory: str) -> None:
        self._path = path
        self._directory = directory
        self._first: int | None = None
        """Time at which the first worker of this agent failed in this attempt, in ns."""
        self._own = 0
        """Time of the error that this agent has written; 0: none."""
        self._rested = 0
        """Time at which no worker of this agent lived. Older files are of another attempt."""
        self.rest()

    def begin(self) -> None:
        """Begin an attempt: remove the file of the one before, because the job has not failed."""
        found = _time(self._path) if self._own else None
        if found is not None and found <= max(self._own, self._rested):
            with self._noted():
                os.unlink(self._path)
        self._first, self._own = None, 0

    def rest(self) -> None:
        """Note that no worker of this agent lives."""
        with self._noted():
            if self._path:
                self._rested = self._now()

    def failed(self, directory: str, exit_code: int) -> None:
        """Hand on the error of a worker that failed, if it is the first.

        A worker that recorded no error counts, too: what follows it is no root cause.
        """
        with self._noted():
            if self._path:
                self._hand_on(directory, exit_code)

    def _hand_on(self, directory: str, exit_code: int) -> None:
        recorded = _time(facts.error_path(directory))
        at = self._now() if recorded is None else recorded
        if self._first is not None and self._first <= at:
            return
        self._first = at
        other = _time(self._path)
        if recorded is None or (other is not None and self._rested < other <= at):
            return
        draft = f"{self._path}.draft-{os.getpid()}"
        with open(draft, "w", encoding="utf-8") as file:
            file.write(_with_code(facts.error_file(directory), exit_code))
        os.utime(draft, ns=(at, at))
        os.replace(draft, self._path)
        self._own = at

    @contextlib.contextmanager
    def _noted(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            log.warning("error file is not written", file=self._path, error=error)

    def _now(self) -> int:
        os.makedirs(self._directory, exist_ok=True)
        os.utime(self._directory)
        return os.stat(self._directory).st_mtime_ns


def _time(path: str) -> int | None:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return None


def _with_code(text: str, exit_code: int) -> str:
    """Return a recorded error with the exit code, as torchrun adds it.

    Source: torch 2.13 `ErrorHandler.dump_error_file`.
    """
    with contextlib.suppress(ValueError, RecursionError):
        error = json.loads(text)
        if isinstance(error, dict) and isinstance(error.get("message"), dict):
            error["message"]["errorCode"] = exit_code
            return json.dumps(error)
    return text
