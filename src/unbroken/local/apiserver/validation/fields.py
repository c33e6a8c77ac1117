"""Rules that many kinds share: amounts, ports, choices, selectors.

Wordings are those of kubernetes v1.33, apimachinery/pkg/api/validation and pkg/apis/*/validation.
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from unbroken.foreign_numbers import whole_number
from unbroken.kube.quantity import QuantityError, parse_quantity
from unbroken.local.apiserver.http.status import Cause, Object
from unbroken.local.apiserver.schema.constraints import (
    forbidden,
    go_text,
    invalid_value,
    required_value,
)

from . import names

PORT_TEXT = "must be between 1 and 65535, inclusive"
PROTOCOLS = ("SCTP", "TCP", "UDP")
EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
ACCESS_MODES = ("ReadOnlyMany", "ReadWriteMany", "ReadWriteOnce", "ReadWriteOncePod")
IMMUTABLE = "field is immutable"
NOT_NEGATIVE = "must be greater than or equal to 0"
PERCENT_TEXT = (
    "a valid percent string must be a numeric string followed by an ending '%' "
    "(e.g. '1%',  or '93%', regex used for validation is '[0-9]+%')"
)


def at(content: Any, path: str) -> Any:
    """The value at a dotted path; None where there is none."""
    for part in path.split("."):
        content = content.get(part) if isinstance(content, dict) else None
    return content


def duplicate(path: str, value: Any) -> Cause:
    """FieldValueDuplicate."""
    return Cause("FieldValueDuplicate", path, f"Duplicate value: {go_text(value)}")


def not_found(path: str, value: str) -> Cause:
    """FieldValueNotFound."""
    return Cause("FieldValueNotFound", path, f"Not found: {go_text(value)}")


def too_long(path: str, bytes_max: int) -> Cause:
    """FieldValueTooLong."""
    text = f"Too long: may not be more than {bytes_max} bytes"
    return Cause("FieldValueTooLong", path, text)


def one_of(content: Object, path: str, field: str, allowed: Sequence[str]) -> list[Cause]:
    """A choice; none at all is a choice that is not there."""
    value = content.get(field) or ""
    if value in allowed:
        return []
    listed = ", ".join(json.dumps(item) for item in allowed)
    text = f"Unsupported value: {go_text(value)}: supported values: {listed}"
    return [Cause("FieldValueNotSupported", _under(path, field), text)]


def optional(content: Object, path: str, field: str, allowed: Sequence[str]) -> list[Cause]:
    """A choice that may be left out."""
    return one_of(content, path, field, allowed) if content.get(field) else []


def _under(path: str, field: str) -> str:
    return f"{path}.{field}" if path else field


def not_negative(content: Object, path: str, *fields: str) -> list[Cause]:
    """Numbers from zero."""
    return [
        invalid_value(_under(path, field), content[field], NOT_NEGATIVE)
        for field in fields
        if (content.get(field) or 0) < 0
    ]


def named(content: Object, path: str, field: str, rule: names.NameRule) -> list[Cause]:
    """A name that may be left out."""
    value = content.get(field)
    return names.each(rule, _under(path, field), value) if value else []


def needed(content: Object, path: str, *fields: str) -> list[Cause]:
    """Texts that may not be empty."""
    return [required_value(_under(path, field)) for field in fields if not content.get(field)]


def port_number(value: Any, path: str) -> list[Cause]:
    """A port by number."""
    return [] if 0 < (value or 0) < 65536 else [invalid_value(path, value or 0, PORT_TEXT)]


def port(value: Any, path: str) -> list[Cause]:
    """A port by number or by name."""
    if isinstance(value, str):
        return names.each(names.port_name, path, value)
    return port_number(value, path)


def quantity(amount: Any, path: str) -> list[Cause]:
    """A quantity that is not negative."""
    try:
        value = parse_quantity(amount)
    except QuantityError as error:
        return [invalid_value(path, str(amount), str(error))]
    return [] if value >= 0 else [invalid_value(path, str(amount), NOT_NEGATIVE)]


def count_or_percent(content: Object, path: str, field: str) -> list[Cause]:
    """A number from zero, or a percentage up to 100."""
    value, place = content.get(field), _under(path, field)
    if isinstance(value, str):
        if not re.fullmatch(r"[0-9]+%", value):
            return [invalid_value(place, value, PERCENT_TEXT)]
        is_over = whole_number(value[:-1], 0, 100) is None
        return [invalid_value(place, value, "must not be greater than 100%")] if is_over else []
    return not_negative(content, path, field)


def frozen(old: Object, new: Object, *paths: str) -> list[Cause]:
    """FieldValueInvalid for each of the paths that changed."""
    return [
        invalid_value(path, at(new, path), IMMUTABLE)
        for path in paths
        if at(old, path) != at(new, path)
    ]


def changed_fields(old: Object, new: Object) -> set[str]:
    """Fields of a part that differ; an empty value is no value."""
    return {
        name
        for name in old.keys() | new.keys()
        if old.get(name) != new.get(name) and (old.get(name) or new.get(name))
    }


def is_address(text: Any) -> bool:
    """True if text is an IP address."""
    try:
        ipaddress.ip_address(str(text))
    except ValueError:
        return False
    return True


def label_selector(selector: Object | None, path: str) -> list[Cause]:
    """matchLabels and matchExpressions."""
    if selector is None:
        return []
    causes = names.validate_labels(selector.get("matchLabels") or {}, f"{path}.matchLabels")
    for index, term in enumerate(selector.get("matchExpressions") or []):
        place = f"{path}.matchExpressions[{index}]"
        causes += _expression(term, place)
        causes += names.each(names.qualified_name, f"{place}.key", term.get("key") or "")
    return causes


def _expression(term: Object, place: str) -> list[Cause]:
    operator, values = term.get("operator") or "", term.get("values") or []
    if operator in ("In", "NotIn"):
        text = "must be specified when `operator` is 'In' or 'NotIn'"
        return [] if values else [required_value(f"{place}.values", text)]
    if operator in ("Exists", "DoesNotExist"):
        text = "may not be specified when `operator` is 'Exists' or 'DoesNotExist'"
        return [forbidden(f"{place}.values", text)] if values else []
    return [invalid_value(f"{place}.operator", operator, "not a valid selector operator")]


def node_expression(term: Object, place: str) -> list[Cause]:
    """One requirement of a node selector, which can also compare numbers."""
    values = term.get("values") or []
    if term.get("operator") in ("Gt", "Lt"):
        text = "must be specified single value when `operator` is 'Lt' or 'Gt'"
        causes = [] if len(values) == 1 else [required_value(f"{place}.values", text)]
    else:
        causes = _expression(term, place)
    return causes + names.each(names.qualified_name, f"{place}.key", term.get("key") or "")


def unique(values: Iterable[Any], path: str, inner: str = "") -> list[Cause]:
    """FieldValueDuplicate for each item that came before; what is empty may come again."""
    seen: list[Any] = []
    causes = []
    for index, value in enumerate(values):
        if value and value in seen:
            causes.append(duplicate(f"{path}[{index}]{inner}", value))
        seen.append(value)
    return causes
