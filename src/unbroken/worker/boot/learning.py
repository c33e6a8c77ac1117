"""Record the imports of a program, for the template that is to import them beforehand."""

from __future__ import annotations

import os
import sys

ASKED_MAX = 32
"""Names that wait to be imported at most; extension modules are imported only after their own
imports."""


def learn(variable: str) -> None:
    """Write the name of each module that this process imports to the descriptor in the variable.

    The file has one name per line, in the order in which the modules were requested.
    """
    value = os.environ.pop(variable, "")
    if value.isdecimal():
        try:
            fd = int(value)
            os.set_inheritable(fd, False)
            learner = _Learner(fd)
        except OSError:
            # The agent took the descriptor back: it learns from another worker.
            return
        sys.meta_path.insert(0, learner)
        os.register_at_fork(after_in_child=learner.stop)


class _Learner:
    """A finder that finds nothing.

    Programs also ask whether a module could be imported. So a name is written only when a later
    question finds it imported.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._file: tuple[int, int] | None = _identity(fd)
        self._asked: dict[str, None] = {}
        self._written: set[str] = set()

    def find_spec(self, name: str, _path: object = None, _target: object = None) -> None:
        """Return None."""
        if self._file is not None:
            try:
                self._note(name)
            except Exception:  # noqa: BLE001  (no import fails for it; the rest is not learnt)
                self.stop()

    def stop(self) -> None:
        """Stop, in a forked child, or if the descriptor is another file by now."""
        self._file = None

    def _note(self, name: str) -> None:
        known = [asked for asked in self._asked if asked in sys.modules]
        for asked in known:
            del self._asked[asked]
        if name not in self._written:
            self._asked[name] = None
        if len(self._asked) > ASKED_MAX:
            del self._asked[next(iter(self._asked))]
        if known:
            # The program may have closed it, and opened a file of its own at its number.
            if _identity(self._fd) != self._file:
                self.stop()
                return
            self._written.update(known)
            os.write(self._fd, "".join(f"{asked}\n" for asked in known).encode())


def _identity(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino
