"""Label selectors and field selectors: as text in a request, as objects in a spec.

The grammar and the texts of errors follow apimachinery v1.20 (labels.Parse, fields.ParseSelector).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unbroken.foreign_numbers import INT64_MIN, whole_number
from unbroken.local.apiserver.http.status import ApiError, Object, bad_request

from .names import label_value, qualified_name

_TOKEN = re.compile(r"==|!=|[()!,=<>]|[^\s()!,=<>]+")
_OPERATORS = {
    "=": "In",
    "==": "In",
    "in": "In",
    "!=": "NotIn",
    "notin": "NotIn",
    ">": "Gt",
    "<": "Lt",
}
_SYMBOLS = frozenset("()!,=<>") | {"==", "!=", ""}
_ALWAYS_SELECTABLE = ("metadata.name", "metadata.namespace")


@dataclass(frozen=True, slots=True)
class Requirement:
    """One term of a label selector."""

    key: str
    operator: str
    """In, NotIn, Exists, DoesNotExist, Gt, Lt."""
    values: frozenset[str] = frozenset()

    def matches(self, labels: Mapping[str, str]) -> bool:
        """True if the labels meet it; NotIn is met where the label is absent."""
        value = labels.get(self.key)
        if self.operator == "In":
            return value in self.values
        if self.operator == "NotIn":
            return value not in self.values
        if self.operator in ("Exists", "DoesNotExist"):
            return (value is not None) is (self.operator == "Exists")
        present, bound = (whole_number(one, INT64_MIN) for one in (value or "", *self.values))
        if present is None or bound is None:
            return False
        return present > bound if self.operator == "Gt" else present < bound


@dataclass(frozen=True, slots=True)
class LabelSelector:
    """All requirements together; without any it matches everything."""

    requirements: tuple[Requirement, ...] = ()
    is_nothing: bool = False
    """Matches nothing, whatever the requirements."""

    def matches(self, labels: Mapping[str, str]) -> bool:
        """True if labels meet every requirement."""
        return not self.is_nothing and all(term.matches(labels) for term in self.requirements)


def parse_labels(text: str) -> LabelSelector:
    """Read `a=b,c!=d,e in (x,y),!f`; ApiError 400."""
    tokens = _Tokens([*_TOKEN.findall(text), ""])
    requirements: list[Requirement] = []
    while tokens.peek() != "":
        if tokens.peek() in _SYMBOLS and tokens.peek() != "!":
            expected = "!, identifier, or 'end of string'"
            raise bad_request(f"found '{tokens.peek()}', expected: {expected}")
        requirements.append(_requirement(tokens))
        match tokens.take():
            case "":
                break
            case ",":
                if tokens.peek() in _SYMBOLS and tokens.peek() != "!":
                    raise bad_request(f"found '{tokens.peek()}', expected: identifier after ','")
            case other:
                raise bad_request(f"found '{other}', expected: ',' or 'end of string'")
    return LabelSelector(tuple(requirements))


def selector_of(source: Object | None) -> LabelSelector:
    """Read matchLabels and matchExpressions; none at all matches nothing.  ApiError 400."""
    if source is None:
        return LabelSelector(is_nothing=True)
    requirements = [
        _checked(key, "In", [value]) for key, value in (source.get("matchLabels") or {}).items()
    ]
    for term in source.get("matchExpressions") or []:
        operator = term.get("operator") or ""
        if operator not in ("In", "NotIn", "Exists", "DoesNotExist"):
            raise bad_request(f'"{operator}" is not a valid label selector operator')
        requirements.append(_checked(term.get("key") or "", operator, term.get("values") or []))
    return LabelSelector(tuple(requirements))


class _Tokens:
    """The words of a selector, read once from the left; the last one is empty."""

    def __init__(self, words: list[str]) -> None:
        self._words = words
        self._next = 0

    def peek(self) -> str:
        return self._words[self._next]

    def take(self) -> str:
        word = self._words[self._next]
        self._next = min(self._next + 1, len(self._words) - 1)
        return word


def _unparsed(why: str) -> ApiError:
    return bad_request(f"unable to parse requirement: {why}")


def _requirement(tokens: _Tokens) -> Requirement:
    word = tokens.take()
    is_absent = word == "!"
    if is_absent:
        word = tokens.take()
    if word in _SYMBOLS:
        raise _unparsed(f"found '{word}', expected: identifier")
    if is_absent or tokens.peek() in ("", ","):
        return _checked(word, "DoesNotExist" if is_absent else "Exists", [])
    _check_key(word)
    sign = tokens.take()
    operator = _OPERATORS.get(sign)
    if operator is None:
        raise _unparsed(f"found '{sign}', expected: '=', '!=', '==', 'in', notin'")
    values = _listed(tokens) if sign in ("in", "notin") else [_single(tokens)]
    return _checked(word, operator, values)


def _single(tokens: _Tokens) -> str:
    if tokens.peek() in ("", ","):
        return ""
    word = tokens.take()
    if word in _SYMBOLS:
        raise _unparsed(f"found '{word}', expected: identifier")
    return word


def _listed(tokens: _Tokens) -> list[str]:
    """Return the values of `(x, y)`; an empty place is the empty value."""
    opening = tokens.take()
    if opening != "(":
        raise _unparsed(f"found '{opening}' expected: '('")
    values: list[str] = []
    while True:
        values.append("" if tokens.peek() in (",", ")") else tokens.take())
        if values[-1] in _SYMBOLS - {""}:
            raise _unparsed(f"found '{values[-1]}', expected: ',', or identifier")
        match tokens.take():
            case ")":
                return values
            case ",":
                continue
            case other:
                raise _unparsed(f"found '{other}', expected: ',' or ')'")


def _check_key(key: str) -> None:
    wrong = qualified_name(key)
    if wrong:
        raise _unparsed(f'invalid label key "{key}": {"; ".join(wrong)}')


def _checked(key: str, operator: str, values: Sequence[str]) -> Requirement:
    _check_key(key)
    if operator in ("In", "NotIn") and not values:
        raise _unparsed("for 'in', 'notin' operators, values set can't be empty")
    if operator in ("Exists", "DoesNotExist") and values:
        raise _unparsed("values set must be empty for exists and does not exist")
    if operator in ("Gt", "Lt") and whole_number(values[0], INT64_MIN) is None:
        raise _unparsed("for 'Gt', 'Lt' operators, the value must be an integer")
    for value in values:
        wrong = label_value(value)
        if wrong:
            why = "; ".join(wrong)
            raise _unparsed(f'invalid label value: "{value}": at key: "{key}": {why}')
    return Requirement(key, operator, frozenset(values))


@dataclass(frozen=True, slots=True)
class FieldSelector:
    """Terms (path, is_equal, value) that all hold."""

    terms: tuple[tuple[str, bool, str], ...] = ()

    def matches(self, values: Mapping[str, str]) -> bool:
        """True if the values, by path, meet every term; an absent field is empty text."""
        return all((values.get(path, "") == value) is equal for path, equal, value in self.terms)


def parse_fields(text: str, allowed: Sequence[str]) -> FieldSelector:
    """Read `metadata.name=x,status.phase!=Running`; ApiError 400."""
    terms: list[tuple[str, bool, str]] = []
    for part in re.findall(r"(?:\\.|[^\\,]|\\$)+", text, re.DOTALL):
        match = re.match(r"((?:\\.|[^\\=!]|!(?!=)|\\$)*)(!=|==|=)", part, re.DOTALL)
        if match is None:
            raise bad_request(f"invalid selector: '{text}'; can't understand '{part}'")
        terms.append((match[1], match[2] != "!=", _unescaped(part[match.end() :])))
    for path, _, _ in terms:
        if path in allowed:
            continue
        if tuple(allowed) == _ALWAYS_SELECTABLE:
            only = ", ".join(f'"{name}"' for name in allowed)
            raise bad_request(f'"{path}" is not a known field selector: only {only}')
        raise bad_request(f"field label not supported: {path}")
    return FieldSelector(tuple(terms))


def _unescaped(value: str) -> str:
    wrong = re.search(r"\\(?![\\,=])(.?)", re.sub(r"\\[\\,=]", "", value), re.DOTALL)
    if wrong is not None:
        raise bad_request(f"invalid field selector: invalid escape sequence: \\{wrong[1]}")
    if "=" in re.sub(r"\\.", "", value):
        raise bad_request(f"invalid field selector: unescaped character in value: {ord('=')}")
    return re.sub(r"\\(.)", r"\1", value)


def field_value(content: Object, path: str) -> str:
    """The text that a field selector compares; empty where the field is absent."""
    if path == "source" and isinstance(content.get("source"), dict):
        # Events are selected by the component that reported them.
        return str(content["source"].get("component") or content.get("reportingComponent") or "")
    # Events are stored in the form of core/v1, whichever form the client names.
    stored = _CORE_NAMES.get(path, path).replace("regarding.", "involvedObject.")
    value: Any = content
    for part in stored.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    if value is None:
        return _ABSENT.get(path, "")
    return str(value).lower() if isinstance(value, bool) else str(value)


_CORE_NAMES = {"reportingController": "reportingComponent"}
_ABSENT = {"spec.unschedulable": "false", "spec.hostNetwork": "false", "status.successful": "0"}
"""Fields whose zero value Kubernetes compares where they are left out."""
