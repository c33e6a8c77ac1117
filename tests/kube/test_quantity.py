"""Quantities: grammar, exact amounts, canonical text."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unbroken.kube.quantity import (
    QuantityError,
    canonical_quantity,
    parse_quantity,
)


@pytest.mark.parametrize(
    ("text", "amount", "canonical"),
    [
        ("0", "0", "0"),
        ("1", "1", "1"),
        (1, "1", "1"),
        (0.5, "0.5", "500m"),
        ("1500m", "1.5", "1500m"),
        ("0.1", "0.1", "100m"),
        (".5", "0.5", "500m"),
        ("5.", "5", "5"),
        ("+3", "3", "3"),
        ("-1.5", "-1.5", "-1500m"),
        ("1000", "1000", "1k"),
        ("12000m", "12", "12"),
        ("1024", "1024", "1024"),
        ("1024Mi", str(2**30), "1Gi"),
        ("0.5Gi", str(2**29), "512Mi"),
        ("0.5Ki", "512", "512"),
        ("0.3Gi", "322122547.2", "322122548"),
        ("1536Mi", str(1536 * 2**20), "1536Mi"),
        ("1000000Ki", "1024000000", "1000000Ki"),
        ("1e3", "1000", "1e3"),
        ("12E6", "12000000", "12e6"),
        ("1E", str(10**18), "1E"),
        ("0.0000000001", "0.000000001", "1n"),
        ("100E", str(2**63 - 1), "9223372036854775807"),
        ("1e999", str(2**63 - 1), "9223372036854775807"),
        ("1e-999", "0.000000001", "1e-9"),
    ],
)
def test_a_quantity_is_read_exactly_and_written_as_the_server_does(
    text: str | float, amount: str, canonical: str
) -> None:
    assert parse_quantity(text) == Decimal(amount)
    assert canonical_quantity(text) == canonical


@pytest.mark.parametrize(
    "text",
    ["", "m", "Gi", "1 Gi", "1gb", "0x10", "1.2.3", "--1", "1Gim", "1e", "1e+", "1K", "1" * 101],
)
def test_what_is_no_quantity_is_refused(text: str) -> None:
    with pytest.raises(QuantityError):
        parse_quantity(text)


@given(
    st.integers(-(10**6), 10**6),
    st.sampled_from(["n", "u", "m", "", "k", "M", "G", "Ki", "Mi", "Gi", "e3", "e-2"]),
)
def test_canonical_text_is_stable(number: int, suffix: str) -> None:
    canonical = canonical_quantity(f"{number}{suffix}")
    assert canonical_quantity(canonical) == canonical
    assert parse_quantity(canonical) == parse_quantity(f"{number}{suffix}")
