"""Typer with groups of options: a command may take a dataclass as one parameter.

Each field of the dataclass is an option of the command, at the place of the parameter.  A field may
be a group again.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any

import typer


class App(typer.Typer):
    """A typer app whose commands take groups of options."""

    def command(self, *given: Any, **named: Any) -> Callable[[Any], Any]:
        """Register a command, as `typer.Typer.command` does."""
        return _expanding(super().command(*given, **named))

    def callback(self, *given: Any, **named: Any) -> Callable[[Any], Any]:
        """Register the function that runs before every command of the app."""
        return _expanding(super().callback(*given, **named))


def _expanding(register: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def decorate(command: Any) -> Any:
        register(expanded(command))
        return command

    return decorate


def expanded(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command with the fields of its groups as keyword parameters.

    typer reads the options of a command from its signature.
    """

    @functools.wraps(command)
    def call(**given: Any) -> Any:
        return _call(command, given)

    call.__signature__ = inspect.Signature(list(_fields(command)))  # type: ignore[attr-defined]
    return call


def _parameters(function: Any) -> list[inspect.Parameter]:
    return list(inspect.signature(function, eval_str=True).parameters.values())


def _fields(function: Any) -> Iterator[inspect.Parameter]:
    for one in _parameters(function):
        if is_dataclass(one.annotation):
            yield from _fields(one.annotation)
        else:
            yield one.replace(kind=inspect.Parameter.KEYWORD_ONLY)


def _call(function: Any, given: Mapping[str, Any]) -> Any:
    """Call a function or build a group from the values that `_fields` has named."""
    return function(
        **{
            one.name: _call(one.annotation, given)
            if is_dataclass(one.annotation)
            else given[one.name]
            for one in _parameters(function)
        }
    )
