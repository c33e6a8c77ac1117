"""Print what all modules outside the standard library hold, one line each: path and value.

It is a script: `python module_values.py MODULE...` imports the modules first. Two processes whose
modules are equal print the same lines, except for values that differ in any two processes.
`differences` leaves those out. Two kinds are never printed: the lines of a stack that a module kept
(they say who imported it), and addresses of objects that are keys.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

VALUES_MAX = 3_000_000
ADDRESS_MIN = 1 << 32
"""Numbers from here on that are keys of a dictionary are taken for addresses of objects."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...), type(NotImplemented))
_HIDDEN = {"__builtins__", "__cached__", "__loader__", "__spec__", "__dict__", "__weakref__"}


def differences(
    cold: Iterable[Mapping[str, str]], warm: Mapping[str, str]
) -> dict[str, tuple[str | None, str | None]]:
    """Return the values, by path, that differ from cold starts whose values are all equal there."""
    first, *others = cold
    stable = {path for path in first if all(other.get(path) == first[path] for other in others)}
    ever = set(first).union(*others)
    paths = (stable | (warm.keys() - ever)) - {""}
    return {
        path: (first.get(path), warm.get(path))
        for path in sorted(paths)
        if first.get(path) != warm.get(path)
    }


def values(text: str) -> dict[str, str]:
    """Return the values that a process has printed, by path."""
    return dict(line.split("\t", 1) for line in text.splitlines() if "\t" in line)


def described() -> Iterator[str]:
    """Return a line for each value that is reachable from a module, each object once."""
    own = sorted(name for name, module in [*sys.modules.items()] if _is_foreign(module))
    seen: dict[int, str] = {}
    kept = []  # An object that is freed would lend its id to another one.
    waiting: list[tuple[str, Any]] = []
    for name in reversed(own):
        waiting += [(f"{name}{step}", part) for step, part in _named(vars(sys.modules[name]))]
    while waiting and len(seen) < VALUES_MAX:
        path, value = waiting.pop()
        if isinstance(value, _PLAIN):
            yield f"{path}\t{_text(value)}"
        elif type(value).__module__ == "typing":
            # Which annotations share an object depends on a cache of `typing`.
            yield f"{path}\t{_text(repr(value))}"
        elif isinstance(value, ModuleType):
            yield f"{path}\t{_kind(value)}"
        elif id(value) in seen:
            yield f"{path}\tis {seen[id(value)]}"
        else:
            seen[id(value)] = path
            kept.append(value)
            yield f"{path}\t{_kind(value)}"
            waiting += [(f"{path}{step}", part) for step, part in reversed([*_parts(value)])]


def _is_foreign(module: Any) -> bool:
    file = getattr(module, "__file__", None)
    is_main = module is sys.modules["__main__"]
    return isinstance(file, str) and not is_main and not _is_standard(file)


def _is_standard(file: str) -> bool:
    library = sysconfig.get_path("stdlib") + "/"
    return file.startswith(library) and "/site-packages/" not in file


def _kind(value: Any) -> str:
    if isinstance(value, ModuleType):
        return f"module {value.__name__}"
    if _is_class(value):
        return f"class {value.__module__}.{value.__qualname__}"
    if isinstance(value, (BuiltinFunctionType, MethodType)):
        return f"function {getattr(value, '__qualname__', '')}"
    if isinstance(value, os.PathLike):
        return f"path {_text(os.fspath(value))}"
    if isinstance(value, FunctionType):
        return f"function {value.__module__}.{value.__qualname__}"
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _is_class(value: Any) -> bool:
    """True for a class, and not for an object that says so, as those of absl do."""
    return issubclass(type(value), type)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Return the values that an object consists of, with the step from it to each."""
    if _is_class(value):
        if not _is_standard(getattr(sys.modules.get(value.__module__), "__file__", None) or "/"):
            yield from _named(dict(vars(value)))
    elif isinstance(value, (FunctionType, MethodType, CodeType)):
        yield from _parts_of_code(value)
    elif isinstance(value, Mapping) and type(value).__module__ in ("builtins", "collections"):
        yield from _named(value)
    elif isinstance(value, (set, frozenset)):
        yield from ((f"{{{n}}}", text) for n, text in enumerate(sorted(map(_member, value))))
    elif isinstance(value, (list, tuple)) and not _is_stack(value):
        yield from ((f"[{n}]", one) for n, one in enumerate(value))
    else:
        yield from _named(_attributes(value))


def _attributes(value: Any) -> Mapping[Any, Any]:
    """Return an object's own attributes; no code of its class runs."""
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return found if isinstance(found, Mapping) else {}


def _parts_of_code(value: FunctionType | MethodType | CodeType) -> Iterator[tuple[str, Any]]:
    if isinstance(value, FunctionType):
        parts = (value.__code__, value.__defaults__, value.__kwdefaults__, value.__dict__)
        yield from zip((".code", ".defaults", ".kwdefaults", ".dict"), parts, strict=True)
        yield from ((f".cell{n}", cell) for n, cell in enumerate(_cells(value)))
    elif isinstance(value, MethodType):
        yield from ((".self", value.__self__), (".func", value.__func__))
    else:
        yield ".bytes", hashlib.sha256(value.co_code).hexdigest()
        yield from ((f".const{n}", one) for n, one in enumerate(value.co_consts))


def _named(parts: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    # The order of a dictionary may be the order of the imports.
    items = [(_member(name), part) for name, part in [*parts.items()] if name not in _HIDDEN]
    for name, part in sorted(items, key=lambda item: item[0]):
        yield f".{name}", part


def _is_stack(value: list[Any] | tuple[Any, ...]) -> bool:
    """True for lines of `traceback.format_stack`."""
    return bool(value) and all(isinstance(one, str) and one.startswith('  File "') for one in value)


def _cells(function: FunctionType) -> list[Any]:
    result = []
    for cell in function.__closure__ or ():
        try:
            result.append(cell.cell_contents)
        except ValueError:
            result.append("(empty)")
    return result


def _member(value: Any) -> str:
    if isinstance(value, int) and value >= ADDRESS_MIN:
        return "(an address)"
    return _text(value) if isinstance(value, _PLAIN) else _kind(value)


def _text(value: Any) -> str:
    return ascii(value)[:300]


if __name__ == "__main__":
    for _name in sys.argv[1:]:
        importlib.import_module(_name)
    sys.stdout.writelines(f"{line}\n" for line in described())
