"""Rows and texts of the results of node tests.  Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

TITLES = ("NODE", "TEST", "OUTCOME", "MEASURED", "EXPECTED", "MESSAGE")
ORDER = {"fail": 0, "unknown": 1, "pass": 2, "skipped": 3}


def amount_text(result: Mapping[str, Any]) -> str:
    """The measured value with its unit; empty if nothing was measured."""
    return _number(result.get("measured"), str(result.get("unit", "")))


def expected_text(result: Mapping[str, Any]) -> str:
    """The limit for the measured value with its unit; empty if there is none."""
    return _number(result.get("expected"), str(result.get("unit", "")))


def _number(value: float | None, unit: str) -> str:
    return "" if value is None else f"{value:g} {unit}".rstrip()


def result_rows(results: Iterable[Mapping[str, Any]]) -> list[Sequence[str]]:
    """A row for each result, sorted by node, faults first."""
    listed = sorted(
        results, key=lambda item: (item["node"], ORDER.get(item["outcome"], len(ORDER)))
    )
    return [_row(item) for item in listed]


def _row(one: Mapping[str, Any]) -> Sequence[str]:
    peer = f" with {one['peer']}" if one.get("peer") else ""
    measured, expected = amount_text(one) or "-", expected_text(one) or "-"
    return (
        *(one["node"], f"{one['test']}{peer}", one["outcome"], measured, expected),
        one.get("message", ""),
    )
