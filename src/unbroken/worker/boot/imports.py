"""Import of modules before the program asks for them, limited to modules that cannot notice.

A module is left out for any of these reasons. It is not the interpreter's own, unbroken's or of
site-packages. It fails. It reads a variable of one rank while it is imported. It leaves something
behind that a fork would share or lose: a thread, a process, a socket, another directory. A module
that imports such a module is left out too. Code of a module that is left out may have run. Its
changes are then unknown, and the process must not be used (`is_tainted`).
"""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType, ModuleType
from typing import Any

REASON_LENGTH_MAX = 200
_REFUSED = {"__main__", "sitecustomize", "usercustomize", "conftest", "pytest", "_pytest"}


class _LeftOutError(BaseException):
    """Unwinds an import; no `except Exception` of a module may take it for an absent one."""


class Importer:
    """Imports modules, and keeps what it has observed about them."""

    def __init__(
        self,
        per_rank: Sequence[str],
        later: tuple[str, ...],
        is_given: bool,
        left_out: dict[str, str],
    ) -> None:
        """`later` has the ends of reasons that are those of all importers, too; the first is that
        of a module that reads one of the variables `per_rank`."""
        self.left_out = left_out
        """Reasons by name; initially those of an earlier process of this template."""
        self.skipped: dict[str, str] = {}
        """Modules that failed or were not allowed, with the reason."""
        self.files: dict[str, tuple[int, int]] = {}
        """Size and time of change of each file, from before it was read."""
        self.variables: dict[str, str | None] = {}
        """Variables that modules have read from the environment."""
        self.is_tainted = False
        self._per_rank, self._later = frozenset(per_rank), later
        self._is_given = is_given
        self.roots = _roots()
        """Beginnings of paths of modules that may be imported."""

    def run(self, names: Sequence[str], look: Callable[[], str | None]) -> None:
        """Import the modules in this order; `look` returns what is wrong with the process by
        now."""
        before = type(os.environ)
        os.environ.__class__ = _watched(self._read)
        sys.meta_path.insert(0, self)
        try:
            for name in names:
                if name not in sys.modules and not self._is_known(name):
                    self._import(name, look)
                if self.is_tainted and look():
                    # A module that follows is not the cause.
                    break
        finally:
            sys.meta_path.remove(self)
            os.environ.__class__ = before

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the spec of the other finders, if the module may be imported."""
        if name in self.left_out:
            self._leave_out(name, self._of_importer(name))
        spec = self._found(name, path, target)
        if spec is None:
            return None
        if not self._is_given and not self._is_allowed(name, spec):
            self._leave_out(name, f"{name} is not of the interpreter's library or site-packages")
        self._remember(spec.origin)
        return spec

    def remember_imported(self, archive: str | None) -> None:
        """Record the files of modules that were imported without this class.

        The program itself is read when it starts, except for an archive: its table is kept.
        """
        for name, module in [*sys.modules.items()]:
            if name != "__main__":
                self._remember(getattr(module, "__file__", None))
        self._remember(archive)

    def _is_known(self, name: str) -> bool:
        return name in self.left_out or name in self.skipped

    def _import(self, name: str, look: Callable[[], str | None]) -> None:
        if name.partition(".")[0] in _REFUSED or name.endswith(".__main__"):
            self.skipped[name] = "not imported beforehand by its name"
            return
        count = len(sys.modules)
        try:
            __import__(name)
        except _LeftOutError as error:
            self.skipped[name] = _short(error)
        except BaseException as error:  # noqa: BLE001  (a module may even ask to exit)
            self.skipped[name] = _short(f"{type(error).__name__}: {error}")
        if len(sys.modules) > count or name in self.skipped:
            reason = look()
            if reason is not None:
                self.left_out[name] = _short(reason)
                self.is_tainted = True

    def _read(self, variable: str, value: str | None) -> None:
        if variable not in self._per_rank:
            self.variables.setdefault(variable, value)
        elif next(_importing(), None) is not None:
            self._leave_out(None, f"{variable} {self._later[0]}")

    def _leave_out(self, name: str | None, reason: str) -> None:
        reason = _short(reason)
        for module in _importing():
            self.left_out.setdefault(module, reason)
            self.is_tainted = True
        if name is None or name not in self.left_out:
            raise _LeftOutError(reason)
        raise _LeftOutError(self.left_out[name])

    def _of_importer(self, name: str) -> str:
        """Return the reason of a module that imports this one.

        A chain of importers keeps the name of the module that reads the variable or starts threads.
        """
        reason = self.left_out[name]
        is_chain = reason.endswith(self._later) and ": " in reason
        return reason if is_chain else f"{name}: {reason}"

    def _found(self, name: str, path: Any, target: Any) -> Any:
        for finder in [*sys.meta_path]:
            find: Any = None if finder is self else getattr(finder, "find_spec", None)
            spec = find and find(name, path, target)
            if spec is not None:
                return spec
        return None

    def _is_allowed(self, name: str, spec: Any) -> bool:
        if spec.origin in ("built-in", "frozen"):
            return True
        if spec.origin and spec.origin.startswith("/"):
            return self._is_ours(spec.origin)
        portions = spec.submodule_search_locations
        if portions is None:
            # Made by its package, like `six.moves`.
            return name.partition(".")[0] in sys.modules and "." in name
        return all(self._is_ours(portion) for portion in portions)

    def _is_ours(self, file: str) -> bool:
        return os.path.normpath(file).startswith(self.roots)

    def _remember(self, file: str | None) -> None:
        if file and file not in self.files:
            result = state(file)
            if result is not None:
                self.files[file] = result


def first_of(directory: str | None, names: Sequence[str]) -> str | None:
    """Return the first of these modules that the program's own directory would have hidden."""
    from _frozen_importlib_external import PathFinder

    if directory is None:
        return None
    if os.path.isdir(directory):
        there = {entry.partition(".")[0] for entry in os.listdir(directory)}
        names = [name for name in names if name in there]
    for name in names:
        spec = PathFinder.find_spec(name, [directory])
        # A directory alone hides no module.
        if spec is not None and spec.loader is not None:
            return name
    return None


def _roots() -> tuple[str, ...]:
    # The package `unbroken` may be installed from anywhere.
    result = [os.path.dirname(os.__file__), __file__.rpartition("/worker/")[0]]
    site: ModuleType | None = sys.modules.get("site")
    if site is not None:
        result += site.getsitepackages()
        if site.ENABLE_USER_SITE:
            result += [site.getusersitepackages()]
    result += [os.path.dirname(path) for path in sys.path if path.endswith("/lib-dynload")]
    return tuple({spelt + "/" for path in result for spelt in (path, os.path.realpath(path))})


def _watched(read: Callable[[str, str | None], None]) -> type:
    """Return a class for `os.environ` that reports each read; iterating over all variables is not a
    read."""

    class Watched(os._Environ):  # type: ignore[type-arg]
        def __getitem__(self, key: Any) -> Any:
            try:
                value = super().__getitem__(key)
            except KeyError:
                read(key, None)
                raise
            read(key, value)
            return value

    return Watched


def _importing() -> Iterator[str]:
    """Return the modules whose code is being executed, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__")
        if frame.f_code.co_name == "<module>" and name != "__main__" and isinstance(name, str):
            yield name
        frame = frame.f_back


def state(file: str) -> tuple[int, int] | None:
    """Return size and time of change; None: the file does not exist."""
    try:
        status = os.stat(file)
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


def _short(reason: object) -> str:
    return str(reason)[:REASON_LENGTH_MAX]
