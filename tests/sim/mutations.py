"""Changes of a function's source in the running process, line by line, as a diff writes them."""

from __future__ import annotations
import __future__

import importlib
import inspect
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any


@dataclass
class Change:
    """Lines of one function, and those in their place."""

    function: str
    """`module:name`, below `unbroken`."""
    lines: list[str] = field(default_factory=list)
    instead: list[str] = field(default_factory=list)


@contextmanager
def mutated(changes: Sequence[Change]) -> Iterator[None]:
    """Change functions, also for modules that have imported them by name; change them back at the
    end.

    Raises LookupError if a function does not have the lines exactly once.
    """
    sources: dict[str, list[str]] = {}
    for change in changes:
        source = sources.get(change.function)
        if source is None:
            text = inspect.getsource(function_named(change.function))
            source = textwrap.dedent(text).splitlines()
        sources[change.function] = replaced(source, change)
    before: list[tuple[FunctionType, CodeType]] = []
    try:
        for name, source in sources.items():
            function = function_named(name)
            before.append((function, function.__code__))
            function.__code__ = compiled(function, source)
        yield
    finally:
        for function, code in before:
            function.__code__ = code


def function_named(name: str) -> FunctionType:
    """Return a function, a method, or the getter of a property."""
    module, _, path = name.partition(":")
    found: Any = importlib.import_module(f"unbroken.{module}")
    for part in path.split("."):
        found = inspect.getattr_static(found, part)
    found = found.fget if isinstance(found, property) else found
    assert isinstance(found, FunctionType), name
    return found


def replaced(source: Sequence[str], change: Change) -> list[str]:
    """Return the source with the lines replaced, in the indentation of the first of them."""
    size = len(change.lines)
    wanted = "\n".join(change.lines)
    places = [
        at
        for at in range(len(source))
        if textwrap.dedent("\n".join(source[at : at + size])) == wanted
    ]
    if len(places) != 1:
        raise LookupError(
            f"{change.function} has these lines {len(places)} times, not once; "
            f"write the change anew:\n{wanted}"
        )
    at = places[0]
    indent = source[at][: len(source[at]) - len(source[at].lstrip())]
    return [*source[:at], *(indent + line for line in change.instead), *source[at + size :]]


def compiled(function: FunctionType, source: Sequence[str]) -> CodeType:
    """Return the code of a function with another source."""
    flags = __future__.annotations.compiler_flag
    code = compile("\n".join(source), f"<mutated {function.__qualname__}>", "exec", flags)
    made: dict[str, Any] = {}
    exec(code, function.__globals__, made)
    found = made[function.__name__]
    found = found.fget if isinstance(found, property) else found
    assert isinstance(found, FunctionType)
    return found.__code__
