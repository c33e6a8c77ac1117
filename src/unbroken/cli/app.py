"""Typer with groups of options: a command may take a dataclass as one parameter.

Each field of the dataclass is an option of the command, at the place of the parameter.  `option`
declares its settings; so does `typing.Annotated`.  A field may be a group again.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field, fields, is_dataclass
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from .help_text import WIDEST, usage_pieces, write_help

_OPTION = "option"
"""Key of a field's metadata: the settings of its option."""


def option(*names: str, default: Any = None, **settings: Any) -> Any:
    """Declare a field of a group as an option; `names` and `settings` are those of typer.Option."""
    return field(default=default, metadata={_OPTION: typer.Option(*names, **settings)})


CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": WIDEST}
VALIDATOR = "Value error, "
"""Beginning of the messages of pydantic, with which typer reads options."""


class _Plain:
    """A command whose help is plain text (`help_text`), and whose errors name no validator."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help to click's formatter."""
        write_help(self, ctx, formatter)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The words of the usage line after the command's name."""
        return usage_pieces(self, ctx, super().collect_usage_pieces(ctx))  # type: ignore[misc]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            left: list[str] = super().parse_args(ctx, args)  # type: ignore[misc]
        except typer.BadParameter as error:
            error.message = error.message.removeprefix(VALIDATOR)
            raise
        return left


class Command(_Plain, TyperCommand):
    """A command of an `App`."""


class Group(_Plain, TyperGroup):
    """A group of commands of an `App`."""


class App(typer.Typer):
    """A typer app whose commands take groups of options."""

    def __init__(self, **settings: Any) -> None:
        own = {"add_completion": False, "cls": Group, "context_settings": CONTEXT}
        super().__init__(**{**own, **settings})

    def command(self, *given: Any, **named: Any) -> Callable[[Any], Any]:
        """Register a command, as `typer.Typer.command` does."""
        return _expanding(super().command(*given, **{"cls": Command, **named}))

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
    result = fields(function) if is_dataclass(function) else ()
    options = {one.name: one.metadata[_OPTION] for one in result if _OPTION in one.metadata}
    for parameter in _parameters(function):
        hint = parameter.annotation
        if is_dataclass(hint):
            yield from _fields(hint)
            continue
        if parameter.name in options:
            hint = Annotated[hint, options[parameter.name]]
        yield parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hint)


def _call(function: Any, given: Mapping[str, Any]) -> Any:
    """Call a function or build a group from the values that `_fields` has named."""
    return function(
        **{
            parameter.name: _call(parameter.annotation, given)
            if is_dataclass(parameter.annotation)
            else given[parameter.name]
            for parameter in _parameters(function)
        }
    )
