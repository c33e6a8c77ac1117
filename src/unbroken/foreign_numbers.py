"""Reads numbers in text from outside: annotations, labels, query parameters, headers.

Python's `int` alone raises ValueError beyond 4,300 digits, and reads digits of all scripts, `_`,
signs and spaces. Text that `str.isdecimal` accepts may therefore still raise, or be no number for
the program that wrote it.
"""

from __future__ import annotations

import math
import re

INT32_MAX: int = 2**31 - 1
INT64_MAX: int = 2**63 - 1
INT64_MIN: int = -(2**63)
PORT_MAX: int = 65535
DIGITS_MAX: int = len(str(INT64_MAX))
"""Digits of a whole number, leading zeros included."""
_NUMBER = re.compile(r"[+-]?[0-9]{1,19}(\.[0-9]{0,19})?(e[+-]?[0-9]{1,3})?", re.IGNORECASE)
SHOWN_CHARACTERS: int = 40
"""Characters of a wrong value that an error repeats."""


def whole_number(text: str, least: int = 0, most: int = INT64_MAX) -> int | None:
    """Return the whole number that a text of ASCII digits holds; None: none from least to most.

    A sign is read only if numbers below 0 are allowed.
    """
    digits = text[1:] if least < 0 and text[:1] in ("+", "-") else text
    if not (digits.isascii() and digits.isdecimal() and len(digits) <= DIGITS_MAX):
        return None
    number = int(text)
    return number if least <= number <= most else None


def finite_number(text: str, least: float, most: float) -> float | None:
    """Return the number that a text holds, such as `0.5` or `1e-3`; None: none from least to most.

    The words `nan` and `inf` are no numbers.
    """
    number = float(text) if _NUMBER.fullmatch(text) else math.nan
    return number if math.isfinite(number) and least <= number <= most else None


def no_number(name: str, text: str, least: float, most: float) -> str:
    """Return the error about a text that holds no number of the range."""
    shown = text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."
    return f"{name}: {shown!r} is not a number from {least} to {most}"
