"""Splits the arguments of `unbroken run` into its own, torchrun's and those of the script.

The parser is argparse with all options, as in torchrun: abbreviations, joined short options and the
end of the options mean the same.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unbroken.agent.option_table import OPTIONS
from unbroken.agent.options import split_after_script
from unbroken.errors import SpecError

from .manifests import is_manifest

FIELDS = {
    "--nnodes": "spec.replicaSpecs[].replicas",
    "--nproc-per-node": "spec.nprocPerNode",
    "--spares": "spec.replicaSpecs[].spares",
    "--max-restarts": "spec.runPolicy.jobMaxRetryCount",
}
"""Fields of a manifest that correspond to options for a script."""
COMMAND = "spec.replicaSpecs[].template.spec.containers[].command"
STANDALONE = "--standalone"

Own = Sequence[tuple[tuple[str, ...], bool]]
"""Options of the command: their spellings, and True for a flag."""


@dataclass(frozen=True, slots=True)
class Words:
    """The arguments of a command line, sorted."""

    own: list[str]
    """Options of `unbroken run`, and unknown options before the script, which it refuses."""
    passed: list[str]
    """Options of torchrun and the agent, with full names."""
    rest: list[str]
    """The manifest or script, and its arguments."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise SpecError(message)


class _Take(argparse.Action):
    """An action that appends an option with its full name and value to a list."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Append `--name` or `--name=value`."""
        name = next(string for string in self.option_strings if string.startswith("--"))
        taken = getattr(namespace, self.dest)
        taken.append(name if self.nargs == 0 else f"{name}={values}")


def split(arguments: Sequence[str], own: Own, environ: Mapping[str, str] = os.environ) -> Words:
    """Sort the arguments of a command line; SpecError for an ambiguous or incomplete option."""
    first = _parser(own)
    first.add_argument("program")
    head, rest = split_after_script(
        arguments, lambda words: first.parse_known_args(words, _empty())
    )
    parser = _parser(own)
    parser.add_argument("program", nargs="?", default=None)
    found, unknown = parser.parse_known_args(head, _empty())
    if unknown:
        return Words([*found.own, *unknown], found.passed, [])
    if found.program is None:
        return Words(found.own, found.passed, [])
    if is_manifest(found.program):
        _, unknown = _parser(own).parse_known_args(rest, found)
        return Words(found.own, found.passed, ["--", found.program, *unknown])
    _add_variables(found, environ)
    passed = [word for word in found.passed if word != STANDALONE]
    return Words(found.own, passed, ["--", found.program, *rest])


def _empty() -> argparse.Namespace:
    return argparse.Namespace(own=[], passed=[])


def _parser(own: Own) -> _Parser:
    parser = _Parser(add_help=False, argument_default=argparse.SUPPRESS)
    taken: set[str] = set()
    for spellings, is_flag in own:
        every = tuple(dict.fromkeys(form for spelling in spellings for form in _both(spelling)))
        parser.add_argument(*every, dest="own", action=_Take, nargs=0 if is_flag else None)
        taken.update(every)
    for option in OPTIONS:
        if taken.isdisjoint(option.spellings):
            nargs = 0 if option.is_flag else None
            parser.add_argument(*option.spellings, dest="passed", action=_Take, nargs=nargs)
    return parser


def _both(spelling: str) -> tuple[str, ...]:
    """The spellings of an option with dashes and with underscores, which torchrun accepts."""
    if not spelling.startswith("--"):
        return (spelling,)
    return (spelling, f"--{spelling[2:].replace('-', '_')}")


def _add_variables(found: argparse.Namespace, environ: Mapping[str, str]) -> None:
    """Add options from the environment that the command line does not set."""
    given = {word.partition("=")[0] for word in (*found.own, *found.passed)}
    for option in OPTIONS:
        name, value = f"--{option.name}", environ.get(option.variable)
        if not option.has_variable or value is None or name in given:
            continue
        words = found.own if name in FIELDS else found.passed
        if not option.is_flag:
            words.append(f"{name}={value}")
        elif value not in ("0", ""):
            words.append(name)


def in_manifest(
    program: str, sizes: Sequence[str], passed: Sequence[str], arguments: Sequence[str]
) -> None:
    """Raise SpecError for options and arguments that a manifest must contain itself."""
    problems = [f"{name}: write it to {FIELDS[name]}" for name in sizes]
    names = [word.partition("=")[0] for word in passed]
    problems += [f"{name}: write it to the launch line in {COMMAND}" for name in names]
    if arguments:
        words = " ".join(arguments)
        problems.append(
            f"{words}: not an option of `unbroken run`; write arguments of the script to {COMMAND}"
        )
    if problems:
        raise SpecError(
            f"{program} is a manifest, which must contain sizes and arguments: "
            + "; ".join(problems)
        )
