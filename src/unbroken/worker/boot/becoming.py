"""Turn a process into the user's program, as if `python` had been started with it.

If anything goes wrong before the program's first line, the interpreter itself starts it: only the
interpreter produces its own messages exactly.
"""

from __future__ import annotations

import os
import sys
from _frozen_importlib import BuiltinImporter
from _frozen_importlib_external import SourceFileLoader

# A module imported here may also lie beside the program, which then would not get its own.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, TracebackType
    from typing import Any, NoReturn

RUN_PATH = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
"""Command of `python -c` as in agent/workers/environment.py, which starts a cold worker of this
kind."""
_OURS = (__file__, __file__.replace("becoming.py", "boot.py"))
_KEPT = ("__name__", "__doc__", "__package__", "__loader__", "__spec__", "__annotations__",
         "__builtins__")  # fmt: skip


def command(begin: list[str], kind: str, arguments: list[str]) -> list[str]:
    """Return the command of a cold start; `begin` is the interpreter with its options."""
    flags = {"script": [], "module": ["-m"], "run-path": ["-c", RUN_PATH]}[kind]
    return [*begin, *flags, *arguments]


def start_anew(command: list[str]) -> NoReturn:
    """Replace this process by a new interpreter: a cold start."""
    os.execv(sys.executable, command)


def first_path(kind: str, file: str) -> str | None:
    """Return the path that the interpreter puts in front of `sys.path`; None: it puts none."""
    if kind == "script" and _is_container(_absolute(file)):
        return _absolute(file)
    if sys.flags.isolated or getattr(sys.flags, "safe_path", False):
        return None
    if kind == "script":
        return os.path.dirname(os.path.realpath(file))
    return os.getcwd() if kind == "module" else ""


def show(begin: list[str], kind: str, arguments: list[str]) -> str | None:
    """Make the process look like the program to modules that are imported before it.

    Return the front of `sys.path` then, as in the program.
    """
    sys.orig_argv[:] = command(begin, kind, arguments)
    sys.argv = {"script": [], "module": ["-m"], "run-path": ["-c"]}[kind] + arguments
    main = sys.modules["__main__"]
    if kind == "script":
        main.__file__ = _absolute(arguments[0])
    else:
        del main.__file__
    front = first_path(kind, arguments[0])
    if front is not None:
        sys.path.insert(0, front)
    return front


def become(
    main: dict[str, Any],
    begin: list[str],
    position: int,
    order: list[str],
    ended: Callable[[], bool],
) -> None:
    """Run the program in `main`, the namespace of `__main__`; this must be its last statement.

    `order` is kind and arguments. The program's directory goes to `position` in `sys.path`. `ended`
    is called if the program has not failed, and returns True if the interpreter must not end.
    """
    kind, *arguments = order
    sys.orig_argv[:] = command(begin, kind, arguments)
    front = first_path(kind, arguments[0])
    if front is not None:
        sys.path.insert(position, front)
    program = _program(main, kind, arguments, front)
    try:
        program()
        if ended():
            _leave(None)
    except SystemExit as error:
        if ended():
            _leave(error.code)
        raise
    except BaseException as error:
        _hide_ourselves(error)
        raise


def _leave(code: object) -> NoReturn:
    """End the process with this code of SystemExit, as Python does, but without ending the
    interpreter: objects that are left are not destroyed."""
    import atexit
    import threading

    if code is not None and not isinstance(code, int):
        sys.stderr.write(f"{code}\n")
    status = (code & 0xFF) if isinstance(code, int) else int(code is not None)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError):
            status = status or 120  # as Python does where the output is lost
    os._exit(status)


def _program(
    main: dict[str, Any], kind: str, arguments: list[str], front: str | None
) -> Callable[[], None]:
    """Prepare `__main__` and `sys.argv`; return a function that runs the program."""
    for name in [*main]:
        if name not in _KEPT:
            del main[name]
    if "__annotations__" in main:
        main["__annotations__"] = {}
    main.update(__doc__=None, __package__=None, __spec__=None, __loader__=BuiltinImporter)
    if kind == "module":
        sys.argv = ["-m", *arguments[1:]]
        return lambda: _module(arguments[0], True)
    if kind == "run-path":
        sys.argv = ["-c", *arguments]
        code = compile(RUN_PATH, "<string>", "exec", dont_inherit=True)
        return lambda: exec(code, main)
    sys.argv = arguments
    file = _absolute(arguments[0])
    if front == file:
        return lambda: _module("__main__", False)
    code = _compiled(file)
    main.update(__loader__=SourceFileLoader("__main__", file), __file__=file, __cached__=None)
    return lambda: exec(code, main)


def _module(name: str, is_named: bool) -> None:
    import runpy

    runpy._run_module_as_main(name, is_named)  # type: ignore[attr-defined]


def _compiled(file: str) -> CodeType:
    try:
        if file.endswith(".pyc"):
            raise ValueError(file)
        with open(file, "rb") as source:
            return compile(source.read(), file, "exec", dont_inherit=True)
    except Exception:  # noqa: BLE001  (python says better what is wrong)
        start_anew(sys.orig_argv)


def _absolute(file: str) -> str:
    """Return the absolute path as the interpreter makes it: `./` stays."""
    return file if file.startswith("/") else f"{os.getcwd()}/{file}"


def _is_container(file: str) -> bool:
    """True for a directory or archive with a `__main__`."""
    for hook in sys.path_hooks:
        try:
            hook(file)
        except ImportError:
            continue
        return True
    return False


def _hide_ourselves(error: BaseException) -> None:
    """Hide frames of this file when the interpreter prints the error."""
    theirs = getattr(sys, "excepthook", None)

    def hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        if theirs is None:
            del sys.excepthook
        else:
            sys.excepthook = theirs
        if value is error:
            trace = _without_us(trace)
            error.__traceback__ = sys.last_traceback = trace
        _print(theirs, kind, value, trace)

    sys.excepthook = hook


def _print(theirs: Any, kind: Any, value: Any, trace: Any) -> None:
    """Print the error as PyErr_Print of CPython does, hooks that fail included."""
    if theirs is None:
        sys.stderr.write("sys.excepthook is missing\n")
        theirs = sys.__excepthook__
    try:
        theirs(kind, value, trace)
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001
        sys.stdout.flush()
        sys.stderr.write("Error in sys.excepthook:\n")
        error.__traceback__ = _without_us(error.__traceback__)
        sys.__excepthook__(type(error), error, error.__traceback__)
        sys.stderr.write("\nOriginal exception was:\n")
        sys.__excepthook__(kind, value, trace)


def _without_us(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_frame.f_code.co_filename in _OURS:
        trace = trace.tb_next
    return trace
