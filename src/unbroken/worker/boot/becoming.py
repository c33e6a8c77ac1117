"""A process becomes the user's program, as if `python` had been started with it.

Whatever goes wrong before the program's first line, the interpreter itself is told to start it:
nobody else knows its messages so well.
"""

from __future__ import annotations

import os
import sys
from _frozen_importlib import BuiltinImporter
from _frozen_importlib_external import SourceFileLoader

# What is imported here could be beside the program too, which then would not get its own.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, TracebackType
    from typing import Any, NoReturn

RUN_PATH = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
"""As agent/workers/environment.py starts a cold worker of this kind."""
_OURS = (__file__, __file__.replace("becoming.py", "boot.py"))
_KEPT = ("__name__", "__doc__", "__package__", "__loader__", "__spec__", "__annotations__",
         "__builtins__")  # fmt: skip


def command(begin: list[str], kind: str, arguments: list[str]) -> list[str]:
    """How a cold start says it; `begin` is the interpreter with its options."""
    flags = {"script": [], "module": ["-m"], "run-path": ["-c", RUN_PATH]}[kind]
    return [*begin, *flags, *arguments]


def start_anew(command: list[str]) -> NoReturn:
    """Let a new interpreter take this process's place: a cold start."""
    os.execv(sys.executable, command)


def first_path(kind: str, file: str) -> str | None:
    """Path that the interpreter puts in front of `sys.path`; None for nothing."""
    if kind == "script" and _is_container(_absolute(file)):
        return _absolute(file)
    if sys.flags.isolated or getattr(sys.flags, "safe_path", False):
        return None
    if kind == "script":
        return os.path.dirname(os.path.realpath(file))
    return os.getcwd() if kind == "module" else ""


def show(begin: list[str], kind: str, arguments: list[str]) -> str | None:
    """Look like the program to modules that are imported before it; what is in front of
    `sys.path` then, as in the program."""
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
    ended: Callable[[], None],
) -> None:
    """Run the program in `main`, the namespace of `__main__`; must be the last statement of it.

    `order` is kind and arguments; the program's directory comes to `position` in `sys.path`;
    `ended` is called where the program has not failed.
    """
    kind, *arguments = order
    sys.orig_argv[:] = command(begin, kind, arguments)
    front = first_path(kind, arguments[0])
    if front is not None:
        sys.path.insert(position, front)
    program = _program(main, kind, arguments, front)
    try:
        program()
        ended()
    except SystemExit:
        ended()
        raise
    except BaseException as error:
        _hide_ourselves(error)
        raise


def _program(
    main: dict[str, Any], kind: str, arguments: list[str], front: str | None
) -> Callable[[], None]:
    """Prepare `__main__` and `sys.argv`; what is returned runs the program."""
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
    """As the interpreter does it: `./` stays."""
    return file if file.startswith("/") else f"{os.getcwd()}/{file}"


def _is_container(file: str) -> bool:
    """A directory or archive with a `__main__`."""
    for hook in sys.path_hooks:
        try:
            hook(file)
        except ImportError:
            continue
        return True
    return False


def _hide_ourselves(error: BaseException) -> None:
    """Show no frame of ours when the interpreter prints this error."""
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
    """As PyErr_Print of CPython does, hooks that fail included."""
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
