"""Constraints of one value, in the words of Kubernetes: ranges, lengths, patterns, formats.

`checks_of` turns a schema node's rules about a value itself into functions; `structural` handles
the rules about the values inside. The wording is from kube-openapi's `validation/errors` and
apiextensions-apiserver's `ValidateCustomResource`, v1.33, tried against a v1.20.2 server. Not
checked, as too rare: the formats isbn*, creditcard, ssn, rgbcolor, bsonobjectid.
"""

from __future__ import annotations

import base64
import binascii
import ipaddress
import json
import re
from collections.abc import Callable, Mapping
from datetime import date
from functools import cache
from typing import Any
from urllib.parse import urlsplit

from unbroken.local.apiserver.http.status import Cause
from unbroken.spec.patterns import TRUSTED_MEMORY_BYTES, Pattern

Check = Callable[[Any, str, list[Cause]], None]
"""(value, its path, causes to add to)"""

INTEGER_RANGES = {"int32": (-(2**31), 2**31 - 1), "int64": (-(2**63), 2**63 - 1)}

DATE_TIME = re.compile(
    r"(\d{4}-\d{2}-\d{2})[Tt](\d{2}):(\d{2}):(\d{2})([.,]\d+)?([Zz]|[+-]\d{2}:\d{2})"
)
QUANTITY = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)(([KMGTPE]i)|[numkMGTPE]|[eE][+-]?\d+)?")
HOSTNAME = re.compile(r"[a-zA-Z0-9]([-a-zA-Z0-9]{0,61}[a-zA-Z0-9])?")
EMAIL = re.compile(r"[^\s<>()\[\]:;@\\,\"]+@[^\s<>()\[\]:;@\\,\"]+")
UUID = re.compile(r"(?i)[0-9a-f]{8}-?([0-9a-f]{4}-?){3}[0-9a-f]{12}")
MAC = re.compile(r"(?i)[0-9a-f]{2}([:-][0-9a-f]{2}){5,19}|([0-9a-f]{4}\.){2,9}[0-9a-f]{4}")
DURATION = re.compile(r"[+-]?(\d+(\.\d*)?\s*(ns|us|µs|ms|s|m|h|d|w)\s*)+|[+-]?0")


def go_text(value: Any) -> str:
    """`value` as Go's %#v prints decoded JSON; the API's errors show bad values so."""
    match value:
        case None:
            return '"null"'
        case bool():
            return str(value).lower()
        case int() | float():
            return go_number(value)
        case str():
            return json.dumps(value, ensure_ascii=False)
        case list():
            inside = ", ".join("interface {}(nil)" if x is None else go_text(x) for x in value)
            return "[]interface {}{" + inside + "}"
        case _:
            pairs = sorted(value.items())
            shown = [
                f"{json.dumps(k)}:{'interface {}(nil)' if v is None else go_text(v)}"
                for k, v in pairs
            ]
            return "map[string]interface {}{" + ", ".join(shown) + "}"


def go_number(value: float) -> str:
    """`value` as Go's %v prints it."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e21:
        return str(int(value))
    return str(value)


def invalid_value(path: str, value: Any, detail: str) -> Cause:
    """FieldValueInvalid that shows the value."""
    return Cause("FieldValueInvalid", path, f"Invalid value: {go_text(value)}: {detail}")


def required_value(path: str, detail: str = "") -> Cause:
    """FieldValueRequired."""
    return Cause("FieldValueRequired", path, "Required value" + (f": {detail}" if detail else ""))


def forbidden(path: str, detail: str) -> Cause:
    """FieldValueForbidden."""
    return Cause("FieldValueForbidden", path, f"Forbidden: {detail}")


def unsupported(path: str, value: Any, supported: list[str]) -> Cause:
    """FieldValueNotSupported with the values that are."""
    listed = ", ".join(json.dumps(item, ensure_ascii=False) for item in supported)
    text = f"Unsupported value: {go_text(value)}: supported values: {listed}"
    return Cause("FieldValueNotSupported", path, text)


def same(a: Any, b: Any) -> bool:
    """Equality of JSON values: unlike Python's, true is not 1."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return bool(a == b)


@cache
def pattern(text: str) -> Pattern:
    """Compile a pattern; SpecError if RE2, the engine of Kubernetes, cannot."""
    return Pattern(text, TRUSTED_MEMORY_BYTES)


def is_date(value: str) -> bool:
    """RFC 3339 full-date."""
    try:
        return len(value) == 10 and bool(date.fromisoformat(value))
    except ValueError:
        return False


def is_date_time(value: str) -> bool:
    """RFC 3339 date-time."""
    match = DATE_TIME.fullmatch(value)
    if not match or not is_date(match[1]):
        return False
    return int(match[2]) < 24 and int(match[3]) < 60 and int(match[4]) < 60


def _is_base64(value: str) -> bool:
    try:
        base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        return False
    return True


def _is_address(kind: Callable[[str], object]) -> Callable[[str], bool]:
    def check(value: str) -> bool:
        try:
            kind(value)
        except ValueError:
            return False
        return True

    return check


def _is_cidr(value: str) -> bool:
    return "/" in value and _is_address(lambda text: ipaddress.ip_network(text, False))(value)


def _is_hostname(value: str) -> bool:
    return len(value) <= 255 and all(map(HOSTNAME.fullmatch, value.split(".")))


def _is_uri(value: str) -> bool:
    try:
        return value.startswith("/") or bool(urlsplit(value).scheme)
    except ValueError:
        return False


def _is_uuid(version: str) -> Callable[[str], bool]:
    def check(value: str) -> bool:
        return bool(UUID.fullmatch(value)) and value.replace("-", "")[12] in version

    return check


FORMATS: Mapping[str, Callable[[str], bool]] = {
    "date-time": is_date_time,
    "datetime": is_date_time,
    "date": is_date,
    "duration": lambda value: bool(DURATION.fullmatch(value)),
    "email": lambda value: bool(EMAIL.fullmatch(value)),
    "hostname": _is_hostname,
    "ipv4": _is_address(ipaddress.IPv4Address),
    "ipv6": _is_address(ipaddress.IPv6Address),
    "cidr": _is_cidr,
    "mac": lambda value: bool(MAC.fullmatch(value)),
    "uri": _is_uri,
    "uuid": lambda value: bool(UUID.fullmatch(value)),
    "uuid3": _is_uuid("3"),
    "uuid4": _is_uuid("4"),
    "uuid5": _is_uuid("5"),
    "byte": _is_base64,
    "hexcolor": lambda value: bool(re.fullmatch(r"#?([0-9a-fA-F]{3}|[0-9a-fA-F]{6})", value)),
}


def enum_check(allowed: list[Any]) -> Check:
    """The value is one of `allowed`."""
    names = [x if isinstance(x, str) else json.dumps(x, separators=(",", ":")) for x in allowed]

    def check(value: Any, path: str, causes: list[Cause]) -> None:
        if not any(same(value, item) for item in allowed):
            causes.append(unsupported(path, value, names))

    return check


def _fails(
    test: Callable[[Any], bool], detail: str, shown: Callable[[Any], Any] | None = None
) -> Check:
    """FieldValueInvalid with `detail` where `test` is true of the value."""

    def check(value: Any, path: str, causes: list[Cause]) -> None:
        if test(value):
            text = f"{path} in body {detail}"
            causes.append(invalid_value(path, shown(value) if shown else value, text))

    return check


def _too_many(limit: int) -> Check:
    def check(value: Any, path: str, causes: list[Cause]) -> None:
        if len(value) > limit:
            text = f"Too many: {len(value)}: must have at most {limit} items"
            causes.append(Cause("FieldValueTooMany", path, text))

    return check


def _too_long(limit: int) -> Check:
    def check(value: Any, path: str, causes: list[Cause]) -> None:
        if len(value) > limit:
            text = f"Too long: may not be more than {limit} bytes"
            causes.append(Cause("FieldValueTooLong", path, text))

    return check


def string_checks(raw: Mapping[str, Any]) -> tuple[Check, ...]:
    """maxLength, minLength, pattern, format; lengths are in code points."""
    checks: list[Check] = []
    if (most := raw.get("maxLength")) is not None:
        checks.append(_too_long(most))
    if (least := raw.get("minLength")) is not None:
        checks.append(
            _fails(lambda value: len(value) < least, f"should be at least {least} chars long")
        )
    if text := raw.get("pattern"):
        compiled = pattern(text)
        checks.append(
            _fails(
                lambda value: not compiled.is_found(value.encode(errors="replace")),
                f"should match '{text}'",
            )
        )
    if fits := FORMATS.get(raw.get("format", "")):
        checks.append(_format_check(raw["format"], fits))
    return tuple(checks)


def _format_check(name: str, fits: Callable[[str], bool]) -> Check:
    def check(value: Any, path: str, causes: list[Cause]) -> None:
        if not fits(value):
            detail = f"{path} in body must be of type {name}: {go_text(value)}"
            causes.append(invalid_value(path, value, detail))

    return check


def number_checks(raw: Mapping[str, Any]) -> tuple[Check, ...]:
    """maximum, minimum, exclusive or not, multipleOf, and the range of the integer format."""
    checks: list[Check] = []
    if (low_high := INTEGER_RANGES.get(raw.get("format", ""))) and raw.get("type") == "integer":
        low, high = low_high
        detail = f"must be of type integer with format {raw['format']}"
        checks.append(_fails(lambda value: not low <= value <= high, detail))
    if (most := raw.get("maximum")) is not None:
        if raw.get("exclusiveMaximum"):
            checks.append(_fails(lambda v: v >= most, f"should be less than {go_number(most)}"))
        else:
            detail = f"should be less than or equal to {go_number(most)}"
            checks.append(_fails(lambda value: value > most, detail))
    if (least := raw.get("minimum")) is not None:
        if raw.get("exclusiveMinimum"):
            checks.append(
                _fails(lambda v: v <= least, f"should be greater than {go_number(least)}")
            )
        else:
            detail = f"should be greater than or equal to {go_number(least)}"
            checks.append(_fails(lambda value: value < least, detail))
    if factor := raw.get("multipleOf"):
        detail = f"should be a multiple of {go_number(factor)}"
        checks.append(_fails(lambda v: abs(v / factor - round(v / factor)) > 1e-9, detail))
    return tuple(checks)


def list_checks(raw: Mapping[str, Any]) -> tuple[Check, ...]:
    """maxItems, minItems, uniqueItems."""
    checks: list[Check] = []
    if (most := raw.get("maxItems")) is not None:
        checks.append(_too_many(most))
    if (least := raw.get("minItems")) is not None:
        detail = f"should have at least {least} items"
        checks.append(_fails(lambda value: len(value) < least, detail, len))
    if raw.get("uniqueItems"):
        checks.append(_fails(_has_duplicates, "shouldn't contain duplicates"))
    return tuple(checks)


def _has_duplicates(value: list[Any]) -> bool:
    return any(same(item, other) for i, item in enumerate(value) for other in value[:i])


def object_checks(raw: Mapping[str, Any]) -> tuple[Check, ...]:
    """maxProperties, minProperties."""
    checks: list[Check] = []
    if (most := raw.get("maxProperties")) is not None:
        checks.append(_too_many(most))
    if (least := raw.get("minProperties")) is not None:
        detail = f"should have at least {least} properties"
        checks.append(_fails(lambda value: len(value) < least, detail, len))
    return tuple(checks)


def checks_of(raw: Mapping[str, Any]) -> dict[type, tuple[Check, ...]]:
    """Checks by the Python type of the value."""
    enum: tuple[Check, ...] = (enum_check(raw["enum"]),) if raw.get("enum") else ()
    numbers = number_checks(raw)
    result: dict[type, tuple[Check, ...]] = {
        str: string_checks(raw) + enum,
        int: numbers + enum,
        float: numbers + enum,
        bool: enum,
        type(None): enum,
        list: list_checks(raw) + enum,
        dict: object_checks(raw) + enum,
    }
    return {kind: checks for kind, checks in result.items() if checks}
