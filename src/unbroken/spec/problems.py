"""Problems of a manifest: every problem with its place, in Kubernetes' words."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from unbroken.errors import SpecError

VARIABLE = re.compile(r"\$\{[A-Za-z_][^}]{0,100}\}|^\$[A-Za-z_]\w{0,100}$", re.ASCII)
"""A shell's variable in a value: `${NAME}` anywhere, or a value that is `$NAME` alone."""
PROBLEMS_MAX = 100
"""Problems, and warnings, that are kept of one object: a hostile one may have 100,000."""
SHOWN_LENGTH = 80
"""Characters of a bad value in a message; the rest is cut."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem of one field."""

    path: str
    """Path as Kubernetes writes it: `spec.replicaSpecs[0].name`; empty: the whole."""
    message: str
    reason: str = "FieldValueInvalid"
    """Reason of a `metav1.StatusCause`: FieldValueRequired, FieldValueForbidden, ..."""

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on an object: it may be stored only without problems."""

    problems: tuple[Problem, ...] = ()
    warnings: tuple[str, ...] = ()


class ManifestError(SpecError):
    """A manifest with problems; the text lists all of them, one a line."""

    def __init__(self, title: str, problems: Sequence[Problem]) -> None:
        super().__init__("\n  ".join([f"{title} is invalid:", *map(str, problems)]))
        self.problems = tuple(problems)


@dataclass(slots=True)
class Report:
    """Problems and warnings found so far, the first PROBLEMS_MAX of them; the first of each place
    counts."""

    problems: list[Problem] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    _places: set[str] = field(default_factory=set)

    def _add(self, path: str, message: str, reason: str) -> None:
        if path not in self._places:
            self._places.add(path)
            if len(self.problems) < PROBLEMS_MAX:
                self.problems.append(Problem(path, message, reason))

    def required(self, path: str, why: str = "") -> None:
        """Report that a value is required here."""
        self._add(path, "Required value" + (f": {why}" if why else ""), "FieldValueRequired")

    def invalid(self, path: str, value: Any, why: str) -> None:
        """Report that `value` is not allowed here."""
        text = f"Invalid value: {shown(value)}: {why}{unsubstituted(value)}"
        self._add(path, text, "FieldValueInvalid")

    def unsupported(self, path: str, value: Any, supported: Iterable[str]) -> None:
        """Report that `value` is none of the allowed ones."""
        listed = ", ".join(f'"{item}"' for item in supported)
        text = f"Unsupported value: {shown(value)}: supported values: {listed}"
        text += unsubstituted(value)
        self._add(path, text, "FieldValueNotSupported")

    def duplicate(self, path: str, value: Any) -> None:
        """Report that `value` occurs twice."""
        self._add(path, f"Duplicate value: {shown(value)}", "FieldValueDuplicate")

    def forbidden(self, path: str, why: str) -> None:
        """Report that no value is allowed here."""
        self._add(path, f"Forbidden: {why}", "FieldValueForbidden")

    def unknown(self, path: str, key: str, known: Sequence[str]) -> None:
        """Report that `key` is not known at `path`."""
        key = key[:SHOWN_LENGTH]
        if len(self.problems) >= PROBLEMS_MAX:  # near names take long to find
            self._places.add(below(path, key))
            return
        near = get_close_matches(key.lower(), by_lower := {k.lower(): k for k in known}, 1)
        hint = (
            f"did you mean {by_lower[near[0]]}?"
            if near
            else f"known here: {', '.join(sorted(known))}"
        )
        self.forbidden(below(path, key), f"unknown field; {hint}")

    def warn(self, text: str) -> None:
        """Warn the user without refusing anything; once."""
        if len(self.warnings) < PROBLEMS_MAX and text not in self.warnings:
            self.warnings.append(text)

    def has(self, path: str) -> bool:
        """True if a problem of just this place is known."""
        return path in self._places

    def has_below(self, path: str) -> bool:
        """True if there is a problem at or below `path`."""
        return any(
            place == path or place.startswith((f"{path}.", f"{path}[")) for place in self._places
        )


def below(path: str, key: str) -> str:
    """Return the path of the field `key` below `path`."""
    return f"{path}.{key}" if path else key


def unsubstituted(value: Any) -> str:
    """Return a hint to append to a message, if a text holds `$NAME` or `${NAME}`; else empty."""
    match = VARIABLE.search(value) if isinstance(value, str) else None
    if match is None:
        return ""
    return f"; {match[0][:SHOWN_LENGTH]} was left unsubstituted: fill it in, as envsubst does"


def shown(value: Any) -> str:
    """Return a bad value for a message: scalars as JSON, cut; of lists and objects the type."""
    match value:
        case str():
            text = value if len(value) <= SHOWN_LENGTH else value[:SHOWN_LENGTH] + "..."
            return json.dumps(text, ensure_ascii=False)
        case bool() | None:
            return json.dumps(value)
        case int() if abs(value) >= 1 << 64:
            return "a number too large"  # Python refuses to print the largest
        case int() | float():
            return f"{value:g}" if isinstance(value, float) else str(value)
        case list() | tuple():
            return '"array"'
        case _:
            return '"object"'
