"""The check that fails whole-cluster tests for errors in the cluster's log."""

from __future__ import annotations

import pytest

from tests.cluster_logs import errors

AT = "2026-11-21 08:00:00,000"


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (f"{AT} INFO a all is well\n", 0),
        (f'{AT} INFO a reason="rank 1: ERROR in Traceback (most recent call last)"\n', 0),
        (f"{AT} ERROR a job=x\nTraceback (most recent call last):\n  File\nKeyError: 1\n", 1),
        (f"{AT} INFO a\nTraceback (most recent call last):\nKeyError: 1\n{AT} ERROR b\n", 2),
        ("Traceback (most recent call last):\nKeyError: 1\n", 1),
        (f"{AT} INFO a\n  + Exception Group Traceback (most recent call last):\n", 1),
        (f"{AT} INFO a\nx.py:3: RuntimeWarning: coroutine 'f' was never awaited\n", 1),
    ],
)
def test_an_error_is_found_where_one_begins_an_entry(text: str, count: int) -> None:
    assert len(errors(text)) == count


def test_an_allowed_error_is_allowed_with_its_traceback_and_no_other() -> None:
    text = f"{AT} ERROR a job=x\nTraceback (most recent call last):\nKeyError\n{AT} ERROR b\n"
    assert errors(text, ["KeyError"]) == [f"{AT} ERROR b"]
