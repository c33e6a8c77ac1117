"""Amounts of resources as Kubernetes writes them: `1500m`, `64Gi`, `2e3`.

The grammar, the bounds (nano to 2^63-1) and the canonical form follow apimachinery v1.33,
pkg/api/resource/quantity.go. Values read are rounded up to a nano unit. Values written keep the
family of their suffix.
"""

from __future__ import annotations

import re
from decimal import ROUND_UP, Context, Decimal
from functools import lru_cache

from unbroken.errors import SpecError

_EXACT = Context(prec=400, Emax=9999, Emin=-9999)
# A quantity has at most 19 digits before the point and 9 after it. A longer text was not written by
# a person, and would only cost time.
_TEXT_MAX = 100
_GRAMMAR = re.compile(r"([+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+))([eE][+-]?[0-9]{1,3}|[a-zA-Z]*)")
_NANO = Decimal("1e-9")
_MAX = Decimal(2**63 - 1)
_THOUSANDS = ("n", "u", "m", "", "k", "M", "G", "T", "P", "E")
_KIBI = ("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei")
_FACTORS = {suffix: Decimal(10) ** (3 * i - 9) for i, suffix in enumerate(_THOUSANDS)} | {
    suffix: Decimal(1024**i) for i, suffix in enumerate(_KIBI) if suffix
}


class QuantityError(SpecError):
    """Text that is no quantity; the text of the error is Kubernetes' own."""


def parse_quantity(value: str | int | float) -> Decimal:
    """Return the exact amount in units (cores, bytes); JSON numbers are accepted too.

    Raises QuantityError.
    """
    return _parse(str(value))[0]


def canonical_quantity(value: str | int | float) -> str:
    """Write a quantity as the API server writes it back: `0.5` -> `500m`, `1024Mi` -> `1Gi`.

    Raises QuantityError.
    """
    return _canonical(str(value))


@lru_cache(maxsize=4096)
def _parse(text: str) -> tuple[Decimal, str]:
    """Return amount and family of its suffix: decimal, binary or exponent."""
    match = _GRAMMAR.fullmatch(text) if len(text) <= _TEXT_MAX else None
    if match is None:
        raise QuantityError(
            "quantities must match the regular expression "
            "'^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'"
        )
    number, suffix = match.groups()
    if suffix in _FACTORS:
        family = "binary" if suffix in _KIBI[1:] else "decimal"
        factor = _FACTORS[suffix]
    elif suffix[:1] in "eE" and len(suffix) > 1 and suffix[1:].lstrip("+-").isdigit():
        family, factor = "exponent", _EXACT.power(Decimal(10), int(suffix[1:]))
    else:
        raise QuantityError("unable to parse quantity's suffix")
    amount = _EXACT.multiply(Decimal(number), factor)
    amount = max(-_MAX, min(_MAX, amount)).quantize(_NANO, ROUND_UP, _EXACT)
    if family == "binary" and 0 < amount < 1:
        family = "decimal"
    return amount, family


@lru_cache(maxsize=4096)
def _canonical(text: str) -> str:
    return _format(*_parse(text))


def _format(amount: Decimal, family: str) -> str:
    if amount == 0:
        return "0"
    if family == "binary" and abs(amount) >= 1024:
        whole, power = int(amount.to_integral_value(ROUND_UP)), 0
        while whole % 1024 == 0 and power < len(_KIBI) - 1:
            whole, power = whole // 1024, power + 1
        return f"{whole}{_KIBI[power]}"
    nanos, power = int(amount.scaleb(9, _EXACT).to_integral_value(ROUND_UP)), 0
    while nanos % 1000 == 0 and power < len(_THOUSANDS) - 1:
        nanos, power = nanos // 1000, power + 1
    exponent = 3 * power - 9
    if family == "exponent":
        return f"{nanos}e{exponent}" if exponent else str(nanos)
    return f"{nanos}{_THOUSANDS[power]}"
