"""Typer with groups of options, where a command may take a dataclass as one parameter, and help as
plain text.

Each field of the dataclass is an option of the command, at the place of the parameter.  `option`
declares its settings; so does `typing.Annotated`.  A field may be a group again.

Names of options and placeholders of values are never cut or broken: a long name has a line of its
own.  Only prose is wrapped.
"""

from __future__ import annotations

import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import field, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from typer.core import TyperCommand, TyperGroup

WIDEST = 100
"""Columns of the help at most: longer lines are hard to read."""
NAMES_WIDEST = 28
"""Columns of names at most; a longer name has a line of its own."""
CHOICES_WIDEST = 16
"""Characters of choices that are shown in place of a placeholder."""
FLOOR_SHOWN = 1
"""The smallest allowed value is shown if it is higher than this: others go without saying."""
DEFAULT_PANEL = "Commands"
NO_BREAK = "\N{NO-BREAK SPACE}"

Rows = list[tuple[str, str]]


def write_help(command: Any, context: Any, formatter: Any) -> None:
    """Write the help of a command to click's formatter."""
    command.format_usage(context, formatter)
    paragraphs, examples = help_parts(command)
    for paragraph in paragraphs:
        formatter.write(f"\n{wrapped(paragraph, formatter.width, '  ')}\n")
    if examples:
        lines = "".join(f"  {example}\n" for example in examples)
        formatter.write(f"\n{'Example' if len(examples) == 1 else 'Examples'}:\n{lines}")
    shown = [one for one in command.get_params(context) if not getattr(one, "hidden", False)]
    arguments = [(placeholder(one), _meaning(one)) for one in shown if is_argument(one)]
    options = [(_spelled(one), _meaning(one)) for one in shown if not is_argument(one)]
    sections = {"Arguments": arguments, "Options": options, **_commands(command, context)}
    for title, rows in sections.items():
        if rows:
            formatter.write(f"\n{title}:\n{''.join(_lines(rows, formatter.width))}")


def help_parts(command: Any) -> tuple[list[str], list[str]]:
    """The paragraphs of a command's help, and the commands of its examples."""
    return _parts(command.help or "")


def paragraph_of(function: Callable[..., Any], number: int = 0) -> str:
    """A paragraph of the help of a command that this function is."""
    return _parts(function.__doc__ or "")[0][number]


def _parts(text: str) -> tuple[list[str], list[str]]:
    paragraphs, examples = list[str](), list[str]()
    for paragraph in text.split("\n\n"):
        text = " ".join(paragraph.split())
        example = re.fullmatch(r"Example: `(.+)`", text)
        if example:
            examples.append(example[1])
        elif text:
            paragraphs.append(text)
    return paragraphs, examples


def usage_pieces(command: Any, context: Any, given: Iterable[str]) -> list[str]:
    """The usage line of a command, with its arguments as their help names them."""
    arguments = [one for one in command.get_params(context) if is_argument(one)]
    own = {piece for one in arguments for piece in one.get_usage_pieces(context)}
    first, *rest = [piece for piece in given if piece not in own]
    named = [placeholder(one) if one.required else f"[{placeholder(one)}]" for one in arguments]
    return [first, *named, *rest]


def is_argument(param: Any) -> bool:
    """True for an argument, False for an option."""
    return bool(param.param_type_name == "argument")


def placeholder(param: Any) -> str:
    """The placeholder of a value, such as `N`, `FILE` or `text|json`; empty for a flag."""
    if param.metavar is not None:
        return str(param.metavar)
    if getattr(param, "is_bool_flag", False):
        return ""
    word = (max(param.opts, key=len).rpartition("-")[2] or param.name).upper()
    kind = _type_of(param)
    if kind.startswith(("int", "float")):
        return "N"
    if kind == "path":
        return word if word == "DIR" else "FILE"
    joined = "|".join(choices(param))
    return joined if 0 < len(joined) <= CHOICES_WIDEST else word


def choices(param: Any) -> list[str]:
    """The values that an option takes, if they are a fixed set."""
    kind = getattr(param, "type_descriptor", None) or param.type
    found = getattr(kind, "choices", None) or ()
    return [str(one.value) if isinstance(one, Enum) else str(one) for one in found]


def default_of(param: Any) -> str:
    """The default of an option as text; empty if it has none, or if it goes without saying."""
    if isinstance(param.show_default, str):
        return param.show_default
    value = param.default
    if not param.show_default or callable(value) or value in (None, False, "", (), []):
        return ""
    if getattr(param, "is_bool_flag", False):
        return str(param.opts[0]) if param.secondary_opts else ""
    value = value.value if isinstance(value, Enum) else value
    return f"{value:g}" if isinstance(value, float) else str(value)


def _type_of(param: Any) -> str:
    """The type of a value: `int`, `float`, `path`, ... (in old typers, click has it)."""
    described = getattr(param, "type_descriptor", None)
    if described is None:
        return str(param.type.name)
    kind = next(iter(get_args(described.annotation)), described.annotation)
    return "path" if kind is Path else str(kind.__name__)


def _spelled(param: Any) -> str:
    names = ", ".join(sorted(param.opts, key=lambda name: (name.startswith("--"), len(name))))
    if param.secondary_opts:
        names = f"{names} / {', '.join(param.secondary_opts)}"
    return f"{names} {placeholder(param)}".rstrip()


def _meaning(param: Any) -> str:
    text = param.help or ""
    every = choices(param)
    is_listed = all(one in text for one in every) or placeholder(param) == "|".join(every)
    if not is_listed:
        text = f"{text} One of: {', '.join(every)}."
    notes = "; ".join(filter(None, _notes(param)))
    return f"{text} [{notes}]" if notes else text


def _notes(param: Any) -> Iterator[str]:
    yield "required" if param.required and not is_argument(param) else ""
    yield f"env: {param.envvar}" if param.envvar else ""
    bounds = param if hasattr(param, "min") else param.type
    least, most = getattr(bounds, "min", None), getattr(bounds, "max", None)
    if most is not None:
        yield f"{least or 0:g} to {most:g}"
    elif least is not None and least > FLOOR_SHOWN:
        yield f"at least {least:g}"
    default = default_of(param)
    yield f"default: {default}" if default else ""


def _commands(command: Any, context: Any) -> dict[str, Rows]:
    """The commands of a group by panel, each with the first paragraph of its help."""
    panels: dict[str, Rows] = {}
    for name in command.list_commands(context) if hasattr(command, "list_commands") else ():
        below = command.get_command(context, name)
        panel = getattr(below, "rich_help_panel", None) or DEFAULT_PANEL
        panels.setdefault(panel, []).append((name, next(iter(help_parts(below)[0]), "")))
    return panels


def _lines(rows: Rows, width: int) -> Iterator[str]:
    """Rows in two columns; a name that is too long for its column has a line of its own."""
    column = min(max(len(name) for name, _ in rows), NAMES_WIDEST) + 4
    for name, text in rows:
        head = f"  {name}"
        body = wrapped(text, width, " " * column)
        if body and len(head) <= column - 2:
            yield f"{head:<{column}}{body.lstrip()}\n"
        else:
            yield f"{head}\n{body}\n" if body else f"{head}\n"


def wrapped(text: str, width: int, indent: str = "") -> str:
    """Prose with an indent; words and commands in backticks are not broken."""
    whole = re.sub(r"`[^`]+`", lambda match: match[0].replace(" ", NO_BREAK), text)
    lines = textwrap.fill(
        whole,
        width,
        initial_indent=indent,
        subsequent_indent=indent,
        break_on_hyphens=False,
        break_long_words=False,
    )
    return lines.replace(NO_BREAK, " ")


_OPTION = "option"
"""Key of a field's metadata: the settings of its option."""


def option(*names: str, default: Any = None, **settings: Any) -> Any:
    """Declare a field of a group as an option; `names` and `settings` are those of typer.Option."""
    return field(default=default, metadata={_OPTION: typer.Option(*names, **settings)})


CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": WIDEST}
VALIDATOR = "Value error, "
"""Beginning of the messages of pydantic, with which typer reads options."""


class _Plain:
    """A command whose help is plain text, and whose errors name no validator."""

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


class PlainCommand(_Plain, TyperCommand):
    """A command of an `App`."""


class PlainGroup(_Plain, TyperGroup):
    """A group of commands of an `App`."""


class App(typer.Typer):
    """A typer app whose commands take groups of options."""

    def __init__(self, **settings: Any) -> None:
        own = {"add_completion": False, "cls": PlainGroup, "context_settings": CONTEXT}
        super().__init__(**{**own, **settings})

    def command(self, *given: Any, **named: Any) -> Callable[[Any], Any]:
        """Register a command, as `typer.Typer.command` does."""
        return _expanding(super().command(*given, **{"cls": PlainCommand, **named}))

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
