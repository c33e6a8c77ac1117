"""Captured values: what is a number, what is bad, what is nothing."""

from __future__ import annotations

import math

import pytest

from tests.tables import cases
from unbroken.core.logs.values import Meter, read_value

NUMBERS = {
    "2.5": 2.5, " 120.5 ": 120.5, "1e3": 1000.0, "-0": 0.0, "1,234.5": 1234.5, "12,345": 12345.0,
    "42.1%": 42.1, "3.0,": 3.0, "'0.5'": 0.5, "inf": math.inf, "-Infinity": -math.inf,
}  # fmt: skip


@pytest.mark.parametrize(("text", "value"), NUMBERS.items())
def test_numbers(text: str, value: float) -> None:
    assert read_value(text) == value


@pytest.mark.parametrize("text", ["nan", "NaN", "-nan", "nan,", "-nan(ind)", "1.#QNAN", "-1.#IND"])
def test_not_a_number_in_all_its_spellings(text: str) -> None:
    assert math.isnan(read_value(text) or 0)


@pytest.mark.parametrize("text", ["", " ", "?", "--", "(", "..."])
def test_a_text_without_letters_and_digits_says_nothing(text: str) -> None:
    assert read_value(text) is None


@pytest.mark.parametrize("text", ["abc", "None", "1,23", "1.2.3", "12k", "nano", "0x10"])
def test_other_texts_are_no_numbers(text: str) -> None:
    with pytest.raises(ValueError, match="could not convert"):
        read_value(text)


A, B = (0, "stdout"), (1, "stdout")


@cases
def test_which_data_point_is_the_last_straw(rule: str, values: str, nth: int | None) -> None:
    comparison, threshold, points = rule.split()
    meter = Meter(comparison, float(threshold), int(points[1:]))
    found = [
        i
        for i, word in enumerate(values.split(), 1)
        if meter.add({"A": A, "B": B}[word[0]], word[1:])
    ]
    assert found == ([] if nth is None else [nth])


def test_slow_lasts_until_every_source_is_well() -> None:
    meter = Meter("gt", 2, 1)
    assert [meter.add(A, "3"), meter.add(B, "3"), meter.add(A, "1")] == [True, True, False]
    assert meter.is_slow
    meter.add(B, "1")
    assert not meter.is_slow
    assert meter.add(B, "5")


def test_what_cannot_be_read_is_counted() -> None:
    meter = Meter("gt", 2, 1)
    meter.add(A, "model")
    assert (meter.unreadable, meter.is_slow) == (1, False)
