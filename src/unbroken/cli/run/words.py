"""The words of `unbroken run`: its own options, torchrun's, and those of the script.

The words are split by a parser of argparse that knows all options, as torchrun's own parser is one:
abbreviations, joined short options and the end of the options mean here what they mean there.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unbroken.agent.option_table import OPTIONS
from unbroken.errors import SpecError

from .manifests import is_manifest

FIELDS = {
    "--nnodes": "spec.replicaSpecs[].replicas",
    "--nproc-per-node": "spec.nprocPerNode",
    "--spares": "spec.replicaSpecs[].spares",
    "--max-restarts": "spec.runPolicy.jobMaxRetryCount",
}
"""Where a manifest says what an option says of a script."""
COMMAND = "spec.replicaSpecs[].template.spec.containers[].command"
STANDALONE = "--standalone"

Own = Sequence[tuple[tuple[str, ...], bool]]
"""Options of the command: the spellings, and whether it is a flag."""


@dataclass(frozen=True, slots=True)
class Words:
    """The words of a command line, sorted."""

    own: list[str]
    """Options of `unbroken run`, and unknown ones before the script, which it refuses."""
    passed: list[str]
    """Options of torchrun and of the agent, by their full names."""
    rest: list[str]
    """The manifest or script, and what follows it."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise SpecError(message)


class _Take(argparse.Action):
    """Appends an option by its full name, and its value, to a list."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Append `--name` or `--name=value`."""
        name = next(one for one in self.option_strings if one.startswith("--"))
        taken = getattr(namespace, self.dest)
        taken.append(name if self.nargs == 0 else f"{name}={values}")


def split(arguments: Sequence[str], own: Own, environ: Mapping[str, str] = os.environ) -> Words:
    """Sort the words of a command line; SpecError for an ambiguous or incomplete option."""
    first = _parser(own)
    first.add_argument("program", nargs="?", default=None)
    first.add_argument("rest", nargs=argparse.REMAINDER, default=[])
    found, unknown = first.parse_known_args(arguments, _empty())
    if unknown:
        return Words([*found.own, *unknown], found.passed, [])
    if found.program is None:
        return Words(found.own, found.passed, [])
    if is_manifest(found.program):
        _, unknown = _parser(own).parse_known_args(found.rest, found)
        return Words(found.own, found.passed, ["--", found.program, *unknown])
    _add_variables(found, environ)
    passed = [word for word in found.passed if word != STANDALONE]
    return Words(found.own, passed, ["--", found.program, *found.rest])


def _empty() -> argparse.Namespace:
    return argparse.Namespace(own=[], passed=[])


def _parser(own: Own) -> _Parser:
    parser = _Parser(add_help=False, argument_default=argparse.SUPPRESS)
    taken: set[str] = set()
    for spellings, is_flag in own:
        every = tuple(dict.fromkeys(form for one in spellings for form in _both(one)))
        parser.add_argument(*every, dest="own", action=_Take, nargs=0 if is_flag else None)
        taken.update(every)
    for option in OPTIONS:
        if taken.isdisjoint(option.spellings):
            nargs = 0 if option.is_flag else None
            parser.add_argument(*option.spellings, dest="passed", action=_Take, nargs=nargs)
    return parser


def _both(spelling: str) -> tuple[str, ...]:
    """A spelling with dashes, and with underscores as torchrun takes them."""
    if not spelling.startswith("--"):
        return (spelling,)
    return (spelling, f"--{spelling[2:].replace('-', '_')}")


def _add_variables(found: argparse.Namespace, environ: Mapping[str, str]) -> None:
    """Add the options that the environment gives and the command line does not."""
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
    """Refuse what only a script can be given; SpecError says where the manifest has it."""
    told = [f"{name}: write it to {FIELDS[name]}" for name in sizes]
    names = [word.partition("=")[0] for word in passed]
    told += [f"{name}: write it to the launch line in {COMMAND}" for name in names]
    if arguments:
        words = " ".join(arguments)
        told.append(
            f"{words}: not an option of `unbroken run`; write arguments of the script to {COMMAND}"
        )
    if told:
        raise SpecError(
            f"{program} is a manifest, and sizes and arguments are in the manifest: "
            + "; ".join(told)
        )
