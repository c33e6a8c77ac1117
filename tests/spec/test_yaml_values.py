"""YAML that users write inside of fields: JSON's types, bounded, without aliases."""

from __future__ import annotations

from typing import Any

import pytest

from unbroken.errors import SpecError
from unbroken.spec.log_monitoring import yaml_value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None),
        ("a: 1\nday: 2026-01-01\n", {"a": 1, "day": "2026-01-01"}),
        ('["x", 1.5, null, true]', ["x", 1.5, None, True]),
    ],
)
def test_values_have_jsons_types(text: str, value: Any) -> None:
    assert yaml_value(text, 100) == value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [", "is not YAML: line 2, column 1"),
        ("a: !!python/object/apply:os.system [ls]", "is not YAML: line 1, column 4"),
        ("a: &a [x]\nb: *a\n", r"aliases \(\*name\)"),
        ("[" * 5000, "is not YAML"),
        ("{[1]: 2}", "is not YAML"),
        ("9" * 5000, "is not YAML"),
        ("\x00", "is not YAML"),
        ("x" * 10_001, "is longer than 10000 characters"),
    ],
)
def test_everything_else_is_refused_in_words(text: str, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        yaml_value(text, 10_000)
